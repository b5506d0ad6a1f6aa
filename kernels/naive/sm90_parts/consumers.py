"""The consumer warp groups of sm90_naive.py: each computes 64 rows of a work item.

In a program with two consumers, an item of more than 64 rows is *wide*: the first consumer has its first 64 rows, the
second one the others, and both go through all keys. An item of up to 64 rows is *narrow*: both have all its rows, and
each takes half of the keys of every tile. Barriers and copies are the same for both kinds of items. A single consumer
has all rows and keys of every item, as if it were wide.

A consumer goes through the keys of an item from the last tile to the first, so that the only tile that needs a mask,
where the segment ends, comes before the loop. It issues the score product of the next tile before it waits for the
output product of the current one (AMLA's preload pipeline; FlashAttention-3, section 3.2), and while one consumer
computes its softmax the matrix unit works for the other.

`position` counts the key tiles that the program has taken since its start: tile number `position` is in stage
`position % STAGES` of shared memory, for the `position // STAGES`-th time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ... import constants
from ..items import (
    GROUP_ROWS,
    ITEM_BEGIN,
    ITEM_END,
    ITEM_FIELDS,
    ITEM_FIRST_ROW,
    ITEM_HEAD,
    ITEM_ROWS,
    N_ITEMS,
)
from .pieces import (
    NO_MAX2,
    NO_SCORE,
    ROWS,
    _clear_values_behind,
    _finish,
    _keys_of,
    _load_rows,
    _softmax_step,
    _values_of,
)

FP8_MAX = gl.constexpr(constants.FP8_MAX)
LOG2_FP8_MAX = gl.constexpr(constants.LOG2_FP8_MAX)


@gluon.jit
def _attend_bf16(half: gl.constexpr, WIDE: gl.constexpr, query_s, given, item, position, handed_over):
    """A consumer's part of an item, in BF16. Returns the position of the next item's first tile."""
    q_nope_s, q_rope_s = query_s
    ring, _, query, scales, work, _ = given
    STAGES: gl.constexpr = ring.k_nope.shape[0]
    BLOCK_KEYS: gl.constexpr = ring.k_nope.shape[1]
    DN: gl.constexpr = q_nope_s.shape[1]
    DR: gl.constexpr = q_rope_s.shape[1]
    DV: gl.constexpr = ring.v_t.shape[1]
    KEYS: gl.constexpr = BLOCK_KEYS if WIDE else BLOCK_KEYS // 2
    FIRST_KEY: gl.constexpr = 0 if WIDE else half * KEYS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    head, first_row = gl.load(item + ITEM_HEAD), gl.load(item + ITEM_FIRST_ROW)
    n_rows, kv_begin, kv_end = gl.load(item + ITEM_ROWS), gl.load(item + ITEM_BEGIN), gl.load(item + ITEM_END)
    rows = (half * ROWS if WIDE else 0) + gl.arange(0, ROWS, gl.SliceLayout(1, QUERY))
    in_tile = rows < n_rows
    row = gl.load(work.ptr + GROUP_ROWS + first_row + rows, mask=in_tile, other=0).to(gl.int64)
    gl.thread_barrier()  # all warps have finished with the query of the item before
    q_nope_s.store(_load_rows(query.nope_ptr, row, head, query.nope_row, query.nope_head, in_tile, DN, QUERY))
    q_rope_s.store(_load_rows(query.rope_ptr, row, head, query.rope_row, query.rope_head, in_tile, DR, QUERY))
    fence_async_shared()
    gl.thread_barrier()

    last_tile = (kv_end - 1) // BLOCK_KEYS
    n_tiles = last_tile - kv_begin // BLOCK_KEYS + 1
    stage = position % STAGES
    mbarrier.wait(ring.k_full.index(stage), (position // STAGES) & 1)
    no_scores = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(
        q_rope_s, _keys_of(ring.k_rope.index(stage), FIRST_KEY, KEYS), no_scores, use_acc=False, is_async=True
    )
    scores = warpgroup_mma(q_nope_s, _keys_of(ring.k_nope.index(stage), FIRST_KEY, KEYS), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(ring.k_empty.index(stage))
    key = last_tile * BLOCK_KEYS + FIRST_KEY + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    scores = gl.where((key < kv_end)[None, :], scores, NO_SCORE)
    row_max2 = gl.full([ROWS], NO_SCORE if WIDE else NO_MAX2, gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    row_scale = row_sum + scales.softmax_log2e
    weights, row_max2, row_sum, rescale = _softmax_step(scores, row_max2, row_sum, row_scale, 0.0)
    acc = gl.zeros([ROWS, DV], gl.float32, OUT)
    if kv_end % BLOCK_KEYS != 0:
        mbarrier.wait(ring.v_full.index(stage), (position // STAGES) & 1)
        _clear_values_behind(ring.v_t.index(stage), kv_end % BLOCK_KEYS, BLOCK_KEYS, DV, False)

    for _ in range(1, n_tiles):
        weights_b = gl.convert_layout(weights.to(gl.bfloat16), WEIGHTS)
        v_stage, v_phase = position % STAGES, (position // STAGES) & 1
        position += 1
        stage = position % STAGES
        mbarrier.wait(ring.k_full.index(stage), (position // STAGES) & 1)
        scores = warpgroup_mma(
            q_rope_s, _keys_of(ring.k_rope.index(stage), FIRST_KEY, KEYS), no_scores, use_acc=False, is_async=True
        )
        scores = warpgroup_mma(q_nope_s, _keys_of(ring.k_nope.index(stage), FIRST_KEY, KEYS), scores, is_async=True)
        mbarrier.wait(ring.v_full.index(v_stage), v_phase)
        acc_next = warpgroup_mma(weights_b, _values_of(ring.v_t.index(v_stage), FIRST_KEY, KEYS), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(ring.k_empty.index(stage))
        weights, row_max2, row_sum, rescale = _softmax_step(scores, row_max2, row_sum, row_scale, 0.0)
        acc = warpgroup_mma_wait(0, deps=[acc_next])
        mbarrier.arrive(ring.v_empty.index(v_stage))
        acc = acc * gl.convert_layout(rescale, OUT_ROWS)[:, None]

    weights_b = gl.convert_layout(weights.to(gl.bfloat16), WEIGHTS)
    stage = position % STAGES
    mbarrier.wait(ring.v_full.index(stage), (position // STAGES) & 1)
    acc_next = warpgroup_mma(weights_b, _values_of(ring.v_t.index(stage), FIRST_KEY, KEYS), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc_next])
    mbarrier.arrive(ring.v_empty.index(stage))
    row_max2 = gl.convert_layout(row_max2, OUT_ROWS)
    row_sum = gl.convert_layout(row_sum, OUT_ROWS)
    _finish(half, WIDE, given, item, handed_over, acc, row_max2, row_sum, 1.0, DV, OUT)
    return position + 1


@gluon.jit
def _weights_to_fp8(weights, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Round the weights and put their columns in the order of the values, expanded.FP8_TOKEN_ORDER. Each thread keeps
    its own: only the meaning of its registers changes."""
    rounded = weights.to(gl.float8e4nv)
    rounded = rounded.reshape([ROWS, KEYS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
    return gl.convert_layout(rounded.reshape([ROWS, KEYS]), LAYOUT)


@gluon.jit
def _attend_fp8(half: gl.constexpr, WIDE: gl.constexpr, query_s, given, item, position, handed_over):
    """A consumer's part of an item: content scores and values in FP8, rotary scores in BF16. Returns as _attend_bf16.

    The content query is quantised here, one scale for each row and head (SnapMLA, section 3.1). The rotary query is
    divided by that scale and by the key scale, so that both products share one accumulator (SnapMLA, equation 6). The
    weights are multiplied by 448 before they are rounded, and so is their sum. The product of each key tile starts from
    zero and is added to the output in float32: the matrix unit's FP8 accumulation keeps about 13 bits below its largest
    term, and accumulating 26,000 keys in place lost 17 % where the values have a non-zero mean.
    """
    q_nope_s, q_rope_s = query_s
    ring, _, query, scales, work, _ = given
    STAGES: gl.constexpr = ring.k_nope.shape[0]
    BLOCK_KEYS: gl.constexpr = ring.k_nope.shape[1]
    DN: gl.constexpr = q_nope_s.shape[1]
    DR: gl.constexpr = q_rope_s.shape[1]
    DV: gl.constexpr = ring.v_t.shape[1]
    KEYS: gl.constexpr = BLOCK_KEYS if WIDE else BLOCK_KEYS // 2
    FIRST_KEY: gl.constexpr = 0 if WIDE else half * KEYS
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32])
    ROPE_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 32])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 4)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    head, first_row = gl.load(item + ITEM_HEAD), gl.load(item + ITEM_FIRST_ROW)
    n_rows, kv_begin, kv_end = gl.load(item + ITEM_ROWS), gl.load(item + ITEM_BEGIN), gl.load(item + ITEM_END)
    rows = (half * ROWS if WIDE else 0) + gl.arange(0, ROWS, gl.SliceLayout(1, QUERY))
    in_tile = rows < n_rows
    row = gl.load(work.ptr + GROUP_ROWS + first_row + rows, mask=in_tile, other=0).to(gl.int64)
    q_nope = _load_rows(query.nope_ptr, row, head, query.nope_row, query.nope_head, in_tile, DN, QUERY)
    q_nope = q_nope.to(gl.float32)
    q_rope = _load_rows(query.rope_ptr, row, head, query.rope_row, query.rope_head, in_tile, DR, QUERY)
    q_rope = q_rope.to(gl.float32)
    q_scale = gl.maximum(gl.max(gl.abs(q_nope), 1), 1e-8) / FP8_MAX
    k_scale = gl.load(scales.k_ptr + head)
    gl.thread_barrier()  # all warps have finished with the query of the item before
    q_nope_s.store((q_nope / q_scale[:, None]).to(gl.float8e4nv))
    q_rope_s.store((q_rope / (q_scale * k_scale)[:, None]).to(gl.bfloat16))
    fence_async_shared()
    gl.thread_barrier()
    row_scale = gl.convert_layout(q_scale * (k_scale * scales.softmax_log2e), gl.SliceLayout(1, SCORES))

    last_tile = (kv_end - 1) // BLOCK_KEYS
    n_tiles = last_tile - kv_begin // BLOCK_KEYS + 1
    stage = position % STAGES
    mbarrier.wait(ring.k_full.index(stage), (position // STAGES) & 1)
    no_rope = gl.zeros([ROWS, KEYS], gl.float32, ROPE_SCORES)
    rope = warpgroup_mma(
        q_rope_s, _keys_of(ring.k_rope.index(stage), FIRST_KEY, KEYS), no_rope, use_acc=False, is_async=True
    )
    rope = warpgroup_mma_wait(0, deps=[rope])
    scores = gl.convert_layout(rope, SCORES)
    scores = warpgroup_mma(q_nope_s, _keys_of(ring.k_nope.index(stage), FIRST_KEY, KEYS), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(ring.k_empty.index(stage))
    key = last_tile * BLOCK_KEYS + FIRST_KEY + gl.arange(0, KEYS, gl.SliceLayout(0, SCORES))
    scores = gl.where((key < kv_end)[None, :], scores, NO_SCORE)
    row_max2 = gl.full([ROWS], NO_SCORE if WIDE else NO_MAX2, gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    no_out = gl.zeros([ROWS, DV], gl.float32, OUT)
    acc = no_out
    if kv_end % BLOCK_KEYS != 0:
        mbarrier.wait(ring.v_full.index(stage), (position // STAGES) & 1)
        _clear_values_behind(ring.v_t.index(stage), kv_end % BLOCK_KEYS, BLOCK_KEYS, DV, True)

    for _ in range(1, n_tiles):
        weights, row_max2, row_sum, rescale = _softmax_step(scores, row_max2, row_sum, row_scale, LOG2_FP8_MAX)
        weights_q = _weights_to_fp8(weights, KEYS, WEIGHTS)
        v_stage, v_phase = position % STAGES, (position // STAGES) & 1
        position += 1
        stage = position % STAGES
        mbarrier.wait(ring.k_full.index(stage), (position // STAGES) & 1)
        rope = warpgroup_mma(
            q_rope_s, _keys_of(ring.k_rope.index(stage), FIRST_KEY, KEYS), no_rope, use_acc=False, is_async=True
        )
        mbarrier.wait(ring.v_full.index(v_stage), v_phase)
        added = warpgroup_mma(
            weights_q, _values_of(ring.v_t.index(v_stage), FIRST_KEY, KEYS), no_out, use_acc=False, is_async=True
        )
        rope = warpgroup_mma_wait(1, deps=[rope])
        scores_next = gl.convert_layout(rope, SCORES)
        scores_next = warpgroup_mma(
            q_nope_s, _keys_of(ring.k_nope.index(stage), FIRST_KEY, KEYS), scores_next, is_async=True
        )
        scores, added = warpgroup_mma_wait(0, deps=[scores_next, added])
        mbarrier.arrive(ring.k_empty.index(stage))
        mbarrier.arrive(ring.v_empty.index(v_stage))
        acc = acc * gl.convert_layout(rescale, OUT_ROWS)[:, None] + added

    weights, row_max2, row_sum, rescale = _softmax_step(scores, row_max2, row_sum, row_scale, LOG2_FP8_MAX)
    weights_q = _weights_to_fp8(weights, KEYS, WEIGHTS)
    stage = position % STAGES
    mbarrier.wait(ring.v_full.index(stage), (position // STAGES) & 1)
    added = warpgroup_mma(
        weights_q, _values_of(ring.v_t.index(stage), FIRST_KEY, KEYS), no_out, use_acc=False, is_async=True
    )
    added = warpgroup_mma_wait(0, deps=[added])
    mbarrier.arrive(ring.v_empty.index(stage))
    acc = acc * gl.convert_layout(rescale, OUT_ROWS)[:, None] + added
    row_max2 = gl.convert_layout(row_max2 - LOG2_FP8_MAX, OUT_ROWS)
    row_sum = gl.convert_layout(row_sum, OUT_ROWS)
    v_scale = gl.load(scales.v_ptr + gl.load(item + ITEM_HEAD))
    _finish(half, WIDE, given, item, handed_over, acc, row_max2, row_sum, v_scale, DV, OUT)
    return position + 1


@gluon.jit
def _attend(half: gl.constexpr, WIDE: gl.constexpr, query_s, given, item, position, handed_over):
    """A consumer's part of an item, for the dtype of the keys."""
    if given[0].k_nope.dtype == gl.float8e4nv:
        return _attend_fp8(half, WIDE, query_s, given, item, position, handed_over)
    else:
        return _attend_bf16(half, WIDE, query_s, given, item, position, handed_over)


@gluon.jit
def consume(half: gl.constexpr, CONSUMERS: gl.constexpr, query_s, given):
    """Consumer number `half` of a program: its part of every item.

    query_s: its query in shared memory, content `[ROWS, DN]` and rotary part `[ROWS, DR]`; given: a Ring, a Handover, a
    Query, Scales, Work and Partials.
    """
    work = given[4]
    position = 0
    handed_over = 0  # narrow items so far
    for item_index in range(gl.program_id(0), gl.load(work.ptr + N_ITEMS), gl.num_programs(0)):
        item = work.ptr + work.items_offset + item_index * ITEM_FIELDS
        if CONSUMERS == 1:
            position = _attend(half, True, query_s, given, item, position, handed_over)
        else:
            if gl.load(item + ITEM_ROWS) > ROWS:
                position = _attend(half, True, query_s, given, item, position, handed_over)
            else:
                position = _attend(half, False, query_s, given, item, position, handed_over)
                handed_over += 1
