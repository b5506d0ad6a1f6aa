"""Prefill attention in the latent space by FlashInfer's paged MLA kernels, over any part of each request's tokens.

SGLang's FlashMLA and FlashInfer backends run the same kernels over all tokens of a request, and planning there waits
for the device: lengths are copied back from it. Here they are taken from the host's copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from flashinfer import BatchMLAPagedAttentionWrapper
from torch import Tensor

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.latent.pool import fp8_rows

if TYPE_CHECKING:
    from sglang.srt.layers.attention.flashmla_backend import FlashMLABackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA


class FlashInferTails:
    """The interface is adapter.stock.protocol.PrefillTails.

    An FP8 pool's rows are fetched in BF16 first, in each layer.
    """

    def __init__(self, backend: FlashMLABackend, layer: DeepseekV2AttentionMLA, dtype: torch.dtype) -> None:
        """
        Args:
            backend: SGLang's, whose workspace, table of slots and pool are used.
            layer: any of the model's attention layers on this rank.
            dtype: of queries.
        """
        # Two, because a plan's numbers lie in the wrapper's pinned memory until the copy from there is done: with
        # overlap scheduling a pass is planned while the one before runs.
        self._wrappers = [BatchMLAPagedAttentionWrapper(backend.workspace_buffer, backend="auto") for _ in range(2)]
        self._backend, self._dtype = backend, dtype
        self._scale, self._rank, self._rope = layer.attn_mqa.scaling, layer.kv_lora_rank, layer.qk_rope_head_dim
        self._heads, self._fetches = layer.num_local_heads, fp8_rows(backend.token_to_kv_pool) is not None
        self._slots: Tensor | None = None

    def plan(self, batch: ForwardBatch, starts: Sequence[int]) -> None:
        new = list(batch.extend_seq_lens_cpu)
        cached = batch.extend_prefix_lens_cpu
        lens = [before + more - start for before, more, start in zip(cached, new, starts, strict=True)]
        requests, total = len(lens), sum(lens)
        values = [*starts, *lens, 0, *accumulate(lens), 0, *accumulate(new)]
        host = torch.tensor(values, dtype=torch.int32, pin_memory=True)
        device = batch.seq_lens.device
        parts = [requests, requests, requests + 1, requests + 1]
        start_on_device, lens_on_device, indptr_on_device, _ = host.to(device, non_blocking=True).split(parts)
        _, host_lens, kv_indptr, qo_indptr = host.split(parts)
        slots = torch.empty(total, dtype=torch.int32, device=device)
        translator = self._backend.kv_index_translator
        ranges = dict(kv_start_idx=start_on_device, seq_lens=lens_on_device, indptr=indptr_on_device)
        installed.write_slots(batch, translator, slots, **ranges)
        self._slots = slots
        indices = torch.arange(total, dtype=torch.int32, device=device) if self._fetches else slots
        self._wrappers.reverse()
        sizes: tuple[Any, ...] = (self._heads, self._rank, self._rope, 1, True, self._scale, self._dtype, self._dtype)
        self._wrappers[0].plan(qo_indptr, kv_indptr, indices, host_lens, *sizes)

    def run(self, layer: RadixAttention, q_absorbed: Tensor, q_rope: Tensor, out: Tensor, lse: Tensor) -> None:
        content, rope = self._rows(layer.layer_id).split([self._rank, self._rope], dim=-1)
        self._wrappers[0].run(
            q_absorbed, q_rope, content, rope, out=out, lse=lse, return_lse=True, return_lse_base_on_e=True
        )

    def _rows(self, layer_id: int) -> Tensor:
        """`[slots, 1, kv_lora_rank + qk_rope_head_dim]`: the pool, or the rows that the plan names, fetched from it."""
        pool = self._backend.token_to_kv_pool
        if not self._fetches:
            pages: Tensor = pool.get_key_buffer(layer_id)
            return pages
        fp8 = fp8_rows(pool)
        assert self._slots is not None and fp8 is not None, "planned, over an FP8 cache"
        rows = torch.empty(len(self._slots), self._rank + self._rope, dtype=self._dtype, device=self._slots.device)
        fp8.fetch(layer_id, self._slots, rows)
        return rows[:, None]
