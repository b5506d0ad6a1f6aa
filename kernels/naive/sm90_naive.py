"""Naive attention over expanded segments on Hopper, in BF16 or FP8: the operation of triton_naive.py, faster.

    out[b, h] = softmax_n(softmax_scale · (q_nope[b, h] · k_nope[n, h] + q_rope[b, h] · k_rope[n])) · v[n, h]

One persistent launch over a work list (schedule.py). In every program one warp copies key tiles to shared memory (TMA,
a ring of stages), and one to three warp groups of 64 rows each consume them (sm90_parts/consumers.py). It is written in
Gluon because Triton waits for every wgmma before it issues the next one.

Memory per work item of n keys: reads n·(dn + dv + dr)·2 bytes of keys and values in BF16, n·(dn + dv + 2·dr) in FP8,
from L2 where another row tile of the same head and keys runs at the same time; reads rows·(dn + dr)·2 bytes of queries
and writes rows·(dv + 1)·4 bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..constants import FP8
from ..sizes import CHUNK_TOKENS
from ..storage.expanded import ExpandedBuffers
from . import triton_naive
from .items import ITEM_BEGIN, ITEM_CHUNKS, ITEM_END, ITEM_FIELDS, ITEM_HEAD, N_ITEMS
from .schedule import WorkListCapacity
from .sm90_parts.consumers import consume
from .sm90_parts.operands import ROWS, Partials, Query, Ring, Scales, Work
from .tiles import Tile

CHUNK = gl.constexpr(CHUNK_TOKENS)
CONSUMER_REGISTERS = {1: 240, 2: 240, 3: 160}
"""Registers of a thread of a consumer, by the number of consumers, which share a multiprocessor's registers; one alone
gets what the producer leaves."""
PRODUCER_REGISTERS = 24

TILES = {
    torch.bfloat16: (
        Tile(block_rows=64, block_keys=128, num_stages=2),
        Tile(block_rows=128, block_keys=128, num_stages=2),
        Tile(block_rows=192, block_keys=64, num_stages=3),
    ),
    FP8: (
        Tile(block_rows=64, block_keys=128, num_stages=2, ctas_per_sm=2),
        Tile(block_rows=128, block_keys=128, num_stages=4),
    ),
}
"""Tiles by dtype, smallest first: the fastest on an H200 among the candidates of scripts/calibrate.py. A program has a
consumer for each 64 rows; in FP8 two programs of one consumer share a multiprocessor. A tile of 192 rows takes a fifth
less time for them than two of 128, which also compute for 64 rows that are not there."""


WIDE_TILES = (
    Tile(block_rows=64, block_keys=64, num_stages=2),
    Tile(block_rows=128, block_keys=64, num_stages=2),
)
"""Tiles for heads wider than 128, in BF16: what shared memory has room for. Not timed."""


class LayerKeys(triton_naive.LayerKeys):
    """The same with Gluon's descriptors, which have a layout in shared memory."""

    @staticmethod
    def _describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
        dtype = {torch.bfloat16: gl.bfloat16, FP8: gl.float8e4nv}[tensor.dtype]
        layout = gl.NVMMASharedLayout.get_default_for(block, dtype)
        return TensorDescriptor.from_tensor(tensor.view(-1, tensor.shape[-1]), block, layout)


def supports(buffers: ExpandedBuffers) -> bool:
    """Return whether the kernel can read these buffers: on a Hopper GPU, BF16 or FP8, head dimensions of 64 or 128, or
    in BF16 up to 256. (In FP8, where each tile's output is summed apart, that would need more registers than there
    are.)"""
    nope, v, rope = buffers.qk_nope_head_dim, buffers.v_head_dim, buffers.qk_rope_head_dim
    on_hopper = buffers.device.type == "cuda" and torch.cuda.get_device_capability(buffers.device) == (9, 0)
    widths = (64, 128, 192, 256) if buffers.dtype == torch.bfloat16 else (64, 128)
    return on_hopper and buffers.dtype in TILES and nope in widths and v in widths and v != 192 and rope in (64, 128)


def tiles_of(buffers: ExpandedBuffers) -> tuple[Tile, ...]:
    """Tiles for these buffers, smallest first."""
    return WIDE_TILES if buffers.is_wide else TILES[buffers.dtype]


@gluon.jit
def _produce(k_nope_desc, k_rope_desc, v_t_desc, ring, work):
    """Copy the key tiles of all items of this program to shared memory, each item's last tile first."""
    STAGES: gl.constexpr = ring.k_nope.shape[0]
    BLOCK_KEYS: gl.constexpr = ring.k_nope.shape[1]
    TILES_PER_CHUNK: gl.constexpr = CHUNK // BLOCK_KEYS
    DV: gl.constexpr = ring.v_t.shape[1]
    K_BYTES: gl.constexpr = k_nope_desc.block_type.nbytes + k_rope_desc.block_type.nbytes
    position = 0
    for item_index in range(gl.program_id(0), gl.load(work.n_items_ptr), gl.num_programs(0)):
        item_ptr = work.ptr + work.items_offset + item_index * ITEM_FIELDS
        head = gl.load(item_ptr + ITEM_HEAD)
        first_tile = gl.load(item_ptr + ITEM_BEGIN) // BLOCK_KEYS
        last_tile = (gl.load(item_ptr + ITEM_END) - 1) // BLOCK_KEYS
        chunk_ptr = work.ptr + gl.load(item_ptr + ITEM_CHUNKS)
        chunk = gl.load(chunk_ptr + last_tile // TILES_PER_CHUNK)
        for back in range(0, last_tile - first_tile + 1):
            tile = last_tile - back
            token = tile % TILES_PER_CHUNK * BLOCK_KEYS
            block = chunk * work.heads + head
            rope_row = chunk * CHUNK + token
            # The chunk of the next tile, loaded early so that the copy need not wait for it.
            chunk = gl.load(chunk_ptr + gl.maximum(tile - 1, first_tile) // TILES_PER_CHUNK)
            stage = position % STAGES
            free_phase = ((position // STAGES) & 1) ^ 1
            k_full, v_full = ring.k_full.index(stage), ring.v_full.index(stage)
            mbarrier.wait(ring.k_empty.index(stage), free_phase)
            mbarrier.expect(k_full, K_BYTES)
            tma.async_copy_global_to_shared(k_rope_desc, [rope_row, 0], k_full, ring.k_rope.index(stage))
            tma.async_copy_global_to_shared(k_nope_desc, [block * CHUNK + token, 0], k_full, ring.k_nope.index(stage))
            mbarrier.wait(ring.v_empty.index(stage), free_phase)
            mbarrier.expect(v_full, v_t_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(v_t_desc, [block * DV, token], v_full, ring.v_t.index(stage))
            position += 1


@gluon.jit(do_not_specialize=["heads", "items_offset"])
def naive_prefix_hopper_kernel(
    q_nope_ptr,  # BF16 [T, H, DN], strides q_nope_row, q_nope_head, 1
    q_rope_ptr,  # BF16 [T, H, DR], strides q_rope_row, q_rope_head, 1
    k_nope_desc,
    k_rope_desc,
    v_t_desc,
    k_scale_ptr,  # float32 [H]
    v_scale_ptr,  # float32 [H]
    work_ptr,  # int32, see schedule.WorkList
    partial_out_ptr,  # float32 [P, H, DV]
    partial_lse2_ptr,  # float32 [P, H]
    scale_log2e,
    heads,
    items_offset,
    q_nope_row,
    q_nope_head,
    q_rope_row,
    q_rope_head,
    dn,
    CONSUMERS: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
    SLOT: gl.constexpr,
):
    BLOCK_KEYS: gl.constexpr = k_nope_desc.block_type.shape[0]
    BLOCK_DN: gl.constexpr = k_nope_desc.block_type.shape[1]
    DR: gl.constexpr = k_rope_desc.block_type.shape[1]
    DV: gl.constexpr = v_t_desc.block_type.shape[0]
    dtype: gl.constexpr = k_nope_desc.dtype
    QN: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK_DN], dtype)
    QR: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, DR], gl.bfloat16)
    q_nope_s = gl.allocate_shared_memory(dtype, [CONSUMERS, ROWS, BLOCK_DN], QN)
    q_rope_s = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS, ROWS, DR], QR)
    k_nope_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_KEYS, BLOCK_DN], k_nope_desc.layout)
    k_rope_s = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_KEYS, DR], k_rope_desc.layout)
    v_t_s = gl.allocate_shared_memory(dtype, [STAGES, DV, BLOCK_KEYS], v_t_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=CONSUMERS)
        mbarrier.init(v_empty.index(i), count=CONSUMERS)
    fence_async_shared()

    ring = Ring(k_nope_s, k_rope_s, v_t_s, k_full, k_empty, v_full, v_empty)
    # Triton compiles a stride of 1 as a constant; `to_tensor` because the members of Query are run-time values.
    query = Query(
        q_nope_ptr, q_rope_ptr, gl.to_tensor(q_nope_row), gl.to_tensor(q_nope_head), gl.to_tensor(q_rope_row),
        gl.to_tensor(q_rope_head), gl.to_tensor(dn),
    )  # fmt: skip
    scales = Scales(k_scale_ptr, v_scale_ptr, scale_log2e)
    work = Work(work_ptr, items_offset, work_ptr + N_ITEMS + SLOT, heads)
    partials = Partials(partial_out_ptr, partial_lse2_ptr)
    produced = (k_nope_desc, k_rope_desc, v_t_desc, ring, work)
    first = (0, q_nope_s.index(0), q_rope_s.index(0), ring, query, scales, work, partials)
    if CONSUMERS == 1:
        gl.warp_specialize([(consume, first), (_produce, produced)], [1], [PRODUCER_REGISTERS])
    else:
        second = (ROWS, q_nope_s.index(1), q_rope_s.index(1), ring, query, scales, work, partials)
        if CONSUMERS == 2:
            gl.warp_specialize(
                [(consume, first), (consume, second), (_produce, produced)],
                [4, 1],
                [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
            )
        else:
            third = (2 * ROWS, q_nope_s.index(2), q_rope_s.index(2), ring, query, scales, work, partials)
            gl.warp_specialize(
                [(consume, first), (consume, second), (consume, third), (_produce, produced)],
                [4, 4, 1],
                [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
            )


def launch_options(tile: Tile) -> dict[str, int]:
    """Constants and compiler options of a tile's kernel."""
    options = dict(CONSUMERS=tile.block_rows // ROWS.value, STAGES=tile.num_stages, num_warps=4)
    options |= dict(PRODUCER_REGISTERS=PRODUCER_REGISTERS, CONSUMER_REGISTERS=CONSUMER_REGISTERS[options["CONSUMERS"]])
    if tile.ctas_per_sm == 2:
        options["maxnreg"] = 128  # for 8 warps; the consumer gets the registers that the producer's warps give up
    return options


def run(
    q_nope: Tensor,
    q_rope: Tensor,
    keys: LayerKeys,
    work: Tensor,
    capacity: WorkListCapacity,
    partial_out: Tensor,
    partial_lse2: Tensor,
    *,
    softmax_scale: float,
    num_ctas: int,
    tile: Tile,
    slot: int,
) -> None:
    """Launch the kernel. Arguments and errors are those of `triton_naive.run`, but queries are always BF16."""
    naive_prefix_hopper_kernel[(num_ctas,)](
        *triton_naive.launch_arguments(
            q_nope, q_rope, keys, work, capacity, partial_out, partial_lse2, softmax_scale, torch.bfloat16
        ),
        keys.k_nope.shape[1],
        **launch_options(tile),
        SLOT=slot,
    )
