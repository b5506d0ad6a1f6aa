"""Our kernels on a case of decode attention, over random data: what to time, and its floor.

Over shared, expanded prefixes (naive attention), over shared pages (grouped absorb), and over private FP8 rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from bench.cases import DN, DR, DV, LATENT, PAGE_TOKENS, SCALE, Case, padded, page_table
from bench.rivals import flashmla_tail
from bench.timing import Ceilings, captured, measure, time_ms
from sglang_mla_ext.kernels.dispatch import append_rows, make_absorb_fp8, make_shared_attention
from sglang_mla_ext.kernels.naive.attention import SharedAttention
from sglang_mla_ext.kernels.naive.tiles import Tile
from sglang_mla_ext.kernels.storage.expanded import CHUNK_TOKENS, ExpandedBuffers
from sglang_mla_ext.kernels.storage.latent_rows import LatentRowLayout
from sglang_mla_ext.prefix.planner.gpu_rates import rates_for
from sglang_mla_ext.segment import Mode, Segment

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
STORAGE = {"bf16": "bf16", "fp8": "fp8_e4m3"}  # a dtype's name in configs/gpus
ROWS_AT_ONCE = 1 << 16
LAYOUT = LatentRowLayout()


def shared_bytes(case: Case, dtype: str) -> int:
    """Bytes of the expanded keys and values of all prefixes of a case; rotary keys are never FP8."""
    per_head = (DN + DV) * DTYPES[dtype].itemsize
    return len(case.sizes) * case.prefix * (case.heads * per_head + DR * 2)


def tail_work(case: Case) -> tuple[int, int]:
    """Operations and bytes of `flashmla_tail`."""
    return case.latent_flops(case.tail_lengths), sum(case.tail_lengths) * (LATENT + DR) * 2


def our_work(case: Case, dtype: str) -> dict[str, tuple[int, int]]:
    """Operations and bytes of keys and values of each part, as of `our_part`; the tails are BF16."""
    naive, tail = (case.shared_flops, shared_bytes(case, dtype)), tail_work(case)
    both = naive[0] + tail[0], naive[1] + tail[1]
    return {"naive": naive, "all": both}


def floor_ms(case: Case, dtype: str, ceilings: Ceilings) -> float:
    """Lower bound of the time, ms: bytes at the bandwidth of a copy or products at the rate of a large matrix product,
    whichever takes longer. Products with rotary keys are BF16 with FP8 storage, too.

    Where rows share prefixes it is that of the shared part alone, else that of FP8 rows.
    """
    if case.sizes:
        read_bytes, flops, bf16_share = shared_bytes(case, dtype), case.shared_flops, DR / (DN + DR + DV)
    else:
        read_bytes, flops = sum(case.lengths) * LAYOUT.row_bytes, case.latent_flops(case.lengths)
        bf16_share = DR / (2 * LATENT + DR)
    bf16_share = 1.0 if dtype == "bf16" else bf16_share
    s_per_flop = bf16_share / ceilings.bf16_tflops + (1 - bf16_share) / ceilings.fp8_tflops
    return max(read_bytes / ceilings.copy_gbps / 1e6, flops * s_per_flop / 1e9)


def random_prefixes(chunks: int, heads: int, dtype: str) -> ExpandedBuffers:
    """Expanded prefixes of one layer, filled with random numbers."""
    sizes = dict(qk_nope_head_dim=DN, v_head_dim=DV, qk_rope_head_dim=DR, dtype=DTYPES[dtype])
    buffers = ExpandedBuffers.allocate(layers=1, chunks=chunks, heads=heads, **sizes)
    for tensor in (buffers.k_nope, buffers.v_t, buffers.k_rope):
        tensor.copy_(torch.randn(tensor.shape, device="cuda", dtype=torch.bfloat16))
    return buffers


def shared_attention(case: Case, dtype: str, tile: Tile | None = None) -> tuple[SharedAttention, Callable[[], None]]:
    """Our attention, planned for a case over random prefixes, and a call that runs it.

    Args:
        tile: of the kernel; by default those that a server picks from.
    """
    rows, heads = case.batch, case.heads
    chunks = -(-case.prefix // CHUNK_TOKENS)  # of one group
    buffers = random_prefixes(chunks * len(case.sizes), heads, dtype)
    query = torch.randn(rows, heads, DN + DR, device="cuda", dtype=torch.bfloat16)
    q_nope, q_rope = query[..., :DN], query[..., DN:]  # [B, H, dn], [B, H, dr]

    if tile is None:
        tiles = rates_for(torch.cuda.get_device_name()).naive_tiles.get(STORAGE[dtype], ())
    else:
        tiles = (dataclasses.asdict(tile),)
    attention = make_shared_attention(buffers, max_rows=rows, heads=heads, device="cuda", tiles=tiles)
    groups = [
        Segment(tuple(range(*of)), 0, case.prefix, Mode.NAIVE, tuple(range(index * chunks, (index + 1) * chunks)))
        for index, of in enumerate(case.groups)
    ]
    attention.plan(groups, rows)

    def run() -> None:
        attention.run(0, q_nope, q_rope, SCALE)

    return attention, run


def our_part(case: Case, dtype: str, part: str, tile: Tile | None = None) -> Callable[[], Any]:
    """Return a call of our kernels: of the shared part (`naive`), or of `all`, which is FlashMLA over the tails, the
    shared part, and the merge."""
    attention, run = shared_attention(case, dtype, tile)
    if part == "naive":
        return run
    tail = flashmla_tail(case)
    out = torch.randn(case.batch, case.heads, DV, device="cuda", dtype=torch.bfloat16)  # [B, H, dv], merged in place

    def run_all() -> None:
        _, lse = tail()  # [B, H, 1]
        run()
        attention.merge(out, lse.squeeze(-1), out)

    return run_all


def grouped_absorb(case: Case) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Prefixes, tails and merge in the latent space, BF16: out `[B * s_q, H, 512]`, lse `[B * s_q, H]` float32, natural
    log.

    Whole pages of a prefix are shared; tokens after the last whole page belong to the tails.
    """
    shared = case.prefix // PAGE_TOKENS
    pages, n_pages = page_table(case.lengths, case.sizes, shared)
    end = shared * PAGE_TOKENS
    groups = [Segment(tuple(range(*rows)), 0, end, Mode.GROUPED_ABSORB) for rows in case.groups]
    starts = [end] * sum(case.sizes) + [0] * case.alone
    return grouped_over(pages, n_pages, case.lengths, starts, groups if end else [], case.heads, case.s_q)


def grouped_over(
    pages: list[list[int]],
    n_pages: int,
    lengths: list[int],
    starts: list[int],
    segments: Sequence[Segment],
    heads: int,
    query_tokens: int = 1,
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """The same over any pages and segments.

    Args:
        pages: `[B]` lists, of each request from its first token on; n_pages: distinct ones.
        lengths: `[B]` tokens of each request; starts: `[B]` tokens before its tail, whole pages.
        segments: of requests, each with `query_tokens`.
    """
    from sglang_mla_ext.kernels.absorb.stacking import rows_per_tile
    from sglang_mla_ext.kernels.dispatch import make_grouped_absorb

    if rows_per_tile(heads) is None:
        raise ValueError(f"a server does not stack requests of {heads} heads")
    batch = len(pages)
    table = torch.tensor(padded(pages), dtype=torch.int32, device="cuda")  # [B, pages]
    slots = table[..., None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, dtype=torch.int32, device="cuda")
    latent = torch.randn(n_pages, PAGE_TOKENS, 1, LATENT + DR, device="cuda", dtype=torch.bfloat16)
    rows = batch * query_tokens
    # As SGLang has them: absorbed queries heads first, and the rotary part at the end of a query.
    content = torch.randn(heads, rows, LATENT, device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    rope = torch.randn(rows, heads, DN + DR, device="cuda", dtype=torch.bfloat16)[..., DN:]
    req_to_token = slots.flatten(1)  # [B, tokens]

    def refuse(error: BaseException) -> NoReturn:
        raise RuntimeError("the kernels of grouped absorb do not run here") from error

    sizes = dict(max_rows=rows, max_tokens=req_to_token.shape[1], query_tokens=query_tokens)
    in_segments = query_tokens * sum(len(segment.rows) for segment in segments)
    sizes |= dict(max_segments=max(1, len(segments)), max_segment_rows=max(rows, in_segments))
    dims = dict(heads=heads, kv_lora_rank=LATENT)
    grouped = make_grouped_absorb(req_to_token, latent, **dims, on_failure=refuse, **sizes)
    if grouped is None:
        raise RuntimeError("the kernel of grouped absorb needs a Hopper GPU")
    grouped.plan(segments, batch)
    requests, tail_starts = torch.arange(batch, device="cuda"), torch.tensor(starts, dtype=torch.int32, device="cuda")
    grouped.begin_step(req_to_token, requests, torch.tensor(lengths, device="cuda"), tail_starts)
    return lambda: grouped.run(content, rope, latent, SCALE)


def measure_fp8_rows(case: Case, rep_ms: int) -> dict[str, Any]:
    """Metrics of a layer's attention over random rows, in pages in random order, by the implementation that a server
    chooses; and `prepare_ms` of a step's schedule, made once for all layers."""
    pages, n_pages = page_table(case.lengths, (), 0)
    order = 1 + torch.randperm(n_pages, device="cuda", dtype=torch.int32)
    pool = torch.zeros((n_pages + 1) * PAGE_TOKENS, LAYOUT.row_bytes, dtype=torch.uint8, device="cuda")
    for first in range(0, len(pool), ROWS_AT_ONCE):
        slots = torch.arange(first, min(first + ROWS_AT_ONCE, len(pool)), device="cuda")
        latent, rope = (torch.randn(len(slots), dim, device="cuda", dtype=torch.bfloat16) for dim in (LATENT, DR))
        append_rows(latent, rope, slots, pool)
    table = order[torch.tensor(pages, device="cuda")]
    lens = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")

    sizes = dict(max_requests=case.batch, heads=case.heads, query_tokens=case.s_q)
    absorb = make_absorb_fp8(pool, dtype=torch.bfloat16, on_failure=print, **sizes)
    rows = case.batch * case.s_q
    query = torch.randn(rows, case.heads, LATENT + DR, device="cuda", dtype=torch.bfloat16)
    q_absorbed, q_rope = query.split([LATENT, DR], dim=-1)
    out, lse = absorb.output(rows, torch.bfloat16), torch.empty(rows, case.heads, device="cuda")

    def prepare() -> None:
        absorb.begin_step(lens, table)

    def run() -> None:
        absorb.run(q_absorbed, q_rope, pool, table, lens, SCALE, out, lse)

    prepare()
    work = case.latent_flops(case.lengths), sum(case.lengths) * LAYOUT.row_bytes
    return measure(run, rep_ms, work) | dict(prepare_ms=time_ms(captured(prepare), rep_ms))
