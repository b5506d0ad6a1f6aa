"""An exchange between ranks of one host by stores into each other's memory: torch's symmetric memory, no multicast.

A rank stores what it sends and then waits until all have said that they have stored theirs. Nobody says that a buffer
may be written again: a rank stores queries of a layer when it has the results of the one before from all ranks, which
have read its queries by then, and results when it has queries from all of them, which have read the results of the
layer before by then. So two buffers have to take turns, and each exchange must be one that all ranks are in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .push_to_ranks import WORD, push_to_ranks


class Peers:
    """Of one rank of a process group of torch, all of them GPUs that reach each other's memory."""

    def __init__(self, group_name: str) -> None:
        self._group_name = group_name
        self._buffers: dict[int, tuple[Any, Tensor]] = {}  # by where each begins here

    def zeros(self, count: int, *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """A buffer `[count]` that all ranks can store into; every rank has to ask for as much. Raises what torch does
        where ranks cannot reach each other's memory."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        buffer = symmetric_memory.empty(count, dtype=dtype, device=device).zero_()
        handle = symmetric_memory.rendezvous(buffer, self._group_name)
        addresses = torch.tensor(handle.buffer_ptrs, dtype=WORD, device=device)
        self._buffers[buffer.data_ptr()] = handle, addresses
        return buffer

    def exchange(self, received: Tensor, sent: Tensor) -> None:
        """See sharded.Exchange; `received` is the beginning of a buffer from `zeros`, or all of it."""
        handle, addresses = self._buffers[received.data_ptr()]
        push_to_ranks(sent, addresses, handle.rank)
        handle.barrier()
