"""Forward and backward in one launch each where channels are innermost, or have few pixels: what is held is read once.

A slab is P neighbouring channels: P·pixels elements of every row, rounded up to W. All slabs are worked on at once, and the S
members of a slab take tiles of K·B rows in turn, so that all programs together sweep over memory. The grid is of slabs and
members. A member

1. copies its tiles into shared memory, AHEAD of adding them up. The first Q go on into registers, the next H stay there, the
   others take turns in the R slots of a ring, where the last R stay. Where H are all, Q = R = 0;
2. publishes its sums, and adds up those of all members; where these are many, some columns of them, publishes such totals, and
   collects all totals;
3. sweeps back: transforms the tiles, the last one first, and copies into each slot of the ring that becomes free the tile that
   stands R before. The L2 cache has read these last, and has the more of them as it need not have the first.

On the way there a tile is complete when AHEAD − 1 copies are still under way, on the way back when R − 1 are; where r is copied,
too, AHEAD tiles ahead of its use and in one group with x, when AHEAD − 1 are, which is enough for both: R ≥ AHEAD. Tiles
that go on into registers are loaded twice, the second time when the next copy is under way: R > AHEAD, so that it goes elsewhere.

The language is Gluon, as in :mod:`.ring`. There is one round to a launch, so that words need no second set.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .device import (
    await_words,
    coefficients,
    dx_of,
    epoch_of,
    finish,
    guarded,
    moments_from,
    one_of,
    plus,
    recovered,
    samples,
    stamped,
    stepped,
    track,
    tracked,
    z_of,
)
from .ring import await_pairs, fetch


@gluon.jit
def begin(
    rows, channels, row_stride, S,
    TILE: gl.constexpr, K: gl.constexpr, B: gl.constexpr, W: gl.constexpr, P: gl.constexpr, V: gl.constexpr,
    PIXELS: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """Where a program's tiles lie.

    Returns slab and member; the number of tiles; where the first begins, and how far it is to the next; offsets within a tile;
    and what :func:`inside` takes: which elements of a tile belong to the slab, the rows that they are in, rows from the first
    tile's first to the last there is, and how many fewer there are with each tile.
    """
    # As two numbers, so that nothing is divided before the first copy.
    slab, member = gl.program_id(0), gl.program_id(1)
    by_row: gl.constexpr = gl.SliceLayout(2, TILE)
    k = gl.expand_dims(gl.arange(0, K, gl.SliceLayout(1, by_row)), 1)
    row = gl.expand_dims(k * B + gl.expand_dims(gl.arange(0, B, gl.SliceLayout(0, by_row)), 0), 2)
    e = gl.expand_dims(gl.expand_dims(gl.arange(0, W, gl.SliceLayout(0, gl.SliceLayout(0, TILE))), 0), 0)
    there = row >= 0
    if not WHOLE:
        there = there & (e // V * V < gl.minimum(P, channels - slab * P) * PIXELS)
    # In whole vectors, so that the compiler sees them.
    stride = row_stride // V * V
    first = gl.cast(member * (K * B), gl.int64) * stride + slab * P * PIXELS // V * V
    step = gl.cast(S * (K * B), gl.int64) * stride
    tiles = gl.cdiv(gl.cdiv(rows, K * B) - member, S)
    return slab, member, tiles, first, step, row * stride + e, (there, row, rows - member * (K * B), S * (K * B))


@gluon.jit
def inside(t, limits):
    """Which elements of a member's tile t there are; only its last tile may have too few rows."""
    there, row, left, fewer = limits
    return there & (row < left - t * fewer)


@gluon.jit
def slot_of(t, Q: gl.constexpr, H: gl.constexpr, R: gl.constexpr):
    """Where a member's tile t is held, or, if registers will hold it, where it passes through."""
    if R == 0:
        return t
    elif Q == 0:
        return gl.where(t < H, t, H + (t - H) % R)
    else:
        return gl.where(t < Q, H + t % R, gl.where(t < Q + H, t - Q, H + (t - Q - H) % R))


@gluon.jit
def fetch_all(
    ring_z, ring_dz, ring_r, slot, z_ptr, dz_ptr, r_ptr, at, there, RESIDUAL: gl.constexpr
):  # fmt: skip
    """Start to copy a tile of every map that backward reads."""
    fetch(ring_z, slot, z_ptr + at, there)
    fetch(ring_dz, slot, dz_ptr + at, there)
    if RESIDUAL:
        fetch(ring_r, slot, r_ptr + at, there)


@gluon.jit
def floats(x, QUICK: gl.constexpr):
    """x as float32; QUICK: of two bfloat16 in a register each takes one instruction, where a conversion takes three for both.

    Measured: forward 0.97 to 1.01 of the time where all tiles are held, 1.00 to 1.05 where not; backward 0.98 to 1.00 on large
    maps, 1.00 to 1.02 on small ones.
    """
    if QUICK and x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=&r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)


@gluon.jit
def deviations(x, k, ones, squares):
    """∑(x − k) and ∑(x − k)² of a tile's columns, added to others."""
    d = x.to(gl.float32) - k
    return ones + gl.sum(d, 0), squares + gl.sum(d * d, 0)


@gluon.jit
def dy_sums(
    z, dz, r, ones, others, mean, invstd, gamma, beta, a,
    RESIDUAL: gl.constexpr, FROM_X: gl.constexpr, HAT: gl.constexpr,
    INVERSE: gl.constexpr, BACKWARD: gl.constexpr, VARIANT_I: gl.constexpr,
):  # fmt: skip
    """∑dy and ∑dy·x̂ of a tile's columns, added to others."""
    z, dz, r = floats(z, True), floats(dz, True), floats(r, True)
    dy, centred = recovered(z, dz, r, mean, invstd, gamma, beta, a, RESIDUAL, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I)
    return ones + gl.sum(dy, 0), others + gl.sum(dy * centred, 0)


@gluon.jit
def affine(
    weight_ptr, bias_ptr, c, known, floor,
    HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr, P: gl.constexpr, LANES: gl.constexpr,
):  # fmt: skip
    """γ and β of a slab's channels; what is not there is made in a layout, which :mod:`.device` knows nothing of."""
    gamma = gl.full([P], 1.0, gl.float32, LANES)
    if HAS_WEIGHT:
        gamma = guarded(weight_ptr, c, known, floor, HAS_WEIGHT, P)
    beta = gl.full([P], 0.0, gl.float32, LANES)
    if HAS_BIAS:
        beta = gl.load(bias_ptr + c, mask=known, other=0.0).to(gl.float32)
    return gamma, beta


@gluon.jit
def owners(W: gl.constexpr, P: gl.constexpr, PIXELS: gl.constexpr, ELEMENTS: gl.constexpr):
    """Which of a slab's P channels has which of its elements; the last one has what is behind it, where nothing is read."""
    return gl.minimum(gl.arange(0, W, ELEMENTS) // PIXELS, P - 1)


@gluon.jit
def turned(a, b, SHAPE: gl.constexpr, ROOM: gl.constexpr, LAYOUT: gl.constexpr):
    """Both in another layout, by way of shared memory: threads wait for each other once, for each conversion twice or more."""
    a_room = gl.allocate_shared_memory(gl.float32, SHAPE, ROOM, a)
    b_room = gl.allocate_shared_memory(gl.float32, SHAPE, ROOM, b)
    return a_room.load(LAYOUT), b_room.load(LAYOUT)


@gluon.jit
def by_channel(
    a, b, V: gl.constexpr, W: gl.constexpr, P: gl.constexpr, PIXELS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Two sums over lines of a slab, for each of its channels.

    As they come, a thread has V columns of a line, and warps have lines. They are turned round: warps have columns then, as far
    as there are as many, with nothing to add up between them, and a thread has lines.
    """
    ACROSS: gl.constexpr = W if W < WARPS else WARPS
    WIDE: gl.constexpr = W // ACROSS if W // ACROSS < 32 else 32
    ROWS: gl.constexpr = V * WIDE * ACROSS // W
    LINES: gl.constexpr = gl.BlockedLayout([ROWS, 1], [32 // WIDE, WIDE], [WARPS // ACROSS, ACROSS], [1, 0])
    # Threads of a warp that are lines apart read from other banks.
    APART: gl.constexpr = gl.SwizzledSharedLayout(WIDE, ROWS, (W if W < 32 else 32) // WIDE, [1, 0])
    a, b = turned(a, b, [V * 32 * WARPS // W, W], APART, LINES)
    a, b = gl.reduce((a, b), 0, plus)
    if P < W:
        # Each channel's elements, filled up to a power of two.
        LONG: gl.constexpr = W // P
        i = gl.arange(0, W, gl.BlockedLayout([W // (32 * WARPS) if W > 32 * WARPS else 1], [32], [WARPS], [0]))
        own = i % LONG < PIXELS
        at = gl.where(own, i // LONG * PIXELS + i % LONG, 0)
        a = gl.reshape(gl.where(own, gl.gather(a, at, 0), 0.0), [P, LONG])
        b = gl.reshape(gl.where(own, gl.gather(b, at, 0), 0.0), [P, LONG])
        a, b = gl.reduce((a, b), 1, plus)
    return a, b


@gluon.jit
def over_tile(v, TILE: gl.constexpr, W: gl.constexpr, P: gl.constexpr, PIXELS: gl.constexpr):
    """What a slab's channels have, as its tiles have it."""
    ELEMENTS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, TILE))
    v = gl.gather(v, owners(W, P, PIXELS, ELEMENTS), 0) if P < W else gl.convert_layout(v, ELEMENTS)
    return gl.expand_dims(gl.expand_dims(v, 0), 0)


@gluon.jit
def three_over_tile(
    u, v, w, TILE: gl.constexpr, W: gl.constexpr, P: gl.constexpr, PIXELS: gl.constexpr
):  # fmt: skip
    """Three of them; where channels are elements, as :func:`turned`."""
    if P == W:
        ELEMENTS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, TILE))
        LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        w_room = gl.allocate_shared_memory(gl.float32, [P], LINE, w)
        u, v = turned(u, v, [P], LINE, ELEMENTS)
        w = w_room.load(ELEMENTS)
    return over_tile(u, TILE, W, P, PIXELS), over_tile(v, TILE, W, P, PIXELS), over_tile(w, TILE, W, P, PIXELS)


@gluon.jit
def collect(words_ptr, n, stamp, P: gl.constexpr, BS: gl.constexpr, WARPS: gl.constexpr):
    """The sums of n ≤ BS times P pairs of words, once all bear the stamp.

    There are at least as many pairs as threads. If there are no more, a thread waits for its own by itself, as in rings:
    measured, forward 0.96 to 1.00 of the time of small maps.
    """
    LONG: gl.constexpr = P if P < 32 else 32
    LINES: gl.constexpr = 32 * WARPS // LONG
    MOST: gl.constexpr = BS if BS > LINES else LINES
    PAIRS: gl.constexpr = gl.BlockedLayout([1, 1], [32 // LONG, LONG], [WARPS, 1], [1, 0])
    # All of a channel to one thread.
    ALL: gl.constexpr = gl.BlockedLayout([LINES, 1], [1, 32], [1, WARPS], [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    pair = gl.expand_dims(gl.arange(0, MOST, gl.SliceLayout(1, PAIRS)), 1) * P
    pair = pair + gl.expand_dims(gl.arange(0, P, gl.SliceLayout(0, PAIRS)), 0)
    at, here = words_ptr + pair * 2, pair < n * P
    if MOST == LINES and P == LONG:
        one = gl.load(at, mask=here, other=0, volatile=True)
        other = gl.load(at + 1, mask=here, other=0, volatile=True)
        one, other = await_pairs(one, other, at, stamp, here)
    else:
        one, other = gl.split(await_words(gl.join(at, at + 1), gl.join(here, here), stamp))
        if MOST > LINES:
            # Those that a thread has itself.
            SPLIT: gl.constexpr = [MOST // LINES, LINES, P]
            one, other = gl.reduce((gl.reshape(one, SPLIT), gl.reshape(other, SPLIT)), 0, plus)
    one, other = turned(one, other, [LINES, P], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]), ALL)
    one, other = gl.reduce((one, other), 0, plus)
    return gl.convert_layout(one, LANES), gl.convert_layout(other, LANES)


@gluon.jit
def exchange(
    one, other, words_ptr, slab, member, S, slabs, epoch,
    P: gl.constexpr, COLUMNS: gl.constexpr, BS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The sums of both over the members of a slab, in an order that is the same for all members.

    Few words: every member adds up all of them (COLUMNS is 2·P). Many: each adds up COLUMNS of the 2·P columns for all, if there
    are any left. COLUMNS divides 2·P. The layouts have as many words as threads, or more: no two threads read one word and
    disagree about it.
    """
    # Not 0, which fresh words hold.
    stamp = epoch + 1
    partial = words_ptr + slab * S * 2 * P
    # As they come, without a turn.
    own = partial + (member * P + gl.arange(0, P, one.type.layout)) * 2
    gl.store(own, stamped(one, stamp))
    gl.store(own + 1, stamped(other, stamp))
    if COLUMNS == 2 * P:
        one, other = collect(partial, S, stamp, P, BS, WARPS)
    else:
        # Columns that a warp reads side by side.
        WIDE: gl.constexpr = COLUMNS if COLUMNS < 32 else 32
        ADD: gl.constexpr = gl.BlockedLayout([1, 1], [32 // WIDE, WIDE], [WARPS, 1], [1, 0])
        totals = words_ptr + (slabs * S + slab) * 2 * P
        if member * COLUMNS < 2 * P:
            s = gl.expand_dims(gl.arange(0, BS, gl.SliceLayout(1, ADD)), 1)
            j = member * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, ADD))
            column = gl.expand_dims(j, 0)
            sums = gl.sum(await_words(partial + s * 2 * P + column, (s < S) & (column >= 0), stamp), 0)
            gl.store(totals + j, stamped(sums, stamp))
        one, other = collect(totals, 1, stamp, P, 1, WARPS)
    return one, other


@gluon.jit
def forward_kernel(
    x_ptr, r_ptr, weight_ptr, bias_ptr, invstd_ptr, running_mean_ptr, running_var_ptr, tracked_ptr, words_ptr, sync_ptr,
    rows, channels, row_stride, slabs, S, m, momentum, eps, floor, a,
    TRACK: gl.constexpr, CUMULATIVE: gl.constexpr, COUNTED: gl.constexpr,
    HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PHI: gl.constexpr,
    V: gl.constexpr, P: gl.constexpr, W: gl.constexpr, K: gl.constexpr, B: gl.constexpr,
    PIXELS: gl.constexpr, WHOLE: gl.constexpr,
    Q: gl.constexpr, H: gl.constexpr, R: gl.constexpr, AHEAD: gl.constexpr, SHARED: gl.constexpr,
    COLUMNS: gl.constexpr, BS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As :func:`.device.forward_kernel`. Bytes: x read once, and again what is not held; r read and z written once."""
    J: gl.constexpr = W // V if W // V < 32 else 32
    TILE: gl.constexpr = gl.BlockedLayout([K, 1, V], [1, 32 // J, J], [1, WARPS * J * V // W, W // V // J], [2, 1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    SLOT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    number: gl.constexpr = x_ptr.dtype.element_ty
    slab, member, tiles, first, step, offsets, limits = begin(
        rows, channels, row_stride, S, TILE, K, B, W, P, V, PIXELS, WHOLE
    )
    c = slab * P + gl.arange(0, P, LANES)
    known = c < channels
    # What is waited for first is asked for first.
    nine = samples(x_ptr, c, known, rows, PIXELS, row_stride, PIXELS, stepped)
    ring = gl.allocate_shared_memory(number, [H + R, K, B, W], SLOT)
    # r is wanted for the transform alone.
    ring_r = gl.allocate_shared_memory(number, [AHEAD if RESIDUAL else 1, K, B, W], SLOT)
    for p in gl.static_range(AHEAD):
        fetch(ring, slot_of(p, Q, H, R), x_ptr + (first + p * step) + offsets, inside(p, limits))
        async_copy.commit_group()
    epoch = epoch_of(sync_ptr)
    gamma, beta = affine(weight_ptr, bias_ptr, c, known, floor, HAS_WEIGHT, HAS_BIAS, P, LANES)
    if TRACK:
        mine = known & (member == S - 1)
        was = tracked(running_mean_ptr, running_var_ptr, tracked_ptr, c, mine, momentum, CUMULATIVE)
    about = one_of(nine)
    k = over_tile(about, TILE, W, P, PIXELS)
    ones = gl.full([B, W], 0.0, gl.float32, gl.SliceLayout(0, TILE))
    squares = ones
    # All rows: only a member's last tile may have too few, and that one is neither kept nor copied again.
    whole = limits[0]
    kept = ()
    for t in gl.static_range(Q):
        async_copy.wait_group(AHEAD - 1)
        ones, squares = deviations(ring.index(slot_of(t, Q, H, R)).load(TILE), gl.where(whole, k, 0.0), ones, squares)
        at = x_ptr + (first + (t + AHEAD) * step) + offsets
        fetch(ring, slot_of(t + AHEAD, Q, H, R), at, inside(t + AHEAD, limits))
        async_copy.commit_group()
        # Once more: else the compiler would hold what the sums made of it. The last one first, as the way back takes them.
        kept = (ring.index(slot_of(t, Q, H, R)).load(TILE),) + kept
    for t in range(Q, tiles):
        async_copy.wait_group(AHEAD - 1)
        # Where there is nothing, zeros were copied: they deviate by nothing from 0.
        about_tile = gl.where(inside(t, limits), k, 0.0)
        tile = floats(ring.index(slot_of(t, Q, H, R)).load(TILE), R == 0)
        ones, squares = deviations(tile, about_tile, ones, squares)
        later = t + AHEAD
        # Behind the last, nothing instead of zeros, which would stand where a tile is held.
        if later < tiles:
            fetch(ring, slot_of(later, Q, H, R), x_ptr + (first + later * step) + offsets, inside(later, limits))
        async_copy.commit_group()
    # All tiles have come; from here on, groups are those of the way back.
    async_copy.wait_group(0)
    if RESIDUAL:
        for p in gl.static_range(AHEAD):
            t = tiles - 1 - p
            fetch(ring_r, p, r_ptr + (first + t * step) + offsets, inside(t, limits) & (t >= 0))
            async_copy.commit_group()
    one, other = by_channel(ones, squares, V, W, P, PIXELS, WARPS)
    if SHARED:
        one, other = exchange(one, other, words_ptr, slab, member, S, slabs, epoch, P, COLUMNS, BS, WARPS)
    else:
        one, other = gl.convert_layout(one, LANES), gl.convert_layout(other, LANES)
    mean, var = moments_from(about, one, other, m)
    invstd = 1.0 / gl.sqrt(var + eps)
    # The last member has no more tiles than others.
    if member == S - 1:
        gl.store(invstd_ptr + c, invstd, mask=known)
        if TRACK:
            track(running_mean_ptr, running_var_ptr, was, c, known, mean, var, m)
    mean, scale, beta = three_over_tile(mean, gamma * invstd, beta, TILE, W, P, PIXELS)
    for i in range(tiles - Q):
        t = tiles - 1 - i
        if RESIDUAL:
            async_copy.wait_group(AHEAD - 1)
        elif R > 0:
            async_copy.wait_group(R - 1)
        x = ring.index(slot_of(t, Q, H, R)).load(TILE)
        r = ring_r.index(i % AHEAD).load(TILE) if RESIDUAL else x
        z = z_of(floats(x, R == 0), floats(r, R == 0), mean, scale, beta, a, RESIDUAL, PHI)
        gl.store(x_ptr + (first + t * step) + offsets, z.to(number), mask=inside(t, limits))
        if R > 0:
            at = x_ptr + (first + (t - R) * step) + offsets
            if t >= Q + H + R:
                fetch(ring, slot_of(t, Q, H, R), at, whole)
        if RESIDUAL:
            fetch(ring_r, i % AHEAD, r_ptr + (first + (t - AHEAD) * step) + offsets, whole & (t >= AHEAD))
        if RESIDUAL or R > 0:
            async_copy.commit_group()
    for q in gl.static_range(Q):
        t = Q - 1 - q
        i = tiles - Q + q
        if RESIDUAL:
            async_copy.wait_group(AHEAD - 1)
        r = ring_r.index(i % AHEAD).load(TILE) if RESIDUAL else kept[q]
        z = z_of(kept[q], r, mean, scale, beta, a, RESIDUAL, PHI)
        gl.store(x_ptr + (first + t * step) + offsets, z.to(number), mask=whole)
        if RESIDUAL:
            if q + AHEAD < Q:
                fetch(ring_r, i % AHEAD, r_ptr + (first + (t - AHEAD) * step) + offsets, whole)
            async_copy.commit_group()
    async_copy.wait_group(0)
    finish(sync_ptr, tracked_ptr, epoch, 1, COUNTED, CUMULATIVE, SHARED, ONE_ROUND=True)


@gluon.jit
def backward_kernel(
    dz_ptr, z_ptr, r_ptr, dx_ptr, dr_ptr, weight_ptr, bias_ptr, mean_ptr, invstd_ptr, sum_dy_ptr, sum_dy_xhat_ptr,
    words_ptr, sync_ptr,
    rows, channels, row_stride, slabs, S, m, floor, a,
    HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr, RESIDUAL: gl.constexpr, NEED_R: gl.constexpr,
    FROM_X: gl.constexpr, HAT: gl.constexpr, INVERSE: gl.constexpr, BACKWARD: gl.constexpr, VARIANT_I: gl.constexpr,
    V: gl.constexpr, P: gl.constexpr, W: gl.constexpr, K: gl.constexpr, B: gl.constexpr,
    PIXELS: gl.constexpr, WHOLE: gl.constexpr,
    Q: gl.constexpr, H: gl.constexpr, R: gl.constexpr, AHEAD: gl.constexpr, SHARED: gl.constexpr,
    COLUMNS: gl.constexpr, BS: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As :func:`.device.backward_kernel`. Bytes: z, dz and r read once, and again what is not held; dx and dr written once."""
    J: gl.constexpr = W // V if W // V < 32 else 32
    TILE: gl.constexpr = gl.BlockedLayout([K, 1, V], [1, 32 // J, J], [1, WARPS * J * V // W, W // V // J], [2, 1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    SLOT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    number: gl.constexpr = z_ptr.dtype.element_ty
    slab, member, tiles, first, step, offsets, limits = begin(
        rows, channels, row_stride, S, TILE, K, B, W, P, V, PIXELS, WHOLE
    )
    c = slab * P + gl.arange(0, P, LANES)
    known = c < channels
    # What is waited for first is asked for first.
    gamma_c, beta_c = affine(weight_ptr, bias_ptr, c, known, floor, HAS_WEIGHT, HAS_BIAS, P, LANES)
    invstd_c = gl.load(invstd_ptr + c, mask=known, other=0.0)
    mean_c = gl.load(mean_ptr + c, mask=known, other=0.0) if FROM_X else invstd_c
    ring_z = gl.allocate_shared_memory(number, [H + R, K, B, W], SLOT)
    ring_dz = gl.allocate_shared_memory(number, [H + R, K, B, W], SLOT)
    ring_r = gl.allocate_shared_memory(number, [H + R if RESIDUAL else 1, K, B, W], SLOT)
    for p in gl.static_range(AHEAD):
        at = (first + p * step) + offsets
        fetch_all(ring_z, ring_dz, ring_r, slot_of(p, Q, H, R), z_ptr, dz_ptr, r_ptr, at, inside(p, limits), RESIDUAL)
        async_copy.commit_group()
    epoch = epoch_of(sync_ptr)
    gamma = over_tile(gamma_c, TILE, W, P, PIXELS)
    beta = over_tile(beta_c, TILE, W, P, PIXELS)
    invstd = over_tile(invstd_c, TILE, W, P, PIXELS)
    mean = over_tile(mean_c, TILE, W, P, PIXELS)
    ones = gl.full([B, W], 0.0, gl.float32, gl.SliceLayout(0, TILE))
    others = ones
    # All rows: only a member's last tile may have too few, and that one is neither kept nor copied again.
    whole = limits[0]
    kept_z = ()
    kept_dz = ()
    kept_r = ()
    for t in gl.static_range(Q):
        async_copy.wait_group(AHEAD - 1)
        slot = slot_of(t, Q, H, R)
        z = ring_z.index(slot).load(TILE)
        dz = ring_dz.index(slot).load(TILE)
        r = ring_r.index(slot).load(TILE) if RESIDUAL else z
        ones, others = dy_sums(
            z, dz, r, ones, others, mean, invstd, gamma, beta, a, RESIDUAL, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I
        )
        at, there = (first + (t + AHEAD) * step) + offsets, inside(t + AHEAD, limits)
        fetch_all(ring_z, ring_dz, ring_r, slot_of(t + AHEAD, Q, H, R), z_ptr, dz_ptr, r_ptr, at, there, RESIDUAL)
        async_copy.commit_group()
        # As forward.
        kept_z = (ring_z.index(slot).load(TILE),) + kept_z
        kept_dz = (ring_dz.index(slot).load(TILE),) + kept_dz
        if RESIDUAL:
            kept_r = (ring_r.index(slot).load(TILE),) + kept_r
    for t in range(Q, tiles):
        async_copy.wait_group(AHEAD - 1)
        # Where there is nothing, zeros were copied: dz = 0, and with it dy.
        z = ring_z.index(slot_of(t, Q, H, R)).load(TILE)
        dz = ring_dz.index(slot_of(t, Q, H, R)).load(TILE)
        r = ring_r.index(slot_of(t, Q, H, R)).load(TILE) if RESIDUAL else z
        ones, others = dy_sums(
            z, dz, r, ones, others, mean, invstd, gamma, beta, a, RESIDUAL, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I
        )
        later = t + AHEAD
        # Behind the last, nothing instead of zeros, which would stand where a tile is held.
        if later < tiles:
            at, there = (first + later * step) + offsets, inside(later, limits)
            fetch_all(ring_z, ring_dz, ring_r, slot_of(later, Q, H, R), z_ptr, dz_ptr, r_ptr, at, there, RESIDUAL)
        async_copy.commit_group()
    # All tiles have come; from here on, groups are those of the way back.
    async_copy.wait_group(0)
    one, other = by_channel(ones, others, V, W, P, PIXELS, WARPS)
    if SHARED:
        one, other = exchange(one, other, words_ptr, slab, member, S, slabs, epoch, P, COLUMNS, BS, WARPS)
    else:
        one, other = gl.convert_layout(one, LANES), gl.convert_layout(other, LANES)
    if not VARIANT_I:
        other = other / gamma_c
    scale, slope, constant = coefficients(one, other, gamma_c, invstd_c, m, VARIANT_I)
    if member == S - 1:
        gl.store(sum_dy_ptr + c, one, mask=known)
        gl.store(sum_dy_xhat_ptr + c, other, mask=known)
    scale, slope, constant = three_over_tile(scale, slope, constant, TILE, W, P, PIXELS)
    for i in range(tiles - Q):
        t = tiles - 1 - i
        if R > 0:
            async_copy.wait_group(R - 1)
        z = ring_z.index(slot_of(t, Q, H, R)).load(TILE)
        dz = ring_dz.index(slot_of(t, Q, H, R)).load(TILE)
        r = ring_r.index(slot_of(t, Q, H, R)).load(TILE) if RESIDUAL else z
        dx, dy = dx_of(
            floats(z, True), floats(dz, True), floats(r, True), mean, invstd, gamma, beta, scale, slope, constant, a,
            RESIDUAL, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I,
        )  # fmt: skip
        at, there = (first + t * step) + offsets, inside(t, limits)
        gl.store(dx_ptr + at, dx.to(number), mask=there)
        if NEED_R:
            gl.store(dr_ptr + at, dy.to(number), mask=there)
        if R > 0:
            if t >= Q + H + R:
                at = (first + (t - R) * step) + offsets
                fetch_all(ring_z, ring_dz, ring_r, slot_of(t, Q, H, R), z_ptr, dz_ptr, r_ptr, at, whole, RESIDUAL)
            async_copy.commit_group()
    for q in gl.static_range(Q):
        t = Q - 1 - q
        dx, dy = dx_of(
            floats(kept_z[q], True), floats(kept_dz[q], True), floats(kept_r[q] if RESIDUAL else kept_z[q], True),
            mean, invstd, gamma, beta, scale, slope, constant, a,
            RESIDUAL, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I,
        )  # fmt: skip
        at = (first + t * step) + offsets
        gl.store(dx_ptr + at, dx.to(number), mask=whole)
        if NEED_R:
            gl.store(dr_ptr + at, dy.to(number), mask=whole)
    async_copy.wait_group(0)
    finish(sync_ptr, sync_ptr, epoch, 1, False, False, SHARED, ONE_ROUND=True)
