"""SGLang's torch backend, owned by ours on a machine without a GPU: exact and slow. It exists so that the whole server,
its tree, its scheduler and its HTTP interface can be tried and tested anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter.cpu import extend
from sglang_mla_ext.adapter.failure import our_part
from sglang_mla_ext.adapter.latent.pool import fp8_rows
from sglang_mla_ext.adapter.step.passes import passes
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.reasons import Fallback

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class TorchTails:
    """Attention in the latent space for prefill passes; the interface is adapter.stock.protocol.PrefillTails."""

    def __init__(self, backend: TorchNativeAttnBackend) -> None:
        self._backend = backend
        self._ranges: list[tuple[Tensor, int]] = []  # of each request: slots of its tail, and its new tokens

    def plan(self, batch: ForwardBatch, starts: Sequence[int]) -> None:
        req_to_token = self._backend.req_to_token_pool.req_to_token
        lens = zip(batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True)
        self._ranges = [
            (req_to_token[row, start : cached + new].long(), new)
            for row, start, (cached, new) in zip(batch.req_pool_indices.tolist(), starts, lens, strict=True)
        ]

    def run(self, layer: RadixAttention, q_absorbed: Tensor, q_rope: Tensor, out: Tensor, lse: Tensor) -> None:
        pool, first = self._backend.token_to_kv_pool, 0
        fp8 = fp8_rows(pool)
        for slots, new in self._ranges:
            rows = slice(first, first + new)
            keys = q_absorbed.new_empty(len(slots), layer.qk_head_dim)
            if fp8 is not None:
                fp8.fetch(layer.layer_id, slots, keys)
            else:
                keys.copy_(pool.get_key_buffer(layer.layer_id)[slots].squeeze(1))
            query = torch.cat([q_absorbed[rows], q_rope[rows]], dim=-1)  # [new, heads, 576]
            scores = torch.einsum("nhd,kd->nhk", query, keys) * layer.scaling
            later = torch.ones(new, len(slots), dtype=torch.bool).triu(len(slots) - new + 1)
            scores.masked_fill_(later[:, None], -torch.inf)
            lse[rows] = scores.logsumexp(-1)
            out[rows] = scores.softmax(-1) @ keys[:, : layer.v_head_dim]
            first += new


class TorchStock:
    """See the module; the interface is adapter.stock.protocol.Stock."""

    def __init__(self, runner: ModelRunner) -> None:
        self.backend = TorchNativeAttnBackend(runner)
        self.decodes = fp8_rows(runner.token_to_kv_pool) is None
        self.plain: AttentionBackend | None = None

    def make_plain(self, runner: ModelRunner) -> bool:
        """Return False: there are no graphs on a CPU."""
        return False

    def extend(
        self, q: Tensor, k: Tensor, v: Tensor, layer: RadixAttention, forward_batch: ForwardBatch, save_kv_cache: bool
    ) -> Any:
        """SGLang's absorb, or with keys per head the new tokens of each request among themselves, and their lse.

        Over a pool in FP8, prefill takes the new tokens as they are computed and the cached ones as they are stored, as
        SGLang's does on a GPU.
        """
        if passes.now.prefill is None:
            if self.decodes:
                return self.backend.forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            self.backend.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k)
            return self._extend_over_fp8(q, k, layer, forward_batch)
        with our_part(Fallback.PREFILL_ATTENTION):
            lens = list(forward_batch.extend_seq_lens_cpu)
            padded = len(q) - sum(lens)  # for ranks that attend together: one more text, which nobody reads
            lens += [padded] * (padded > 0)
            parts = [
                reference.causal(*tensors, layer.scaling)
                for tensors in zip(q.split(lens), k.split(lens), v.split(lens), strict=True)
            ]
            return torch.cat([out for out, _ in parts]).to(q.dtype), torch.cat([lse for _, lse in parts]).float()

    def affordable(self, prefix_lens: Sequence[int]) -> int:
        """Return 0: there is no forward method with keys per head on the CPU but ours."""
        return 0

    def prefill_tails(self) -> TorchTails:
        return TorchTails(self.backend)

    def can_finish(self, prefix_lens: Sequence[int], covered: Sequence[int]) -> bool:
        """Return whether nothing is left to attend to: SGLang has no CPU version of its loop over the rest."""
        return list(prefix_lens) == list(covered)

    def _extend_over_fp8(self, q: Tensor, k: Tensor, layer: RadixAttention, forward_batch: ForwardBatch) -> Tensor:
        """Attend by absorb in prefill: new tokens over what is cached, read by its slots, and over themselves.

        Args:
            q: `[tokens, heads * 576]`; k: `[tokens, 1, 576]`, latent rows of the new tokens.
        """
        fp8, lens = fp8_rows(self.backend.token_to_kv_pool), forward_batch.extend_seq_lens_cpu
        assert fp8 is not None, "an FP8 cache"
        req_to_token = self.backend.req_to_token_pool.req_to_token
        queries = q.view(len(q), layer.tp_q_head_num, layer.qk_head_dim).split(lens)
        new_rows = k.view(len(k), layer.qk_head_dim).split(lens)
        outs = []
        for row, prefix_len in enumerate(forward_batch.extend_prefix_lens_cpu):
            cached = new_rows[row].new_empty(prefix_len, layer.qk_head_dim)
            slots = req_to_token[forward_batch.req_pool_indices[row], :prefix_len].long()
            fp8.fetch(layer.layer_id, slots, cached)
            rows = torch.cat([cached, new_rows[row]])[:, None]  # [n, 1, 576]
            outs.append(extend.attend(queries[row], rows, rows[..., : layer.v_head_dim], layer.scaling))
        return torch.cat(outs).reshape(len(q), -1)


def after_support_triton(result: bool, backend: str, *args: Any) -> bool:
    """Tell SGLang to use its torch code beside our backend too."""
    return False if backend == BACKEND_NAME else result
