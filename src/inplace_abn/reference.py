r"""The verbs in plain torch: the mathematics of the layer, and its CPU path.

.. math::
    \hat x = (x-\mu)/\sqrt{\sigma^2+\epsilon}, \qquad y = \gamma\hat x + \beta, \qquad z = \varphi(y)

With a residual r, of x's shape and dtype, z = φ(y + r); backward then recovers y = φ⁻¹(z) − r, and the gradient of r is dy,
written into the buffer ``dr`` where one is given. r itself is only read.

Where x is kept instead of z (activations without an inverse, or ill-conditioned γ), backward is handed x and its mean, computes y
as forward did, and needs no inverse: :func:`normalize_batch` forward, the verbs of backward with ``mean``. A mean of 0.0, a plain
number, says that x̂ was kept.

Four verbs: :func:`moments` and :func:`normalize_` forward, :func:`sums` and :func:`input_grad` backward. A synchronised layer
puts a collective between the two of a pair; a local one runs each pair as one: :func:`normalize_batch_`,
:func:`input_grad_batch`.

Only z is kept. Backward recovers y = φ⁻¹(z), and dy = φ′(y)·dz from z itself. Then, with m the values per channel:

=======  ==========================================  ==================================================================
variant  dγ                                          dx
=======  ==========================================  ==================================================================
I        ∑ dy·x̂,  x̂ = (y−β)/γ for every element       (dy − x̂·dγ/m − dβ/m)·γ·invstd
II       (1/γ)·∑ dy·(y−β)                            a·dy + b·(y−β) + c, with a = γ·invstd, b = −invstd·dγ/m, c = −a·dβ/m
=======  ==========================================  ==================================================================

and dβ = ∑ dy in both. II is the default: it divides once per channel where I divides every element, and it is as exact,
because (y−β) is subtracted per element (the paper's ∑ dy·y − β·dβ cancels when |β| ≫ |γ|).

Per-channel vectors are float64 here, elements are float32 (float64 for float64 input). Tensors are walked in tiles of at most
:data:`TILE` elements, so the temporaries of a verb do not grow with the tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from .activations import Activation, Formula, Gradient
from .context import is_dense

__all__ = [
    "TILE",
    "affine",
    "input_grad",
    "input_grad_batch",
    "moments",
    "normalize_",
    "normalize_batch",
    "normalize_batch_",
    "sums",
    "track",
    "wide",
]

# Elements per tile: 4 MB of float32. Smaller ones cost host time, larger ones leave the caches.
TILE = 1 << 20
# Elements per slab of channels in input_grad_batch, whose ATen kernel needs whole channels.
SLAB = 1 << 22


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, floor: float) -> tuple[Tensor, Tensor]:
    """The guarded γ = copysign(max(|weight|, floor), weight), and β, as float64 vectors; 1 and 0 where absent.

    The guard keeps γ invertible and its sign; it is straight-through: dγ is handed to the weight unchanged.
    """
    if weight is None:
        gamma = torch.ones(x.shape[1], dtype=torch.float64, device=x.device)
    else:
        weight = weight.double()
        gamma = weight.abs().clamp_min_(floor).copysign_(weight)
    # ATen's channels-last kernels take a strided vector for a dense one.
    return gamma, torch.zeros_like(gamma) if bias is None else bias.double().contiguous()


def track(
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    mean: Tensor,
    unbiased: Tensor,
    momentum: float | None,
) -> None:
    """Move the running statistics: running ← (1 − momentum)·running + momentum·batch, the counter by one.

    Without momentum, the weight of the newest batch is 1/num_batches_tracked: the plain average over all batches.
    """
    if running_mean is None or running_var is None:
        return
    newest: Tensor | float
    if num_batches_tracked is not None:
        num_batches_tracked.add_(1)
    if momentum is None:
        assert num_batches_tracked is not None
        newest = num_batches_tracked.double().reciprocal()
    else:
        newest = momentum
    for running, batch in ((running_mean, mean), (running_var, unbiased)):
        running.copy_(running.double().lerp_(batch.double(), newest))


def moments(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance of every channel, and the count m of values in each.

    Per tile: s = mean, d = x − s, then ∑d and ∑d² correct the rounding of s. Tiles are merged by Chan's formula in float64.
    Nothing is subtracted that is large against σ, so a mean of 10⁴ σ costs no digits and no variance is negative.
    """
    tiles = []
    for index in _tiles(x):
        t = x[index].to(wide(x))
        n = t.numel() // t.shape[1]
        shift = t.mean(_but_channels(x), keepdim=True)
        d = t - shift
        first = d.sum(_but_channels(x)).double() / n
        second = d.square_().sum(_but_channels(x)).double() / n
        tiles.append((index[1], shift.flatten().double() + first, (second - first.square()).clamp_min_(0), n))
    return *_merged(tiles), x.numel() // x.shape[1]


def normalize_(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    floor: float,
    phi: Activation,
    a: float,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> None:
    """Overwrite x, or fill ``out``, with z = φ(γ·(x − mean)·invstd + β [+ r]).

    The part of the mean that float32 cannot hold moves into the shift behind the scale, so it is not lost.
    """
    gamma, beta = affine(x, weight, bias, floor)
    forward, _, _ = _formulas(phi)
    z = x if out is None else out
    near = mean.to(wide(x))
    scale = gamma * invstd.double()
    vectors = (near, scale, beta - (mean.double() - near.double()) * scale)
    near, scale, shift = (_along(v, x) for v in vectors)
    for index in _tiles(x):
        t, c = x[index], (slice(None), index[1])
        # Of x's own dtype, t is x itself.
        y = t.to(wide(x), copy=out is not None).sub_(near[c]).mul_(scale[c]).add_(shift[c])
        if residual is not None:
            y += residual[index]
        z[index] = forward(y, a)


def sums(
    dz: Tensor,
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    floor: float,
    phi: Activation,
    a: float,
    variant: str,
    residual: Tensor | None = None,
    mean: Tensor | float | None = None,
    invstd: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """∑ dy (which is dβ) and ∑ dy·x̂ (which is dγ) of every channel, in float64."""
    gamma, beta = affine(z, weight, bias, floor)
    total, total_xhat = torch.zeros_like(gamma), torch.zeros_like(gamma)
    variant = variant if mean is None else "I"
    for index, dy, centred in _recovered(dz, z, gamma, beta, phi, a, variant, residual, mean, invstd):
        total[index[1]] += dy.sum(_but_channels(z))
        total_xhat[index[1]] += centred.mul_(dy).sum(_but_channels(z))
    return total, total_xhat if variant == "I" else total_xhat / gamma


def input_grad(
    dz: Tensor,
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    invstd: Tensor,
    sum_dy: Tensor | None,
    sum_dy_xhat: Tensor | None,
    count: int,
    floor: float,
    phi: Activation,
    a: float,
    variant: str,
    residual: Tensor | None = None,
    dr: Tensor | None = None,
    mean: Tensor | float | None = None,
) -> Tensor:
    """dx, in a new buffer laid out as z. Sums of None mean fixed statistics, and then dx = γ·invstd·dy."""
    gamma, beta = affine(z, weight, bias, floor)
    dx = torch.empty_like(z)
    scale = gamma * invstd.double()
    by_dy = _along(scale, z)
    if sum_dy is None or sum_dy_xhat is None:
        for index, dy, _ in _recovered(dz, z, gamma, beta, phi, a, variant, residual, mean, invstd):
            dx[index] = dy * by_dy[:, index[1]]
            if dr is not None:
                dr[index] = dy
        return dx
    variant = variant if mean is None else "I"
    # What multiplies the recovered value: x̂ in variant I, y − β = γ·x̂ in variant II.
    slope = -scale * sum_dy_xhat.double() / count
    by_centred = _along(slope if variant == "I" else slope / gamma, z)
    constant = _along(-scale * sum_dy.double() / count, z)
    for index, dy, centred in _recovered(dz, z, gamma, beta, phi, a, variant, residual, mean, invstd):
        c = (slice(None), index[1])
        if dr is not None:
            dr[index] = dy
        dx[index] = centred.mul_(by_centred[c]).add_(constant[c]).add_(dy * by_dy[c])
    return dx


def normalize_batch_(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    floor: float,
    phi: Activation,
    a: float,
    residual: Tensor | None = None,
) -> Tensor:
    """Overwrite x with z from the batch's own statistics, move the running ones, return invstd.

    Dense float32 and float64 tensors on a CPU go through ATen's batch norm, in place, without a temporary; all others through
    :func:`moments` and :func:`normalize_`, whose temporaries are a few tiles.
    """
    if _is_dense(x):
        mean, var, invstd = _normalize_dense_(x, weight, bias, eps, floor, phi, a, residual)
        count = x.numel() // x.shape[1]
    else:
        mean, var, count = moments(x)
        invstd = (var + eps).rsqrt_()
        normalize_(x, mean, invstd, weight, bias, floor, phi, a, residual)
    track(running_mean, running_var, num_batches_tracked, mean, var * (count / (count - 1)), momentum)
    return invstd.to(wide(x))


def normalize_batch(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    floor: float,
    phi: Activation,
    a: float,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A new z from the batch's own statistics, which leaves x as it is; mean and invstd. Moves the running statistics.

    :func:`normalize_` with this mean and invstd gives the same bits again.
    """
    mean, var, count = moments(x)
    mean, invstd = mean.to(wide(x)), (var + eps).rsqrt_().to(wide(x))
    z = torch.empty_like(x)
    normalize_(x, mean, invstd, weight, bias, floor, phi, a, residual, z)
    track(running_mean, running_var, num_batches_tracked, mean, var * (count / (count - 1)), momentum)
    return z, mean, invstd


def input_grad_batch(
    dz: Tensor,
    z: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    invstd: Tensor,
    floor: float,
    phi: Activation,
    a: float,
    variant: str,
    residual: Tensor | None = None,
    dr: Tensor | None = None,
    mean: Tensor | float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dγ, dβ of a local batch: :func:`sums` and :func:`input_grad` with one recovery of y and dy for both.

    ATen's batch-norm backward, (dy − ∑dy/m − (u−μ)·ν²·∑dy(u−μ)/m)·ν·w, is variant II when handed u = y, μ = β, ν = 1/γ,
    w = γ²·invstd, and variant I when handed u = x̂, μ = 0, ν = 1, w = γ·invstd.

    dx is a new buffer (autograd may have other holders of dz, and z is the next layer's input). Transient beside it: y and dy
    of one slab of at most :data:`SLAB` elements, in float32 for 16-bit z, and what the formulas of φ allocate on the way.
    """
    if z.is_meta or (z.stride(1) == 1 and (z.numel() > SLAB or dz.stride() != z.stride())):
        # Channels are innermost. A range of them is crumbs of memory (4 to 9 times slower), and ATen sums them one by one in
        # float32, as torch does only if dz has the same layout. Two walks over tiles instead. (On meta, one tile shows all.)
        sum_dy, sum_dy_xhat = sums(dz, z, weight, bias, floor, phi, a, variant, residual, mean, invstd)
        count = z.numel() // z.shape[1]
        rest = (floor, phi, a, variant, residual, dr, mean)
        return input_grad(dz, z, weight, bias, invstd, sum_dy, sum_dy_xhat, count, *rest), sum_dy_xhat, sum_dy
    gamma, beta = affine(z, weight, bias, floor)
    dtype = wide(z)
    gain = gamma * invstd.double()
    if variant == "I" or mean is not None:
        about, nu, w = torch.zeros_like(beta), torch.ones_like(beta), gain
    else:
        about, nu, w = beta, gamma.reciprocal(), gamma * gain
    about, nu, w = about.to(dtype), nu.to(dtype), w.to(dtype)
    dx = None
    dgammas, dbetas = [], []
    _, inverse, backward = _formulas(phi)
    for c in _slabs(z):
        if mean is None:
            part = z[:, c].to(dtype)
            dy, u = backward(dz[:, c].to(dtype), part, a), inverse(part, a)
            if residual is not None:
                u = u - residual[:, c]
            if variant == "I":
                u = (u - _along(beta[c], z)).div_(_along(gamma[c], z))
        else:
            dy, u = _repeated((slice(None), c), dz, z, gamma, beta, phi, a, residual, mean, invstd)
        if dr is not None:
            dr[:, c] = dy
        dx_part, dgamma, dbeta = torch.ops.aten.native_batch_norm_backward(
            dy, u, w[c], None, None, about[c], nu[c], True, 0.0, [True, True, True]
        )
        dgammas.append(dgamma)
        dbetas.append(dbeta)
        if dx_part.shape == z.shape and dx_part.dtype == z.dtype and dx_part.stride() == z.stride():
            dx = dx_part
        else:
            dx = torch.empty_like(z) if dx is None else dx
            dx[:, c] = dx_part
    assert dx is not None
    return dx, torch.cat(dgammas), torch.cat(dbetas)


def wide(x: Tensor) -> torch.dtype:
    """What elements and statistics of x are computed in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _but_channels(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _along(vector: Tensor, x: Tensor) -> Tensor:
    """A per-channel vector, in the elements' dtype, shaped to broadcast against x."""
    return vector.to(wide(x)).view(1, -1, *[1] * (x.dim() - 2))


def _formulas(phi: Activation) -> tuple[Formula, Formula, Gradient]:
    """φ, φ⁻¹ and dy from dz. Without an inverse, what stands for it is never called: x is kept then."""
    if phi.fused is not None:
        return phi.fused
    return phi.forward, phi.inverse or phi.forward, phi.backward


def _tiles(x: Tensor) -> list[tuple[slice, ...]]:
    """Indices that cut x along its outermost dimensions in memory into pieces of at most TILE elements.

    On meta, where a piece shows as much as all of them, a single pixel of every channel.
    """
    if x.is_meta:
        return [tuple(slice(None) if d == 1 else slice(0, 1) for d in range(x.dim()))]
    cuts: list[tuple[slice, ...]] = [(slice(None),)] * x.dim()
    size = x.numel()
    for d in sorted(range(x.dim()), key=lambda d: (x.stride(d), x.shape[d]), reverse=True):
        if size <= TILE:
            break
        inner = size // x.shape[d]
        step = max(1, TILE // inner)
        cuts[d] = tuple(slice(i, i + step) for i in range(0, x.shape[d], step))
        size = inner * step
    return list(product(*cuts))


def _slabs(z: Tensor) -> list[slice]:
    """Ranges of channels whose elements number at most SLAB, or single channels."""
    channels = z.shape[1]
    step = max(1, SLAB * channels // max(z.numel(), 1))
    return [slice(i, min(i + step, channels)) for i in range(0, channels, step)]


def _recovered(
    dz: Tensor,
    z: Tensor,
    gamma: Tensor,
    beta: Tensor,
    phi: Activation,
    a: float,
    variant: str,
    residual: Tensor | None,
    mean: Tensor | float | None,
    invstd: Tensor | None,
) -> Iterator[tuple[tuple[slice, ...], Tensor, Tensor]]:
    """For every tile: its index, dy, and what the variant works on, x̂ (I) or y − β (II), in a buffer of its own.

    With a mean, z is x (or x̂, with 0.0), and it is always x̂.
    """
    if mean is not None and invstd is not None:
        for index in _tiles(z):
            yield index, *_repeated(index, dz, z, gamma, beta, phi, a, residual, mean, invstd)
        return
    _, inverse, backward = _formulas(phi)
    gamma, beta = _along(gamma, z), _along(beta, z)
    for index in _tiles(z):
        c = (slice(None), index[1])
        t = z[index].to(wide(z))
        dy = backward(dz[index].to(wide(z)), t, a)
        centred = inverse(t, a) - beta[c]
        if residual is not None:
            centred -= residual[index]
        yield index, dy, centred.div_(gamma[c]) if variant == "I" else centred


def _repeated(
    index: tuple[slice, ...],
    dz: Tensor,
    x: Tensor,
    gamma: Tensor,
    beta: Tensor,
    phi: Activation,
    a: float,
    residual: Tensor | None,
    mean: Tensor | float,
    invstd: Tensor,
) -> tuple[Tensor, Tensor]:
    """dy and x̂ of one tile from x itself, with y as :func:`normalize_` computes it; or from x̂, whose mean is 0.0."""
    forward, _, backward = _formulas(phi)
    c = index[1]
    if isinstance(mean, float):
        xhat = x[index].to(wide(x), copy=True)
        y = xhat * _along(gamma[c], x) + _along(beta[c], x)
    else:
        xhat = x[index].to(wide(x)) - _along(mean[c], x)
        y = xhat * _along(gamma[c] * invstd[c].double(), x) + _along(beta[c], x)
        xhat *= _along(invstd[c], x)
    if residual is not None:
        y += residual[index]
    # Invertible activations differentiate from their output, others from their input.
    dy = backward(dz[index].to(wide(x)), y if phi.inverse is None else forward(y, a), a)
    return dy, xhat


def _merged(tiles: list[tuple[slice, Tensor, Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of all tiles, from each one's channels, mean, biased variance and count, in float64.

    Chan's formula: m·σ² = ∑ n·(σ²ₜ + (μₜ − μ)²) with m·μ = ∑ n·μₜ. All terms are positive.
    """
    if len(tiles) == 1:
        _, mean, var, _ = tiles[0]
        return mean.double(), var.double()
    by_channels: dict[int | None, list[tuple[Tensor, Tensor, int]]] = {}
    for c, mean, var, n in tiles:
        by_channels.setdefault(c.start, []).append((mean, var, n))
    means, variances = [], []
    for group in by_channels.values():
        mean_t, var_t = (torch.stack(vectors).double() for vectors in list(zip(*group, strict=True))[:2])
        share = torch.tensor([n for _, _, n in group], dtype=torch.float64, device=mean_t.device).view(-1, 1)
        share = share / share.sum()
        mean = (share * mean_t).sum(0)
        means.append(mean)
        variances.append((share * (var_t + (mean_t - mean).square_())).sum(0))
    return torch.cat(means), torch.cat(variances)


def _is_dense(x: Tensor) -> bool:
    """Whether ATen's in-place batch norm is right: for other strides it is silently wrong, for 16 bits too coarse."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64):
        return False
    return is_dense(x)


def _dense_moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """ATen's mean and biased variance, tile by tile: its channels-last sums run in float32 and must stay short."""
    tiles = []
    for index in _tiles(x):
        t = x[index]
        mean, var = torch.ops.aten.batch_norm_update_stats(t, None, None, 0.0)
        tiles.append((index[1], mean, var, t.numel() // t.shape[1]))
    return _merged(tiles)


def _normalize_dense_(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    floor: float,
    phi: Activation,
    a: float,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Moments and transform by ATen's kernels, in place. Return mean, biased variance and invstd."""
    offset, var = _dense_moments(x)
    mean = offset
    # ATen sums raw values and folds the mean into a shift: both lose digits once |mean| ≫ σ. Then subtract it first.
    if bool((mean.square() > 64 * var).any()):
        near = mean.to(x.dtype)
        x.sub_(_along(near, x))
        offset, var = _dense_moments(x)
        mean = near + offset
    invstd = (var + eps).rsqrt_()
    gamma, beta = affine(x, weight, bias, floor)
    scale, shift, offset = (gamma.mul_(invstd)).to(x.dtype), beta.to(x.dtype), offset.to(x.dtype)
    one, unused = torch.ones_like(scale), x.new_empty(0)
    forward, _, _ = _formulas(phi)
    for index in _tiles(x):
        t, c = x[index], index[1]
        torch.ops.aten.native_batch_norm.out(
            t, scale[c], shift[c], offset[c], one[c], False, 0.0, 0.0, out=t, save_mean=unused, save_invstd=unused
        )
        if residual is not None:
            t += residual[index]
        t.copy_(forward(t, a))
    return mean, var, invstd
