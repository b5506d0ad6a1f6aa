"""Failures put into the code of the package from outside: any of its functions, any of its tensor operations.

A place is named by what the code itself says: a function by its module and qualified name, an operation by its function
and line. `Watch` lists the places that run, `Fault` makes one of them fail.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from sglang_mla_ext.adapter.cpu.fake_gpu import forget_cached

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = tuple(f"{REPOSITORY / folder}/" for folder in ("sglang_mla_ext", "kernels"))
STAND_INS = tuple(f"{REPOSITORY / folder}/" for folder in ("sglang_mla_ext/adapter/cpu", "kernels/reference"))
"""On a GPU there are kernels in their place: what fails in them fails as a whole."""

MESSAGE = "a failure that a test put here"

_struck: Any = None  # called by a function whose code was replaced


def is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(FOLDERS)


def name_of(code: CodeType) -> str:
    """`adapter/step/steps.py Steps.fail`"""
    file = Path(code.co_filename).relative_to(REPOSITORY)
    parts = file.parts[1:] if file.parts[0] == "sglang_mla_ext" else file.parts
    return f"{'/'.join(parts)} {code.co_qualname}"


def _calling_frame() -> FrameType | None:
    """The innermost frame that is not torch's or this file's."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename == __file__):
        frame = frame.f_back
    return frame


class _Operations(TorchFunctionMode):
    """Tells of each operation on tensors that one of our lines asks for."""

    def __init__(self, tell: Any) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = _calling_frame()
        known = frame is not None and is_ours(frame.f_code) and not frame.f_code.co_filename.startswith(STAND_INS)
        if known and getattr(func, "__name__", "") != "__get__":  # which is a property's
            self._tell(f"{name_of(frame.f_code)}:{frame.f_lineno}")
        return func(*args, **(kwargs or {}))


class Watch:
    """Attributes:
    functions: our functions that ran, by name; what is defined inside of another is that one's part.
    operations: places of operations on tensors.
    """

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()
        self.operations: dict[str, None] = {}

    @property
    def functions(self) -> dict[str, CodeType]:
        functions = (code for code in self._codes if code.co_flags & inspect.CO_OPTIMIZED)  # and no class's body
        ours = (code for code in functions if is_ours(code) and "<" not in code.co_qualname)
        return {name_of(code): code for code in ours}

    @property
    def places(self) -> dict[str, CodeType | None]:
        """With the code of functions."""
        return {**self.functions, **dict.fromkeys(self.operations)}

    @contextmanager
    def on(self) -> Iterator[None]:
        def called(frame: FrameType, event: str, argument: object) -> None:
            if event == "call":
                self._codes.add(frame.f_code)

        sys.setprofile(called)
        try:
            with _Operations(lambda place: self.operations.setdefault(place)):
                yield
        finally:
            sys.setprofile(None)


Functions = Mapping[CodeType, list[FunctionType]]


def functions_of(codes: Collection[CodeType]) -> Functions:
    """All functions with these codes, whoever has imported them and however."""
    found: dict[CodeType, list[FunctionType]] = {code: [] for code in codes}
    for each in gc.get_objects():
        if type(each) is FunctionType and each.__code__ in found:
            found[each.__code__].append(each)
    assert all(found.values()), [name_of(code) for code, functions in found.items() if not functions]
    return found


class Fault:
    """One place that fails, once or for good, until it is lifted.

    Attributes:
        strikes: how often it has failed.
    """

    def __init__(self, place: str, code: CodeType | None, functions: Functions, *, once: bool) -> None:
        """
        Args:
            code: of the function; None for an operation.
        """
        self._place, self._code, self._once = place, code, once
        self._functions = functions[code] if code is not None else []
        self._lifted = False
        self.strikes = 0

    @contextmanager
    def on(self) -> Iterator[None]:
        """The fault is there until it is lifted, at the latest at the end of the context."""
        global _struck
        forget_cached("sglang_mla_ext.kernels")  # what is not called cannot fail
        if self._code is None:
            with _Operations(self._operation):
                yield
            return
        _struck = self._strike
        failing = _fails.__code__.replace(co_freevars=self._code.co_freevars, co_name=self._code.co_name)
        for function in self._functions:
            function.__code__ = failing
        try:
            yield
        finally:
            self.lift()

    def lift(self) -> None:
        self._lifted = True
        for function in self._functions:
            function.__code__ = self._code

    def _operation(self, place: str) -> None:
        if place == self._place and not self._lifted:
            self._strike()

    def _strike(self) -> None:
        self.strikes += 1
        if self._once:
            self.lift()
        raise torch.OutOfMemoryError(MESSAGE)


def _fails(*args: Any, **kwargs: Any) -> Any:
    import faults

    faults._struck()
