"""Signals between programs of different ranks: a rank counts, in its own memory, the programs of each rank that have
stored what is for it.

A program stores into another rank's memory and then adds one to its count there, with release order at system scope;
the receiver polls its counts with acquire order and sets them back to zero. Nobody says that a buffer may be written
again. Two exchanges take turns instead: a rank sends queries of the next layer when it has the results of this one from
all ranks, which have read its queries by then, and results when it has queries from all ranks, which have read the
results of the layer before by then. So counts are zero again before anybody adds to them, if all ranks are in every
exchange.
"""

from __future__ import annotations

import triton
import triton.language as tl

MOST_PROGRAMS = 264
"""Programs of a launch: each has to signal, and to find out that there is nothing to do. Two for each multiprocessor of
an H200: with 512, both exchanges take 1.4 us longer (128 rows of four ranks)."""


def programs_for(ranks: int, blocks: int) -> int:
    """Return the programs of a launch, as many for each rank.

    Args:
        blocks: of what is stored for a rank; a program may have several, or none.
    """
    return ranks * min(blocks, max(MOST_PROGRAMS // ranks, 1))


@triton.jit
def rank_of_program(me, RANKS: tl.constexpr):
    """Return the rank that this program stores for. Programs take turns, beginning with the next rank, so that ranks do
    not all store into one of them."""
    return (me + 1 + tl.program_id(0) % RANKS) % RANKS


@triton.jit
def signal_and_wait(signals_ptr, counts_ptr, rank, me, RANKS: tl.constexpr, BLOCK_RANKS: tl.constexpr):
    """Tell a rank that this program has stored its part. The grid's last program then waits for those of all ranks: the
    programs before it have a place on the GPU by then, or they would wait for it.

    Args:
        signals_ptr: int64 [R], the address of each rank's counts, int32 [R].
        counts_ptr: int32 [R], this rank's.
        rank: that is told; me: this rank.
    """
    tl.debug_barrier()  # the other threads of the program have stored, too
    to_ptr = tl.load(signals_ptr + rank).to(tl.pointer_type(tl.int32))
    tl.atomic_add(to_ptr + me, 1, sem="release", scope="sys")
    if tl.program_id(0) == tl.num_programs(0) - 1:
        _wait_for_all(counts_ptr, tl.num_programs(0) // RANKS, RANKS, BLOCK_RANKS)


@triton.jit
def _wait_for_all(counts_ptr, expected, RANKS: tl.constexpr, BLOCK_RANKS: tl.constexpr):
    """Return when so many programs of each rank have signalled, and set the counts back."""
    rank = tl.arange(0, BLOCK_RANKS)
    there = rank < RANKS
    arrived = 0
    while arrived < RANKS:
        counts = tl.atomic_add(counts_ptr + rank, 0, mask=there, sem="acquire", scope="sys")
        arrived = tl.sum((there & (counts >= expected)).to(tl.int32), 0)
    tl.store(counts_ptr + rank, 0, mask=there)
