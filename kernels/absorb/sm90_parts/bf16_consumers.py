"""The computing roles of sm90_bf16_absorb.py: `score` scores the keys of an item, and two `sum_values` each sum up half
of the columns of its values.

Blocks of an item are taken from the last to the first, so that only the first one taken can be incomplete. The scores
of block i + 1 are under way while the weights of block i are passed on, and the right half of the output waits until
they are done, so that the matrix unit has work while the softmax runs.

`used` counts quarters of the ring since the program's start: quarter number `used` is in slot `used % SLOTS`, for the
`used // SLOTS`-th time. `taken` counts blocks in the same way, and `done` items.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..items import ITEM_END, ITEM_PARTIAL, ITEM_ROWS
from .work_items import BLOCK, LATENT, NO_SCORE, ROWS, blocks_of, count_items, item_at

PART = gl.constexpr(128)  # columns of a quarter
ROPE_STAGES = gl.constexpr(2)
REGISTER_PARTS = gl.constexpr(3)  # quarters of the query in registers


@gluon.jit
def _softmax_step(scores, row_max2, row_sum, scale_log2e):
    """Running softmax in base 2: weights, new maximum and sum, and the factor for what was summed before."""
    new_max2 = gl.maximum(row_max2, gl.max(scores, 1) * scale_log2e)
    rescale = gl.exp2(row_max2 - new_max2)
    weights = gl.exp2(scores * scale_log2e - new_max2[:, None])
    return weights.to(gl.bfloat16), new_max2, row_sum * rescale + gl.sum(weights, 1), rescale


@gluon.jit
def _add_scores(query, ring, full, used, scores):
    """Start adding the contribution of one quarter of the columns to the scores."""
    SLOTS: gl.constexpr = ring.shape[0]
    slot = used % SLOTS
    mbarrier.wait(full.index(slot), (used // SLOTS) & 1)
    return warpgroup_mma(query, ring.index(slot).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _start_scores(q0, q1, q2, q3, q_rope_s, ring, rope_s, full, rope_full, used, taken, zeros):
    """Start the scores `[ROWS, BLOCK]` of a block, its parts in the order in which they arrive."""
    stage = taken % ROPE_STAGES
    mbarrier.wait(rope_full.index(stage), (taken // ROPE_STAGES) & 1)
    scores = warpgroup_mma(q_rope_s, rope_s.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = _add_scores(q0, ring, full, used, scores)
    scores = _add_scores(q1, ring, full, used + 1, scores)
    scores = _add_scores(q2, ring, full, used + 2, scores)
    return _add_scores(q3, ring, full, used + 3, scores)


@gluon.jit
def _take_query(ring, full, empty, used, LAYOUT: gl.constexpr):
    """One quarter of the query from the ring into registers."""
    SLOTS: gl.constexpr = ring.shape[0]
    slot = used % SLOTS
    mbarrier.wait(full.index(slot), (used // SLOTS) & 1)
    query = ring.index(slot).load(LAYOUT)
    gl.thread_barrier()
    mbarrier.arrive(empty.index(slot))
    return query


@gluon.jit
def score(
    ring, rope_s, q_s, q_rope_s, weights_s, rescale_s, norm_s, full, empty, rope_full, rope_empty, q_full, q_empty,
    weights_full, weights_empty, partial_lse2_ptr, work_ptr, scale_log2e,
):  # fmt: skip
    """Scores and softmax of all items: passes weights and factors on to `sum_values`, and writes the lse2."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    QUERY: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)

    used = 0
    taken = 0
    done = 0
    for index in range(count_items(work_ptr)):
        item_ptr = item_at(work_ptr, index)
        _, last, n_blocks = blocks_of(item_ptr)
        q0 = _take_query(ring, full, empty, used, QUERY)
        q1 = _take_query(ring, full, empty, used + 1, QUERY)
        q2 = _take_query(ring, full, empty, used + 2, QUERY)
        used += REGISTER_PARTS
        mbarrier.wait(q_full, done & 1)

        zeros = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
        scores = _start_scores(q0, q1, q2, q_s, q_rope_s, ring, rope_s, full, rope_full, used, taken, zeros)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(rope_empty.index(taken % ROPE_STAGES))
        used += 4
        key = last * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
        scores = gl.where((key < gl.load(item_ptr + ITEM_END))[None, :], scores, NO_SCORE)
        row_max2 = gl.full([ROWS], NO_SCORE, gl.float32, BY_ROW)
        row_sum = gl.zeros([ROWS], gl.float32, BY_ROW)
        for _ in range(1, n_blocks):
            weights, row_max2, row_sum, rescale = _softmax_step(scores, row_max2, row_sum, scale_log2e)
            started = _start_scores(q0, q1, q2, q_s, q_rope_s, ring, rope_s, full, rope_full, used, taken + 1, zeros)
            mbarrier.wait(weights_empty, (taken & 1) ^ 1)
            weights_s.store(weights)
            rescale_s.store(rescale)
            fence_async_shared()
            gl.thread_barrier()
            mbarrier.arrive(weights_full.index(0))
            scores = warpgroup_mma_wait(0, deps=[started])
            mbarrier.arrive(weights_full.index(1))
            taken += 1
            mbarrier.arrive(rope_empty.index(taken % ROPE_STAGES))
            used += 4
        mbarrier.arrive(q_empty)
        weights, row_max2, row_sum, rescale = _softmax_step(scores, row_max2, row_sum, scale_log2e)
        mbarrier.wait(weights_empty, (taken & 1) ^ 1)
        weights_s.store(weights)
        rescale_s.store(rescale)
        norm_s.store(1.0 / row_sum)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(weights_full.index(0))
        mbarrier.arrive(weights_full.index(1))
        taken += 1
        rows = gl.arange(0, ROWS, BY_ROW)
        lse2 = row_max2 + gl.log2(row_sum)
        gl.store(
            partial_lse2_ptr + gl.load(item_ptr + ITEM_PARTIAL) + rows, lse2, mask=rows < gl.load(item_ptr + ITEM_ROWS)
        )
        done += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit
def _clear_behind(values_s, valid):
    """Zero the values of the keys from `valid` on: a weight of 0 times a NaN would be NaN."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    for start in gl.static_range(0, BLOCK, 8):
        if valid < start + 8:
            part = values_s.slice(start, 8, 0)
            values = part.load(LAYOUT)
            key = start + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))
            part.store(gl.where((key < valid)[:, None], values, gl.zeros_like(values)))


@gluon.jit
def _add_values(weights_s, ring, full, used, acc, use_acc: gl.constexpr):
    """Start adding weights times one quarter of the values to the output."""
    SLOTS: gl.constexpr = ring.shape[0]
    slot = used % SLOTS
    mbarrier.wait(full.index(slot), (used // SLOTS) & 1)
    return warpgroup_mma(weights_s, ring.index(slot), acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _write_out(partial_out_ptr, acc, norm, place, n_rows, first_element):
    """Write `[ROWS, PART]` of the output by way of `place`, as large and not needed any more for values, so that whole
    rows are stored at once."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    acc = acc * norm[:, None]
    place.store(acc.to(gl.bfloat16))
    gl.thread_barrier()
    out = place.load(LAYOUT)
    fence_async_shared()
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, PART, gl.SliceLayout(0, LAYOUT))
    offsets = rows[:, None] * LATENT + columns[None, :]
    gl.store(partial_out_ptr + first_element + offsets, out, mask=(rows < n_rows)[:, None])


@gluon.jit
def sum_values(
    ring, weights_s, rescale_s, norm_s, full, empty, weights_full, weights_empty, partial_out_ptr, work_ptr,
    SIDE: gl.constexpr,
):  # fmt: skip
    """Columns [256 * SIDE, 256 * SIDE + 256) of the output, in two quarters; `used` is that of the first of them."""
    SLOTS: gl.constexpr = ring.shape[0]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OUT)

    used = 2 * SIDE
    taken = 0
    for index in range(count_items(work_ptr)):
        item_ptr = item_at(work_ptr, index)
        _, _, n_blocks = blocks_of(item_ptr)
        used += REGISTER_PARTS
        mbarrier.wait(weights_full.index(SIDE), taken & 1)
        valid = gl.load(item_ptr + ITEM_END) % BLOCK
        if valid != 0:
            mbarrier.wait(full.index(used % SLOTS), (used // SLOTS) & 1)
            mbarrier.wait(full.index((used + 1) % SLOTS), ((used + 1) // SLOTS) & 1)
            _clear_behind(ring.index(used % SLOTS), valid)
            _clear_behind(ring.index((used + 1) % SLOTS), valid)
            fence_async_shared()
            gl.thread_barrier()
        zeros = gl.zeros([ROWS, PART], gl.float32, OUT)
        acc0 = _add_values(weights_s, ring, full, used, zeros, False)
        acc1 = _add_values(weights_s, ring, full, used + 1, zeros, False)
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        for _ in range(1, n_blocks):
            mbarrier.arrive(weights_empty)
            mbarrier.arrive(empty.index(used % SLOTS))
            mbarrier.arrive(empty.index((used + 1) % SLOTS))
            used += 4
            taken += 1
            mbarrier.wait(weights_full.index(SIDE), taken & 1)
            rescale = rescale_s.load(BY_ROW)
            acc0 = _add_values(weights_s, ring, full, used, acc0 * rescale[:, None], True)
            acc1 = _add_values(weights_s, ring, full, used + 1, acc1 * rescale[:, None], True)
            acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        norm = norm_s.load(BY_ROW)
        gl.thread_barrier()
        mbarrier.arrive(weights_empty)
        taken += 1
        n_rows = gl.load(item_ptr + ITEM_ROWS)
        first_element = gl.load(item_ptr + ITEM_PARTIAL).to(gl.int64) * LATENT + 2 * SIDE * PART
        _write_out(partial_out_ptr, acc0, norm, ring.index(used % SLOTS), n_rows, first_element)
        _write_out(partial_out_ptr, acc1, norm, ring.index((used + 1) % SLOTS), n_rows, first_element + PART)
        gl.thread_barrier()
        mbarrier.arrive(empty.index(used % SLOTS))
        mbarrier.arrive(empty.index((used + 1) % SLOTS))
        used += 4
