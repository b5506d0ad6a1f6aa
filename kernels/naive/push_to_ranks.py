"""Stores queries into the memory of the ranks that have their heads, and waits for those of all ranks.

Every byte is read once and written once, over NVLink but for the rank's own part: R·rows·(H/R)·(A + B) values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .mailbox import Mailbox
from .signals import programs_for, rank_of_program, signal_and_wait

PAIRS = 32
"""Pairs of a row and a head in a program: 12 KiB of DeepSeek's queries in BF16."""
NUM_WARPS = 4


@triton.jit(do_not_specialize=["me"])
def push_to_ranks_kernel(
    active_ptr,  # int32 [1]: 0 where nothing is to be done
    first_ptr,  # [T, R * H, A], strides first_row, first_head, 1
    second_ptr,  # [T, R * H, B], strides second_row, second_head, 1
    buffers_ptr,  # int64 [R]: the address of each rank's buffer, [R, each, H, A + B]
    signals_ptr,  # int64 [R]: the address of each rank's counts
    counts_ptr,  # int32 [R], this rank's
    rows,  # T
    each,
    heads,  # H, of a rank
    first_row,
    first_head,
    second_row,
    second_head,
    me,
    A: tl.constexpr,
    B: tl.constexpr,
    PAIRS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    if tl.load(active_ptr) != 0:
        rank = rank_of_program(me, RANKS)
        # Buffers begin on pages, which the compiler cannot know.
        buffer_ptr = tl.multiple_of(tl.load(buffers_ptr + rank).to(tl.pointer_type(first_ptr.dtype.element_ty)), 16)
        dim_a, dim_b = tl.arange(0, A)[None, :], tl.arange(0, B)[None, :]
        for block in range(tl.program_id(0) // RANKS, tl.cdiv(rows * heads, PAIRS), tl.num_programs(0) // RANKS):
            pair = block * PAIRS + tl.arange(0, PAIRS)[:, None]
            row, head = (pair // heads).to(tl.int64), rank * heads + pair % heads
            inside = row < rows
            to_ptrs = buffer_ptr + (me.to(tl.int64) * each * heads + pair) * (A + B)
            first = tl.load(first_ptr + row * first_row + head * first_head + dim_a, mask=inside)
            second = tl.load(second_ptr + row * second_row + head * second_head + dim_b, mask=inside)
            tl.store(to_ptrs + dim_a, first, mask=inside)
            tl.store(to_ptrs + A + dim_b, second, mask=inside)
        signal_and_wait(signals_ptr, counts_ptr, rank, me, RANKS, BLOCK_RANKS)


def push_to_ranks(first: Tensor, second: Tensor, mailbox: Mailbox, each: int, active: Tensor) -> None:
    """Store each rank's heads into its memory, and wait until all ranks have done the same. All of them have to call it
    with the same sizes, or it does not end.

    Args:
        first: `[T, H, A]`, second: `[T, H, B]`, of the mailbox's dtype; last axis contiguous, A and B powers of two.
        mailbox: for `[R, each, H / R, A + B]`, of which part r is what rank r sends: rows and heads, behind which rows
            from T on stay as they are.
        active: `[1]` int32 on the device, the same on all ranks: 0 where nothing is to be done.
    Raises:
        ValueError: a shape or a dtype is not as above.
    """
    (rows, heads, a), b, ranks = first.shape, second.shape[2], mailbox.ranks
    if second.shape[:2] != first.shape[:2] or heads % ranks or rows > each or first.stride(2) != 1:
        raise ValueError(f"{list(first.shape)} and {list(second.shape)} are not {each} rows for {ranks} ranks")
    if second.stride(2) != 1 or first.dtype != mailbox.received.dtype or second.dtype != first.dtype:
        raise ValueError("queries must have a contiguous last axis and the dtype that ranks receive")
    if each * heads * (a + b) > mailbox.received.numel():
        raise ValueError(f"there is room for {mailbox.received.numel()} values, not {each * heads * (a + b)}")
    programs = programs_for(ranks, triton.cdiv(each * heads // ranks, PAIRS))
    push_to_ranks_kernel[(programs,)](
        active,
        first,
        second,
        mailbox.buffers,
        mailbox.signals,
        mailbox.counts,
        rows,
        each,
        heads // ranks,
        *first.stride()[:2],
        *second.stride()[:2],
        mailbox.me,
        A=a,
        B=b,
        PAIRS=PAIRS,
        RANKS=ranks,
        BLOCK_RANKS=triton.next_power_of_2(ranks),
        num_warps=NUM_WARPS,
    )
