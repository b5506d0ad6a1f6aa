"""Exchange between ranks by all-to-all collectives: NCCL's on GPUs, Gloo's without one.

Queries are copied by heads and results by rows. A CUDA graph that holds it sends and receives whether or not a step
shares anything, because a collective cannot be left out of a replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..memory import Memory, tensor_bytes
from .attention import SharedAttention
from .exchange import ExchangeSizes

LSE_COLUMNS = 16
"""Values behind those of a result, of which the lse takes the first or the first two; the others keep rows aligned."""
AllToAll = Callable[[Tensor, Tensor], None]
"""`all_to_all(received, sent)`, both `[n]` contiguous: of n / R values each, part r of `sent` goes to rank r, and part
r of `received` comes from it. Enqueued on the current stream."""


class Collectives:
    """An Exchange, see exchange.py."""

    always_waits = True

    def __init__(
        self,
        all_to_all: AllToAll,
        sizes: ExchangeSizes,
        device: torch.device | str,
        memory: Memory | None = None,
    ) -> None:
        """
        Args:
            memory: where the buffers are allocated.
        """
        zeros = (memory or Memory()).zeros
        self._all_to_all, self._sizes = all_to_all, sizes
        of_buffer: dict[str, Any] = dict(dtype=sizes.dtype, device=device)
        self._queries_sent, self._queries_received = (zeros(sizes.query_values, **of_buffer) for _ in range(2))
        self._results_sent, self._results_received = (zeros(_result_values(sizes), **of_buffer) for _ in range(2))
        self._no_tail = torch.full((sizes.ranks * sizes.max_rows, sizes.own_heads), -torch.inf, device=device)

    @property
    def workspace_bytes(self) -> int:
        return tensor_bytes(self)

    @staticmethod
    def workspace_bytes_for(sizes: ExchangeSizes) -> int:
        values = sizes.query_values + _result_values(sizes)
        return 2 * values * sizes.dtype.itemsize + 4 * sizes.max_rows * sizes.heads

    def queries(self, q_nope: Tensor, q_rope: Tensor, each: int, active: Tensor) -> Tensor:
        sizes, rows, by_rank = self._sizes, len(q_nope), (self._sizes.ranks, self._sizes.own_heads)
        sent, received = sizes.queries(self._queries_sent, each), sizes.queries(self._queries_received, each)
        sent[:, :rows, :, : sizes.nope] = q_nope.unflatten(1, by_rank).transpose(0, 1)
        sent[:, :rows, :, sizes.nope :] = q_rope.unflatten(1, by_rank).transpose(0, 1)
        self._all_to_all(received.view(-1), sent.view(-1))
        return received.flatten(0, 1)

    def results(self, attention: SharedAttention, each: int, active: Tensor) -> None:
        sent, received = (self._results(buffer, each) for buffer in (self._results_sent, self._results_received))
        out, lse = (part.flatten(0, 1) for part in self._parts(sent))
        attention.merge(out, self._no_tail[: len(out)], out, lse)
        self._all_to_all(received.view(-1), sent.view(-1))

    def received(self, each: int) -> tuple[Tensor, Tensor]:
        return self._parts(self._results(self._results_received, each))

    def _results(self, buffer: Tensor, each: int) -> Tensor:
        """Return `[R, each, H / R, dv + LSE_COLUMNS]`, the beginning of a buffer."""
        return self._sizes.by_rank(buffer, each, self._sizes.dv + LSE_COLUMNS)

    def _parts(self, results: Tensor) -> tuple[Tensor, Tensor]:
        """Return values `[.., dv]` and lse `[..]`, float32, of results."""
        dv = self._sizes.dv
        return results[..., :dv], results.view(torch.float32)[..., dv * self._sizes.dtype.itemsize // 4]


def _result_values(sizes: ExchangeSizes) -> int:
    return sizes.max_rows * sizes.heads * (sizes.dv + LSE_COLUMNS)
