"""SGLang's FlashAttention-3 backend, for decode graphs without sharing.

It is the default of SGLang's servers on Hopper GPUs. FlashMLA is as fast over short tails, but wants the two parts of a
query joined: a copy of 38 MB in each layer for 128 requests with 128 heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.kernels.ops.attention.flash_attention import flash_attn_with_kvcache
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class PlainBackend(FlashAttentionBackend):  # type: ignore[misc] # SGLang is not typed
    """SGLang's metadata, and its call of FlashAttention-3 with one argument more, so that nothing is read behind a
    request's last token.

    With more than 64 query rows of a request and pages of 64 tokens FlashAttention-3 loads whole pages by TMA, and
    multiplies what is behind the last token by zero, which leaves NaN. It takes no TMA where requests have padding on
    the left (get_pagedkv_tma, hopper/flash_api.cpp); here they have zero tokens of it.
    """

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._padding = torch.empty(0)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self._padding = torch.zeros(max_bs, dtype=torch.int32, device=self.device)

    def forward_decode(
        self,
        q: torch.Tensor,
        k: None,
        v: None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = False,
        q_rope: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend in a decode or verify step, whose latent rows are written.

        Args:
            q: `[rows, heads, kv_lora_rank]`, absorbed, beside `q_rope [rows, heads, qk_rope_head_dim]`, or whole
                queries.
        Returns:
            `[rows, heads * kv_lora_rank]`.
        """
        q = q.view(len(q), layer.tp_q_head_num, -1)
        content, rope = (q, q_rope) if q_rope is not None else q.tensor_split([layer.v_head_dim], dim=-1)
        rows = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        pages = rows.view(-1, self.page_size, 1, rows.shape[-1])
        step: Any = self.forward_metadata
        out: torch.Tensor = flash_attn_with_kvcache(
            q=rope,
            qv=content,
            k_cache=pages[..., layer.v_head_dim :],
            v_cache=pages[..., : layer.v_head_dim],
            page_table=step.page_table,
            cache_seqlens=step.cache_seqlens_int32,
            cache_leftpad=self._padding[: len(step.cache_seqlens_int32)],
            cu_seqlens_q=step.cu_seqlens_q,
            max_seqlen_q=step.max_seq_len_q,
            softmax_scale=layer.scaling,
            causal=True,
            num_splits=self.num_splits,
            ver=3,
        )
        return out.view(len(q), -1)

    forward_extend = forward_decode
