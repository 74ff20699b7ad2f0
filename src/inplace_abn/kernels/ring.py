"""Forward and backward in one launch each where channels are outermost: maps are read from memory once, and from nowhere again.

What is read is copied into shared memory, ahead of its use, and stays there until it has been summed and, some tiles later,
transformed, so that the memory has reads and writes in hand while programs exchange their sums. The language is Gluon, in which
shared memory is explicit; helpers that know no layout are those of :mod:`.device`.

A slab is one channel: its rows are seen as one line of ``vectors`` vectors of V elements, cut into tiles of ``each`` vectors, for
which there is room for LINES. The S members of a team take them in turn, T each, so that all of them together walk through
memory. For each of its tiles in turn a member

1. waits for the copy, loads the tile and the one it had LAG tiles ago, and starts the copy of the one AHEAD tiles on, into the
   slot that is free by that;
2. adds the tile up;
3. transforms and stores the earlier one. If that is the first of its channel, it collects the channel's sums first, which all
   members have published LAG − T tiles ago, so that nobody waits for long. It has asked for them EARLY tiles before.

With the last tile of a channel it publishes its sums. LAG + AHEAD slots serve, T < LAG ≤ 2·T. The words of round n are
overwritten in round n + 4, by a member that has collected round n + 2, which others have published after they collected round n.
Where rows start anywhere, what lies in no whole vector is loaded apart, twice, by one member for each row.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from .device import (
    PATIENCE,
    coefficients,
    dx_of,
    epoch_of,
    finish,
    guarded,
    moments_from,
    plus,
    recovered,
    sample,
    stamped,
    track,
    tracked,
    value,
    z_of,
)

# Sets of words, between which rounds alternate.
SETS = gl.constexpr(4)
# A thread looks at its two words until both bear the stamp. Out: their values; in: the words as they were, the address of the
# first, the stamp, whether there are any.
LOOK_ALONE = gl.constexpr(f"""{{
    .reg .pred missing;
    .reg .b32  stamp, looks;
    .reg .b64  one, other;
    mov.b64    one, $2;
    mov.b64    other, $3;
    mov.b32    looks, 0;
AGAIN:
    mov.b64    {{$0, stamp}}, one;
    setp.ne.b32     missing, stamp, $5;
    mov.b64    {{$1, stamp}}, other;
    setp.ne.or.b32  missing, stamp, $5, missing;
    setp.ne.and.b32 missing, $6, 0, missing;
    @!missing  bra FOUND;
    ld.volatile.global.b64 one, [$4];
    ld.volatile.global.b64 other, [$4+8];
    add.u32    looks, looks, 1;
    setp.lt.u32 missing, looks, {PATIENCE.value};
    @missing   bra AGAIN;
    trap;
FOUND:
}}""")


@gluon.jit
def line_up(
    t, member, S, each, vectors, per_row, pixels, row_stride,
    TILE: gl.constexpr, LINES: gl.constexpr, V: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """Of the vectors of a member's tile t: offsets from a channel's first element, room behind them in their row, and a mask."""
    own = gl.arange(0, LINES, gl.SliceLayout(1, TILE))
    f = (t * S + member) * each + own
    j = f % per_row
    inside = (own < each) & (f < vectors)
    if EDGES:
        return f // per_row * row_stride + j * V, pixels - (j + 1) * V, inside
    else:
        return (f // per_row * (row_stride // V) + j) * V, inside, inside


@gluon.jit
def begin(
    pixels, row_stride, channel_stride, per_row, vectors, each, slabs, S, G,
    TILE: gl.constexpr, V: gl.constexpr, LINES: gl.constexpr, T: gl.constexpr, EDGES: gl.constexpr,
):  # fmt: skip
    """Which group and member a program is, its rounds, the first element of their channels, and its tiles lined up."""
    group = gl.program_id(0) // S
    member = gl.program_id(0) % S
    # In whole vectors, so that the compiler sees them.
    stride = gl.cast(channel_stride, gl.int64) if EDGES else gl.cast(channel_stride // V, gl.int64) * V
    lines = ()
    for t in gl.static_range(T):
        lines = lines + (line_up(t, member, S, each, vectors, per_row, pixels, row_stride, TILE, LINES, V, EDGES),)
    return group, member, gl.cdiv(slabs - group, G), group * stride, G * stride, lines


@gluon.jit
def spot(channel, lines, t: gl.constexpr, TILE: gl.constexpr, V: gl.constexpr, EDGES: gl.constexpr):
    """Where a member's tile t of a channel lies, out of what lines them all up: a first element, offsets from it and a mask.

    Where rows start anywhere (97×97), vectors start at the next multiple of V, and the last one of a row may have no room.
    """
    start, room, inside = lines[t]
    if EDGES:
        off = (channel % V).to(gl.int32)
        whole = (start + off + V - 1) // V * V
        inside = inside & (whole - start - off <= room)
        start = whole
    offsets = gl.expand_dims(start, 1) + gl.expand_dims(gl.arange(0, V, gl.SliceLayout(0, TILE)), 0)
    return channel // V * V, offsets, gl.expand_dims(inside, 1)


@gluon.jit
def edges(channel, member, S, rows, pixels, row_stride, LANES: gl.constexpr, EDGES: gl.constexpr, V: gl.constexpr):
    """Offsets and mask of a channel's elements that lie in no whole vector, in every S-th row: V before, V behind."""
    lane = gl.arange(0, EDGES, LANES)
    i = lane % (2 * V)
    r = member + S * (lane // (2 * V))
    start = channel + r.to(gl.int64) * row_stride
    head = ((V - start % V) % V).to(gl.int32)
    s = gl.where(i < V, i, head + (pixels - head) // V * V + i - V)
    return start + s, (r < rows) & (s < pixels) & ((i >= V) | (s < head))


@gluon.jit
def fetch(ring, slot, at, inside):
    """Start to copy a tile; zeros where there is nothing."""
    async_copy.async_copy_global_to_shared(ring.index(slot), at, mask=inside)


@gluon.jit
def fetch_all(
    ring_z, ring_dz, ring_r, n, t: gl.constexpr, z_ptr, dz_ptr, r_ptr, base, step, rounds, lines,
    T: gl.constexpr, R: gl.constexpr, TILE: gl.constexpr, V: gl.constexpr, EDGES: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Start to copy tile t, counted from the first of round n, of every map that backward reads, and commit that as one group."""
    later = n + t // T
    at, offsets, there = spot(base + later * step, lines, t % T, TILE, V, EDGES)
    there = there & (later < rounds)
    slot = (n * T + t) % R
    fetch(ring_z, slot, z_ptr + at + offsets, there)
    fetch(ring_dz, slot, dz_ptr + at + offsets, there)
    if RESIDUAL:
        fetch(ring_r, slot, r_ptr + at + offsets, there)
    async_copy.commit_group()


@gluon.jit
def publish(one, other, words_ptr, group, member, S, n, epoch, programs):
    """A member's sums of round n, for all of its group."""
    own = words_ptr + (n % SETS * programs + group * S + member) * 2
    gl.store(own, stamped(one, epoch + n + 1))
    gl.store(own + 1, stamped(other, epoch + n + 1))


@gluon.jit
def plus_four(a, b, c, d, e, f, g, h):
    """Quadruples, added."""
    return a + e, b + f, c + g, d + h


@gluon.jit
def words_at(words_ptr, group, S, n, programs, LANES: gl.constexpr, BS: gl.constexpr):
    """Where the members of a group publish the first of their two sums in round n."""
    return words_ptr + (n % SETS * programs + group * S + gl.arange(0, BS, LANES)) * 2


@gluon.jit
def look(words_ptr, group, S, n, known, programs, LANES: gl.constexpr, BS: gl.constexpr):
    """The words of a group in round n as they are now, if there is such a round.

    There are at least as many lanes as threads, so that no two threads read one word and disagree about it.
    """
    at = words_at(words_ptr, group, S, n, programs, LANES, BS)
    here = (gl.arange(0, BS, LANES) < S) & known
    return gl.load(at, mask=here, other=0, volatile=True), gl.load(at + 1, mask=here, other=0, volatile=True)


@gluon.jit
def await_pairs(one, other, at, stamp, here):
    """What pairs of words say, once they bear the stamp, after a first look; each thread waits by itself."""
    one, other = gl.inline_asm_elementwise(
        LOOK_ALONE, "=&r,=&r,l,l,l,r,r", [one, other, at, stamp, here.to(gl.int32)],
        dtype=(gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip
    return one.to(gl.float32, bitcast=True), other.to(gl.float32, bitcast=True)


@gluon.jit
def collect(
    one, other, u, v, words_ptr, group, S, n, known, epoch, programs,
    LANES: gl.constexpr, BS: gl.constexpr, ALONE: gl.constexpr,
):  # fmt: skip
    """The sums of both over the members of a group in round n, once all are there, after a first look; and those of u and v.

    ALONE: a thread waits for its words by itself, where it has two at most. To ask all threads after each look takes three
    barriers: measured, 0.95 to 1.00 of the time without up to 32 members of a channel, and no gain with more.
    """
    here = (gl.arange(0, BS, LANES) < S) & known
    stamp = epoch + n + 1
    if ALONE:
        at = words_at(words_ptr, group, S, n, programs, LANES, BS)
        one, other = await_pairs(one, other, at, stamp, here)
    else:
        missing = here & (((one >> 32) != stamp) | ((other >> 32) != stamp))
        polls = 0
        while (gl.max(missing.to(gl.int32), 0) > 0) & (polls < PATIENCE):
            one, other = look(words_ptr, group, S, n, known, programs, LANES, BS)
            missing = here & (((one >> 32) != stamp) | ((other >> 32) != stamp))
            polls += 1
        if polls == PATIENCE:
            gl.inline_asm_elementwise("trap; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        one, other = value(one), value(other)
    return gl.reduce((gl.where(here, one, 0.0), gl.where(here, other, 0.0), u, v), 0, plus_four)


@gluon.jit
def forward_kernel(
    x_ptr, r_ptr, weight_ptr, bias_ptr, invstd_ptr, running_mean_ptr, running_var_ptr, tracked_ptr, words_ptr, sync_ptr,
    rows, pixels, row_stride, channel_stride, per_row, vectors, each, slabs, S, G, m, momentum, eps, floor, a,
    TRACK: gl.constexpr, CUMULATIVE: gl.constexpr, COUNTED: gl.constexpr,
    HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr, RESIDUAL: gl.constexpr, PHI: gl.constexpr,
    V: gl.constexpr, LINES: gl.constexpr, T: gl.constexpr, LAG: gl.constexpr, AHEAD: gl.constexpr, EARLY: gl.constexpr,
    EDGES: gl.constexpr, BS: gl.constexpr, ALONE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As :func:`.device.forward_kernel`. Bytes: x read and written once, r read once."""
    TILE: gl.constexpr = gl.BlockedLayout([1, V], [32, 1], [WARPS, 1], [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    SLOT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    R: gl.constexpr = LAG + AHEAD
    number: gl.constexpr = x_ptr.dtype.element_ty
    group, member, rounds, base, step, lines = begin(
        pixels, row_stride, channel_stride, per_row, vectors, each, slabs, S, G, TILE, V, LINES, T, EDGES
    )
    epoch = epoch_of(sync_ptr)
    ring = gl.allocate_shared_memory(number, [R, LINES, V], SLOT)
    # r is wanted for the transform alone.
    ring_r = gl.allocate_shared_memory(number, [AHEAD if RESIDUAL else 1, LINES, V], SLOT)
    for p in gl.static_range(AHEAD):
        at, offsets, there = spot(base + p // T * step, lines, p % T, TILE, V, EDGES)
        fetch(ring, p, x_ptr + at + offsets, there & (p // T < rounds))
        async_copy.commit_group()
    # What the moments of a channel are taken about, a round a lane; half of the lanes are filled at a time.
    lane = gl.arange(0, BS, LANES)
    whose = group + lane * G
    about = sample(x_ptr, whose, (lane < BS // 2) & (whose < slabs), rows, pixels, row_stride, channel_stride)
    k = gl.sum(gl.where(lane == 0, about, 0.0), 0)
    mean = 0.0
    scale = 0.0
    beta = 0.0
    for n in range(rounds + (LAG + T - 1) // T):
        if (n + 1) % (BS // 2) == 0:
            coming = (lane - n - 1) & (BS - 1)
            whose = group + (n + 1 + coming) * G
            new = coming < BS // 2
            fresh = sample(x_ptr, whose, new & (whose < slabs), rows, pixels, row_stride, channel_stride)
            about = gl.where(new, fresh, about)
        ones = gl.full([LINES], 0.0, gl.float32, gl.SliceLayout(1, TILE))
        squares = ones
        k_next = 0.0
        if EDGES:
            edge, on_edge = edges(base + n * step, member, S, rows, pixels, row_stride, LANES, EDGES, V)
            e = gl.load(x_ptr + edge, mask=on_edge & (n < rounds), other=0.0)
        q = n * T
        for t in gl.static_range(T):
            if (t + EARLY - LAG) % T == 0:
                # Loads that take their time while tiles are added up.
                asked = n + (t + EARLY - LAG) // T
                known = (asked >= 0) & (asked < rounds)
                c = group + asked * G
                one, other = look(words_ptr, group, S, asked, known, S * G, LANES, BS)
                gamma = guarded(weight_ptr, c, known, floor, HAS_WEIGHT, 1) if HAS_WEIGHT else 1.0
                beta_c = gl.load(bias_ptr + c, mask=known, other=0.0).to(gl.float32) if HAS_BIAS else 0.0
                # Another member each time, so that none falls behind.
                mine = known & (member == n % S)
                if TRACK:
                    was = tracked(running_mean_ptr, running_var_ptr, tracked_ptr, c, mine, momentum, CUMULATIVE)
                if EDGES:
                    edge_c, on_edge_c = edges(base + asked * step, member, S, rows, pixels, row_stride, LANES, EDGES, V)
                    e_c = gl.load(x_ptr + edge_c, mask=on_edge_c & known, other=0.0)
                    e_r = gl.load(r_ptr + edge_c, mask=on_edge_c & known, other=0.0) if RESIDUAL else e_c
            async_copy.wait_group(AHEAD - 1)
            # Both tiles of the step, so that the slot of the latter is free.
            new = ring.index((q + t) % R).load(TILE)
            x = ring.index((q + t + AHEAD) % R).load(TILE)
            r = ring_r.index((q + t) % AHEAD).load(TILE) if RESIDUAL else x
            later = n + (t + AHEAD) // T
            at, offsets, there = spot(base + later * step, lines, (t + AHEAD) % T, TILE, V, EDGES)
            fetch(ring, (q + t + AHEAD) % R, x_ptr + at + offsets, there & (later < rounds))
            if RESIDUAL:
                later = n + (t + AHEAD - LAG) // T
                at, offsets, there = spot(base + later * step, lines, (t + AHEAD - LAG) % T, TILE, V, EDGES)
                there = there & (later >= 0) & (later < rounds)
                fetch(ring_r, (q + t) % AHEAD, r_ptr + at + offsets, there)
            async_copy.commit_group()
            if n < rounds:
                # Where there is nothing, zeros were copied: they deviate by nothing from 0.
                _, _, there = spot(base + n * step, lines, t, TILE, V, EDGES)
                d = new.to(gl.float32) - gl.where(there, k, 0.0)
                ones += gl.sum(d, 1)
                squares += gl.sum(d * d, 1)
            before = n + (t - LAG) // T
            known = (before >= 0) & (before < rounds)
            if (t - LAG) % T == 0:
                then = gl.where(lane == (before & (BS - 1)), about, 0.0)
                soon = gl.where(lane == ((n + 1) & (BS - 1)), about, 0.0)
                first, second, k_then, k_next = collect(
                    one, other, then, soon, words_ptr, group, S, before, known, epoch, S * G, LANES, BS, ALONE
                )
                mean, var = moments_from(k_then, first, second, m)
                invstd = 1.0 / gl.sqrt(var + eps)
                if mine:
                    gl.store(invstd_ptr + c, invstd)
                    if TRACK:
                        track(running_mean_ptr, running_var_ptr, was, c, mine, mean, var, m)
                scale = gamma * invstd
                beta = beta_c
                if EDGES:
                    e_z = z_of(e_c, e_r, mean, scale, beta, a, RESIDUAL, PHI)
                    gl.store(x_ptr + edge_c, e_z.to(number), mask=on_edge_c & known)
            if known:
                at, offsets, there = spot(base + before * step, lines, (t - LAG) % T, TILE, V, EDGES)
                z = z_of(x, r, mean, scale, beta, a, RESIDUAL, PHI)
                gl.store(x_ptr + at + offsets, z.to(number), mask=there)
        if n < rounds:
            first, second = gl.reduce((ones, squares), 0, plus)
            if EDGES:
                e_d = gl.where(on_edge, e.to(gl.float32) - k, 0.0)
                e_first, e_second = gl.reduce((e_d, e_d * e_d), 0, plus)
                first += e_first
                second += e_second
            publish(first, second, words_ptr, group, member, S, n, epoch, S * G)
        k = k_next
    async_copy.wait_group(0)
    finish(sync_ptr, tracked_ptr, epoch, gl.cdiv(slabs, G), COUNTED, CUMULATIVE, SHARED=True, ONE_ROUND=False)


@gluon.jit
def backward_kernel(
    dz_ptr, z_ptr, r_ptr, dx_ptr, dr_ptr, weight_ptr, bias_ptr, mean_ptr, invstd_ptr, sum_dy_ptr, sum_dy_xhat_ptr,
    words_ptr, sync_ptr,
    rows, pixels, row_stride, channel_stride, per_row, vectors, each, slabs, S, G, m, floor, a,
    HAS_WEIGHT: gl.constexpr, HAS_BIAS: gl.constexpr, RESIDUAL: gl.constexpr, NEED_R: gl.constexpr,
    FROM_X: gl.constexpr, HAT: gl.constexpr, INVERSE: gl.constexpr, BACKWARD: gl.constexpr, VARIANT_I: gl.constexpr,
    V: gl.constexpr, LINES: gl.constexpr, T: gl.constexpr, LAG: gl.constexpr, AHEAD: gl.constexpr, EARLY: gl.constexpr,
    EDGES: gl.constexpr, BS: gl.constexpr, ALONE: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """As :func:`.device.backward_kernel`. Bytes: z, dz and r read once, dx and dr written once."""
    TILE: gl.constexpr = gl.BlockedLayout([1, V], [32, 1], [WARPS, 1], [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    SLOT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    R: gl.constexpr = LAG + AHEAD
    number: gl.constexpr = z_ptr.dtype.element_ty
    group, member, rounds, base, step, lines = begin(
        pixels, row_stride, channel_stride, per_row, vectors, each, slabs, S, G, TILE, V, LINES, T, EDGES
    )
    epoch = epoch_of(sync_ptr)
    ring_z = gl.allocate_shared_memory(number, [R, LINES, V], SLOT)
    ring_dz = gl.allocate_shared_memory(number, [R, LINES, V], SLOT)
    ring_r = gl.allocate_shared_memory(number, [R if RESIDUAL else 1, LINES, V], SLOT)
    for p in gl.static_range(AHEAD):
        fetch_all(
            ring_z, ring_dz, ring_r, 0, p, z_ptr, dz_ptr, r_ptr, base, step, rounds, lines,
            T, R, TILE, V, EDGES, RESIDUAL,
        )  # fmt: skip
    nothing = gl.full([BS], 0.0, gl.float32, LANES)
    # Of the channel that is being transformed.
    gamma = 1.0
    beta = 0.0
    invstd = 0.0
    mean = 0.0
    scale = 0.0
    slope = 0.0
    constant = 0.0
    # Of the channel that is being added up.
    gamma_d = guarded(weight_ptr, group, rounds > 0, floor, HAS_WEIGHT, 1) if HAS_WEIGHT and VARIANT_I else 1.0
    beta_d = gl.load(bias_ptr + group, mask=rounds > 0, other=0.0).to(gl.float32) if HAS_BIAS else 0.0
    invstd_d = gl.load(invstd_ptr + group, mask=rounds > 0, other=0.0) if FROM_X else 0.0
    mean_d = gl.load(mean_ptr + group, mask=rounds > 0, other=0.0) if FROM_X else 0.0
    for n in range(rounds + (LAG + T - 1) // T):
        here = n < rounds
        # Of the next one, which take their time.
        d = group + (n + 1) * G
        more = n + 1 < rounds
        gamma_next = guarded(weight_ptr, d, more, floor, HAS_WEIGHT, 1) if HAS_WEIGHT and VARIANT_I else 1.0
        beta_next = gl.load(bias_ptr + d, mask=more, other=0.0).to(gl.float32) if HAS_BIAS else 0.0
        invstd_next = gl.load(invstd_ptr + d, mask=more, other=0.0) if FROM_X else 0.0
        mean_next = gl.load(mean_ptr + d, mask=more, other=0.0) if FROM_X else 0.0
        ones = gl.full([LINES], 0.0, gl.float32, gl.SliceLayout(1, TILE))
        others = ones
        if EDGES:
            edge, on_edge = edges(base + n * step, member, S, rows, pixels, row_stride, LANES, EDGES, V)
            e_z = gl.load(z_ptr + edge, mask=on_edge & here, other=0.0)
            e_dz = gl.load(dz_ptr + edge, mask=on_edge & here, other=0.0)
            e_r = gl.load(r_ptr + edge, mask=on_edge & here, other=0.0) if RESIDUAL else e_z
        q = n * T
        for t in gl.static_range(T):
            if (t + EARLY - LAG) % T == 0:
                # Loads that take their time while tiles are added up.
                asked = n + (t + EARLY - LAG) // T
                known = (asked >= 0) & (asked < rounds)
                c = group + asked * G
                one, other = look(words_ptr, group, S, asked, known, S * G, LANES, BS)
                gamma_c = guarded(weight_ptr, c, known, floor, HAS_WEIGHT, 1) if HAS_WEIGHT else 1.0
                beta_c = gl.load(bias_ptr + c, mask=known, other=0.0).to(gl.float32) if HAS_BIAS else 0.0
                invstd_c = gl.load(invstd_ptr + c, mask=known, other=0.0)
                mean_c = gl.load(mean_ptr + c, mask=known, other=0.0) if FROM_X else 0.0
                if EDGES:
                    edge_c, on_edge_c = edges(base + asked * step, member, S, rows, pixels, row_stride, LANES, EDGES, V)
                    c_z = gl.load(z_ptr + edge_c, mask=on_edge_c & known, other=0.0)
                    c_dz = gl.load(dz_ptr + edge_c, mask=on_edge_c & known, other=0.0)
                    c_r = gl.load(r_ptr + edge_c, mask=on_edge_c & known, other=0.0) if RESIDUAL else c_z
            async_copy.wait_group(AHEAD - 1)
            # Both tiles of the step, so that the slot of the latter is free.
            slot, free = (q + t) % R, (q + t + AHEAD) % R
            z_new, dz_new = ring_z.index(slot).load(TILE), ring_dz.index(slot).load(TILE)
            r_new = ring_r.index(slot).load(TILE) if RESIDUAL else z_new
            z, dz = ring_z.index(free).load(TILE), ring_dz.index(free).load(TILE)
            r = ring_r.index(free).load(TILE) if RESIDUAL else z
            fetch_all(
                ring_z, ring_dz, ring_r, n, t + AHEAD, z_ptr, dz_ptr, r_ptr, base, step, rounds, lines,
                T, R, TILE, V, EDGES, RESIDUAL,
            )  # fmt: skip
            if here:
                # Where there is nothing, zeros were copied: dz = 0, and with it dy.
                dy, centred = recovered(
                    z_new, dz_new, r_new, mean_d, invstd_d, gamma_d, beta_d, a,
                    RESIDUAL, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I,
                )  # fmt: skip
                ones += gl.sum(dy, 1)
                others += gl.sum(dy * centred, 1)
            before = n + (t - LAG) // T
            known = (before >= 0) & (before < rounds)
            if (t - LAG) % T == 0:
                one, other, _, _ = collect(
                    one, other, nothing, nothing, words_ptr, group, S, before, known, epoch, S * G, LANES, BS, ALONE
                )
                gamma = gamma_c
                beta = beta_c
                invstd = invstd_c
                mean = mean_c
                if not VARIANT_I:
                    other = other / gamma
                scale, slope, constant = coefficients(one, other, gamma, invstd, m, VARIANT_I)
                # Another member each time, so that none falls behind.
                if known & (member == n % S):
                    gl.store(sum_dy_ptr + c, one)
                    gl.store(sum_dy_xhat_ptr + c, other)
                if EDGES:
                    c_dx, c_dy = dx_of(
                        c_z, c_dz, c_r, mean, invstd, gamma, beta, scale, slope, constant, a,
                        RESIDUAL, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I,
                    )  # fmt: skip
                    gl.store(dx_ptr + edge_c, c_dx.to(number), mask=on_edge_c & known)
                    if NEED_R:
                        gl.store(dr_ptr + edge_c, c_dy.to(number), mask=on_edge_c & known)
            if known:
                dx, dy = dx_of(
                    z, dz, r, mean, invstd, gamma, beta, scale, slope, constant, a,
                    RESIDUAL, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I,
                )  # fmt: skip
                at, offsets, there = spot(base + before * step, lines, (t - LAG) % T, TILE, V, EDGES)
                gl.store(dx_ptr + at + offsets, dx.to(number), mask=there)
                if NEED_R:
                    gl.store(dr_ptr + at + offsets, dy.to(number), mask=there)
        if here:
            one, other = gl.reduce((ones, others), 0, plus)
            if EDGES:
                e_dy, e_centred = recovered(
                    e_z, e_dz, e_r, mean_d, invstd_d, gamma_d, beta_d, a,
                    RESIDUAL, FROM_X, HAT, INVERSE, BACKWARD, VARIANT_I,
                )  # fmt: skip
                # dz = 0 off the edges, and with it dy.
                e_one, e_other = gl.reduce((e_dy, e_dy * e_centred), 0, plus)
                one += e_one
                other += e_other
            publish(one, other, words_ptr, group, member, S, n, epoch, S * G)
        gamma_d = gamma_next
        beta_d = beta_next
        invstd_d = invstd_next
        mean_d = mean_next
    async_copy.wait_group(0)
    finish(sync_ptr, sync_ptr, epoch, gl.cdiv(slabs, G), False, False, SHARED=True, ONE_ROUND=False)
