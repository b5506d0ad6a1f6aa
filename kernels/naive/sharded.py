"""Attention to sharded prefixes, each rank with its part of the heads: as attention.py, for the rows of all ranks.
docs/design.md has a drawing.

Every rank gives and gets as many rows, so that splits are equal and a CUDA graph can hold the exchange: all ranks have
to be in `run` together, also one without any row of its own. On a GPU it all runs on a stream of its own, beside the
attention to tails, and `merge` waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_mla_ext.segment import Segment

from ..watch import Watched
from .attention import SharedAttention
from .exchange import Exchange, ExchangeSizes
from .merge_ranks import merge_ranks, merge_ranks_torch


class ShardedAttention:
    """A SharedAttention whose plans have rows of all ranks: row `i` of rank `r` is `r * rows + i`, of `rows` each."""

    runs_beside_tails = True

    def __init__(
        self, attention: SharedAttention, exchange: Exchange, sizes: ExchangeSizes, device: torch.device | str
    ) -> None:
        """
        Args:
            attention: to this rank's heads, for the rows of all ranks.
            exchange: of these sizes.
        """
        self._attention, self._exchange, self._sizes = attention, exchange, sizes
        self._rows = sizes.max_rows
        # Says whether the plan shares anything. All ranks have the same plan, so none waits for one that does not come.
        self._active = torch.zeros(1, dtype=torch.int32, device=device)
        on_gpu = torch.device(device).type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._merge = merge_ranks if on_gpu else merge_ranks_torch
        self._in_use: tuple[Tensor, ...] = ()  # what the stream reads

    @property
    def workspace_bytes(self) -> int:
        return self._attention.workspace_bytes + self._exchange.workspace_bytes

    def try_out(self, query_dtype: torch.dtype) -> None:
        """Run every kernel once but those of an exchange that always waits, in which the other ranks would have to take
        part."""
        self._attention.try_out(query_dtype)
        sizes = self._sizes
        for rows in sorted({1, sizes.max_rows}):
            of_row = dict(dtype=query_dtype, device=self._active.device)
            query = torch.zeros(rows, sizes.heads, sizes.nope + sizes.rope, **of_row)
            tail_out = torch.zeros(rows, sizes.heads, sizes.dv, **of_row)
            self.plan([], rows)
            if not self._exchange.always_waits:
                self.run(0, *query.split([sizes.nope, sizes.rope], dim=-1), 1.0)
            self.merge(tail_out, tail_out.new_zeros(rows, sizes.heads, dtype=torch.float32), tail_out)

    def plan(self, segments: Sequence[Segment], rows: int | None = None) -> None:
        """See SharedAttention; `rows` are those of each rank."""
        self._rows = rows or self._sizes.max_rows
        self._attention.plan(segments, self._sizes.ranks * self._rows)
        self._active.fill_(bool(segments))

    def make_plan(self, segments: Sequence[Segment], rows: int) -> Any:
        """Raise NotImplementedError: there are no plans but that of all ranks."""
        raise NotImplementedError("sharded prefixes are not used in prefill")

    def run(self, layer: int, q_nope: Tensor, q_rope: Tensor, softmax_scale: float, plan: None = None) -> None:
        """See SharedAttention; T rows may be fewer than those that were planned for each rank."""
        rows = q_nope.shape[0]
        if rows > self._rows:
            raise ValueError(f"planned for {self._rows} rows of each rank, run with {rows}")
        if self._stream is None:
            self._run(layer, q_nope, q_rope, softmax_scale)
            return
        self._in_use = q_nope, q_rope
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._run(layer, q_nope, q_rope, softmax_scale)

    def _run(self, layer: int, q_nope: Tensor, q_rope: Tensor, softmax_scale: float) -> None:
        query = self._exchange.queries(q_nope, q_rope, self._rows, self._active)
        sizes = self._sizes
        self._attention.run(layer, *query.split([sizes.nope, sizes.rope], dim=-1), softmax_scale)
        self._exchange.results(self._attention, self._rows, self._active)

    def merge(
        self,
        tail_out: Tensor,
        tail_lse: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        plan: None = None,
        watched: Watched | None = None,
    ) -> Tensor:
        """See SharedAttention; `out` has to be `tail_out`, and there is no `lse`."""
        if out is not tail_out or lse is not None:
            raise ValueError("what ranks give back is merged into the tails' outputs, without an lse")
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
            self._in_use = ()
        self._merge(tail_out, tail_lse, *self._exchange.received(self._rows), self._active, watched)
        return out
