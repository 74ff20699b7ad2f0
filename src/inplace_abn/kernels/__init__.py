"""The verbs of :mod:`inplace_abn.reference` as Triton kernels, for CUDA tensors: same names, same arguments.

A local batch takes one launch forward and one backward. The programs that share a slab of channels exchange their sums within
the launch, and hold the slab in shared memory until then (:mod:`.ring`), or read it a second time while it is still in the L2
cache, so x, z and dz come from memory once. Running statistics, the counter, the guard on γ, dγ and dβ are computed inside, and
the host never waits. Where a card cannot hold the programs of a slab at once, and for the verbs that synchronised statistics
need one by one, there is a kernel for each verb. Which tensors they take: :func:`supports`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache, reduce
from operator import or_
from types import FunctionType
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import activations
from ..activations import Activation
from . import device

try:
    from . import ring
except ImportError:  # a Triton whose Gluon lacks something
    ring = None  # type: ignore[assignment]

__all__ = [
    "input_grad",
    "input_grad_batch",
    "moments",
    "normalize_",
    "normalize_batch",
    "normalize_batch_",
    "sums",
    "supports",
]

# Elements per tile and warps per program: 16 elements a thread.
TILE = 4096
WARPS = 8
# What a row of a slab spans where channels are innermost: one line of the L2 cache.
LINE_BYTES = 128
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
# Where maps are held in shared memory: warps of a program, programs on a processor at most, bytes of a tile of all maps, tiles
# for which a program should have room, and tiles that it goes on with between publishing its sums and collecting those of all.
RING_WARPS = 4
RING_PROGRAMS = 3
RING_BYTES = 8192
RING_TILES = 9
RING_SLACK = 2
# Bytes of a map below which the L2 cache serves as well; a quarter of it where vectors are short.
RING_LEAST = 32 << 20
# Pixels of a channel below which edges of rows that start anywhere count too much.
RING_PIXELS = 512


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
    """A channel in vectors of V, of which S members have ``share`` each, in T tiles of ``lines``; G channels at a time.

    ``lag`` is the number of tiles between adding one up and transforming it, ``ahead`` that of tiles being copied. Where rows
    start anywhere, a member has so many ``edges``: elements before the first and behind the last whole vector of some rows.
    """

    V: int
    edges: int
    lines: int
    T: int
    lag: int
    ahead: int
    vectors: int
    share: int
    S: int
    G: int
    registers: int


class Launch(NamedTuple):
    """A kernel with all that does not change from call to call; ``run(stream, pointers, floats)`` starts it, if they are aligned.

    ``words`` is what members of a team exchange, ``room`` the counters and partial results of a crew; 0 where there are none.
    """

    kernel: Any
    grid: int
    words: int
    room: tuple[int, int]
    numbers: tuple[int | float, ...]
    constants: dict[str, Any]
    options: dict[str, Any]
    run: Callable[[int, list[int], tuple[float, ...]], None] | None


def layout(x: Tensor) -> Layout | None:
    """See x as channels outer or inner, or say that its strides allow neither."""
    place = _layout(x.shape, x.stride())
    # Kernels count rows and pixels in 32 bits; offsets have 64.
    return place if place is not None and max(place.rows, place.pixels) < 1 << 30 else None


@lru_cache(maxsize=4096)
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


def supports(x: Tensor) -> bool:
    """Whether the kernels take x: float32, float16 or bfloat16 on a GPU, with strides that let pixels run in one line."""
    # Subclasses (fake tensors among them) and lazily negated tensors are not what their memory says.
    if type(x) not in (Tensor, torch.nn.Parameter) or not x.is_cuda or x.is_neg():
        return False
    return x.dtype in (torch.float32, torch.float16, torch.bfloat16) and x.numel() > 0 and layout(x) is not None


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
def cut(place: Layout, itemsize: int, aligned: bool) -> Cut:
    """Cut a layout into slabs and tiles."""
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
        width = w = min(LINE_BYTES // itemsize, triton.next_power_of_2(place.channels))
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


def _packed(place: Layout, itemsize: int, vector: int) -> tuple[int, int] | None:
    """Channels of a slab and the vectors it is read in, where channels lie behind each other and have few pixels each."""
    if place.inner or not 1 < place.pixels <= FEW or place.channel_stride != place.pixels:
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
    Measured: a round costs what it copies, a quarter of what its tiles could hold, and 256 vectors; one tile ahead is too little.
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
    # What a program has beside its tiles: 1 KiB of the system's, and what reductions need.
    each = min(RING_PROGRAMS, where.shared // (RING_TILES * RING_BYTES + 1536))
    if not each or (apart and place.pixels < RING_PIXELS):
        return None
    lines = 1 << (RING_BYTES // maps // (V * itemsize)).bit_length() - 1
    tiles = (where.shared // each - 1536) // (lines * V * itemsize)
    vectors, programs = place.rows * (place.pixels // V), each * where.processors
    best: tuple[float, Ring | None] = (float("inf"), None)
    for G in range(1, min(programs, place.channels) + 1):
        share = triton.cdiv(vectors, programs // G)
        T, S = triton.cdiv(share, lines), triton.cdiv(vectors, share)
        lag = T + min(T, RING_SLACK)
        # Each map that stays takes lag + ahead + 1 tiles, each other one ahead + 1.
        ahead = min((tiles - held * lag) // maps - 1, lag)
        # Three maps of one channel alone were measured slower than reading them twice.
        if ahead < 1 or G == 1 < maps - 1:
            continue
        cost = (triton.cdiv(place.channels, G) + 0.5) * (share + T * lines / 4 + 256) * (1.06 if ahead == 1 else 1.0)
        if cost < best[0]:
            limit = min(255, where.registers // (each * 32 * RING_WARPS) // 8 * 8)
            edges = triton.next_power_of_2(triton.cdiv(place.rows, S)) * 2 * V if apart else 0
            best = cost, Ring(V, edges, lines, T, lag, ahead, vectors, share, S, G, limit)
    return best[1]


@cache
def compiled(phi: Activation) -> tuple[Any, Any, Any]:
    """φ, φ⁻¹ and φ′ as device functions, out of the very code of the table; the identity where there is no inverse."""
    helpers = {name: _on_device(getattr(activations, name), {}) for name in ("expm1", "log1p")}
    forward, inverse, backward = (
        _on_device(f, helpers) for f in (phi.forward, phi.inverse or activations.identity, phi.backward)
    )
    return forward, inverse, backward


def _on_device(function: Any, helpers: dict[str, Any]) -> Any:
    """The function with ``xp`` bound to Triton's language."""
    rebound = FunctionType(function.__code__, {"xp": tl, "Tensor": tl.tensor, **helpers}, function.__name__)
    rebound.__module__ = __name__
    rebound.__qualname__ = f"{__name__}.{function.__name__}"
    return triton.jit(rebound)


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _stream(x: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0


# By device and stream, since launches on two streams may overlap. Zero at first; every launch leaves them fit for the next.
_WORDS: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}


def _words(x: Tensor, stream: int, many: int) -> tuple[Tensor, Tensor]:
    """Room for what members exchange, and the epoch with its count of finished programs."""
    # Graphs captured on one stream may be replayed on several: each launch gets words of its own.
    if _capturing(x):
        return _fresh_words(x.device, many)
    key = x.device, stream
    if key not in _WORDS or _WORDS[key][0].numel() < many:
        _WORDS[key] = _to_stay(_fresh_words, x.device, triton.next_power_of_2(many))
    return _WORDS[key]


def _fresh_words(where: torch.device, many: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(many, dtype=torch.int64, device=where), torch.zeros(2, dtype=torch.int32, device=where)


@cache
def _counters(where: torch.device, stream: int, slabs: int, floats: int) -> tuple[Tensor, Tensor]:
    """Room for partial results, and arrival counters, which every launch leaves at zero; by stream: launches may overlap."""
    return _to_stay(_fresh_counters, where, slabs, floats)


def _fresh_counters(where: torch.device, slabs: int, floats: int) -> tuple[Tensor, Tensor]:
    return torch.empty(floats, dtype=torch.float32, device=where), torch.zeros(slabs, dtype=torch.int32, device=where)


def _to_stay(make: Callable[..., tuple[Tensor, Tensor]], where: torch.device, *sizes: int) -> tuple[Tensor, Tensor]:
    """What a maker makes on the current stream, out of the allocator's common pool.

    A thread may have been given a pool, as by torch.compile with CUDA graphs, in which nothing may stay: another thread makes it.
    """
    if where.type != "cuda":
        return make(where, *sizes)
    stream = torch.cuda.current_stream(where)

    def there() -> tuple[Tensor, Tensor]:
        with torch.cuda.stream(stream):
            return make(where, *sizes)

    with ThreadPoolExecutor(1) as other:
        return other.submit(there).result()


def _vector(v: Tensor | float | None, instead: Tensor) -> Tensor:
    """A per-channel vector as the kernels read it; where there is none, any pointer will do."""
    return v.contiguous() if isinstance(v, Tensor) else instead


def _on(x: Tensor) -> AbstractContextManager[Any]:
    """Launches go to the current device: make it x's."""
    if not x.is_cuda or torch._C._cuda_getDevice() == x.device.index:
        return nullcontext()
    return torch.cuda.device(x.device)


# By what a call looks like; None where the card cannot hold a team.
_LAUNCHES: dict[tuple[Any, ...], Launch | None] = {}
# The flags that keys of these name by identity.
_KEPT: list[dict[str, Any]] = []


def _launch(
    kernel: Any, maps: int, twice: int, tensors: list[Tensor], floats: tuple[float, ...], flags: dict[str, Any]
) -> bool:
    """Run a kernel; False where the card cannot. The arguments are those of :func:`_planned`."""
    launch = _planned(kernel, maps, twice, tensors, floats, flags)
    if launch is None:
        return False
    _start(launch, tensors, floats)
    return True


def _planned(
    kernel: Any, maps: int, twice: int, tensors: list[Tensor], floats: tuple[float, ...], flags: dict[str, Any]
) -> Launch | None:
    """How to run a kernel on tensors like these, planned and compiled on the first call of its kind; None where the card cannot.

    The first ``maps`` of the tensors are full-sized. ``twice`` says how many of these one launch reads twice, by a team, and
    is to find in the cache the second time; 0 for the kernels whose members do not wait. Flags come out of a cache.
    """
    x = tensors[0]
    aligned = not reduce(or_, [t.data_ptr() for t in tensors[:maps]]) % 16
    # All that a plan depends on, or that is compiled into a kernel. By identity what stays: it is quicker than by contents.
    key = (id(kernel), id(flags), x.shape, x.stride(), x.device, aligned, *[t.dtype for t in tensors])
    try:
        return _LAUNCHES[key]
    except KeyError:
        # An identity belongs to what lives: of flags that two threads made at once, the cache drops one.
        _KEPT.append(flags)
        launch = _LAUNCHES[key] = _prepare(kernel, aligned, maps, twice, tensors, tuple(map(float, floats)), flags)
        return launch


def _start(launch: Launch, tensors: list[Tensor], floats: tuple[float, ...]) -> None:
    """Run what was planned."""
    x = tensors[0]
    stream = _stream(x)
    if launch.words:
        tensors = [*tensors, *_words(x, stream, launch.words)]
    elif launch.room[0]:
        room = _fresh_counters(x.device, *launch.room) if _capturing(x) else _counters(x.device, stream, *launch.room)
        tensors = [*tensors, *room]
    pointers = [t.data_ptr() for t in tensors]
    # Compiled for pointers aligned as torch allocates; parameters cut out of a larger tensor may not be.
    if launch.run is None or reduce(or_, pointers) % 16:
        # An integer would be compiled into the kernel, and stay there.
        arguments = (*tensors, *launch.numbers, *map(float, floats))
        launch.kernel[(launch.grid,)](*arguments, **launch.constants, **launch.options)
    else:
        launch.run(stream, pointers, floats)


def _prepare(
    kernel: Any,
    aligned: bool,
    maps: int,
    twice: int,
    tensors: list[Tensor],
    floats: tuple[float, ...],
    flags: dict[str, Any],
) -> Launch | None:
    x, where, place = tensors[0], card(tensors[0].device), layout(tensors[0])
    assert place is not None
    if ring is not None and where.copies and aligned and twice:
        launch = _ring_launch(kernel, maps, twice, tensors, floats, flags, place, where)
        if launch is not None:
            return launch
    c = cut(place, x.element_size(), aligned)
    sums, inner = "partial_ptr" in kernel.arg_names, c.constants["INNER"]
    each = CREW if not inner else CREW_THAT_SUMS if sums else CREW_THAT_MAPS
    t = team(c, twice, where) if twice else crew(c, where, each)
    if t is None:
        return None
    w, threads = c.constants["W"], 32 * WARPS
    where_it_lies = (place.rows, place.channels, place.pixels, place.row_stride, place.channel_stride, c.across)
    numbers: tuple[int | float, ...] = (*where_it_lies, t.chunks, t.per)
    options: dict[str, Any] = {"num_warps": WARPS}
    words, room = 0, (0, 0)
    if twice:
        shared = t.S > 1
        mw = 1 if w == 1 else min(w, triton.next_power_of_2(triton.cdiv(w, t.S)))
        block = max(triton.next_power_of_2(t.S), threads // (2 * mw))
        constants = {**flags, **c.constants, "SHARED": shared, "MW": mw, "BS": block, "THREADS": threads}
        numbers += (c.slabs, t.S, t.G, x.numel() / x.shape[1])
        options |= {"maxnreg": registers(inner), "launch_cooperative_grid": shared}
        words = 8 * w * t.S * t.G if shared else 1
    else:
        # BS: how many partial results the last member loads at once.
        constants = {**flags, **c.constants, "BS": min(triton.next_power_of_2(t.S), max(1, TILE // w))}
        numbers += (t.S,)
        if sums:
            # In powers of two, so that few sizes serve all layers.
            room = triton.next_power_of_2(c.slabs), triton.next_power_of_2(c.slabs * t.S * 2 * w)
        if inner:
            read = 1 + ("dz_ptr" in kernel.arg_names) + flags["RESIDUAL"]
            # Where one map is read and one written, other programs' loads are as good.
            single = kernel is device.transform_kernel
            constants["STAGES"] = 1 if single else stages(read * TILE * x.element_size(), where)
            if kernel is device.sums_kernel:
                options["maxnreg"] = where.registers // (CREW_THAT_SUMS * threads)
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    run = None
    if x.is_cuda:
        extra = _fresh_words(x.device, 1) if words else _fresh_counters(x.device, 1, 1) if room[0] else ()
        built = _build(kernel, maps, tensors, extra, (*numbers, *floats), constants, options)
        run = _runner(built, t.S * t.G, numbers, tuple(constants.values()))
        if not twice and "maxnreg" in options and built.n_spills:
            # Some activations need more; then fewer programs are resident.
            del options["maxnreg"]
            built = _build(kernel, maps, tensors, extra, (*numbers, *floats), constants, options)
            run = _runner(built, t.S * t.G, numbers, tuple(constants.values()))
        held = resident(built.n_regs, built.metadata.shared, WARPS, where) * where.processors
        if words and shared and held < t.S * t.G:
            return None
        if not aligned:
            run = None
    return Launch(kernel, t.S * t.G, words, room, numbers, constants, options, run)


def stages(read: int, where: Card) -> int:
    """How many tiles, of so many bytes, a loop has in hand, if two programs are to fit on a processor."""
    return min(4, max(1, 1 + where.shared // 2 // read))


def _ring_launch(
    kernel: Any,
    maps: int,
    twice: int,
    tensors: list[Tensor],
    floats: tuple[float, ...],
    flags: dict[str, Any],
    place: Layout,
    where: Card,
) -> Launch | None:
    """The launch of a fused kernel that holds its maps in shared memory; None where the card cannot."""
    x, forward = tensors[0], kernel is device.forward_kernel
    c = ring_of(place, x.element_size(), twice + (forward and flags["RESIDUAL"]), twice, where)
    if c is None:
        return None
    kernel = ring.forward_kernel if forward else ring.backward_kernel
    constants = {
        **flags, "V": c.V, "EDGES": c.edges, "LINES": c.lines, "T": c.T, "LAG": c.lag, "AHEAD": c.ahead,
        "BS": max(triton.next_power_of_2(c.S), 32 * RING_WARPS), "WARPS": RING_WARPS,
    }  # fmt: skip
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    numbers = (
        place.rows, place.pixels, place.row_stride, place.channel_stride, place.pixels // c.V, c.vectors, c.share,
        place.channels, c.S, c.G, x.numel() / x.shape[1],
    )  # fmt: skip
    options = {"num_warps": RING_WARPS, "maxnreg": c.registers, "launch_cooperative_grid": True}
    try:
        built = _build(kernel, maps, tensors, _fresh_words(x.device, 1), (*numbers, *floats), constants, options)
        # This loads it: how many registers it has is not known before.
        run = _runner(built, c.S * c.G, numbers, tuple(constants.values()))
    except Exception as error:
        # Gluon is an experiment of Triton's, and may change.
        activations.warn_once(
            f"Triton {triton.__version__} does not compile the kernels that hold maps in shared memory "
            f"({type(error).__name__}: {str(error)[:200]}): the slower ones are used. inplace_abn knows Triton 3.6 and 3.7."
        )
        return None
    if resident(built.n_regs, built.metadata.shared, RING_WARPS, where) * where.processors < c.S * c.G:
        return None
    return Launch(kernel, c.S * c.G, 8 * c.S * c.G, (0, 0), numbers, constants, options, run)


def _build(
    kernel: Any,
    maps: int,
    tensors: list[Tensor],
    extra: tuple[Tensor, ...],
    numbers: tuple[int | float, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
) -> Any:
    """The compiled kernel; vectors that happen to be unaligned get copies for this: such calls go without it."""
    alike = [*tensors[:maps], *(v if v.data_ptr() % 16 == 0 else v.clone() for v in tensors[maps:])]
    return kernel.warmup(*alike, *extra, *numbers, **constants, **options, grid=(1,))


def _runner(
    built: Any, grid: int, numbers: tuple[int | float, ...], constants: tuple[Any, ...]
) -> Callable[[int, list[int], tuple[float, ...]], None]:
    """Starts a compiled kernel; Triton's own way describes each launch to profilers, even where none listens."""
    told = built[(grid, 1, 1)]
    launcher, function, metadata, hooks = built.run, built.function, built.packed_metadata, triton.knobs.runtime

    def run(stream: int, pointers: list[int], floats: tuple[float, ...]) -> None:
        before, after = hooks.launch_enter_hook, hooks.launch_exit_hook
        # Chains of listeners, or, as they once were, a single one.
        if getattr(before, "calls", before) or getattr(after, "calls", after):
            told(*pointers, *numbers, *floats, *constants, stream=stream)
        else:
            launcher(
                grid, 1, 1, stream, function, metadata, None, None, None, *pointers, *numbers, *floats, *constants
            )  # fmt: skip

    return run


def resident(registers: int, shared: int, warps: int, where: Card) -> int:
    """How many programs of a compiled kernel one processor holds: registers come by eights, shared memory with 1 KiB besides."""
    registers, threads = -(-max(registers, 16) // 8) * 8, 32 * warps
    return min(where.registers // (registers * threads), where.shared // (shared + 1024), where.threads // threads)


@cache
def _forward_flags(
    track: bool, cumulative: bool, counted: bool, weight: bool, bias: bool, residual: bool, phi: Activation | None
) -> dict[str, Any]:
    """What is compiled into the kernels of a forward pass; each takes what it knows."""
    return {
        "TRACK": track, "CUMULATIVE": cumulative, "COUNTED": counted, "HAS_WEIGHT": weight, "HAS_BIAS": bias,
        "RESIDUAL": residual, "PHI": None if phi is None else compiled(phi)[0],
    }  # fmt: skip


@cache
def _backward_flags(
    weight: bool,
    bias: bool,
    residual: bool,
    from_x: bool,
    hat: bool,
    phi: Activation,
    variant: str,
    need_r: bool = False,
    fixed: bool = False,
) -> dict[str, Any]:
    """What is compiled into the kernels of a backward pass; each takes what it knows."""
    forward, inverse, backward = compiled(phi)
    if from_x and phi.inverse is not None:
        # From x: what φ′ wants is φ(y); without an inverse, y itself, and the identity stands there already.
        inverse = forward
    return {
        "HAS_WEIGHT": weight, "HAS_BIAS": bias, "RESIDUAL": residual, "FROM_X": from_x, "HAT": hat, "INVERSE": inverse,
        "BACKWARD": backward, "VARIANT_I": variant == "I" or from_x, "NEED_R": need_r, "FIXED": fixed,
    }  # fmt: skip


def _moments(
    x: Tensor,
    eps: float,
    running: tuple[Tensor, Tensor] | None = None,
    tracked: Tensor | None = None,
    momentum: float | None = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    # Storages of their own: some are kept for backward, and half of a larger one need not be aligned.
    mean, var, invstd = (torch.empty(x.shape[1], dtype=torch.float32, device=x.device) for _ in range(3))
    moved = [*(running or (mean, var)), invstd if tracked is None else tracked]
    floats = (x.numel() / x.shape[1], momentum or 0.0, eps)
    flags = _forward_flags(running is not None, momentum is None, False, False, False, False, None)
    _launch(device.moments_kernel, 1, 0, [x, mean, var, invstd, *moved], floats, flags)
    return mean, var, invstd


def _transform_(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    tracked: Tensor | None,
    floor: float,
    phi: Activation,
    a: float,
    residual: Tensor | None,
    out: Tensor | None = None,
) -> None:
    vectors = [mean.contiguous(), invstd.contiguous(), _vector(weight, mean), _vector(bias, mean)]
    maps = [x, x if residual is None else _as(residual, x), x if out is None else out]
    has = tracked is not None, weight is not None, bias is not None, residual is not None
    flags = _forward_flags(False, False, *has, phi)
    counter = mean if tracked is None else tracked
    _launch(device.transform_kernel, 3, 0, [*maps, *vectors, counter], (floor, a), flags)


def moments(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance of every channel, and the count m of values in each."""
    with _on(x):
        mean, var, _ = _moments(x, 1.0)
    return mean, var, x.numel() // x.shape[1]


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
    """Overwrite x, or fill ``out``, laid out as x, with z = φ(γ·(x − mean)·invstd + β [+ r])."""
    with _on(x):
        _transform_(x, mean, invstd, weight, bias, None, floor, phi, a, residual, out)


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
    """Overwrite x with z from the batch's own statistics, move the running ones, return invstd."""
    tracked, dense, momentum = _to_move(running_mean, running_var, num_batches_tracked, momentum)
    with _on(x):
        invstd = torch.empty(x.shape[1], dtype=torch.float32, device=x.device)
        means, variances = dense or (invstd, invstd)
        r = x if residual is None else _as(residual, x)
        tensors = [x, r, _vector(weight, invstd), _vector(bias, invstd), invstd, means, variances]
        has = tracked is not None, weight is not None, bias is not None, residual is not None
        flags = _forward_flags(dense is not None, momentum is None, *has, phi)
        tensors.append(invstd if tracked is None else tracked)
        if not _launch(device.forward_kernel, 2, 1, tensors, (momentum or 0.0, eps, floor, a), flags):
            mean, _, invstd = _moments(x, eps, dense, tracked, momentum)
            _transform_(x, mean, invstd, weight, bias, tracked, floor, phi, a, r if residual is not None else None)
    _have_moved(running_mean, running_var, tracked, dense)
    return invstd


Pair = tuple[Tensor, Tensor]


def _to_move(
    running_mean: Tensor | None, running_var: Tensor | None, tracked: Tensor | None, momentum: float | None
) -> tuple[Tensor | None, Pair | None, float | None]:
    """The counter, the running statistics as kernels write them, and the momentum; nothing where there are none."""
    if running_mean is None or running_var is None:
        return None, None, 0.0
    return tracked, (running_mean.contiguous(), running_var.contiguous()), momentum


def _have_moved(
    running_mean: Tensor | None, running_var: Tensor | None, tracked: Tensor | None, dense: Pair | None
) -> None:
    """Bring what kernels wrote to where it belongs, and tell autograd, which does not see it."""
    if dense is None or running_mean is None or running_var is None:
        return
    for own, moved in ((running_mean, dense[0]), (running_var, dense[1])):
        if own is not moved:
            own.copy_(moved)
    written = [running_mean, running_var] if tracked is None else [running_mean, running_var, tracked]
    torch.autograd.graph.increment_version([t for t in written if not t.is_inference()])


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
    """A new z from the batch's own statistics, which leaves x as it is; mean and invstd. Moves the running statistics."""
    tracked, dense, momentum = _to_move(running_mean, running_var, num_batches_tracked, momentum)
    with _on(x):
        z = _like(x)
        mean, _, invstd = _moments(x, eps, dense, tracked, momentum)
        _transform_(x, mean, invstd, weight, bias, tracked, floor, phi, a, residual, z)
    _have_moved(running_mean, running_var, tracked, dense)
    return z, mean, invstd


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
    """∑ dy (which is dβ) and ∑ dy·x̂ (which is dγ) of every channel."""
    sum_dy, sum_dy_xhat = (torch.empty(z.shape[1], dtype=torch.float32, device=z.device) for _ in range(2))
    with _on(z):
        maps = [_as(dz, z), z, z if residual is None else _as(residual, z)]
        vectors = [*(_vector(v, sum_dy) for v in (weight, bias, mean, invstd)), sum_dy, sum_dy_xhat]
        has = weight is not None, bias is not None, residual is not None, mean is not None, isinstance(mean, float)
        flags = _backward_flags(*has, phi, variant)
        _launch(device.sums_kernel, 3, 0, maps + vectors, (floor, a), flags)
    return sum_dy, sum_dy_xhat


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
    dx = _like(z)
    with _on(z):
        maps = [_as(dz, z), z, z if residual is None else _as(residual, z), dx, dx if dr is None else dr]
        vectors = [_vector(v, invstd) for v in (weight, bias, mean, invstd, sum_dy, sum_dy_xhat)]
        has = weight is not None, bias is not None, residual is not None, mean is not None, isinstance(mean, float)
        flags = _backward_flags(*has, phi, variant, dr is not None, sum_dy is None)
        _launch(device.input_grad_kernel, 5, 0, maps + vectors, (max(count, 1), floor, a), flags)
    return dx


def _like(z: Tensor) -> Tensor:
    """A new buffer in z's layout, gaps included: one layout serves all tensors of a launch."""
    return torch.empty_strided(z.shape, z.stride(), dtype=z.dtype, device=z.device)


def _as(dz: Tensor, z: Tensor) -> Tensor:
    """dz in z's layout: copied only if it has another."""
    if dz.stride() == z.stride() and dz.dtype == z.dtype and not dz.is_neg():
        return dz
    return _like(z).copy_(dz)


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
    """dx, dγ, dβ of a local batch."""
    with _on(z):
        dz, r = _as(dz, z), None if residual is None else _as(residual, z)
        has = weight is not None, bias is not None, r is not None, mean is not None, isinstance(mean, float)
        flags = _backward_flags(*has, phi, variant, dr is not None)
        read = [dz, z, z if r is None else r]
        vectors = [*[_vector(v, invstd) for v in (weight, bias, mean)], invstd]
        # Nothing is made for a launch that there is not: what it would write looks like what it reads.
        alike = [*read, z, z, *vectors, invstd, invstd]
        launch = _planned(device.backward_kernel, 5, 2 if r is None else 3, alike, (floor, a), flags)
        if launch is not None:
            dx, sum_dy, sum_dy_xhat = _like(z), torch.empty_like(invstd), torch.empty_like(invstd)
            _start(launch, [*read, dx, dx if dr is None else dr, *vectors, sum_dy, sum_dy_xhat], (floor, a))
            return dx, sum_dy_xhat, sum_dy
    rest = (floor, phi, a, variant, r)
    sum_dy, sum_dy_xhat = sums(dz, z, weight, bias, *rest, mean, invstd)
    dx = input_grad(dz, z, weight, bias, invstd, sum_dy, sum_dy_xhat, z.numel() // z.shape[1], *rest, dr, mean)
    return dx, sum_dy_xhat, sum_dy
