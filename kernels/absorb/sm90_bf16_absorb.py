"""Absorb attention on Hopper in BF16, over private tails and over segments for which many queries are stacked.

    out[r] = softmax_n(softmax_scale · q[r] · k[n]) · k[n, :512]        q, k: 576 = 512 content + 64 rotary

One persistent launch over a work list (schedule.py). An item is up to 64 query rows that share a range of keys of a
paged latent cache; its result is a partial. Over a tail, the query tokens of a request see one key after the other. One
program runs on each multiprocessor, with five roles, whose schedule is in docs/kernels.md.

Content and rotary columns of a query are read from two tensors, as SGLang has them. Three quarters of the content stay
in registers of the score role. That leaves shared memory for more than two blocks of keys, and saves its bandwidth,
which is what limits scores of 64 x 64. They reach the registers through the ring, in front of the item's first block.

Registers: 168 + 2 · 160 + 24 of 512 for each of 128 threads; with 128 accumulators the compiler overlaps products only
if it has at least 160. Shared memory, KiB: ring 11 · 16, rotary ring 2 · 8, query 16 + 8, weights 8; 224 of 227.

Memory per item of n keys: reads n · 1,152 bytes, from L2 when another item with these keys runs beside it, and rows ·
1,152 of queries; writes rows · (1,024 + 4).
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..constants import LOG2E
from .items import ITEM_PAGE, ITEM_ROWS, ITEM_STRIP
from .schedule import AbsorbCapacity
from .sm90_parts.bf16_consumers import PART, REGISTER_PARTS, ROPE_STAGES, Shared, score, sum_values
from .sm90_parts.query import QUERY_COLUMNS, copy_query, for_tma
from .sm90_parts.work_items import BLOCK, LATENT, ROPE, ROWS, blocks_of, count_items, item_at

SLOTS = gl.constexpr(11)  # quarters in the ring
SHARED_PARTS = gl.constexpr(1)  # quarters of the query in shared memory
VALUE_REGISTERS = gl.constexpr(160)
PRODUCER_REGISTERS = gl.constexpr(24)


def supports(device: torch.device, dtype: torch.dtype, kv_lora_rank: int, qk_rope_head_dim: int, heads: int) -> bool:
    """Return whether the kernel supports such a latent cache: on a Hopper GPU, in BF16, with DeepSeek's dimensions."""
    on_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    dims = (kv_lora_rank, qk_rope_head_dim)
    return on_hopper and dtype == torch.bfloat16 and dims == (LATENT.value, ROPE.value) and heads % 8 == 0


@gluon.jit
def copy_keys(q_desc, content_desc, rope_desc, shared, work_ptr, page_table_ptr, HEADS: gl.constexpr):
    """Fill the ring: for every item with the quarters of its query that go to registers, and then with its blocks.

    One role does both, because a barrier only tells odd uses of a slot from even ones: whoever waits for a slot must
    see every use of it.
    """
    STRIP: gl.constexpr = q_desc.block_type.shape[1]
    TILES: gl.constexpr = PART // QUERY_COLUMNS  # of a quarter
    shape: gl.constexpr = [TILES * SLOTS * (ROWS // STRIP), 1, STRIP, QUERY_COLUMNS]
    tiles = shared.ring._reinterpret(gl.bfloat16, shape, q_desc.layout)
    used = 0
    taken = 0
    for index in range(count_items(work_ptr)):
        item_ptr = item_at(work_ptr, index)
        first, last, n_blocks = blocks_of(item_ptr)
        pages = page_table_ptr + gl.load(item_ptr + ITEM_PAGE)
        page = gl.load(pages + last)
        strips_ptr = work_ptr + gl.load(item_ptr + ITEM_STRIP)
        n_rows = gl.load(item_ptr + ITEM_ROWS)
        for part in gl.static_range(REGISTER_PARTS):
            slot = used % SLOTS
            full = shared.full.index(slot)
            mbarrier.wait(shared.empty.index(slot), ((used // SLOTS) & 1) ^ 1)
            mbarrier.expect(full, content_desc.block_type.nbytes)
            copy_query(q_desc, part * PART, tiles, TILES * slot, TILES, full, strips_ptr, n_rows, ROWS, HEADS)
            used += 1
        for back in range(n_blocks):
            row = page * BLOCK
            page = gl.load(pages + gl.maximum(last - back - 1, first))  # the next one, before the waits
            stage = taken % ROPE_STAGES
            mbarrier.wait(shared.rope_empty.index(stage), ((taken // ROPE_STAGES) & 1) ^ 1)
            mbarrier.expect(shared.rope_full.index(stage), rope_desc.block_type.nbytes)
            place = shared.rope_s.index(stage)
            tma.async_copy_global_to_shared(rope_desc, [row, LATENT], shared.rope_full.index(stage), place)
            for part in gl.static_range(4):
                slot = used % SLOTS
                full = shared.full.index(slot)
                mbarrier.wait(shared.empty.index(slot), ((used // SLOTS) & 1) ^ 1)
                mbarrier.expect(full, content_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(content_desc, [row, part * PART], full, shared.ring.index(slot))
                used += 1
            taken += 1


@gluon.jit
def copy_queries(q_desc, q_rope_desc, shared, work_ptr, HEADS: gl.constexpr):
    """Copy the part of every item's query that stays in shared memory: the last quarter and the rotary columns."""
    STRIP: gl.constexpr = q_desc.block_type.shape[1]
    STRIPS: gl.constexpr = ROWS // STRIP
    TILES: gl.constexpr = SHARED_PARTS * PART // QUERY_COLUMNS
    TILE_BYTES: gl.constexpr = q_desc.block_type.nbytes * STRIPS
    q_tiles = shared.q_s._reinterpret(gl.bfloat16, [TILES * STRIPS, 1, STRIP, QUERY_COLUMNS], q_desc.layout)
    rope_tiles = shared.q_rope_s._reinterpret(gl.bfloat16, [STRIPS, 1, STRIP, QUERY_COLUMNS], q_rope_desc.layout)
    done = 0
    for index in range(count_items(work_ptr)):
        item_ptr = item_at(work_ptr, index)
        strips_ptr = work_ptr + gl.load(item_ptr + ITEM_STRIP)
        n_rows = gl.load(item_ptr + ITEM_ROWS)
        mbarrier.wait(shared.q_empty, (done & 1) ^ 1)
        mbarrier.expect(shared.q_full, (TILES + 1) * TILE_BYTES)
        copy_query(q_rope_desc, 0, rope_tiles, 0, 1, shared.q_full, strips_ptr, n_rows, ROWS, HEADS)
        column: gl.constexpr = REGISTER_PARTS * PART
        copy_query(q_desc, column, q_tiles, 0, TILES, shared.q_full, strips_ptr, n_rows, ROWS, HEADS)
        done += 1  # noqa: SIM113 - Gluon has no enumerate


@gluon.jit
def absorb_hopper_kernel(
    q_desc,  # BF16 [T, H, 512], block [1, strip, 64]
    q_rope_desc,  # BF16 [T, H, 64], block [1, strip, 64]
    content_desc,  # BF16 [pages * 64, 576], block [64, 128]
    rope_desc,  # the same, block [64, 64]
    work_ptr,  # int32, see schedule.py
    page_table_ptr,  # int32
    partial_out_ptr,  # BF16 [P * H, 512]
    partial_lse2_ptr,  # float32 [P * H]
    scale_log2e,
    HEADS: gl.constexpr,  # of a query token
    QUERY_TOKENS: gl.constexpr,  # query tokens of a request
):
    BARRIER: gl.constexpr = mbarrier.MBarrierLayout()
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, BLOCK, PART], content_desc.layout)
    rope_s = gl.allocate_shared_memory(gl.bfloat16, [ROPE_STAGES, BLOCK, ROPE], rope_desc.layout)
    q_s = gl.allocate_shared_memory(gl.bfloat16, [SHARED_PARTS, ROWS, PART], content_desc.layout)
    q_rope_s = gl.allocate_shared_memory(gl.bfloat16, [ROWS, ROPE], rope_desc.layout)
    weights_s = gl.allocate_shared_memory(gl.bfloat16, [ROWS, BLOCK], rope_desc.layout)
    rescale_s = gl.allocate_shared_memory(gl.float32, [ROWS], LINE)
    norm_s = gl.allocate_shared_memory(gl.float32, [ROWS], LINE)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], BARRIER)
    rope_full = gl.allocate_shared_memory(gl.int64, [ROPE_STAGES, 1], BARRIER)
    rope_empty = gl.allocate_shared_memory(gl.int64, [ROPE_STAGES, 1], BARRIER)
    weights_full = gl.allocate_shared_memory(gl.int64, [2, 1], BARRIER)  # for either half of the output
    others = gl.allocate_shared_memory(gl.int64, [3, 1], BARRIER)
    q_full, q_empty, weights_empty = others.index(0), others.index(1), others.index(2)
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(ROPE_STAGES):
        mbarrier.init(rope_full.index(i), count=1)
        mbarrier.init(rope_empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(weights_full.index(i), count=1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    mbarrier.init(weights_empty, count=2)
    fence_async_shared()

    shared = Shared(
        ring, rope_s, q_s, q_rope_s, weights_s, rescale_s, norm_s, full, empty, rope_full, rope_empty, q_full,
        q_empty, weights_full, weights_empty,
    )  # fmt: skip
    # The argument tuples stand in the call itself: constants in a tuple with a name would become run-time values.
    gl.warp_specialize(
        [
            (score, (shared, partial_lse2_ptr, work_ptr, scale_log2e, HEADS, QUERY_TOKENS)),
            (sum_values, (shared, partial_out_ptr, work_ptr, 0)),
            (sum_values, (shared, partial_out_ptr, work_ptr, 1)),
            (copy_keys, (q_desc, content_desc, rope_desc, shared, work_ptr, page_table_ptr, HEADS)),
            (copy_queries, (q_desc, q_rope_desc, shared, work_ptr, HEADS)),
        ],
        [4, 4, 1, 1],
        [VALUE_REGISTERS, VALUE_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


def _describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(tensor, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


def run(
    q_absorbed: Tensor,
    q_rope: Tensor,
    latent_pages: Tensor,
    work: Tensor,
    page_table: Tensor,
    capacity: AbsorbCapacity,
    partial_out: Tensor,
    partial_lse2: Tensor,
    *,
    softmax_scale: float,
) -> None:
    """Launch the kernel.

    Args:
        q_absorbed: BF16 `[T, H, 512]`; q_rope: BF16 `[T, H, 64]`; of any strides. Where columns are not contiguous, or
            strides and address no multiples of 16 bytes, they are copied first.
        latent_pages: BF16 `[pages, 64, 1, 576]`; values behind an item's last key may be NaN.
        work: int32 `[capacity.size]`, see schedule.py; read on the device only.
        page_table: int32, indexed by the items as a flat array.
        partial_out: BF16 `[P, capacity.heads, 512]`, each normalised over its own keys; partial_lse2: float32
            `[P, capacity.heads]`, base 2. Rows that no item names are not written. All tensors but queries are
            contiguous.
        softmax_scale: positive, because the running maximum is taken before it is applied.
    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    columns, partials = LATENT.value + ROPE.value, (capacity.max_partial_rows, capacity.heads)
    for name, tensor, shape, dtype in (
        ("q_absorbed", q_absorbed, (len(q_absorbed), capacity.query_heads, LATENT.value), torch.bfloat16),
        ("q_rope", q_rope, (len(q_absorbed), capacity.query_heads, ROPE.value), torch.bfloat16),
        ("latent_pages", latent_pages, (len(latent_pages), BLOCK.value, 1, columns), torch.bfloat16),
        ("work", work, (capacity.size,), torch.int32),
        ("page_table", page_table, page_table.shape, torch.int32),
        ("partial_out", partial_out, (*partials, LATENT.value), torch.bfloat16),
        ("partial_lse2", partial_lse2, partials, torch.float32),
    ):
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(f"{name} must be {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
        if not (name.startswith("q_") or tensor.is_contiguous()):
            raise ValueError(f"{name} must be contiguous; its strides are {tensor.stride()}")
    if softmax_scale <= 0:
        raise ValueError(f"softmax_scale must be positive, not {softmax_scale}")
    keys, of_query = latent_pages.view(-1, columns), [1, capacity.strip_rows, QUERY_COLUMNS.value]
    absorb_hopper_kernel[(capacity.programs,)](
        _describe(for_tma(q_absorbed), of_query),
        _describe(for_tma(q_rope), of_query),
        _describe(keys, [BLOCK.value, PART.value]),
        _describe(keys, [BLOCK.value, ROPE.value]),
        work,
        page_table,
        partial_out,
        partial_lse2,
        softmax_scale * LOG2E,
        HEADS=capacity.query_heads,
        QUERY_TOKENS=capacity.query_tokens,
        num_warps=4,
    )
