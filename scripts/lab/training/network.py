"""DeepSeek-V3's dense architecture in plain torch, for training: the expanded form of MLA over packed documents.

Parameters have their Hugging Face names, so that the state dict is the checkpoint.

    c, k_rope = split(x W_kv_a);  k_nope, v = split(norm(c) W_kv_b);  q_nope, q_rope = split(norm(x W_q_a) W_q_b)
    out = softmax(scale * (q_nope k_nope' + rope(q_rope) rope(k_rope)')) v
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn


class Packed(NamedTuple):
    """Documents one after another in one flat batch."""

    tokens: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64, each document from 0
    starts: Tensor  # [documents + 1] int32, where each begins, and the end; repeated at the end to a fixed length
    longest: int  # at least the tokens of the longest document


Attend = Callable[[Tensor, Tensor, Tensor, Packed, float], Tensor]
"""q, k `[tokens, heads, nope + rope]`, v `[tokens, heads, v_dim]`, documents, scale -> `[tokens, heads, v_dim]`."""


def attend_each(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float) -> Tensor:
    """Causal attention, one call for each document. Runs anywhere."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [heads, tokens, dim]
    bounds = packed.starts.tolist()
    outs = [
        F.scaled_dot_product_attention(
            q[None, :, begin:end], k[None, :, begin:end], v[None, :, begin:end], is_causal=True, scale=scale
        )
        for begin, end in pairwise(bounds)
        if end > begin
    ]
    return torch.cat(outs, dim=2)[0].transpose(0, 1)


def attend_packed(q: Tensor, k: Tensor, v: Tensor, packed: Packed, scale: float) -> Tensor:
    """The same in one call of torch's FlashAttention for documents of different lengths (CUDA, BF16).

    That kernel takes one head dimension for keys and values: values are padded with zeros.
    """
    v_dim = v.shape[-1]
    v = F.pad(v, (0, q.shape[-1] - v_dim))
    q, k, v = (x.to(torch.bfloat16) for x in (q, k, v))
    out = torch.ops.aten._flash_attention_forward(
        q, k, v, packed.starts, packed.starts, packed.longest, packed.longest, 0.0, True, False, scale=scale
    )[0]
    return out[..., :v_dim]


def attention(device: torch.device) -> Attend:
    """Return the attention for a device."""
    return attend_packed if device.type == "cuda" else attend_each


def yarn_frequencies(config: dict[str, Any]) -> Tensor:
    """Angles per position `[rope / 2]`: low frequencies are divided by the factor, high ones stay."""
    dim, base, scaling = config["qk_rope_head_dim"], config["rope_theta"], config["rope_scaling"]

    def dimension(rotations: float) -> float:
        """The dimension that makes this many turns within the original context."""
        original = scaling["original_max_position_embeddings"]
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(scaling["beta_fast"])), 0)
    high = min(math.ceil(dimension(scaling["beta_slow"])), dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    plain = base ** (-torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return plain * (1 - ramp) + plain / scaling["factor"] * ramp


def softmax_scale(config: dict[str, Any]) -> float:
    """Return 1 / sqrt(dim), times what YaRN adds for a longer context."""
    scaling = config["rope_scaling"]
    mscale = 0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0
    return (config["qk_nope_head_dim"] + config["qk_rope_head_dim"]) ** -0.5 * mscale * mscale


def turns(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine `[tokens, 1, rope / 2]` of each position's angles."""
    angles = positions[:, None, None].float() * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair of neighbours of `[tokens, heads, rope]` by `[tokens, 1, rope / 2]`."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps))).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any], attend: Attend) -> None:
        super().__init__()
        hidden, q_rank, kv_rank = config["hidden_size"], config["q_lora_rank"], config["kv_lora_rank"]
        self.heads, self.kv_rank, self.v_dim = config["num_attention_heads"], kv_rank, config["v_head_dim"]
        self.nope, self.rope = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.scale, self.attend = softmax_scale(config), attend
        self.q_a_proj = nn.Linear(hidden, q_rank, bias=False)
        self.q_a_layernorm = RMSNorm(q_rank, config["rms_norm_eps"])
        self.q_b_proj = nn.Linear(q_rank, self.heads * (self.nope + self.rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, kv_rank + self.rope, bias=False)
        self.kv_a_layernorm = RMSNorm(kv_rank, config["rms_norm_eps"])
        self.kv_b_proj = nn.Linear(kv_rank, self.heads * (self.nope + self.v_dim), bias=False)
        self.o_proj = nn.Linear(self.heads * self.v_dim, hidden, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[tokens, heads, dim]` of the tokens."""
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (self.heads, -1))
        q_nope, q_rope = q.split((self.nope, self.rope), dim=-1)  # [tokens, heads, dim]
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((self.kv_rank, self.rope), dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        k_nope, v = expanded.split((self.nope, self.v_dim), dim=-1)
        k_rope = rotate(k_rope.unsqueeze(1), cos, sin).expand(-1, self.heads, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), dim=-1)
        return q, torch.cat((k_nope, k_rope), dim=-1), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packed) -> Tensor:
        return self.o_proj(self.attend(*self.project(x, cos, sin), packed, self.scale).flatten(-2))


class MLP(nn.Module):
    def __init__(self, hidden: int, wide: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, wide, bias=False)
        self.up_proj = nn.Linear(hidden, wide, bias=False)
        self.down_proj = nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any], attend: Attend) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn = Attention(config, attend)
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.mlp = MLP(config["hidden_size"], config["intermediate_size"])

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, packed: Packed) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, packed)
        return x + self.mlp(self.post_attention_layernorm(x))


class Network(nn.Module):
    """The whole model.

    Args:
        config: `config.json`, as make_demo_model writes it.
    """

    def __init__(self, config: dict[str, Any], attend: Attend = attend_each) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.model.layers = nn.ModuleList(Layer(config, attend) for _ in range(config["num_hidden_layers"]))
        self.model.norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)
        self.register_buffer("frequencies", yarn_frequencies(config), persistent=False)

    def init_weights(self, seed: int) -> None:
        """Normal weights; those that write to the residual stream are smaller the more layers there are."""
        generator = torch.Generator().manual_seed(seed)
        smaller = 1 / math.sqrt(2 * len(self.model.layers))
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = 0.02 * (smaller if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
                weight.data.copy_(torch.randn(weight.shape, generator=generator) * scale)

    def forward(self, packed: Packed) -> Tensor:
        """The last hidden states `[tokens, hidden]`; `lm_head` makes logits of them."""
        cos, sin = turns(packed.positions, self.frequencies)
        x = self.model.embed_tokens(packed.tokens)
        for layer in self.model.layers:
            x = layer(x, cos, sin, packed)
        return self.model.norm(x)


def pack(documents: list[list[int]], device: torch.device | str = "cpu") -> Packed:
    """Documents as one batch."""
    sizes = [len(document) for document in documents]
    return Packed(
        tokens=torch.tensor([token for document in documents for token in document], device=device),
        positions=torch.cat([torch.arange(size) for size in sizes]).to(device),
        starts=torch.tensor([0, *sizes]).cumsum(0).to(device=device, dtype=torch.int32),
        longest=max(sizes),
    )


def load_weights(network: Network, folder: Path) -> None:
    """Read a checkpoint into the network, without the layer behind its last one that drafts (draft.py)."""
    behind = f"model.layers.{len(network.model.layers)}."
    tensors = load_file(folder / "model.safetensors")
    network.load_state_dict({name: tensor for name, tensor in tensors.items() if not name.startswith(behind)})
