"""Attention of a batch over its expanded segments: plan once per batch, run once per layer.

    attention.plan(segments)                                   # when the members of the batch change
    for layer in range(layers):
        attention.run(layer, q_nope, q_rope, softmax_scale)    # expanded segments, naive
        tail_out, tail_lse = ...                               # private tails, elsewhere
        attention.merge(tail_out, tail_lse, out)               # out = attention over segments and tail

A decode step has one row for each request and one plan, which captured graphs follow. Prefill has a row for each new
token and plans of its own, made by `make_plan` and given to `run` and `merge`.

Two classes with this one interface: torch on any device, here, and the kernels, in triton_attention.py.
`dispatch.make_shared_attention` picks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sglang_mla_ext.segment import Segment

from ..memory import Memory, tensor_bytes
from ..reference import attention as reference
from ..sizes import CHUNK_TOKENS
from ..storage.expanded import ExpandedBuffers
from ..watch import Watched
from .schedule import WorkListCapacity, build_work_list


class SharedAttention(Protocol):
    """The interface. Rows are rows of the batch, at most `max_rows`, or `plan_rows` with a plan of `make_plan`. T rows
    of a call may be fewer, but must include every row of the plan. Errors of shape or plan are ValueErrors.

    Attributes:
        runs_beside_tails: `run` is to be called before the attention to tails, beside which it runs then.
    """

    runs_beside_tails: bool

    @property
    def workspace_bytes(self) -> int:
        """Device memory that this object allocated, beside the expanded buffers."""
        ...

    def try_out(self, query_dtype: torch.dtype) -> None:
        """Run every kernel once, in each variant that serving can need: they compile now, and show that they run. Ends
        with an empty plan. Raises whatever a kernel raises."""
        ...

    def plan(self, segments: Sequence[Segment], rows: int | None = None) -> None:
        """Set which rows attend to which segments, for all following runs. An empty list means no shared work. A plan
        that raises ValueError leaves the one before it in place.

        Args:
            rows: T of the runs to come, which picks the kernel's tile; `max_rows` by default.
        """
        ...

    def make_plan(self, segments: Sequence[Segment], rows: int) -> Any:
        """A plan beside the one that `plan` sets, for `run` and `merge` of batches with this many rows. Same errors.
        May allocate device memory, which the plan holds."""
        ...

    def run(self, layer: int, q_nope: Tensor, q_rope: Tensor, softmax_scale: float, plan: Any = None) -> None:
        """Attend to the segments of the plan and keep the result for `merge`, which must come before the next run.

        Args:
            q_nope: `[T, H, dn]`; q_rope: `[T, H, dr]`, after rotation; any row and head strides, last axis contiguous.
            plan: from `make_plan`; the one that `plan` set by default.
        """
        ...

    def merge(
        self,
        tail_out: Tensor,
        tail_lse: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        plan: Any = None,
        watched: Watched | None = None,
    ) -> Tensor:
        """Combine the result of the last run with the private tails.

        Args:
            tail_out: `[T, H, dv]`; tail_lse: `[T, H]` float32, natural log; -inf or +inf where a tail is empty, and
                tail_out is then not used.
            out: `[T, H, dv]`, written; may be tail_out itself.
            lse: `[T, H]` float32, natural log, written if given; may be tail_lse itself.
            plan: the one of the last run.
            watched: what to copy, see watch.py.
        Returns:
            `out`. Rows in no segment are the tail's; rows with no key at all are 0 and -inf.
        """
        ...


class TorchSharedAttention:
    """Plain torch, float32 accumulation, on any device. Not for CUDA graphs: the segments are read on the host."""

    runs_beside_tails = False

    def __init__(
        self,
        buffers: ExpandedBuffers,
        *,
        max_rows: int,
        heads: int,
        plan_rows: int = 0,
        segments_per_row: int = 1,
        memory: Memory | None = None,
    ) -> None:
        """Args:
        plan_rows: rows of plans that `make_plan` makes, if that is more than `max_rows`.
        segments_per_row: segments that a row is in on average, at most.
        memory: where the results of shared parts are allocated.
        """
        check_heads(buffers, heads)
        self._buffers, self._max_rows, self._segments_per_row = buffers, max_rows, segments_per_row
        self._plan_rows = max(plan_rows, max_rows)
        self._segments: list[Segment] = []
        shape = (self._plan_rows, heads, buffers.v_head_dim)
        memory = memory or Memory()
        self._shared_out = memory.zeros(*shape, dtype=torch.float32, device=buffers.device)  # [rows, H, dv]
        self._shared_lse = torch.full(shape[:2], -torch.inf, dtype=torch.float32, device=buffers.device)

    @property
    def workspace_bytes(self) -> int:
        return tensor_bytes(self._shared_out, self._shared_lse)

    @staticmethod
    def workspace_bytes_for(*, max_rows: int, heads: int, v_head_dim: int, plan_rows: int = 0) -> int:
        """`workspace_bytes` of an object with these sizes, before it exists."""
        return 4 * max(max_rows, plan_rows) * heads * (v_head_dim + 1)

    def try_out(self, query_dtype: torch.dtype) -> None:
        try_sizes(self, self._buffers, {1}, query_dtype, self._max_rows)

    def plan(self, segments: Sequence[Segment], rows: int | None = None) -> None:
        self._segments = self._checked(segments, self._max_rows)

    def make_plan(self, segments: Sequence[Segment], rows: int) -> list[Segment]:
        return self._checked(segments, self._plan_rows)

    def _checked(self, segments: Sequence[Segment], max_rows: int) -> list[Segment]:
        sizes = dict(heads=1, block_rows=1, target_items=1)
        capacity = WorkListCapacity.compute(
            max_rows=max_rows, chunks=self._buffers.chunks, segments_per_row=self._segments_per_row, **sizes
        )
        check_chunks(segments, self._buffers.chunks)
        build_work_list(segments, block_keys=CHUNK_TOKENS, capacity=capacity, **sizes)
        return list(segments)

    def run(
        self,
        layer: int,
        q_nope: Tensor,
        q_rope: Tensor,
        softmax_scale: float,
        plan: list[Segment] | None = None,
    ) -> None:
        self._shared_lse.fill_(-torch.inf)
        begun: set[int] = set()  # rows that have a result of a segment before
        for segment in self._segments if plan is None else plan:
            rows = torch.tensor(segment.rows, device=q_nope.device)
            k_nope, v, k_rope = self._buffers.read(layer, segment.chunks, segment.tokens)
            out, lse = reference.naive(q_nope[rows], q_rope[rows], k_nope, k_rope, v, softmax_scale)
            out, lse = out.to(torch.float32), lse.to(torch.float32)
            if not begun.isdisjoint(segment.rows):
                out, lse = reference.merge(self._shared_out[rows], self._shared_lse[rows], out, lse)
            self._shared_out[rows], self._shared_lse[rows] = out, lse
            begun.update(segment.rows)

    def merge(
        self,
        tail_out: Tensor,
        tail_lse: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        plan: Any = None,
        watched: Watched | None = None,
    ) -> Tensor:
        rows = tail_out.shape[0]
        tail_lse = tail_lse.masked_fill(tail_lse == torch.inf, -torch.inf)
        merged, merged_lse = reference.merge(self._shared_out[:rows], self._shared_lse[:rows], tail_out, tail_lse)
        out.copy_(merged)
        if lse is not None:
            lse.copy_(merged_lse)
        if watched is not None:
            watched.copy(out)
        return out


def try_sizes(
    attention: SharedAttention, buffers: ExpandedBuffers, sizes: set[int], dtype: torch.dtype, max_rows: int
) -> None:
    """`run` and `merge`, without and with lse, for batches of these sizes under an empty plan; those of more than
    `max_rows` have a plan of their own."""
    for rows in sorted(sizes):
        q_nope, q_rope, out = (
            torch.zeros(rows, buffers.heads, dim, dtype=dtype, device=buffers.device)
            for dim in (buffers.qk_nope_head_dim, buffers.qk_rope_head_dim, buffers.v_head_dim)
        )
        plan = attention.make_plan([], rows) if rows > max_rows else attention.plan([], rows)
        attention.run(0, q_nope, q_rope, 1.0, plan)
        tail_lse = torch.zeros(rows, buffers.heads, device=buffers.device)
        attention.merge(out, tail_lse, out, plan=plan)  # as decode calls it
        attention.merge(out, tail_lse, out, tail_lse, plan=plan)  # as prefill does
    attention.plan([])


def check_heads(buffers: ExpandedBuffers, heads: int) -> None:
    """
    Raises:
        ValueError: the buffers have another number of heads than the queries.
    """
    if heads != buffers.heads:
        raise ValueError(f"the expanded prefixes have {buffers.heads} heads, the queries {heads}")


def check_chunks(segments: Sequence[Segment], chunks: int) -> None:
    """
    Raises:
        ValueError: a segment has a chunk that is none of so many.
    """
    for index, segment in enumerate(segments):
        if segment.chunks and (min(segment.chunks) < 0 or max(segment.chunks) >= chunks):
            raise ValueError(f"segment {index}: chunk ids must be in [0, {chunks})")
