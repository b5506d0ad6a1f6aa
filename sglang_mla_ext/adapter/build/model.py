"""The loaded model's attention on this rank, which the budget and all parts are made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from sglang_mla_ext.adapter.server import Server
from sglang_mla_ext.adapter.step.layer import attention_layers
from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.planner.model_dims import ModelDims

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

STORAGE_DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3": FP8}
"""Dtypes of expanded prefixes, by the option; otherwise as the cache."""


@dataclass(frozen=True)
class Model:
    """See the module.

    Attributes:
        layers: the attention layers, by layer id.
        dtype: of queries.
        cache_dtype: of SGLang's KV cache.
        config: SGLang's.
    """

    layers: Sequence[DeepseekV2AttentionMLA]
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: torch.device
    config: ModelConfig

    @classmethod
    def of(cls, source: ModelRunner | KVCacheConfigurator, dtype: torch.dtype) -> Model:
        """Describe the model of a runner, or as SGLang sizes its KV cache; pools need not be there."""
        device = torch.device(source.device)
        return cls(attention_layers(source), dtype, source.kv_cache_dtype, device, source.model_config)

    @property
    def first(self) -> DeepseekV2AttentionMLA:
        """A layer like all others."""
        return self.layers[0]

    @property
    def heads(self) -> int:
        """Heads on this rank."""
        return int(self.first.num_local_heads)

    @property
    def fp8(self) -> bool:
        """Return whether latent rows are stored in FP8."""
        return self.cache_dtype == FP8

    @property
    def latent_dtype(self) -> torch.dtype:
        """Return the dtype in which latent rows are stored."""
        return FP8 if self.fp8 else self.dtype

    @property
    def context_len(self) -> int:
        """Tokens of the longest request."""
        return int(self.config.context_len)

    def prefix_dtype(self, options: HybridMLAOptions) -> torch.dtype:
        """Return the dtype in which expanded prefixes are stored."""
        return STORAGE_DTYPES.get(options.prefix_dtype, self.latent_dtype)

    @cached_property
    def dims(self) -> ModelDims:
        """Dimensions of the attention layers."""
        first = self.first
        return ModelDims(
            num_layers=len(self.layers),
            num_heads=first.num_heads,
            kv_lora_rank=first.kv_lora_rank,
            qk_nope_head_dim=first.qk_nope_head_dim,
            qk_rope_head_dim=first.qk_rope_head_dim,
            v_head_dim=first.v_head_dim,
            hidden_size=self.config.hidden_size,
        )


def described(source: KVCacheConfigurator, options: HybridMLAOptions) -> tuple[Server, Model]:
    """Describe the server and its model as SGLang sizes its KV cache."""
    return Server.of(source.server_args, options), Model.of(source, source.model_dtype)
