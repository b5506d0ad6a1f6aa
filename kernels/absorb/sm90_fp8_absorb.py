"""Absorb attention on Hopper over FP8 latent rows, in items of up to 64 query rows.

    out[r] = softmax_n(softmax_scale · q[r] · k[n]) · k[n, :512]        q, k: 512 content (e4m3) + 64 rotary (BF16)

rounded as reference.fp8.absorb_fp8 does, except for the order of blocks. One persistent launch over a work list
(schedule.py); an item's result is a partial. Values are keys, and Hopper's FP8 product needs every operand in
shared memory to be contiguous along the axis that it sums over; keys are contiguous along the other. So the output is
computed transposed,

    out^T[512, 64 rows] = values^T[512, 64 keys] · weights^T[64 keys, 64 rows]

with the values as the first operand, which may come from registers, where there is no such rule. They are never written
back to shared memory. One program runs on each multiprocessor, with four roles, whose schedule is in docs/kernels.md.

Softmax: with t = score · log2(e) + log2(key's scale) and c = max of t over a block, the weights of the block are
2^(t - c) · 448, rounded: the running maximum of the scores cancels out of what SnapMLA computes. Output and sum are
counted in units of 2^c / 448; c is kept from falling more than 24 below the largest one before. Scales are powers of
two, so their logarithms and inverses are arithmetic on exponents; other scales would give wrong results.

The matrix unit's FP8 sum keeps about 13 bits below its largest term: accumulated in place, sums over 26,472 values with
a non-zero mean came out 9 % too small. So a block's products are summed apart and then added in float32. There are
registers for that because the query stays in shared memory.

Registers, for each of 128 threads of 512: 104 + 2 · 192 + 24. Shared memory, KiB: ring 4 · (32 + 8 + 1), query 32 + 8,
weights 2 · 4, together 212 of 227.

Memory per item of n keys: reads n · 656 bytes, from L2 when another item with these keys runs beside it, and rows ·
1,152 of queries; writes rows · (1,024 + 4).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..constants import LOG2E
from ..storage.latent_rows import LatentRowLayout
from .items import ITEM_PAGE, ITEM_ROWS, ITEM_STRIP
from .schedule import AbsorbCapacity
from .sm90_parts.fp8_consumers import NORM_STAGES, STAGES, Shared, compute_scores, sum_values
from .sm90_parts.fp8_query import QUERY_TILES
from .sm90_parts.fp8_tiles import PANEL, SCALE_WIDTH, Ring, copy_block, next_slot
from .sm90_parts.query import QUERY_COLUMNS, copy_query, for_tma
from .sm90_parts.work_items import BLOCK, LATENT, ROPE, ROWS, blocks_of, count_items, item_at

VALUE_REGISTERS = gl.constexpr(192)
PRODUCER_REGISTERS = gl.constexpr(24)

SLOTS = 4
"""Blocks in the ring."""


def supports(device: torch.device, layout: LatentRowLayout, heads: int, page_size: int) -> bool:
    """Return whether this kernel or that of sm90_fp8_few_heads.py supports such a cache: on a Hopper GPU, with
    DeepSeek's dimensions."""
    on_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    dims = (layout.kv_lora_rank, layout.qk_rope_head_dim)
    return on_hopper and dims == (LATENT.value, ROPE.value) and page_size == BLOCK.value and heads % 8 == 0


@gluon.jit
def copy(q_desc, q_rope_desc, content_desc, rope_desc, scale_desc, ring, work_ptr, page_table_ptr, HEADS: gl.constexpr):
    """Fill the ring: for every item with its query rows in BF16, in two slots, and then with its blocks."""
    SLOTS: gl.constexpr = ring.content.shape[0]
    STRIP: gl.constexpr = q_desc.block_type.shape[1]
    STRIPS: gl.constexpr = ROWS // STRIP
    TILES: gl.constexpr = QUERY_TILES // 2  # of a slot
    TILE_BYTES: gl.constexpr = ROWS * QUERY_COLUMNS * 2
    q_tiles = ring.content._reinterpret(gl.bfloat16, [SLOTS * TILES * STRIPS, 1, STRIP, QUERY_COLUMNS], q_desc.layout)
    q_rope_tiles = ring.rope._reinterpret(gl.bfloat16, [SLOTS * STRIPS, 1, STRIP, ROPE], q_rope_desc.layout)
    slot = 0
    phase = 0
    for index in range(count_items(work_ptr)):
        item_ptr = item_at(work_ptr, index)
        first, last, n_blocks = blocks_of(item_ptr)
        pages = page_table_ptr + gl.load(item_ptr + ITEM_PAGE)
        page = gl.load(pages + last)
        strips_ptr = work_ptr + gl.load(item_ptr + ITEM_STRIP)
        n_rows = gl.load(item_ptr + ITEM_ROWS)
        for half in gl.static_range(2):
            full = ring.full.index(slot)
            mbarrier.wait(ring.empty.index(slot), phase ^ 1)
            mbarrier.expect(full, (TILES + 1 - half) * TILE_BYTES)
            if half == 0:
                copy_query(q_rope_desc, 0, q_rope_tiles, slot, 1, full, strips_ptr, n_rows, ROWS, HEADS)
            column = half * (LATENT // 2)
            copy_query(q_desc, column, q_tiles, slot * TILES, TILES, full, strips_ptr, n_rows, ROWS, HEADS)
            slot, phase = next_slot(slot, phase, SLOTS)
        for back in range(n_blocks):
            row = page * BLOCK
            page = gl.load(pages + gl.maximum(last - back - 1, first))  # the next one, before the wait
            mbarrier.wait(ring.empty.index(slot), phase ^ 1)
            copy_block(content_desc, rope_desc, scale_desc, ring, slot, row)
            slot, phase = next_slot(slot, phase, SLOTS)


@gluon.jit
def absorb_fp8_hopper_kernel(
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
    SLOTS: gl.constexpr,
    HEADS: gl.constexpr,  # H
    QUERY_TOKENS: gl.constexpr,  # query tokens of a request; 1 where all of them see all keys
):
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    LINES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    content_s = gl.allocate_shared_memory(gl.float8e4nv, [SLOTS, BLOCK, LATENT], content_desc.layout)
    rope_s = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK, ROPE], rope_desc.layout)
    scale_s = gl.allocate_shared_memory(gl.float32, [SLOTS, BLOCK, SCALE_WIDTH], scale_desc.layout)
    PANELS: gl.constexpr = LATENT // PANEL
    q_content_s = gl.allocate_shared_memory(gl.float8e4nv, [PANELS, ROWS, PANEL], gl.NVMMASharedLayout(128, 8))
    q_rope_s = gl.allocate_shared_memory(gl.bfloat16, [ROWS, ROPE], rope_desc.layout)
    weights_s = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, ROWS, BLOCK], gl.NVMMASharedLayout(64, 8))
    rescale_s = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], LINES)
    norm_s = gl.allocate_shared_memory(gl.float32, [NORM_STAGES, ROWS], LINES)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    weights_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    weights_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BARRIER)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(STAGES):
        mbarrier.init(weights_full.index(i), count=1)
        mbarrier.init(weights_empty.index(i), count=2)
    fence_async_shared()

    ring = Ring(content_s, rope_s, scale_s, full, empty)
    shared = Shared(q_content_s, q_rope_s, weights_s, rescale_s, norm_s, weights_full, weights_empty)
    # The argument tuples stand in the call itself: constants in a tuple with a name would become run-time values.
    gl.warp_specialize(
        [
            (compute_scores, (ring, shared, partial_lse2_ptr, work_ptr, scale_log2e, HEADS, QUERY_TOKENS)),
            (sum_values, (ring, shared, partial_out_ptr, work_ptr, 0)),
            (sum_values, (ring, shared, partial_out_ptr, work_ptr, 1)),
            (copy, (
                q_desc, q_rope_desc, content_desc, rope_desc, scale_desc, ring, work_ptr, page_table_ptr, HEADS,
            )),
        ],
        [4, 4, 1],
        [VALUE_REGISTERS, VALUE_REGISTERS, PRODUCER_REGISTERS],
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
    causal: bool = True,
) -> None:
    """Launch the kernel.

    Args:
        q_absorbed: `[T, H, 512]`; q_rope: `[T, H, 64]`; of the requests in the work list. BF16, with contiguous
            columns, strides and address at multiples of 16 bytes; anything else is copied to such a tensor first.
        pool: uint8 `[slots, 656]`, pages of 64 rows, see latent_rows.py; rows behind an item's last key may be NaN.
        work: int32 `[capacity.size]`, see schedule.py, of tiles of 64 rows; read on the device only.
        page_table: int32, indexed by the items as a flat array.
        partial_out: BF16 or float32 `[P, capacity.heads, 512]`, contiguous, each normalised over its own keys;
            partial_lse2: float32 `[P, capacity.heads]`, base 2. Rows that no item names are not written.
        causal: the list has tails, which query tokens of a request see one key after the other.
    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    if capacity.tile_rows != ROWS.value:
        raise ValueError(f"the work list must be of tiles of {ROWS.value} rows, not {capacity.tile_rows}")
    arguments = q_absorbed, q_rope, pool, work, page_table, capacity, partial_out, partial_lse2, softmax_scale
    absorb_fp8_hopper_kernel[(capacity.programs,)](
        *launch_arguments(*arguments),
        SLOTS=SLOTS,
        HEADS=capacity.query_heads,
        QUERY_TOKENS=capacity.query_tokens if causal else 1,
        num_warps=4,
    )


def launch_arguments(
    q_absorbed: Tensor,
    q_rope: Tensor,
    pool: Tensor,
    work: Tensor,
    page_table: Tensor,
    capacity: AbsorbCapacity,
    partial_out: Tensor,
    partial_lse2: Tensor,
    softmax_scale: float,
) -> list[Any]:
    """Return the arguments that this kernel and that of sm90_fp8_few_heads.py have in common, in their order. Raise a
    ValueError if one is not as `run` says."""
    layout = LatentRowLayout(LATENT.value, ROPE.value)
    layout.check(pool)
    if pool.ndim != 2:
        raise ValueError(f"the pool must be [slots, row_bytes], not {list(pool.shape)}")
    if softmax_scale <= 0:
        raise ValueError(f"softmax_scale must be positive, not {softmax_scale}")
    heads, partials, floats = capacity.query_heads, capacity.max_partial_rows, (torch.bfloat16, torch.float32)
    for name, tensor, shape, dtypes in (
        ("q_absorbed", q_absorbed, (len(q_absorbed), heads, LATENT.value), floats),
        ("q_rope", q_rope, (len(q_absorbed), heads, ROPE.value), floats),
        ("work", work, (capacity.size,), (torch.int32,)),
        ("partial_out", partial_out, (partials, capacity.heads, LATENT.value), floats),
        ("partial_lse2", partial_lse2, (partials, capacity.heads), (torch.float32,)),
    ):
        if tensor.shape != shape or tensor.dtype not in dtypes:
            raise ValueError(f"{name} must be {dtypes} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
    for name, tensor in dict(work=work, partial_out=partial_out, partial_lse2=partial_lse2).items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous; its strides are {tensor.stride()}")
    scales = pool[:, layout.scale_offset : layout.rope_offset].view(torch.float32)  # [slots, 4], the first one counts
    of_query = [1, capacity.strip_rows, QUERY_COLUMNS.value]
    descriptors = [
        TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, dtype))
        for tensor, dtype, block in (
            (for_tma(q_absorbed), gl.bfloat16, of_query),
            (for_tma(q_rope), gl.bfloat16, of_query),
            (layout.content(pool), gl.float8e4nv, [BLOCK.value, LATENT.value]),
            (layout.rope(pool), gl.bfloat16, [BLOCK.value, ROPE.value]),
            (scales, gl.float32, [BLOCK.value, SCALE_WIDTH.value]),
        )
    ]
    return [*descriptors, work, page_table, partial_out, partial_lse2, softmax_scale * LOG2E]
