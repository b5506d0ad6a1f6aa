"""SGLang's FlashAttention-3 backend, for decode graphs without sharing.

It is the default of SGLang's servers on Hopper GPUs. FlashMLA is as fast over short tails, but wants the two parts of a
query joined: a copy of 38 MB in each layer for 128 requests with 128 heads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class PlainBackend(FlashAttentionBackend):  # type: ignore[misc] # SGLang is not typed
    """SGLang's backend, which reads nothing behind a request's last token.

    With more than 64 query rows of a request and pages of 64 tokens FlashAttention-3 loads whole pages by TMA, and
    multiplies what is behind the last token by zero, which leaves NaN. It takes no TMA where requests have padding on
    the left (get_pagedkv_tma, hopper/flash_api.cpp); here they have zero tokens of it.
    """

    flash_attn_with_kvcache: Any

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self._attend = self.flash_attn_with_kvcache
        self.flash_attn_with_kvcache = self._attend_without_tma
        self._padding = torch.empty(0)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self._padding = torch.zeros(max_bs, dtype=torch.int32, device=self.device)

    def _attend_without_tma(self, *args: Any, cache_seqlens: torch.Tensor, **kwargs: Any) -> Any:
        padding = self._padding[: len(cache_seqlens)]
        return self._attend(*args, cache_seqlens=cache_seqlens, cache_leftpad=padding, **kwargs)
