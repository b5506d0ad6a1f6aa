"""The demo model as it is served: prefill in BF16, then decode over latent rows or expanded prefixes of an `Impl`.

    rows = prefill(prefix)                 of every layer: normed content and rotated rotary keys, not quantised
    kept = keep(impl, rows)                what the implementation stores of them
    logits = decode(impl, kept, tokens)    the tokens as decode rows, over what is kept and the rows before their own

An implementation has `keep(layer, rows)`, what it stores of a prefix, and `attend(layer, query, prefix, own, visible)`,
decode rows over a prefix and their own rows, stored the same way: `[T, H, dv]`, rounded. `visible [T]` counts the keys
that a row sees: the prefix, and the own rows up to its own.

Everything is computed in float32 and rounded to BF16 where a server in BF16 rounds: after each product, norm, rotation
and sum, in softmax weights, and in logits. All steps of quantisation are the references in `kernels`.

Shapes: T decode rows, H heads, n keys, r = kv_lora_rank, dn, dr, dv the content, rotary and value elements of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV3ForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import apply_rotary_pos_emb_interleave

from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.reference.fp8 import Configuration, Keys, absorb_fp8, keys_of_rows, round_keys
from sglang_mla_ext.kernels.storage.expanded import CHUNK_TOKENS, FP8, ExpandedBuffers, scale_bounds, to_fp8
from sglang_mla_ext.kernels.storage.latent_rows import LatentRowLayout, quantize

ROWS = 256
"""Query rows computed at a time; it bounds memory and changes no result."""

BLOCK_KEYS = 64
"""Keys per block of the running softmax, in FlashMLA and here."""


class Rows(NamedTuple):
    """Latent rows of one layer."""

    latent: Tensor  # [n, r], after its norm
    rope: Tensor  # [n, dr], rotated


class Query(NamedTuple):
    nope: Tensor  # [T, H, dn], before absorption
    rope: Tensor  # [T, H, dr], rotated


class Expanded(NamedTuple):
    """Keys and values per head, true values."""

    k_nope: Tensor  # [n, H, dn]
    k_rope: Tensor  # [n, dr]
    v: Tensor  # [n, H, dv]
    k_scale: Tensor  # [H]; 1 unless stored in FP8


def attend(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, softmax_scale: float, weights_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor]:
    """Attention with float32 sums whose weights are rounded before they meet the values; their sum is of the unrounded.

    As in the kernels, a weight is rounded relative to the largest score among its block of 64 keys and those behind
    it: FlashMLA for FP8 and the naive kernels begin with the last block. In BF16 this does not matter; in e4m3 without
    a scale it does, because weights more than 2^10 times smaller than the largest become zero.

    Args:
        q: `[T, H, d]`; k: `[n, K, d]`, v: `[n, K, dv]`, K being H or 1 (the same keys for all heads).
        visible: `[T]` integers, each row sees the first so many keys, at least one.
        weights_dtype: None rounds nothing.
    Returns:
        `out [T, H, dv]`, not rounded, and `lse [T, H]`, natural log.
    Source: FlashAttention-2; FlashMLA's weights in FP8 have no scale (SGLang's copy, csrc/extension/sm90/dense_fp8).
    """
    if len(q) > ROWS:
        pieces = zip(q.split(ROWS), visible.split(ROWS), strict=True)
        outs, lses = zip(
            *(attend(some, k, v, seen, softmax_scale, weights_dtype) for some, seen in pieces), strict=True
        )
        return torch.cat(outs), torch.cat(lses)
    rows, heads, _ = q.shape
    n = int(visible.max())
    stacked = k.shape[1] == 1  # then the heads of a row are rows of one product
    q = q.flatten(0, 1)[None] if stacked else q.transpose(0, 1)  # [K, T * H / K, d]
    visible = visible.repeat_interleave(heads) if stacked else visible
    scores = q @ k[:n].permute(1, 2, 0) * softmax_scale  # [K, .., n]
    scores.masked_fill_(torch.arange(n, device=q.device) >= visible[:, None], -torch.inf)
    blocks = F.pad(scores, (0, -n % BLOCK_KEYS), value=-torch.inf).unflatten(-1, (-1, BLOCK_KEYS))  # [.., blocks, 64]
    highest = blocks.amax(-1).flip(-1).cummax(-1).values.flip(-1)  # [.., blocks], of a block and those behind it
    weights = torch.exp(blocks - highest.masked_fill(highest == -torch.inf, 0.0)[..., None])
    shrink = torch.exp(highest - highest[..., :1])  # what an accumulator is multiplied by until the end
    total = (weights.sum(-1) * shrink).sum(-1)  # [K, ..]
    if weights_dtype is not None:
        weights = (to_fp8(weights) if weights_dtype == FP8 else weights.to(weights_dtype)).to(weights.dtype)
    weights = (weights * shrink[..., None]).flatten(-2)[..., :n]
    out = weights @ v[:n].transpose(0, 1) / total[..., None]  # [K, .., dv]
    lse = highest[..., 0] + torch.log(total)
    if stacked:
        return out[0].unflatten(0, (rows, heads)), lse[0].unflatten(0, (rows, heads))
    return out.transpose(0, 1), lse.transpose(0, 1)


class ServedLayer:
    """One layer's products with the rounding of a server.

    Args:
        layer: of transformers' model.
        rounds: False computes everything in the precision of the weights.
    """

    def __init__(self, layer: nn.Module, rounds: bool) -> None:
        self.layer, self.attention, self.rounds = layer, layer.self_attn, rounds
        self.heads, self.softmax_scale = self.attention.num_heads, self.attention.scaling
        self.rank = self.attention.kv_lora_rank
        self.dims = dict(qk_nope_head_dim=self.attention.qk_nope_head_dim, v_head_dim=self.attention.v_head_dim)
        both = self.attention.kv_b_proj.weight.unflatten(0, (self.heads, -1))  # [H, dn + dv, r]
        w_kc, w_vc = both.split(tuple(self.dims.values()), dim=1)
        self.w_kc, self.w_vc = w_kc, w_vc.transpose(1, 2)  # [H, dn, r], [H, r, dv]
        self.weights_dtype = torch.bfloat16 if rounds else None

    def round(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).to(x.dtype) if self.rounds else x

    def project(self, x: Tensor, *modules: nn.Module) -> Tensor:
        """Products and norms one after another."""
        for module in modules:
            x = self.round(module(x))
        return x

    def before(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Query, Rows]:
        """Queries and latent rows of hidden states `[n, hidden]`; turns: of the model's rotary module."""
        attention, rope = self.attention, self.attention.qk_rope_head_dim
        x = self.project(x, self.layer.input_layernorm)
        q = self.project(x, attention.q_a_proj, attention.q_a_layernorm, attention.q_b_proj)
        nope, q_rope = q.unflatten(-1, (self.heads, -1)).split((attention.qk_nope_head_dim, rope), dim=-1)
        latent, k_rope = self.project(x, attention.kv_a_proj_with_mqa).split((self.rank, rope), dim=-1)
        latent = self.project(latent, attention.kv_a_layernorm)
        q_rope, k_rope = apply_rotary_pos_emb_interleave(q_rope[None], k_rope[None, :, None], *turns, unsqueeze_dim=2)
        return Query(nope, self.round(q_rope[0])), Rows(latent, self.round(k_rope[0, :, 0]))

    def expand(self, rows: Rows) -> Expanded:
        """Expand in BF16."""
        k_nope, v = (self.round(part) for part in reference.expand(rows.latent, self.w_kc, self.w_vc))
        return Expanded(k_nope, rows.rope, v, torch.ones(self.heads, device=v.device))

    def expand_fp8(self, rows: Rows) -> Expanded:
        """Expand and read back as from a server's memory: e4m3 with scales from the weights, in chunks."""
        n, norm = len(rows.latent), self.attention.kv_a_layernorm.weight
        sizes = dict(layers=1, chunks=math.ceil(n / CHUNK_TOKENS), heads=self.heads, **self.dims)
        sizes |= dict(qk_rope_head_dim=self.attention.qk_rope_head_dim)
        buffers = ExpandedBuffers.allocate(**sizes, dtype=FP8, device=rows.latent.device)
        buffers.k_scale[0] = scale_bounds(self.round(self.w_kc * norm))
        buffers.v_scale[0] = scale_bounds(self.round(self.w_vc.transpose(1, 2) * norm))
        k_nope, v = reference.expand(rows.latent, self.w_kc, self.w_vc)  # the kernel rounds once, to e4m3
        for chunk in range(buffers.chunks):
            tokens = slice(chunk * CHUNK_TOKENS, (chunk + 1) * CHUNK_TOKENS)
            buffers.write(0, chunk, 0, k_nope[tokens], v[tokens], rows.rope[tokens])
        k_nope, v, k_rope = buffers.read(0, range(buffers.chunks), n)
        return Expanded(k_nope, k_rope.float(), v, buffers.k_scale[0])

    def naive(self, query: Query, keys: Expanded, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Attention in BF16 over keys and values per head: `out [T, H, dv]`, not rounded, and `lse [T, H]`."""
        k = torch.cat([keys.k_nope, keys.k_rope[:, None].expand(-1, self.heads, -1)], dim=-1)
        return attend(torch.cat(query, -1), k, keys.v, visible, self.softmax_scale, self.weights_dtype)

    def absorbed(self, query: Query) -> Tensor:
        """Return absorbed queries, `[T, H, r]`."""
        return self.round(torch.einsum("thd,hdr->thr", query.nope, self.w_kc))

    def values(self, out: Tensor) -> Tensor:
        """Return `[T, H, dv]` of attention over latent rows, `[T, H, r]`."""
        return self.round(torch.einsum("thr,hrd->thd", self.round(out), self.w_vc))

    def after(self, x: Tensor, heads: Tensor) -> Tensor:
        """The rest of the layer after attention, `heads [n, H, dv]`."""
        x = self.round(x + self.project(heads.flatten(-2), self.attention.o_proj))
        mlp, wide = self.layer.mlp, self.project(x, self.layer.post_attention_layernorm)
        gate, up = (self.project(wide, part) for part in (mlp.gate_proj, mlp.up_proj))
        return self.round(x + self.project(self.round(F.silu(gate) * up), mlp.down_proj))


@dataclass(frozen=True)
class PlainRows:
    """SGLang's latent cache and FlashMLA over it, in BF16 or in FP8.

    In FP8, rows and queries are cast to e4m3 with scale 1, rotary parts too, and weights as they are. (A cast of SGLang
    makes NaN of what is out of e4m3's range; here it saturates.)
    """

    fp8: bool = False

    def store(self, x: Tensor) -> Tensor:
        return to_fp8(x).to(x.dtype) if self.fp8 else x

    def keep(self, layer: ServedLayer, rows: Rows) -> Tensor:
        """Return rows as they are stored, `[n, 1, r + dr]`."""
        return self.store(torch.cat(rows, dim=-1))[:, None]

    def over(self, layer: ServedLayer, query: Query, keys: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
        """Return `out [T, H, r]`, not rounded, and `lse`."""
        q = self.store(torch.cat([layer.absorbed(query), query.rope], dim=-1))
        weights_dtype = FP8 if self.fp8 else layer.weights_dtype
        return attend(q, keys, keys[..., : layer.rank], visible, layer.softmax_scale, weights_dtype)

    def attend(self, layer: ServedLayer, query: Query, prefix: Tensor, own: Rows, visible: Tensor) -> Tensor:
        return layer.values(self.over(layer, query, torch.cat([prefix, self.keep(layer, own)]), visible)[0])


@dataclass(frozen=True)
class ScaledRows:
    """Latent rows in FP8 with scales, and SnapMLA's decode over them.

    Scales of a tensor (configuration C) are those of what is stored at once: one for the prefix, one for the own rows.
    """

    configuration: Configuration

    def keep(self, layer: ServedLayer, rows: Rows) -> Keys:
        if self.configuration == "per_token":
            return keys_of_rows(quantize(*rows), LatentRowLayout(layer.rank, rows.rope.shape[-1]))
        return round_keys(*rows, self.configuration)

    def attend(self, layer: ServedLayer, query: Query, prefix: Keys, own: Rows, visible: Tensor) -> Tensor:
        stored = self.keep(layer, own)
        keys = Keys(*(torch.cat([getattr(part, name) for part in (prefix, stored)]) for name in vars(stored)))
        given = layer.absorbed(query), query.rope, keys, layer.softmax_scale, visible
        return layer.values(absorb_fp8(*given, power_of_two=self.configuration == "per_token")[0])


@dataclass(frozen=True)
class Hybrid:
    """The prefix expanded, own rows in the latent space in BF16, merged by lse.

    Args:
        wrong_base: the prefix's lse is passed on in base 2 and taken for a natural one; a study must notice it.
    """

    fp8: bool = False
    wrong_base: bool = False

    def keep(self, layer: ServedLayer, rows: Rows) -> Expanded:
        return layer.expand_fp8(rows) if self.fp8 else layer.expand(rows)

    def attend(self, layer: ServedLayer, query: Query, prefix: Expanded, own: Rows, visible: Tensor) -> Tensor:
        n, tails = len(prefix.v), PlainRows()
        out, lse = tails.over(layer, query, tails.keep(layer, own), visible - n)
        if self.fp8:
            shared = reference.naive_fp8(*query, *prefix, layer.softmax_scale)
        else:
            shared = layer.naive(query, prefix, torch.full_like(visible, n))
        shared_lse = shared[1] / math.log(2) if self.wrong_base else shared[1]
        return layer.round(reference.merge(shared[0], shared_lse, layer.values(out), lse)[0])


Impl = PlainRows | ScaledRows | Hybrid
SNAPMLA: dict[str, Configuration] = {
    "snapmla_config_a": "rope_too",
    "snapmla_config_b": "fixed",
    "snapmla_config_c": "per_tensor",
    "snapmla_config_d": "per_block",
}
"""The alternatives of SnapMLA's table 2, as records name them."""

BASELINE = "sglang_bf16"
IMPLS: dict[str, Impl] = {
    BASELINE: PlainRows(),
    "hybrid_mla": Hybrid(),
    "hybrid_mla_fp8_prefix": Hybrid(fp8=True),
    "hybrid_mla_fp8_rows": ScaledRows("per_token"),
    **{name: ScaledRows(configuration) for name, configuration in SNAPMLA.items()},
    "sglang_fp8": PlainRows(fp8=True),
    "wrong_lse_base": Hybrid(wrong_base=True),
}


class Served:
    """A network as a server computes it.

    Args:
        network: weights in float32 that BF16 has (in float64, with `rounds` False, for tests).
    """

    def __init__(self, network: DeepseekV3ForCausalLM, rounds: bool = True) -> None:
        self.network = network.requires_grad_(False)
        self.layers = [ServedLayer(layer, rounds) for layer in network.model.layers]

    def begin(self, start: int, tokens: list[int]) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
        """Return embeddings, turns and visible keys of tokens behind `start` others."""
        ids = torch.tensor(tokens, device=self.network.device)
        x, visible = self.network.model.embed_tokens(ids), start + torch.arange(1, len(ids) + 1, device=ids.device)
        return x, self.network.model.rotary_emb(x, visible[None] - 1), visible

    def walk(self, tokens: list[int]) -> Iterator[tuple[ServedLayer, Query, Rows]]:
        """Prefill, layer by layer: queries and rows of all tokens."""
        x, turns, visible = self.begin(0, tokens)
        for layer in self.layers:
            query, rows = layer.before(x, turns)
            yield layer, query, rows
            if layer is not self.layers[-1]:  # the last one's output is only for logits
                heads, _ = layer.naive(query, layer.expand(rows), visible)
                x = layer.after(x, layer.round(heads))

    def prefill(self, tokens: list[int]) -> list[Rows]:
        """The latent rows of each layer; at least one token."""
        return [rows for _, _, rows in self.walk(tokens)]

    def keep(self, impl: Impl, rows: list[Rows]) -> list[Any]:
        """Return what the implementation stores of a prefix, by layer."""
        return [impl.keep(layer, of_layer) for layer, of_layer in zip(self.layers, rows, strict=True)]

    def decode(self, impl: Impl, kept: list[Any], start: int, tokens: list[int]) -> Tensor:
        """Logits `[T, vocab]` after each of the tokens, which follow a prefix of `start` tokens."""
        x, turns, visible = self.begin(start, tokens)
        for layer, prefix in zip(self.layers, kept, strict=True):
            query, own = layer.before(x, turns)
            x = layer.after(x, impl.attend(layer, query, prefix, own, visible))
        return self.layers[-1].project(x, self.network.model.norm, self.network.lm_head)
