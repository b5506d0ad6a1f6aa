"""Numbers that several kernels share. Kernels get them as constexpr parameters or wrap them in `gl.constexpr`."""

from __future__ import annotations

import math

import torch

from .sizes import CHUNK_TOKENS as CHUNK_TOKENS
from .sizes import PAGE_TOKENS as PAGE_TOKENS

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

LATENT_DIMS = (512, 64)
"""Content and rotary part of a latent row, as the kernels for Hopper take them."""


def is_block_dim(dim: int) -> bool:
    """Whether a block of Triton's products can be as long: a power of two, of at least 16."""
    return dim >= 16 and dim & (dim - 1) == 0
