"""The kernels: what runs on the GPU. Launchers and plans are in the package above.

All tensors of a launch share one layout, seen as slabs of channels cut into tiles:

- channels outer (NCHW, NCDHW): a slab is one channel; a tile is BR images by BC neighbouring pixels;
- channels inner (NHWC, NDHWC, (N, C)): a slab is BC neighbouring channels; a tile is BR pixels by BC channels.

Reductions: P programs walk the tiles of a slab, p, p + P, p + 2P, …; each writes its partial result, and the last to arrive
merges all P in a fixed order, so the same input gives the same bits. Sums are float32. Offsets are int64.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_at(
    t,
    slab,
    rows,
    channels,
    pixels,
    row_stride,
    channel_stride,
    across,
    INNER: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    VEC: tl.constexpr,
):
    """Offsets and mask of tile t. ``across`` is the number of tiles in one image where channels are outer."""
    if INNER:
        r = tl.cast(t, tl.int64) * BR + tl.arange(0, BR)
        c = slab * BC + tl.arange(0, BC)
        offsets = r[:, None] * row_stride + c[None, :]
        inside = (r[:, None] < rows) & (c[None, :] < channels)
    else:
        r = tl.cast(t // across, tl.int64) * BR + tl.arange(0, BR)
        s = (t % across) * BC + tl.arange(0, BC)
        offsets = tl.cast(slab, tl.int64) * channel_stride + r[:, None] * row_stride + s[None, :]
        inside = (r[:, None] < rows) & (s[None, :] < pixels)
    return tl.multiple_of(offsets, [1, VEC]), inside


@triton.jit
def over_tile(v, INNER: tl.constexpr):
    """Per-channel values of a slab, shaped to broadcast against a tile; one channel is a scalar."""
    if INNER:
        return v[None, :]
    else:
        return tl.sum(v, 0)


@triton.jit
def channel_sum(v, INNER: tl.constexpr, W: tl.constexpr):
    """A tile's sums over each of the slab's W channels."""
    if INNER:
        return tl.sum(v, 0)
    else:
        return tl.zeros([W], tl.float32) + tl.sum(tl.sum(v, 1), 0)


@triton.jit
def is_last(count_ptr, P):
    """Whether all P programs of the slab have published; the last one resets the counter for the next launch."""
    tl.debug_barrier()
    arrived = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
    last = arrived == P - 1
    if last:
        tl.atomic_xchg(count_ptr, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def guarded(weight_ptr, c, inside, floor, HAS_WEIGHT: tl.constexpr, W: tl.constexpr):
    """γ = copysign(max(|weight|, floor), weight); 1 without a weight."""
    if HAS_WEIGHT:
        w = tl.load(weight_ptr + c, mask=inside, other=1.0).to(tl.float32)
        # The comparison lets a NaN through, where a maximum would hide it; the sign bit tells −0 from 0.
        size = tl.where(tl.abs(w) < floor, floor, tl.abs(w))
        return tl.where(w.to(tl.int32, bitcast=True) < 0, -size, size)
    else:
        return tl.zeros([W], tl.float32) + 1.0


@triton.jit
def shifted_by(bias_ptr, c, inside, HAS_BIAS: tl.constexpr, W: tl.constexpr):
    """β; 0 without a bias."""
    if HAS_BIAS:
        return tl.load(bias_ptr + c, mask=inside, other=0.0).to(tl.float32)
    else:
        return tl.zeros([W], tl.float32)


@triton.jit
def partial_moments(base, k, P, anchor, W: tl.constexpr):
    """Of the programs k of a slab: count, mean about the anchor, and sum of squared deviations; 0 past the last."""
    q = base + k[:, None] * 4 * W
    here = (k < P)[:, None]
    n_k = tl.load(q, mask=here, other=0.0, volatile=True)
    # A program's mean is shift + off, kept apart: a large mean costs no digits.
    shift_k = tl.load(q + W, mask=here, other=0.0, volatile=True)
    off_k = tl.load(q + 2 * W, mask=here, other=0.0, volatile=True)
    return n_k, (shift_k - anchor[None, :]) + off_k, tl.load(q + 3 * W, mask=here, other=0.0, volatile=True)


@triton.jit
def move(running_ptr, c, known, batch, newest):
    """running ← running + newest·(batch − running)."""
    was = tl.load(running_ptr + c, mask=known, other=0.0).to(tl.float32)
    tl.store(running_ptr + c, (was + newest * (batch - was)).to(running_ptr.dtype.element_ty), mask=known)


@triton.jit
def moments_kernel(
    x_ptr, mean_ptr, var_ptr, invstd_ptr, running_mean_ptr, running_var_ptr, tracked_ptr, partial_ptr, count_ptr,
    rows, channels, pixels, row_stride, channel_stride, across, tiles, P, momentum, eps,
    TRACK: tl.constexpr, CUMULATIVE: tl.constexpr, INNER: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, VEC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """mean = ∑x/m, var = ∑(x − mean)²/m, invstd = 1/√(var + eps); running ← running + momentum·(batch − running).

    Grid: slabs·P. Each program sums about the mean of its own first tile; the last of a slab merges by Chan's formula.
    Bytes: x read once.
    """
    slab = tl.program_id(0) // P
    p = tl.program_id(0) % P
    offsets, inside = tile_at(p, slab, rows, channels, pixels, row_stride, channel_stride, across, INNER, BR, BC, VEC)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    shift = channel_sum(x, INNER, W) / tl.maximum(channel_sum(inside.to(tl.float32), INNER, W), 1.0)
    n = tl.zeros([BR, BC], tl.float32)
    first = tl.zeros([BR, BC], tl.float32)
    second = tl.zeros([BR, BC], tl.float32)
    for t in tl.range(p, tiles, P, num_stages=3):
        offsets, inside = tile_at(
            t, slab, rows, channels, pixels, row_stride, channel_stride, across, INNER, BR, BC, VEC
        )
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        d = tl.where(inside, x - over_tile(shift, INNER), 0.0)
        n += inside.to(tl.float32)
        first += d
        second += d * d
    count = channel_sum(n, INNER, W)
    off = channel_sum(first, INNER, W) / tl.maximum(count, 1.0)
    m2 = tl.maximum(channel_sum(second, INNER, W) - count * off * off, 0.0)
    i = tl.arange(0, W)
    own = partial_ptr + (tl.cast(slab, tl.int64) * P + p) * 4 * W + i
    tl.store(own, count)
    tl.store(own + W, shift)
    tl.store(own + 2 * W, off)
    tl.store(own + 3 * W, m2)
    if is_last(count_ptr + slab, P):
        k = tl.arange(0, BP)
        base = partial_ptr + tl.cast(slab, tl.int64) * P * 4 * W
        anchor = tl.load(base + W + i, volatile=True)
        total = tl.zeros([W], tl.float32)
        drift = tl.zeros([W], tl.float32)
        for k0 in range(0, P, BP):
            n_k, mean_k, _ = partial_moments(base + i[None, :], k0 + k, P, anchor, W)
            total += tl.sum(n_k, 0)
            drift += tl.sum(n_k * mean_k, 0)
        m = tl.maximum(total, 1.0)
        drift = drift / m
        mean = anchor + drift
        spread = tl.zeros([W], tl.float32)
        for k0 in range(0, P, BP):
            n_k, mean_k, m2_k = partial_moments(base + i[None, :], k0 + k, P, anchor, W)
            d_k = mean_k - drift[None, :]
            spread += tl.sum(m2_k + n_k * d_k * d_k, 0)
        var = spread / m
        c = slab * W + i
        known = c < channels
        tl.store(mean_ptr + c, mean, mask=known)
        tl.store(var_ptr + c, var, mask=known)
        tl.store(invstd_ptr + c, 1.0 / tl.sqrt(var + eps), mask=known)
        if TRACK:
            newest = momentum
            if CUMULATIVE:
                # Moved later, by transform_kernel, when every slab has read it.
                newest = 1.0 / (tl.load(tracked_ptr) + 1).to(tl.float32)
            move(running_mean_ptr, c, known, mean, newest)
            move(running_var_ptr, c, known, var * (m / tl.maximum(m - 1.0, 1.0)), newest)


@triton.jit
def transform_kernel(
    x_ptr, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, tracked_ptr,
    rows, channels, pixels, row_stride, channel_stride, across, tiles, floor, a,
    COUNTED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, PHI: tl.constexpr, INNER: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """z = φ(γ·(x − mean)·invstd + β), over x; num_batches_tracked ← num_batches_tracked + 1.

    Grid: slabs·tiles, one tile each. Bytes: x read and written once.
    """
    slab = tl.program_id(0) // tiles
    t = tl.program_id(0) % tiles
    c = slab * W + tl.arange(0, W)
    known = c < channels
    mean = tl.load(mean_ptr + c, mask=known, other=0.0).to(tl.float32)
    scale = guarded(weight_ptr, c, known, floor, HAS_WEIGHT, W) * tl.load(invstd_ptr + c, mask=known, other=0.0).to(
        tl.float32
    )
    beta = shifted_by(bias_ptr, c, known, HAS_BIAS, W)
    offsets, inside = tile_at(t, slab, rows, channels, pixels, row_stride, channel_stride, across, INNER, BR, BC, VEC)
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    y = (x - over_tile(mean, INNER)) * over_tile(scale, INNER) + over_tile(beta, INNER)
    tl.store(x_ptr + offsets, PHI(y, a).to(x_ptr.dtype.element_ty), mask=inside)
    if COUNTED and tl.program_id(0) == 0:
        tl.store(tracked_ptr, tl.load(tracked_ptr) + 1)


@triton.jit
def sums_kernel(
    dz_ptr, z_ptr, weight_ptr, bias_ptr, sum_dy_ptr, sum_dy_xhat_ptr, partial_ptr, count_ptr,
    rows, channels, pixels, row_stride, channel_stride, across, tiles, P, floor, a,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, INVERSE: tl.constexpr, BACKWARD: tl.constexpr,
    VARIANT_I: tl.constexpr, INNER: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, VEC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """∑ dy and ∑ dy·x̂, with dy = φ′·dz; x̂ = (y − β)/γ per element (I) or once per channel (II).

    Grid: slabs·P, reduced as in moments_kernel. Bytes: z and dz read once.
    """
    slab = tl.program_id(0) // P
    p = tl.program_id(0) % P
    i = tl.arange(0, W)
    c = slab * W + i
    known = c < channels
    gamma = guarded(weight_ptr, c, known, floor, HAS_WEIGHT, W)
    beta = shifted_by(bias_ptr, c, known, HAS_BIAS, W)
    one = tl.zeros([BR, BC], tl.float32)
    other = tl.zeros([BR, BC], tl.float32)
    for t in tl.range(p, tiles, P, num_stages=3):
        offsets, inside = tile_at(
            t, slab, rows, channels, pixels, row_stride, channel_stride, across, INNER, BR, BC, VEC
        )
        z = tl.load(z_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        dy = BACKWARD(tl.load(dz_ptr + offsets, mask=inside, other=0.0).to(tl.float32), z, a)
        centred = INVERSE(z, a) - over_tile(beta, INNER)
        if VARIANT_I:
            centred = centred / over_tile(gamma, INNER)
        one += tl.where(inside, dy, 0.0)
        other += tl.where(inside, dy * centred, 0.0)
    own = partial_ptr + (tl.cast(slab, tl.int64) * P + p) * 2 * W + i
    tl.store(own, channel_sum(one, INNER, W))
    tl.store(own + W, channel_sum(other, INNER, W))
    if is_last(count_ptr + slab, P):
        k = tl.arange(0, BP)
        base = partial_ptr + tl.cast(slab, tl.int64) * P * 2 * W + i[None, :]
        sum_dy = tl.zeros([W], tl.float32)
        sum_dy_xhat = tl.zeros([W], tl.float32)
        for k0 in range(0, P, BP):
            q = base + (k0 + k)[:, None] * 2 * W
            here = ((k0 + k) < P)[:, None]
            sum_dy += tl.sum(tl.load(q, mask=here, other=0.0, volatile=True), 0)
            sum_dy_xhat += tl.sum(tl.load(q + W, mask=here, other=0.0, volatile=True), 0)
        if not VARIANT_I:
            sum_dy_xhat = sum_dy_xhat / gamma
        tl.store(sum_dy_ptr + c, sum_dy, mask=known)
        tl.store(sum_dy_xhat_ptr + c, sum_dy_xhat, mask=known)


@triton.jit
def input_grad_kernel(
    dz_ptr, z_ptr, dx_ptr, weight_ptr, bias_ptr, invstd_ptr, sum_dy_ptr, sum_dy_xhat_ptr,
    rows, channels, pixels, row_stride, channel_stride, across, tiles, count, floor, a,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, INVERSE: tl.constexpr, BACKWARD: tl.constexpr,
    FIXED: tl.constexpr, VARIANT_I: tl.constexpr, INNER: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """dx = a·dy + b·(y − β) + c (II), (dy − x̂·dγ/m − dβ/m)·γ·invstd (I), γ·invstd·dy with fixed statistics.

    Grid: slabs·tiles, one tile each. Bytes: z and dz read once, dx written once.
    """
    slab = tl.program_id(0) // tiles
    t = tl.program_id(0) % tiles
    c = slab * W + tl.arange(0, W)
    known = c < channels
    gamma = guarded(weight_ptr, c, known, floor, HAS_WEIGHT, W)
    scale = gamma * tl.load(invstd_ptr + c, mask=known, other=0.0).to(tl.float32)
    offsets, inside = tile_at(t, slab, rows, channels, pixels, row_stride, channel_stride, across, INNER, BR, BC, VEC)
    z = tl.load(z_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    dy = BACKWARD(tl.load(dz_ptr + offsets, mask=inside, other=0.0).to(tl.float32), z, a)
    dx = dy * over_tile(scale, INNER)
    if not FIXED:
        constant = -scale * tl.load(sum_dy_ptr + c, mask=known, other=0.0) / count
        slope = -scale * tl.load(sum_dy_xhat_ptr + c, mask=known, other=0.0) / count
        centred = INVERSE(z, a) - over_tile(shifted_by(bias_ptr, c, known, HAS_BIAS, W), INNER)
        if VARIANT_I:
            centred = centred / over_tile(gamma, INNER)
        else:
            slope = slope / gamma
        dx += centred * over_tile(slope, INNER) + over_tile(constant, INNER)
    tl.store(dx_ptr + offsets, dx.to(dx_ptr.dtype.element_ty), mask=inside)
