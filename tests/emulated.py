"""Gluon kernels on a CPU: their bodies run as Python, tiles are numpy arrays, programs are threads that wait for each other.

Triton's interpreter knows neither Gluon nor programs that run at once. Copies into shared memory happen at once or as late as
they may, as a coin falls; addresses beyond an array's ends are errors.
"""

from __future__ import annotations

import operator
import random
import threading
import time
from types import FunctionType, SimpleNamespace

import numpy as np
from torch import Tensor

# Cards, as plans know them.
H200 = (132, 65536, 2048, 228 << 10, 60 << 20, True)
A100 = (108, 65536, 2048, 164 << 10, 40 << 20, True)
A10 = (72, 65536, 1536, 100 << 10, 6 << 20, True)

# Looks at words until one is said never to come: long, but not for ever.
PATIENCE = 200_000

LOCK = threading.RLock()
HERE = threading.local()


class Tile:
    """An array, or a number, with the operators of Triton's tensors."""

    def __init__(self, a):
        self.a = np.asarray(a)

    # Layouts mean nothing here.
    type = SimpleNamespace(layout=None)

    @property
    def dtype(self):
        return self.a.dtype.type

    def to(self, dtype, bitcast=False):
        return Tile(self.a.view(dtype) if bitcast else self.a.astype(dtype))

    def __bool__(self):
        return bool(self.a)

    def __index__(self):
        return int(self.a)

    def __neg__(self):
        return Tile(-self.a)


def raw(x):
    return x.a if isinstance(x, Tile) else x


def binary(name, f):
    setattr(Tile, f"__{name}__", lambda x, y: Tile(f(x.a, raw(y))))
    setattr(Tile, f"__r{name}__", lambda x, y: Tile(f(raw(y), x.a)))


for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "lshift", "rshift"):
    binary(name, getattr(operator, name))
for name in ("and", "or"):
    binary(name, getattr(operator, f"{name}_"))
for name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Tile, f"__{name}__", lambda x, y, f=getattr(operator, name): Tile(f(x.a, raw(y))))


class Pointer:
    """Addresses in an array."""

    def __init__(self, array, offset=0):
        self.array, self.offset = array, offset
        self.dtype = SimpleNamespace(element_ty=array.dtype.type)

    def __add__(self, more):
        return Pointer(self.array, self.offset + raw(more))

    def read(self, mask, other):
        at, mask = np.broadcast_arrays(np.asarray(self.offset, np.int64), np.asarray(raw(mask)))
        assert ((at >= 0) & (at < self.array.size) | ~mask).all(), "an address beyond the array"
        return np.where(mask, self.array[np.where(mask, at, 0)], np.asarray(other, self.array.dtype))

    def write(self, value, mask):
        at, mask, value = np.broadcast_arrays(np.asarray(self.offset, np.int64), np.asarray(raw(mask)), raw(value))
        assert ((at >= 0) & (at < self.array.size) | ~mask).all(), "an address beyond the array"
        self.array[at[mask]] = value[mask]


class Shared:
    """Slots of shared memory, which hold what nobody wrote at first, or what they are made of."""

    def __init__(self, dtype, shape, _layout, value=None):
        self.slots = np.full(shape, np.nan, dtype)
        if value is not None:
            assert value.a.shape == tuple(shape) and value.dtype is dtype, "of another kind"
            self.slots[...] = value.a

    def load(self, _layout):
        return Tile(self.slots.copy())

    def index(self, i):
        return SimpleNamespace(slot=self.slots[int(i)], load=lambda _layout: Tile(self.slots[int(i)].copy()))


def load(pointer, mask=True, other=0, volatile=False, **_):
    if volatile:
        time.sleep(1e-4)
    return Tile(pointer.read(mask, other))


def store(pointer, value, mask=True, **_):
    # Of two words that belong together, one may come late.
    if pointer.array.dtype == np.int64 and HERE.random.random() < 0.5:
        time.sleep(2e-3)
    pointer.write(value, mask)


def atomic_add(pointer, value, **_):
    with LOCK:
        before = load(pointer)
        store(pointer, before + value)
    return before


def reduce(tiles, axis, combine):
    parts = [np.moveaxis(t.a, axis, 0) for t in tiles]
    while len(parts[0]) > 1:
        half = len(parts[0]) // 2
        parts = [t.a for t in combine(*(Tile(p[:half]) for p in parts), *(Tile(p[half:]) for p in parts))]
    return tuple(Tile(p[0]) for p in parts)


def joined(one, other):
    """Two tiles, or addresses in one array, side by side."""
    if isinstance(one, Pointer):
        return Pointer(one.array, np.stack([one.offset, other.offset], -1))
    return Tile(np.stack([one.a, other.a], -1))


def assembly(_text, _constraints, arguments, **_):
    """What the two texts do that there are: a trap, and looks at two words until both bear the stamp; see run_ptx, too."""
    if arguments:
        one, other, at, stamp, here = arguments
        there = raw(here).astype(bool)
        for _ in range(PATIENCE):
            words = [raw(word).astype(np.int64) for word in (one, other)]
            if not any(((word >> 32 != raw(stamp)) & there).any() for word in words):
                return tuple(Tile(word.astype(np.int32)) for word in words)
            one, other = load(at, there, 0, volatile=True), load(at + 1, there, 0, volatile=True)
    raise TimeoutError("a word that never came")


def run_ptx(text, operands, read):
    """What a thread that runs this text leaves in its operands, by name; ``read`` is memory. Numbers are unsigned."""
    names = dict(operands)
    lines = [line.strip(" ;") for line in text.strip("{}\n").splitlines() if not line.strip().startswith(".reg")]
    number = lambda word: names[word] if word in names else int(word)
    at = 0
    while at < len(lines):
        words = lines[at].translate(str.maketrans("{},", "   ")).split()
        at += 1
        if words[0].startswith("@"):
            guard = words.pop(0)
            if names[guard.lstrip("@!")] == guard.startswith("@!"):
                continue
        operation, *words = words
        if operation == "mov.b64" and len(words) == 3:
            names[words[0]], names[words[1]] = number(words[2]) % (1 << 32), number(words[2]) >> 32
        elif operation.startswith("mov."):
            names[words[0]] = number(words[1])
        elif operation.startswith("setp."):
            compare, *join = operation.split(".")[1:-1]
            found = getattr(operator, compare)(number(words[1]), number(words[2]))
            names[words[0]] = getattr(operator, f"{join[0]}_")(found, names[words[3]]) if join else found
        elif operation.startswith("ld."):
            base, _, further = words[1].strip("[]").partition("+")
            names[words[0]] = read(number(base) + int(further or 0))
        elif operation.startswith("add."):
            names[words[0]] = number(words[1]) + number(words[2])
        elif operation == "bra":
            at = lines.index(f"{words[0]}:")
        elif operation == "trap":
            raise TimeoutError("a word that never came")
        else:
            assert operation.endswith(":"), f"{operation} is not among what is read here"
    return names


LANGUAGE = SimpleNamespace(
    float32=np.float32, int32=np.int32, int64=np.int64, static_range=range, load=load, store=store,
    atomic_add=atomic_add, reduce=reduce, debug_barrier=lambda: None, inline_asm_elementwise=assembly,
    program_id=lambda axis: HERE.program[axis], num_programs=lambda axis: HERE.programs[axis], allocate_shared_memory=Shared,
    BlockedLayout=lambda *_: None, SliceLayout=lambda *_: None, SwizzledSharedLayout=lambda *_: None,
    cast=lambda x, dtype: Tile(raw(x)).to(dtype), cdiv=lambda x, y: -(-x // y),
    arange=lambda a, b, _layout=None: Tile(np.arange(a, b, dtype=np.int32)), full=lambda s, v, d, _layout: Tile(np.full(s, v, d)),
    expand_dims=lambda t, axis: Tile(np.expand_dims(t.a, axis)), sum=lambda t, axis: Tile(t.a.sum(axis)),
    max=lambda t, axis: Tile(t.a.max(axis)), where=lambda c, x, y: Tile(np.where(raw(c), raw(x), raw(y))),
    maximum=lambda x, y: Tile(np.maximum(raw(x), raw(y))), minimum=lambda x, y: Tile(np.minimum(raw(x), raw(y))),
    sqrt=lambda x: Tile(np.sqrt(raw(x))), abs=lambda x: Tile(np.abs(raw(x))), exp=lambda x: Tile(np.exp(raw(x))),
    reshape=lambda t, shape: Tile(t.a.reshape(shape)), ravel=lambda t: Tile(t.a.ravel()), convert_layout=lambda t, _layout: t,
    bfloat16=None, join=joined, split=lambda t: (Tile(t.a[..., 0]), Tile(t.a[..., 1])),
    gather=lambda t, index, axis: Tile(np.take(t.a, index.a, axis)),
    log=lambda x: Tile(np.log(raw(x))), clamp=lambda x, low, high: Tile(np.clip(raw(x), low, high)),
)  # fmt: skip


def copy(slot, pointer, mask):
    """Into shared memory: at once, or when it is waited for."""
    done = []

    def now():
        if not done:
            slot.slot[...] = pointer.read(mask, 0)
            done.append(True)

    if HERE.random.random() < 0.5:
        now()
    HERE.copies.append(now)


def commit():
    HERE.groups.append(HERE.copies)
    HERE.copies = []


def wait(outstanding):
    while len(HERE.groups) > outstanding:
        for now in HERE.groups.pop(0):
            now()


ASYNC = SimpleNamespace(async_copy_global_to_shared=copy, commit_group=commit, wait_group=wait)


def as_python(function, known=None):
    """A kernel or helper, and all that it calls, with this language for Triton's."""
    known = {} if known is None else known
    code = getattr(function, "fn", function)
    if code not in known:
        names: dict[str, object] = {}
        known[code] = FunctionType(code.__code__, names, code.__name__, code.__defaults__)
        for name, value in code.__globals__.items():
            if name in code.__code__.co_names:
                value = getattr(value, "value", value)
                names[name] = as_python(value, known) if hasattr(value, "fn") else value
        names |= {"tl": LANGUAGE, "gl": LANGUAGE, "xp": LANGUAGE, "async_copy": ASYNC}
        names |= {"PATIENCE": PATIENCE}
    return known[code]


class Kernel:
    """A kernel that is started as Triton's are, on torch's tensors in the memory of a CPU; its programs are threads."""

    def __init__(self, kernel):
        self.body, self.arg_names, self.__name__ = as_python(kernel), kernel.arg_names, kernel.__name__
        self.started = 0

    def warmup(self, *_, **__):
        return SimpleNamespace(n_regs=0, n_spills=0, metadata=SimpleNamespace(shared=0))

    def __getitem__(self, grid):
        def start(*arguments, num_warps, maxnreg, launch_cooperative_grid, **constants):
            self.started += 1
            arguments = [Pointer(whole(a), a.storage_offset()) if isinstance(a, Tensor) else a for a in arguments]
            constants = {n: as_python(v) if hasattr(v, "fn") else v for n, v in constants.items()}
            failed = []

            def program(i):
                HERE.program, HERE.programs, HERE.copies, HERE.groups = (i % grid[0], i // grid[0]), grid, [], []
                HERE.random = random.Random(self.started * grid[0] * grid[1] + i)
                try:
                    self.body(*arguments, **constants)
                except BaseException as error:
                    failed.append(error)

            threads = [threading.Thread(target=program, args=(i,), daemon=True) for i in range(grid[0] * grid[1])]
            for t in threads:
                t.start()
                if not constants.get("SHARED", True):
                    # Nobody waits for another: one after another is as good.
                    t.join(240)
            for t in threads:
                t.join(240)
                if failed:
                    raise failed[0]
                assert not t.is_alive(), "programs that wait for ever"

        return start


def whole(t):
    """All of a tensor's memory."""
    return t.detach().as_strided((t.untyped_storage().nbytes() // t.element_size(),), (1,), 0).numpy()
