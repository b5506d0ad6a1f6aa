"""Attention in the latent space over SGLang's own pool in BF16: FlashMLA reads private tails, one request at a time;
where heads are few, grouped absorb (kernels/absorb/grouped.py) takes tails and shared prefixes in one launch.

FlashMLA reads a request's keys through a table of pages. The table starts at the first private page, so a tail costs
what its own length costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.latent.protocol import LatentSizes, Tails, TailStarts, grouped_sizes
from sglang_mla_ext.kernels.absorb.grouped import GroupedAbsorb
from sglang_mla_ext.kernels.absorb.stacking import rows_per_tile
from sglang_mla_ext.kernels.dispatch import grouped_absorb_bytes, make_grouped_absorb, whole_query
from sglang_mla_ext.kernels.memory import Memory, tensor_bytes
from sglang_mla_ext.kernels.sizes import PAGE_TOKENS
from sglang_mla_ext.kernels.watch import Watched
from sglang_mla_ext.reasons import Fallback
from sglang_mla_ext.segment import Segment

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

flash_mla_with_kvcache, get_mla_metadata = installed.flash_mla()

SCHEDULE_FIELDS = 8
"""Numbers in FlashMLA's schedule for each of its programs, of which there is at most one for each multiprocessor."""


class FlashMLALatent:
    """See the module; the interface is protocol.LatentAttention."""

    def __init__(
        self,
        pool: MLATokenToKVPool,
        req_to_token: Tensor,
        *,
        heads: int,
        layer_id: int,
        kv_lora_rank: int,
        grouped: bool,
        on_failure: Callable[[Fallback, BaseException], object],
        query_tokens: int = 1,
    ) -> None:
        """
        Args:
            pool: latent rows, pages of 64; also one for the layers with MLA among those of a pool (HybridLinearKVPool).
            req_to_token: `[requests, tokens]` int32, slots.
            heads: of this rank; layer_id: of any layer in the pool; kv_lora_rank: of a row.
            grouped: try grouped absorb.
            on_failure: is told why grouped absorb does not run here.
            query_tokens: of each request.
        """
        self._pool, self._req_to_token, self._heads, self._layer_id = pool, req_to_token, heads, layer_id
        self._rank, self._query_tokens = kv_lora_rank, query_tokens
        self._try_grouped, self._on_failure = grouped, on_failure
        self.grouped_page: int | None = None
        self._grouped: GroupedAbsorb | None = None
        self._tails: Tails | None = None
        self._starts: TailStarts | None = None

    @property
    def workspace_bytes(self) -> int:
        if self._starts is None:
            return 0
        taken = self._starts.workspace_bytes
        if self._grouped is not None:
            taken += self._grouped.workspace_bytes
        if self._tails is not None:
            taken += self._tails.workspace_bytes + tensor_bytes(self._metadata, self._num_splits)
        return taken

    @staticmethod
    def workspace_bytes_for(sizes: LatentSizes) -> int:
        requests = sizes.sharing_requests
        schedule = SCHEDULE_FIELDS * sizes.programs + requests + 1  # numbers, and the splits of each request
        taken = Tails.workspace_bytes_for(requests, sizes.max_tokens) + 4 * schedule
        if sizes.grouped and rows_per_tile(sizes.heads) is not None:
            of_grouped = grouped_absorb_bytes(
                heads=sizes.heads,
                fp8=False,
                kv_lora_rank=sizes.kv_lora_rank,
                qk_rope_head_dim=sizes.qk_rope_head_dim,
                dtype=sizes.dtype,
                programs=sizes.programs,
                **grouped_sizes(sizes.max_rows, sizes.max_tokens, sizes.query_tokens),
            )
            taken = max(taken, of_grouped)  # one of the two
        return TailStarts.workspace_bytes_for(requests) + taken

    def allocate(self, max_rows: int, max_requests: int, max_tokens: int, memory: Memory | None = None) -> None:
        requests = max_rows // self._query_tokens
        self._starts = TailStarts(requests, self._req_to_token.device)
        if self._try_grouped and rows_per_tile(self._heads) is not None:
            self._grouped = make_grouped_absorb(
                self._req_to_token,
                self._pages(self._layer_id),
                heads=self._heads,
                kv_lora_rank=self._rank,
                on_failure=partial(self._on_failure, Fallback.GROUPED_ABSORB_KERNELS),
                memory=memory,
                **grouped_sizes(max_rows, max_tokens, self._query_tokens),
            )
        if self._grouped is not None:
            self.grouped_page = PAGE_TOKENS
            return
        self._tails = Tails(self._req_to_token, self._starts, requests, max_tokens, memory)
        # Its size depends on the GPU and on the rows of a request alone.
        self._metadata = torch.zeros_like(self._schedule(self._tails.lens[:1])[0])
        self._num_splits = torch.zeros(requests + 1, dtype=torch.int32, device=self._req_to_token.device)

    def plan(self, segments: Sequence[Segment], tail_starts: Sequence[int], units: int) -> None:
        if self._grouped is not None:
            self._grouped.plan(segments, units)
        assert self._starts is not None, "allocated"
        self._starts.plan(tail_starts)

    def begin_step(self, batch: Any, *, sharing: bool, uncounted: int = 0) -> None:
        assert self._starts is not None, "allocated"
        if self._grouped is not None:
            seq_lens = batch.seq_lens + uncounted if uncounted else batch.seq_lens
            self._grouped.begin_step(self._req_to_token, batch.req_pool_indices, seq_lens, self._starts.on_device)
            return
        assert self._tails is not None, "one of the two is allocated"
        self._tails.begin_step(batch, sharing=sharing, uncounted=uncounted)
        requests = batch.batch_size
        metadata, num_splits = self._schedule(self._tails.lens[:requests])
        self._metadata.copy_(metadata)
        self._num_splits[: requests + 1].copy_(num_splits)

    def run(
        self,
        layer_id: int,
        q_absorbed: Tensor,
        q_rope: Tensor,
        softmax_scale: float,
        watched: Watched | None = None,
    ) -> tuple[Tensor, Tensor]:
        if self._grouped is not None:
            return self._grouped.run(q_absorbed, q_rope, self._pages(layer_id), softmax_scale, watched)
        assert self._tails is not None, "one of the two is allocated"
        requests = len(q_absorbed) // self._query_tokens
        out, lse = flash_mla_with_kvcache(
            q=whole_query(q_absorbed, q_rope).unflatten(0, (requests, self._query_tokens)),
            k_cache=self._pages(layer_id),
            block_table=self._tails.table[:requests],
            cache_seqlens=self._tails.lens[:requests],
            head_dim_v=self._rank,
            tile_scheduler_metadata=self._metadata,
            num_splits=self._num_splits[: requests + 1],
            softmax_scale=softmax_scale,
            causal=True,
        )  # out [requests, queries, heads, kv_lora_rank], lse [requests, heads, queries] natural log
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def _schedule(self, lens: Tensor) -> tuple[Tensor, Tensor]:
        """FlashMLA's, for tails of these lengths, `[requests]` int32."""
        metadata, num_splits = get_mla_metadata(lens, self._query_tokens * self._heads, 1)
        return metadata, num_splits

    def _pages(self, layer_id: int) -> Tensor:
        """A layer's latent rows, `[pages, 64, 1, kv_lora_rank + qk_rope_head_dim]`."""
        rows: Tensor = self._pool.get_key_buffer(layer_id)
        return rows.view(-1, PAGE_TOKENS, 1, rows.shape[-1])
