"""Attention in the latent space over the FP8 pool (pool.py), by our own kernels alone: FlashMLA does not know
rows with a scale for each token.

Private tails go through kernels/absorb/paged_fp8.py, whose schedule is made once a step. Where heads are few, steps
that share go through grouped absorb over FP8 rows (kernels/absorb/grouped_fp8.py), which takes tails along.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_mla_ext.adapter.latent.protocol import LatentSizes, Tails, TailStarts
from sglang_mla_ext.kernels.absorb.grouped import GroupedAbsorb
from sglang_mla_ext.kernels.absorb.paged_fp8 import AbsorbFP8
from sglang_mla_ext.kernels.dispatch import absorb_fp8_bytes, make_absorb_fp8, make_grouped_absorb_fp8
from sglang_mla_ext.kernels.memory import Memory
from sglang_mla_ext.kernels.sizes import PAGE_TOKENS
from sglang_mla_ext.kernels.storage.latent_rows import LatentRowLayout
from sglang_mla_ext.kernels.watch import Watched
from sglang_mla_ext.reasons import Fallback
from sglang_mla_ext.segment import Segment

if TYPE_CHECKING:
    from sglang_mla_ext.adapter.latent.pool import LatentPool, RowsBesideLinear


class FP8Latent:
    """See the module; the interface is protocol.LatentAttention."""

    def __init__(
        self,
        pool: LatentPool | RowsBesideLinear,
        req_to_token: Tensor,
        sizes: LatentSizes,
        *,
        layer_id: int,
        on_failure: Callable[[Fallback, BaseException], object],
    ) -> None:
        """
        Args:
            pool: latent rows, pages of 64.
            req_to_token: `[requests, tokens]` int32, slots.
            layer_id: of any layer in the pool.
            on_failure: is told why something does not run here.
        """
        self._pool, self._req_to_token, self._sizes, self._layer_id = pool, req_to_token, sizes, layer_id
        self._on_failure = on_failure
        self.grouped_page: int | None = None
        self._absorb: AbsorbFP8 | None = None
        self._grouped: GroupedAbsorb | None = None
        self._stacks: GroupedAbsorb | None = None  # the same in a step that goes through it

    @property
    def workspace_bytes(self) -> int:
        if self._absorb is None:
            return 0
        taken = self._starts.workspace_bytes + self._tails.workspace_bytes + self._absorb.workspace_bytes
        return taken + (self._grouped.workspace_bytes if self._grouped is not None else 0)

    @staticmethod
    def workspace_bytes_for(sizes: LatentSizes, programs: int) -> int:
        taken = TailStarts.workspace_bytes_for(sizes.sharing_requests)
        taken += Tails.workspace_bytes_for(sizes.max_requests, sizes.max_tokens)
        taken += absorb_fp8_bytes(
            heads=sizes.heads,
            num_sms=programs,
            layout=LatentRowLayout(sizes.kv_lora_rank, sizes.qk_rope_head_dim),
            page_size=PAGE_TOKENS,
            max_requests=sizes.sharing_requests,
            query_tokens=sizes.query_tokens,
        )
        return taken + sizes.grouped_bytes(fp8=True, programs=programs)

    def allocate(self, memory: Memory | None = None) -> None:
        sizes = self._sizes
        self._max_at_once = sizes.sharing_requests  # requests of one schedule
        self._starts = TailStarts(self._max_at_once, self._req_to_token.device)
        self._tails = Tails(self._req_to_token, self._starts, sizes.max_requests, sizes.max_tokens, memory)
        rows, layout = self._pool.rows(self._layer_id), self._pool.layout
        self._absorb = make_absorb_fp8(
            rows,
            heads=sizes.heads,
            dtype=sizes.dtype,
            layout=layout,
            page_size=PAGE_TOKENS,
            max_requests=self._max_at_once,
            query_tokens=sizes.query_tokens,
            on_failure=partial(self._on_failure, Fallback.FP8_CACHE_KERNELS),
            memory=memory,
        )
        if sizes.stacks:
            self._grouped = make_grouped_absorb_fp8(
                self._req_to_token,
                rows,
                heads=sizes.heads,
                layout=layout,
                dtype=sizes.dtype,
                on_failure=partial(self._on_failure, Fallback.GROUPED_ABSORB_KERNELS),
                memory=memory,
                **sizes.of_grouped,
            )
            if self._grouped is not None:
                self.grouped_page = PAGE_TOKENS

    def plan(self, segments: Sequence[Segment], tail_starts: Sequence[int], units: int, tail_tokens: int = 0) -> None:
        if self._grouped is not None:
            self._grouped.plan(segments, units, tail_tokens)
        self._starts.plan(tail_starts)

    def begin_step(self, batch: Any, *, sharing: bool, uncounted: int = 0) -> None:
        self._stacks = self._grouped if sharing else None
        if self._stacks is not None:
            seq_lens = batch.seq_lens + uncounted if uncounted else batch.seq_lens
            self._stacks.begin_step(self._req_to_token, batch.req_pool_indices, seq_lens, self._starts.on_device)
            return
        assert self._absorb is not None, "allocated"
        self._tails.begin_step(batch, sharing=sharing, uncounted=uncounted)
        requests = batch.batch_size
        if requests <= self._max_at_once:
            self._absorb.begin_step(self._tails.lens[:requests], self._tails.table[:requests])

    def run(
        self, layer_id: int, q_absorbed: Tensor, q_rope: Tensor, softmax_scale: float, watched: Watched | None = None
    ) -> tuple[Tensor, Tensor]:
        pool = self._pool.rows(layer_id)
        if self._stacks is not None:
            return self._stacks.run(q_absorbed, q_rope, pool, softmax_scale, watched)
        assert self._absorb is not None, "allocated"
        rows, dtype, device = len(q_absorbed), q_absorbed.dtype, q_absorbed.device
        requests = rows // self._sizes.query_tokens
        at_once = requests <= self._max_at_once
        out = self._absorb.output(rows, dtype) if at_once else torch.empty(q_absorbed.shape, dtype=dtype, device=device)
        lse = torch.empty(q_absorbed.shape[:2], dtype=torch.float32, device=device)
        for start in range(0, requests, self._max_at_once):
            stop = min(start + self._max_at_once, requests)
            table, lens = self._tails.table[start:stop], self._tails.lens[start:stop]
            part = slice(start * self._sizes.query_tokens, stop * self._sizes.query_tokens)
            if not at_once:  # too many for one schedule: a new one for each part
                self._absorb.begin_step(lens, table)
            self._absorb.run(q_absorbed[part], q_rope[part], pool, table, lens, softmax_scale, out[part], lse[part])
        return out, lse
