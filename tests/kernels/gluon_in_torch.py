"""Runs a Gluon kernel for Hopper as it stands, in torch, without a GPU: its roles take turns at random.

Every function of the kernel's modules is bound anew, to stand-ins of `gl`, `mbarrier`, `tma` and the products. A role
is a thread; only one runs at a time, and it may lose its turn wherever it touches what roles share. Barriers count
arrivals and bytes as the hardware's do, and know only the parity of a phase. What a copy will overwrite is NaN from its
issue to its arrival. A product notes its operands when it is issued and compares when it is waited for, so that shared
memory given away too early shows; roles that all wait are a deadlock.

What it does not model: registers, layouts other than the order of columns in shared memory, and fences. Functions that
move bytes inside of registers are for the tests to replace (see `Program`).
"""

from __future__ import annotations

import importlib.util
import math
import random
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITCallable

NAN = float("nan")
SWIZZLE_BYTES = 128
"""What one swizzle covers of a row: wider rows lie in shared memory in blocks of so many bytes."""

WORDS = (torch.int16, torch.int32)
"""Types under which a kernel moves narrower numbers. They stay what they are here."""


class Int(int):
    """A number loaded from memory."""

    def to(self, dtype: torch.dtype) -> Int:
        return self


@dataclass
class Pointer:
    tensor: Tensor  # flat
    offset: Any = 0  # an integer or a tensor of them

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.tensor, self.offset + more)

    @property
    def dtype(self) -> SimpleNamespace:
        return SimpleNamespace(element_ty=self.tensor.dtype)


class Descriptor:
    """A TMA descriptor: what is out of bounds reads as zero."""

    def __init__(
        self, tensor: Tensor, block: list[int], itemsize: int = 2, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.tensor, self.block, self.layout, self.dtype = tensor, block, None, dtype
        self.block_type = SimpleNamespace(shape=block, nbytes=itemsize * math.prod(block))

    def read(self, *at: int) -> Tensor:
        """`[rows, columns]`: axes in front of the last two are one element of the block."""
        found = self.tensor[tuple(slice(i, i + size) for i, size in zip(at, self.block, strict=True))].float()
        missing = [(0, size - n) for size, n in zip(self.block, found.shape, strict=True)]
        return torch.nn.functional.pad(found, sum(reversed(missing), ())).view(self.block[-2:])


class Layout:
    """Any layout: none of them means anything here."""

    def __init__(self, *_: Any) -> None: ...

    @staticmethod
    def get_default_for(shape: list[int], dtype: torch.dtype) -> Layout:
        return Layout()


class Place:
    """A tile of shared memory: `[rows, column blocks, columns of one]`, or `[rows]`. `spare`, of the same shape, is
    what else lies under numbers that are wider than those it was allocated for: writing destroys it."""

    def __init__(self, memory: Tensor, transposed: bool = False, spare: Tensor | None = None) -> None:
        self.memory, self.transposed, self.spare = memory, transposed, spare
        rows, *columns = memory.shape
        self.shape = [rows, math.prod(columns)] if columns else [rows]  # as the kernel sees it

    def load(self, layout: Any = None) -> Tensor:
        return self.memory.flatten(1).clone() if self.memory.dim() > 1 else self.memory.clone()

    def operand(self) -> Tensor:
        return self.load().T if self.transposed else self.load()

    def store(self, values: Tensor) -> None:
        self.memory.copy_(values.float().view(self.memory.shape))
        if self.spare is not None:
            self.spare.fill_(NAN)

    def permute(self, order: tuple[int, int]) -> Place:
        return Place(self.memory, not self.transposed)

    def slice(self, start: int, length: int, dim: int) -> Place:
        rows = dim == self.transposed
        assert rows or self.memory.shape[1] == 1, "columns of one block only"
        return Place(self.memory.narrow(0 if rows else 2, start, length), self.transposed)


class Shared(Place):
    """An allocation of shared memory; `index` gives one tile of it, or one line of a two-dimensional one."""

    def __init__(
        self, shape: list[int], dtype: torch.dtype, flat: Tensor | None = None, spare: Tensor | None = None
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.flat, self.flat_spare = torch.full(shape, NAN).flatten() if flat is None else flat, spare
        super().__init__(self._tiles(self.flat)[0] if len(shape) > 1 else self.flat)
        self.shape = shape

    def _tiles(self, flat: Tensor) -> Tensor:
        rows, columns = self.shape[-2:]
        block = min(columns, SWIZZLE_BYTES // self.dtype.itemsize)
        return flat.view(-1, columns // block, rows, block).transpose(1, 2)

    def index(self, i: int) -> Place:
        if len(self.shape) == 2:
            return Place(self.flat.view(self.shape)[i])
        spare = None if self.flat_spare is None else self._tiles(self.flat_spare)[i]
        return Place(self._tiles(self.flat)[i], spare=spare)

    def _reinterpret(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Shared:
        if dtype in WORDS:
            return self
        width = dtype.itemsize // self.dtype.itemsize
        assert self.flat.numel() == math.prod(shape) * width and width in (1, 2)
        return Shared(shape, dtype, self.flat[::width], self.flat[1::2] if width == 2 else None)


class Barrier:
    def init(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes, self.phase = 0, 0

    def arrive(self, bytes_expected: int = 0, count: int = 1) -> None:
        assert self.pending >= count, "more arrivals than the barrier counts"
        self.pending -= count
        self.bytes += bytes_expected
        self.complete(0)

    def complete(self, copied: int) -> None:
        self.bytes -= copied
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count

    def passed(self, parity: int) -> bool:
        return self.phase != parity & 1


@dataclass
class Product:
    """Products in flight that add to one accumulator: each operand's place, and what it held at the issue."""

    start: Tensor
    operands: list[tuple[Any, Any, Tensor, Tensor]]

    def finish(self) -> Tensor:
        total = self.start
        for a, b, a_then, b_then in self.operands:
            for place, then in ((a, a_then), (b, b_then)):
                now = place.operand() if isinstance(place, Place) else then
                # What nobody may read may be cleared meanwhile: it is masked in the result.
                same = (now == then) | (then.isnan() & (now.isnan() | (now == 0)))
                assert same.all(), "an operand changed under a product"
            total = total + a_then.float() @ b_then.float()
        return total


def aggregate_of(kind: type) -> Callable[..., SimpleNamespace]:
    """A stand-in for a Gluon aggregate, whose members may be anything."""
    constructor = kind.hash_attrs[0]
    initialise = getattr(constructor, "fn", constructor)

    def make(*members: Any) -> SimpleNamespace:
        made = SimpleNamespace()
        initialise(made, *members)
        return made

    return make


class Stopped(BaseException):
    """Ends the threads of a program that failed."""


class Program:
    """One program of the grid. `changes` replace functions of the kernel and stand-ins by name: what moves bytes, or to
    show that a wrong kernel is found out."""

    def __init__(
        self, modules: list[ModuleType], index: int, programs: int, seed: int, changes: dict[str, Any]
    ) -> None:
        self.random = random.Random(seed * 1000 + index)
        self.in_flight: list[tuple[Place, Tensor, Barrier, int]] = []
        self.turn, self.stop = threading.Semaphore(0), False
        self.waiting: dict[threading.Thread, tuple[threading.Semaphore, Callable[[], bool]]] = {}
        self.errors: list[BaseException] = []
        stand_ins = {
            "gl": self._language(index, programs),
            "mbarrier": SimpleNamespace(
                MBarrierLayout=lambda: None,
                init=lambda barrier, count: barrier.init(count),
                wait=lambda barrier, parity: self.pause(lambda: barrier.passed(parity)),
                arrive=lambda barrier, count=1: (barrier.arrive(count=count), self.pause()),
                expect=lambda barrier, nbytes: barrier.arrive(nbytes),
            ),
            "tma": SimpleNamespace(async_copy_global_to_shared=self._copy),
            "warpgroup_mma": self._product,
            "warpgroup_mma_wait": self._wait_for_products,
            "fence_async_shared": lambda: None,
            "thread_barrier": self.pause,
        }
        self.names: dict[str, Any] = {"range": range}
        for module in modules:
            for name, value in vars(module).items():
                if isinstance(value, JITCallable):
                    value = FunctionType(value.fn.__code__, self.names, name, value.fn.__defaults__)
                elif getattr(value, "__triton_aggregate__", False):
                    value = aggregate_of(value)
                self.names[name] = value.value if isinstance(value, gl.constexpr) else value
        self.names |= stand_ins | {name: change(self, stand_ins.get(name)) for name, change in changes.items()}

    def run(self, kernel: str, *arguments: Any) -> None:
        """
        Raises:
            AssertionError: a deadlock, an operand that changed, too many arrivals, or a copy that nobody waited for.
        """
        self.names[kernel](*arguments)
        try:
            while self.waiting and not self.errors:
                ready = [thread for thread, (_, may_run) in self.waiting.items() if may_run()]
                choices = ready + [None] * bool(self.in_flight)
                assert choices, f"deadlock of {len(self.waiting)} roles"
                thread = self.random.choice(choices)
                if thread is None:
                    self._land()
                else:
                    own, _ = self.waiting.pop(thread)
                    own.release()
                    self.turn.acquire()
            if self.errors:
                raise self.errors[0]
            assert not self.in_flight, "a copy that nobody waited for"
        finally:
            self.stop = True
            for own, _ in self.waiting.values():
                own.release()

    def pause(self, may_run: Callable[[], bool] = lambda: True) -> None:
        """Give the turn away, until it comes back and `may_run()`."""
        own = threading.Semaphore(0)
        self.waiting[threading.current_thread()] = own, may_run
        self.turn.release()
        own.acquire()
        if self.stop:
            raise Stopped

    def _specialize(self, roles: list[tuple[Callable[..., None], tuple]], warps: list, registers: list) -> None:
        def work(role: Callable[..., None], arguments: tuple) -> None:
            try:
                self.pause()
                role(*arguments)
            except Stopped:
                return
            except BaseException as error:
                self.errors.append(error)
            self.turn.release()

        for role, arguments in roles:
            threading.Thread(target=work, args=(role, arguments), daemon=True).start()
            self.turn.acquire()

    def _copy(self, descriptor: Descriptor, at: list[int], barrier: Barrier, place: Place) -> None:
        place.store(torch.full_like(place.memory, NAN))
        self.in_flight.append((place, descriptor.read(*at), barrier, descriptor.block_type.nbytes))

    def _land(self) -> None:
        place, values, barrier, nbytes = self.in_flight.pop(self.random.randrange(len(self.in_flight)))
        place.store(values)
        barrier.complete(nbytes)

    def _product(self, a: Any, b: Place, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        before = acc if isinstance(acc, Product) else Product(acc if use_acc else torch.zeros_like(acc), [])
        a_now = a.operand() if isinstance(a, Place) else a
        return Product(before.start, [*before.operands, (a, b, a_now, b.operand())])

    def _wait_for_products(self, left: int, deps: list[Product]) -> Any:
        self.pause()
        results = [product.finish() for product in deps]
        return results[0] if len(results) == 1 else results

    def _allocate(self, dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
        if dtype != torch.int64:
            return Shared(shape, dtype)
        barriers = [Barrier() for _ in range(shape[0])]
        return SimpleNamespace(index=lambda i: barriers[i], shape=shape)

    def _language(self, index: int, programs: int) -> SimpleNamespace:
        def load(pointer: Pointer, mask: Any = True, other: Any = 0) -> Any:
            if isinstance(pointer.offset, Tensor):
                found = torch.full(pointer.offset.shape, other, dtype=pointer.tensor.dtype)
                mask = torch.as_tensor(mask).expand(found.shape)
                found[mask] = pointer.tensor[pointer.offset[mask]]
                return found
            number = float if pointer.tensor.is_floating_point() else Int
            return number(pointer.tensor[pointer.offset]) if mask else number(other)

        def store(pointer: Pointer, values: Tensor, mask: Tensor) -> None:
            offsets, mask, values = torch.broadcast_tensors(pointer.offset, mask, values)
            pointer.tensor[offsets[mask]] = values[mask].to(pointer.tensor.dtype)

        def maximum(a: Any, b: Any) -> Any:
            return torch.maximum(a, torch.as_tensor(b, dtype=a.dtype)) if isinstance(a, Tensor) else max(a, b)

        def where(condition: Any, a: Any, b: Any) -> Any:
            return torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b

        layouts = (name for name in vars(gl) if name.endswith("Layout"))
        return SimpleNamespace(
            **dict.fromkeys(layouts, Layout),
            float8e4nv=torch.float8_e4m3fn, bfloat16=torch.bfloat16, float32=torch.float32,
            int16=torch.int16, int32=torch.int32, int64=torch.int64,
            program_id=lambda axis: index, num_programs=lambda axis: programs, static_range=range,
            load=load, store=store, maximum=maximum, minimum=lambda a, limit: a.clamp(max=limit), where=where,
            zeros_like=torch.zeros_like, abs=torch.abs, to_tensor=lambda value: value,
            convert_layout=lambda values, layout, assert_trivial=False: values,
            exp2=torch.exp2, log2=torch.log2, allocate_shared_memory=self._allocate,
            arange=lambda start, end, layout: torch.arange(start, end),
            zeros=lambda shape, dtype, layout: torch.zeros(shape),
            full=lambda shape, value, dtype, layout: torch.full(shape, value),
            max=lambda values, axis: values.amax(axis), sum=lambda values, axis: values.sum(axis),
            warp_specialize=self._specialize,
        )  # fmt: skip


def edited(module: ModuleType, folder: Path, old: str, new: str) -> ModuleType:
    """A copy of a kernel's module with every `old` in its source replaced: a kernel that is wrong on purpose.

    Raises:
        AssertionError: the source has no `old`, so the fault has to be written anew.
    """
    source = Path(module.__file__).read_text()
    assert old in source, f"{module.__name__} has no {old!r}"
    path = folder / f"{module.__name__.rpartition('.')[2]}.py"
    path.write_text(source.replace(old, new))
    name = f"{module.__package__}.edited_{path.stem}"  # in the same package, for its relative imports
    spec = importlib.util.spec_from_file_location(name, path)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy  # where dataclasses look for it
    try:
        spec.loader.exec_module(copy)
    finally:
        del sys.modules[name]
    return copy
