"""Exchange between ranks of one host by stores into each other's memory: torch's symmetric memory, no multicast.

Both kernels store and wait in one launch (push_to_ranks.py, merge_to_ranks.py), and return at once where a step shares
nothing: then no rank waits for another.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .attention import SharedAttention
from .exchange import ExchangeSizes
from .mailbox import Mailbox
from .merge_to_ranks import merge_to_ranks, result_values, results_of
from .push_to_ranks import push_to_ranks
from .triton_attention import TritonSharedAttention

ALIGNMENT = 16


class Peers:
    """An Exchange, see exchange.py, of one rank whose GPU reaches the memory of all others."""

    always_waits = False

    def __init__(self, queries: Mailbox, results: Mailbox, sizes: ExchangeSizes) -> None:
        """
        Args:
            queries, results: for `sizes.query_values`, and for so many rows as merge_to_ranks.py says.
        """
        self._queries, self._results, self._sizes = queries, results, sizes

    @classmethod
    def of_group(cls, group: ProcessGroup, sizes: ExchangeSizes, device: torch.device | str) -> Peers:
        """Make one in symmetric memory; every rank of the group has to call it at once. Raises what torch does where
        ranks cannot reach each other's memory."""
        counts = sizes.query_values, _result_values(sizes)
        queries, results = (symmetric_mailbox(group, count, sizes.dtype, device) for count in counts)
        return cls(queries, results, sizes)

    @property
    def workspace_bytes(self) -> int:
        return self.workspace_bytes_for(self._sizes)

    @staticmethod
    def workspace_bytes_for(sizes: ExchangeSizes) -> int:
        return (sizes.query_values + _result_values(sizes)) * sizes.dtype.itemsize + 2 * 4 * sizes.ranks

    def queries(self, q_nope: Tensor, q_rope: Tensor, each: int, active: Tensor) -> Tensor:
        push_to_ranks(q_nope, q_rope, self._queries, each, active)
        return self._sizes.queries(self._queries.received, each).flatten(0, 1)

    def results(self, attention: SharedAttention, each: int, active: Tensor) -> None:
        assert isinstance(attention, TritonSharedAttention), "of a GPU"
        merge_to_ranks(*attention.partials, self._results, each, active)

    def received(self, each: int) -> tuple[Tensor, Tensor]:
        sizes = self._sizes
        return results_of(self._results.received, sizes.ranks, each, sizes.own_heads, sizes.dv)


def _result_values(sizes: ExchangeSizes) -> int:
    return result_values(sizes.max_rows * sizes.heads, sizes.dv, sizes.dtype)


def symmetric_mailbox(group: ProcessGroup, values: int, dtype: torch.dtype, device: torch.device | str) -> Mailbox:
    """Return a mailbox for so many values of each rank; every rank of the group has to ask for as many. Raises what
    torch does where ranks cannot reach each other's memory."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    size = -(-values * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    buffer = symmetric_memory.empty(size + 4 * group.size(), dtype=torch.uint8, device=device).zero_()
    handle: Any = symmetric_memory.rendezvous(buffer, group)
    addresses = torch.tensor(handle.buffer_ptrs, dtype=torch.int64, device=device)
    counts = buffer[size:].view(torch.int32)
    received = buffer[: values * dtype.itemsize].view(dtype)
    return Mailbox(received, addresses, counts, addresses + size, handle.rank)
