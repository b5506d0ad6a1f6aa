"""CUDA graphs without a GPU: the operations of a stretch of code are recorded, and done again on the same memory.

As in a CUDA graph, Python runs at capture only, so branches and numbers of the host are frozen; what is replayed reads
and writes the tensors of the capture. Kernels whose work is described in device memory are stood in for by functions
that read it on the host; `opaque` records such a function as one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

READS_ON_HOST = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default}

_recording: list[TorchGraph] = []


class TorchGraph(TorchDispatchMode):
    """Records in `with graph.capture():`, and does the same again in `graph.replay()`."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any], Any]] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        _recording.append(self)
        try:
            with self:
                yield
        finally:
            _recording.pop()

    def record(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = function(*args, **kwargs)
        self._operations.append((function, args, kwargs, result))
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in READS_ON_HOST, f"{func} waits for the device inside a graph"
        return self.record(func, args, kwargs or {})

    def replay(self) -> None:
        """Do it again. What an operation returns goes to where its result was at capture."""
        for function, args, kwargs, result in self._operations:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def opaque(function: Callable[..., Any]) -> Callable[..., Any]:
    """One operation of a graph, whatever it does inside."""

    def operation(*args: Any, **kwargs: Any) -> Any:
        if not _recording:
            return function(*args, **kwargs)
        with _disable_current_modes():
            return _recording[-1].record(function, args, kwargs)

    return operation
