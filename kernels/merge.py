"""Merge the attention over private tails with all partial results over shared prefixes, by lse.

    lse = ln(exp(tail_lse) + Σ_s exp(lse_s))        out = exp(tail_lse - lse) · tail_out + Σ_s exp(lse_s - lse) · out_s

Memory per row and head: reads dv·2 + 4 bytes of the tail (BF16) and splits·(dv + 1)·4 bytes of partials (half of that
in BF16), writes dv·2 (and 4 with lse). A row that has one part, which stands where the output goes, costs only the read
of its lse.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .constants import LN2, LOG2E
from .partials import FIRSTS, PartialTable
from .watch import WATCH_ARGUMENTS, Watched, copy_watched

NUM_WARPS = 4
LARGE = 1 << 20
"""Values of the output from which on programs are many enough to fill a GPU with one partial after the other."""


class Shape(NamedTuple):
    """Heads, and partials at a time, of a program. More at a time are for rows with many of them, of which there are
    few: one after the other, a row with 132 took 40 us on an H200."""

    heads: int
    splits: int
    unroll: int


def shape_for(rows: int, heads: int, dv: int) -> Shape:
    """The shape for an output of this size."""
    if rows * heads * dv >= LARGE:
        return Shape(heads=4, splits=1, unroll=4)
    return Shape(heads=max(1, 512 // dv), splits=FIRSTS, unroll=1)


@triton.jit
def load_ids(
    list_ptr, more_list_ptr, first, count, first_count, SPLITS: tl.constexpr, MORE: tl.constexpr, CHECK: tl.constexpr
):
    """Partials of a row from the `first` on, `[SPLITS]`: of a list in one table, and behind it of that in the other.

    Each is loaded as a scalar: a vector of them would have to change its layout, through shared memory. Without CHECK,
    loads from list_ptr need not wait until the list's length is known; what is behind its end is of no use.
    """
    index = tl.arange(0, SPLITS)
    partials = tl.zeros([SPLITS], tl.int64)
    for k in tl.static_range(SPLITS):
        at = first + k
        partial = tl.load(list_ptr + at, mask=at < first_count, other=0) if CHECK else tl.load(list_ptr + at)
        if MORE:
            in_more = (at >= first_count) & (at < count)
            more = tl.load(more_list_ptr + at - first_count, mask=in_more, other=0)
            partial = tl.where(at < first_count, partial, more)
        partials = tl.where(index == k, partial.to(tl.int64), partials)
    return partials


@triton.jit
def sum_partials(
    partial_out_ptr,
    partial_lse2_ptr,
    partial,  # int64 [SPLITS], the row's first ones
    list_ptr,  # the row's partials
    more_list_ptr,
    count,  # of list_ptr and, if MORE, of more_list_ptr
    first_count,  # of list_ptr
    head,  # [BLOCK_HEADS, 1]
    heads,
    DV: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    SPLITS: tl.constexpr,
    UNROLL: tl.constexpr,
    MORE: tl.constexpr,
):
    """Sum a row's partials: weighted sum `[BLOCK_HEADS, 1, DV]`; sum of weights, largest lse2, `[BLOCK_HEADS, 1]`.

    No sum passes through shared memory: a thread has all splits of its columns, four in BF16 too (hence the hint). The
    maximum over the tile makes the compiler issue all loads of a tile before the first product; with one for each split
    it loads, waits and adds split by split.
    """
    dim = tl.max_contiguous(tl.arange(0, DV), 4)
    acc = tl.zeros([BLOCK_HEADS, 1, DV], tl.float32)
    run_sum = tl.zeros([BLOCK_HEADS, 1], tl.float32)
    run_max2 = tl.full([BLOCK_HEADS, 1], -1e30, tl.float32)  # below every lse where there is no key yet
    for first in tl.range(0, count, SPLITS, loop_unroll_factor=UNROLL):
        place = partial[None, :] * heads + head  # [BLOCK_HEADS, SPLITS]
        there = (first + tl.arange(0, SPLITS) < count)[None, :] & (head < heads)
        # Ahead of its use, so that loads of the next tile need not wait for their addresses.
        partial = load_ids(list_ptr, more_list_ptr, first + SPLITS, count, first_count, SPLITS, MORE, True)
        part_lse2 = tl.load(partial_lse2_ptr + place, mask=there, other=float("-inf"))
        part_out = tl.load(
            partial_out_ptr + place[:, :, None] * DV + dim[None, None, :], mask=there[:, :, None], other=0.0
        ).to(tl.float32)  # [BLOCK_HEADS, SPLITS, DV]
        new_max2 = tl.maximum(run_max2, tl.max(part_lse2, 1, keep_dims=True))
        rescale = tl.exp2(run_max2 - new_max2)
        weight = tl.exp2(part_lse2 - new_max2)
        acc = acc * rescale[:, :, None] + tl.sum(part_out * weight[:, :, None], 1, keep_dims=True)
        run_sum = run_sum * rescale + tl.sum(weight, 1, keep_dims=True)
        run_max2 = new_max2
    return acc, run_sum, run_max2


# Tables may be parts of work lists, which start anywhere.
@triton.jit(
    do_not_specialize=["max_rows", "more_max_rows", "number"],
    do_not_specialize_on_alignment=["table_ptr", "more_table_ptr"],
)
def merge_kernel(
    tail_out_ptr,  # [T, H, DV], strides tail_row, tail_head, 1
    tail_lse_ptr,  # float32 [T, H], strides tail_lse_row, tail_lse_head
    partial_out_ptr,  # float32 or BF16 [P, H, DV]
    partial_lse2_ptr,  # float32 [P, H]
    table_ptr,  # int32, see partials.PartialTable
    more_table_ptr,  # int32, likewise; not read unless MORE
    out_ptr,  # [T, H, DV], strides out_row, out_head, 1
    lse_ptr,  # float32 [T, H], strides lse_row, lse_head
    heads,
    max_rows,  # of table_ptr
    more_max_rows,  # of more_table_ptr
    tail_row,
    tail_head,
    tail_lse_row,
    tail_lse_head,
    out_row,
    out_head,
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
    SPLITS: tl.constexpr,
    UNROLL: tl.constexpr,
    MORE: tl.constexpr,
    IN_PLACE: tl.constexpr,
    OUT_IN_PARTIALS: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    WATCH: tl.constexpr,
    FIRSTS: tl.constexpr,
    LN2: tl.constexpr,
    LOG2E: tl.constexpr,
):
    row = tl.program_id(0)
    head = (tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]  # [BLOCK_HEADS, 1]
    dim = tl.max_contiguous(tl.arange(0, DV), 4)[None, None, :]  # as in sum_partials
    in_heads = head < heads
    watched = False
    if WATCH:
        watched = tl.load(target_ptr) == number  # here, where counts are waited for as well
    begin = tl.load(table_ptr + row)
    first_count = tl.load(table_ptr + max_rows + row)
    firsts_ptr = table_ptr + 2 * max_rows + row * FIRSTS
    list_ptr = table_ptr + (2 + FIRSTS) * max_rows + begin
    count, more_list_ptr = first_count, list_ptr
    if MORE:
        more_begin = tl.load(more_table_ptr + row)
        count += tl.load(more_table_ptr + more_max_rows + row)
        more_list_ptr = more_table_ptr + (2 + FIRSTS) * more_max_rows + more_begin
    partial = load_ids(firsts_ptr, more_list_ptr, 0, count, first_count, SPLITS, MORE, False)

    row64 = row.to(tl.int64)
    lse_ptrs = lse_ptr + row64 * lse_row + head * lse_head
    tail_lse = tl.load(tail_lse_ptr + row64 * tail_lse_row + head * tail_lse_head, mask=in_heads, other=0.0)
    empty = tl.abs(tail_lse) == float("inf")  # [BLOCK_HEADS, 1]
    some_empty = tl.max(empty.to(tl.int32))

    # What is watched is computed where it stands in its place, too, to the same bits: code behind both branches would
    # take registers of every merge, and a quarter of the time of a large one.
    if OUT_IN_PARTIALS and (first_count == 1) & (count == 1) & (not watched):  # it stands in its place
        if WRITE_LSE:
            only = tl.load(firsts_ptr).to(tl.int64)
            part_lse2 = tl.load(partial_lse2_ptr + only * heads + head, mask=in_heads)
            tl.store(lse_ptrs, part_lse2 * LN2, mask=in_heads)
    elif not IN_PLACE or (count + some_empty > 0) | watched:
        tail_ptr = tail_out_ptr + row64 * tail_row + (head * tail_head)[:, :, None] + dim
        has_tail = in_heads & ~empty
        tail_out = tl.load(tail_ptr, mask=has_tail[:, :, None], other=0.0).to(tl.float32)  # [BLOCK_HEADS, 1, DV]
        acc, part_sum, part_max2 = sum_partials(
            partial_out_ptr, partial_lse2_ptr, partial, list_ptr, more_list_ptr, count, first_count, head, heads,
            DV, BLOCK_HEADS, SPLITS, UNROLL, MORE,
        )  # fmt: skip
        # In base 2, so that a difference of equal numbers stays 0: a product in it may be fused with the subtraction.
        tail_max2 = tl.where(empty, -1e30, tail_lse * LOG2E)
        most2 = tl.maximum(part_max2, tail_max2)
        part_scale = tl.exp2(part_max2 - most2)
        tail_weight = tl.where(empty, 0.0, tl.exp2(tail_max2 - most2))
        total = part_sum * part_scale + tail_weight
        no_key = total == 0.0
        acc = acc * part_scale[:, :, None] + tail_out * tail_weight[:, :, None]
        acc = acc / tl.where(no_key, 1.0, total)[:, :, None]
        out_ptrs = out_ptr + row64 * out_row + (head * out_head)[:, :, None] + dim
        tl.store(out_ptrs, acc.to(out_ptr.dtype.element_ty), mask=in_heads[:, :, None])
        if WRITE_LSE:
            lse = (most2 + tl.log2(tl.where(no_key, 1.0, total))) * LN2
            lse = tl.where(no_key, float("-inf"), tl.where(part_sum == 0.0, tail_lse, lse))  # alone it stays as it is
            tl.debug_barrier()  # every warp has read tail_lse, which may be lse
            tl.store(lse_ptrs, lse, mask=in_heads)
        if WATCH:
            copy_watched(
                out_ptrs, in_heads, watched, row * heads + head, target_ptr, watch_query_ptr, watch_out_ptr,
                watch_rows, q_ptr, rope_ptr, query_heads, q_row, q_head, rope_row, rope_head, out_heads, RANK, ROPE,
                DV,
            )  # fmt: skip
    elif WRITE_LSE:
        tl.store(lse_ptrs, tail_lse, mask=in_heads)


def merge(
    tail_out: Tensor,
    tail_lse: Tensor,
    partial_out: Tensor,
    partial_lse2: Tensor,
    table: PartialTable,
    out: Tensor,
    lse: Tensor | None = None,
    more: PartialTable | None = None,
    out_in_partials: bool = False,
    watched: Watched | None = None,
) -> Tensor:
    """Merge tails and partials into `out`, which may be `tail_out`, and `lse`, which may be `tail_lse`.

    Args:
        tail_out: `[T, H, dv]` BF16 or float32; tail_lse: `[T, H]` float32, natural log, -inf or +inf for an empty tail
            (its `tail_out` is not used). Any row and head strides, last axis of tail_out contiguous.
        partial_out: `[P, H, dv]` float32 or BF16; partial_lse2: `[P, H]` float32, base 2; both contiguous.
        table: which partials each row has: a tensor on the device of the others, read on the device only.
        out: `[T, H, dv]`, last axis contiguous; lse: `[T, H]` float32, natural log.
        more: a second table of partials in the same tensors.
        out_in_partials: there are no tails, and `out` is `partial_out[first : first + T]` for some `first`. A row with
            one partial in `table` and none in `more` has it at `first + row`: its output is where it belongs already,
            and only its lse is written.
        watched: whose query and result to copy, if its layer is watched. Its queries are `[T', H', ..]` with
            `T' · H' == T · H`, or as many as it says: a row here may have the heads of several query tokens.
    Returns:
        `out`; rows with no key at all are 0 and -inf.
    Raises:
        ValueError: a shape, dtype or stride is not as above, or T is more than a table's rows.
    """
    rows, heads, dv = tail_out.shape
    for each in (table, more) if more else (table,):
        if rows > each.max_rows:
            raise ValueError(f"tail_out has {rows} rows, but the plan is for at most {each.max_rows}")
        if not isinstance(each.buffer, Tensor) or each.buffer.device != tail_out.device:
            raise ValueError(f"a table must be on the device of tail_out, {tail_out.device}")
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
    if out_in_partials:
        _check_rows_of(partial_out, out)
    written_lse = tail_lse if lse is None else lse
    same_memory = out.data_ptr() == tail_out.data_ptr() and out.stride() == tail_out.stride()
    shape = shape_for(rows, heads, dv)
    second = more or table
    watching = watched.kernel_arguments(rows * heads, dv) if watched else dict.fromkeys(WATCH_ARGUMENTS, 0)
    merge_kernel[(rows, triton.cdiv(heads, shape.heads))](
        tail_out,
        tail_lse,
        partial_out,
        partial_lse2,
        table.buffer,
        second.buffer,
        out,
        written_lse,
        heads,
        table.max_rows,
        second.max_rows,
        tail_out.stride(0),
        tail_out.stride(1),
        tail_lse.stride(0),
        tail_lse.stride(1),
        out.stride(0),
        out.stride(1),
        written_lse.stride(0),
        written_lse.stride(1),
        **watching,
        DV=dv,
        BLOCK_HEADS=shape.heads,
        SPLITS=shape.splits,
        UNROLL=shape.unroll,
        MORE=more is not None,
        OUT_IN_PARTIALS=out_in_partials,
        IN_PLACE=same_memory and out.dtype == tail_out.dtype,
        WRITE_LSE=lse is not None,
        WATCH=watched is not None,
        FIRSTS=FIRSTS,
        LN2=LN2,
        LOG2E=LOG2E,
        num_warps=NUM_WARPS,
    )
    return out


def _check_rows_of(partial_out: Tensor, out: Tensor) -> None:
    """Raises a ValueError unless `out` is rows of `partial_out`."""
    if not out.numel():
        return
    row_bytes = partial_out.stride(0) * partial_out.element_size()
    first, rest = divmod(out.data_ptr() - partial_out.data_ptr(), row_bytes)
    inside = rest == 0 and 0 <= first <= partial_out.shape[0] - out.shape[0]
    if not inside or out.dtype != partial_out.dtype or not out.is_contiguous():
        raise ValueError("out must be rows of partial_out, where out_in_partials says so")
