"""Merge private tails with the results for sharded prefixes that each rank returns for its heads.

    lse = ln(exp(tail_lse) + exp(lse_r))        out = exp(tail_lse - lse) · tail_out + exp(lse_r - lse) · out_r

of the rank r that has the head. Memory per row and head: reads 2·(dv·2 + 4) bytes (BF16) and writes dv·2; where the
rank has no key for a row, the tail stands in its place, and only its lse is read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..constants import LOG2E
from ..reference import attention as reference
from ..watch import WATCH_ARGUMENTS, Watched, copy_watched

BLOCK_VALUES = 2048
"""Values of a program. With 512 there are 4,096 programs for 128 rows of 128 heads, which takes 3 us of a layer where
nothing is shared."""
NUM_WARPS = 4


@triton.jit(do_not_specialize=["number"])
def merge_ranks_kernel(
    tail_out_ptr,  # [T, H, DV], strides tail_row, tail_head, 1; written
    tail_lse_ptr,  # float32 [T, H], strides tail_lse_row, tail_lse_head
    out_ptr,  # [R, >= T, H / R, DV], strides out_rank, out_row, out_head, 1
    lse_ptr,  # float32 [R, >= T, H / R], strides lse_rank, lse_row, lse_head
    active_ptr,  # int32 [1]: 0 where ranks gave nothing back
    heads,
    rank_heads,
    tail_row,
    tail_head,
    tail_lse_row,
    tail_lse_head,
    out_rank,
    out_row,
    out_head,
    lse_rank,
    lse_row,
    lse_head,
    number,  # of this merge's layer, see watch.Watch; it and what follows to out_heads is not read unless WATCH
    target_ptr,
    watch_query_ptr,
    watch_out_ptr,
    watch_rows,
    q_ptr,
    rope_ptr,
    query_heads,
    q_row,
    q_head,
    rope_row,
    rope_head,
    out_heads,
    DV: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    WATCH: tl.constexpr,
    LOG2E: tl.constexpr,
):
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]  # [BLOCK_HEADS, 1]
    dim = tl.max_contiguous(tl.arange(0, DV), 4)[None, None, :]
    in_heads = head < heads
    watched = False
    if WATCH:
        watched = tl.load(target_ptr) == number
    given = in_heads & (tl.load(active_ptr) != 0)
    rank, at = (head // rank_heads).to(tl.int64), head % rank_heads
    lse = tl.load(lse_ptr + rank * lse_rank + row64 * lse_row + at * lse_head, mask=given, other=float("-inf"))
    shared = lse > float("-inf")
    if (tl.max(shared.to(tl.int32)) > 0) | watched:
        tail_lse = tl.load(tail_lse_ptr + row64 * tail_lse_row + head * tail_lse_head, mask=in_heads, other=0.0)
        has_tail = in_heads & (tl.abs(tail_lse) < float("inf"))
        # In base 2, so that a difference of equal numbers stays 0: a product in it may be fused with the subtraction.
        lse2, tail_lse2 = tl.where(shared, lse * LOG2E, -1e30), tl.where(has_tail, tail_lse * LOG2E, -1e30)
        most2 = tl.maximum(lse2, tail_lse2)
        weight = tl.where(shared, tl.exp2(lse2 - most2), 0.0)
        tail_weight = tl.where(has_tail, tl.exp2(tail_lse2 - most2), 0.0)
        total = weight + tail_weight
        tail_ptrs = tail_out_ptr + row64 * tail_row + (head * tail_head)[:, :, None] + dim
        out_ptrs = out_ptr + (rank * out_rank + row64 * out_row + at * out_head)[:, :, None] + dim
        tail = tl.load(tail_ptrs, mask=has_tail[:, :, None], other=0.0).to(tl.float32)  # [BLOCK_HEADS, 1, DV]
        out = tl.load(out_ptrs, mask=shared[:, :, None], other=0.0).to(tl.float32)
        merged = (tail * tail_weight[:, :, None] + out * weight[:, :, None]) / tl.where(total == 0.0, 1.0, total)[
            :, :, None
        ]
        tl.store(tail_ptrs, merged.to(tail_out_ptr.dtype.element_ty), mask=in_heads[:, :, None])
        if WATCH:
            copy_watched(
                tail_ptrs, in_heads, watched, row * heads + head, target_ptr, watch_query_ptr, watch_out_ptr,
                watch_rows, q_ptr, rope_ptr, query_heads, q_row, q_head, rope_row, rope_head, out_heads, RANK, ROPE,
                DV,
            )  # fmt: skip


def merge_ranks(
    tail_out: Tensor, tail_lse: Tensor, out: Tensor, lse: Tensor, active: Tensor, watched: Watched | None = None
) -> None:
    """Merge what ranks give back into `tail_out`, in place.

    Args:
        tail_out: `[T, H, dv]`; tail_lse: `[T, H]` float32, natural log, -inf or +inf for an empty tail.
        out: `[R, >= T, H / R, dv]`, of R ranks that have `H / R` heads each, in order; lse: `[R, >= T, H / R]` float32,
            natural log, -inf where a rank has no key for a row, whose `out` is not used then. Any strides, last axis of
            both outputs contiguous.
        active: `[1]` int32 on the device: 0 where ranks gave nothing back, and neither is read.
        watched: whose query and result to copy, if its layer is watched.
    Raises:
        ValueError: a shape or a dtype is not as above.
    """
    rows, heads, dv = tail_out.shape
    ranks, most_rows, rank_heads, _ = out.shape
    if ranks * rank_heads != heads or most_rows < rows or out.shape[3] != dv or lse.shape != out.shape[:3]:
        raise ValueError(f"out {list(out.shape)} and lse {list(lse.shape)} do not fit tail_out {list(tail_out.shape)}")
    if tail_lse.shape != (rows, heads) or tail_lse.dtype != torch.float32 or lse.dtype != torch.float32:
        raise ValueError(f"tail_lse {list(tail_lse.shape)} and lse must be float32, of {rows} rows and {heads} heads")
    if tail_out.stride(2) != 1 or out.stride(3) != 1 or dv & (dv - 1):
        raise ValueError("the last axis of outputs must be contiguous, and a power of two")
    block_heads = max(1, BLOCK_VALUES // dv)
    merge_ranks_kernel[(rows, triton.cdiv(heads, block_heads))](
        tail_out,
        tail_lse,
        out,
        lse,
        active,
        heads,
        rank_heads,
        *tail_out.stride()[:2],
        *tail_lse.stride(),
        *out.stride()[:3],
        *lse.stride(),
        **(watched.kernel_arguments(rows * heads, dv) if watched else dict.fromkeys(WATCH_ARGUMENTS, 0)),
        DV=dv,
        BLOCK_HEADS=block_heads,
        WATCH=watched is not None,
        LOG2E=LOG2E,
        num_warps=NUM_WARPS,
    )


def merge_ranks_torch(
    tail_out: Tensor, tail_lse: Tensor, out: Tensor, lse: Tensor, active: Tensor, watched: Watched | None = None
) -> None:
    """The same in torch; arguments as of `merge_ranks`."""
    rows, heads, _ = tail_out.shape
    out, lse = (part[:, :rows].transpose(0, 1).reshape(rows, heads, *part.shape[3:]) for part in (out, lse))
    tail_lse = tail_lse.masked_fill(tail_lse == torch.inf, -torch.inf)
    lse = lse.masked_fill(active == 0, -torch.inf)
    tail_out.copy_(reference.merge(out, lse, tail_out, tail_lse)[0])
    if watched is not None:
        watched.copy(tail_out)
