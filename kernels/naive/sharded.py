"""Attention to expanded prefixes that ranks hold together, each for its part of the heads: as attention.py, for the
rows of all ranks.

                    rank 0                         rank 1
    queries     [rows, heads]  ── all-to-all ──  [rows, heads]
                      │     by heads: [ranks, rows, heads / ranks]
    naive       rows of all ranks, first half of the heads      ... second half
                      │     back by rows: results and lse in one
    merge       with tails, all heads of the rank's own rows

Every rank gives and gets as many rows, so that splits are equal and a CUDA graph can hold the exchange: all ranks have
to be in `run` together, also one without any row of its own. On a GPU it all runs on a stream of its own, beside the
attention to tails, and `merge` waits for it. A row of results has its lse behind the values, in the first four of 16
more bytes or more, which keep rows aligned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_mla_ext.segment import Segment

from ..memory import Memory, tensor_bytes
from ..watch import Watched
from .attention import SharedAttention
from .merge_ranks import merge_ranks, merge_ranks_torch

Exchange = Callable[[Tensor, Tensor], None]
"""`exchange(received, sent)`, both `[n]` contiguous: of n / ranks values each, part r of `sent` goes to rank r, and
part r of `received` comes from it. Enqueued on the current stream."""

LSE_COLUMNS = 16
"""Values behind those of a result, of which the lse takes the first or the first two."""


class ShardedAttention:
    """A SharedAttention whose plans have rows of all ranks: row `i` of rank `r` is `r * rows + i`, of `rows` each."""

    runs_beside_tails = True

    def __init__(
        self,
        attention: SharedAttention,
        exchange: Exchange,
        *,
        ranks: int,
        heads: int,
        max_rows: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        memory: Memory | None = None,
        receiving: Callable[..., Tensor] | None = None,
    ) -> None:
        """
        Args:
            attention: to this rank's heads, `heads / ranks`, for `ranks * max_rows` rows.
            heads: of the queries.
            max_rows: of a rank.
            dtype: of queries and results.
            memory: where the buffers are allocated.
            receiving: allocates the buffers that `exchange` receives into, as `Memory.zeros`; None takes `memory`, too.
        """
        zeros = (memory or Memory()).zeros
        ways = {"sent": zeros, "received": receiving or zeros}
        self._attention, self._exchange = attention, exchange
        self._ranks, self._heads, self._own_heads, self._max_rows = ranks, heads, heads // ranks, max_rows
        self._nope, self._dv = qk_nope_head_dim, v_head_dim
        self._query, self._result = qk_nope_head_dim + qk_rope_head_dim, v_head_dim + LSE_COLUMNS
        for name, width in (("queries", self._query), ("results", self._result)):
            for way, allocate in ways.items():
                setattr(self, f"_{name}_{way}", allocate(max_rows * heads * width, dtype=dtype, device=device))
        self._no_tail = torch.full((ranks * max_rows, self._own_heads), -torch.inf, device=device)
        self._rows = max_rows
        on_gpu = torch.device(device).type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None
        self._merge = merge_ranks if on_gpu else merge_ranks_torch
        self._in_use: tuple[Tensor, ...] = ()  # what the stream reads

    @property
    def workspace_bytes(self) -> int:
        return self._attention.workspace_bytes + tensor_bytes(self)

    @staticmethod
    def workspace_bytes_for(
        *,
        heads: int,
        max_rows: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        dtype: torch.dtype,
    ) -> int:
        """What an object of these sizes allocates beside the attention that it is given."""
        widths = qk_nope_head_dim + qk_rope_head_dim + v_head_dim + LSE_COLUMNS
        return max_rows * heads * (2 * widths * dtype.itemsize + 4)

    def try_out(self, query_dtype: torch.dtype) -> None:
        """Run everything once but the exchange, in which the other ranks would have to take part."""
        self._attention.try_out(query_dtype)
        for rows in {1, self._max_rows}:
            tail_out = self._results_sent.new_zeros(rows, self._heads, self._dv)
            tail_lse = torch.zeros(rows, self._heads, device=tail_out.device)
            self._merge(tail_out, tail_lse, *self._parts(self._results(self._results_received, rows)))

    def plan(self, segments: Sequence[Segment], rows: int | None = None) -> None:
        """See SharedAttention; `rows` are those of each rank."""
        self._rows = rows or self._max_rows
        self._attention.plan(segments, self._ranks * self._rows)

    def make_plan(self, segments: Sequence[Segment], rows: int) -> Any:
        """There are no plans but that of all ranks."""
        raise NotImplementedError("ranks that hold prefixes together do not prefill with them")

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
        rows, each, by_rank = q_nope.shape[0], self._rows, (self._ranks, self._own_heads)
        size = each * self._heads * self._query
        sent, received = self._queries_sent[:size], self._queries_received[:size]
        queries = sent.view(self._ranks, each, self._own_heads, self._query)[:, :rows]
        queries[..., : self._nope] = q_nope.unflatten(1, by_rank).transpose(0, 1)
        queries[..., self._nope :] = q_rope.unflatten(1, by_rank).transpose(0, 1)
        self._exchange(received, sent)
        query = received.view(-1, self._own_heads, self._query)  # [ranks * each, ..]
        self._attention.run(layer, *query.split([self._nope, self._query - self._nope], dim=-1), softmax_scale)
        results = self._results(self._results_sent, each)
        out, lse = (part.flatten(0, 1) for part in self._parts(results))
        self._attention.merge(out, self._no_tail[: len(out)], out, lse)
        size = results.numel()
        self._exchange(self._results_received[:size], self._results_sent[:size])

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
        self._merge(tail_out, tail_lse, *self._parts(self._results(self._results_received, self._rows)), watched)
        return out

    def _results(self, buffer: Tensor, each: int) -> Tensor:
        """`[ranks, each, heads / ranks, dv + LSE_COLUMNS]` in a buffer."""
        return buffer[: each * self._heads * self._result].view(self._ranks, each, self._own_heads, self._result)

    def _parts(self, results: Tensor) -> tuple[Tensor, Tensor]:
        """Values `[.., dv]` and lse `[..]` float32 of results."""
        return results[..., : self._dv], results.view(torch.float32)[..., self._dv * results.itemsize // 4]
