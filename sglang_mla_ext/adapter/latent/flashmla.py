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
from sglang_mla_ext.adapter.latent.protocol import LatentSizes, Tails, TailStarts
from sglang_mla_ext.kernels.absorb.grouped import GroupedAbsorb
from sglang_mla_ext.kernels.dispatch import make_grouped_absorb, whole_query
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
        sizes: LatentSizes,
        *,
        layer_id: int,
        on_failure: Callable[[Fallback, BaseException], object],
    ) -> None:
        """
        Args:
            pool: latent rows, pages of 64; also one for the layers with MLA among those of a pool (HybridLinearKVPool).
            req_to_token: `[requests, tokens]` int32, slots.
            layer_id: of any layer in the pool.
            on_failure: is told why grouped absorb does not run here.
        """
        self._pool, self._req_to_token, self._sizes, self._layer_id = pool, req_to_token, sizes, layer_id
        self._on_failure = on_failure
        self.grouped_page: int | None = None
        self._grouped: GroupedAbsorb | None = None
        self._tails: Tails | None = None

    @property
    def workspace_bytes(self) -> int:
        if self._grouped is not None:
            return self._starts.workspace_bytes + self._grouped.workspace_bytes
        if self._tails is None:
            return 0
        schedule = tensor_bytes(self._metadata, self._num_splits)
        return self._starts.workspace_bytes + self._tails.workspace_bytes + schedule

    @staticmethod
    def workspace_bytes_for(sizes: LatentSizes, programs: int) -> int:
        requests = sizes.sharing_requests
        schedule = SCHEDULE_FIELDS * programs + requests + 1  # numbers, and the splits of each request
        taken = Tails.workspace_bytes_for(requests, sizes.max_tokens) + 4 * schedule
        taken = max(taken, sizes.grouped_bytes(fp8=False, programs=programs))  # one of the two
        return TailStarts.workspace_bytes_for(requests) + taken

    def allocate(self, memory: Memory | None = None) -> None:
        sizes, requests = self._sizes, self._sizes.sharing_requests
        self._starts = TailStarts(requests, self._req_to_token.device)
        if sizes.stacks:
            self._grouped = make_grouped_absorb(
                self._req_to_token,
                self._pages(self._layer_id),
                heads=sizes.heads,
                kv_lora_rank=sizes.kv_lora_rank,
                on_failure=partial(self._on_failure, Fallback.GROUPED_ABSORB_KERNELS),
                memory=memory,
                **sizes.of_grouped,
            )
        if self._grouped is not None:
            self.grouped_page = PAGE_TOKENS
            return
        self._tails = Tails(self._req_to_token, self._starts, requests, sizes.max_tokens, memory)
        # Its size depends on the GPU and on the rows of a request alone.
        self._metadata = torch.zeros_like(self._schedule(self._tails.lens[:1])[0])
        self._num_splits = torch.zeros(requests + 1, dtype=torch.int32, device=self._req_to_token.device)

    def plan(self, segments: Sequence[Segment], tail_starts: Sequence[int], units: int, tail_tokens: int = 0) -> None:
        if self._grouped is not None:
            self._grouped.plan(segments, units, tail_tokens)
        self._starts.plan(tail_starts)

    def begin_step(self, batch: Any, *, sharing: bool, uncounted: int = 0) -> None:
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
        self, layer_id: int, q_absorbed: Tensor, q_rope: Tensor, softmax_scale: float, watched: Watched | None = None
    ) -> tuple[Tensor, Tensor]:
        if self._grouped is not None:
            return self._grouped.run(q_absorbed, q_rope, self._pages(layer_id), softmax_scale, watched)
        assert self._tails is not None, "one of the two is allocated"
        requests = len(q_absorbed) // self._sizes.query_tokens
        out, lse = flash_mla_with_kvcache(
            q=whole_query(q_absorbed, q_rope).unflatten(0, (requests, self._sizes.query_tokens)),
            k_cache=self._pages(layer_id),
            block_table=self._tails.table[:requests],
            cache_seqlens=self._tails.lens[:requests],
            head_dim_v=self._sizes.kv_lora_rank,
            tile_scheduler_metadata=self._metadata,
            num_splits=self._num_splits[: requests + 1],
            softmax_scale=softmax_scale,
            causal=True,
        )  # out [requests, queries, heads, kv_lora_rank], lse [requests, heads, queries] natural log
        return out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)

    def _schedule(self, lens: Tensor) -> tuple[Tensor, Tensor]:
        """FlashMLA's, for tails of these lengths, `[requests]` int32."""
        metadata, num_splits = get_mla_metadata(lens, self._sizes.query_tokens * self._sizes.heads, 1)
        return metadata, num_splits

    def _pages(self, layer_id: int) -> Tensor:
        """A layer's latent rows, `[pages, 64, 1, kv_lora_rank + qk_rope_head_dim]`."""
        rows: Tensor = self._pool.get_key_buffer(layer_id)
        return rows.view(-1, PAGE_TOKENS, 1, rows.shape[-1])
