"""Merge the attention over private tails with all partial results over shared prefixes, by lse.

    lse = ln(exp(tail_lse) + Σ_s exp(lse_s))        out = exp(tail_lse - lse) · tail_out + Σ_s exp(lse_s - lse) · out_s

Memory per row and head: reads dv·2 + 4 bytes of the tail (BF16) and splits·(dv + 1)·4 bytes of partials (half of that
in BF16), writes dv·2 (and 4 with lse). A row without a shared prefix that is merged in place costs only the read of
its lse.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .schedule import ITEM_FIELDS, WorkListCapacity

LN2 = 0.6931471805599453
LOG2E = 1.4426950408889634
BLOCK_HEADS = 4
SPLITS_IN_FLIGHT = 4


@triton.jit
def merge_kernel(
    tail_out_ptr,  # [T, H, DV], strides tail_row, tail_head, 1
    tail_lse_ptr,  # float32 [T, H], strides tail_lse_row, tail_lse_head
    partial_out_ptr,  # float32 or BF16 [P, H, DV]
    partial_lse2_ptr,  # float32 [P, H]
    work_ptr,  # int32, see schedule.WorkList
    out_ptr,  # [T, H, DV], strides out_row, out_head, 1
    lse_ptr,  # float32 [T, H], strides lse_row, lse_head
    heads,
    max_rows,
    tail_row,
    tail_head,
    tail_lse_row,
    tail_lse_head,
    out_row,
    out_head,
    lse_row,
    lse_head,
    DV: tl.constexpr,
    ITEM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    UNROLL: tl.constexpr,
    IN_PLACE: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    LN2: tl.constexpr,
    LOG2E: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # [BLOCK_HEADS]
    dim = tl.arange(0, DV)
    in_heads = head < heads
    per_row_ptr = work_ptr + ITEM + max_rows + row
    partial_start = tl.load(per_row_ptr).to(tl.int64)
    partial_stride = tl.load(per_row_ptr + max_rows)
    splits = tl.load(per_row_ptr + 2 * max_rows)

    row64 = row.to(tl.int64)
    tail_lse = tl.load(tail_lse_ptr + row64 * tail_lse_row + head * tail_lse_head, mask=in_heads, other=0.0)
    empty = tl.abs(tail_lse) == float("inf")  # [BLOCK_HEADS]
    some_empty = tl.max(empty.to(tl.int32), 0)

    if not IN_PLACE or splits + some_empty > 0:
        tail_ptr = tail_out_ptr + row64 * tail_row + (head * tail_head)[:, None] + dim[None, :]
        has_tail = in_heads & ~empty
        acc = tl.load(tail_ptr, mask=has_tail[:, None], other=0.0).to(tl.float32)  # [BLOCK_HEADS, DV]
        run_max = tl.where(empty, -1e30, tail_lse)  # natural log; below every lse where there is no key yet
        run_sum = tl.where(empty, 0.0, 1.0)
        for split in tl.range(0, splits, loop_unroll_factor=UNROLL):
            partial = (partial_start + split * partial_stride) * heads + head  # [BLOCK_HEADS]
            part_lse = tl.load(partial_lse2_ptr + partial, mask=in_heads, other=0.0) * LN2
            part_out = tl.load(
                partial_out_ptr + partial[:, None] * DV + dim[None, :], mask=in_heads[:, None], other=0.0
            ).to(tl.float32)  # [BLOCK_HEADS, DV]
            new_max = tl.maximum(run_max, part_lse)
            rescale = tl.exp2((run_max - new_max) * LOG2E)
            weight = tl.exp2((part_lse - new_max) * LOG2E)
            acc = acc * rescale[:, None] + part_out * weight[:, None]
            run_sum = run_sum * rescale + weight
            run_max = new_max
        no_key = run_sum == 0.0
        acc = acc / tl.where(no_key, 1.0, run_sum)[:, None]
        out_ptrs = out_ptr + row64 * out_row + (head * out_head)[:, None] + dim[None, :]
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_heads[:, None])
        if WRITE_LSE:
            lse = tl.where(no_key, float("-inf"), run_max + tl.log2(tl.where(no_key, 1.0, run_sum)) * LN2)
            tl.store(lse_ptr + row64 * lse_row + head * lse_head, lse, mask=in_heads)
    elif WRITE_LSE:
        tl.store(lse_ptr + row64 * lse_row + head * lse_head, tail_lse, mask=in_heads)


def merge(
    tail_out: Tensor,
    tail_lse: Tensor,
    partial_out: Tensor,
    partial_lse2: Tensor,
    work: Tensor,
    capacity: WorkListCapacity,
    out: Tensor,
    lse: Tensor | None = None,
) -> Tensor:
    """Merge tails and partials into `out`, which may be `tail_out`, and `lse`, which may be `tail_lse`.

    Args:
        tail_out: `[T, H, dv]` BF16 or float32; tail_lse: `[T, H]` float32, natural log, -inf or +inf for an empty tail
            (its `tail_out` is not used). Any row and head strides, last axis of tail_out contiguous.
        partial_out: `[P, H, dv]` float32, from naive_prefix.run, or BF16; partial_lse2: `[P, H]` float32, base 2; both
            contiguous.
        work: int32, at least the `used` part of a schedule.WorkList, or a schedule.row_table; read on the device only.
        out: `[T, H, dv]`, last axis contiguous; lse: `[T, H]` float32, natural log.
    Returns:
        `out`; rows with no key at all are 0 and -inf.
    Raises:
        ValueError: a shape, dtype or stride is not as above, or T is more than the work list's rows.
    """
    rows, heads, dv = tail_out.shape
    if rows > capacity.max_rows:
        raise ValueError(f"tail_out has {rows} rows, but the plan is for at most {capacity.max_rows}")
    if dv & (dv - 1):
        raise ValueError(f"v_head_dim must be a power of two, not {dv}")
    if partial_out.shape[1:] != (heads, dv) or partial_lse2.shape != partial_out.shape[:2]:
        raise ValueError(
            f"partial_out {list(partial_out.shape)} and partial_lse2 {list(partial_lse2.shape)} do not fit "
            f"tail_out {list(tail_out.shape)}"
        )
    if not (partial_out.is_contiguous() and partial_lse2.is_contiguous()):
        raise ValueError("partial_out and partial_lse2 must be contiguous")
    if out.shape != tail_out.shape:
        raise ValueError(f"out must be {list(tail_out.shape)}, not {list(out.shape)}")
    for name, tensor in (("tail_out", tail_out), ("out", out)):
        if tensor.stride(2) != 1:
            raise ValueError(f"the last axis of {name} must be contiguous; its strides are {tensor.stride()}")
    for name, tensor in (("tail_lse", tail_lse), ("lse", tail_lse if lse is None else lse)):
        if tensor.shape != (rows, heads) or tensor.dtype != torch.float32:
            raise ValueError(f"{name} must be float32 {[rows, heads]}, not {tensor.dtype} {list(tensor.shape)}")
    written_lse = tail_lse if lse is None else lse
    same_memory = out.data_ptr() == tail_out.data_ptr() and out.stride() == tail_out.stride()
    merge_kernel[(rows, triton.cdiv(heads, BLOCK_HEADS))](
        tail_out,
        tail_lse,
        partial_out,
        partial_lse2,
        work,
        out,
        written_lse,
        heads,
        capacity.max_rows,
        tail_out.stride(0),
        tail_out.stride(1),
        tail_lse.stride(0),
        tail_lse.stride(1),
        out.stride(0),
        out.stride(1),
        written_lse.stride(0),
        written_lse.stride(1),
        DV=dv,
        ITEM=ITEM_FIELDS,
        BLOCK_HEADS=BLOCK_HEADS,
        UNROLL=SPLITS_IN_FLIGHT,
        IN_PLACE=same_memory and out.dtype == tail_out.dtype,
        WRITE_LSE=lse is not None,
        LN2=LN2,
        LOG2E=LOG2E,
        num_warps=4,
    )
    return out
