"""Interface of the exchange of queries and results between ranks with sharded prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .attention import SharedAttention


@dataclass(frozen=True)
class ExchangeSizes:
    """Sizes of what ranks exchange.

    Attributes:
        ranks: R.
        heads: of the queries, H; each rank has H / R, in order.
        max_rows: of each rank.
        nope, rope: values of a query before absorption; dv: of a result.
        dtype: of queries and results.
    """

    ranks: int
    heads: int
    max_rows: int
    nope: int
    rope: int
    dv: int
    dtype: torch.dtype

    @property
    def own_heads(self) -> int:
        return self.heads // self.ranks

    @property
    def query_values(self) -> int:
        """Values of the queries that a rank sends or receives."""
        return self.max_rows * self.heads * (self.nope + self.rope)

    def queries(self, buffer: Tensor, each: int) -> Tensor:
        """Return `[R, each, H / R, nope + rope]`, the beginning of a buffer."""
        return self.by_rank(buffer, each, self.nope + self.rope)

    def by_rank(self, buffer: Tensor, each: int, width: int) -> Tensor:
        """Return `[R, each, H / R, width]`, the beginning of a buffer."""
        return buffer[: each * self.heads * width].view(self.ranks, each, self.own_heads, width)


class Exchange(Protocol):
    """The interface. In each layer all ranks call `queries` and then `results`, with the same `each`, also a rank
    without any row of its own.

    Attributes:
        always_waits: whether ranks wait for each other also where nothing is shared.
    """

    always_waits: bool

    @property
    def workspace_bytes(self) -> int:
        """Device memory that this object allocated."""
        ...

    def queries(self, q_nope: Tensor, q_rope: Tensor, each: int, active: Tensor) -> Tensor:
        """Send this rank's queries by heads.

        Args:
            q_nope: `[T, H, nope]`, q_rope: `[T, H, rope]`; any row and head strides, last axis contiguous.
            each: rows that are exchanged of each rank, T at least.
            active: `[1]` int32 on the device, the same on all ranks: 0 where the step shares nothing.
        Returns:
            `[R * each, H / R, nope + rope]`, those of all ranks; row i of rank r is `r * each + i`. Not defined behind
            a rank's T rows, and where nothing is shared.
        """
        ...

    def results(self, attention: SharedAttention, each: int, active: Tensor) -> None:
        """Give each rank the results of the last run for its rows.

        Args:
            attention: has run with the queries.
        """
        ...

    def received(self, each: int) -> tuple[Tensor, Tensor]:
        """Return what all ranks gave back: values `[R, each, H / R, dv]`, and lse `[R, each, H / R]`, float32, -inf
        where a row has no key, and the values are not defined then."""
        ...
