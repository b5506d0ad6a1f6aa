"""Attention over latent rows with the rounding steps of low-precision kernels, in plain torch, float32.

`absorb_fp8` is SnapMLA's decode step by step. It shows how much error those rounding steps alone cause, which is all
that a kernel may have; the exact reference is attention.absorb in float64. A matrix product of rounded operands is
computed as a float32 product of the same values.

Shapes: T query tokens, H heads, n keys, r = kv_lora_rank, dr = qk_rope_head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..constants import FP8_MAX
from ..storage.expanded import to_fp8
from ..storage.latent_rows import SCALE_FLOOR, LatentRowLayout, divide, row_scale

BLOCK_KEYS = 64
"""Keys whose weights share a scale (SnapMLA, section 3.2.2), and the side of a block of the configuration per_block."""

WEIGHT_SCALE_RANGE = 2.0**-24
"""The scale of a block's weights is at least this part of the largest one of the blocks before it.

A block with a smaller scale contributes less than float32 resolves. If it used its own scale, the accumulator, which is
kept in units of the latest scale, would overflow; the paper does not say how it limits the ratio of its scales."""

Configuration = Literal["per_token", "snapmla", "rope_too", "fixed", "per_tensor", "per_block"]
"""Ways to round the cache: that of latent_rows, and those of SnapMLA, table 2, its own and A to D.

per_token: one scale per token, from its content, a power of two; rotary part in BF16. snapmla: the same with its scale
as it is. rope_too (A): one scale per token, from content and rotary part, both in e4m3. fixed (B): scale 1. per_tensor
(C): one scale for all content. per_block (D): one for each 64 tokens and 64 elements. Rotary parts are BF16 in B, C and
D.
"""


@dataclass(frozen=True)
class Keys:
    """Rounded latent rows of one request; true values are these times the scale of their row."""

    content: Tensor  # [n, r], values that e4m3 has (in per_block times their block's scale)
    rope: Tensor  # [n, dr], values that BF16 has (e4m3 in rope_too)
    scale: Tensor  # [n]


def keys_of_rows(rows: Tensor, layout: LatentRowLayout | None = None) -> Keys:
    """Keys as they are stored, `rows [n, row_bytes]` uint8; layout: DeepSeek-V3's if None."""
    layout = layout or LatentRowLayout()
    return Keys(layout.content(rows).float(), layout.rope(rows).float(), layout.scale(rows))


def round_keys(latent: Tensor, rope: Tensor, configuration: Configuration = "per_token") -> Keys:
    """Round latent rows as a configuration does.

    Args:
        latent: `[n, r]`; rope: `[n, dr]`.
    """
    latent, rope, n = latent.float(), rope.float(), len(latent)
    if configuration in ("per_token", "snapmla"):
        content, scale, rope = divide(latent, rope, power_of_two=configuration == "per_token")
        return Keys(content.float(), rope.float(), scale)
    if configuration == "rope_too":
        both = torch.cat([latent, rope], dim=-1)  # [n, r + dr]
        scale = row_scale(both, rope, power_of_two=False)
        rounded = to_fp8(both / scale[:, None]).float()
        return Keys(rounded[:, : latent.shape[1]], rounded[:, latent.shape[1] :], scale)
    if configuration == "per_block":
        content = torch.empty_like(latent)
        for token in range(0, n, BLOCK_KEYS):
            for dim in range(0, latent.shape[1], BLOCK_KEYS):
                where = slice(token, token + BLOCK_KEYS), slice(dim, dim + BLOCK_KEYS)
                scale = (latent[where].abs().amax() / FP8_MAX).clamp_min(SCALE_FLOOR)
                content[where] = to_fp8(latent[where] / scale).float() * scale
        return Keys(content, rope.to(torch.bfloat16).float(), latent.new_ones(n))
    scale = latent.new_tensor(1.0) if configuration == "fixed" else latent.abs().amax() / FP8_MAX
    scale = scale.clamp_min(SCALE_FLOOR)
    rope = (rope / scale).to(torch.bfloat16).float()
    return Keys(to_fp8(latent / scale).float(), rope, scale.expand(n))


def absorb_fp8(
    q_absorbed: Tensor,
    q_rope: Tensor,
    keys: Keys,
    softmax_scale: float,
    visible: Tensor | None = None,
    power_of_two: bool = True,
) -> tuple[Tensor, Tensor]:
    """SnapMLA's decode over the rows of one request, with its rounding steps in its order.

    A score is one product of rounded content and of rotary parts divided by the scales, times both scales. In the
    running softmax, 64 keys at a time: weights times the keys' scales, because a stored value is divided by it; these,
    divided by their block's maximum over 448, to e4m3; accumulator and sum of the weights are counted in units of the
    block's scale, so that nothing is multiplied by it at the end (implicit dequantisation). Blocks follow in order,
    so that scales are only ever carried forward.

    Args:
        q_absorbed: `[T, H, r]`; q_rope: `[T, H, dr]`.
        visible: `[T]` integers, each token sees the first so many keys (0 allowed); all if None.
        power_of_two: whether the scales of queries are, see latent_rows.row_scale.
    Returns:
        `out [T, H, r]` and `lse [T, H]`, float32, natural log; 0 and -inf where no key is visible.
    Source: SnapMLA, algorithm 1 and appendices B and C.
    """
    n = len(keys.scale)
    visible = torch.full((len(q_absorbed),), n, device=q_absorbed.device) if visible is None else visible
    q_content, q_scale, q_rope_rounded = (part.float() for part in divide(q_absorbed, q_rope, power_of_two))
    row_max = torch.full_like(q_scale, -torch.inf)  # [T, H]
    total, largest = torch.zeros_like(q_scale), torch.zeros_like(q_scale)
    weight_scale = torch.ones_like(q_scale)
    acc = torch.zeros_like(q_content)
    for start in range(0, int(visible.max()) if len(visible) else 0, BLOCK_KEYS):
        block = slice(start, min(start + BLOCK_KEYS, int(visible.max())))
        content, rope, scale = keys.content[block], keys.rope[block], keys.scale[block]
        scores = (q_content @ content.T + q_rope_rounded @ rope.T) * (q_scale[..., None] * scale) * softmax_scale
        hidden = torch.arange(block.start, block.stop, device=visible.device) >= visible[:, None]  # [T, keys]
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
        new_max = torch.maximum(row_max, scores.amax(dim=-1))
        shift = new_max.masked_fill(new_max == -torch.inf, 0.0)
        weights = torch.exp(scores - shift[..., None])  # [T, H, keys]
        weighted = weights * scale
        shrink = torch.exp(row_max - shift)
        own_scale = weighted.amax(dim=-1) / FP8_MAX
        largest = torch.maximum(largest * shrink, own_scale)
        new_scale = torch.maximum(own_scale, largest * WEIGHT_SCALE_RANGE).clamp_min(torch.finfo(torch.float32).tiny)
        carried = shrink * (weight_scale / new_scale)
        acc = acc * carried[..., None] + to_fp8(weighted / new_scale[..., None]).float() @ content
        total = total * carried + weights.sum(dim=-1) / new_scale
        row_max, weight_scale = new_max, new_scale
    none = total == 0
    lse = row_max + torch.log((weight_scale * total).masked_fill(none, 1.0))
    return acc / total.masked_fill(none, 1.0)[..., None], lse
