"""Naive attention of rows over the expanded segments that they share, on any GPU.

    out[b, h] = softmax_n(softmax_scale · (q_nope[b, h] · k_nope[n, h] + q_rope[b, h] · k_rope[n])) · v[n, h]

for every row b of a segment, every head h, over all keys n of the segment: no mask. Keys may be split over several work
items (see schedule.py), so the kernel writes partial results, each normalised over its own keys, with their base-2 lse.

Memory per work item (row tile of one head, n keys): reads n·(dn + dv + dr)·2 bytes of keys and values in BF16 and
n·(dn + dv + 2·dr) in FP8, from L2 where another row tile of the same head and keys runs at the same time; reads
rows·(dn + dr)·2 bytes of queries and writes rows·(dv + 1)·4 bytes.

A content dimension that is no power of two, as GLM-4.7-Flash's 192, is computed as the next one: what is behind it is 0
in queries and keys alike, and is not read.

FP8 saves memory here, not arithmetic: keys and values are converted as they are read, and neither queries nor softmax
weights are rounded to FP8. The key scale multiplies the content scores, the value scale the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..constants import FP8, LOG2E, block_of, check_heads
from ..sizes import CHUNK_TOKENS
from ..storage.expanded import ExpandedBuffers
from .items import (
    GROUP_ROWS,
    ITEM_BEGIN,
    ITEM_CHUNKS,
    ITEM_END,
    ITEM_FIELDS,
    ITEM_FIRST_ROW,
    ITEM_HEAD,
    ITEM_PARTIAL,
    ITEM_ROWS,
    N_ITEMS,
)
from .schedule import WorkListCapacity
from .tiles import Tile

TILES = (Tile(), Tile(block_rows=128, num_warps=8))
"""Tiles in the order of block_rows. The fastest of eleven candidates on an H200 in BF16, 26,472 tokens, 16 and 128
heads: the first one up to 64 rows, the second one above, because it loads each key into shared memory once for 128
rows."""

FP8_TILES = (Tile(ctas_per_sm=2), Tile(block_rows=128, num_warps=8))
"""Tiles for FP8, where smaller stages let two programs of the first share a multiprocessor. Not timed."""

WIDE_TILES = (Tile(num_stages=2), Tile(block_rows=128, num_warps=8, num_stages=2))
"""Tiles for heads wider than 128, in every dtype: what shared memory has room for. Not timed."""


def tiles_of(buffers: ExpandedBuffers) -> tuple[Tile, ...]:
    """Tiles for these buffers, smallest first."""
    if buffers.is_wide:
        return WIDE_TILES
    return FP8_TILES if buffers.dtype == FP8 else TILES


@dataclass(frozen=True)
class LayerKeys:
    """The expanded keys and values of one layer as descriptors of 2-D views in tiles of `block_keys` tokens, and their
    scales."""

    k_nope: TensorDescriptor  # [chunks * heads * CHUNK_TOKENS, dn], block [block_keys, block_of(dn)]
    k_rope: TensorDescriptor  # [chunks * CHUNK_TOKENS, dr], block [block_keys, dr]
    v_t: TensorDescriptor  # [chunks * heads * dv, CHUNK_TOKENS], block [dv, block_keys]
    k_scale: Tensor  # [heads] float32
    v_scale: Tensor  # [heads] float32

    @classmethod
    def of(cls, buffers: ExpandedBuffers, layer: int, tile: Tile) -> LayerKeys:
        """Raises ValueError if a head dimension is none that `check_heads` lets pass, or the GPU has no e4m3."""
        check_heads(buffers.qk_nope_head_dim, buffers.v_head_dim, buffers.qk_rope_head_dim)
        on_gpu = buffers.device.type == "cuda"
        if buffers.dtype == FP8 and on_gpu and torch.cuda.get_device_capability(buffers.device) < (8, 9):
            raise ValueError("prefixes in FP8 need a GPU of compute capability 8.9 or higher")

        return cls(
            k_nope=cls._describe(buffers.k_nope[layer], [tile.block_keys, block_of(buffers.qk_nope_head_dim)]),
            k_rope=cls._describe(buffers.k_rope[layer], [tile.block_keys, buffers.qk_rope_head_dim]),
            v_t=cls._describe(buffers.v_t[layer], [buffers.v_head_dim, tile.block_keys]),
            k_scale=buffers.k_scale[layer],
            v_scale=buffers.v_scale[layer],
        )

    @staticmethod
    def _describe(tensor: Tensor, block: list[int]) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor.view(-1, tensor.shape[-1]), block)


@triton.jit
def _convert(tile, dtype: tl.constexpr):
    """Keys or values in the dtype of the query, without rounding."""
    if tile.dtype == tl.float8e4nv:  # by way of float32: Hopper converts to BF16 in pairs only from there
        tile = tile.to(tl.float32)
    return tile.to(dtype)


@triton.jit
def _scores(q_nope, q_rope, k_nope_desc, k_rope_desc, key_row, rope_row, k_scale, PRECISION: tl.constexpr):
    """Scores `[BLOCK_ROWS, BLOCK_KEYS]` of one key tile, without the softmax scale; `k_scale` is used in FP8 only."""
    # Both loaded before the first product: no wait between the two.
    k_rope = _convert(k_rope_desc.load([rope_row, 0]), q_rope.dtype)  # [BLOCK_KEYS, DR]
    k_nope = _convert(k_nope_desc.load([key_row, 0]), q_nope.dtype)  # [BLOCK_KEYS, BLOCK_DN]
    if k_nope_desc.dtype == tl.float8e4nv:  # content first, so that the scale does not need a second accumulator
        scores = tl.dot(q_nope, k_nope.T, input_precision=PRECISION) * k_scale
        return tl.dot(q_rope, k_rope.T, scores, input_precision=PRECISION)
    scores = tl.dot(q_rope, k_rope.T, input_precision=PRECISION)
    return tl.dot(q_nope, k_nope.T, scores, input_precision=PRECISION)


@triton.jit
def _values(v_t_desc, value_row, token, dtype: tl.constexpr, DV: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """Transposed values `[DV, BLOCK_KEYS]` of one key tile, in the order of its tokens.

    FP8 values are stored in the order of expanded.FP8_TOKEN_ORDER, which is undone here: they pass through registers
    anyway, to be converted, and all positions of 16 tokens are in one thread. So keys, weights and the mask at the end
    of the segment need no permutation.
    """
    v_t = _convert(v_t_desc.load([value_row, token]), dtype)
    if v_t_desc.dtype == tl.float8e4nv:  # position 4a + 2b + c of 16 holds token 8b + 2a + c
        v_t = v_t.reshape([DV, BLOCK_KEYS // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4]).reshape([DV, BLOCK_KEYS])
    return v_t


@triton.jit
def _softmax_step(scores, row_max2, row_sum, acc, scale_log2e):
    """Running softmax in base 2: weights of this tile, and maximum, sum and output brought to the new maximum."""
    new_max2 = tl.maximum(row_max2, tl.max(scores, 1) * scale_log2e)  # [BLOCK_ROWS]
    weights = tl.exp2(scores * scale_log2e - new_max2[:, None])  # [BLOCK_ROWS, BLOCK_KEYS]
    rescale = tl.exp2(row_max2 - new_max2)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    return weights, new_max2, row_sum, acc * rescale[:, None]


# A layer's scales may start anywhere: the kernel must not be compiled again for another alignment.
@triton.jit(do_not_specialize_on_alignment=["k_scale_ptr", "v_scale_ptr"])
def naive_prefix_kernel(
    q_nope_ptr,  # [T, H, DN], strides q_nope_row, q_nope_head, 1
    q_rope_ptr,  # [T, H, DR], strides q_rope_row, q_rope_head, 1
    k_nope_desc,  # [chunks * heads * CHUNK, DN]
    k_rope_desc,  # [chunks * CHUNK, DR]
    v_t_desc,  # [chunks * heads * DV, CHUNK]
    k_scale_ptr,  # float32 [heads]; not read unless FP8
    v_scale_ptr,  # float32 [heads]; not read unless FP8
    work_ptr,  # int32, see schedule.WorkList
    partial_out_ptr,  # float32 [P, heads, DV]
    partial_lse2_ptr,  # float32 [P, heads]
    scale_log2e,
    heads,
    items_offset,
    q_nope_row,
    q_nope_head,
    q_rope_row,
    q_rope_head,
    DN: tl.constexpr,
    BLOCK_DN: tl.constexpr,
    DR: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    SLOT: tl.constexpr,
):
    TILES_PER_CHUNK: tl.constexpr = CHUNK // BLOCK_KEYS
    SCALED: tl.constexpr = k_nope_desc.dtype == tl.float8e4nv
    row_in_tile = tl.arange(0, BLOCK_ROWS)
    dim_nope, dim_rope, dim_v = tl.arange(0, BLOCK_DN), tl.arange(0, DR), tl.arange(0, DV)

    n_items = tl.load(work_ptr + N_ITEMS + SLOT)
    for item_index in tl.range(tl.program_id(0), n_items, tl.num_programs(0), num_stages=1):
        item_ptr = work_ptr + items_offset + item_index * ITEM_FIELDS
        head = tl.load(item_ptr + ITEM_HEAD)
        first_row = tl.load(item_ptr + ITEM_FIRST_ROW)
        n_rows = tl.load(item_ptr + ITEM_ROWS)
        kv_begin = tl.load(item_ptr + ITEM_BEGIN)
        kv_end = tl.load(item_ptr + ITEM_END)
        chunk_ptr = work_ptr + tl.load(item_ptr + ITEM_CHUNKS)
        partial_row = tl.load(item_ptr + ITEM_PARTIAL)

        in_tile = row_in_tile < n_rows
        row = tl.load(work_ptr + GROUP_ROWS + first_row + row_in_tile, mask=in_tile, other=0)
        row = row.to(tl.int64)  # [BLOCK_ROWS]
        q_nope = tl.load(
            q_nope_ptr + (row * q_nope_row + head * q_nope_head)[:, None] + dim_nope[None, :],
            mask=in_tile[:, None] & (dim_nope < DN)[None, :],
            other=0.0,
        )  # [BLOCK_ROWS, BLOCK_DN]
        q_rope = tl.load(
            q_rope_ptr + (row * q_rope_row + head * q_rope_head)[:, None] + dim_rope[None, :],
            mask=in_tile[:, None],
            other=0.0,
        )  # [BLOCK_ROWS, DR]

        k_scale = tl.load(k_scale_ptr + head) if SCALED else 1.0
        row_max2 = tl.full([BLOCK_ROWS], -1e30, tl.float32)
        row_sum = tl.zeros([BLOCK_ROWS], tl.float32)
        acc = tl.zeros([BLOCK_ROWS, DV], tl.float32)

        # The chunk of a tile is loaded one tile ahead, so that the tile's copy does not wait for it.
        first, full = kv_begin // BLOCK_KEYS, kv_end // BLOCK_KEYS
        last = (kv_end - 1) // BLOCK_KEYS
        chunk = tl.load(chunk_ptr + first // TILES_PER_CHUNK)
        for tile in tl.range(first, full, num_stages=NUM_STAGES):
            token = tile % TILES_PER_CHUNK * BLOCK_KEYS
            block = chunk * heads + head
            rope_row = chunk * CHUNK + token
            chunk = tl.load(chunk_ptr + tl.minimum(tile + 1, last) // TILES_PER_CHUNK)
            key_row = block * CHUNK + token
            scores = _scores(q_nope, q_rope, k_nope_desc, k_rope_desc, key_row, rope_row, k_scale, PRECISION)
            weights, row_max2, row_sum, acc = _softmax_step(scores, row_max2, row_sum, acc, scale_log2e)
            v_t = _values(v_t_desc, block * DV, token, q_nope.dtype, DV, BLOCK_KEYS)
            acc = tl.dot(weights.to(v_t.dtype), v_t.T, acc, input_precision=PRECISION)

        if full <= last:  # the segment ends inside this tile; what follows it in memory may be NaN
            token = last % TILES_PER_CHUNK * BLOCK_KEYS
            block = chunk * heads + head
            valid = last * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS) < kv_end  # [BLOCK_KEYS]
            rope_row, key_row = chunk * CHUNK + token, block * CHUNK + token
            scores = _scores(q_nope, q_rope, k_nope_desc, k_rope_desc, key_row, rope_row, k_scale, PRECISION)
            scores = tl.where(valid[None, :], scores, -1e30)
            weights, row_max2, row_sum, acc = _softmax_step(scores, row_max2, row_sum, acc, scale_log2e)
            v_t = _values(v_t_desc, block * DV, token, q_nope.dtype, DV, BLOCK_KEYS)
            v_t = tl.where(valid[None, :], v_t, 0.0).to(v_t.dtype)  # [DV, BLOCK_KEYS]
            acc = tl.dot(weights.to(v_t.dtype), v_t.T, acc, input_precision=PRECISION)

        v_scale = tl.load(v_scale_ptr + head) if SCALED else 1.0
        partial = (partial_row + row_in_tile).to(tl.int64) * heads + head  # [BLOCK_ROWS]
        tl.store(
            partial_out_ptr + partial[:, None] * DV + dim_v[None, :],
            acc * (v_scale / row_sum)[:, None],
            mask=in_tile[:, None],
        )
        tl.store(partial_lse2_ptr + partial, row_max2 + tl.log2(row_sum), mask=in_tile)


def resident_ctas(device: torch.device, tile: Tile) -> int:
    """Programs that a GPU runs at once."""
    if device.type != "cuda":
        raise ValueError("give num_ctas where there is no GPU to ask")
    return tile.ctas_per_sm * torch.cuda.get_device_properties(device).multi_processor_count


def launch_arguments(
    q_nope: Tensor,
    q_rope: Tensor,
    keys: LayerKeys,
    work: Tensor,
    capacity: WorkListCapacity,
    partial_out: Tensor,
    partial_lse2: Tensor,
    softmax_scale: float,
    dtype: torch.dtype,
) -> tuple[Any, ...]:
    """Return the arguments that this kernel and Hopper's have in common, in their order. Raise a ValueError if one is
    not as `run` says; `dtype` is that of the queries."""
    rows, heads = q_nope.shape[0], partial_out.shape[1]
    for name, q, dim in (("q_nope", q_nope, keys.k_nope.shape[1]), ("q_rope", q_rope, keys.k_rope.shape[1])):
        if q.shape != (rows, heads, dim):
            raise ValueError(f"{name} must be {[rows, heads, dim]}, not {list(q.shape)}")
        if q.dtype != dtype:
            raise ValueError(f"{name} is {q.dtype}, but the expanded prefixes need {dtype}")
        if q.stride(2) != 1:
            raise ValueError(f"the last axis of {name} must be contiguous; its strides are {q.stride()}")
    if not (partial_out.is_contiguous() and partial_lse2.is_contiguous()):
        raise ValueError("partial_out and partial_lse2 must be contiguous")
    if partial_out.shape[:2] != partial_lse2.shape or partial_out.shape[0] < capacity.max_partial_rows:
        raise ValueError(
            f"partial_out {list(partial_out.shape)} and partial_lse2 {list(partial_lse2.shape)} must have "
            f"{capacity.max_partial_rows} rows and the same heads"
        )
    if work.dtype != torch.int32 or not capacity.items_offset <= work.numel() <= capacity.size:
        raise ValueError(
            f"work must be int32 of {capacity.items_offset} to {capacity.size} values, not {work.dtype} "
            f"{list(work.shape)}"
        )
    if not softmax_scale > 0:
        raise ValueError(f"softmax_scale must be positive, not {softmax_scale}")
    return (
        q_nope, q_rope, keys.k_nope, keys.k_rope, keys.v_t, keys.k_scale, keys.v_scale, work, partial_out, partial_lse2,
        softmax_scale * LOG2E, heads, capacity.items_offset, *q_nope.stride()[:2], *q_rope.stride()[:2],
    )  # fmt: skip


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
    """Launch the kernel on a work list. It takes no items unless the list was built for the same `slot`, and then for
    the same `tile`.

    Args:
        q_nope: `[T, H, dn]`; q_rope: `[T, H, dr]`, dtype of the keys, or BF16 for keys in FP8; any row and head
            strides, last axis contiguous.
        work: int32, at least the `used` part of a schedule.WorkList; read on the device only.
        partial_out: `[P, H, dv]` float32, written; partial_lse2: `[P, H]` float32, base 2, written. Contiguous.
        softmax_scale: positive.
    Raises:
        ValueError: a shape, dtype or stride is not as above.
    """
    dn, dr, dv = keys.k_nope.shape[1], keys.k_rope.shape[1], partial_out.shape[2]
    dtype = keys.k_rope.base.dtype  # the rotary keys are BF16 beside FP8
    if keys.k_nope.base.dtype == FP8 and q_nope.dtype == torch.float32:
        dtype = torch.float32  # for the interpreter, which has no products in BF16
    naive_prefix_kernel[(num_ctas,)](
        *launch_arguments(q_nope, q_rope, keys, work, capacity, partial_out, partial_lse2, softmax_scale, dtype),
        DN=dn,
        BLOCK_DN=block_of(dn),
        DR=dr,
        DV=dv,
        CHUNK=CHUNK_TOKENS,
        BLOCK_ROWS=tile.block_rows,
        BLOCK_KEYS=tile.block_keys,
        PRECISION="ieee" if q_nope.dtype == torch.float32 else "tf32",
        NUM_STAGES=tile.num_stages,
        SLOT=slot,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
