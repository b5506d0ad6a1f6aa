"""Absorb attention over FP8 latent rows in pages, in Triton: SnapMLA's decode, keys split.

    score[h, n] = (q_content[h] · content[n] + q_rope[h] · rope[n]) · q_scale[h] · scale[n] · softmax_scale
    out[h] = Σ_n softmax_n(score)[h, n] · scale[n] · content[n]

for every query row h of a request (its heads, of one or more query tokens) over the request's own rows n; row layout
and scales: latent_rows.py. The rotary parts are stored divided by the scales, so both products add up before one
multiplication by them. The softmax runs in base 2 over blocks of 64 keys. A block's weights times the keys' scales are
rounded to e4m3 with one scale a block and query row, in the order of reference_fp8.absorb_fp8; or, as an option, to
BF16, and then the content is converted to BF16 (exactly) and nothing else is rounded.

The grid depends on the number of rows alone, so a CUDA graph can hold it; lengths and pages are read on the device.
Each request's keys are cut into equal runs of blocks, and merge.py puts the partial results together. Where rows fill
the GPU, keys are not cut, and the result is written at once.

It needs a GPU that knows e4m3, with 128 KiB of shared memory for a program (Hopper and later).

Memory per request, query tile of up to 64 rows, and key: reads r + 4 + 2·dr bytes (644 with DeepSeek-V3). A split
writes r·4 + 4 bytes per query row, which the merge reads.

Source: SnapMLA, algorithm 1, equations 6, 13 and 14, appendices B and C.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .latent_rows import LatentRowLayout
from .layout import FP8, FP8_MAX
from .merge import LN2, LOG2E, merge
from .quantize_query import quantize_query
from .reference_fp8 import BLOCK_KEYS, WEIGHT_SCALE_RANGE
from .schedule import WorkList, WorkListCapacity

BLOCK_ROWS = 64
"""Query rows of a program: what Hopper's matrix unit takes at once. Fewer heads leave a part of it empty."""

NUM_WARPS = 8
"""The accumulator of 64 rows is 512 wide, and fills the registers of eight warps."""

NUM_STAGES = 3

MAX_SPLITS = 32
CTAS_PER_SM = 2
"""Programs to aim at for each multiprocessor, one after the other: evens out requests of different lengths."""


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
    QUERIES: tl.constexpr,
    R: tl.constexpr,
    DR: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8_WEIGHTS: tl.constexpr,
    FP8_LIMIT: tl.constexpr,
    SCALE_RANGE: tl.constexpr,
    SPLIT: tl.constexpr,
    EXACT: tl.constexpr,
    LN2: tl.constexpr,
):
    """One program: up to BLOCK_ROWS query rows of one request, over one run of its blocks of keys."""
    ROWS: tl.constexpr = HEADS * QUERIES
    request, split = tl.program_id(1).to(tl.int64), tl.program_id(2)
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)  # [BLOCK_ROWS], of the request
    in_rows = row < ROWS
    dim, dim_rope = tl.arange(0, R), tl.arange(0, DR)
    query_row = request * ROWS + tl.minimum(row, ROWS - 1)  # rows behind the last repeat it and are not written
    q_content = tl.load(q_content_ptr + query_row[:, None] * R + dim[None, :])  # [BLOCK_ROWS, R]
    q_rope = tl.load(q_rope_ptr + query_row[:, None] * DR + dim_rope[None, :])  # [BLOCK_ROWS, DR]
    q_scale = tl.load(q_scale_ptr + query_row) * scale_log2e  # [BLOCK_ROWS]

    length = tl.load(lens_ptr + request)
    visible = length - (QUERIES - 1 - row // HEADS)  # [BLOCK_ROWS]: the last query token sees all keys
    blocks = (length + BLOCK - 1) // BLOCK
    per_split = (blocks + splits - 1) // splits
    first = split * per_split
    last = tl.minimum(first + per_split, blocks)

    row_max2 = tl.full([BLOCK_ROWS], -1e30, tl.float32)  # below every score; stays so where no key is visible
    total, largest = tl.zeros([BLOCK_ROWS], tl.float32), tl.zeros([BLOCK_ROWS], tl.float32)
    weight_scale = tl.full([BLOCK_ROWS], 1.0, tl.float32)
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
        weighted = weights * scale[None, :]  # a value is its content times the scale
        if FP8_WEIGHTS:
            own_scale = tl.max(weighted, 1) / FP8_LIMIT
            largest = tl.maximum(largest * shrink, own_scale)
            new_scale = tl.maximum(tl.maximum(own_scale, largest * SCALE_RANGE), 1.1754943508222875e-38)
            carried = shrink * (weight_scale / new_scale)
            total = total * carried + tl.sum(weights, 1) / new_scale
            rounded = tl.minimum(weighted / new_scale[:, None], FP8_LIMIT).to(content_ptr.dtype.element_ty)
            acc = _product(rounded, content, acc * carried[:, None], EXACT)
            weight_scale = new_scale
        else:
            total = total * shrink + tl.sum(weights, 1)
            values = content.to(tl.float32).to(tl.bfloat16)  # Hopper converts to BF16 in pairs only from float32
            acc = _product(weighted.to(tl.bfloat16), values, acc * shrink[:, None], EXACT)
        row_max2 = new_max2

    none = total == 0.0
    out = acc / tl.where(none, 1.0, total)[:, None]
    lse2 = tl.where(none, float("-inf"), row_max2 + tl.log2(tl.where(none, 1.0, weight_scale * total)))
    if SPLIT:
        token = request * QUERIES + row // HEADS
        place = (token * splits + split) * HEADS + row % HEADS  # [BLOCK_ROWS]
        tl.store(lse_ptr + place, lse2, mask=in_rows)
    else:
        place = request * ROWS + row
        tl.store(lse_ptr + place, lse2 * LN2, mask=in_rows)
    tl.store(out_ptr + place[:, None] * R + dim[None, :], out.to(out_ptr.dtype.element_ty), mask=in_rows[:, None])


class AbsorbFP8:
    """Attention of a batch of requests, each over the FP8 rows of its own pages.

        absorb.run(q_absorbed, q_rope, pool, page_table, lens, softmax_scale, out, lse)

    What a CUDA graph captures, after one call outside of it, which compiles; a replay reads the pages and lengths of
    its own time. All memory but the results is allocated here.
    """

    def __init__(
        self,
        *,
        max_requests: int,
        heads: int,
        device: torch.device | str,
        layout: LatentRowLayout | None = None,
        queries: int = 1,
        page_size: int = 64,
        fp8_weights: bool = True,
        num_sms: int | None = None,
    ) -> None:
        """
        Args:
            max_requests: of a call.
            queries: query tokens of each request.
            layout: DeepSeek-V3's if None.
            page_size: tokens of a page.
            fp8_weights: round the softmax weights to e4m3; False is more exact and slower.
            num_sms: multiprocessors to fill; those of the device if None.
        Raises:
            ValueError: a size is not positive, a dimension of the layout is not a power of two, or the GPU does not
                know e4m3.
        """
        device = torch.device(device)
        self._layout = layout or LatentRowLayout()
        rank, dr = self._layout.kv_lora_rank, self._layout.qk_rope_head_dim
        for name, size in dict(max_requests=max_requests, heads=heads, queries=queries, page_size=page_size).items():
            if size <= 0:
                raise ValueError(f"{name} must be positive, not {size}")
        if any(dim < 16 or dim & (dim - 1) for dim in (rank, dr)):
            raise ValueError(f"kv_lora_rank {rank} and qk_rope_head_dim {dr} must be powers of two of at least 16")
        if device.type == "cuda":
            if torch.cuda.get_device_capability(device) < (8, 9):
                raise ValueError("an FP8 cache needs a GPU of compute capability 8.9 or higher")
            num_sms = num_sms or torch.cuda.get_device_properties(device).multi_processor_count
        self._max_requests, self._heads, self._queries = max_requests, heads, queries
        self._page_size, self._fp8_weights, self._num_sms = page_size, fp8_weights, num_sms or 1
        self._tiles = triton.cdiv(heads * queries, BLOCK_ROWS)
        tokens = max_requests * queries
        self._content = torch.zeros(tokens, heads, rank, dtype=FP8, device=device)
        self._scale = torch.zeros(tokens, heads, dtype=torch.float32, device=device)
        self._rope = torch.zeros(tokens, heads, dr, dtype=torch.bfloat16, device=device)
        counts = {requests: self.splits(requests) for requests in range(1, max_requests + 1)}
        partials = max([n * queries * splits for n, splits in counts.items() if splits > 1], default=0)
        self._partial_out = torch.zeros(partials, heads, rank, dtype=torch.float32, device=device)
        self._partial_lse2 = torch.zeros(partials, heads, dtype=torch.float32, device=device)
        # There is no tail beside the splits: its lse is -inf, and its output is not read.
        self._no_lse = torch.full((tokens, heads), -torch.inf, device=device)
        # What the merge reads of a work list: by number of splits, because every row has as many.
        self._capacity = WorkListCapacity(tokens, partials, max_items=0, max_chunks=0)
        self._tables = {splits: self._table(splits).to(device) for splits in sorted(set(counts.values())) if splits > 1}

    @property
    def workspace_bytes(self) -> int:
        """Device memory that this object allocated."""
        tensors = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in (*tensors, *self._tables.values()))

    def splits(self, requests: int) -> int:
        """Runs that the keys of each of so many requests are cut into."""
        return max(1, min(MAX_SPLITS, CTAS_PER_SM * self._num_sms // (requests * self._tiles)))

    def _table(self, splits: int) -> Tensor:
        rows = self._capacity.max_rows
        work = WorkList(torch.zeros(self._capacity.size, dtype=torch.int32).numpy(), self._capacity, 0, 0)
        work.row_partial_start[:] = [row * splits % max(1, self._capacity.max_partial_rows) for row in range(rows)]
        work.row_partial_stride[:], work.row_splits[:] = 1, splits
        return torch.from_numpy(work.buffer)

    def run(
        self,
        q_absorbed: Tensor,
        q_rope: Tensor,
        pool: Tensor,
        page_table: Tensor,
        lens: Tensor,
        softmax_scale: float,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """
        Args:
            q_absorbed: `[T, H, r]`, `q_nope` times `w_kc`; q_rope: `[T, H, dr]`; BF16 or float32, any strides; the
                query tokens of a request follow each other, and the last of them sees all keys.
            pool: uint8 `[slots, row_bytes]`, see latent_rows.LatentRowLayout.
            page_table: int32 `[requests, pages]`, last axis contiguous: page p of it holds tokens p · page_size and up
                at slots page · page_size and up. Entries behind a request's last page are not read.
            lens: int32 `[requests]`, contiguous; 0 allowed.
            out: `[T, H, r]` BF16 or float32, written; lse: `[T, H]` float32, natural log, written; contiguous. 0 and
                -inf for a query that sees no key.
        Raises:
            ValueError: a shape, dtype or stride is not as above, or there are too many requests.
        """
        requests, tokens = len(lens), len(lens) * self._queries
        self._check(q_absorbed, q_rope, pool, page_table, lens, softmax_scale, out, lse)
        if requests == 0:
            return
        query = self._content[:tokens], self._scale[:tokens], self._rope[:tokens]
        quantize_query(q_absorbed, q_rope, *query)
        splits = self.splits(requests)
        results = (self._partial_out, self._partial_lse2) if splits > 1 else (out, lse)
        run_kernel(
            *query,
            pool,
            page_table,
            lens,
            *results,
            layout=self._layout,
            page_size=self._page_size,
            splits=splits,
            softmax_scale=softmax_scale,
            fp8_weights=self._fp8_weights,
        )
        if splits > 1:
            no_lse = self._no_lse[:tokens]
            merge(out, no_lse, self._partial_out, self._partial_lse2, self._tables[splits], self._capacity, out, lse)

    def _check(
        self,
        q_absorbed: Tensor,
        q_rope: Tensor,
        pool: Tensor,
        page_table: Tensor,
        lens: Tensor,
        softmax_scale: float,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Raise the ValueErrors of `run`, but for those of the query, which `quantize_query` checks."""
        requests, tokens = len(lens), len(lens) * self._queries
        rank, dr = self._layout.kv_lora_rank, self._layout.qk_rope_head_dim
        self._layout.check(pool)
        if requests > self._max_requests:
            raise ValueError(f"{requests} requests, but there is room for {self._max_requests}")
        if not softmax_scale > 0:
            raise ValueError(f"softmax_scale must be positive, not {softmax_scale}")
        for name, tensor, shape, dtypes in (
            ("q_absorbed", q_absorbed, (tokens, self._heads, rank), (torch.bfloat16, torch.float32)),
            ("q_rope", q_rope, (tokens, self._heads, dr), (torch.bfloat16, torch.float32)),
            ("page_table", page_table, (requests, page_table.shape[-1]), (torch.int32,)),
            ("lens", lens, (requests,), (torch.int32,)),
            ("out", out, (tokens, self._heads, rank), (torch.bfloat16, torch.float32)),
            ("lse", lse, (tokens, self._heads), (torch.float32,)),
        ):
            if tuple(tensor.shape) != shape or tensor.dtype not in dtypes:
                raise ValueError(f"{name} must be {list(shape)} {dtypes}, not {list(tensor.shape)} {tensor.dtype}")
            if tensor.device != pool.device:
                raise ValueError(f"{name} is on {tensor.device}, but the pool is on {pool.device}")
        if not (lens.is_contiguous() and out.is_contiguous() and lse.is_contiguous()):
            raise ValueError("lens, out and lse must be contiguous")
        if page_table.stride(1) != 1:
            raise ValueError(f"the last axis of page_table must be contiguous; its strides are {page_table.stride()}")


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
    fp8_weights: bool,
    exact: bool | None = None,
) -> None:
    """Launch the kernel.

    Args:
        content: `[T, H, r]` e4m3; scale: `[T, H]` float32; rope: `[T, H, dr]` BF16; contiguous, from quantize_query.
        out, lse: the results where splits is 1; else float32 partials `[T * splits, H, r]` and, base 2,
            `[T * splits, H]`, those of a token one behind the other.
        exact: products in float32, for the interpreter; on a CPU if None.
        Others as for `AbsorbFP8.run`, and not checked here.
    """
    tokens, heads, rank = content.shape
    requests = len(lens)
    queries = tokens // requests
    absorb_fp8_kernel[(triton.cdiv(heads * queries, BLOCK_ROWS), requests, splits)](
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
        QUERIES=queries,
        R=rank,
        DR=rope.shape[-1],
        PAGE=page_size,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK=BLOCK_KEYS,
        FP8_WEIGHTS=fp8_weights,
        FP8_LIMIT=FP8_MAX,
        SCALE_RANGE=WEIGHT_SCALE_RANGE,
        SPLIT=splits > 1,
        EXACT=not pool.is_cuda if exact is None else exact,
        LN2=LN2,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
    )
