"""Join the two parts of absorbed queries, content and rotary, in one launch, as FlashMLA expects them.

    out[t, h] = content[t, h] | rope[t, h]

Where `out` has more heads, those are 0: rows that only fill up a strip of stacked queries (absorb/stacking.py).

Memory per token and head: reads and writes 2·(r + dr) bytes of BF16 (1,152 each for DeepSeek-V3).

This kernel must not allow the next one to start before it ends. FlashMLA is launched with programmatic dependent
launch, and some of its versions then read the query without waiting for the kernel before. SGLang's concat_mla_absorb_q
allows that early start, so it would be a race.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_ROWS = 8
NUM_WARPS = 4


@triton.jit(do_not_specialize=["rows"])
def join_parts_kernel(
    content_ptr,  # [T, H, R], strides content_token, content_head, 1
    rope_ptr,  # [T, H, DR], strides rope_token, rope_head, 1
    out_ptr,  # [T, OUT_HEADS, R + DR]
    rows,
    content_token,
    content_head,
    rope_token,
    rope_head,
    HEADS: tl.constexpr,
    OUT_HEADS: tl.constexpr,
    R: tl.constexpr,
    DR: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_DR: tl.constexpr,
):
    """One program: BLOCK_ROWS of the T · OUT_HEADS rows."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    in_rows = (row < rows)[:, None]
    token, head = (row // OUT_HEADS).to(tl.int64)[:, None], (row % OUT_HEADS).to(tl.int64)[:, None]
    has_head = in_rows & (head < HEADS)
    dim, dim_rope = tl.arange(0, BLOCK_R)[None, :], tl.arange(0, BLOCK_DR)[None, :]
    in_content, in_rope = in_rows & (dim < R), in_rows & (dim_rope < DR)
    content_ptrs = content_ptr + token * content_token + head * content_head + dim
    content = tl.load(content_ptrs, mask=has_head & (dim < R), other=0.0)
    rope_ptrs = rope_ptr + token * rope_token + head * rope_head + dim_rope
    rope = tl.load(rope_ptrs, mask=has_head & (dim_rope < DR), other=0.0)
    out_ptrs = out_ptr + row.to(tl.int64)[:, None] * (R + DR)
    tl.store(out_ptrs + dim, content, mask=in_content)
    tl.store(out_ptrs + R + dim_rope, rope, mask=in_rope)


def join_parts(content: Tensor, rope: Tensor, out: Tensor) -> None:
    """Write both parts into one tensor. Capturable in a CUDA graph.

    Args:
        content: `[T, H, r]`; rope: `[T, H, dr]`; any token and head strides, last axis contiguous.
        out: `[T, H or more, r + dr]`, contiguous, written; all three of one dtype.
    Raises:
        ValueError: a shape, dtype, stride or device is not as above.
    """
    tokens, heads, rank = content.shape
    dr, out_heads = rope.shape[-1], max(heads, out.shape[1])
    for name, tensor, shape in (
        ("content", content, (tokens, heads, rank)),
        ("rope", rope, (tokens, heads, dr)),
        ("out", out, (tokens, out_heads, rank + dr)),
    ):
        if tuple(tensor.shape) != shape or tensor.dtype != content.dtype:
            raise ValueError(f"{name} must be {list(shape)} {content.dtype}, not {list(tensor.shape)} {tensor.dtype}")
        if tensor.stride(2) != 1:
            raise ValueError(f"the last axis of {name} must be contiguous; its strides are {tensor.stride()}")
        if tensor.device != content.device:
            raise ValueError(f"{name} is on {tensor.device}, but content is on {content.device}")
    if not out.is_contiguous():
        raise ValueError("out must be contiguous")
    rows = tokens * out_heads
    if rows == 0:
        return
    join_parts_kernel[(triton.cdiv(rows, BLOCK_ROWS),)](
        content,
        rope,
        out,
        rows,
        *content.stride()[:2],
        *rope.stride()[:2],
        HEADS=heads,
        OUT_HEADS=out_heads,
        R=rank,
        DR=dr,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_R=triton.next_power_of_2(rank),
        BLOCK_DR=triton.next_power_of_2(dr),
        num_warps=NUM_WARPS,
    )
