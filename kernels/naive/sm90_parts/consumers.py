"""The consumer warp groups of sm90_naive.py: each computes 64 rows of a work item over all of its keys.

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
from ...gluon_names import thread_barrier
from ..items import (
    GROUP_ROWS,
    ITEM_BEGIN,
    ITEM_END,
    ITEM_FIELDS,
    ITEM_FIRST_ROW,
    ITEM_HEAD,
    ITEM_PARTIAL,
    ITEM_ROWS,
)
from .operands import ROWS

FP8_MAX = gl.constexpr(constants.FP8_MAX)
LOG2_FP8_MAX = gl.constexpr(constants.LOG2_FP8_MAX)
NO_SCORE = gl.constexpr(-1e30)


@gluon.jit
def _load_rows(ptr, row, head, row_stride, head_stride, in_tile, width, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """`[ROWS, DIM]` of a query in BF16; 0 where the tile has no row, and from column `width` on."""
    dim = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT))
    pointers = ptr + (row * row_stride + head * head_stride)[:, None] + dim[None, :]
    mask = in_tile[:, None]
    if DIM > 128:  # narrower blocks are full
        mask = mask & (dim < width)[None, :]
    return gl.load(pointers, mask=mask, other=0.0)


@gluon.jit
def _softmax_step(scores, row_max2, row_sum, row_scale, headroom: gl.constexpr):
    """Running softmax in base 2: weights times 2**headroom, new maximum and sum, and the factor for what was summed."""
    new_max2 = gl.maximum(row_max2, gl.max(scores, 1) * row_scale)
    rescale = gl.exp2(row_max2 - new_max2)
    weights = gl.exp2(scores * row_scale[:, None] - (new_max2 - headroom)[:, None])
    return weights, new_max2, row_sum * rescale + gl.sum(weights, 1), rescale


@gluon.jit
def _bits_of(values):
    """FP8 numbers as bytes, which can be selected; FP8 numbers cannot."""
    return values.to(gl.uint8, bitcast=True)


@gluon.jit
def _fp8_of(bits):
    return bits.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def _clear_values_behind(v_t, valid, BLOCK_KEYS: gl.constexpr, DV: gl.constexpr, FP8: gl.constexpr):
    """Zero the values of the keys from `valid` on: a weight of 0 times a NaN would be NaN.

    Each consumer does so before its own product, without waiting for the other: the second one rewrites the same
    numbers.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    position = gl.arange(0, BLOCK_KEYS, gl.SliceLayout(0, LAYOUT))
    values = v_t.load(LAYOUT)  # [DV, BLOCK_KEYS]
    if FP8:
        inside = position % 16
        order = 8 * (inside >> 1 & 1) + 4 * (inside >> 3 & 1) + 2 * (inside >> 2 & 1) + (inside & 1)
        keep = position - inside + order < valid
        bits = _bits_of(values)
        values = _fp8_of(gl.where(keep[None, :], bits, gl.zeros_like(bits)))
    else:
        values = gl.where((position < valid)[None, :], values, gl.zeros_like(values))
    thread_barrier()
    v_t.store(values)
    fence_async_shared()
    thread_barrier()


@gluon.jit
def _store_partial(
    partials, acc, row_max2, row_sum, out_scale, partial_row, heads, head, first, n_rows, DV: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, DV, gl.SliceLayout(0, LAYOUT))
    in_tile = rows < n_rows
    partial = (partial_row + rows).to(gl.int64) * heads + head
    out = acc * (out_scale / row_sum)[:, None]
    gl.store(partials.out_ptr + partial[:, None] * DV + dim[None, :], out, mask=in_tile[:, None])
    gl.store(partials.lse2_ptr + partial, row_max2 + gl.log2(row_sum), mask=in_tile)


@gluon.jit
def _attend_bf16(item, position, first, q_nope_s, q_rope_s, ring, query, scales, work, partials):
    """Rows `[first, first + 64)` of an item, in BF16. Returns `position` behind the item."""
    STAGES: gl.constexpr = ring.k_nope.shape[0]
    BLOCK_KEYS: gl.constexpr = ring.k_nope.shape[1]
    DN: gl.constexpr = q_nope_s.shape[1]
    DR: gl.constexpr = q_rope_s.shape[1]
    DV: gl.constexpr = ring.v_t.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    head, first_row, n_rows, kv_begin, kv_end, partial_row = item
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, QUERY))
    in_tile = rows < n_rows
    row = gl.load(work.ptr + GROUP_ROWS + first_row + rows, mask=in_tile, other=0).to(gl.int64)
    thread_barrier()  # all warps have finished with the query of the item before
    q_nope_s.store(
        _load_rows(query.nope_ptr, row, head, query.nope_row, query.nope_head, in_tile, query.nope_dim, DN, QUERY)
    )
    q_rope_s.store(_load_rows(query.rope_ptr, row, head, query.rope_row, query.rope_head, in_tile, DR, DR, QUERY))
    fence_async_shared()
    thread_barrier()

    last_tile = (kv_end - 1) // BLOCK_KEYS
    n_tiles = last_tile - kv_begin // BLOCK_KEYS + 1
    stage = position % STAGES
    mbarrier.wait(ring.k_full.index(stage), (position // STAGES) & 1)
    no_scores = gl.zeros([ROWS, BLOCK_KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(q_rope_s, ring.k_rope.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True)
    scores = warpgroup_mma(q_nope_s, ring.k_nope.index(stage).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(ring.k_empty.index(stage))
    key = last_tile * BLOCK_KEYS + gl.arange(0, BLOCK_KEYS, gl.SliceLayout(0, SCORES))
    scores = gl.where((key < kv_end)[None, :], scores, NO_SCORE)
    row_max2 = gl.full([ROWS], NO_SCORE, gl.float32, gl.SliceLayout(1, SCORES))
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
            q_rope_s, ring.k_rope.index(stage).permute((1, 0)), no_scores, use_acc=False, is_async=True
        )
        scores = warpgroup_mma(q_nope_s, ring.k_nope.index(stage).permute((1, 0)), scores, is_async=True)
        mbarrier.wait(ring.v_full.index(v_stage), v_phase)
        acc_next = warpgroup_mma(weights_b, ring.v_t.index(v_stage).permute((1, 0)), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        mbarrier.arrive(ring.k_empty.index(stage))
        weights, row_max2, row_sum, rescale = _softmax_step(scores, row_max2, row_sum, row_scale, 0.0)
        acc = warpgroup_mma_wait(0, deps=[acc_next])
        mbarrier.arrive(ring.v_empty.index(v_stage))
        acc = acc * gl.convert_layout(rescale, OUT_ROWS)[:, None]

    weights_b = gl.convert_layout(weights.to(gl.bfloat16), WEIGHTS)
    stage = position % STAGES
    mbarrier.wait(ring.v_full.index(stage), (position // STAGES) & 1)
    acc_next = warpgroup_mma(weights_b, ring.v_t.index(stage).permute((1, 0)), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc_next])
    mbarrier.arrive(ring.v_empty.index(stage))
    position += 1
    row_max2 = gl.convert_layout(row_max2, OUT_ROWS)
    row_sum = gl.convert_layout(row_sum, OUT_ROWS)
    _store_partial(
        partials, acc, row_max2, row_sum, 1.0, partial_row, work.heads, head, first, n_rows, DV, OUT
    )  # fmt: skip
    return position


@gluon.jit
def _weights_to_fp8(weights, BLOCK_KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Round the weights and put their columns in the order of the values, expanded.FP8_TOKEN_ORDER. Each thread keeps
    its own: only the meaning of its registers changes."""
    rounded = weights.to(gl.float8e4nv)
    rounded = rounded.reshape([ROWS, BLOCK_KEYS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
    return gl.convert_layout(rounded.reshape([ROWS, BLOCK_KEYS]), LAYOUT)


@gluon.jit
def _attend_fp8(item, position, first, q_nope_s, q_rope_s, ring, query, scales, work, partials):
    """Rows `[first, first + 64)` of an item: content scores and values in FP8, rotary scores in BF16. Returns
    `position` behind the item.

    The content query is quantised here, one scale for each row and head (SnapMLA, section 3.1). The rotary query is
    divided by that scale and by the key scale, so that both products share one accumulator (SnapMLA, equation 6). The
    weights are multiplied by 448 before they are rounded, and so is their sum. The product of each key tile starts from
    zero and is added to the output in float32: the matrix unit's FP8 accumulation keeps about 13 bits below its largest
    term, and accumulating 26,000 keys in place lost 17 % where the values have a non-zero mean.
    """
    STAGES: gl.constexpr = ring.k_nope.shape[0]
    BLOCK_KEYS: gl.constexpr = ring.k_nope.shape[1]
    DN: gl.constexpr = q_nope_s.shape[1]
    DR: gl.constexpr = q_rope_s.shape[1]
    DV: gl.constexpr = ring.v_t.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KEYS, 32])
    ROPE_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 32])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, OUT, 4)
    OUT_ROWS: gl.constexpr = gl.SliceLayout(1, OUT)
    QUERY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])

    head, first_row, n_rows, kv_begin, kv_end, partial_row = item
    rows = first + gl.arange(0, ROWS, gl.SliceLayout(1, QUERY))
    in_tile = rows < n_rows
    row = gl.load(work.ptr + GROUP_ROWS + first_row + rows, mask=in_tile, other=0).to(gl.int64)
    q_nope = _load_rows(query.nope_ptr, row, head, query.nope_row, query.nope_head, in_tile, query.nope_dim, DN, QUERY)
    q_nope = q_nope.to(gl.float32)
    q_rope = _load_rows(query.rope_ptr, row, head, query.rope_row, query.rope_head, in_tile, DR, DR, QUERY)
    q_rope = q_rope.to(gl.float32)
    q_scale = gl.maximum(gl.max(gl.abs(q_nope), 1), 1e-8) / FP8_MAX
    k_scale = gl.load(scales.k_ptr + head)
    thread_barrier()  # all warps have finished with the query of the item before
    q_nope_s.store((q_nope / q_scale[:, None]).to(gl.float8e4nv))
    q_rope_s.store((q_rope / (q_scale * k_scale)[:, None]).to(gl.bfloat16))
    fence_async_shared()
    thread_barrier()
    row_scale = gl.convert_layout(q_scale * (k_scale * scales.softmax_log2e), gl.SliceLayout(1, SCORES))

    last_tile = (kv_end - 1) // BLOCK_KEYS
    n_tiles = last_tile - kv_begin // BLOCK_KEYS + 1
    stage = position % STAGES
    mbarrier.wait(ring.k_full.index(stage), (position // STAGES) & 1)
    no_rope = gl.zeros([ROWS, BLOCK_KEYS], gl.float32, ROPE_SCORES)
    rope = warpgroup_mma(q_rope_s, ring.k_rope.index(stage).permute((1, 0)), no_rope, use_acc=False, is_async=True)
    rope = warpgroup_mma_wait(0, deps=[rope])
    scores = gl.convert_layout(rope, SCORES)
    scores = warpgroup_mma(q_nope_s, ring.k_nope.index(stage).permute((1, 0)), scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    mbarrier.arrive(ring.k_empty.index(stage))
    key = last_tile * BLOCK_KEYS + gl.arange(0, BLOCK_KEYS, gl.SliceLayout(0, SCORES))
    scores = gl.where((key < kv_end)[None, :], scores, NO_SCORE)
    row_max2 = gl.full([ROWS], NO_SCORE, gl.float32, gl.SliceLayout(1, SCORES))
    row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    no_out = gl.zeros([ROWS, DV], gl.float32, OUT)
    acc = no_out
    if kv_end % BLOCK_KEYS != 0:
        mbarrier.wait(ring.v_full.index(stage), (position // STAGES) & 1)
        _clear_values_behind(ring.v_t.index(stage), kv_end % BLOCK_KEYS, BLOCK_KEYS, DV, True)

    for _ in range(1, n_tiles):
        weights, row_max2, row_sum, rescale = _softmax_step(scores, row_max2, row_sum, row_scale, LOG2_FP8_MAX)
        weights_q = _weights_to_fp8(weights, BLOCK_KEYS, WEIGHTS)
        v_stage, v_phase = position % STAGES, (position // STAGES) & 1
        position += 1
        stage = position % STAGES
        mbarrier.wait(ring.k_full.index(stage), (position // STAGES) & 1)
        rope = warpgroup_mma(q_rope_s, ring.k_rope.index(stage).permute((1, 0)), no_rope, use_acc=False, is_async=True)
        mbarrier.wait(ring.v_full.index(v_stage), v_phase)
        added = warpgroup_mma(weights_q, ring.v_t.index(v_stage).permute((1, 0)), no_out, use_acc=False, is_async=True)
        rope = warpgroup_mma_wait(1, deps=[rope])
        scores_next = gl.convert_layout(rope, SCORES)
        scores_next = warpgroup_mma(q_nope_s, ring.k_nope.index(stage).permute((1, 0)), scores_next, is_async=True)
        scores, added = warpgroup_mma_wait(0, deps=[scores_next, added])
        mbarrier.arrive(ring.k_empty.index(stage))
        mbarrier.arrive(ring.v_empty.index(v_stage))
        acc = acc * gl.convert_layout(rescale, OUT_ROWS)[:, None] + added

    weights, row_max2, row_sum, rescale = _softmax_step(scores, row_max2, row_sum, row_scale, LOG2_FP8_MAX)
    weights_q = _weights_to_fp8(weights, BLOCK_KEYS, WEIGHTS)
    stage = position % STAGES
    mbarrier.wait(ring.v_full.index(stage), (position // STAGES) & 1)
    added = warpgroup_mma(weights_q, ring.v_t.index(stage).permute((1, 0)), no_out, use_acc=False, is_async=True)
    added = warpgroup_mma_wait(0, deps=[added])
    mbarrier.arrive(ring.v_empty.index(stage))
    position += 1
    acc = acc * gl.convert_layout(rescale, OUT_ROWS)[:, None] + added
    row_max2 = gl.convert_layout(row_max2 - LOG2_FP8_MAX, OUT_ROWS)
    row_sum = gl.convert_layout(row_sum, OUT_ROWS)
    v_scale = gl.load(scales.v_ptr + head)
    _store_partial(
        partials, acc, row_max2, row_sum, v_scale, partial_row, work.heads, head, first, n_rows, DV, OUT
    )  # fmt: skip
    return position


@gluon.jit
def _read_item(work, item_index):
    item_ptr = work.ptr + work.items_offset + item_index * ITEM_FIELDS
    return (
        gl.load(item_ptr + ITEM_HEAD),
        gl.load(item_ptr + ITEM_FIRST_ROW),
        gl.load(item_ptr + ITEM_ROWS),
        gl.load(item_ptr + ITEM_BEGIN),
        gl.load(item_ptr + ITEM_END),
        gl.load(item_ptr + ITEM_PARTIAL),
    )


@gluon.jit
def _pass_over(ring, position, n_tiles):
    """Hand back the key tiles of an item in which this consumer has no row. Returns `position` behind the item."""
    STAGES: gl.constexpr = ring.k_nope.shape[0]
    for _ in range(n_tiles):
        stage, phase = position % STAGES, (position // STAGES) & 1
        mbarrier.wait(ring.k_full.index(stage), phase)
        mbarrier.arrive(ring.k_empty.index(stage))
        mbarrier.wait(ring.v_full.index(stage), phase)
        mbarrier.arrive(ring.v_empty.index(stage))
        position += 1
    return position


@gluon.jit
def consume(first, q_nope_s, q_rope_s, ring, query, scales, work, partials):
    """Rows `[first, first + 64)` of every item."""
    BLOCK_KEYS: gl.constexpr = ring.k_nope.shape[1]
    position = 0
    for item_index in range(gl.program_id(0), gl.load(work.n_items_ptr), gl.num_programs(0)):
        item = _read_item(work, item_index)
        _, _, n_rows, kv_begin, kv_end, _ = item
        if first >= n_rows:
            position = _pass_over(ring, position, (kv_end - 1) // BLOCK_KEYS - kv_begin // BLOCK_KEYS + 1)
        elif ring.k_nope.dtype == gl.float8e4nv:
            position = _attend_fp8(
                item, position, first, q_nope_s, q_rope_s, ring, query, scales, work, partials
            )  # fmt: skip
        else:
            position = _attend_bf16(
                item, position, first, q_nope_s, q_rope_s, ring, query, scales, work, partials
            )  # fmt: skip
