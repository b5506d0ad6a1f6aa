"""Attention of a batch over its shared, expanded prefixes: plan once per batch, run once per layer.

    attention.plan(groups)                                     # when the members of the batch change
    for layer in range(layers):
        attention.run(layer, q_nope, q_rope, softmax_scale)    # shared prefixes, naive
        tail_out, tail_lse = ...                               # private tails, elsewhere
        attention.merge(tail_out, tail_lse, out)               # out = attention over prefix and tail

A decode step has one row for each request and one plan, which captured graphs follow. Prefill has a row for each new
token and plans of its own, made by `prepare` and given to `run` and `merge`.

Two classes with this one interface: torch on any device, and Triton, on Hopper with the kernels written for it.
`dispatch.make_prefix_attention` picks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .. import merge as merge_kernel
from ..reference import attention as reference
from ..storage.expanded import CHUNK_TOKENS, ExpandedBuffers
from . import sm90_naive as naive_prefix_hopper
from . import triton_naive as naive_prefix
from .schedule import PrefixGroup, WorkList, WorkListCapacity, build_work_list


class PrefixAttention(Protocol):
    """The interface. Rows are rows of the batch, at most `max_rows`; T rows of a call may be fewer, but must include
    every row of the plan. Errors of shape or plan are ValueErrors."""

    @property
    def workspace_bytes(self) -> int:
        """Device memory that this object allocated, beside the expanded buffers."""
        ...

    def plan(self, groups: Sequence[PrefixGroup], rows: int | None = None) -> None:
        """Set which rows share which prefix, for all following runs. An empty list means no shared work. A plan that
        raises ValueError leaves the one before it in place.

        Args:
            rows: T of the runs to come, which picks the kernel's tile; `max_rows` by default.
        """
        ...

    def prepare(self, groups: Sequence[PrefixGroup], rows: int) -> Any:
        """A plan beside the one that `plan` sets, for `run` and `merge` of batches with this many rows. Same errors.
        May allocate device memory, which the plan holds."""
        ...

    def run(self, layer: int, q_nope: Tensor, q_rope: Tensor, softmax_scale: float, plan: Any = None) -> None:
        """Attend to the shared prefixes of the plan and keep the result for `merge`, which must come before the next.

        Args:
            q_nope: `[T, H, dn]`; q_rope: `[T, H, dr]`, after rotation; any row and head strides, last axis contiguous.
            plan: from `prepare`; the one that `plan` set by default.
        """
        ...

    def merge(
        self, tail_out: Tensor, tail_lse: Tensor, out: Tensor, lse: Tensor | None = None, plan: Any = None
    ) -> Tensor:
        """Combine the result of the last run with the private tails.

        Args:
            tail_out: `[T, H, dv]`; tail_lse: `[T, H]` float32, natural log; -inf or +inf where a tail is empty, and
                tail_out is then not used.
            out: `[T, H, dv]`, written; may be tail_out itself.
            lse: `[T, H]` float32, natural log, written if given; may be tail_lse itself.
            plan: the one of the last run.
        Returns:
            `out`. Rows without a shared prefix are the tail's; rows with no key at all are 0 and -inf.
        """
        ...


class ReferencePrefixAttention:
    """Plain torch, float32 accumulation, on any device. Not for CUDA graphs: the groups are read on the host."""

    def __init__(self, buffers: ExpandedBuffers, *, max_rows: int, heads: int) -> None:
        _check_heads(buffers, heads)
        self._buffers = buffers
        self._max_rows = max_rows
        self._groups: list[PrefixGroup] = []
        shape = (max_rows, heads, buffers.v_head_dim)
        self._shared_out = torch.zeros(shape, dtype=torch.float32, device=buffers.device)  # [max_rows, H, dv]
        self._shared_lse = torch.full(shape[:2], -torch.inf, dtype=torch.float32, device=buffers.device)

    @property
    def workspace_bytes(self) -> int:
        return _bytes(self._shared_out, self._shared_lse)

    @staticmethod
    def workspace_bytes_for(*, max_rows: int, heads: int, v_head_dim: int) -> int:
        """`workspace_bytes` of an object with these sizes, before it exists."""
        return 4 * max_rows * heads * (v_head_dim + 1)

    def plan(self, groups: Sequence[PrefixGroup], rows: int | None = None) -> None:
        self._groups = self.prepare(groups, rows or self._max_rows)

    def prepare(self, groups: Sequence[PrefixGroup], rows: int) -> list[PrefixGroup]:
        capacity = WorkListCapacity.compute(
            max_rows=self._max_rows, heads=1, chunks=self._buffers.chunks, block_rows=1, target_items=1
        )
        _check_chunks(groups, self._buffers.chunks)
        build_work_list(groups, heads=1, block_rows=1, block_keys=CHUNK_TOKENS, capacity=capacity, target_items=1)
        return list(groups)

    def run(
        self,
        layer: int,
        q_nope: Tensor,
        q_rope: Tensor,
        softmax_scale: float,
        plan: list[PrefixGroup] | None = None,
    ) -> None:
        self._shared_lse.fill_(-torch.inf)
        for group in self._groups if plan is None else plan:
            rows = torch.tensor(group.rows, device=q_nope.device)
            k_nope, v, k_rope = self._buffers.read(layer, group.chunks, group.prefix_len)
            out, lse = reference.naive(q_nope[rows], q_rope[rows], k_nope, k_rope, v, softmax_scale)
            self._shared_out[rows] = out.to(torch.float32)
            self._shared_lse[rows] = lse.to(torch.float32)

    def merge(
        self, tail_out: Tensor, tail_lse: Tensor, out: Tensor, lse: Tensor | None = None, plan: Any = None
    ) -> Tensor:
        rows = tail_out.shape[0]
        tail_lse = tail_lse.masked_fill(tail_lse == torch.inf, -torch.inf)
        merged, merged_lse = reference.merge(self._shared_out[:rows], self._shared_lse[:rows], tail_out, tail_lse)
        out.copy_(merged)
        if lse is not None:
            lse.copy_(merged_lse)
        return out


@dataclass(frozen=True)
class DevicePlan:
    """A work list on the device, and the tile that it was made for."""

    tile: naive_prefix.Tile
    work: Tensor  # int32, see schedule.WorkList


class TritonPrefixAttention:
    """The Triton kernels over a work list in static device memory. `run` and `merge` allocate nothing and do not
    synchronise: they can be captured in a CUDA graph (after one call outside of it, which compiles them), and the graph
    follows later plans. `plan` copies on the current stream and cannot be captured.

    On CPU tensors under TRITON_INTERPRET=1 it works too, with an explicit `num_ctas`.
    """

    def __init__(
        self,
        buffers: ExpandedBuffers,
        *,
        max_rows: int,
        heads: int,
        num_ctas: int | None = None,
        tile: naive_prefix.Tile | None = None,
        hopper_tiles: Sequence[naive_prefix.Tile] = (),
        portable: bool = False,
    ) -> None:
        """Args:
        num_ctas: programs of the persistent grid; by default as many as the GPU runs at once.
        tile: block sizes, for any number of rows.
        hopper_tiles: smallest first, where the kernel for Hopper runs; by default those that are best on an H200.
        portable: use the kernel for any GPU also where there is one for this GPU.
        """
        _check_heads(buffers, heads)
        device = buffers.device
        for_hopper = naive_prefix_hopper.supports(buffers) and not portable
        self._kernel = naive_prefix_hopper if for_hopper else naive_prefix
        self._tiles = (tile,) if tile else self._kernel.tiles_of(buffers.dtype)
        if hopper_tiles and for_hopper:
            self._tiles = tuple(hopper_tiles)
        self._num_ctas = {tile: num_ctas or naive_prefix.resident_ctas(device, tile) for tile in self._tiles}
        self._buffers, self._heads, self._max_rows = buffers, heads, max_rows
        self._capacity = self._compute_capacity(max_rows, heads, buffers.chunks, self._num_ctas)
        self._layers = {
            tile: [self._kernel.LayerKeys.of(buffers, layer, tile) for layer in range(buffers.layers)]
            for tile in self._tiles
        }

        partials = (self._capacity.max_partial_rows, heads, buffers.v_head_dim)
        self._partial_out = torch.empty(partials, dtype=torch.float32, device=device)  # [P, H, dv]
        self._partial_lse2 = torch.empty(partials[:2], dtype=torch.float32, device=device)  # [P, H]
        self._work = torch.zeros(self._capacity.size, dtype=torch.int32, device=device)
        self._planned = DevicePlan(naive_prefix.tile_for(max_rows, self._tiles), self._work)
        self._has_work = False

        self._cuda = device.type == "cuda"
        self._staging = [torch.zeros(self._capacity.size, dtype=torch.int32, pin_memory=self._cuda) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]  # when the copy out of a staging buffer was done
        self._next_staging = 0

    @property
    def workspace_bytes(self) -> int:
        return _bytes(self._partial_out, self._partial_lse2, self._work)

    @classmethod
    def workspace_bytes_for(cls, *, max_rows: int, heads: int, v_head_dim: int, chunks: int, sm_count: int) -> int:
        """The most that `workspace_bytes` of an object with these sizes and the default tiles is, before it exists."""
        num_ctas = {tile: tile.ctas_per_sm * sm_count for tile in naive_prefix.TILES}
        capacity = cls._compute_capacity(max_rows, heads, chunks, num_ctas)
        return 4 * (capacity.max_partial_rows * heads * (v_head_dim + 1) + capacity.size)

    def plan(self, groups: Sequence[PrefixGroup], rows: int | None = None) -> None:
        tile = naive_prefix.tile_for(rows or self._max_rows, self._tiles)
        if groups or self._has_work:  # else the device's list is empty already
            staging = self._staging[self._next_staging]
            if (copied := self._copied[self._next_staging]) is not None:
                copied.synchronize()  # the copy of the plan before the last one: done long ago
            used = self._build(groups, tile, staging.numpy()).used
            self._work[:used].copy_(staging[:used], non_blocking=True)
            if self._cuda:
                self._copied[self._next_staging] = torch.cuda.current_stream(self._work.device).record_event(copied)
            self._next_staging ^= 1
        self._planned, self._has_work = DevicePlan(tile, self._work), bool(groups)

    def prepare(self, groups: Sequence[PrefixGroup], rows: int) -> DevicePlan:
        tile = naive_prefix.tile_for(rows, self._tiles)
        work = self._build(groups, tile)
        host = torch.from_numpy(work.buffer[: work.used])
        if self._cuda:
            host = host.pin_memory()
        return DevicePlan(tile, host.to(self._work.device, non_blocking=True))

    def run(
        self, layer: int, q_nope: Tensor, q_rope: Tensor, softmax_scale: float, plan: DevicePlan | None = None
    ) -> None:
        plan = plan or self._planned
        tile = plan.tile
        if tile is not naive_prefix.tile_for(q_nope.shape[0], self._tiles):
            raise ValueError(f"planned for tiles of {tile.block_rows} rows, run with {q_nope.shape[0]} rows")
        self._kernel.run(
            q_nope,
            q_rope,
            self._layers[tile][layer],
            plan.work,
            self._capacity,
            self._partial_out,
            self._partial_lse2,
            softmax_scale=softmax_scale,
            num_ctas=self._num_ctas[tile],
            tile=tile,
        )

    def merge(
        self,
        tail_out: Tensor,
        tail_lse: Tensor,
        out: Tensor,
        lse: Tensor | None = None,
        plan: DevicePlan | None = None,
    ) -> Tensor:
        table = self._capacity.table_of((plan or self._planned).work)
        return merge_kernel.merge(tail_out, tail_lse, self._partial_out, self._partial_lse2, table, out, lse)

    def _build(self, groups: Sequence[PrefixGroup], tile: naive_prefix.Tile, out: np.ndarray | None = None) -> WorkList:
        _check_chunks(groups, self._buffers.chunks)
        return build_work_list(
            groups,
            heads=self._heads,
            block_rows=tile.block_rows,
            block_keys=tile.block_keys,
            capacity=self._capacity,
            target_items=self._num_ctas[tile],
            out=out,
        )

    @staticmethod
    def _compute_capacity(
        max_rows: int, heads: int, chunks: int, num_ctas: dict[naive_prefix.Tile, int]
    ) -> WorkListCapacity:
        largest = max(num_ctas, key=lambda tile: tile.block_rows * num_ctas[tile])
        return WorkListCapacity.compute(
            max_rows=max_rows,
            heads=heads,
            chunks=chunks,
            block_rows=largest.block_rows,
            target_items=num_ctas[largest],
        )


def _check_heads(buffers: ExpandedBuffers, heads: int) -> None:
    if heads != buffers.heads:
        raise ValueError(f"the expanded prefixes have {buffers.heads} heads, the queries {heads}")


def _check_chunks(groups: Sequence[PrefixGroup], chunks: int) -> None:
    for index, group in enumerate(groups):
        if group.chunks and (min(group.chunks) < 0 or max(group.chunks) >= chunks):
            raise ValueError(f"group {index}: chunk ids must be in [0, {chunks})")


def _bytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)
