"""The kernels: what runs on the GPU. Launchers and plans are in the package above.

All tensors of a launch share one layout, seen as slabs of channels:

- channels outer (NCHW, NCDHW): a slab is one channel; a tile is BR images by BC neighbouring pixels, walked along the pixels
  in vectors of V that are aligned in memory. Where rows start anywhere (97×97), the few elements before the first and behind
  the last whole vector of a row are its edges, and are handled apart;
- channels inner (NHWC, NDHWC, (N, C)): a slab is W = BC neighbouring channels; a tile is BR pixels by BC channels, walked along
  the pixels;
- channels outer with few pixels (7×7): a slab is W neighbouring channels, whose W·pixels elements lie in a row; a tile is BR
  images by the BC > W elements that this is rounded up to, walked along the images as if the elements were channels inner. Sums
  of elements are folded into those of channels, and what a channel has is spread over its elements.

A slab is the work of S members, each with a run of up to ``per`` tiles in one of ``blocks`` blocks of rows. Members add up
their share, and the S partial results are added in one fixed order, so the same input gives the same bits. Sums are float32,
offsets int64.

How members of a slab find each other's results within one launch: every word they exchange is 64 bits, a float32 below and a
stamp above that no earlier round has used. A reader polls until the stamp is right; nothing has to be reset, and no fence is
needed because a word is written at once. Polling is bounded, and ends in a trap: an error, never a wrong result or a hang.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Some seconds.
PATIENCE = tl.constexpr(1 << 22)
# Of a launch's word: bits in which programs are counted that have finished, and what the epoch above them counts for.
COUNT_BITS = tl.constexpr(20)
EPOCH = tl.constexpr(1 << COUNT_BITS.value)


@triton.jit
def walk(
    slab, member, chunks, per, rows, pixels, row_stride, channel_stride, across,
    INNER: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, V: tl.constexpr, EDGES: tl.constexpr,
):  # fmt: skip
    """Where a member's first tile lies, and how far it goes.

    Returns offsets; position and limit, such that what is inside of tile k has position + k·(BC or BR) ≤ limit; the number
    of tiles; the offset from one tile to the next. Channels outer: one line per vector, V long. Inner: BR lines, BC long.
    """
    block = member // chunks
    first = member % chunks * per
    tiles = tl.minimum(per, across - first)
    if INNER:
        r = first * BR + tl.arange(0, BR)
        e = slab * (W * pixels) + tl.arange(0, BC)
        offsets = r[:, None].to(tl.int64) * row_stride + e[None, :]
        return tl.multiple_of(offsets, [1, V]), (r + 1)[:, None], rows, tiles, tl.cast(row_stride, tl.int64) * BR
    else:
        line = tl.arange(0, BR * BC // V)
        r = block * BR + line // (BC // V)
        s = first * BC + line % (BC // V) * V
        start = tl.cast(slab, tl.int64) * channel_stride + r.to(tl.int64) * row_stride
        limit = tl.where(r < rows, pixels, 0)
        if EDGES:
            head = ((V - start % V) % V).to(tl.int32)
            start += head
            limit -= head
        offsets = (start + s)[:, None] + tl.arange(0, V)[None, :]
        return tl.multiple_of(offsets, [1, V]), (s + V)[:, None], limit[:, None], tiles, tl.cast(BC, tl.int64)


@triton.jit
def is_inside(
    k, position, limit, slab, channels, pixels,
    INNER: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, V: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Mask of a member's tile k, constant along vectors."""
    if INNER:
        inside = position + k * BR <= limit
        e = tl.arange(0, BC) // V * V
        if W < BC:
            inside = inside & (e < W * pixels)[None, :]
        if not WHOLE:
            inside = inside & (slab * (W * pixels) + e < channels * pixels)[None, :]
        return inside
    else:
        return position + k * BC <= limit


@triton.jit
def edges_at(slab, block, rows, pixels, row_stride, channel_stride, BR: tl.constexpr, V: tl.constexpr):
    """Offsets and mask of the elements of a block's rows that lie in no whole vector: V columns before, V behind."""
    r = block * BR + tl.arange(0, BR)
    start = tl.cast(slab, tl.int64) * channel_stride + r.to(tl.int64) * row_stride
    head = ((V - start % V) % V).to(tl.int32)
    behind = head + tl.maximum(pixels - head, 0) // V * V
    i = tl.arange(0, 2 * V)[None, :]
    s = tl.where(i < V, i, behind[:, None] + i - V)
    inside = (r < rows)[:, None] & (s < pixels) & ((i >= V) | (s < head[:, None]))
    return start[:, None] + s, inside


@triton.jit
def by_line(v, INNER: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, U: tl.constexpr):
    """A tile's sums that need no other thread: over its vectors, or over the U rows that a thread holds."""
    if INNER:
        return tl.sum(tl.reshape(v, [U, BR // U, BC]), 0)
    else:
        return tl.sum(v, 1)


@triton.jit
def no_lines(INNER: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, V: tl.constexpr, U: tl.constexpr):
    """What :func:`by_line` adds to."""
    if INNER:
        return tl.zeros([BR // U, BC], tl.float32)
    else:
        return tl.zeros([BR * BC // V], tl.float32)


@triton.jit
def plus(a, b, c, d):
    """Pairs, added."""
    return a + c, b + d


@triton.jit
def over_lines(a, b, pixels, INNER: tl.constexpr, BC: tl.constexpr, W: tl.constexpr):
    """Two sums over all lines, per channel of the slab."""
    a, b = tl.reduce((a, b), 0, plus)
    if INNER:
        if W < BC:
            own = tl.arange(0, W)[:, None] == (tl.arange(0, BC) // pixels)[None, :]
            return tl.sum(tl.where(own, a[None, :], 0.0), 1), tl.sum(tl.where(own, b[None, :], 0.0), 1)
        else:
            return a, b
    else:
        return tl.zeros([1], tl.float32) + a, tl.zeros([1], tl.float32) + b


@triton.jit
def over_tile(v, pixels, INNER: tl.constexpr, BC: tl.constexpr, W: tl.constexpr):
    """Per-channel values of a slab, shaped to broadcast against a tile; one channel is a scalar."""
    if INNER:
        if W < BC:
            # Behind the last channel nothing is read.
            v = tl.gather(v, tl.minimum(tl.arange(0, BC) // pixels, W - 1), 0)
        return v[None, :]
    else:
        return tl.sum(v, 0)


@triton.jit
def guarded(weight_ptr, c, known, floor, HAS_WEIGHT: tl.constexpr, W: tl.constexpr):
    """γ = copysign(max(|weight|, floor), weight); 1 without a weight."""
    if HAS_WEIGHT:
        w = tl.load(weight_ptr + c, mask=known, other=1.0).to(tl.float32)
        # The comparison lets a NaN through, where a maximum would hide it; the sign bit tells −0 from 0.
        size = tl.where(tl.abs(w) < floor, floor, tl.abs(w))
        return tl.where(w.to(tl.int32, bitcast=True) < 0, -size, size)
    else:
        return tl.zeros([W], tl.float32) + 1.0


@triton.jit
def shifted_by(bias_ptr, c, known, HAS_BIAS: tl.constexpr, W: tl.constexpr):
    """β; 0 without a bias."""
    if HAS_BIAS:
        return tl.load(bias_ptr + c, mask=known, other=0.0).to(tl.float32)
    else:
        return tl.zeros([W], tl.float32)


@triton.jit
def median(p, q, r):
    """The middle one of three."""
    return tl.maximum(tl.minimum(p, q), tl.minimum(tl.maximum(p, q), r))


@triton.jit
def part(n, i: tl.constexpr):
    """⌊n·(2·i + 1)/18⌋, for which n·(2·i + 1) need not fit into 32 bits."""
    return n // 18 * (2 * i + 1) + n % 18 * (2 * i + 1) // 18


@triton.jit
def stepped(n, i: tl.constexpr):
    """About as much, and less than n, in equal steps: fewer instructions, but in a loop the compiler keeps nine of them."""
    return tl.minimum(n // 18 + i * tl.maximum(n // 9, 1), n - 1)


@triton.jit
def sampled(at, known, i: tl.constexpr, rows, pixels, row_stride, PART: tl.constexpr):
    """Element i of nine: rows in their order, pixels in another."""
    at += tl.cast(PART(rows, i), tl.int64) * row_stride + PART(pixels, 4 * i % 9)
    return tl.load(at, mask=known, other=0.0).to(tl.float32)


@triton.jit
def samples(x_ptr, c, known, rows, pixels, row_stride, channel_stride, PART: tl.constexpr):
    """Nine elements of every channel, which lie apart and off the borders."""
    at = x_ptr + c.to(tl.int64) * channel_stride
    nine = ()
    for i in tl.static_range(9):
        nine = nine + (sampled(at, known, i, rows, pixels, row_stride, PART),)
    return nine


@triton.jit
def one_of(nine):
    """What moments are taken about: one of nine samples of every channel.

    var = ∑(x − k)²/m − (∑(x − k)/m)² costs digits only where k is far from the mean, by a share of about u·(k − mean)²/var. The
    median of three medians is an outlier only if four of the nine are. Outliers that make up a share p of a channel set var
    themselves, and then the error is about u/p: for 10⁻³ it takes p < 10⁻⁴, and four of nine at once.
    """
    return median(
        median(nine[0], nine[1], nine[2]), median(nine[3], nine[4], nine[5]), median(nine[6], nine[7], nine[8])
    )


@triton.jit
def sample(x_ptr, c, known, rows, pixels, row_stride, channel_stride):
    """One of nine elements of every channel."""
    return one_of(samples(x_ptr, c, known, rows, pixels, row_stride, channel_stride, part))


@triton.jit
def add_moments(
    x_ptr, k, slab, member, chunks, per, rows, channels, pixels, row_stride, channel_stride, across,
    INNER: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, V: tl.constexpr, U: tl.constexpr,
    EDGES: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A member's ∑(x − k) and ∑(x − k)² of every channel of the slab."""
    offsets, position, limit, tiles, step = walk(
        slab, member, chunks, per, rows, pixels, row_stride, channel_stride, across, INNER, BR, BC, W, V, EDGES
    )
    about = over_tile(k, pixels, INNER, BC, W)
    # k is an element, so it survives this; and what is masked deviates by nothing.
    missing = about.to(x_ptr.dtype.element_ty)
    first = no_lines(INNER, BR, BC, V, U)
    second = no_lines(INNER, BR, BC, V, U)
    for t in tl.range(tiles, num_stages=STAGES):
        inside = is_inside(t, position, limit, slab, channels, pixels, INNER, BR, BC, W, V, WHOLE)
        x = tl.load(x_ptr + (offsets + t * step), mask=inside, other=missing, eviction_policy="evict_last")
        d = x.to(tl.float32) - about
        first += by_line(d, INNER, BR, BC, U)
        second += by_line(d * d, INNER, BR, BC, U)
    first, second = over_lines(first, second, pixels, INNER, BC, W)
    if EDGES:
        # The first of a block looks after its edges.
        if member % chunks == 0:
            edge, there = edges_at(slab, member // chunks, rows, pixels, row_stride, channel_stride, BR, V)
            e = tl.load(x_ptr + edge, mask=there, other=missing).to(tl.float32) - about
            first += tl.sum(tl.sum(e, 1), 0)
            second += tl.sum(tl.sum(e * e, 1), 0)
    return first, second


@triton.jit
def moments_from(k, first, second, m):
    """Mean and biased variance from ∑(x − k) and ∑(x − k)²."""
    off = first / m
    # A maximum would hide a NaN.
    var = second / m - off * off
    return k + off, tl.where(var < 0.0, 0.0, var)


@triton.jit
def z_of(x, r, mean, scale, beta, a, RESIDUAL: tl.constexpr, PHI: tl.constexpr):
    """φ(scale·(x − mean) + β [+ r]) of a tile."""
    y = (x.to(tl.float32) - mean) * scale + beta
    if RESIDUAL:
        y += r.to(tl.float32)
    return PHI(y, a)


@triton.jit
def transform(
    x_ptr, r_ptr, z_ptr, mean, scale, beta, a, slab, member, chunks, per,
    rows, channels, pixels, row_stride, channel_stride, across,
    RESIDUAL: tl.constexpr, PHI: tl.constexpr, INNER: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    W: tl.constexpr, V: tl.constexpr, EDGES: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """z = φ((x − mean)·scale + β [+ r]) over a member's share of x, last tile first: that was read last. z may be x."""
    offsets, position, limit, tiles, step = walk(
        slab, member, chunks, per, rows, pixels, row_stride, channel_stride, across, INNER, BR, BC, W, V, EDGES
    )
    mean = over_tile(mean, pixels, INNER, BC, W)
    scale = over_tile(scale, pixels, INNER, BC, W)
    beta = over_tile(beta, pixels, INNER, BC, W)
    for i in tl.range(tiles, num_stages=STAGES):
        t = tiles - 1 - i
        inside = is_inside(t, position, limit, slab, channels, pixels, INNER, BR, BC, W, V, WHOLE)
        at = offsets + t * step
        x = tl.load(x_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")
        r = tl.load(r_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first") if RESIDUAL else x
        z = z_of(x, r, mean, scale, beta, a, RESIDUAL, PHI)
        tl.store(z_ptr + at, z.to(z_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")
    if EDGES:
        # The first of a block looks after its edges.
        if member % chunks == 0:
            edge, there = edges_at(slab, member // chunks, rows, pixels, row_stride, channel_stride, BR, V)
            e = tl.load(x_ptr + edge, mask=there, other=0.0)
            e_r = tl.load(r_ptr + edge, mask=there, other=0.0) if RESIDUAL else e
            e_z = z_of(e, e_r, mean, scale, beta, a, RESIDUAL, PHI)
            tl.store(z_ptr + edge, e_z.to(z_ptr.dtype.element_ty), mask=there)


@triton.jit
def recovered(
    z, dz, r, mean, invstd, gamma, beta, a,
    RESIDUAL: tl.constexpr, FROM_X: tl.constexpr, HAT: tl.constexpr,
    INVERSE: tl.constexpr, BACKWARD: tl.constexpr, VARIANT_I: tl.constexpr,
):  # fmt: skip
    """dy, and x̂ = (y − β)/γ (I) or y − β (II), with y = φ⁻¹(z) [− r].

    FROM_X: z is x itself, or x̂ (HAT); y is computed as forward does, and what is returned is x̂ in any case. Then INVERSE is what
    BACKWARD wants of y: φ, or nothing where φ cannot be inverted and is differentiated from y.
    """
    z = z.to(tl.float32)
    if FROM_X:
        centred = z if HAT else z - mean
        y = centred * gamma + beta if HAT else centred * (gamma * invstd) + beta
        if RESIDUAL:
            y += r.to(tl.float32)
        return BACKWARD(dz.to(tl.float32), INVERSE(y, a), a), centred if HAT else centred * invstd
    else:
        centred = INVERSE(z, a) - beta
        if RESIDUAL:
            centred -= r.to(tl.float32)
        if VARIANT_I:
            centred = centred / gamma
        return BACKWARD(dz.to(tl.float32), z, a), centred


@triton.jit
def dx_of(
    z, dz, r, mean, invstd, gamma, beta, scale, slope, constant, a,
    RESIDUAL: tl.constexpr, FROM_X: tl.constexpr, HAT: tl.constexpr,
    INVERSE: tl.constexpr, BACKWARD: tl.constexpr, VARIANT_I: tl.constexpr, FIXED: tl.constexpr = False,
):  # fmt: skip
    """dx = scale·dy + slope·(x̂ or y − β) + constant of a tile, where statistics are FIXED its first term; and dy."""
    dy, centred = recovered(z, dz, r, mean, invstd, gamma, beta, a, RESIDUAL, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I)
    return dy * scale if FIXED else dy * scale + (centred * slope + constant), dy


@triton.jit
def add_gradients(
    dz_ptr, z_ptr, r_ptr, mean, invstd, gamma, beta, a, slab, member, chunks, per,
    rows, channels, pixels, row_stride, channel_stride, across,
    RESIDUAL: tl.constexpr, FROM_X: tl.constexpr, HAT: tl.constexpr,
    INVERSE: tl.constexpr, BACKWARD: tl.constexpr, VARIANT_I: tl.constexpr,
    INNER: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, V: tl.constexpr, U: tl.constexpr,
    EDGES: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A member's ∑ dy and ∑ dy·x̂ (I) or ∑ dy·(y − β) (II)."""
    offsets, position, limit, tiles, step = walk(
        slab, member, chunks, per, rows, pixels, row_stride, channel_stride, across, INNER, BR, BC, W, V, EDGES
    )
    mean = over_tile(mean, pixels, INNER, BC, W)
    invstd = over_tile(invstd, pixels, INNER, BC, W)
    gamma = over_tile(gamma, pixels, INNER, BC, W)
    beta = over_tile(beta, pixels, INNER, BC, W)
    one = no_lines(INNER, BR, BC, V, U)
    other = no_lines(INNER, BR, BC, V, U)
    for t in tl.range(tiles, num_stages=STAGES):
        inside = is_inside(t, position, limit, slab, channels, pixels, INNER, BR, BC, W, V, WHOLE)
        at = offsets + t * step
        z = tl.load(z_ptr + at, mask=inside, other=0.0, eviction_policy="evict_last")
        # dz = 0 outside, and with it dy.
        dz = tl.load(dz_ptr + at, mask=inside, other=0.0, eviction_policy="evict_last")
        r = tl.load(r_ptr + at, mask=inside, other=0.0) if RESIDUAL else z
        dy, centred = recovered(
            z, dz, r, mean, invstd, gamma, beta, a, RESIDUAL, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I
        )
        one += by_line(dy, INNER, BR, BC, U)
        other += by_line(dy * centred, INNER, BR, BC, U)
    one, other = over_lines(one, other, pixels, INNER, BC, W)
    if EDGES:
        # The first of a block looks after its edges.
        if member % chunks == 0:
            edge, there = edges_at(slab, member // chunks, rows, pixels, row_stride, channel_stride, BR, V)
            e_z = tl.load(z_ptr + edge, mask=there, other=0.0)
            e_dz = tl.load(dz_ptr + edge, mask=there, other=0.0)
            e_r = tl.load(r_ptr + edge, mask=there, other=0.0) if RESIDUAL else e_z
            e_dy, e_centred = recovered(
                e_z, e_dz, e_r, mean, invstd, gamma, beta, a, RESIDUAL, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I
            )
            one += tl.sum(tl.sum(e_dy, 1), 0)
            other += tl.sum(tl.sum(e_dy * e_centred, 1), 0)
    return one, other


@triton.jit
def gradient(
    dz_ptr, z_ptr, r_ptr, dx_ptr, dr_ptr, mean, invstd, gamma, beta, scale, slope, constant, a, slab, member, chunks, per,
    rows, channels, pixels, row_stride, channel_stride, across,
    RESIDUAL: tl.constexpr, NEED_R: tl.constexpr, FROM_X: tl.constexpr, HAT: tl.constexpr,
    INVERSE: tl.constexpr, BACKWARD: tl.constexpr, VARIANT_I: tl.constexpr, FIXED: tl.constexpr,
    INNER: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
    EDGES: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx over a member's share, last tile first; and dr = dy if needed."""
    offsets, position, limit, tiles, step = walk(
        slab, member, chunks, per, rows, pixels, row_stride, channel_stride, across, INNER, BR, BC, W, V, EDGES
    )
    mean = over_tile(mean, pixels, INNER, BC, W)
    invstd = over_tile(invstd, pixels, INNER, BC, W)
    gamma = over_tile(gamma, pixels, INNER, BC, W)
    beta = over_tile(beta, pixels, INNER, BC, W)
    scale = over_tile(scale, pixels, INNER, BC, W)
    slope = over_tile(slope, pixels, INNER, BC, W)
    constant = over_tile(constant, pixels, INNER, BC, W)
    for i in tl.range(tiles, num_stages=STAGES):
        t = tiles - 1 - i
        inside = is_inside(t, position, limit, slab, channels, pixels, INNER, BR, BC, W, V, WHOLE)
        at = offsets + t * step
        z = tl.load(z_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")
        dz = tl.load(dz_ptr + at, mask=inside, other=0.0, eviction_policy="evict_first")
        r = tl.load(r_ptr + at, mask=inside, other=0.0) if RESIDUAL else z
        dx, dy = dx_of(
            z, dz, r, mean, invstd, gamma, beta, scale, slope, constant, a,
            RESIDUAL, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I, FIXED,
        )  # fmt: skip
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")
        if NEED_R:
            tl.store(dr_ptr + at, dy.to(dr_ptr.dtype.element_ty), mask=inside, eviction_policy="evict_first")
    if EDGES:
        # The first of a block looks after its edges.
        if member % chunks == 0:
            edge, there = edges_at(slab, member // chunks, rows, pixels, row_stride, channel_stride, BR, V)
            e_z = tl.load(z_ptr + edge, mask=there, other=0.0)
            e_dz = tl.load(dz_ptr + edge, mask=there, other=0.0)
            e_r = tl.load(r_ptr + edge, mask=there, other=0.0) if RESIDUAL else e_z
            e_dx, e_dy = dx_of(
                e_z, e_dz, e_r, mean, invstd, gamma, beta, scale, slope, constant, a,
                RESIDUAL, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I, FIXED,
            )  # fmt: skip
            tl.store(dx_ptr + edge, e_dx.to(dx_ptr.dtype.element_ty), mask=there)
            if NEED_R:
                tl.store(dr_ptr + edge, e_dy.to(dr_ptr.dtype.element_ty), mask=there)


@triton.jit
def coefficients(sum_dy, sum_dy_xhat, gamma, invstd, m, VARIANT_I: tl.constexpr):
    """Scale, slope and constant of :func:`dx_of`."""
    scale = gamma * invstd
    slope = -scale * sum_dy_xhat / m
    if not VARIANT_I:
        slope = slope / gamma
    return scale, slope, -scale * sum_dy / m


@triton.jit
def tracked(running_mean_ptr, running_var_ptr, tracked_ptr, c, known, momentum, CUMULATIVE: tl.constexpr):
    """What :func:`track` wants to know, to be loaded early: the running statistics, and what the newest batch counts for."""
    newest = momentum
    if CUMULATIVE:
        newest = 1.0 / (tl.load(tracked_ptr) + 1).to(tl.float32)
    mean = tl.load(running_mean_ptr + c, mask=known, other=0.0).to(tl.float32)
    var = tl.load(running_var_ptr + c, mask=known, other=0.0).to(tl.float32)
    return mean, var, newest


@triton.jit
def move(running_ptr, c, known, was, batch, newest):
    """running ← running + newest·(batch − running)."""
    tl.store(running_ptr + c, (was + newest * (batch - was)).to(running_ptr.dtype.element_ty), mask=known)


@triton.jit
def track(running_mean_ptr, running_var_ptr, was, c, known, mean, var, m):
    """Move the running statistics; the counter itself is moved when every program has read it."""
    was_mean, was_var, newest = was
    move(running_mean_ptr, c, known, was_mean, mean, newest)
    move(running_var_ptr, c, known, was_var, var * (m / tl.maximum(m - 1.0, 1.0)), newest)


# ---- between the members of a slab, within one launch


@triton.jit
def stamped(v, stamp):
    """A word of a value and its stamp."""
    return (tl.cast(stamp, tl.int64) << 32) | (v.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def value(word):
    """What a word says, stamp or no stamp."""
    return (word & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def await_words(at, here, stamp):
    """The words at these addresses, once all bear the stamp.

    There are at least as many addresses as threads, so that no two threads read one word and disagree about it.
    """
    words = tl.load(at, mask=here, other=0, volatile=True)
    polls = 0
    while (tl.max(tl.ravel((here & ((words >> 32) != stamp)).to(tl.int32)), 0) > 0) & (polls < PATIENCE):
        words = tl.load(at, mask=here, other=0, volatile=True)
        polls += 1
    if polls == PATIENCE:
        tl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    return tl.where(here, value(words), 0.0)


@triton.jit
def exchange(
    one, other, words_ptr, group, member, S, n, epoch, programs,
    W: tl.constexpr, MW: tl.constexpr, BS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """The sums of both over the S members of a group, in round n.

    One channel: every member adds up all partial results. More: each of the first W/MW members adds up those of MW channels
    and publishes the totals. Two sets of words serve alternate rounds: a member that has finished round n + 1 knows that
    all others have finished reading those of round n.
    """
    # Not 0, which fresh words hold.
    stamp = epoch + n + 1
    i = tl.arange(0, W)
    partial = words_ptr + (tl.cast(n % 2, tl.int64) * programs + group * S) * 2 * W
    tl.store(partial + member * 2 * W + i, stamped(one, stamp))
    tl.store(partial + member * 2 * W + W + i, stamped(other, stamp))
    s = tl.arange(0, BS)[:, None]
    if W == 1:
        both = await_words(partial + s * 2 + tl.arange(0, 2)[None, :], s < S, stamp)
        both = tl.sum(both, 0)
        first = tl.arange(0, 2) == 0
        return (
            tl.zeros([1], tl.float32) + tl.sum(tl.where(first, both, 0.0), 0),
            tl.zeros([1], tl.float32) + tl.sum(tl.where(first, 0.0, both), 0),
        )
    else:
        totals = words_ptr + 4 * W * programs + (tl.cast(n % 2, tl.int64) * programs + group) * 2 * W
        if member * MW < W:
            # Lines of MW channels of one sum, then of the other.
            j = tl.arange(0, 2 * MW)
            column = j // MW * W + member * MW + j % MW
            sums = tl.sum(await_words(partial + s * 2 * W + column[None, :], s < S, stamp), 0)
            tl.store(totals + column, stamped(sums, stamp))
        r = tl.arange(0, THREADS // W if THREADS > 2 * W else 2)[:, None]
        both = await_words(totals + r * W + i[None, :], (r < 2) & (i >= 0)[None, :], stamp)
        return tl.sum(tl.where(r == 0, both, 0.0), 0), tl.sum(tl.where(r == 1, both, 0.0), 0)


@triton.jit
def epoch_of(sync_ptr):
    """The epoch, which all programs of a launch find alike: it moves on when the last one has finished."""
    return (tl.load(sync_ptr, volatile=True) >> COUNT_BITS).to(tl.int32)


@triton.jit
def finish(
    sync_ptr, tracked_ptr, epoch, rounds,
    COUNTED: tl.constexpr, CUMULATIVE: tl.constexpr, SHARED: tl.constexpr, ONE_ROUND: tl.constexpr,
):  # fmt: skip
    """Leave a fresh epoch for the next launch, and count the batch.

    Where others may still ask for the counter, or there was more than one round, the last program does both. Where there was one
    round, all add to the word, so that the epoch is 1 more when every one has, and nobody waits for an answer: as long as one is
    missing, the word is less than that, whoever came before. More rounds could not be added so: programs that have not begun yet
    would find an epoch in between.

    Relaxed: a program has used its own copies of epoch and counter when it comes here, in stores that were issued before the
    barrier; what it has written is for the next launch, and need not have arrived.
    """
    programs = tl.num_programs(0) * tl.num_programs(1)
    if (COUNTED and CUMULATIVE) or (SHARED and not ONE_ROUND):
        tl.debug_barrier()
        before = tl.atomic_add(sync_ptr, 1, sem="relaxed", scope="gpu")
        if before & (EPOCH - 1) == programs - 1:
            tl.store(sync_ptr, tl.cast(epoch + rounds, tl.int64) * EPOCH)
            if COUNTED:
                tl.store(tracked_ptr, tl.load(tracked_ptr) + 1)
    else:
        first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        if SHARED:
            tl.debug_barrier()
            own = tl.where(first, 1 - programs + EPOCH, 1)
            tl.atomic_add(sync_ptr, tl.cast(own, tl.int64), sem="relaxed", scope="gpu")
        if COUNTED:
            if first:
                tl.atomic_add(tracked_ptr, 1, sem="relaxed", scope="gpu")


@triton.jit
def forward_kernel(
    x_ptr, r_ptr, weight_ptr, bias_ptr, invstd_ptr, running_mean_ptr, running_var_ptr, tracked_ptr, words_ptr, sync_ptr,
    rows, channels, pixels, row_stride, channel_stride, across, chunks, per, slabs, S, G, m, momentum, eps, floor, a,
    TRACK: tl.constexpr, CUMULATIVE: tl.constexpr, COUNTED: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PHI: tl.constexpr,
    INNER: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, V: tl.constexpr, U: tl.constexpr,
    EDGES: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
    SHARED: tl.constexpr, MW: tl.constexpr, BS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """z = φ(γ·(x − mean)·invstd + β [+ r]) over x, from x's own statistics; running ← running + momentum·(batch − running).

    Grid: G groups of S members, all resident at once where they share a slab; a group works on slabs g, g + G, …. Bytes: x read
    and written once, r read once; the second reading of x is served by the L2 cache.
    """
    group = tl.program_id(0) // S
    member = tl.program_id(0) % S
    epoch = epoch_of(sync_ptr)
    rounds = tl.cdiv(slabs, G)
    c = group * W + tl.arange(0, W)
    ahead = sample(x_ptr, c, c < channels, rows, pixels, row_stride, channel_stride)
    for n in range(rounds):
        slab = group + n * G
        c = slab * W + tl.arange(0, W)
        known = c < channels
        if slab < slabs:
            k = ahead
            first, second = add_moments(
                x_ptr, k, slab, member, chunks, per, rows, channels, pixels, row_stride, channel_stride, across,
                INNER, BR, BC, W, V, U, EDGES, WHOLE, STAGES,
            )  # fmt: skip
            if SHARED:
                first, second = exchange(
                    first, second, words_ptr, group, member, S, n, epoch, S * G, W, MW, BS, THREADS
                )
            mean, var = moments_from(k, first, second, m)
            invstd = 1.0 / tl.sqrt(var + eps)
            # Another member each time, so that none falls behind.
            if member == n % S:
                tl.store(invstd_ptr + c, invstd, mask=known)
                if TRACK:
                    was = tracked(running_mean_ptr, running_var_ptr, tracked_ptr, c, known, momentum, CUMULATIVE)
                    track(running_mean_ptr, running_var_ptr, was, c, known, mean, var, m)
            scale = guarded(weight_ptr, c, known, floor, HAS_WEIGHT, W) * invstd
            # While there is something else to do.
            ahead = sample(x_ptr, c + G * W, c + G * W < channels, rows, pixels, row_stride, channel_stride)
            transform(
                x_ptr, r_ptr, x_ptr, mean, scale, shifted_by(bias_ptr, c, known, HAS_BIAS, W), a, slab, member, chunks, per,
                rows, channels, pixels, row_stride, channel_stride, across,
                RESIDUAL, PHI, INNER, BR, BC, W, V, EDGES, WHOLE, STAGES,
            )  # fmt: skip
    finish(sync_ptr, tracked_ptr, epoch, rounds, COUNTED, CUMULATIVE, SHARED, ONE_ROUND=False)


@triton.jit
def backward_kernel(
    dz_ptr, z_ptr, r_ptr, dx_ptr, dr_ptr, weight_ptr, bias_ptr, mean_ptr, invstd_ptr, sum_dy_ptr, sum_dy_xhat_ptr,
    words_ptr, sync_ptr,
    rows, channels, pixels, row_stride, channel_stride, across, chunks, per, slabs, S, G, m, floor, a,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NEED_R: tl.constexpr,
    FROM_X: tl.constexpr, HAT: tl.constexpr, INVERSE: tl.constexpr, BACKWARD: tl.constexpr, VARIANT_I: tl.constexpr,
    INNER: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, V: tl.constexpr, U: tl.constexpr,
    EDGES: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
    SHARED: tl.constexpr, MW: tl.constexpr, BS: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """∑ dy, ∑ dy·x̂, and dx from them: as :func:`gradient`, with γ·invstd, −γ·invstd/m·(∑dy·x̂ and ∑dy).

    Grid and rounds as in forward_kernel. Bytes: z, dz and r read once, dx and dr written once.
    """
    group = tl.program_id(0) // S
    member = tl.program_id(0) % S
    epoch = epoch_of(sync_ptr)
    rounds = tl.cdiv(slabs, G)
    for n in range(rounds):
        slab = group + n * G
        c = slab * W + tl.arange(0, W)
        known = c < channels
        if slab < slabs:
            gamma = guarded(weight_ptr, c, known, floor, HAS_WEIGHT, W)
            beta = shifted_by(bias_ptr, c, known, HAS_BIAS, W)
            invstd = tl.load(invstd_ptr + c, mask=known, other=0.0)
            mean = tl.load(mean_ptr + c, mask=known, other=0.0) if FROM_X else invstd
            one, other = add_gradients(
                dz_ptr, z_ptr, r_ptr, mean, invstd, gamma, beta, a, slab, member, chunks, per,
                rows, channels, pixels, row_stride, channel_stride, across,
                RESIDUAL, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I, INNER, BR, BC, W, V, U, EDGES, WHOLE, STAGES,
            )  # fmt: skip
            if SHARED:
                one, other = exchange(one, other, words_ptr, group, member, S, n, epoch, S * G, W, MW, BS, THREADS)
            if not VARIANT_I:
                other = other / gamma
            if member == n % S:
                tl.store(sum_dy_ptr + c, one, mask=known)
                tl.store(sum_dy_xhat_ptr + c, other, mask=known)
            scale, slope, constant = coefficients(one, other, gamma, invstd, m, VARIANT_I)
            gradient(
                dz_ptr, z_ptr, r_ptr, dx_ptr, dr_ptr, mean, invstd, gamma, beta, scale, slope, constant, a,
                slab, member, chunks, per, rows, channels, pixels, row_stride, channel_stride, across,
                RESIDUAL, NEED_R, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I, False, INNER, BR, BC, W, V, EDGES, WHOLE, STAGES,
            )  # fmt: skip
    finish(sync_ptr, sync_ptr, epoch, rounds, False, False, SHARED, ONE_ROUND=False)


# ---- the verbs, one launch each: any number of members, none of which waits


@triton.jit
def is_last(count_ptr, S):
    """Whether all S members of the slab have published; the last one resets the counter for the next launch."""
    tl.debug_barrier()
    arrived = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu")
    last = arrived == S - 1
    if last:
        tl.atomic_xchg(count_ptr, 0, sem="relaxed", scope="gpu")
    return last


@triton.jit
def publish(one, other, partial_ptr, slab, member, S, W: tl.constexpr):
    """A member's sums, for the last one to add up."""
    own = partial_ptr + (tl.cast(slab, tl.int64) * S + member) * 2 * W + tl.arange(0, W)
    tl.store(own, one)
    tl.store(own + W, other)


@triton.jit
def add_published(partial_ptr, slab, S, W: tl.constexpr, BS: tl.constexpr):
    """The sums of both over the members of a slab."""
    s = tl.arange(0, BS)
    base = partial_ptr + tl.cast(slab, tl.int64) * S * 2 * W + tl.arange(0, W)[None, :]
    one = tl.zeros([W], tl.float32)
    other = tl.zeros([W], tl.float32)
    for s0 in range(0, S, BS):
        at = base + (s0 + s)[:, None] * 2 * W
        here = ((s0 + s) < S)[:, None]
        one += tl.sum(tl.load(at, mask=here, other=0.0, volatile=True), 0)
        other += tl.sum(tl.load(at + W, mask=here, other=0.0, volatile=True), 0)
    return one, other


@triton.jit
def moments_kernel(
    x_ptr, mean_ptr, var_ptr, invstd_ptr, running_mean_ptr, running_var_ptr, tracked_ptr, partial_ptr, count_ptr,
    rows, channels, pixels, row_stride, channel_stride, across, chunks, per, S, m, momentum, eps,
    TRACK: tl.constexpr, CUMULATIVE: tl.constexpr,
    INNER: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, V: tl.constexpr, U: tl.constexpr,
    EDGES: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """mean = ∑x/m, var = ∑(x − mean)²/m, invstd = 1/√(var + eps); running ← running + momentum·(batch − running).

    Grid: slabs·S; the last member of a slab adds up what all have published. Bytes: x read once.
    """
    slabs = tl.num_programs(0) // S
    slab = tl.program_id(0) % slabs
    member = tl.program_id(0) // slabs
    c = slab * W + tl.arange(0, W)
    known = c < channels
    k = sample(x_ptr, c, known, rows, pixels, row_stride, channel_stride)
    first, second = add_moments(
        x_ptr, k, slab, member, chunks, per, rows, channels, pixels, row_stride, channel_stride, across,
        INNER, BR, BC, W, V, U, EDGES, WHOLE, STAGES,
    )  # fmt: skip
    publish(first, second, partial_ptr, slab, member, S, W)
    if is_last(count_ptr + slab, S):
        first, second = add_published(partial_ptr, slab, S, W, BS)
        mean, var = moments_from(k, first, second, m)
        tl.store(mean_ptr + c, mean, mask=known)
        tl.store(var_ptr + c, var, mask=known)
        tl.store(invstd_ptr + c, 1.0 / tl.sqrt(var + eps), mask=known)
        if TRACK:
            was = tracked(running_mean_ptr, running_var_ptr, tracked_ptr, c, known, momentum, CUMULATIVE)
            track(running_mean_ptr, running_var_ptr, was, c, known, mean, var, m)


@triton.jit
def transform_kernel(
    x_ptr, r_ptr, z_ptr, mean_ptr, invstd_ptr, weight_ptr, bias_ptr, tracked_ptr,
    rows, channels, pixels, row_stride, channel_stride, across, chunks, per, S, floor, a,
    COUNTED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PHI: tl.constexpr,
    INNER: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
    EDGES: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """z = φ(γ·(x − mean)·invstd + β [+ r]), over x or elsewhere; num_batches_tracked ← num_batches_tracked + 1.

    Grid: slabs·S, backwards: what moments_kernel read last may still be cached. Bytes: x read and written once, r read.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    slabs = tl.num_programs(0) // S
    slab = program % slabs
    c = slab * W + tl.arange(0, W)
    known = c < channels
    mean = tl.load(mean_ptr + c, mask=known, other=0.0).to(tl.float32)
    invstd = tl.load(invstd_ptr + c, mask=known, other=0.0).to(tl.float32)
    transform(
        x_ptr, r_ptr, z_ptr, mean, guarded(weight_ptr, c, known, floor, HAS_WEIGHT, W) * invstd,
        shifted_by(bias_ptr, c, known, HAS_BIAS, W), a, slab, program // slabs, chunks, per,
        rows, channels, pixels, row_stride, channel_stride, across, RESIDUAL, PHI, INNER, BR, BC, W, V, EDGES, WHOLE, STAGES,
    )  # fmt: skip
    if COUNTED and program == 0:
        tl.store(tracked_ptr, tl.load(tracked_ptr) + 1)


@triton.jit
def sums_kernel(
    dz_ptr, z_ptr, r_ptr, weight_ptr, bias_ptr, mean_ptr, invstd_ptr, sum_dy_ptr, sum_dy_xhat_ptr, partial_ptr, count_ptr,
    rows, channels, pixels, row_stride, channel_stride, across, chunks, per, S, floor, a,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, FROM_X: tl.constexpr, HAT: tl.constexpr,
    INVERSE: tl.constexpr, BACKWARD: tl.constexpr, VARIANT_I: tl.constexpr,
    INNER: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, V: tl.constexpr, U: tl.constexpr,
    EDGES: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """∑ dy and ∑ dy·x̂, with dy = φ′·dz; x̂ = (y − β)/γ per element (I) or once per channel (II).

    Grid: slabs·S, added up as in moments_kernel. Bytes: z, dz and r read once.
    """
    slabs = tl.num_programs(0) // S
    slab = tl.program_id(0) % slabs
    member = tl.program_id(0) // slabs
    c = slab * W + tl.arange(0, W)
    known = c < channels
    gamma = guarded(weight_ptr, c, known, floor, HAS_WEIGHT, W)
    mean = gamma
    invstd = gamma
    if FROM_X:
        mean = tl.load(mean_ptr + c, mask=known, other=0.0).to(tl.float32)
        invstd = tl.load(invstd_ptr + c, mask=known, other=0.0).to(tl.float32)
    one, other = add_gradients(
        dz_ptr, z_ptr, r_ptr, mean, invstd, gamma, shifted_by(bias_ptr, c, known, HAS_BIAS, W), a, slab, member, chunks, per,
        rows, channels, pixels, row_stride, channel_stride, across,
        RESIDUAL, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I, INNER, BR, BC, W, V, U, EDGES, WHOLE, STAGES,
    )  # fmt: skip
    publish(one, other, partial_ptr, slab, member, S, W)
    if is_last(count_ptr + slab, S):
        one, other = add_published(partial_ptr, slab, S, W, BS)
        if not VARIANT_I:
            other = other / gamma
        tl.store(sum_dy_ptr + c, one, mask=known)
        tl.store(sum_dy_xhat_ptr + c, other, mask=known)


@triton.jit
def input_grad_kernel(
    dz_ptr, z_ptr, r_ptr, dx_ptr, dr_ptr, weight_ptr, bias_ptr, mean_ptr, invstd_ptr, sum_dy_ptr, sum_dy_xhat_ptr,
    rows, channels, pixels, row_stride, channel_stride, across, chunks, per, S, m, floor, a,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NEED_R: tl.constexpr,
    FROM_X: tl.constexpr, HAT: tl.constexpr, INVERSE: tl.constexpr, BACKWARD: tl.constexpr,
    FIXED: tl.constexpr, VARIANT_I: tl.constexpr,
    INNER: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, V: tl.constexpr,
    EDGES: tl.constexpr, WHOLE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx = a·dy + b·(y − β) + c (II), (dy − x̂·dγ/m − dβ/m)·γ·invstd (I), γ·invstd·dy with fixed statistics.

    Grid: slabs·S, backwards as in transform_kernel. Bytes: z, dz and r read once, dx and dr written once.
    """
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    slabs = tl.num_programs(0) // S
    slab = program % slabs
    c = slab * W + tl.arange(0, W)
    known = c < channels
    gamma = guarded(weight_ptr, c, known, floor, HAS_WEIGHT, W)
    invstd = tl.load(invstd_ptr + c, mask=known, other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + c, mask=known, other=0.0).to(tl.float32) if FROM_X else invstd
    scale = gamma * invstd
    slope = scale
    constant = scale
    if not FIXED:
        one = tl.load(sum_dy_ptr + c, mask=known, other=0.0).to(tl.float32)
        other = tl.load(sum_dy_xhat_ptr + c, mask=known, other=0.0).to(tl.float32)
        scale, slope, constant = coefficients(one, other, gamma, invstd, m, VARIANT_I)
    gradient(
        dz_ptr, z_ptr, r_ptr, dx_ptr, dr_ptr, mean, invstd, gamma, shifted_by(bias_ptr, c, known, HAS_BIAS, W),
        scale, slope, constant, a,
        slab, program // slabs, chunks, per, rows, channels, pixels, row_stride, channel_stride, across,
        RESIDUAL, NEED_R, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I, FIXED, INNER, BR, BC, W, V, EDGES, WHOLE, STAGES,
    )  # fmt: skip
