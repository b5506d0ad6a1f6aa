"""Numbers that several kernels share. Kernels get them as constexpr parameters or wrap them in `gl.constexpr`."""

from __future__ import annotations

import math

import torch

LOG2E = math.log2(math.e)
"""Base-2 exponents of a natural-log one: exp(x) = exp2(x · LOG2E)."""

LN2 = math.log(2.0)
"""A natural-log lse of a base-2 one: lse = lse2 · LN2."""

FP8 = torch.float8_e4m3fn
"""The 8-bit floating point dtype of expanded prefixes, of FP8 latent rows and of the matrix unit."""

FP8_MAX = 448.0
"""Largest finite number of `FP8`."""

LOG2_FP8_MAX = math.log2(FP8_MAX)
"""Softmax weights are scaled up to `FP8_MAX` before they are rounded to FP8: this is added to their exponent."""


def is_block_dim(dim: int) -> bool:
    """Return whether a block of Triton's products can have this length: a power of two, at least 16."""
    return dim >= 16 and dim & (dim - 1) == 0


def block_of(dim: int) -> int:
    """The block that holds a dimension which need not fill it: what is behind it is 0 where it is copied."""
    return 1 << (dim - 1).bit_length()


def supports_heads(qk_nope_head_dim: int, v_head_dim: int, qk_rope_head_dim: int) -> bool:
    """Return whether keys and values per head can have these dimensions: at most 256, and such that rows begin at whole
    16 bytes in every dtype."""
    parts = (v_head_dim, qk_rope_head_dim)
    return qk_nope_head_dim % 16 == 0 and all(map(is_block_dim, parts)) and max(qk_nope_head_dim, *parts) <= 256


def check_heads(qk_nope_head_dim: int, v_head_dim: int, qk_rope_head_dim: int) -> None:
    """
    Raises:
        ValueError: keys and values per head cannot have these dimensions.
    """
    if not supports_heads(qk_nope_head_dim, v_head_dim, qk_rope_head_dim):
        raise ValueError(
            "qk_nope_head_dim must be a multiple of 16, v_head_dim and qk_rope_head_dim powers of two from 16 on, none "
            f"above 256; not {qk_nope_head_dim}, {v_head_dim} and {qk_rope_head_dim}"
        )
