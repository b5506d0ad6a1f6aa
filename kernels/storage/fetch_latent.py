"""Read rows of the FP8 latent pool back as latents and rotary keys, in one launch; no other row is read.

    latent[t] = e4m3 content of row slots[t] · its scale        rope[t] = its stored rotary part · its scale

Memory per token: reads r + 4 + 2·dr + 8 bytes, its slot among them, writes 2·(r + dr) in BF16 (652 and 1,152 for
DeepSeek-V3).

Source: SnapMLA, section 3.3.1 (Fused-Fetch-Dequant).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .append_latent import check_rows
from .latent_rows import LatentRowLayout

NUM_WARPS = 1


@triton.jit
def fetch_latent_kernel(
    content_ptr,  # e4m3 [slots, R], strides row_bytes, 1
    scale_ptr,  # float32 [slots], stride row_bytes / 4
    rope_ptr,  # BF16 [slots, DR], strides row_bytes / 2, 1
    slots_ptr,  # int32 or int64 [n]
    latent_out_ptr,  # [n, R], strides latent_row, 1
    rope_out_ptr,  # [n, DR], strides rope_row, 1
    row_bytes,
    latent_row,
    rope_row,
    R: tl.constexpr,
    DR: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_DR: tl.constexpr,
):
    """One program: one row."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if slot >= 0:
        dim, dim_rope = tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_DR)
        in_r, in_rope = dim < R, dim_rope < DR
        content = tl.load(content_ptr + slot * row_bytes + dim, mask=in_r)
        rope = tl.load(rope_ptr + slot * (row_bytes // 2) + dim_rope, mask=in_rope)
        scale = tl.load(scale_ptr + slot * (row_bytes // 4))
        latent = (content.to(tl.float32) * scale).to(latent_out_ptr.dtype.element_ty)
        rope = (rope.to(tl.float32) * scale).to(rope_out_ptr.dtype.element_ty)
        tl.store(latent_out_ptr + token * latent_row + dim, latent, mask=in_r)
        tl.store(rope_out_ptr + token * rope_row + dim_rope, rope, mask=in_rope)


def fetch_latent(pool: Tensor, slots: Tensor, latent: Tensor, rope: Tensor) -> None:
    """Read n rows of the pool into `latent` and `rope`. Capturable in a CUDA graph.

    Args:
        pool: `[slots, row_bytes]` uint8, see latent_rows.LatentRowLayout.
        slots: `[n]` int32 or int64, contiguous; a negative one leaves its row of the results as it is. Not checked
            against the pool.
        latent: `[n, r]`; rope: `[n, dr]`; written; BF16 or float32, both the same, any row strides, last axes
            contiguous.
    Raises:
        ValueError: a shape, dtype, stride or device is not as above.
    """
    layout = LatentRowLayout(latent.shape[-1], rope.shape[-1])
    n = check_rows(latent, rope, slots, pool, layout)
    if n == 0:
        return
    fetch_latent_kernel[(n,)](
        layout.content(pool),
        layout.scale(pool),
        layout.rope(pool),
        slots,
        latent,
        rope,
        pool.stride(0),
        latent.stride(0),
        rope.stride(0),
        R=layout.kv_lora_rank,
        DR=layout.qk_rope_head_dim,
        BLOCK_R=triton.next_power_of_2(layout.kv_lora_rank),
        BLOCK_DR=triton.next_power_of_2(layout.qk_rope_head_dim),
        num_warps=NUM_WARPS,
    )
