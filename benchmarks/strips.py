"""A candidate, not used by the package: strips of channels innermost, held in shared memory between their two uses.

    python benchmarks/strips.py [--rounds 9] [--out benchmarks/results]      # needs a GPU

As `inplace_abn/kernels/ring.py`, whose helpers it shares, but a slab is a strip of W channels of all pixels, and its sums are W
pairs: members publish them, each of some members adds up a few columns over all, and publishes the totals, which all collect.
Every setting is compared with the package's kernels, by its values and its time, both with a cold L2 cache.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from layer import device_times, gpu_file
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from inplace_abn import kernels
from inplace_abn.activations import resolve
from inplace_abn.kernels.device import PATIENCE, finish, moments_from, recovered, sample, stamped, value
from inplace_abn.kernels.ring import SETS, fetch


@gluon.jit
def line_up(
    t, member, share, rows, row_stride,
    TILE: gl.constexpr, K: gl.constexpr, B: gl.constexpr, J: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Offsets of a member's tile t, of K times B pixels, from the first element of any strip, and which pixels there are."""
    by_pixel: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, TILE))
    k = gl.expand_dims(gl.arange(0, K, gl.SliceLayout(1, by_pixel)), 1)
    own = t * (K * B) + k * B + gl.expand_dims(gl.arange(0, B, gl.SliceLayout(0, by_pixel)), 0)
    row = member * share + own
    within: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, TILE))
    j = gl.expand_dims(gl.arange(0, J, gl.SliceLayout(1, within)), 1)
    e = gl.expand_dims(gl.arange(0, V, gl.SliceLayout(0, within)), 0)
    start = gl.expand_dims(gl.expand_dims(row * (row_stride // V) * V, 2), 3)
    inside = (own < share) & (row < rows)
    strip = gl.expand_dims(gl.expand_dims(j * V + e, 0), 0)
    return start + strip, gl.expand_dims(gl.expand_dims(inside, 2), 3)


@gluon.jit
def over_tile(v, TILE: gl.constexpr, J: gl.constexpr, V: gl.constexpr):
    """What a strip's channels have, a lane each, as a tile of it has them."""
    v = gl.convert_layout(gl.reshape(v, [J, V]), gl.SliceLayout(0, gl.SliceLayout(0, TILE)))
    return gl.expand_dims(gl.expand_dims(v, 0), 0)


@gluon.jit
def await_words(words, at, here, stamp):
    """The words at these addresses, once all bear the stamp, after a first look."""
    missing = here & ((words >> 32) != stamp)
    polls = 0
    while (gl.max(gl.ravel(missing.to(gl.int32)), 0) > 0) & (polls < PATIENCE):
        words = gl.load(at, mask=here, other=0, volatile=True)
        missing = here & ((words >> 32) != stamp)
        polls += 1
    if polls == PATIENCE:
        gl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    return gl.where(here, value(words), 0.0)


@gluon.jit
def publish(
    one, other, words_ptr, group, member, S, n, epoch, programs, TILE: gl.constexpr, J: gl.constexpr, V: gl.constexpr
):
    """A member's sums of round n."""
    within: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, TILE))
    c = gl.expand_dims(gl.arange(0, J, gl.SliceLayout(1, within)) * V, 1) + gl.expand_dims(
        gl.arange(0, V, gl.SliceLayout(0, within)), 0
    )
    own = words_ptr + (n % SETS * programs + group * S + member) * 2 * J * V + c
    gl.store(own, stamped(one, epoch + n + 1))
    gl.store(own + J * V, stamped(other, epoch + n + 1))


@gluon.jit
def columns_at(
    words_ptr,
    group,
    member,
    S,
    n,
    known,
    programs,
    W: gl.constexpr,
    COLUMNS: gl.constexpr,
    BS: gl.constexpr,
    ADD: gl.constexpr,
):
    """Where the partial sums of round n lie that a member adds up: BS members by COLUMNS columns of both sums; and which."""
    s = gl.expand_dims(gl.arange(0, BS, gl.SliceLayout(1, ADD)), 1)
    column = gl.expand_dims(member * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, ADD)), 0)
    at = words_ptr + (n % SETS * programs + group * S + s) * 2 * W + column
    return at, (s < S) & (column < 2 * W) & known


@gluon.jit
def publish_totals(
    sums,
    words_ptr,
    group,
    member,
    n,
    known,
    epoch,
    programs,
    groups,
    W: gl.constexpr,
    COLUMNS: gl.constexpr,
    ADD: gl.constexpr,
):
    """The totals of a member's columns, behind all partial sums."""
    column = member * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, ADD))
    own = words_ptr + (SETS * programs + n % SETS * groups + group) * 2 * W + column
    gl.store(own, stamped(sums, epoch + n + 1), mask=(column < 2 * W) & known)


@gluon.jit
def totals_at(words_ptr, group, n, programs, groups, c, W: gl.constexpr):
    """Where the totals of round n lie, the first of both sums."""
    return words_ptr + (SETS * programs + n % SETS * groups + group) * 2 * W + c


@gluon.jit
def forward_kernel(
    x_ptr, weight_ptr, bias_ptr, invstd_ptr, words_ptr, sync_ptr,
    rows, channels, row_stride, share, slabs, S, G, m, eps, a,
    PHI: gl.constexpr, V: gl.constexpr, J: gl.constexpr, B: gl.constexpr, K: gl.constexpr,
    T: gl.constexpr, LAG: gl.constexpr, AHEAD: gl.constexpr,
    COLUMNS: gl.constexpr, BS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """z = φ(γ·x̂ + β) over x, W = J·V channels at a time; a tile is B pixels."""
    W: gl.constexpr = J * V
    TILE: gl.constexpr = gl.BlockedLayout([K, 1, 1, V], [1, 32 // J, J, 1], [1, WARPS, 1, 1], [3, 2, 1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    ADD: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [WARPS, 1], [1, 0])
    SLOT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    R: gl.constexpr = LAG + AHEAD + 1
    number: gl.constexpr = x_ptr.dtype.element_ty
    group = gl.program_id(0) // S
    member = gl.program_id(0) % S
    epoch = gl.load(sync_ptr, volatile=True)
    rounds = gl.cdiv(slabs - group, G)
    base = gl.cast(group, gl.int64) * W
    step = gl.cast(G, gl.int64) * W
    local = gl.arange(0, W, LANES)
    lines = ()
    for t in gl.static_range(T):
        lines = lines + (line_up(t, member, share, rows, row_stride, TILE, K, B, J, V),)
    ring = gl.allocate_shared_memory(number, [R, K, B, J, V], SLOT)
    for p in gl.static_range(AHEAD):
        offsets, inside = lines[p % T]
        fetch(ring, p, x_ptr + (base + p // T * step) + offsets, inside & (p // T < rounds))
        async_copy.commit_group()
    k = sample(x_ptr, group * W + local, (group * W + local < channels), rows, 1, row_stride, 1)
    # Another value to the compiler, which would not carry it from round to round otherwise.
    k_then = k + 0.0
    about = over_tile(k, TILE, J, V)
    mean = about
    scale = about
    beta = about
    for n in range(rounds + (LAG + T - 1) // T):
        # For the next round, while there is something else to do.
        c_next = (group + (n + 1) * G) * W + local
        k_next = sample(x_ptr, c_next, c_next < channels, rows, 1, row_stride, 1)
        ones = gl.full([B, J, V], 0.0, gl.float32, gl.SliceLayout(0, TILE))
        squares = ones
        q = n * T
        for t in gl.static_range(T):
            if t == (LAG - T) // 2:
                at_columns, columns = columns_at(
                    words_ptr, group, member, S, n - 1, (n >= 1) & (n <= rounds), S * G, W, COLUMNS, BS, ADD
                )
                partial = gl.load(at_columns, mask=columns, other=0, volatile=True)
            before = n + (t - LAG) // T
            known = (before >= 0) & (before < rounds)
            if (t - LAG) % T == 0:
                c = (group + before * G) * W + local
                at_totals = totals_at(words_ptr, group, before, S * G, G, local, W)
                here = known & (local >= 0)
                all_one = gl.load(at_totals, mask=here, other=0, volatile=True)
                all_other = gl.load(at_totals + W, mask=here, other=0, volatile=True)
                gamma = gl.load(weight_ptr + c, mask=here, other=0.0)
                beta_c = gl.load(bias_ptr + c, mask=here, other=0.0)
            async_copy.wait_group(AHEAD - 1)
            offsets, inside = lines[t]
            if n < rounds:
                d = ring.index((q + t) % R).load(TILE).to(gl.float32) - gl.where(inside, about, 0.0)
                ones += gl.sum(d, 0)
                squares += gl.sum(d * d, 0)
            later = n + (t + AHEAD) // T
            offsets, inside = lines[(t + AHEAD) % T]
            fetch(ring, (q + t + AHEAD) % R, x_ptr + (base + later * step) + offsets, inside & (later < rounds))
            async_copy.commit_group()
            if t == (LAG - T) // 2:
                sums = gl.sum(await_words(partial, at_columns, columns, epoch + n), 0)
                publish_totals(
                    sums, words_ptr, group, member, n - 1, (n >= 1) & (n <= rounds), epoch, S * G, G, W, COLUMNS, ADD
                )
            if (t - LAG) % T == 0:
                first = await_words(all_one, at_totals, here, epoch + before + 1)
                second = await_words(all_other, at_totals + W, here, epoch + before + 1)
                mean_c, var = moments_from(k_then, first, second, m)
                invstd = 1.0 / gl.sqrt(var + eps)
                if known & (member == n % S):
                    gl.store(invstd_ptr + c, invstd, mask=c < channels)
                mean = over_tile(mean_c, TILE, J, V)
                scale = over_tile(gamma * invstd, TILE, J, V)
                beta = over_tile(beta_c, TILE, J, V)
            if known:
                x = ring.index((q + t - LAG) % R).load(TILE).to(gl.float32)
                y = (x - mean) * scale + beta
                offsets, inside = lines[(t - LAG) % T]
                gl.store(x_ptr + (base + before * step) + offsets, PHI(y, a).to(number), mask=inside)
        if n < rounds:
            publish(gl.sum(ones, 0), gl.sum(squares, 0), words_ptr, group, member, S, n, epoch, S * G, TILE, J, V)
        k_then = k
        k = k_next
        about = over_tile(k, TILE, J, V)
    finish(sync_ptr, sync_ptr, epoch, gl.cdiv(slabs, G), False, True)


@gluon.jit
def backward_kernel(
    dz_ptr, z_ptr, dx_ptr, weight_ptr, bias_ptr, invstd_ptr, sum_dy_ptr, sum_dy_xhat_ptr, words_ptr, sync_ptr,
    rows, channels, row_stride, share, slabs, S, G, m, a,
    INVERSE: gl.constexpr, BACKWARD: gl.constexpr, V: gl.constexpr, J: gl.constexpr, B: gl.constexpr, K: gl.constexpr,
    T: gl.constexpr, LAG: gl.constexpr, AHEAD: gl.constexpr, COLUMNS: gl.constexpr, BS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """dx, ∑ dy and ∑ dy·x̂ of variant II, W = J·V channels at a time."""
    W: gl.constexpr = J * V
    TILE: gl.constexpr = gl.BlockedLayout([K, 1, 1, V], [1, 32 // J, J, 1], [1, WARPS, 1, 1], [3, 2, 1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    ADD: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [WARPS, 1], [1, 0])
    SLOT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0])
    R: gl.constexpr = LAG + AHEAD + 1
    number: gl.constexpr = z_ptr.dtype.element_ty
    group = gl.program_id(0) // S
    member = gl.program_id(0) % S
    epoch = gl.load(sync_ptr, volatile=True)
    rounds = gl.cdiv(slabs - group, G)
    base = gl.cast(group, gl.int64) * W
    step = gl.cast(G, gl.int64) * W
    local = gl.arange(0, W, LANES)
    lines = ()
    for t in gl.static_range(T):
        lines = lines + (line_up(t, member, share, rows, row_stride, TILE, K, B, J, V),)
    ring_z = gl.allocate_shared_memory(number, [R, K, B, J, V], SLOT)
    ring_dz = gl.allocate_shared_memory(number, [R, K, B, J, V], SLOT)
    for p in gl.static_range(AHEAD):
        offsets, inside = lines[p % T]
        fetch(ring_z, p, z_ptr + (base + p // T * step) + offsets, inside & (p // T < rounds))
        fetch(ring_dz, p, dz_ptr + (base + p // T * step) + offsets, inside & (p // T < rounds))
        async_copy.commit_group()
    beta_d = over_tile(gl.load(bias_ptr + group * W + local, mask=group * W + local < channels, other=0.0), TILE, J, V)
    beta = beta_d
    scale = beta_d
    slope = beta_d
    constant = beta_d
    for n in range(rounds + (LAG + T - 1) // T):
        c_next = (group + (n + 1) * G) * W + local
        beta_next = gl.load(bias_ptr + c_next, mask=c_next < channels, other=0.0)
        ones = gl.full([B, J, V], 0.0, gl.float32, gl.SliceLayout(0, TILE))
        others = ones
        q = n * T
        for t in gl.static_range(T):
            if t == (LAG - T) // 2:
                at_columns, columns = columns_at(
                    words_ptr, group, member, S, n - 1, (n >= 1) & (n <= rounds), S * G, W, COLUMNS, BS, ADD
                )
                partial = gl.load(at_columns, mask=columns, other=0, volatile=True)
            before = n + (t - LAG) // T
            known = (before >= 0) & (before < rounds)
            if (t - LAG) % T == 0:
                c = (group + before * G) * W + local
                at_totals = totals_at(words_ptr, group, before, S * G, G, local, W)
                here = known & (local >= 0)
                all_one = gl.load(at_totals, mask=here, other=0, volatile=True)
                all_other = gl.load(at_totals + W, mask=here, other=0, volatile=True)
                gamma = gl.load(weight_ptr + c, mask=here, other=1.0)
                beta_c = gl.load(bias_ptr + c, mask=here, other=0.0)
                invstd = gl.load(invstd_ptr + c, mask=here, other=0.0)
            async_copy.wait_group(AHEAD - 1)
            if n < rounds:
                z = ring_z.index((q + t) % R).load(TILE)
                dz = ring_dz.index((q + t) % R).load(TILE)
                dy, centred = recovered(
                    z, dz, z, 0.0, 0.0, 1.0, beta_d, a, False, False, False, INVERSE, BACKWARD, False
                )
                ones += gl.sum(dy, 0)
                others += gl.sum(dy * centred, 0)
            later = n + (t + AHEAD) // T
            offsets, inside = lines[(t + AHEAD) % T]
            fetch(ring_z, (q + t + AHEAD) % R, z_ptr + (base + later * step) + offsets, inside & (later < rounds))
            fetch(ring_dz, (q + t + AHEAD) % R, dz_ptr + (base + later * step) + offsets, inside & (later < rounds))
            async_copy.commit_group()
            if t == (LAG - T) // 2:
                sums = gl.sum(await_words(partial, at_columns, columns, epoch + n), 0)
                publish_totals(
                    sums, words_ptr, group, member, n - 1, (n >= 1) & (n <= rounds), epoch, S * G, G, W, COLUMNS, ADD
                )
            if (t - LAG) % T == 0:
                one = await_words(all_one, at_totals, here, epoch + before + 1)
                other = await_words(all_other, at_totals + W, here, epoch + before + 1) / gamma
                if known & (member == n % S):
                    gl.store(sum_dy_ptr + c, one, mask=c < channels)
                    gl.store(sum_dy_xhat_ptr + c, other, mask=c < channels)
                beta = over_tile(beta_c, TILE, J, V)
                scale = over_tile(gamma * invstd, TILE, J, V)
                slope = over_tile(-invstd * other / m, TILE, J, V)
                constant = over_tile(-gamma * invstd * one / m, TILE, J, V)
            if known:
                z = ring_z.index((q + t - LAG) % R).load(TILE)
                dz = ring_dz.index((q + t - LAG) % R).load(TILE)
                dy, centred = recovered(z, dz, z, 0.0, 0.0, 1.0, beta, a, False, False, False, INVERSE, BACKWARD, False)
                dx = dy * scale + (centred * slope + constant)
                offsets, inside = lines[(t - LAG) % T]
                gl.store(dx_ptr + (base + before * step) + offsets, dx.to(number), mask=inside)
        if n < rounds:
            publish(gl.sum(ones, 0), gl.sum(others, 0), words_ptr, group, member, S, n, epoch, S * G, TILE, J, V)
        beta_d = over_tile(beta_next, TILE, J, V)
    finish(sync_ptr, sync_ptr, epoch, gl.cdiv(slabs, G), False, True)


SHAPES = [
    (32, 256, 56, 56),
    (128, 256, 56, 56),
    (128, 512, 28, 28),
    (128, 1024, 14, 14),
    (128, 2048, 7, 7),
    (256, 128, 28, 28),
    (256, 512, 28, 28),
    (256, 256, 14, 14),
    (256, 1024, 14, 14),
    (256, 512, 7, 7),
]
PHI, SLOPE = resolve("leaky_relu", 0.01)
WARPS, EACH, TILE_BYTES = 4, 3, 8192
COLUMNS_OF_CSV = [
    "shape",
    "dtype",
    "direction",
    "strip_bytes",
    "T",
    "ahead",
    "S",
    "G",
    "package_us",
    "held_us",
    "apart",
]


def settings(rows: int, channels: int, itemsize: int, maps: int, strip: int) -> dict[str, int] | None:
    """How a strip of so many bytes is shared out, as the package does for channels; None where it does not fit."""
    v, w = 16 // itemsize, strip // itemsize
    where = kernels.plans.card(torch.device("cuda", torch.cuda.current_device()))
    pixels = TILE_BYTES // maps // strip
    tiles = (where.shared // EACH - 2560) // (pixels * strip * maps)
    programs, slabs = EACH * where.processors, channels // w
    best: tuple[float, dict[str, int] | None] = (float("inf"), None)
    for g in range(1, min(programs, slabs) + 1):
        share = triton.cdiv(rows, programs // g)
        t, s = triton.cdiv(share, pixels), triton.cdiv(rows, share)
        lag = t + min(2, t - 1)
        ahead = min(tiles - lag - 1, lag)
        if ahead < 1 or t < 2:
            continue
        cost = (
            (triton.cdiv(slabs, g) + 0.5) * (share * w / v + t * pixels * w / v / 4 + 512) * (1.06 if ahead == 1 else 1)
        )
        if cost < best[0]:
            best = cost, {"share": share, "T": t, "LAG": lag, "AHEAD": ahead, "S": s, "G": g, "V": v, "J": w // v}
    plan = best[1]
    if plan is not None:
        plan["K"] = max(1, pixels * plan["J"] // (32 * WARPS))
        plan["B"] = pixels // plan["K"]
        plan["COLUMNS"] = triton.next_power_of_2(triton.cdiv(2 * w, plan["S"]))
        plan["BS"] = max(triton.next_power_of_2(plan["S"]), 32 * WARPS // plan["COLUMNS"])
    return plan


def candidates(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """By direction: the package's call and its result, and of every strip the setting, a call and its result."""
    x, dz = (
        torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=torch.channels_last) for _ in range(2)
    )
    channels, rows = shape[1], x.numel() // shape[1]
    weight, bias = torch.rand(channels, device="cuda") + 0.5, torch.randn(channels, device="cuda")
    one, other, invstd = (torch.zeros(channels, device="cuda") for _ in range(3))
    words = torch.zeros(1 << 20, dtype=torch.int64, device="cuda")
    sync = torch.zeros(2, dtype=torch.int32, device="cuda")
    rest = (1e-6, PHI, SLOPE)
    z, again, mine, dx = x.clone(), x.clone(), x.clone(), torch.empty_like(x)
    stat = kernels.normalize_batch_(z, weight, bias, None, None, None, 0.1, 1e-5, *rest)
    forward, inverse, backward = kernels.compiled(PHI)
    found: dict[str, Any] = {"forward": {}, "backward": {}}
    found["forward"]["package"] = (
        None, lambda: kernels.normalize_batch_(again, weight, bias, None, None, None, 0.1, 1e-5, *rest), z,
    )  # fmt: skip
    want = kernels.input_grad_batch(dz, z, weight, bias, stat, *rest, "II")[0]
    found["backward"]["package"] = (
        None, lambda: kernels.input_grad_batch(dz, z, weight, bias, stat, *rest, "II"), want,
    )  # fmt: skip
    for (direction, maps), strip in itertools.product((("forward", 1), ("backward", 2)), (32, 64, 128)):
        plan = settings(rows, channels, x.element_size(), maps, strip)
        if plan is None or channels % (plan["J"] * plan["V"]):
            continue
        s, g, share = plan["S"], plan["G"], plan["share"]
        slabs = channels // (plan["J"] * plan["V"])
        numbers = (rows, channels, channels, share, slabs, s, g, float(rows))
        known = {n: plan[n] for n in ("V", "J", "B", "K", "T", "LAG", "AHEAD", "COLUMNS", "BS")} | {"WARPS": WARPS}
        options = {"num_warps": WARPS, "maxnreg": 168, "launch_cooperative_grid": True}
        if direction == "forward":
            mine.copy_(x)
            arguments = (mine, weight, bias, invstd, words, sync, *numbers, 1e-5, SLOPE)
            call = partial(forward_kernel[(s * g,)], *arguments, PHI=forward, **known, **options)
        else:
            arguments = (dz, z, dx, weight, bias, stat, one, other, words, sync, *numbers, SLOPE)
            phi = {"INVERSE": inverse, "BACKWARD": backward}
            call = partial(backward_kernel[(s * g,)], *arguments, **phi, **known, **options)
        call()
        found[direction][str(strip)] = (plan, call, (mine if direction == "forward" else dx).clone())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--shapes", type=int, nargs="+", default=range(len(SHAPES)), help="their numbers in the list")
    given = parser.parse_args()
    with gpu_file(given.out, "strips").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(COLUMNS_OF_CSV)
        for dtype, i in itertools.product((torch.bfloat16, torch.float32), given.shapes):
            for direction, by_name in candidates(SHAPES[i], dtype).items():
                times = device_times({name: call for name, (_, call, _) in by_name.items()}, given.rounds)
                median = {name: sorted(us)[len(us) // 2] for name, us in times.items()}
                truth = by_name.pop("package")[2].float()
                for strip, (plan, _, got) in by_name.items():
                    apart = float((got.float() - truth).abs().max() / truth.abs().max())
                    figures = [plan[n] for n in ("T", "AHEAD", "S", "G")]
                    row = ["x".join(map(str, SHAPES[i])), str(dtype)[6:], direction, strip, *figures]
                    rows.writerow([*row, f"{median['package']:.1f}", f"{median[strip]:.1f}", f"{apart:.1e}"])
                    print(
                        *row, f"package {median['package']:.1f} held {median[strip]:.1f} apart {apart:.1e}", flush=True
                    )
            file.flush()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
