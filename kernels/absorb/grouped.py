"""Grouped absorb: requests that share a segment read its latent rows together, in the latent space.

Hopper's matrix unit takes 64 query rows at once, and what one request's heads leave of such a tile is padding. MLA has
one head of keys, so it does not matter whose query a row is: with 16 heads, four requests that have the same keys fill
a tile, and so do four query tokens of one request (speculative decoding). Heads that are no multiple of 8, the rows
that are copied at once, get more: 12 become 16, of which four are nobody's. Private tails and shared segments are
computed by work lists (schedule.py), whose items are cut so that all programs end together; one merge (merge.py) then
puts together what a request has in all of them, still in the latent space.

`HopperGroupedAbsorb`, here, reads BF16 latent pages; `HopperGroupedAbsorbFP8` (grouped_fp8.py) reads FP8 rows.
dispatch.py picks; where neither runs there is no grouped absorb.

What a captured graph reads is in static memory, and the graph fits every plan for its number of rows. Lengths of tails
are read on the device only: with overlap scheduling the host may not know them yet.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_mla_ext.segment import Mode, Segment

from ..memory import Memory, tensor_bytes
from ..merge import merge
from ..sizes import PAGE_TOKENS
from ..storage.join_parts import join_parts
from ..storage.page_table import fill_page_table
from ..watch import Watched
from . import sm90_bf16_absorb
from .schedule import AbsorbCapacity, build_segment_work, empty_tail_table, empty_work
from .stacking import TILE_ROWS, padded_heads
from .tail_schedule import schedule_tails

SPARE_SEGMENTS = 8
"""Segments for which there is room by default, beyond one for each tile that the rows of a batch fill."""


class GroupedAbsorb(ABC):
    """Attention of a batch to its private tails and to the segments that its rows share.

        grouped.plan(segments, requests, tail_tokens)                               # when either changes
        grouped.begin_step(req_to_token, req_pool_indices, seq_lens, tail_starts)   # every step
        for layer in range(layers):
            out, lse = grouped.run(q_absorbed, q_rope, cache, softmax_scale)

    `plan` and `begin_step` write to static memory on the current stream and do not synchronise. `run` is what a CUDA
    graph captures, after one call outside of it, which compiles; the graph follows later calls of the other two.

    The query tokens of a request are its rows, one after the other, and in all of its segments. It may be in several,
    whose partials are all merged. Of a tail, which has the step's tokens, the last row of a request sees all keys, the
    one before it one less, and so on.
    """

    _tail_capacity: AbsorbCapacity
    _tail_work: Tensor
    """The work list of the tails and its sizes, set by the subclass. Its partials lie where `_capacity` has them, so
    that those of segments and tails share tensors."""

    def __init__(
        self,
        *,
        heads: int,
        max_rows: int,
        max_tokens: int,
        query_tokens: int = 1,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        programs: int | None = None,
        max_segments: int | None = None,
        max_segment_rows: int | None = None,
        memory: Memory | None = None,
    ) -> None:
        """
        Args:
            heads: local query heads; stacking pays for those of `stacking.rows_per_tile`.
            max_rows: of a step: `query_tokens` for each request. What does not make up a request is not used.
            max_tokens: of a request.
            query_tokens: of each request.
            dtype: of queries and results.
            programs: of the kernels' grids, by default one for each multiprocessor.
            max_segments: of a plan, by default one for each tile that the rows fill, and `SPARE_SEGMENTS`.
            max_segment_rows: rows of all segments of a plan together, where a row counts once for each segment that it
                is in; `max_rows` by default, enough where segments are disjoint.
            memory: where page tables and partials are allocated.
        Raises:
            ValueError: heads need more programs.
        """
        self._heads, self._query_tokens, self._device = heads, query_tokens, torch.device(device)
        self._max_requests, self._padded = max_rows // query_tokens, padded_heads(heads)
        self._rank, self._columns, self._dtype = kv_lora_rank, kv_lora_rank + qk_rope_head_dim, dtype
        if programs is None:
            programs = torch.cuda.get_device_properties(device).multi_processor_count
        if max_segments is None:
            max_segments = -(-self._max_requests * query_tokens * self._padded // TILE_ROWS) + SPARE_SEGMENTS
        # Pages of the tails, and behind them those of the segments. Rows of a multiple of 16 bytes: Triton compiles
        # different code for other alignments.
        pages = -(-(max_tokens // PAGE_TOKENS + 1) // 4) * 4
        zeros = partial((memory or Memory()).zeros, device=device)
        self._table = zeros(self._max_requests + max_segments, pages, dtype=torch.int32)  # [B + N, pages]
        self._tail_lens = torch.zeros(self._max_requests, dtype=torch.int32, device=device)  # [B]
        self._leaders = torch.zeros(max_segments, dtype=torch.int64, device=device)  # [N], requests of the batch
        self._starts = torch.zeros(max_segments, dtype=torch.int32, device=device)  # [N], first tokens of the segments
        self._lens = torch.zeros(max_segments, dtype=torch.int32, device=device)  # [N], tokens of the segments

        # In a work list and in its partials, a row is a request with all of its query tokens.
        self._capacity = AbsorbCapacity(
            self._max_requests,
            self._padded * query_tokens,
            programs,
            query_tokens=query_tokens,
            segment_rows=max_segment_rows and -(-max_segment_rows // query_tokens),
        )
        # H' is H, padded.
        partials = (self._capacity.max_partial_rows, self._capacity.heads)
        self._partial_out = zeros(*partials, self._rank, dtype=dtype)  # [P, W * H', rank]
        self._partial_lse2 = zeros(*partials, dtype=torch.float32)  # [P, W * H']
        self._no_lse = torch.full((self._max_requests, self._capacity.heads), -torch.inf, device=device)  # [B, W * H']
        self._work = torch.from_numpy(empty_work(self._capacity)).to(device)
        self._tail_partials = empty_tail_table(self._capacity).to(device)
        self._segment_partials = build_segment_work((), (), self._capacity).table.to(device)
        self._requests, self._segments = 0, 0  # of the plan

    @property
    def workspace_bytes(self) -> int:
        """Device memory that this object allocated."""
        return tensor_bytes(self)

    def plan(self, segments: Sequence[Segment], requests: int, tail_tokens: int = 0) -> None:
        """Set which requests share which segments, for steps of so many.

        Args:
            segments: their rows are requests, each with all of its query tokens.
            tail_tokens: approximate number of tokens of all private tails; the more, the fewer pieces of segments.
        Raises:
            ValueError: a segment does not begin and end with a page, is empty, or has a request that is out of range or
                in it twice; or there are more requests or segments, or longer ones, than there is room for.
        """
        tokens = self._table.shape[1] * PAGE_TOKENS
        if requests > self._max_requests:
            raise ValueError(f"{requests} requests; there is room for {self._max_requests}")
        if len(segments) > len(self._leaders):
            raise ValueError(f"{len(segments)} segments; there is room for {len(self._leaders)}")
        for segment in segments:
            if segment.start % PAGE_TOKENS or segment.end % PAGE_TOKENS or segment.start < 0:
                raise ValueError(
                    f"a segment of tokens [{segment.start}, {segment.end}) does not begin and end with a page of "
                    f"{PAGE_TOKENS}"
                )
            if segment.tokens > tokens:
                raise ValueError(f"a segment has {segment.tokens} tokens; there is room for {tokens}")
            if any(request >= requests for request in segment.rows):
                raise ValueError(f"a segment has requests beyond the {requests} of the step")
        first_pages = [(self._max_requests + index) * self._table.stride(0) for index in range(len(segments))]
        tails_in_list = tail_tokens if self._tail_work is self._work else 0  # otherwise they have a launch of their own
        work = build_segment_work(segments, first_pages, self._capacity, tails_in_list)
        self._stage(self._work, work.head)
        self._stage(self._work[self._capacity.segment_strips :], work.strips)
        self._stage(self._segment_partials.buffer, work.table.buffer)
        self._stage(self._leaders, np.array([segment.rows[0] for segment in segments], np.int64))
        self._stage(self._starts, np.array([segment.start for segment in segments], np.int32))
        self._stage(self._lens, np.array([segment.tokens for segment in segments], np.int32))
        self._requests, self._segments = requests, len(segments)

    def begin_step(self, req_to_token: Tensor, pool_indices: Tensor, seq_lens: Tensor, tail_starts: Tensor) -> None:
        """Bring page tables, lengths and the schedule of the tails up to date for the next step.

        Args:
            req_to_token: `[requests, tokens]` int32, slots; whole pages of consecutive slots.
            pool_indices: `[requests]` integers, where each request is in `req_to_token`.
            seq_lens: `[requests]` integers, tokens of each request, with those of this step.
            tail_starts: `[requests]` int32, the tokens before each request's private tail, a multiple of the page size.
                What is behind the plan's requests is ignored, here and in the other two.
        """
        requests, segments = self._requests, self._segments
        pool_indices, tail_starts = pool_indices[:requests], tail_starts[:requests]
        tail_lens = self._tail_lens[:requests]
        torch.sub(seq_lens[:requests], tail_starts, out=tail_lens)
        fill_page_table(self._table[:requests], req_to_token, pool_indices, tail_lens, tail_starts)
        if segments:
            leaders = pool_indices.index_select(0, self._leaders[:segments])
            table = self._table[self._max_requests :][:segments]
            fill_page_table(table, req_to_token, leaders, self._lens[:segments], self._starts[:segments])
        schedule_tails(tail_lens, self._tail_work, self._tail_partials, self._tail_capacity, self._table)

    def run(
        self, q_absorbed: Tensor, q_rope: Tensor, cache: Tensor, softmax_scale: float, watched: Watched | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            q_absorbed: `[rows, heads, kv_lora_rank]`, `q_nope` times `w_kc`; q_rope: `[rows, heads, qk_rope_head_dim]`;
                rows as planned, last axis contiguous, any other strides.
            cache: of a layer; see the subclass.
            watched: what to copy, see watch.py.
        Returns:
            `out [rows, heads, kv_lora_rank]`, valid until the next run, and `lse [rows, heads]` float32, natural log,
            over tail and segments; 0 and -inf for a row without keys.
        Raises:
            ValueError: not the rows or heads of the plan; or as the kernels say.
        """
        rows, heads = q_absorbed.shape[:2]
        requests = self._requests
        if rows != requests * self._query_tokens or heads != self._heads:
            raise ValueError(
                f"planned for {requests * self._query_tokens} rows of {self._heads} heads, run with {rows} of {heads}"
            )
        out, lse = self._capacity.uncut_rows(self._partial_out, requests), torch.empty_like(self._no_lse[:requests])
        if rows:  # TMA has no descriptor of a tensor without rows
            self._attend(*self._in_strips(q_absorbed, q_rope), cache, softmax_scale)
            merge(
                out,
                self._no_lse[:requests],
                self._partial_out,
                self._partial_lse2,
                self._tail_partials,
                out,
                lse,
                more=self._segment_partials,
                out_in_partials=True,
                watched=watched and replace(watched, merged_heads=self._padded),
            )
        out, lse = out.view(rows, self._padded, self._rank), lse.view(rows, self._padded)
        return out[:, :heads], lse[:, :heads]

    def _in_strips(self, q_absorbed: Tensor, q_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Queries with so many heads that strips hold no others: the same, or parts of a padded copy."""
        if self._padded == self._heads:
            return q_absorbed, q_rope
        whole = q_absorbed.new_empty(len(q_absorbed), self._padded, self._columns)
        join_parts(q_absorbed, q_rope, whole)
        padded, rope = whole.split([self._rank, self._columns - self._rank], dim=-1)
        return padded, rope

    def try_out(self, req_to_token: Tensor, cache: Tensor) -> None:
        """Run every kernel once, for one request with a page of its own and a segment of one page, so that all are
        compiled and have shown that they run here. What they compute is not used.

        Args:
            req_to_token: as for `begin_step`; cache: as for `run`, of any layer.
        """
        page = torch.full((1,), PAGE_TOKENS, dtype=torch.int32, device=self._device)
        rows = self._query_tokens
        self.plan([Segment((0,), 0, PAGE_TOKENS, Mode.GROUPED_ABSORB)], 1)
        self.begin_step(req_to_token, page.long() - PAGE_TOKENS, page + 1, page)
        query = torch.zeros(rows, self._heads, self._columns, dtype=self._dtype, device=self._device)
        self.run(query[..., : self._rank], query[..., self._rank :], cache, 1.0)

    @abstractmethod
    def _attend(self, q_absorbed: Tensor, q_rope: Tensor, cache: Tensor, softmax_scale: float) -> None:
        """Write the partials of tails and segments, of at least one row."""

    def _stage(self, target: Tensor, values: np.ndarray) -> None:
        """Copy `values` to the front of `target` without waiting."""
        if not len(values):
            return
        host = torch.from_numpy(values)
        if self._device.type == "cuda":
            host = host.pin_memory()  # torch keeps it until the copy is done
        target[: len(values)].copy_(host, non_blocking=True)


class HopperGroupedAbsorb(GroupedAbsorb):
    """Over BF16 latent pages `[pages, 64, 1, kv_lora_rank + qk_rope_head_dim]`: tails and segments in one launch."""

    def __init__(self, **sizes: Any) -> None:
        """Args: as of `GroupedAbsorb`."""
        super().__init__(**sizes)
        self._tail_capacity, self._tail_work = self._capacity, self._work

    def _attend(self, q_absorbed: Tensor, q_rope: Tensor, cache: Tensor, softmax_scale: float) -> None:
        sm90_bf16_absorb.run(
            q_absorbed,
            q_rope,
            cache,
            self._work,
            self._table,
            self._capacity,
            self._partial_out,
            self._partial_lse2,
            softmax_scale=softmax_scale,
        )
