"""Absorbed queries into FP8: one scale per token and head, the rotary part divided by it, in one launch.

    content[t, h] = q_absorbed[t, h] / scale[t, h] in e4m3        rope[t, h] = q_rope[t, h] / scale[t, h] in BF16

The scale is that of latent_rows.row_scale, so that a score is (content · content + rope · rope) times the scales of
query and row. For triton_fp8_absorb.py; the Hopper kernels do the same themselves (sm90_parts/fp8_query.py).

Memory per token and head: reads 2·(r + dr) bytes of BF16, writes r + 4 + 2·dr (1,152 and 644 for DeepSeek-V3).

Source: SnapMLA, section 3.3.1 (Fused-Q-Quant) and equation 6.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..constants import FP8_MAX
from ..storage.append_latent import divide_row
from ..storage.latent_rows import SCALE_FLOOR, SCALE_LIMIT

NUM_WARPS = 1


@triton.jit(do_not_specialize=["heads"])
def quantize_query_kernel(
    q_absorbed_ptr,  # [T, H, R], strides q_row, q_head, q_dim
    q_rope_ptr,  # [T, H, DR], strides rope_row, rope_head, rope_dim
    content_ptr,  # e4m3 [T, H, R]
    scale_ptr,  # float32 [T, H]
    rope_ptr,  # BF16 [T, H, DR]
    heads,
    q_row,
    q_head,
    q_dim,
    rope_row,
    rope_head,
    rope_dim,
    R: tl.constexpr,
    DR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_DR: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
    FLOOR: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """One program: one head of one token."""
    index = tl.program_id(0).to(tl.int64)
    token, head = index // heads, index % heads
    dim, dim_rope = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_DR)
    in_r, in_rope = dim < R, dim_rope < DR
    content_ptrs = q_absorbed_ptr + token * q_row + head * q_head + dim * q_dim
    rope_ptrs = q_rope_ptr + token * rope_row + head * rope_head + dim_rope * rope_dim
    content = tl.load(content_ptrs, mask=in_r, other=0.0).to(tl.float32)
    rope = tl.load(rope_ptrs, mask=in_rope, other=0.0).to(tl.float32)
    content, scale, rope = divide_row(content, rope, FP8_LIMIT, FLOOR, LIMIT)
    tl.store(content_ptr + index * R + dim, content.to(content_ptr.dtype.element_ty), mask=in_r)
    tl.store(scale_ptr + index, scale)
    tl.store(rope_ptr + index * DR + dim_rope, rope.to(tl.bfloat16), mask=in_rope)


def quantize_query(q_absorbed: Tensor, q_rope: Tensor, content: Tensor, scale: Tensor, rope: Tensor) -> None:
    """Round absorbed queries to FP8. Capturable in a CUDA graph.

    Args:
        q_absorbed: `[T, H, r]`, `q_nope` times `w_kc`; q_rope: `[T, H, dr]`; BF16 or float32, any strides.
        content: `[T, H, r]` e4m3; scale: `[T, H]` float32; rope: `[T, H, dr]` BF16; written; contiguous.
        They are not checked here: `AbsorbFP8.run` has checked the queries, and the others are its own.
    """
    tokens, heads, rank = q_absorbed.shape
    dr = q_rope.shape[-1]
    if tokens * heads == 0:
        return
    quantize_query_kernel[(tokens * heads,)](
        q_absorbed,
        q_rope,
        content,
        scale,
        rope,
        heads,
        *q_absorbed.stride(),
        *q_rope.stride(),
        R=rank,
        DR=dr,
        BLOCK_R=triton.next_power_of_2(rank),
        BLOCK_DR=triton.next_power_of_2(dr),
        FP8_LIMIT=FP8_MAX,
        FLOOR=SCALE_FLOOR,
        LIMIT=SCALE_LIMIT,
        num_warps=NUM_WARPS,
    )
