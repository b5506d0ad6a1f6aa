"""Absorb attention on Hopper over FP8 latent rows, in items of 8 or 16 query rows: the heads of one request, of all its
query tokens.

    scores^T[64 keys, N rows] = keys [64, 576] · query^T        out^T[512, N rows] = values^T[512, 64 keys] · weights^T

Both products are transposed, so that keys and dims are on the side of the matrix unit that takes 64, and query rows on
the one that may be 8 or 16: nothing is padded (FlashMLA-ETAP). The first operand of the scores is keys, in shared
memory, whose layout suits the product; that of the output is values, in registers. The softmax, the rounding and the
way of the values into registers are those of sm90_fp8_absorb.py. One program runs on each multiprocessor, with three
roles, whose schedule is in docs/kernels.md.

Both `attend` roles compute the same scores. That costs bandwidth of shared memory (40 KiB of 160 for a block), which is
not what limits them: a block of 41 KiB takes longer to arrive. In exchange they never wait for each other: no query,
weights, maxima or factors pass between them, and a slot is free as soon as both have read it into registers. A block's
output is summed apart and then added in float32: the matrix unit's own FP8 sum keeps fewer bits.

Registers: 2 · 240 + 24 of 512 for each of 128 threads. Shared memory for 16 rows, KiB: ring 4 · (32 + 8 + 1), query in
BF16 16 + 2, rounded 2 · (8 + 2), weights 2 · 1; together 205 of 227.

Memory per item of n keys: reads n · 656 bytes and N · 1,152 of queries; writes N · (1,024 + 4).

Source: FlashMLA-ETAP, for the transposed products.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..gluon_names import aggregate, thread_barrier
from .items import ITEM_END, ITEM_PAGE, ITEM_PARTIAL, ITEM_ROWS, ITEM_STRIP
from .schedule import AbsorbCapacity
from .sm90_fp8_absorb import PRODUCER_REGISTERS, launch_arguments
from .sm90_parts.fp8_query import QUERY_TILES, round_rows
from .sm90_parts.fp8_tiles import (
    LOG2_FP8_MAX,
    SCALE_RANGE,
    SCALE_WIDTH,
    Ring,
    clear_behind,
    copy_block,
    finish,
    inverse_of_power,
    log2_of_power,
    next_slot,
    scales_of_keys,
    values_tile,
    write_out,
)
from .sm90_parts.query import QUERY_COLUMNS, copy_query
from .sm90_parts.work_items import BLOCK, LATENT, NO_SCORE, ROPE, blocks_of, count_items, item_at, unseen_keys

ROWS = (8, 16)
"""Query rows of an item that the kernel is compiled for. With 32, the kernel for 64 rows is faster, with half of a tile
empty."""

SLOTS = gl.constexpr(4)  # blocks in the ring
CONSUMER_REGISTERS = gl.constexpr(240)

# As fp8_consumers.KEYS_OF_DIMS, of keys 2c, 2c + 1, 2c + 8 and 2c + 9 of a thread with two dims each, but in another
# order: position i of every 16 gets key (i >> 1) + 8·(i & 1). Keys that are neighbours in a thread's part of scores^T
# are neighbours in the weights.
KEYS_OF_DIMS = gl.constexpr("prmt.b32 $0, $2, $3, 0x6240; prmt.b32 $1, $2, $3, 0x7351;")


# No `from __future__ import annotations` here: an aggregate needs its annotations as types.
@aggregate
class Query:
    """An item's query in shared memory as it comes, BF16, and its barriers."""

    content: gl.shared_memory_descriptor  # [N, LATENT]
    rope: gl.shared_memory_descriptor  # [N, ROPE]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@aggregate
class Side:
    """Shared memory that each of the two `attend` roles has for itself."""

    q_content: gl.shared_memory_descriptor  # e4m3 [N, LATENT], the rounded query
    q_rope: gl.shared_memory_descriptor  # BF16 [N, ROPE]
    weights: gl.shared_memory_descriptor  # e4m3 [N, BLOCK]


@gluon.jit
def copy(
    q_desc, q_rope_desc, content_desc, rope_desc, scale_desc, query, ring, work_ptr, page_table_ptr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Fill the ring with the blocks of all items, and in front of them copy the item's query. `done` counts items."""
    STRIP: gl.constexpr = q_desc.block_type.shape[1]
    N: gl.constexpr = query.content.shape[0]
    STRIPS: gl.constexpr = N // STRIP
    q_tiles = query.content._reinterpret(gl.bfloat16, [QUERY_TILES * STRIPS, 1, STRIP, QUERY_COLUMNS], q_desc.layout)
    q_rope_tiles = query.rope._reinterpret(gl.bfloat16, [STRIPS, 1, STRIP, ROPE], q_rope_desc.layout)
    slot = 0
    phase = 0
    done = 0
    for index in range(count_items(work_ptr)):
        item_ptr = item_at(work_ptr, index)
        first, last, n_blocks = blocks_of(item_ptr)
        pages = page_table_ptr + gl.load(item_ptr + ITEM_PAGE)
        page = gl.load(pages + last)
        strips_ptr = work_ptr + gl.load(item_ptr + ITEM_STRIP)
        n_rows = gl.load(item_ptr + ITEM_ROWS)
        mbarrier.wait(query.empty, (done & 1) ^ 1)
        mbarrier.expect(query.full, N * 2 * (LATENT + ROPE))
        copy_query(q_rope_desc, 0, q_rope_tiles, 0, 1, query.full, strips_ptr, n_rows, N, HEADS)
        copy_query(q_desc, 0, q_tiles, 0, QUERY_TILES, query.full, strips_ptr, n_rows, N, HEADS)
        done += 1  # noqa: SIM113 - Gluon has no enumerate
        for back in range(n_blocks):
            row = page * BLOCK
            page = gl.load(pages + gl.maximum(last - back - 1, first))  # the next one, before the wait
            mbarrier.wait(ring.empty.index(slot), phase ^ 1)
            copy_block(content_desc, rope_desc, scale_desc, ring, slot, row)
            slot, phase = next_slot(slot, phase, SLOTS)


@gluon.jit
def _key_scales(scale_s, slot, LAYOUT: gl.constexpr):
    """Scales of the keys in the layout of the rows of a product `[64, N]`."""
    KEYS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 8]],
        [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        [[0, 16], [0, 32]],
        [],
        [1, BLOCK],
    )
    return scales_of_keys(scale_s, slot, KEYS, LAYOUT)


@gluon.jit
def _by_position(weights_t, N: gl.constexpr):
    """`[N rows, 64]` of weights^T `[64 keys, N]`: two keys of a thread side by side, see KEYS_OF_DIMS."""
    return weights_t.reshape([4, 2, 8, N]).permute([3, 0, 2, 1]).reshape([N, BLOCK])


@gluon.jit
def attend(
    ring, query, side, partial_out_ptr, partial_lse2_ptr, work_ptr, scale_log2e, SIDE: gl.constexpr,
    HEADS: gl.constexpr, QUERY_TOKENS: gl.constexpr,
):  # fmt: skip
    """Attend in all items: columns [256 * SIDE, 256 * SIDE + 256) of the output, in four tiles of 64; the lse2 if SIDE
    is 0."""
    N: gl.constexpr = query.content.shape[0]
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])  # scores^T and out^T
    ROPE_RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, RESULT, 4)
    BY_KEY: gl.constexpr = gl.SliceLayout(1, RESULT)
    BY_ROW: gl.constexpr = gl.SliceLayout(0, RESULT)
    FIRST: gl.constexpr = 256 * SIDE
    pairs_s = ring.content._reinterpret(gl.int16, [SLOTS, BLOCK, LATENT // 2], gl.NVMMASharedLayout(128, 16))
    q_content = side.q_content.permute((1, 0))
    q_rope = side.q_rope.permute((1, 0))

    slot = 0
    phase = 0
    done = 0
    for index in range(count_items(work_ptr)):
        item_ptr = item_at(work_ptr, index)
        _, last, n_blocks = blocks_of(item_ptr)
        n_rows = gl.load(item_ptr + ITEM_ROWS)
        rows = gl.arange(0, N, BY_ROW)
        valid = gl.load(item_ptr + ITEM_END) - last * BLOCK
        limit = valid - unseen_keys(item_ptr, rows, HEADS, QUERY_TOKENS)  # of a row's keys in the block, [N]
        mbarrier.wait(query.full, done & 1)
        row_scale = (
            round_rows(query.content, query.rope, query.empty, side.q_content, side.q_rope, BY_ROW) * scale_log2e
        )
        if valid < BLOCK:
            mbarrier.wait(ring.full.index(slot), phase)
            clear_behind(pairs_s.index(slot), FIRST, valid)
        fence_async_shared()
        thread_barrier()

        zeros = gl.zeros([64, N], gl.float32, RESULT)
        rope_zeros = gl.zeros([64, N], gl.float32, ROPE_RESULT)
        acc0, acc1, acc2, acc3, sums = zeros, zeros, zeros, zeros, zeros
        ceiling = gl.full([N], NO_SCORE, gl.float32, BY_ROW)
        level = ceiling
        for _ in range(n_blocks):
            mbarrier.wait(ring.full.index(slot), phase)
            content = ring.content.index(slot)
            pairs = pairs_s.index(slot)
            started_rope = warpgroup_mma(ring.rope.index(slot), q_rope, rope_zeros, use_acc=False, is_async=True)
            started = warpgroup_mma(content, q_content, zeros, use_acc=False, is_async=True)
            key_scale = _key_scales(ring.scale, slot, BY_KEY)
            v0 = values_tile(pairs, FIRST, KEYS_OF_DIMS, OPERAND)
            v1 = values_tile(pairs, FIRST + 64, KEYS_OF_DIMS, OPERAND)
            v2 = values_tile(pairs, FIRST + 128, KEYS_OF_DIMS, OPERAND)
            v3 = values_tile(pairs, FIRST + 192, KEYS_OF_DIMS, OPERAND)
            scores, rope_scores = warpgroup_mma_wait(0, deps=[started, started_rope])
            mbarrier.arrive(ring.empty.index(slot))
            slot, phase = next_slot(slot, phase, SLOTS)

            keys = gl.arange(0, BLOCK, BY_KEY)
            key_scale = gl.where(keys < valid, key_scale, 1.0)
            visible = (keys < valid)[:, None] if QUERY_TOKENS == 1 else keys[:, None] < limit[None, :]
            valid = BLOCK  # of all other blocks
            limit += BLOCK
            scores = scores + gl.convert_layout(rope_scores, RESULT, assert_trivial=True)
            t = scores * key_scale[:, None] * row_scale[None, :] + log2_of_power(key_scale)[:, None]
            t = gl.where(visible, t, NO_SCORE)
            own = gl.max(t, 0)
            ceiling = gl.maximum(ceiling, own)
            new_level = gl.maximum(own, ceiling - SCALE_RANGE)
            rescale = gl.exp2(level - new_level)[None, :]
            level = new_level
            weights = gl.exp2(t - (level - LOG2_FP8_MAX)[None, :])
            side.weights.store(_by_position(weights.to(gl.float8e4nv), N))
            fence_async_shared()
            thread_barrier()
            weights_t = side.weights.permute((1, 0))
            next0 = warpgroup_mma(v0, weights_t, zeros, use_acc=False, is_async=True)
            next1 = warpgroup_mma(v1, weights_t, zeros, use_acc=False, is_async=True)
            next2 = warpgroup_mma(v2, weights_t, zeros, use_acc=False, is_async=True)
            next3 = warpgroup_mma(v3, weights_t, zeros, use_acc=False, is_async=True)
            sums = sums * rescale + weights * inverse_of_power(key_scale)[:, None]
            added0, added1, added2, added3 = warpgroup_mma_wait(0, deps=[next0, next1, next2, next3])
            acc0 = acc0 * rescale + added0
            acc1 = acc1 * rescale + added1
            acc2 = acc2 * rescale + added2
            acc3 = acc3 * rescale + added3
        done += 1  # noqa: SIM113 - Gluon has no enumerate
        total = gl.sum(sums, 0)
        norm, lse2 = finish(total, level, QUERY_TOKENS)
        norm = norm[None, :]
        partial = gl.load(item_ptr + ITEM_PARTIAL)
        if SIDE == 0:
            gl.store(partial_lse2_ptr + partial + rows, lse2, mask=rows < n_rows)
        first_element = partial.to(gl.int64) * LATENT + FIRST
        write_out(partial_out_ptr + first_element, acc0 * norm, n_rows, N)
        write_out(partial_out_ptr + first_element + 64, acc1 * norm, n_rows, N)
        write_out(partial_out_ptr + first_element + 128, acc2 * norm, n_rows, N)
        write_out(partial_out_ptr + first_element + 192, acc3 * norm, n_rows, N)


@gluon.jit
def absorb_fp8_few_heads_kernel(
    q_desc,  # BF16 [T, H, 512], block [1, strip, 64]
    q_rope_desc,  # BF16 [T, H, 64], block [1, strip, 64]
    content_desc,  # e4m3 [slots, 512], rows of 656 bytes, block [64, 512]
    rope_desc,  # BF16 [slots, 64], the same rows, block [64, 64]
    scale_desc,  # float32 [slots, 4], the same rows, block [64, 4]
    work_ptr,  # int32, see schedule.py
    page_table_ptr,  # int32
    partial_out_ptr,  # BF16 or float32 [P * H, 512]
    partial_lse2_ptr,  # float32 [P * H]
    scale_log2e,
    N: gl.constexpr,  # rows of an item
    HEADS: gl.constexpr,  # H
    QUERY_TOKENS: gl.constexpr,  # query tokens of a request, all of an item
):
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    QUERY: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [N, LATENT], QUERY)
    q_rope_s = gl.allocate_shared_memory(gl.bfloat16, [N, ROPE], QUERY)
    q_content_s = gl.allocate_shared_memory(gl.float8e4nv, [2, N, LATENT], gl.NVMMASharedLayout(128, 8))
    rounded_rope_s = gl.allocate_shared_memory(gl.bfloat16, [2, N, ROPE], QUERY)
    content_s = gl.allocate_shared_memory(gl.float8e4nv, [SLOTS, BLOCK, LATENT], content_desc.layout)
    rope_s = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK, ROPE], rope_desc.layout)
    scale_s = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK, SCALE_WIDTH], scale_desc.layout)
    weights_s = gl.allocate_shared_memory(gl.float8e4nv, [2, N, BLOCK], gl.NVMMASharedLayout(64, 8))
    of_query = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)
    q_full, q_empty = of_query.index(0), of_query.index(1)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()

    query = Query(q_s, q_rope_s, q_full, q_empty)
    ring = Ring(content_s, rope_s, scale_s, full, empty)
    first = Side(q_content_s.index(0), rounded_rope_s.index(0), weights_s.index(0))
    second = Side(q_content_s.index(1), rounded_rope_s.index(1), weights_s.index(1))
    # The argument tuples stand in the call itself: constants in a tuple with a name would become run-time values.
    gl.warp_specialize(
        [
            (attend, (
                ring, query, first, partial_out_ptr, partial_lse2_ptr, work_ptr, scale_log2e, 0, HEADS, QUERY_TOKENS,
            )),
            (attend, (
                ring, query, second, partial_out_ptr, partial_lse2_ptr, work_ptr, scale_log2e, 1, HEADS, QUERY_TOKENS,
            )),
            (copy, (
                q_desc, q_rope_desc, content_desc, rope_desc, scale_desc, query, ring, work_ptr, page_table_ptr, HEADS,
            )),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def run(
    q_absorbed: Tensor,
    q_rope: Tensor,
    pool: Tensor,
    work: Tensor,
    page_table: Tensor,
    capacity: AbsorbCapacity,
    partial_out: Tensor,
    partial_lse2: Tensor,
    *,
    softmax_scale: float,
) -> None:
    """Launch the kernel; arguments as for sm90_fp8_absorb.run, but with a work list of tiles of 8 or 16 rows."""
    if capacity.tile_rows not in ROWS:
        raise ValueError(f"the work list must be of tiles of {ROWS} rows, not {capacity.tile_rows}")
    arguments = q_absorbed, q_rope, pool, work, page_table, capacity, partial_out, partial_lse2, softmax_scale
    absorb_fp8_few_heads_kernel[(capacity.programs,)](
        *launch_arguments(*arguments),
        N=capacity.tile_rows,
        HEADS=capacity.query_heads,
        QUERY_TOKENS=capacity.query_tokens,
        num_warps=4,
    )
