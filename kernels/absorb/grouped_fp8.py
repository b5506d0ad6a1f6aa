"""Grouped absorb over the rows of the FP8 cache (storage/latent_rows.py), on Hopper.

As in grouped.py, but a step is two launches, because two kernels are each better than the other at their half. A
segment is read by many requests, which sm90_fp8_absorb.py stacks to tiles of 64 query rows. A tail is read by one
request and costs what it does without groups: up to 16 heads, those of all its query tokens, sm90_fp8_few_heads.py
takes without padding; for more it is the first kernel again, with tiles that one request may not fill.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import sm90_fp8_absorb
from .grouped import GroupedAbsorb
from .paged_fp8 import HopperKernel
from .schedule import AbsorbCapacity, empty_work


class HopperGroupedAbsorbFP8(GroupedAbsorb):
    """Over a pool uint8 `[slots, row_bytes]` in pages of 64 rows, with two work lists: segments in tiles of 64 query
    rows, and tails, each of the heads of one request. Their partials lie in the same tensors: one merge takes both.

    Queries are rounded by the kernels, which read BF16: one of another dtype, or whose layout TMA cannot read, is
    copied first (sm90_parts/query.for_tma).
    """

    def __init__(self, *, tail_kernel: HopperKernel, **sizes: Any) -> None:
        """
        Args:
            tail_kernel: from `dispatch.kernel_for`, for the same heads and queries.
            sizes: as of `GroupedAbsorb`; dtype BF16 or float32.
        """
        super().__init__(**sizes)
        self._tail_kernel = tail_kernel.module
        self._tail_capacity = AbsorbCapacity(
            self._max_requests,
            self._capacity.heads,
            self._capacity.programs,
            tail_kernel.tile_rows,
            query_tokens=self._query_tokens,
            segment_rows=0,
            segment_partials=self._capacity.max_segment_partials,
        )
        self._tail_work = torch.from_numpy(empty_work(self._tail_capacity)).to(self._device)

    def _attend(self, q_absorbed: Tensor, q_rope: Tensor, cache: Tensor, softmax_scale: float) -> None:
        query, partials = (q_absorbed, q_rope), (self._partial_out, self._partial_lse2)
        segments = self._work, self._table, self._capacity, *partials
        tails = self._tail_work, self._table, self._tail_capacity, *partials
        sm90_fp8_absorb.run(*query, cache, *segments, softmax_scale=softmax_scale, causal=False)
        self._tail_kernel.run(*query, cache, *tails, softmax_scale=softmax_scale)
