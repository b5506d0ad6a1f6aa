"""Absorb attention over FP8 latent rows in pages, in Triton: SnapMLA's decode, keys split.

    score[h, n] = (q_content[h] · content[n] + q_rope[h] · rope[n]) · q_scale[h] · scale[n] · softmax_scale
    out[h] = Σ_n softmax_n(score)[h, n] · scale[n] · content[n]

for every query row h of a request (its heads, of one or more query tokens) over the request's own rows n; for the row
layout and scales see latent_rows.py. The rotary parts are stored divided by the scales, so both products add up before
one multiplication by them. The softmax runs in base 2 over blocks of 64 keys. A block's weights times the keys' scales
are rounded to BF16, and the content is converted to it, exactly. SnapMLA rounds the weights to e4m3, which is less
exact; on Hopper its sums over thousands of keys also come out too small (see sm90_fp8_absorb.py; summing blocks apart
takes more registers than there are), and Triton transposes FP8 values byte by byte.

The grid depends on the number of rows alone, so a CUDA graph can hold it; lengths and pages are read on the device.
Each request's keys are cut into equal splits of blocks, and merge.py puts the partial results together. Where rows fill
the GPU, keys are not cut, and the result is written at once.

It needs a GPU with e4m3 and 128 KiB of shared memory for a program (Hopper and later).

Memory per request, query tile of up to 64 rows, and key: reads r + 4 + 2·dr bytes (644 with DeepSeek-V3). A split
writes r·4 + 4 bytes per query row, which the merge reads.

Source: SnapMLA, algorithm 1, equations 6 and 13, appendices B and C.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..constants import LN2, LOG2E
from ..reference.fp8 import BLOCK_KEYS
from ..storage.latent_rows import LatentRowLayout

BLOCK_ROWS = 64
"""Query rows of a program: what Hopper's matrix unit takes at once. Fewer heads leave a part of it empty."""

NUM_WARPS = 8
"""The accumulator of 64 rows is 512 wide, and fills the registers of eight warps."""

NUM_STAGES = 3


@triton.jit
def _product(a, b, acc, EXACT: tl.constexpr):
    if EXACT:  # the interpreter's products of narrow floats are wrong
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit(do_not_specialize=["splits", "table_row"])
def absorb_fp8_kernel(
    q_content_ptr,  # e4m3 [B, ROWS, R], contiguous; ROWS: query tokens times heads
    q_scale_ptr,  # float32 [B, ROWS]
    q_rope_ptr,  # BF16 [B, ROWS, DR]
    content_ptr,  # e4m3 [slots, R], strides row_bytes, 1
    scale_ptr,  # float32 [slots], stride row_bytes / 4
    rope_ptr,  # BF16 [slots, DR], strides row_bytes / 2, 1
    table_ptr,  # int32 [B, pages], strides table_row, 1
    lens_ptr,  # int32 [B]
    out_ptr,  # SPLIT: float32 [B * query tokens * splits, heads, R]; else [B, ROWS, R]; contiguous
    lse_ptr,  # float32: SPLIT: base 2, [B * query tokens * splits, heads]; else natural, [B, ROWS]
    scale_log2e,
    row_bytes,
    table_row,
    splits,
    HEADS: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    R: tl.constexpr,
    DR: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    EXACT: tl.constexpr,
    LN2: tl.constexpr,
):
    """One program: up to BLOCK_ROWS query rows of one request, over one split of its keys."""
    ROWS: tl.constexpr = HEADS * QUERY_TOKENS
    request, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS], of the request
    in_rows = row < ROWS
    dim, dim_rope = tl.arange(0, R), tl.arange(0, DR)
    query_row = request * ROWS + tl.minimum(row, ROWS - 1)  # rows behind the last repeat it and are not written
    q_content = tl.load(q_content_ptr + query_row[:, None] * R + dim[None, :])  # [BLOCK_ROWS, R]
    q_rope = tl.load(q_rope_ptr + query_row[:, None] * DR + dim_rope[None, :])  # [BLOCK_ROWS, DR]
    q_scale = tl.load(q_scale_ptr + query_row) * scale_log2e  # [BLOCK_ROWS]

    length = tl.load(lens_ptr + request)
    visible = length - (QUERY_TOKENS - 1 - row // HEADS)  # [BLOCK_ROWS]: the last query token sees all keys
    blocks = (length + BLOCK - 1) // BLOCK
    per_split = (blocks + splits - 1) // splits
    first = split * per_split
    last = tl.minimum(first + per_split, blocks)

    row_max2 = tl.full([BLOCK_ROWS], -1e30, tl.float32)  # below every score; stays so where no key is visible
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    acc = tl.zeros([BLOCK_ROWS, R], tl.float32)
    zero_scores = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    for block in range(first, last):
        key = block * BLOCK + tl.arange(0, BLOCK)  # [BLOCK]
        # A key behind the last takes its row: the copies need no mask, and nothing unknown is read.
        known = tl.minimum(key, length - 1)
        page = tl.load(table_ptr + request * table_row + known // PAGE).to(tl.int64)
        slot = page * PAGE + known % PAGE  # [BLOCK]
        content = tl.load(content_ptr + slot[:, None] * row_bytes + dim[None, :])  # [BLOCK, R]
        rope = tl.load(rope_ptr + slot[:, None] * (row_bytes // 2) + dim_rope[None, :])  # [BLOCK, DR]
        scale = tl.load(scale_ptr + slot * (row_bytes // 4))  # [BLOCK]

        scores = _product(q_content, content.T, zero_scores, EXACT)
        scores = _product(q_rope, rope.T, scores, EXACT) * q_scale[:, None] * scale[None, :]
        scores = tl.where(key[None, :] < visible[:, None], scores, float("-inf"))
        new_max2 = tl.maximum(row_max2, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max2[:, None])  # [BLOCK_ROWS, BLOCK]
        shrink = tl.exp2(row_max2 - new_max2)
        # A value is its content times the scale. Hopper converts to BF16 in pairs only from float32.
        rounded = (weights * scale[None, :]).to(tl.bfloat16)
        total = total * shrink + tl.sum(weights, 1)
        acc = _product(rounded, content.to(tl.float32).to(tl.bfloat16), acc * shrink[:, None], EXACT)
        row_max2 = new_max2

    none = total == 0.0
    out = acc / tl.where(none, 1.0, total)[:, None]
    lse2 = tl.where(none, float("-inf"), row_max2 + tl.log2(tl.where(none, 1.0, total)))
    if SPLIT:
        token = request * QUERY_TOKENS + row // HEADS
        place = (token * splits + split) * HEADS + row % HEADS  # [BLOCK_ROWS]
        tl.store(lse_ptr + place, lse2, mask=in_rows)
    else:
        place = request * ROWS + row
        tl.store(lse_ptr + place, lse2 * LN2, mask=in_rows)
    tl.store(out_ptr + place[:, None] * R + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=in_rows[:, None])


def run_kernel(
    content: Tensor,
    scale: Tensor,
    rope: Tensor,
    pool: Tensor,
    page_table: Tensor,
    lens: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    layout: LatentRowLayout,
    page_size: int,
    splits: int,
    softmax_scale: float,
    exact: bool | None = None,
) -> None:
    """Launch the kernel.

    Args:
        content: `[T, H, r]` e4m3; scale: `[T, H]` float32; rope: `[T, H, dr]` BF16; contiguous, from quantize_query.
        out, lse: the results where splits is 1; else float32 partials `[T * splits, H, r]` and, base 2,
            `[T * splits, H]`, a token's partials one behind the other.
        exact: products in float32, for the interpreter; on a CPU if None.
        Others as for `AbsorbFP8.run`, and not checked here.
    """
    tokens, heads, rank = content.shape
    requests = len(lens)
    query_tokens = tokens // requests
    absorb_fp8_kernel[(triton.cdiv(heads * query_tokens, BLOCK_ROWS), requests, splits)](
        content,
        scale,
        rope,
        layout.content(pool),
        layout.scale(pool),
        layout.rope(pool),
        page_table,
        lens,
        out,
        lse,
        softmax_scale * LOG2E,
        pool.stride(-2),
        page_table.stride(0),
        splits,
        HEADS=heads,
        QUERY_TOKENS=query_tokens,
        R=rank,
        DR=rope.shape[-1],
        PAGE=page_size,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK=BLOCK_KEYS,
        SPLIT=splits > 1,
        EXACT=not pool.is_cuda if exact is None else exact,
        LN2=LN2,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
