"""The computing roles of sm90_fp8_absorb.py: `compute_scores` scores the keys of an item, and two `sum_values` each sum
up half of the columns of its values.

Blocks of an item are taken from the last to the first, so that only the first one taken can be incomplete. While the
softmax of block i is computed, the matrix unit works on the scores of block i + 1 (AMLA's preload pipeline;
FlashAttention-3, section 3.2): the rotary ones during the maximum, those of the content during the weights.

`slot` and `phase` say where the ring is, `taken` counts blocks since the program's start, and `done` items.
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
from .fp8_query import round_tiles
from .fp8_tiles import (
    LOG2_FP8_MAX,
    PANEL,
    SCALE_RANGE,
    clear_behind,
    finish,
    inverse_of_power,
    log2_of_power,
    next_slot,
    scales_of_keys,
    values_tile,
    write_out,
)
from .work_items import BLOCK, LATENT, NO_SCORE, ROWS, blocks_of, count_items, item_at, seen_by_all, unseen_keys

STAGES = gl.constexpr(2)  # of weights
NORM_STAGES = gl.constexpr(4)  # items; no barrier: weights are never written more than two blocks ahead

# A thread has keys 2c, 2c + 1, 2c + 8 and 2c + 9 with two dims each: the even dims go to one register, the odd ones to
# another. Position i of every 16 gets key 8·(i >> 1 & 1) + 2·(i >> 2) + (i & 1): a thread has its scores in this order.
KEYS_OF_DIMS = gl.constexpr("prmt.b32 $0, $2, $3, 0x6420; prmt.b32 $1, $2, $3, 0x7531;")


# No `from __future__ import annotations` here: an aggregate needs its annotations as types.
@aggregate
class Shared:
    """Shared memory of the computing roles beside the ring: data and barriers."""

    q_content_s: gl.shared_memory_descriptor  # e4m3 [PANELS, ROWS, PANEL], the rounded query
    q_rope_s: gl.shared_memory_descriptor  # BF16 [ROWS, ROPE]
    weights_s: gl.shared_memory_descriptor  # e4m3 [STAGES, ROWS, BLOCK]
    rescale_s: gl.shared_memory_descriptor  # float32 [STAGES, ROWS]
    norm_s: gl.shared_memory_descriptor  # float32 [NORM_STAGES, ROWS]
    weights_full: gl.shared_memory_descriptor  # [STAGES]
    weights_empty: gl.shared_memory_descriptor  # [STAGES]


@gluon.jit
def _key_scales(scale_s, slot, LAYOUT: gl.constexpr):
    """Scales of the keys in the layout of the columns of a product `[64, 64]`."""
    KEYS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]],
        [[0, 0], [0, 0]],
        [],
        [1, BLOCK],
    )
    return scales_of_keys(scale_s, slot, KEYS, LAYOUT)


@gluon.jit
def _raise_level(scores, row_scale, key_scale, keys, limit, ceiling, level, MASKED: gl.constexpr):
    """Scores as logarithms of weights, the running maximum `ceiling`, the `level` that weights are counted in, and the
    factor for what was summed before; see sm90_fp8_absorb.py. If MASKED, a row sees the block's first `limit [ROWS]`
    keys."""
    t = scores * key_scale[None, :] * row_scale[:, None] + log2_of_power(key_scale)[None, :]
    if MASKED:
        t = gl.where(keys[None, :] < limit[:, None], t, float("-inf"))
    own = gl.max(t, 1)
    new_ceiling = gl.maximum(ceiling, own)
    new_level = gl.maximum(own, new_ceiling - SCALE_RANGE)
    return t, new_ceiling, new_level, gl.exp2(level - new_level)


@gluon.jit
def _weigh(t, key_scale, level, rescale, row_sum):
    """Weights, packed into words, and their running sum."""
    weights = gl.exp2(t - (level - LOG2_FP8_MAX)[:, None])
    total = gl.sum(weights * inverse_of_power(key_scale)[None, :], 1)
    return _pack(weights), row_sum * rescale + total


@gluon.jit
def _pack(weights):
    """`[64, 64]` float32 to e4m3, four keys a word: `[64, 16]` int32, in the order of KEYS_OF_DIMS. In words, because a
    value of one byte that a loop carries takes a whole register."""
    weights = weights.reshape([ROWS, BLOCK // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])  # row, of 16, c, of 8, of 2
    even, odd = gl.split(weights)
    even_low, even_high = gl.split(even)
    odd_low, odd_high = gl.split(odd)
    words = gl.inline_asm_elementwise(
        """{
        .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high};
        }""",
        "=r,f,f,f,f",
        [even_low, odd_low, even_high, odd_high],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )
    return words.reshape([ROWS, BLOCK // 4])


@gluon.jit
def _write_weights(weights, rescale, shared, taken):
    """Write the weights of block number `taken` of the program; the caller signals that they are there."""
    words_s = shared.weights_s._reinterpret(gl.int32, [STAGES, ROWS, BLOCK // 4], gl.NVMMASharedLayout(64, 32))
    stage = taken & 1
    mbarrier.wait(shared.weights_empty.index(stage), ((taken >> 1) & 1) ^ 1)
    words_s.index(stage).store(weights)
    shared.rescale_s.index(stage).store(rescale)


@gluon.jit
def _start_content_scores(q_content_s, panels_s, slot, rope_scores):
    """Start adding the content scores to the rotary ones."""
    PANELS: gl.constexpr = q_content_s.shape[0]
    scores = rope_scores
    for p in gl.static_range(PANELS):
        keys = panels_s.index(slot * PANELS + p).permute((1, 0))
        scores = warpgroup_mma(q_content_s.index(p), keys, scores, is_async=True)
    return scores


@gluon.jit
def _next_scores(
    ring, shared, panels_s, slot, phase, taken, scores, row_scale, key_scale, keys, limit, ceiling, level, row_sum,
    zeros, LAYOUT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Pass on the weights of block number `taken`, of these scores, while those of the block in `slot` are under way:
    its scores and scales of keys, and the running maximum, level and sum."""
    mbarrier.wait(ring.full.index(slot), phase)
    rope = warpgroup_mma(shared.q_rope_s, ring.rope.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    logs, ceiling, level, rescale = _raise_level(scores, row_scale, key_scale, keys, limit, ceiling, level, MASKED)
    rope_scores = gl.convert_layout(warpgroup_mma_wait(0, deps=[rope]), LAYOUT, assert_trivial=True)
    started = _start_content_scores(shared.q_content_s, panels_s, slot, rope_scores)
    weights, row_sum = _weigh(logs, key_scale, level, rescale, row_sum)
    _write_weights(weights, rescale, shared, taken)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(shared.weights_full.index(taken & 1))
    key_scale = _key_scales(ring.scale, slot, gl.SliceLayout(0, LAYOUT))
    scores = warpgroup_mma_wait(0, deps=[started])
    return scores, key_scale, ceiling, level, row_sum


@gluon.jit
def compute_scores(
    ring, shared, partial_lse2_ptr, work_ptr, scale_log2e, HEADS: gl.constexpr, QUERY_TOKENS: gl.constexpr
):  # fmt: skip
    """Scores and softmax of all items: passes weights and factors on to `sum_values`, and writes the lse2.

    An item's query comes in two slots of the ring, which this role alone reads and releases. Slots of keys are released
    by `sum_values` alone, which reaches a block only after its scores are done. The rotary scores are waited for before
    those of the content start, because the two products differ in their layout.
    """
    SLOTS: gl.constexpr = ring.content.shape[0]
    PANELS: gl.constexpr = shared.q_content_s.shape[0]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    ROPE_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    BY_KEY: gl.constexpr = gl.SliceLayout(0, SCORES)
    panels_s = ring.content._reinterpret(gl.float8e4nv, [SLOTS * PANELS, BLOCK, PANEL], gl.NVMMASharedLayout(128, 8))

    slot = 0
    phase = 0
    taken = 0
    done = 0
    for index in range(count_items(work_ptr)):
        item_ptr = item_at(work_ptr, index)
        first, last, n_blocks = blocks_of(item_ptr)
        rows = gl.arange(0, ROWS, BY_ROW)
        second, second_phase = next_slot(slot, phase, SLOTS)
        mbarrier.wait(ring.full.index(slot), phase)
        mbarrier.wait(ring.full.index(second), second_phase)
        row_scale = (
            round_tiles(ring.content, ring.rope, slot, shared.q_content_s, shared.q_rope_s, BY_ROW) * scale_log2e
        )
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(ring.empty.index(slot), count=2)
        mbarrier.arrive(ring.empty.index(second), count=2)
        slot, phase = next_slot(second, second_phase, SLOTS)

        zeros = gl.zeros([ROWS, BLOCK], gl.float32, ROPE_SCORES)
        mbarrier.wait(ring.full.index(slot), phase)
        rope = warpgroup_mma(
            shared.q_rope_s, ring.rope.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True
        )
        keys = gl.arange(0, BLOCK, BY_KEY)
        valid = gl.load(item_ptr + ITEM_END) - last * BLOCK
        key_scale = gl.where(keys < valid, _key_scales(ring.scale, slot, BY_KEY), 1.0)
        rope_scores = gl.convert_layout(warpgroup_mma_wait(0, deps=[rope]), SCORES, assert_trivial=True)
        started = _start_content_scores(shared.q_content_s, panels_s, slot, rope_scores)
        scores = gl.where((keys < valid)[None, :], warpgroup_mma_wait(0, deps=[started]), NO_SCORE)
        slot, phase = next_slot(slot, phase, SLOTS)
        ceiling = gl.full([ROWS], NO_SCORE, gl.float32, BY_ROW)
        level = ceiling
        row_sum = gl.zeros([ROWS], gl.float32, BY_ROW)
        limit = 0
        if QUERY_TOKENS > 1:
            # Blocks that not all rows see to their end come first. In a loop of their own: that of the others has no
            # registers for a mask.
            limit = valid - unseen_keys(item_ptr, rows, HEADS, QUERY_TOKENS)  # of a row's keys in the block, [ROWS]
            masked = last + 1 - gl.maximum(seen_by_all(item_ptr, QUERY_TOKENS), 0) // BLOCK
            for _ in range(1, gl.where(masked < n_blocks, masked + 1, n_blocks)):
                scores, key_scale, ceiling, level, row_sum = _next_scores(
                    ring, shared, panels_s, slot, phase, taken, scores, row_scale, key_scale, keys, limit, ceiling,
                    level, row_sum, zeros, SCORES, True,
                )  # fmt: skip
                limit += BLOCK
                taken += 1
                n_blocks -= 1
                slot, phase = next_slot(slot, phase, SLOTS)
        for _ in range(1, n_blocks):
            scores, key_scale, ceiling, level, row_sum = _next_scores(
                ring, shared, panels_s, slot, phase, taken, scores, row_scale, key_scale, keys, limit, ceiling, level,
                row_sum, zeros, SCORES, False,
            )  # fmt: skip
            taken += 1
            slot, phase = next_slot(slot, phase, SLOTS)
        if QUERY_TOKENS > 1:
            limit = gl.load(item_ptr + ITEM_END) - first * BLOCK - unseen_keys(item_ptr, rows, HEADS, QUERY_TOKENS)
        logs, ceiling, level, rescale = _raise_level(
            scores, row_scale, key_scale, keys, limit, ceiling, level, QUERY_TOKENS > 1
        )  # fmt: skip
        weights, row_sum = _weigh(logs, key_scale, level, rescale, row_sum)
        _write_weights(weights, rescale, shared, taken)
        norm, lse2 = finish(row_sum, level, QUERY_TOKENS)
        shared.norm_s.index(done & 3).store(norm)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(shared.weights_full.index(taken & 1))
        taken += 1
        done += 1  # noqa: SIM113 - Gluon has no enumerate
        gl.store(
            partial_lse2_ptr + gl.load(item_ptr + ITEM_PARTIAL) + rows, lse2, mask=rows < gl.load(item_ptr + ITEM_ROWS)
        )


@gluon.jit
def sum_values(ring, shared, partial_out_ptr, work_ptr, SIDE: gl.constexpr):
    """Columns [256 * SIDE, 256 * SIDE + 256) of the output, in four tiles of 64."""
    SLOTS: gl.constexpr = ring.content.shape[0]
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 32])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 4)
    BY_ROW: gl.constexpr = gl.SliceLayout(0, OUT)
    FIRST: gl.constexpr = 256 * SIDE
    pairs_s = ring.content._reinterpret(gl.int16, [SLOTS, BLOCK, LATENT // 2], gl.NVMMASharedLayout(128, 16))

    slot = 0
    phase = 0
    taken = 0
    done = 0
    for index in range(count_items(work_ptr)):
        item_ptr = item_at(work_ptr, index)
        _, last, n_blocks = blocks_of(item_ptr)
        slot, phase = next_slot(slot, phase, SLOTS)  # the query, two slots
        slot, phase = next_slot(slot, phase, SLOTS)
        valid = gl.load(item_ptr + ITEM_END) - last * BLOCK
        if valid < BLOCK:
            mbarrier.wait(ring.full.index(slot), phase)
            clear_behind(pairs_s.index(slot), FIRST, valid)
            fence_async_shared()
            thread_barrier()

        zeros = gl.zeros([64, ROWS], gl.float32, OUT)
        acc0, acc1, acc2, acc3 = zeros, zeros, zeros, zeros
        for _ in range(n_blocks):
            stage = taken & 1
            pairs = pairs_s.index(slot)
            weights = shared.weights_s.index(stage).permute((1, 0))
            mbarrier.wait(ring.full.index(slot), phase)
            # One tile of values at a time: loading the next one during a product takes more registers than there are.
            v = values_tile(pairs, FIRST, KEYS_OF_DIMS, OPERAND)
            mbarrier.wait(shared.weights_full.index(stage), (taken >> 1) & 1)
            rescale = shared.rescale_s.index(stage).load(BY_ROW)[None, :]  # 0 in an item's first block
            added = warpgroup_mma(v, weights, zeros, use_acc=False, is_async=True)
            acc0 = acc0 * rescale + warpgroup_mma_wait(0, deps=[added])
            v = values_tile(pairs, FIRST + 64, KEYS_OF_DIMS, OPERAND)
            added = warpgroup_mma(v, weights, zeros, use_acc=False, is_async=True)
            acc1 = acc1 * rescale + warpgroup_mma_wait(0, deps=[added])
            v = values_tile(pairs, FIRST + 128, KEYS_OF_DIMS, OPERAND)
            added = warpgroup_mma(v, weights, zeros, use_acc=False, is_async=True)
            acc2 = acc2 * rescale + warpgroup_mma_wait(0, deps=[added])
            v = values_tile(pairs, FIRST + 192, KEYS_OF_DIMS, OPERAND)
            added = warpgroup_mma(v, weights, zeros, use_acc=False, is_async=True)
            thread_barrier()
            mbarrier.arrive(ring.empty.index(slot))  # all values are in registers
            acc3 = acc3 * rescale + warpgroup_mma_wait(0, deps=[added])
            mbarrier.arrive(shared.weights_empty.index(stage))
            slot, phase = next_slot(slot, phase, SLOTS)
            taken += 1
        norm = shared.norm_s.index(done & 3).load(BY_ROW)[None, :]
        done += 1  # noqa: SIM113 - Gluon has no enumerate
        n_rows = gl.load(item_ptr + ITEM_ROWS)
        first_element = gl.load(item_ptr + ITEM_PARTIAL).to(gl.int64) * LATENT + FIRST
        write_out(partial_out_ptr + first_element, acc0 * norm, n_rows, ROWS)
        write_out(partial_out_ptr + first_element + 64, acc1 * norm, n_rows, ROWS)
        write_out(partial_out_ptr + first_element + 128, acc2 * norm, n_rows, ROWS)
        write_out(partial_out_ptr + first_element + 192, acc3 * norm, n_rows, ROWS)
