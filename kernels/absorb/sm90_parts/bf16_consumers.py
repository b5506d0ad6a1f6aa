"""The computing roles of sm90_bf16_absorb.py: `score` scores the keys of an item, and two `sum_values` each sum up half
of the columns of its values.

Blocks of an item are taken from the last to the first, so that only the first one taken can be incomplete. The scores
of block i + 1 are under way while the weights of block i are passed on, and the right half of the output waits until
they are done, so that the matrix unit has work while the softmax runs.

`used` counts quarters of the ring since the program's start: quarter number `used` is in slot `used % SLOTS`, for the
`used // SLOTS`-th time. `taken` counts blocks in the same way, and `done` items.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...gluon_names import aggregate, thread_barrier
from ..items import ITEM_END, ITEM_PARTIAL, ITEM_ROWS
from .work_items import BLOCK, LATENT, NO_SCORE, ROWS, blocks_of, count_items, item_at, seen_by_all, unseen_keys

PART = gl.constexpr(128)  # columns of a quarter
ROPE_STAGES = gl.constexpr(2)
REGISTER_PARTS = gl.constexpr(3)  # quarters of the query in registers


# No `from __future__ import annotations` here: an aggregate needs its annotations as types.
@aggregate
class Shared:
    """Shared memory of a program's roles: data and barriers."""

    ring: gl.shared_memory_descriptor  # BF16 [SLOTS, BLOCK, PART]: quarters of blocks and of queries
    rope_s: gl.shared_memory_descriptor  # BF16 [ROPE_STAGES, BLOCK, ROPE]
    q_s: gl.shared_memory_descriptor  # BF16 [1, ROWS, PART]: the last quarter of the query
    q_rope_s: gl.shared_memory_descriptor  # BF16 [ROWS, ROPE]
    weights_s: gl.shared_memory_descriptor  # BF16 [ROWS, BLOCK]
    rescale_s: gl.shared_memory_descriptor  # float32 [ROWS]
    norm_s: gl.shared_memory_descriptor  # float32 [ROWS]
    full: gl.shared_memory_descriptor  # [SLOTS], of the ring
    empty: gl.shared_memory_descriptor
    rope_full: gl.shared_memory_descriptor  # [ROPE_STAGES]
    rope_empty: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    weights_full: gl.shared_memory_descriptor  # [2], for either half of the output
    weights_empty: gl.shared_memory_descriptor


@gluon.jit
def _softmax_step(scores, row_max2, row_sum, scale_log2e):
    """Running softmax in base 2: weights, new maximum and sum, and the factor for what was summed before."""
    new_max2 = gl.maximum(row_max2, gl.max(scores, 1) * scale_log2e)
    rescale = gl.exp2(row_max2 - new_max2)
    weights = gl.exp2(scores * scale_log2e - new_max2[:, None])
    return weights.to(gl.bfloat16), new_max2, row_sum * rescale + gl.sum(weights, 1), rescale


@gluon.jit
def _add_scores(query, shared, used, scores):
    """Start adding the contribution of one quarter of the columns to the scores."""
    SLOTS: gl.constexpr = shared.ring.shape[0]
    slot = used % SLOTS
    mbarrier.wait(shared.full.index(slot), (used // SLOTS) & 1)
    return warpgroup_mma(query, shared.ring.index(slot).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _start_scores(q0, q1, q2, shared, used, taken, zeros):
    """Start the scores `[ROWS, BLOCK]` of a block, its parts in the order in which they arrive."""
    stage = taken % ROPE_STAGES
    mbarrier.wait(shared.rope_full.index(stage), (taken // ROPE_STAGES) & 1)
    rope = shared.rope_s.index(stage).permute((1, 0))
    scores = warpgroup_mma(shared.q_rope_s, rope, zeros, use_acc=False, is_async=True)
    scores = _add_scores(q0, shared, used, scores)
    scores = _add_scores(q1, shared, used + 1, scores)
    scores = _add_scores(q2, shared, used + 2, scores)
    return _add_scores(shared.q_s.index(0), shared, used + 3, scores)


@gluon.jit
def _load_query(shared, used, LAYOUT: gl.constexpr):
    """Load one quarter of the query from the ring into registers."""
    SLOTS: gl.constexpr = shared.ring.shape[0]
    slot = used % SLOTS
    mbarrier.wait(shared.full.index(slot), (used // SLOTS) & 1)
    query = shared.ring.index(slot).load(LAYOUT)
    thread_barrier()
    mbarrier.arrive(shared.empty.index(slot))
    return query


@gluon.jit
def _hide_unseen(scores, item_ptr, first_key, LAYOUT: gl.constexpr, HEADS: gl.constexpr, QUERY_TOKENS: gl.constexpr):
    """Scores of the keys from `first_key` on, -inf where a row does not see the key: then it has no weight either where
    its row has seen none yet."""
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    keys = first_key + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    end = gl.load(item_ptr + ITEM_END) - unseen_keys(item_ptr, rows, HEADS, QUERY_TOKENS)  # [ROWS]
    return gl.where(keys[None, :] < end[:, None], scores, float("-inf"))


@gluon.jit
def _next_scores(q0, q1, q2, shared, used, taken, scores, row_max2, row_sum, scale_log2e, zeros):
    """Pass on the weights of block number `taken`, of these scores, while those of the next one are under way: new
    scores, maximum and sum."""
    weights, row_max2, row_sum, rescale = _softmax_step(scores, row_max2, row_sum, scale_log2e)
    started = _start_scores(q0, q1, q2, shared, used, taken + 1, zeros)
    mbarrier.wait(shared.weights_empty, (taken & 1) ^ 1)
    shared.weights_s.store(weights)
    shared.rescale_s.store(rescale)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(shared.weights_full.index(0))
    scores = warpgroup_mma_wait(0, deps=[started])
    mbarrier.arrive(shared.weights_full.index(1))
    mbarrier.arrive(shared.rope_empty.index((taken + 1) % ROPE_STAGES))
    return scores, row_max2, row_sum


@gluon.jit
def score(shared, partial_lse2_ptr, work_ptr, scale_log2e, HEADS: gl.constexpr, QUERY_TOKENS: gl.constexpr):
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
        q0 = _load_query(shared, used, QUERY)
        q1 = _load_query(shared, used + 1, QUERY)
        q2 = _load_query(shared, used + 2, QUERY)
        used += REGISTER_PARTS
        mbarrier.wait(shared.q_full, done & 1)

        zeros = gl.zeros([ROWS, BLOCK], gl.float32, SCORES)
        scores = _start_scores(q0, q1, q2, shared, used, taken, zeros)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(shared.rope_empty.index(taken % ROPE_STAGES))
        used += 4
        if QUERY_TOKENS > 1:
            scores = _hide_unseen(scores, item_ptr, last * BLOCK, SCORES, HEADS, QUERY_TOKENS)
        else:
            key = last * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, SCORES))
            scores = gl.where((key < gl.load(item_ptr + ITEM_END))[None, :], scores, NO_SCORE)
        row_max2 = gl.full([ROWS], NO_SCORE, gl.float32, BY_ROW)
        row_sum = gl.zeros([ROWS], gl.float32, BY_ROW)
        if QUERY_TOKENS > 1:  # noqa: SIM102 - known when it is compiled
            # What only some rows see may begin a block earlier. Not in the loop, which has no registers for it.
            if (n_blocks > 1) & (seen_by_all(item_ptr, QUERY_TOKENS) < last * BLOCK):
                scores, row_max2, row_sum = _next_scores(
                    q0, q1, q2, shared, used, taken, scores, row_max2, row_sum, scale_log2e, zeros
                )  # fmt: skip
                scores = _hide_unseen(scores, item_ptr, (last - 1) * BLOCK, SCORES, HEADS, QUERY_TOKENS)
                taken += 1
                used += 4
                n_blocks -= 1
        for _ in range(1, n_blocks):
            scores, row_max2, row_sum = _next_scores(
                q0, q1, q2, shared, used, taken, scores, row_max2, row_sum, scale_log2e, zeros
            )  # fmt: skip
            taken += 1
            used += 4
        mbarrier.arrive(shared.q_empty)
        weights, row_max2, row_sum, rescale = _softmax_step(scores, row_max2, row_sum, scale_log2e)
        mbarrier.wait(shared.weights_empty, (taken & 1) ^ 1)
        shared.weights_s.store(weights)
        shared.rescale_s.store(rescale)
        norm = 1.0 / row_sum
        if QUERY_TOKENS > 1:
            norm = gl.where(row_sum == 0.0, 0.0, norm)  # it has seen no key, and its lse2 is -inf
        shared.norm_s.store(norm)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(shared.weights_full.index(0))
        mbarrier.arrive(shared.weights_full.index(1))
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
def _add_values(shared, used, acc, use_acc: gl.constexpr):
    """Start adding weights times one quarter of the values to the output."""
    SLOTS: gl.constexpr = shared.ring.shape[0]
    slot = used % SLOTS
    mbarrier.wait(shared.full.index(slot), (used // SLOTS) & 1)
    return warpgroup_mma(shared.weights_s, shared.ring.index(slot), acc, use_acc=use_acc, is_async=True)


@gluon.jit
def _write_out(partial_out_ptr, acc, norm, place, n_rows, first_element):
    """Write `[ROWS, PART]` of the output by way of `place`, as large and not needed any more for values, so that whole
    rows are stored at once."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    acc = acc * norm[:, None]
    place.store(acc.to(gl.bfloat16))
    thread_barrier()
    out = place.load(LAYOUT)
    fence_async_shared()
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, PART, gl.SliceLayout(0, LAYOUT))
    offsets = rows[:, None] * LATENT + columns[None, :]
    gl.store(partial_out_ptr + first_element + offsets, out, mask=(rows < n_rows)[:, None])


@gluon.jit
def sum_values(shared, partial_out_ptr, work_ptr, SIDE: gl.constexpr):
    """Columns [256 * SIDE, 256 * SIDE + 256) of the output, in two quarters; `used` is that of the first of them."""
    SLOTS: gl.constexpr = shared.ring.shape[0]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, OUT)

    used = 2 * SIDE
    taken = 0
    for index in range(count_items(work_ptr)):
        item_ptr = item_at(work_ptr, index)
        _, _, n_blocks = blocks_of(item_ptr)
        used += REGISTER_PARTS
        mbarrier.wait(shared.weights_full.index(SIDE), taken & 1)
        valid = gl.load(item_ptr + ITEM_END) % BLOCK
        if valid != 0:
            mbarrier.wait(shared.full.index(used % SLOTS), (used // SLOTS) & 1)
            mbarrier.wait(shared.full.index((used + 1) % SLOTS), ((used + 1) // SLOTS) & 1)
            _clear_behind(shared.ring.index(used % SLOTS), valid)
            _clear_behind(shared.ring.index((used + 1) % SLOTS), valid)
            fence_async_shared()
            thread_barrier()
        zeros = gl.zeros([ROWS, PART], gl.float32, OUT)
        acc0 = _add_values(shared, used, zeros, False)
        acc1 = _add_values(shared, used + 1, zeros, False)
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        for _ in range(1, n_blocks):
            mbarrier.arrive(shared.weights_empty)
            mbarrier.arrive(shared.empty.index(used % SLOTS))
            mbarrier.arrive(shared.empty.index((used + 1) % SLOTS))
            used += 4
            taken += 1
            mbarrier.wait(shared.weights_full.index(SIDE), taken & 1)
            rescale = shared.rescale_s.load(BY_ROW)
            acc0 = _add_values(shared, used, acc0 * rescale[:, None], True)
            acc1 = _add_values(shared, used + 1, acc1 * rescale[:, None], True)
            acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        norm = shared.norm_s.load(BY_ROW)
        thread_barrier()
        mbarrier.arrive(shared.weights_empty)
        taken += 1
        n_rows = gl.load(item_ptr + ITEM_ROWS)
        first_element = gl.load(item_ptr + ITEM_PARTIAL).to(gl.int64) * LATENT + 2 * SIDE * PART
        _write_out(partial_out_ptr, acc0, norm, shared.ring.index(used % SLOTS), n_rows, first_element)
        _write_out(partial_out_ptr, acc1, norm, shared.ring.index((used + 1) % SLOTS), n_rows, first_element + PART)
        thread_barrier()
        mbarrier.arrive(shared.empty.index(used % SLOTS))
        mbarrier.arrive(shared.empty.index((used + 1) % SLOTS))
        used += 4
