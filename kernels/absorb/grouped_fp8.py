"""Grouped absorb over the rows of the FP8 cache (kernels/latent_rows.py), on Hopper.

As in grouped_absorb.py, but a step is two launches, because there are two kernels, each better than the other at its
half. A prefix is read by many requests, which kernels/absorb_fp8_hopper.py stacks to tiles of 64 query rows. A tail is
read by one request and costs what it does without groups: up to 16 heads kernels/absorb_fp8_few_heads.py takes without
padding; with 32 it is the first kernel again, with half a tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_mla_ext.adapter.limits import PAGE_SIZE
from sglang_mla_ext.prefix.planner import Stacking

from ..storage.latent_rows import LatentRowLayout
from . import sm90_fp8_absorb as absorb_fp8_hopper
from .fp8 import kernel_for
from .grouped import TILE_ROWS, HopperGroupedAbsorb
from .schedule import AbsorbCapacity
from .tail_schedule import schedule_tails


class HopperGroupedAbsorbFP8(HopperGroupedAbsorb):
    """Two work lists: the groups' items from the host, in tiles of 64 rows; the tails' from the device, each of the
    heads of one request. Their partials lie in the same tensors, where HopperGroupedAbsorb has them, so that one merge
    puts together all of a row.
    """

    def __init__(self, stacking: Stacking, **sizes: Any) -> None:
        """Args: as of `HopperGroupedAbsorb`; dtype is of queries and results, BF16 or float32."""
        super().__init__(stacking, **sizes)
        rows, heads, device = self._max_rows, self._heads, self._device
        behind = self._capacity.max_group_partials
        self._tail_kernel, tile_rows = kernel_for(heads)
        self._tail_capacity = AbsorbCapacity(rows, heads, self._capacity.programs, tile_rows, group_partials=behind)
        self._tail_work = torch.from_numpy(self._tail_capacity.empty_work()).to(device)

    def prepare(self, req_to_token: Tensor, pool_indices: Tensor, seq_lens: Tensor, prefix_lens: Tensor) -> None:
        self._fill_tables(req_to_token, pool_indices, seq_lens, prefix_lens, self._first_group, self._groups)
        lens = self._lens[: self._rows]
        schedule_tails(lens, self._tail_work, self._tail_partials, self._tail_capacity, self._table)

    def run(self, q: Tensor, pool: Tensor, softmax_scale: float, q_rope: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """
        Args:
            q: as of `GroupedAbsorb`, or its content `[rows, heads, kv_lora_rank]` where `q_rope [rows, heads,
                qk_rope_head_dim]` is given; any strides, but not all are read without a copy
                (kernels/absorb_fp8_query_hopper.for_tma).
            pool: uint8 `[slots, row_bytes]` of a layer, pages of PAGE_SIZE rows, in place of latent pages; the rest as
                of `GroupedAbsorb`.
        """
        self._check_planned(q)
        rows, heads = q.shape[:2]
        if not rows:  # TMA knows no tensor without rows
            return q.new_empty(rows, heads, self._rank), self._no_lse.new_empty(rows, heads)
        query = q.split([self._rank, self._columns - self._rank], dim=-1) if q_rope is None else (q, q_rope)
        partials = self._partial_out, self._partial_lse2
        groups = self._work, self._table, self._capacity, *partials
        tails = self._tail_work, self._table, self._tail_capacity, *partials
        absorb_fp8_hopper.run(*query, pool, *groups, softmax_scale=softmax_scale)
        self._tail_kernel.run(*query, pool, *tails, softmax_scale=softmax_scale)
        return self._merge(q)


def make_grouped_absorb_fp8(
    req_to_token: Tensor,
    pool: Tensor,
    stacking: Stacking,
    *,
    layout: LatentRowLayout,
    dtype: torch.dtype,
    **sizes: Any,
) -> HopperGroupedAbsorbFP8 | None:
    """None where the kernels do not take such a cache. All of them run once: they compile, and show that they can.

    Args:
        req_to_token: as for `prepare`; pool: as for `run`, of any layer, its rows as `layout` has them.
        dtype: of queries and results.
        sizes: `max_rows` and `max_tokens` of GroupedAbsorb.
    """
    device, heads = pool.device, TILE_ROWS // stacking.rows_per_entry
    if not absorb_fp8_hopper.supports(device, layout, heads, PAGE_SIZE):
        return None
    dims = dict(kv_lora_rank=layout.kv_lora_rank, qk_rope_head_dim=layout.qk_rope_head_dim)
    grouped = HopperGroupedAbsorbFP8(stacking, dtype=dtype, device=device, **dims, **sizes)
    grouped.try_out(req_to_token, pool)
    return grouped
