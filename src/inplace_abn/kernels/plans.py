"""How a launch is cut up: layouts, cards, tiles, and who works on what, out of shapes, strides and the card's figures alone."""

from __future__ import annotations

import itertools
import math
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

# Elements per tile and warps per program: 16 elements a thread.
TILE = 4096
WARPS = 8
# What a row of a slab spans where channels are innermost: one line of the L2 cache; two where nothing is added up.
LINE_BYTES = 128
LINE_BYTES_OF_MAPS = 256
# Pixels of a channel that are few: several channels make a slab then, of at least so many bytes of an image and at most so many
# channels, whose sums are folded in registers. At 7×7 that halves the time of a forward of 128 × 2048 channels in bfloat16.
FEW = 64
PACK_BYTES = 512
PACK_CHANNELS = 32
# Shares of the L2 cache for slabs between their two readings, the best first; what is being written needs the rest.
L2_SHARES = (0.65, 0.55, 0.45)
# Programs per processor where none waits for another, and the most on one slab, whose results one program adds up. With channels
# innermost, measured: few where sums are to be added up, as many as are resident at best, and many more where not.
CREW = 8
CREW_OF_SLAB = 256
CREW_THAT_SUMS = 4
CREW_THAT_MAPS = 16
# Where maps are held in shared memory: warps of a program, programs on a processor at most, bytes of a large and a small tile of
# all maps, and large tiles for which a program should have room.
RING_WARPS = 4
RING_PROGRAMS = 3
RING_BYTES = (8192, 4096)
RING_TILES = 9
# Bytes of shared memory that the system takes from every program, and what a program of a ring has beside its tiles: these, and
# what reductions need.
SYSTEM_BYTES = 1024
RING_BESIDE = SYSTEM_BYTES + 512
# Tiles of a round at most, since its steps are unrolled, and large tiles between publishing sums and collecting those of all from
# which on they are asked for a tile earlier.
RING_MOST = 12
RING_EARLY = 4
# Members of a channel up to which a thread waits for its words by itself: those of one warp.
RING_ALONE = 32
# Bytes of a map below which the L2 cache serves as well; a quarter of it where vectors are short.
RING_LEAST = 32 << 20
# Pixels of a channel below which edges of rows that start anywhere count too much.
RING_PIXELS = 512
# Where maps are swept over, and as many tiles held as fit: warps and programs as above, bytes of a tile of all maps, tiles ahead,
# and those of a program that has a processor for itself, words of a slab that every member reads itself, pixels that are few if
# they are no whole vectors, and what a row of a slab spans, by the bytes of a map: wide strips come from memory faster, narrow
# ones have less to exchange.
SWEEP_WARPS = 4
SWEEP_PROGRAMS = 2
SWEEP_BYTES = 8192
SWEEP_AHEAD = 3
SWEEP_AHEAD_ALONE = 6
SWEEP_WORDS = 4096
SWEEP_FEW = 256
SWEEP_WIDTHS = ((16 << 20, 64), (64 << 20, 128), (1 << 62, 256))
# Tiles of that size or smaller that registers hold, registers that a thread must have for it, and those it may spill.
SWEEP_KEPT = 6
SWEEP_REGISTERS = 240
SWEEP_SPILLS = 8


def registers(inner: bool) -> int:
    """Per thread of a fused kernel: 4 programs on a processor of 65,536, or 2, since exchanging whole lines is dear."""
    return 96 if inner else 64


class Layout(NamedTuple):
    """A tensor as rows (images, or pixels where channels are inner) of a channel, and the strides between them."""

    inner: bool
    rows: int
    channels: int
    pixels: int
    row_stride: int
    channel_stride: int


class Card(NamedTuple):
    """What plans depend on; ``copies`` says whether memory can be copied into shared memory while programs go on."""

    processors: int
    registers: int
    threads: int
    shared: int
    l2: int
    copies: bool


class Cut(NamedTuple):
    """A layout in slabs and tiles: constants of every kernel, rows of tiles, and tiles in each along which members walk."""

    constants: dict[str, Any]
    slabs: int
    blocks: int
    across: int
    slab_bytes: int


class Team(NamedTuple):
    """Who works on a slab: S members, each with up to ``per`` tiles of one of the ``chunks`` of a block; G slabs at a time."""

    chunks: int
    per: int
    S: int
    G: int


class Ring(NamedTuple):
    """A channel in vectors of V, of which S members have T tiles of ``each``, with room for ``lines``; G channels at a time.

    ``lag`` is the number of tiles between adding one up and transforming it, ``ahead`` that of tiles being copied, ``early`` that
    between asking for sums and collecting them. Where rows start anywhere, a member has so many ``edges``: elements before the
    first and behind the last whole vector of some rows.
    """

    V: int
    edges: int
    lines: int
    T: int
    lag: int
    ahead: int
    early: int
    vectors: int
    each: int
    S: int
    G: int
    registers: int


class Sweep(NamedTuple):
    """Slabs of P channels, W elements wide, in vectors of V; each of G has S members, which take tiles of K·B rows in turn.

    The first Q tiles are held in registers, the next H and the last R in shared memory; if R = 0, H are all. ``ahead`` are being
    copied. A member adds up ``columns`` of the 2·P sums for all; where these are 2·P, all of them for itself. Programs have so
    many ``warps``.
    """

    V: int
    P: int
    W: int
    K: int
    B: int
    Q: int
    H: int
    R: int
    ahead: int
    S: int
    G: int
    columns: int
    warps: int
    registers: int


def layout(x: Tensor) -> Layout | None:
    """See x as channels outer or inner, or say that its strides allow neither."""
    return _countable(x.shape, x.stride())


@lru_cache(maxsize=4096)
def _countable(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout | None:
    place = _layout(shape, strides)
    # Kernels count rows and pixels in 32 bits; offsets have 64.
    return place if place is not None and max(place.rows, place.pixels) < 1 << 30 else None


def _layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> Layout | None:
    images, channels = shape[:2]
    step, pixels = None, 1
    for size, stride in zip(shape[:1:-1], strides[:1:-1], strict=True):
        if size > 1:
            step = stride if step is None else step
            # The spatial dimensions must run through memory as one.
            if stride != pixels * step:
                return None
            pixels *= size
    channels_touch = channels == 1 or strides[1] == 1
    if step is None:
        return Layout(channels_touch, images, channels, 1, strides[0], 1 if channels_touch else strides[1])
    if step == 1:
        # What a single image or channel has for a stride means nothing.
        apart = strides[1] if channels > 1 else pixels
        return Layout(False, images, channels, pixels, strides[0] if images > 1 else channels * apart, apart)
    if channels_touch and (images == 1 or strides[0] == pixels * step):
        return Layout(True, images * pixels, channels, 1, step, 1)
    return None


@cache
def card(where: torch.device) -> Card:
    """The card's figures; without a GPU, those of a small one, for tests in Triton's interpreter."""
    if where.type != "cuda":
        return Card(1, registers(True) * 32 * WARPS, 32 * WARPS, 1 << 16, 1 << 20, False)
    has: Any = torch.cuda.get_device_properties(where)
    return Card(
        has.multi_processor_count,
        has.regs_per_multiprocessor,
        has.max_threads_per_multi_processor,
        has.shared_memory_per_multiprocessor,
        has.L2_cache_size,
        torch.version.hip is None and has.major >= 8,
    )


@lru_cache(maxsize=4096)
def cut(place: Layout, itemsize: int, aligned: bool, line: int = LINE_BYTES) -> Cut:
    """Cut a layout into slabs and tiles; where channels are innermost, ``line`` bytes wide."""
    vector = 16 // itemsize if aligned else 1
    packed = _packed(place, itemsize, vector)
    if packed:
        w, vector = packed
        width = triton.next_power_of_2(w * place.pixels)
        height = min(TILE // width, triton.next_power_of_2(place.rows))
        blocks, across, edges = 1, triton.cdiv(place.rows, height), False
    elif place.inner:
        while place.row_stride % vector or place.channels % vector:
            vector //= 2
        width = w = min(line // itemsize, triton.next_power_of_2(place.channels))
        vector = min(vector, width)
        height = min(TILE // width, triton.next_power_of_2(place.rows))
        blocks, across, edges = 1, triton.cdiv(place.rows, height), False
    else:
        # A row of few vectors is mostly edge.
        vector = vector if place.pixels >= 2 * vector else 1
        edges = bool(place.pixels % vector or place.row_stride % vector or place.channel_stride % vector)
        w = 1
        shapes = []
        width = vector
        while width <= min(TILE, triton.next_power_of_2(place.pixels)):
            height = min(TILE // width, triton.next_power_of_2(place.rows))
            blocks, across = triton.cdiv(place.rows, height), triton.cdiv(place.pixels, width)
            # A tile costs something even where it is small.
            cost = blocks * across * (height * width + TILE // 4)
            shapes.append((cost, blocks, across, height, width))
            width *= 2
        # Long runs of memory, where they cost little more than short ones.
        least = min(shapes)[0]
        _, blocks, across, height, width = [s for s in shapes if s[0] <= 1.07 * least][-1]
    inner = place.inner or bool(packed)
    constants = {
        "INNER": inner, "BR": height, "BC": width, "W": w, "V": vector,
        # Rows that a thread adds up apart; no more than there are, where vectors are short.
        "U": min(height, max(1, height * width // (32 * WARPS * vector))) if inner else 1,
        "EDGES": edges, "WHOLE": place.channels % w == 0, "STAGES": 3 if inner else 1,
    }  # fmt: skip
    bytes_of_slab = place.rows * place.pixels * w * itemsize
    return Cut(constants, triton.cdiv(place.channels, w), blocks, across, bytes_of_slab)


def _packed(place: Layout, itemsize: int, vector: int, few: int = FEW) -> tuple[int, int] | None:
    """Channels of a slab and the vectors it is read in, where channels lie behind each other and have few pixels each."""
    if place.inner or not 1 < place.pixels <= few or place.channel_stride != place.pixels:
        return None
    w = 1
    while w * place.pixels * itemsize < PACK_BYTES or w * place.pixels % vector:
        w *= 2
    if not 1 < w <= min(PACK_CHANNELS, place.channels) or w * place.pixels > TILE:
        return None
    while place.row_stride % vector or place.channels * place.pixels % vector:
        vector //= 2
    return w, vector


def _members(c: Cut, most: int) -> tuple[int, int, int]:
    """chunks, per and S of a team of at most so many (but one for each block)."""
    per = triton.cdiv(c.across, max(1, min(c.across, most // c.blocks)))
    chunks = triton.cdiv(c.across, per)
    return chunks, per, c.blocks * chunks


def team(c: Cut, tensors: int, where: Card) -> Team | None:
    """Who shares a slab within one launch, as many slabs at a time as the L2 cache holds.

    None if the members of a slab cannot all be resident, or if one launch would not pay: with channels innermost a slab is a
    strip of every row. Long rows come from memory faster whole, and a strip too large for the cache is read twice anyhow.
    """
    inner = c.constants["INNER"]
    programs = where.processors * (where.registers // (registers(inner) * 32 * WARPS))
    held = tensors * c.slab_bytes
    room = [int(share * where.l2) for share in L2_SHARES]
    packed = c.constants["W"] < c.constants["BC"]
    if inner and not packed and c.slabs > 1 and (held > room[0] or (c.slabs >= 8 and c.slabs * held > room[0])):
        return None
    teams = []
    for bytes_of_cache in room:
        slabs = _even(c.slabs, max(1, min(bytes_of_cache // held, programs // c.blocks)))
        chunks, per, members = _members(c, programs // slabs)
        if members * slabs <= programs:
            teams.append(Team(chunks, per, members, slabs))
    # The fullest card.
    return max(teams, key=lambda t: t.S * t.G, default=None)


def _even(slabs: int, most: int) -> int:
    """How many slabs at a time, at most so many, if the last round is to have as many as the others."""
    rounds: int = triton.cdiv(slabs, most)
    return -(-slabs // rounds)


def crew(c: Cut, where: Card, each: int = CREW) -> Team:
    """Who works on a slab where nobody waits: enough programs to fill the card some times over, so many on each processor."""
    chunks, per, members = _members(c, max(1, min(CREW_OF_SLAB, each * where.processors // c.slabs)))
    return Team(chunks, per, members, c.slabs)


def ring_of(place: Layout, itemsize: int, maps: int, held: int, where: Card) -> Ring | None:
    """How a channel is held in shared memory by its members, out of so many maps, of which so many stay until the transform.

    None if the map is small, its rows short and start anywhere, or a channel too large for all programs or offsets of 32 bits.
    Fitted to measured plans, in large tiles: a round of three programs on a processor costs what it copies, half of what its
    tiles have room for, a fifth (a tenth where sums are collected as the next ones are published), and a fortieth for each tile;
    a fifth of what it copies times what the tiles ahead fall short of one and a half; and a quarter of what the slack, the tiles
    between publishing sums and collecting those of all, falls short of 2 + log₂(S)/6. Two programs want half as much more of
    each. They were measured slower with a residual, and forward in 16 bits.
    """
    if place.inner or place.pixels <= FEW or place.rows * place.row_stride >= (1 << 31) - 64:
        return None
    V = 16 // itemsize
    while place.pixels % V or place.row_stride % V or place.channel_stride % V:
        V //= 2
    if place.rows * place.channels * place.pixels * itemsize < RING_LEAST // (1 if V * itemsize == 16 else 4):
        return None
    apart = V * itemsize < 8
    if apart:
        V = 16 // itemsize
    fit = min(RING_PROGRAMS, where.shared // (RING_TILES * RING_BYTES[0] + RING_BESIDE))
    if not fit or (apart and place.pixels < RING_PIXELS):
        return None
    vectors = place.rows * (place.pixels // V)
    best: tuple[float, Ring | None] = (float("inf"), None)
    fewer = maps == held < 3 and maps * itemsize > 2
    for resident, size in itertools.product(range(min(2, fit) if fewer else fit, fit + 1), RING_BYTES):
        # A small tile of three maps has too little of each for all threads to copy some; fewer programs have room for large ones.
        if size != RING_BYTES[0] and (maps > 2 or resident < fit):
            continue
        programs, scale = resident * where.processors, RING_PROGRAMS / resident
        limit = min(255, where.registers // (resident * 32 * RING_WARPS) // 8 * 8)
        groups = sorted({_even(place.channels, most) for most in range(1, min(programs, place.channels) + 1)})
        lines = 1 << (size // maps // (V * itemsize)).bit_length() - 1
        tiles = (where.shared // resident - RING_BESIDE) // (lines * V * itemsize)
        part, line = lines * V * itemsize * maps / RING_BYTES[0], min(lines, LINE_BYTES // (V * itemsize))
        # Three maps of one channel alone were measured slower than reading them twice.
        for G in groups[1 if maps > 2 else 0 :]:
            most = programs // G * triton.cdiv(vectors, programs // G * lines)
            # Tiles alike for all, of whole lines of the cache.
            each = triton.cdiv(triton.cdiv(vectors, most), line) * line
            cuts, rounds = triton.cdiv(vectors, each), triton.cdiv(place.channels, G)
            T = triton.cdiv(cuts, programs // G)
            if T > RING_MOST:
                continue
            S = triton.cdiv(cuts, T)
            for lag in range(T + 1, 2 * T + 1):
                # Each map that stays takes lag + ahead tiles, each other one ahead.
                ahead = min((tiles - held * lag) // maps, lag)
                if ahead < 1:
                    break
                copied, room = T * each / lines * part, T * part
                slack = (lag - T) * part
                lacks = max(0.0, 1.5 * scale - ahead * part)
                waits = max(0.0, (2 + math.log2(S) / 6) * scale - slack)
                fixed = (0.1 if lag == 2 * T else 0.2) * scale + T / 40
                cost = rounds * resident * (copied + room / 2 + fixed + copied * lacks / 5 + waits / 4)
                if cost < best[0]:
                    edges = triton.next_power_of_2(triton.cdiv(place.rows, S)) * 2 * V if apart else 0
                    early = int(slack >= RING_EARLY and lag < 2 * T)
                    best = cost, Ring(V, edges, lines, T, lag, ahead, early, vectors, each, S, G, limit)
    return best[1]


def sweep_of(place: Layout, itemsize: int, maps: int, held: int, where: Card) -> Sweep | None:
    """How channels that are innermost, or have few pixels, are swept over: so many maps, of which so many are read twice.

    None if channels are neither, rows are no whole vectors, or there are more elements of a row to a slab than threads copy at
    once, more slabs than programs, or offsets of more than 32 bits within a tile; or if shared memory has too little room.

    Small maps with channels innermost have one program of twice as many warps on a processor, so that fewer members exchange
    sums, but where that leaves two, or a tenth fewer warps at work. Measured: forward 0.91 to 0.99 of the time, backward 0.92 to
    1.03; two members for four 1.01 to 1.03, with a residual 0.93 to 1.11.
    """
    many = _sweep(place, itemsize, maps, held, where, SWEEP_PROGRAMS, SWEEP_WARPS)
    # Those of the narrowest strips.
    small = place.rows * place.channels * place.pixels * itemsize <= SWEEP_WIDTHS[0][0]
    if many is None or many.R or not (place.inner and small and maps == held < 3):
        return many
    few = _sweep(place, itemsize, maps, held, where, 1, SWEEP_PROGRAMS * SWEEP_WARPS)
    if (
        few is None
        or few.R
        or few.S in (2, many.S)
        or 10 * few.warps * few.S * few.G < 9 * many.warps * many.S * many.G
    ):
        return many
    return few


def _sweep(place: Layout, itemsize: int, maps: int, held: int, where: Card, resident: int, warps: int) -> Sweep | None:
    """With so many programs on a processor, of so many warps."""
    V, threads, programs = 16 // itemsize, 32 * warps, resident * where.processors
    # A row has a power of two of elements, of which a slab should need most.
    full = 4 * place.pixels >= 3 * triton.next_power_of_2(place.pixels)
    packed = _packed(place, itemsize, V, SWEEP_FEW if place.pixels % V and full else FEW)
    if packed is not None and packed[1] == V and packed[0] * place.pixels <= threads * V:
        P, widest = packed[0], min(PACK_CHANNELS, threads * V // place.pixels)
    elif place.inner and place.channels % V == place.row_stride % V == 0:
        size = place.rows * place.channels * itemsize
        wide = next(wide for most, wide in SWEEP_WIDTHS if size <= most)
        P, widest = min(wide // itemsize, triton.next_power_of_2(place.channels)), threads * V
    else:
        return None
    while triton.cdiv(place.channels, P) > programs and widest >= 2 * P:
        P *= 2
    slabs, W = triton.cdiv(place.channels, P), triton.next_power_of_2(P * place.pixels)
    # A residual is one more map: forward it is read once, backward it is the third. Measured: with one, one more tile ahead;
    # without, and several channels in a row, backward likes tiles twice as large, if six of them fit, and one less ahead.
    residual = maps > held or maps > 2
    larger = packed is not None and not residual and held > 1 and where.shared // resident >= 6 * 2 * SWEEP_BYTES
    # Rows that all threads copy at once, and of those as many as a tile has room for.
    B, K = threads * V // W, SWEEP_BYTES * (1 + larger) // maps // (threads * 16)
    # What it takes to turn two sums of a tile's rows round.
    beside = SYSTEM_BYTES + max(8 * B * W, 8 * P * warps)
    tiles = (where.shared // resident - beside) // (K * threads * 16) if K else 0
    # Each map that stays takes H + R tiles, each other one ``ahead``; R > ahead.
    ahead = SWEEP_AHEAD_ALONE if resident == 1 else SWEEP_AHEAD
    ahead = min(ahead + residual - larger, (tiles - held) // maps)
    R = ahead + 1
    H = (tiles - (maps - held) * ahead) // held - R
    if ahead < 2 or slabs > programs or K * B * place.row_stride >= 1 << 31:
        return None
    across = triton.cdiv(place.rows, K * B)
    S = triton.cdiv(across, triton.cdiv(across, programs // slabs))
    limit = min(255, where.registers // (resident * threads) // 8 * 8)
    Q = 0
    most = triton.cdiv(across, S)
    if most <= H + R:
        H, R = H + R, 0
    elif ahead <= H and limit >= SWEEP_REGISTERS:
        # What registers hold passes through the ring, which must be free again when tiles take turns in it. Of tiles twice as
        # large half as many; and of what few more would do for, a power of two, so that not every map has a kernel of its own.
        fit = SWEEP_KEPT * SWEEP_BYTES // (K * threads * 16 * held)
        Q = min(triton.next_power_of_2(most - H - R), SWEEP_KEPT, fit)
    columns = 2 * P if 2 * P * S <= SWEEP_WORDS else triton.next_power_of_2(triton.cdiv(2 * P, S))
    return Sweep(V, P, W, K, B, Q, H, R, ahead, S, slabs, columns, warps, limit)


def stages(read: int, where: Card) -> int:
    """How many tiles, of so many bytes, a loop has in hand, if two programs are to fit on a processor."""
    return min(4, max(1, 1 + where.shared // 2 // read))


def resident(registers: int, shared: int, warps: int, where: Card) -> int:
    """How many programs of a compiled kernel one processor holds; registers come by eights."""
    registers, threads = -(-max(registers, 16) // 8) * 8, 32 * warps
    return min(
        where.registers // (registers * threads), where.shared // (shared + SYSTEM_BYTES), where.threads // threads
    )
