"""The kernels behind `SharedAttention`: a plan is a work list in static device memory, which captured graphs follow.

A step launches the kernel once for each tile size that its number of rows may need; all but the one that the list was
made for find nothing to do. Partial results stand in one tensor, and the merge finds those of a row in the list's
table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sglang_mla_ext.segment import Segment

from ..memory import Memory, tensor_bytes
from ..merge import merge
from ..partials import PartialTable
from ..storage.expanded import ExpandedBuffers
from ..watch import Watched
from . import triton_naive
from .attention import check_chunks, check_heads, try_sizes
from .schedule import WorkList, WorkListCapacity, build_work_list
from .tiles import LARGEST_TILE, Tile, best_tile, launched_tiles


class NaiveKernel(Protocol):
    """A module with a kernel over a work list: triton_naive, sm90_naive."""

    LayerKeys: Any

    def tiles_of(self, buffers: ExpandedBuffers) -> tuple[Tile, ...]: ...

    def run(self, q_nope: Tensor, q_rope: Tensor, keys: Any, work: Tensor, *args: Any, **options: Any) -> None: ...


@dataclass(frozen=True)
class DevicePlan:
    """A work list on the device, and the tiles to launch: that which it was made for, and others that may be captured
    beside it."""

    tiles: tuple[Tile, ...]
    work: Tensor  # int32, see schedule.WorkList
    capacity: WorkListCapacity  # of it

    @cached_property
    def table(self) -> PartialTable:
        """The table of partials in it."""
        return self.capacity.table_of(self.work)


class TritonSharedAttention:
    """The kernels over a work list in static device memory. `run` and `merge` allocate nothing and do not synchronise:
    they can be captured in a CUDA graph (after one call outside of it, which compiles them), and the graph follows
    later plans. `plan` copies on the current stream and cannot be captured.

    On CPU tensors under TRITON_INTERPRET=1 it works too, with an explicit `num_ctas`.
    """

    runs_beside_tails = False

    def __init__(
        self,
        buffers: ExpandedBuffers,
        *,
        max_rows: int,
        heads: int,
        kernel: NaiveKernel = triton_naive,
        tiles: Sequence[Tile] = (),
        num_ctas: int | None = None,
        plan_rows: int = 0,
        segments_per_row: int = 1,
        memory: Memory | None = None,
    ) -> None:
        """Args:
        kernel: the one to launch; it must take these buffers. dispatch.py knows which.
        tiles: block sizes, smallest first; by default those that are best for this kernel on an H200.
        num_ctas: programs of the persistent grid; by default as many as the GPU runs at once.
        plan_rows: rows of plans that `make_plan` makes, if that is more than `max_rows`; each is in one segment.
        segments_per_row: segments that a row is in on average, at most: each one more costs `max_rows` partials.
        memory: where partials and the work list are allocated; a work list of zeros is an empty one.
        """
        check_heads(buffers, heads)
        device = buffers.device
        self._kernel, self._tiles = kernel, tuple(tiles) or kernel.tiles_of(buffers)
        self._num_ctas = {tile: num_ctas or triton_naive.resident_ctas(device, tile) for tile in self._tiles}
        self._buffers, self._heads, self._max_rows = buffers, heads, max_rows
        sizes = heads, buffers.chunks, self._num_ctas
        self._capacity, self._plan_capacity = self._capacities(max_rows, plan_rows, segments_per_row, *sizes)
        self._layers = {
            tile: [kernel.LayerKeys.of(buffers, layer, tile) for layer in range(buffers.layers)] for tile in self._tiles
        }

        partials = (self._plan_capacity.max_partial_rows, heads, buffers.v_head_dim)
        zeros = partial((memory or Memory()).zeros, device=device)
        self._partial_out = zeros(*partials, dtype=torch.float32)  # [P, H, dv]
        self._partial_lse2 = zeros(*partials[:2], dtype=torch.float32)  # [P, H]
        self._work = zeros(self._capacity.size, dtype=torch.int32)
        self._launched = cache(partial(launched_tiles, tiles=self._tiles))  # asked for in every layer
        self._planned = DevicePlan(self._launched(max_rows), self._work, self._capacity)
        self._has_work = False

        self._cuda = device.type == "cuda"
        self._staging = [torch.zeros(self._capacity.size, dtype=torch.int32, pin_memory=self._cuda) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]  # when the copy out of a staging buffer was done
        self._next_staging = 0
        self._scratch: np.ndarray | None = None

    @property
    def workspace_bytes(self) -> int:
        return tensor_bytes(self._partial_out, self._partial_lse2, self._work)

    @classmethod
    def workspace_bytes_for(
        cls,
        *,
        max_rows: int,
        heads: int,
        v_head_dim: int,
        chunks: int,
        sm_count: int,
        plan_rows: int = 0,
        segments_per_row: int = 1,
        tiles: Sequence[Tile] = (),
    ) -> int:
        """The most that `workspace_bytes` of an object with these sizes is, before it exists, whether it gets these
        tiles or the default ones."""
        num_ctas = {tile: tile.ctas_per_sm * sm_count for tile in (*triton_naive.TILES, LARGEST_TILE, *tiles)}
        capacity, of_plans = cls._capacities(max_rows, plan_rows, segments_per_row, heads, chunks, num_ctas)
        return 4 * (of_plans.max_partial_rows * heads * (v_head_dim + 1) + capacity.size)

    @property
    def partials(self) -> tuple[Tensor, Tensor, PartialTable]:
        """Results of the last run, `[P, H, dv]` and lse2 `[P, H]` float32, and which of them each row has."""
        return self._partial_out, self._partial_lse2, self._planned.table

    def try_out(self, query_dtype: torch.dtype) -> None:
        sizes = {1, self._max_rows, self._plan_capacity.max_rows}
        sizes |= {min(tile.block_rows, self._max_rows) for tile in self._tiles}
        try_sizes(self, self._buffers, sizes, query_dtype, self._max_rows)

    def plan(self, segments: Sequence[Segment], rows: int | None = None) -> None:
        tiles = self._launched(rows or self._max_rows)
        if segments or self._has_work:  # else the device's list is empty already
            staging = self._staging[self._next_staging]
            if (copied := self._copied[self._next_staging]) is not None:
                copied.synchronize()  # the copy of the plan before the last one: done long ago
            used = self._build(segments, best_tile(segments, tiles), self._capacity, staging.numpy()).used
            self._work[:used].copy_(staging[:used], non_blocking=True)
            if self._cuda:
                self._copied[self._next_staging] = torch.cuda.current_stream(self._work.device).record_event(copied)
            self._next_staging ^= 1
        self._planned, self._has_work = replace(self._planned, tiles=tiles), bool(segments)

    def make_plan(self, segments: Sequence[Segment], rows: int) -> DevicePlan:
        tile = best_tile(segments, self._launched(rows))
        if self._scratch is None:  # made once: a list has room for the largest plan
            self._scratch = np.empty(self._plan_capacity.size, np.int32)
        work = self._build(segments, tile, self._plan_capacity, self._scratch)
        host = torch.from_numpy(work.buffer[: work.used])
        host = host.pin_memory() if self._cuda else host.clone()
        on_device = host.to(self._work.device, non_blocking=True)
        return DevicePlan((tile,), on_device, self._plan_capacity)

    def run(
        self, layer: int, q_nope: Tensor, q_rope: Tensor, softmax_scale: float, plan: DevicePlan | None = None
    ) -> None:
        plan = plan or self._planned
        launched = self._launched(q_nope.shape[0])
        if not all(tile in launched for tile in plan.tiles):
            planned = " and ".join(str(tile.block_rows) for tile in plan.tiles)
            raise ValueError(f"planned for tiles of {planned} rows, run with {q_nope.shape[0]} rows")
        for tile in plan.tiles:
            self._kernel.run(
                q_nope,
                q_rope,
                self._layers[tile][layer],
                plan.work,
                plan.capacity,
                self._partial_out,
                self._partial_lse2,
                softmax_scale=softmax_scale,
                num_ctas=self._num_ctas[tile],
                tile=tile,
                slot=self._tiles.index(tile),
            )

    def merge(
        self,
        tail_out: Tensor,
        tail_lse: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        plan: DevicePlan | None = None,
        watched: Watched | None = None,
    ) -> Tensor:
        table = (plan or self._planned).table
        return merge(tail_out, tail_lse, self._partial_out, self._partial_lse2, table, out, lse, watched=watched)

    def _build(self, segments: Sequence[Segment], tile: Tile, capacity: WorkListCapacity, out: np.ndarray) -> WorkList:
        check_chunks(segments, self._buffers.chunks)
        return build_work_list(
            segments,
            heads=self._heads,
            block_rows=tile.block_rows,
            block_keys=tile.block_keys,
            capacity=capacity,
            target_items=self._num_ctas[tile],
            slot=self._tiles.index(tile),
            out=out,
        )

    @staticmethod
    def _capacities(
        max_rows: int, plan_rows: int, segments_per_row: int, heads: int, chunks: int, num_ctas: dict[Tile, int]
    ) -> tuple[WorkListCapacity, WorkListCapacity]:
        """Return the capacity of the list that `plan` makes, and of those of `make_plan`, which use one tensor of
        partials."""
        largest = max(num_ctas, key=lambda tile: tile.block_rows * num_ctas[tile])
        of_both = dict(heads=heads, chunks=chunks, block_rows=largest.block_rows, target_items=num_ctas[largest])
        of_plan = WorkListCapacity.compute(max_rows=max_rows, segments_per_row=segments_per_row, **of_both)
        if plan_rows <= max_rows:
            return of_plan, of_plan
        wide = WorkListCapacity.compute(max_rows=plan_rows, **of_both)
        partial_rows = max(wide.max_partial_rows, of_plan.max_partial_rows)
        return of_plan, replace(wide, max_partial_rows=partial_rows, max_items=heads * partial_rows)
