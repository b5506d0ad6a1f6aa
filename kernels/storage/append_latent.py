"""Append latent rows to the FP8 pool: scale, round, divide the rotary part and write to the slots, in one launch.

    row[slots[t]] = latent[t] / scale in e4m3 | scale | rope[t] / scale in BF16      scale: latent_rows.row_scale

Memory per token: reads 2·(r + dr) + 8 bytes of BF16 and its slot, writes r + 4 + 2·dr bytes (1,160 and 644 for
DeepSeek-V3). The padding of a row is not written.

Source: SnapMLA, section 3.3.1 (Fused-K-Append) and equation 6.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..constants import FP8_MAX
from .latent_rows import SCALE_FLOOR, SCALE_LIMIT, LatentRowLayout

NUM_WARPS = 1
"""One warp for a row: 16 elements for each thread, and their maximum needs no shared memory."""


@triton.jit
def _largest(values):
    """The largest magnitude, or NaN if there is one: the bits of magnitudes, as integers, are in the same order, with
    NaN last."""
    return tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0).to(tl.float32, bitcast=True)


@triton.jit
def power_of_two_above(x):
    """The power of two at or above a positive normal number; 0 for 0."""
    return ((x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def divide_row(content, rope, FP8_LIMIT: tl.constexpr, FLOOR: tl.constexpr, LIMIT: tl.constexpr):
    """latent_rows.divide of one row, float32: content that e4m3 can hold, scale, divided rotary part."""
    largest, largest_rope = _largest(content), _largest(rope)
    finite = (largest < float("inf")) & (largest_rope < float("inf"))
    # A correctly rounded division, as in the reference: a plain one is not, and could end on another power of two.
    scale = tl.maximum(tl.div_rn(largest, FP8_LIMIT), tl.maximum(largest_rope, 1.0) * FLOOR)
    scale = tl.minimum(power_of_two_above(tl.where(finite, scale, 1.0)), LIMIT)
    factor = tl.div_rn(1.0, scale)  # exact, and so are the products with it
    content = tl.clamp(content * factor, -FP8_LIMIT, FP8_LIMIT)
    return tl.where(finite, content, 0.0), tl.where(finite, scale, float("nan")), tl.where(finite, rope * factor, 0.0)


@triton.jit
def append_latent_kernel(
    latent_ptr,  # [n, R], strides latent_row, 1
    rope_ptr,  # [n, DR], strides rope_row, 1
    slots_ptr,  # int32 or int64 [n]
    content_ptr,  # e4m3 [slots, R], strides row_bytes, 1
    scale_ptr,  # float32 [slots], stride row_bytes / 4
    rope_out_ptr,  # BF16 [slots, DR], strides row_bytes / 2, 1
    latent_row,
    rope_row,
    row_bytes,
    R: tl.constexpr,
    DR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_DR: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
    FLOOR: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """One program: one row."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        dim, dim_rope = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_DR)
        in_r, in_rope = dim < R, dim_rope < DR
        content = tl.load(latent_ptr + token * latent_row + dim, mask=in_r, other=0.0).to(tl.float32)
        rope = tl.load(rope_ptr + token * rope_row + dim_rope, mask=in_rope, other=0.0).to(tl.float32)
        content, scale, rope = divide_row(content, rope, FP8_LIMIT, FLOOR, LIMIT)
        tl.store(content_ptr + slot * row_bytes + dim, content.to(content_ptr.dtype.element_ty), mask=in_r)
        tl.store(scale_ptr + slot * (row_bytes // 4), scale)
        tl.store(rope_out_ptr + slot * (row_bytes // 2) + dim_rope, rope.to(tl.bfloat16), mask=in_rope)


def append_latent(latent: Tensor, rope: Tensor, slots: Tensor, pool: Tensor) -> None:
    """Write n latent rows to slots of the pool; no other byte of it changes. Capturable in a CUDA graph.

    Args:
        latent: `[n, r]`, the content after its norm; rope: `[n, dr]`; BF16 or float32, both the same, any row strides,
            last axes contiguous.
        slots: `[n]` int32 or int64, contiguous; a negative one skips its row. Not checked against the pool, and two
            equal ones leave a mixture.
        pool: `[slots, row_bytes]` uint8, see latent_rows.LatentRowLayout.
    Raises:
        ValueError: a shape, dtype, stride or device is not as above.
    """
    layout = LatentRowLayout(latent.shape[-1], rope.shape[-1])
    n = check_rows(latent, rope, slots, pool, layout)
    if n == 0:
        return
    append_latent_kernel[(n,)](
        latent,
        rope,
        slots,
        layout.content(pool),
        layout.scale(pool),
        layout.rope(pool),
        latent.stride(0),
        rope.stride(0),
        pool.stride(0),
        R=layout.kv_lora_rank,
        DR=layout.qk_rope_head_dim,
        BLOCK_R=triton.next_power_of_2(layout.kv_lora_rank),
        BLOCK_DR=triton.next_power_of_2(layout.qk_rope_head_dim),
        FP8_LIMIT=FP8_MAX,
        FLOOR=SCALE_FLOOR,
        LIMIT=SCALE_LIMIT,
        num_warps=NUM_WARPS,
    )


def check_rows(latent: Tensor, rope: Tensor, slots: Tensor, pool: Tensor, layout: LatentRowLayout) -> int:
    """The number of rows of latent, rope and slots, after the checks of `append_latent` and `fetch_latent`."""
    layout.check(pool)
    if pool.ndim != 2:
        raise ValueError(f"the pool must be [slots, {layout.row_bytes}], not {list(pool.shape)}")
    if latent.dtype not in (torch.bfloat16, torch.float32) or rope.dtype != latent.dtype:
        raise ValueError(
            f"latent and rope must be bfloat16 or float32, both the same, not {latent.dtype} and {rope.dtype}"
        )
    n = slots.numel()
    for name, tensor, dim in (
        ("latent", latent, layout.kv_lora_rank),
        ("rope", rope, layout.qk_rope_head_dim),
    ):
        if tensor.shape != (n, dim):
            raise ValueError(f"{name} must be {[n, dim]} for {n} slots, not {list(tensor.shape)}")
        if tensor.stride(1) != 1:
            raise ValueError(f"the last axis of {name} must be contiguous; its strides are {tensor.stride()}")
    if slots.ndim != 1 or slots.dtype not in (torch.int32, torch.int64) or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous int32 or int64 [n], not {slots.dtype} {list(slots.shape)}")
    for name, tensor in dict(latent=latent, rope=rope, slots=slots).items():
        if tensor.device != pool.device:
            raise ValueError(f"{name} is on {tensor.device}, but the pool is on {pool.device}")
    return n
