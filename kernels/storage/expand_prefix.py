"""Expansion of latent rows of a shared prefix into the keys and values of every head, straight into the buffers.

    k_nope[h, t] = w_k[h] · latent[slots[t]] / k_scale[h]        v_t[h, :, t] = w_v[h] · latent[slots[t]] / v_scale[h]

for n consecutive tokens t of a prefix and every head h, rounded to the dtype of the buffers (saturated in FP8); the
rotary keys are copied. A content dimension that is no power of two is computed as the next one. One kernel gathers,
multiplies, scales, rounds and transposes, so that only the result is written to memory.

Memory per layer, BF16 inputs: reads 2·H·(dn + dv)·r bytes of weights per group of tokens (33 MB per 4,096 tokens for
DeepSeek-V3) and n·(r + dr)·2 bytes of latent rows from DRAM; every program reads its latent tile and its weights from
L2, (128 + dn + dv)·r·2 bytes, or with heads wider than 128 those of 64 tokens. Writes n·(H·(dn + dv) + 2·dr) bytes in
FP8 and twice the first part in BF16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..constants import FP8, FP8_MAX, block_of, check_heads
from ..sizes import CHUNK_TOKENS
from .expanded import ExpandedBuffers

MAX_BLOCK_TOKENS = 128
GROUP_BLOCKS = 32
"""Token blocks that are multiplied with one head's weights after the other: their 4 MB of latent rows stay in L2."""
ACCUMULATED = 256 * MAX_BLOCK_TOKENS
"""Numbers of keys and values that a program sums up: half of a multiprocessor's registers."""
NUM_WARPS = 8
MAX_BLOCK_K = 64
MAX_STAGES = 4
PIPELINE_BYTES = 192 * 1024
"""Shared memory for the stages. The accumulators allow only one program per multiprocessor, which may use all of it."""


def block_tokens(dn: int, dv: int) -> int:
    """Tokens of a program, for heads of these dimensions."""
    return min(MAX_BLOCK_TOKENS, ACCUMULATED // block_of(block_of(dn) + dv))


def pipeline(rank: int, dn: int, dv: int, itemsize: int) -> tuple[int, int]:
    """Width of a step along the rank, the largest power of two that divides it, and stages in flight."""
    block_k = min(MAX_BLOCK_K, rank & -rank)
    stage_bytes = (block_tokens(dn, dv) + block_of(dn) + dv) * block_k * itemsize
    return block_k, max(1, min(MAX_STAGES, PIPELINE_BYTES // stage_bytes))


@triton.jit
def _token_at(position):
    """The token at a position of an FP8 `v_t`: expanded.FP8_TOKEN_ORDER in bit arithmetic, bits 4 and up unchanged."""
    return (position & -15) | ((position & 2) << 2) | ((position & 8) >> 1) | ((position & 4) >> 1)


@triton.jit
def _round(values, scale_ptr, dtype: tl.constexpr, SCALED: tl.constexpr, LIMIT: tl.constexpr):
    if SCALED:
        values = tl.clamp(values * (1.0 / tl.load(scale_ptr)), -LIMIT, LIMIT, tl.PropagateNan.ALL)
    return values.to(dtype)


@triton.jit(do_not_specialize=["n", "start"])
def expand_prefix_kernel(
    latent_ptr,  # [pool_slots, r + DR], strides latent_row, 1
    slots_ptr,  # int32 or int64 [n]
    w_k_desc,  # [H, DN, r], block [1, BLOCK_DN, BLOCK_K]
    w_v_desc,  # [H, DV, r], block [1, DV, BLOCK_K]
    k_nope_ptr,  # [chunks, H, CHUNK, DN]
    v_t_ptr,  # [chunks, H, DV, CHUNK]
    k_rope_ptr,  # [chunks, CHUNK, DR]
    k_scale_ptr,  # float32 [H]
    v_scale_ptr,  # float32 [H]
    chunk_ptr,  # int32 [chunks of the prefix]
    heads,
    n,
    start,
    latent_row,
    RANK: tl.constexpr,
    DN: tl.constexpr,
    BLOCK_DN: tl.constexpr,
    DV: tl.constexpr,
    DR: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    FP8: tl.constexpr,
    LIMIT: tl.constexpr,
    PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):
    """One program: keys and values of one head for one block of tokens, aligned to the start of the prefix."""
    # The token blocks of a group run side by side with the weights of one head, then of the next one.
    blocks = (start + n + BLOCK - 1) // BLOCK - start // BLOCK
    group_start = tl.program_id(0) // (GROUP * heads) * GROUP
    in_group = tl.program_id(0) - group_start * heads
    group_size = tl.minimum(blocks - group_start, GROUP)
    head = in_group // group_size
    block = start // BLOCK + group_start + in_group % group_size
    first = block * BLOCK  # position of the block in the prefix
    in_chunk = block % (CHUNK // BLOCK) * BLOCK  # so, and not first % CHUNK, the compiler knows its alignment

    # In FP8 the rows of the tile are gathered in the order of v_t, so that v needs no permutation and k only another
    # address per row.
    position = tl.arange(0, BLOCK)
    token = _token_at(position) if FP8 else position  # [BLOCK], in the block
    index = first - start + token  # [BLOCK], in slots
    valid = (index >= 0) & (index < n)
    # A row outside the n tokens reads a valid slot instead, so that the loads need no mask; its results are not stored.
    slot = tl.load(slots_ptr + tl.minimum(tl.maximum(index, 0), n - 1)).to(tl.int64)
    latent_ptrs = latent_ptr + slot * latent_row  # [BLOCK]

    dim_r = tl.arange(0, BLOCK_K)
    k = tl.zeros([BLOCK, BLOCK_DN], tl.float32)
    v_t = tl.zeros([DV, BLOCK], tl.float32)
    for r in tl.range(0, RANK, BLOCK_K, num_stages=NUM_STAGES):
        latent = tl.load(latent_ptrs[:, None] + (r + dim_r)[None, :])  # [BLOCK, BLOCK_K]
        w_k = w_k_desc.load([head, 0, r]).reshape(BLOCK_DN, BLOCK_K)
        w_v = w_v_desc.load([head, 0, r]).reshape(DV, BLOCK_K)
        k = tl.dot(latent, w_k.T, k, input_precision=PRECISION)
        v_t = tl.dot(w_v, latent.T, v_t, input_precision=PRECISION)

    dim_n, dim_v, dim_rope = tl.arange(0, BLOCK_DN), tl.arange(0, DV), tl.arange(0, DR)
    chunk = tl.load(chunk_ptr + first // CHUNK).to(tl.int64)
    of_head = chunk * heads + head
    k_ptrs = k_nope_ptr + (of_head * CHUNK + in_chunk) * DN + token[:, None] * DN + dim_n[None, :]
    v_ptrs = v_t_ptr + (of_head * DV * CHUNK + in_chunk) + dim_v[:, None] * CHUNK + position[None, :]
    k = _round(k, k_scale_ptr + head, k_nope_ptr.dtype.element_ty, FP8, LIMIT)
    v_t = _round(v_t, v_scale_ptr + head, v_t_ptr.dtype.element_ty, FP8, LIMIT)
    if (first >= start) & (first + BLOCK <= start + n):  # without a mask along the tokens, v_t is stored in vectors
        if DN == BLOCK_DN:
            tl.store(k_ptrs, k)
        else:
            tl.store(k_ptrs, k, mask=(dim_n < DN)[None, :])
        tl.store(v_ptrs, v_t)
    else:
        tl.store(k_ptrs, k, mask=valid[:, None] & (dim_n < DN)[None, :])
        tl.store(v_ptrs, v_t, mask=valid[None, :])
    if head == 0:
        rope = tl.load(latent_ptrs[:, None] + (RANK + dim_rope)[None, :])  # [BLOCK, DR]
        rope_ptrs = k_rope_ptr + (chunk * CHUNK + in_chunk) * DR + token[:, None] * DR + dim_rope[None, :]
        tl.store(rope_ptrs, rope.to(k_rope_ptr.dtype.element_ty), mask=valid[:, None])


def expand_prefix(
    latent_rows: Tensor,
    slots: Tensor,
    w_k: Tensor,
    w_v: Tensor,
    buffers: ExpandedBuffers,
    layer: int,
    chunk_table: Tensor,
    start: int,
) -> None:
    """Expand tokens `[start, start + n)` of a prefix in one layer; no other token of their chunks is written.

    Args:
        latent_rows: `[pool_slots, r + dr]` BF16 or float32, any row stride, last axis contiguous; rows that are not in
            `slots` are not read.
        slots: `[n]` int32 or int64, contiguous: where the tokens' latent rows are.
        w_k: `[H, dn, r]`; w_v: `[H, dv, r]`, the two halves of `kv_b_proj`, dtype of latent_rows; last axis contiguous,
            other strides and the first byte multiples of 16 bytes.
        chunk_table: `[chunks]` int32, contiguous: ids of the prefix's chunks from its first token on, not checked; read
            on the device only.
        start: position of the first token in the prefix.
    Raises:
        ValueError: a shape, dtype, stride or device is not as above, the layer does not exist, or the chunk table is
            too short.
    """
    heads, dn, dv, dr = buffers.heads, buffers.qk_nope_head_dim, buffers.v_head_dim, buffers.qk_rope_head_dim
    rank, n = w_k.shape[-1], slots.numel()
    check_heads(dn, dv, dr)
    if rank == 0 or rank % 16:
        raise ValueError(f"the rank must be a positive multiple of 16, not {rank}")
    if latent_rows.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"latent_rows must be bfloat16 or float32, not {latent_rows.dtype}")
    if latent_rows.ndim != 2 or latent_rows.shape[1] != rank + dr:
        raise ValueError(f"latent_rows must be [pool_slots, {rank + dr}], not {list(latent_rows.shape)}")
    if latent_rows.stride(1) != 1:
        raise ValueError(f"the last axis of latent_rows must be contiguous; its strides are {latent_rows.stride()}")
    for name, weight, dim in (("w_k", w_k, dn), ("w_v", w_v, dv)):
        if weight.shape != (heads, dim, rank):
            raise ValueError(f"{name} must be {[heads, dim, rank]}, not {list(weight.shape)}")
        if weight.dtype != latent_rows.dtype:
            raise ValueError(f"{name} is {weight.dtype}, but latent_rows is {latent_rows.dtype}")
        byte_strides = [stride * weight.element_size() for stride in weight.stride()[:2]]
        if weight.stride(2) != 1 or any(b % 16 for b in (weight.data_ptr(), *byte_strides)):
            raise ValueError(
                f"{name} must be contiguous along its last axis and aligned to 16 bytes along the others; its strides "
                f"are {weight.stride()}, its address is {weight.data_ptr():#x}"
            )
    if slots.ndim != 1 or slots.dtype not in (torch.int32, torch.int64) or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous int32 or int64 [n], not {slots.dtype} {list(slots.shape)}")
    if not 0 <= layer < buffers.layers:
        raise ValueError(f"layer {layer}: there are {buffers.layers} layers")
    if start < 0:
        raise ValueError(f"start must not be negative, but is {start}")
    if chunk_table.ndim != 1 or chunk_table.dtype != torch.int32 or not chunk_table.is_contiguous():
        raise ValueError(f"chunk_table must be contiguous int32 [chunks], not {chunk_table.dtype} {chunk_table.shape}")
    if n and chunk_table.numel() < triton.cdiv(start + n, CHUNK_TOKENS):
        raise ValueError(f"{chunk_table.numel()} chunks of {CHUNK_TOKENS} tokens do not hold {start + n} tokens")
    for name, tensor in dict(slots=slots, w_k=w_k, w_v=w_v, chunk_table=chunk_table, buffers=buffers.k_nope).items():
        if tensor.device != latent_rows.device:
            raise ValueError(f"{name} is on {tensor.device}, but latent_rows is on {latent_rows.device}")
    if n == 0:
        return
    block_k, stages = pipeline(rank, dn, dv, w_k.element_size())
    block = block_tokens(dn, dv)
    blocks = triton.cdiv(start + n, block) - start // block
    expand_prefix_kernel[(blocks * heads,)](
        latent_rows,
        slots,
        TensorDescriptor(w_k, list(w_k.shape), list(w_k.stride()), [1, block_of(dn), block_k]),
        TensorDescriptor(w_v, list(w_v.shape), list(w_v.stride()), [1, dv, block_k]),
        buffers.k_nope[layer],
        buffers.v_t[layer],
        buffers.k_rope[layer],
        buffers.k_scale[layer],
        buffers.v_scale[layer],
        chunk_table,
        heads,
        n,
        start,
        latent_rows.stride(0),
        RANK=rank,
        DN=dn,
        BLOCK_DN=block_of(dn),
        DV=dv,
        DR=dr,
        CHUNK=CHUNK_TOKENS,
        BLOCK=block,
        BLOCK_K=block_k,
        GROUP=GROUP_BLOCKS,
        FP8=buffers.dtype == FP8,
        LIMIT=FP8_MAX,
        PRECISION="ieee" if w_k.dtype == torch.float32 else "tf32",
        NUM_STAGES=stages,
        num_warps=NUM_WARPS,
        num_stages=stages,
    )
