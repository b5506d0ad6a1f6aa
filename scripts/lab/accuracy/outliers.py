"""A model in another basis of its latent rows, in which they are as large as large models' (SnapMLA, figure 3): content
from next to nothing to some ten, rotary channels of very different sizes up to some thousand.

Channels of the content are multiplied behind their norm and divided again before `kv_b_proj`; rotary pairs are
multiplied in keys and divided in queries. All by powers of two, which BF16 and fp32 have exactly, so that no answer of
a BF16 server changes by a bit; only what is stored does, and what rounding it to FP8 costs.
"""

from __future__ import annotations

import torch
from transformers import DeepseekV3ForCausalLM

CONTENT_POWERS = (-6, 1)
ROTARY_POWERS = (0, 6)


def powers(channels: int, ends: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Return powers of two, `[channels]`: all from one end to the other, equally often, in random order."""
    exponents = torch.linspace(*ends, channels).round()
    return torch.exp2(exponents[torch.randperm(channels, generator=generator)])


def put_outliers(network: DeepseekV3ForCausalLM, seed: int = 0) -> None:
    """Change the basis of every layer's latent rows."""
    generator = torch.Generator().manual_seed(seed)
    for layer in network.model.layers:
        attention = layer.self_attn
        rank, rope = attention.kv_lora_rank, attention.qk_rope_head_dim
        content = powers(rank, CONTENT_POWERS, generator)
        pairs = powers(rope // 2, ROTARY_POWERS, generator).repeat_interleave(2)  # neighbours are turned together
        with torch.no_grad():
            attention.kv_a_layernorm.weight *= content
            attention.kv_b_proj.weight /= content
            attention.kv_a_proj_with_mqa.weight[rank:] *= pairs[:, None]
            queries = attention.q_b_proj.weight.unflatten(0, (attention.num_heads, -1))  # [H, dn + dr, q_rank]
            queries[:, attention.qk_nope_head_dim :] /= pairs[:, None]
