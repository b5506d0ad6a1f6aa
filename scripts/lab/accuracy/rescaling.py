"""Attention in plain torch with weights in BF16 or FP16, and four ways to rescale its accumulator, AMLA's among them.

It shows how much error these rounding steps alone cause. A matrix product of rounded operands is computed as a float32
product of the same values.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

Rescale = Literal["multiply", "add", "add_uncompensated", "lattice"]
"""Ways in which an accumulator follows a growing maximum m of its row.

multiply: by exp(m_old - m_new), as everywhere. add: AMLA, by an integer added to the bits of its floats. With exp(-m) =
2^k · f, k an integer and f in [1/sqrt(2), sqrt(2)], the accumulator is kept divided by f, and then only 2^k changes;
the weights are divided by f before they are rounded. The factor 1/f is itself rounded to the weights' dtype, and what
that rounding changes from one block to the next is added, too (appendix A). add_uncompensated: the same without
rounding 1/f and without this addition. lattice: m is rounded up to a multiple of ln 2, so that f is 1: the integer is
exact and mostly 0, and nothing needs compensation. The largest weight of a row is then no longer 1, which every dtype
has, so the sum is of the rounded weights: what rounding does to one that dominates its row cancels.
"""


def flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float,
    *,
    rescale: Rescale = "multiply",
    dtype: torch.dtype = torch.bfloat16,
    block_keys: int = 512,
) -> Tensor:
    """Compute attention with weights rounded to `dtype` before they meet the values, sums in float32.

    Args:
        q: `[H, d]`; k: `[n, d]`; v: `[n, dv]`; taken as they are.
        block_keys: keys between two rescales; 512 in AMLA, section 4.2.
    Returns:
        `[H, dv]` float32, not rounded.
    Source: FlashAttention-2 for multiply; AMLA, equations 4 and 9 and appendix A (algorithm 2) for add.
    """
    q, k, v = q.float(), k.float(), v.float()
    row_max = torch.full((len(q), 1), -torch.inf, device=q.device)  # [H, 1]; in lattice, a multiple of ln 2
    total, acc = torch.zeros_like(row_max), torch.zeros(len(q), v.shape[1], device=q.device)
    exponent, factor, error = torch.zeros_like(row_max), torch.ones_like(row_max), torch.ones_like(row_max)
    for keys, values in zip(k.split(block_keys), v.split(block_keys), strict=True):
        scores = q @ keys.T * softmax_scale  # [H, keys]
        new_max = torch.maximum(row_max, scores.amax(dim=-1, keepdim=True))
        if rescale == "lattice":
            new_max = torch.ceil(new_max / math.log(2)) * math.log(2)
        weights = torch.exp(scores - new_max)
        shrink = torch.exp(row_max - new_max)  # 0 for the first block
        summed = weights.to(dtype).float() if rescale == "lattice" else weights
        total = total * shrink + summed.sum(dim=-1, keepdim=True)
        if rescale == "multiply":
            acc = acc * shrink
        else:
            new_exponent = torch.round(-new_max / math.log(2))  # k, [H, 1]
            exact = torch.exp(new_max + new_exponent * math.log(2))  # 1/f
            # The accumulator's own factor: in `add` it is what the weights are really multiplied by.
            factor = {"lattice": torch.ones_like(exact), "add": exact.to(dtype).float()}.get(rescale, exact)
            new_error = factor / exact
            step = torch.where(row_max == -torch.inf, 0.0, new_exponent - exponent)
            change = torch.where(row_max == -torch.inf, 0.0, new_error / error - 1)
            acc = multiply_by_add(acc, step, change if rescale == "add" else torch.zeros_like(change))
            exponent, error, weights = new_exponent, new_error, weights * factor
        acc = acc + weights.to(dtype).float() @ values
        row_max = new_max
    return acc / (total * factor)


def multiply_by_add(values: Tensor, exponent: Tensor, change: Tensor) -> Tensor:
    """values · 2^exponent · (1 + change) by one integer added to the bits of the values.

    Exact where change is 0. Otherwise an integer change of 1.5 · change · 2^23: right for a mantissa of 1.5, and up to
    a third of `change` wrong at the ends (AMLA, appendix A). Zeros, which an addition would turn into numbers, stay
    zeros, and so become subnormal numbers and what would fall below the normal ones. NaN and infinities stay.

    Args:
        values: `[.., n]` float32; exponent: `[.., 1]` integers in float32, any size below 0; change: `[.., 1]`.
    Source: AMLA, lemma 3.1 and equation 15.
    """
    steps = exponent.clamp(-256, 256) + 1.5 * change
    added = torch.round(steps.double() * 2**23).to(torch.int64)  # wider than the bits: no overflow
    bits = values.view(torch.int32).to(torch.int64)
    magnitude = bits & 0x7FFFFFFF
    moved = torch.where(magnitude + added >= 2**31 - 2**23, 2**31 - 2**23, magnitude + added)  # infinity
    moved = torch.where((magnitude < 2**23) | (moved < 2**23), 0, moved)
    moved = torch.where(magnitude >= 2**31 - 2**23, magnitude, moved)
    return torch.copysign(moved.to(torch.int32).view(torch.float32), values)
