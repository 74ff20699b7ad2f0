"""How kernels are started: planned and compiled once for calls of a kind, with room for what their programs exchange."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, reduce
from operator import or_
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from .. import activations
from . import device, plans

try:
    from . import ring, sweep
except ImportError:  # a Triton whose Gluon lacks something
    ring = sweep = None  # type: ignore[assignment]


class Launch(NamedTuple):
    """A kernel with all that does not change from call to call; ``run(stream, pointers, floats)`` starts it, if they are aligned.

    ``grid`` counts programs, those of sweeps by slab and member. ``words`` is what members of a team exchange, ``room`` the
    counters and partial results of a crew; 0 where there are none.
    """

    kernel: Any
    grid: tuple[int, int]
    words: int
    room: tuple[int, int]
    numbers: tuple[int | float, ...]
    constants: dict[str, Any]
    options: dict[str, Any]
    run: Callable[[int, list[int], tuple[float, ...]], None] | None


def _capturing(x: Tensor) -> bool:
    return x.is_cuda and torch._C._cuda_isCurrentStreamCapturing()


# By device and stream, since launches on two streams may overlap. Zero at first; every launch leaves them fit for the next.
WORDS: dict[tuple[torch.device, int], tuple[Tensor, Tensor]] = {}


def _words(x: Tensor, stream: int, many: int) -> tuple[Tensor, Tensor]:
    """Room for what members exchange, and the epoch with its count of finished programs."""
    # Graphs captured on one stream may be replayed on several: each launch gets words of its own.
    if _capturing(x):
        return _fresh_words(x.device, many)
    key = x.device, stream
    found = WORDS.get(key)
    if found is None or found[0].numel() < many:
        found = WORDS[key] = _to_stay(_fresh_words, x.device, triton.next_power_of_2(many))
    return found


def _fresh_words(where: torch.device, many: int) -> tuple[Tensor, Tensor]:
    return torch.zeros(many, dtype=torch.int64, device=where), torch.zeros(1, dtype=torch.int64, device=where)


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


# By what a call looks like; None where the card cannot hold a team.
LAUNCHES: dict[tuple[Any, ...], Launch | None] = {}


def launch(
    kernel: Any,
    maps: int,
    twice: int,
    tensors: list[Tensor],
    floats: tuple[float, ...],
    asked: tuple[Any, ...],
    kinds: tuple[torch.dtype, ...] | None = None,
) -> bool:
    """Run a kernel, planned and compiled on the first call of its kind; False where the card cannot.

    The first ``maps`` of the tensors are full-sized. ``twice`` says how many of these one launch reads twice, by a team, and
    is to find in the cache the second time; 0 for the kernels whose members do not wait. What is ``asked`` of it, a function and
    its arguments, gives the flags that are compiled into it. ``kinds`` are the dtypes of the vectors that calls asking the same
    may have in several; unless told, those of all vectors.
    """
    x = tensors[0]
    # None on a CPU, where kernels are interpreted.
    gpu = x.get_device() if x.is_cuda else None
    if gpu is not None and torch._C._cuda_getDevice() != gpu:
        # It would run where the caller is, not where its tensors are.
        with torch.cuda.device(gpu):
            return launch(kernel, maps, twice, tensors, floats, asked, kinds)
    pointers = [*map(Tensor.data_ptr, tensors)]
    if 0 in pointers:
        kind = type(tensors[pointers.index(0)]).__name__
        raise TypeError(f"a {kind} has no memory that a kernel could read; give plain tensors, as by its to_local()")
    aligned = straight = not reduce(or_, pointers) % 16
    if not straight:
        aligned = not reduce(or_, pointers[:maps]) % 16
    # All that a plan depends on, or that is compiled into a kernel. Kernels stay: their identity does, and their hash is slow.
    kinds = kinds or tuple([t.dtype for t in tensors[maps:]])
    key = id(kernel), asked, kinds, x.shape, x.stride(), x.dtype, gpu, aligned
    try:
        found = LAUNCHES[key]
    except KeyError:
        flags = asked[0](*asked[1:])
        found = LAUNCHES[key] = _prepare(kernel, aligned, maps, twice, tensors, tuple(map(float, floats)), flags)
    if found is None:
        return False
    stream = 0 if gpu is None else torch._C._cuda_getCurrentRawStream(gpu)
    beside: tuple[Tensor, ...] = ()
    if found.words:
        beside = _words(x, stream, found.words)
    elif found.room[0]:
        beside = _fresh_counters(x.device, *found.room) if _capturing(x) else _counters(x.device, stream, *found.room)
    # Compiled for pointers aligned as torch allocates; parameters cut out of a larger tensor may not be.
    if straight and found.run is not None:
        found.run(stream, [*pointers, *map(Tensor.data_ptr, beside)], floats)
    else:
        # An integer would be compiled into the kernel, and stay there.
        arguments = (*tensors, *beside, *found.numbers, *map(float, floats))
        found.kernel[found.grid](*arguments, **found.constants, **found.options)
    return True


def _prepare(
    kernel: Any,
    aligned: bool,
    maps: int,
    twice: int,
    tensors: list[Tensor],
    floats: tuple[float, ...],
    flags: dict[str, Any],
) -> Launch | None:
    x, where, place = tensors[0], plans.card(tensors[0].device), plans.layout(tensors[0])
    assert place is not None
    if ring is not None and where.copies and aligned and twice:
        held = _held_launch(kernel, maps, twice, tensors, floats, flags, place, where)
        if held is not None:
            return held
    sums = "partial_ptr" in kernel.arg_names
    c = plans.cut(place, x.element_size(), aligned, plans.LINE_BYTES if sums or twice else plans.LINE_BYTES_OF_MAPS)
    inner = c.constants["INNER"]
    each = plans.CREW if not inner else plans.CREW_THAT_SUMS if sums else plans.CREW_THAT_MAPS
    t = plans.team(c, twice, where) if twice else plans.crew(c, where, each)
    if t is None:
        return None
    w, threads = c.constants["W"], 32 * plans.WARPS
    where_it_lies = (place.rows, place.channels, place.pixels, place.row_stride, place.channel_stride, c.across)
    numbers: tuple[int | float, ...] = (*where_it_lies, t.chunks, t.per)
    options: dict[str, Any] = {"num_warps": plans.WARPS}
    words, room = 0, (0, 0)
    if twice:
        shared = t.S > 1
        mw = 1 if w == 1 else min(w, triton.next_power_of_2(triton.cdiv(w, t.S)))
        block = max(triton.next_power_of_2(t.S), threads // (2 * mw))
        constants = {**flags, **c.constants, "SHARED": shared, "MW": mw, "BS": block, "THREADS": threads}
        numbers += (c.slabs, t.S, t.G, x.numel() / x.shape[1])
        options |= {"maxnreg": plans.registers(inner), "launch_cooperative_grid": shared}
        words = 8 * w * t.S * t.G if shared else 1
    else:
        # BS: how many partial results the last member loads at once.
        constants = {**flags, **c.constants, "BS": min(triton.next_power_of_2(t.S), max(1, plans.TILE // w))}
        numbers += (t.S,)
        if sums:
            # In powers of two, so that few sizes serve all layers.
            room = triton.next_power_of_2(c.slabs), triton.next_power_of_2(c.slabs * t.S * 2 * w)
        if inner:
            read = 1 + ("dz_ptr" in kernel.arg_names) + flags["RESIDUAL"]
            # With one map to read, and one to write or numbers of 32 bits, other programs' loads are as good.
            single = kernel is device.transform_kernel or (kernel is device.moments_kernel and x.element_size() == 4)
            constants["STAGES"] = 1 if single else plans.stages(read * plans.TILE * x.element_size(), where)
            if kernel is device.sums_kernel:
                options["maxnreg"] = where.registers // (plans.CREW_THAT_SUMS * threads)
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    grid, run = (t.S * t.G, 1), None
    if x.is_cuda:
        extra = _fresh_words(x.device, 1) if words else _fresh_counters(x.device, 1, 1) if room[0] else ()
        built = _build(kernel, maps, tensors, extra, (*numbers, *floats), constants, options)
        run = _runner(built, grid, numbers, tuple(constants.values()))
        if not twice and "maxnreg" in options and built.n_spills:
            # Some activations need more; then fewer programs are resident.
            del options["maxnreg"]
            built = _build(kernel, maps, tensors, extra, (*numbers, *floats), constants, options)
            run = _runner(built, grid, numbers, tuple(constants.values()))
        at_once = plans.resident(built.n_regs, built.metadata.shared, plans.WARPS, where) * where.processors
        if words and shared and at_once < t.S * t.G:
            return None
        if not aligned:
            run = None
    return Launch(kernel, grid, words, room, numbers, constants, options, run)


def _held_launch(
    kernel: Any,
    maps: int,
    twice: int,
    tensors: list[Tensor],
    floats: tuple[float, ...],
    flags: dict[str, Any],
    place: plans.Layout,
    where: plans.Card,
) -> Launch | None:
    """The launch of a fused kernel that holds its maps in shared memory; None where the card cannot."""
    x, forward = tensors[0], kernel is device.forward_kernel
    how = (place, x.element_size(), twice + (forward and flags["RESIDUAL"]), twice, where)
    c = plans.sweep_of(*how) or plans.ring_of(*how)
    if c is None:
        return None
    module, warps, words, constants, numbers = _in_a_ring(c, place) if isinstance(c, plans.Ring) else _swept(c, place)
    kernel = module.forward_kernel if forward else module.backward_kernel
    # In a ring a member waits for words even if they are its own.
    grid = (c.S * c.G, 1) if module is ring else (c.G, c.S)
    shared, numbers = c.S > 1 or module is ring, (*numbers, x.numel() / x.shape[1])
    constants = {**flags, **constants, "SHARED": shared, "WARPS": warps}
    constants = {name: constants[name] for name in kernel.arg_names if name in constants}
    options = {"num_warps": warps, "maxnreg": c.registers, "launch_cooperative_grid": shared}

    def load() -> tuple[Any, Any]:
        built = _build(kernel, maps, tensors, _fresh_words(x.device, 1), (*numbers, *floats), constants, options)
        # How many registers it has is not known before.
        return built, _runner(built, grid, numbers, tuple(constants.values()))

    try:
        built, run = load()
        # Some activations need registers themselves: a tile that spills had better be read again.
        while module is sweep and constants["Q"] > 0 and built.n_spills > plans.SWEEP_SPILLS:
            constants["Q"] = max(0, constants["Q"] - 2)
            built, run = load()
    except Exception as error:
        # Gluon is an experiment of Triton's, and may change.
        activations.warn_once(
            f"Triton {triton.__version__} does not compile the kernels that hold maps in shared memory "
            f"({type(error).__name__}: {str(error)[:200]}): the slower ones are used. inplace_abn knows Triton 3.6 and 3.7."
        )
        return None
    if shared and plans.resident(built.n_regs, built.metadata.shared, warps, where) * where.processors < c.S * c.G:
        return None
    return Launch(kernel, grid, words, (0, 0), numbers, constants, options, run)


# What differs between the two: kernels, warps, words, constants and numbers.
Held = tuple[Any, int, int, dict[str, Any], tuple[int | float, ...]]


def _in_a_ring(c: plans.Ring, place: plans.Layout) -> Held:
    warps = plans.RING_WARPS
    constants = {
        "V": c.V, "EDGES": c.edges, "LINES": c.lines, "T": c.T, "LAG": c.lag, "AHEAD": c.ahead, "EARLY": c.early,
        "BS": max(triton.next_power_of_2(c.S), 32 * warps), "ALONE": c.S <= plans.RING_ALONE,
    }  # fmt: skip
    strides = place.row_stride, place.channel_stride
    numbers = (
        place.rows, place.pixels, *strides, place.pixels // c.V, c.vectors, c.each, place.channels, c.S, c.G,
    )  # fmt: skip
    return ring, warps, 8 * c.S * c.G, constants, numbers


def _swept(c: plans.Sweep, place: plans.Layout) -> Held:
    warps, once = c.warps, c.columns == 2 * c.P
    constants = {
        "V": c.V, "P": c.P, "W": c.W, "K": c.K, "B": c.B, "Q": c.Q, "H": c.H, "R": c.R, "AHEAD": c.ahead, "COLUMNS": c.columns,
        "PIXELS": place.pixels, "WHOLE": place.channels % c.P == 0 and c.P * place.pixels == c.W,
        # Rows of words that a member reads; in columns as many words as threads, or more.
        "BS": triton.next_power_of_2(c.S) if once else max(triton.next_power_of_2(c.S), 32 * warps // min(32, c.columns)),
    }  # fmt: skip
    numbers = (place.rows, place.channels, place.row_stride, c.G, c.S)
    return sweep, warps, 2 * c.P * (c.S + 1) * c.G if c.S > 1 else 1, constants, numbers


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
    built: Any, grid: tuple[int, int], numbers: tuple[int | float, ...], constants: tuple[Any, ...]
) -> Callable[[int, list[int], tuple[float, ...]], None]:
    """Starts a compiled kernel; Triton's own way describes each launch to profilers, even where none listens."""
    told = built[(*grid, 1)]
    launcher, function, metadata, hooks = built.run, built.function, built.packed_metadata, triton.knobs.runtime

    def run(stream: int, pointers: list[int], floats: tuple[float, ...]) -> None:
        before, after = hooks.launch_enter_hook, hooks.launch_exit_hook
        # Chains of listeners, or, as they once were, a single one.
        if getattr(before, "calls", before) or getattr(after, "calls", after):
            told(*pointers, *numbers, *floats, *constants, stream=stream)
        else:
            launcher(
                *grid, 1, stream, function, metadata, None, None, None, *pointers, *numbers, *floats, *constants
            )  # fmt: skip

    return run
