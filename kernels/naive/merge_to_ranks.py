"""Merges the partial results of all ranks' rows over shared prefixes, stores each rank's rows into its memory, and
waits for what all ranks give back.

    lse = ln(Σ_s exp(lse_s))        out = Σ_s exp(lse_s - lse) · out_s

Memory per row and head: reads splits·(dv + 1)·4 bytes of partials and writes dv·2 + 4 (BF16), over NVLink but for the
rank's own rows. Of a row without partials only the lse is written, -inf. All lse stand behind all results, so that each
store fills whole lines of 128 bytes: with a row's lse behind its values each took four packets in place of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..constants import LN2
from ..merge import load_ids, sum_partials
from ..partials import FIRSTS, PartialTable
from .mailbox import Mailbox
from .signals import programs_for, rank_of_program, signal_and_wait

BLOCK_HEADS = 16
NUM_WARPS = 8


@triton.jit(do_not_specialize=["me", "max_rows"], do_not_specialize_on_alignment=["table_ptr"])
def merge_to_ranks_kernel(
    active_ptr,  # int32 [1]: 0 where nothing is to be done
    partial_out_ptr,  # float32 [P, H, DV]
    partial_lse2_ptr,  # float32 [P, H]
    table_ptr,  # int32, see partials.PartialTable: row i of rank r is r * each + i
    buffers_ptr,  # int64 [R]: the address of each rank's buffer, [R, each, H, DV], then float32 [R, each, H]
    signals_ptr,  # int64 [R]: the address of each rank's counts
    counts_ptr,  # int32 [R], this rank's
    to_ptr,  # this rank's buffer, for its dtype
    each,
    heads,  # H, of a rank
    max_rows,  # of table_ptr
    me,
    DV: tl.constexpr,
    FLOAT32S: tl.constexpr,  # values of the buffer's dtype in a float32
    BLOCK_HEADS: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    FIRSTS: tl.constexpr,
    LN2: tl.constexpr,
):
    if tl.load(active_ptr) != 0:
        rank = rank_of_program(me, RANKS)
        blocks = tl.cdiv(heads, BLOCK_HEADS)
        # Buffers begin on pages, which the compiler cannot know.
        address = tl.load(buffers_ptr + rank)
        out_ptr = tl.multiple_of(address.to(tl.pointer_type(to_ptr.dtype.element_ty)), 16)
        lse_ptr = address.to(tl.pointer_type(tl.float32)) + RANKS * each * heads * DV // FLOAT32S
        dim = tl.max_contiguous(tl.arange(0, DV), 4)[None, None, :]
        for at in range(tl.program_id(0) // RANKS, each * blocks, tl.num_programs(0) // RANKS):
            row_of_rank = at // blocks
            row = rank * each + row_of_rank
            begin, count = tl.load(table_ptr + row), tl.load(table_ptr + max_rows + row)
            firsts_ptr = table_ptr + 2 * max_rows + row * FIRSTS
            list_ptr = table_ptr + (2 + FIRSTS) * max_rows + begin
            head = (at % blocks * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS))[:, None]  # [BLOCK_HEADS, 1]
            in_heads = head < heads
            place = (me.to(tl.int64) * each + row_of_rank) * heads + head
            lse = tl.full([BLOCK_HEADS, 1], float("-inf"), tl.float32)
            if count > 0:
                partial = load_ids(firsts_ptr, list_ptr, 0, count, count, 1, False, False)
                acc, part_sum, part_max2 = sum_partials(
                    partial_out_ptr, partial_lse2_ptr, partial, list_ptr, list_ptr, count, count, head, heads,
                    DV, BLOCK_HEADS, 1, 4, False,
                )  # fmt: skip
                no_key = part_sum == 0.0
                total = tl.where(no_key, 1.0, part_sum)
                lse = tl.where(no_key, float("-inf"), (part_max2 + tl.log2(total)) * LN2)
                out = (acc / total[:, :, None]).to(to_ptr.dtype.element_ty)
                tl.store(out_ptr + place[:, :, None] * DV + dim, out, mask=in_heads[:, :, None])
            tl.store(lse_ptr + place, lse, mask=in_heads)
        signal_and_wait(signals_ptr, counts_ptr, rank, me, RANKS, BLOCK_RANKS)


def merge_to_ranks(
    partial_out: Tensor, partial_lse2: Tensor, table: PartialTable, mailbox: Mailbox, each: int, active: Tensor
) -> None:
    """Merge each row's partial results into the memory of the rank whose row it is, and wait until all ranks have done
    the same. All of them have to call it with the same sizes, or it does not end.

    Args:
        partial_out: `[P, H / R, dv]` float32; partial_lse2: `[P, H / R]` float32, base 2.
        table: of the rows of all ranks, `[R * each]` at least; row i of rank r is `r * each + i`.
        mailbox: see `results_of`; part r is what rank r gives back. The lse, in natural log, is -inf where a row has no
            key, and the values are not written then.
        active: `[1]` int32 on the device, the same on all ranks: 0 where nothing is to be done.
    Raises:
        ValueError: a shape is not as above.
    """
    (_, heads, dv), ranks = partial_out.shape, mailbox.ranks
    values = result_values(ranks * each * heads, dv, mailbox.received.dtype)
    if ranks * each > table.max_rows or values > mailbox.received.numel() or dv & (dv - 1):
        raise ValueError(f"no room for {each} rows of {ranks} ranks with {heads} heads of {dv}")
    programs = programs_for(ranks, each * triton.cdiv(heads, BLOCK_HEADS))
    merge_to_ranks_kernel[(programs,)](
        active,
        partial_out,
        partial_lse2,
        table.buffer,
        mailbox.buffers,
        mailbox.signals,
        mailbox.counts,
        mailbox.received,
        each,
        heads,
        table.max_rows,
        mailbox.me,
        DV=dv,
        FLOAT32S=4 // mailbox.received.element_size(),
        BLOCK_HEADS=BLOCK_HEADS,
        RANKS=ranks,
        BLOCK_RANKS=triton.next_power_of_2(ranks),
        FIRSTS=FIRSTS,
        LN2=LN2,
        num_warps=NUM_WARPS,
    )


def result_values(pairs: int, dv: int, dtype: torch.dtype) -> int:
    """Return the size of a buffer for the results of so many pairs of a row and a head, in values of its dtype."""
    return pairs * (dv + 4 // dtype.itemsize)


def results_of(buffer: Tensor, ranks: int, each: int, heads: int, dv: int) -> tuple[Tensor, Tensor]:
    """Return values `[R, each, H / R, dv]` and lse `[R, each, H / R]`, float32, at the beginning of a buffer.

    Args:
        heads: of each rank, H / R.
    """
    pairs = ranks * each * heads
    whole = buffer[: result_values(pairs, dv, buffer.dtype)]
    out, lse = whole.split([pairs * dv, len(whole) - pairs * dv])
    return out.view(ranks, each, heads, dv), lse.view(torch.float32).view(ranks, each, heads)
