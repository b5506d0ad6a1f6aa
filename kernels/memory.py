"""Device memory: how much of it objects keep, and which of it may be given back while a server sleeps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .partials import PartialTable


def tensor_bytes(*owners: object) -> int:
    """Memory, in bytes, of tensors and tables, and of those that are attributes of other objects, or values of an
    attribute that is a dictionary. What has two names counts once."""
    found: dict[int, Tensor] = {}
    for owner in owners:
        values = (owner,) if isinstance(owner, Tensor | PartialTable) else vars(owner).values()
        for value in values:
            for item in value.values() if isinstance(value, dict) else (value,):
                tensor = item.buffer if isinstance(item, PartialTable) else item
                if isinstance(tensor, Tensor):
                    found[id(tensor)] = tensor
    return sum(tensor.nbytes for tensor in found.values())


class Memory:
    """Allocates what is large in a region of memory that may be given back and taken again: addresses stay, contents
    are lost. It is for tensors that are right when they are zero, and that nobody relies on between two steps, or only
    somebody who is told.

        memory = Memory(region)
        partials = memory.zeros(1024, 128, dtype=torch.float32, device="cuda")
        ...                 # the region is given back, and comes again
        memory.clear()      # all tensors that are still in use are zero again
    """

    def __init__(self, region: Callable[[], AbstractContextManager[object]] = nullcontext) -> None:
        """
        Args:
            region: makes a context; what is allocated inside of it can be given back. Not nested here.
        """
        self._region = region
        self._tensors: list[weakref.ref[Tensor]] = []

    def zeros(self, *shape: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """A tensor of zeros in the region; whoever gets it owns it."""
        with self._region():
            tensor = torch.zeros(*shape, dtype=dtype, device=device)
        if not tensor.is_meta:
            self._tensors.append(weakref.ref(tensor))
        return tensor

    def clear(self) -> None:
        """Fill with zeros, on the current stream, what is still in use."""
        for tensor in self._in_use():
            tensor.zero_()

    @property
    def bytes(self) -> int:
        """Bytes of the tensors that are still in use."""
        return sum(tensor.nbytes for tensor in self._in_use())

    def _in_use(self) -> Iterator[Tensor]:
        return (tensor for reference in self._tensors if (tensor := reference()) is not None)
