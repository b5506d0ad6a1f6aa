"""Small cases of the absorb kernels and of the FP8 rows for sanitize_cases.py, made and checked on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_mla_ext.kernels.absorb import sm90_bf16_absorb
from sglang_mla_ext.kernels.absorb.paged_fp8 import AbsorbFP8
from sglang_mla_ext.kernels.absorb.schedule import AbsorbCapacity, build_segment_work, empty_tail_table, empty_work
from sglang_mla_ext.kernels.absorb.tail_schedule import schedule_tails
from sglang_mla_ext.kernels.merge import merge
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.storage.append_latent import append_latent
from sglang_mla_ext.kernels.storage.fetch_latent import fetch_latent
from sglang_mla_ext.kernels.storage.latent_rows import LatentRowLayout, dequantize, quantize
from sglang_mla_ext.segment import Mode, Segment

LAYOUT, RANK, DR, PAGE = LatentRowLayout(), 512, 64, 64
SCALE = 192**-0.5
LENGTHS = (1, 0, 64, 130, 257)
SHARED_ROWS, SHARED_PAGES = (0, 2, 3), 3  # what three of the requests share, where there are groups
PROGRAMS = 4


def pages_of(lengths: tuple[int, ...], spare: int = 2) -> tuple[Tensor, int]:
    """A page table `[requests, pages]` in random order, and the number of pages; `spare` ones belong to no request."""
    counts = [-(-length // PAGE) for length in lengths]
    order = torch.randperm(sum(counts) + spare).int()
    table, used = torch.zeros(len(lengths), max(counts), dtype=torch.int32), 0
    for request, count in enumerate(counts):
        table[request, :count] = order[used : used + count]
        used += count
    return table, len(order)


def slots_of(pages: Tensor, length: int) -> Tensor:
    return (pages.long()[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]


def error(out: Tensor, lse: Tensor, expected: tuple[Tensor, Tensor], lse_bound: float) -> float:
    """Relative L2 of the output, whose lse is right."""
    assert torch.equal(lse.cpu().isinf(), expected[1].isinf())
    assert (lse.cpu() - expected[1]).nan_to_num(0.0).abs().max() < lse_bound
    return reference.errors(out.cpu(), expected[0]).rel_l2


def absorb_error(device: str, heads: int, queries: int = 1) -> float:
    """Tails, a prefix of three requests, and the merge of both, with several query tokens of each request; BF16."""
    rows, lengths = len(LENGTHS), (*LENGTHS, SHARED_PAGES * PAGE)
    table, n_pages = pages_of(lengths)
    keys = [torch.randn(length, RANK + DR).bfloat16() for length in lengths]
    cache = torch.full((n_pages * PAGE, RANK + DR), torch.nan, dtype=torch.bfloat16)
    for pages, of_request in zip(table, keys, strict=True):
        cache[slots_of(pages, len(of_request))] = of_request
    query = torch.randn(rows * queries, heads, RANK + DR).bfloat16()
    parts = []
    for row in range(rows * queries):
        request, token = divmod(row, queries)
        seen = max(0, lengths[request] - (queries - 1 - token))
        own = torch.cat([keys[request][:seen], *(keys[-1:] if request in SHARED_ROWS else [])])[None].double()
        one = query[row : row + 1].double()
        parts.append(reference.absorb(one[..., :RANK], one[..., RANK:], own, torch.tensor([own.shape[1]]), SCALE))
    expected = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    capacity = AbsorbCapacity(rows, heads * queries, PROGRAMS, query_tokens=queries)
    segments = [Segment(SHARED_ROWS, 0, SHARED_PAGES * PAGE, Mode.GROUPED_ABSORB)]
    plan = build_segment_work(segments, [rows * table.shape[1]], capacity)
    work = torch.from_numpy(empty_work(capacity))
    work[: len(plan.head)] = torch.from_numpy(plan.head)
    work[capacity.segment_strips :][: len(plan.strips)] = torch.from_numpy(plan.strips)
    work, table, of_segments = work.to(device), table.to(device), plan.table.to(device)
    of_tails = empty_tail_table(capacity).to(device)
    schedule_tails(torch.tensor(LENGTHS, dtype=torch.int32, device=device), work, of_tails, capacity, table)
    shape = capacity.max_partial_rows, capacity.heads
    partials = torch.full((*shape, RANK), torch.nan, dtype=torch.bfloat16, device=device)
    partial_lse2 = torch.full(shape, torch.nan, device=device)
    paged = cache.view(-1, PAGE, 1, RANK + DR).to(device)
    content, rope = query.to(device).split([RANK, DR], dim=-1)
    sm90_bf16_absorb.run(content, rope, paged, work, table, capacity, partials, partial_lse2, softmax_scale=SCALE)
    out, lse = capacity.uncut_rows(partials, rows), torch.empty(rows, capacity.heads, device=device)
    no_lse = torch.full_like(lse, -torch.inf)
    merge(out, no_lse, partials, partial_lse2, of_tails, out, lse, of_segments, out_in_partials=True)
    return error(out.view(query.shape[0], heads, RANK), lse.view(query.shape[:2]), expected, 1e-3)


def absorb_fp8_error(device: str, make: Callable[..., AbsorbFP8], heads: int, queries: int) -> float:
    """FP8 rows, with several query tokens of each request; the query is rounded in the kernel's call."""
    table, n_pages = pages_of(LENGTHS)
    pool = torch.full((n_pages * PAGE, LAYOUT.row_bytes), 0x7F, dtype=torch.uint8)
    LAYOUT.scale(pool).fill_(torch.nan)
    LAYOUT.rope(pool).fill_(torch.nan)
    query = torch.randn(len(LENGTHS) * queries, heads, RANK + DR).bfloat16()
    parts = []
    for request, length in enumerate(LENGTHS):
        rows = quantize(torch.randn(length, RANK), torch.randn(length, DR))
        pool[slots_of(table[request], length)] = rows
        keys = torch.cat(dequantize(rows), dim=-1).double()
        for token in range(queries):
            seen = torch.tensor([max(0, length - (queries - 1 - token))])
            one = query[request * queries + token][None].double()
            parts.append(reference.absorb(one[..., :RANK], one[..., RANK:], keys[None], seen, SCALE))
    expected = torch.cat([out for out, _ in parts]), torch.cat([lse for _, lse in parts])

    sizes: dict[str, Any] = dict(max_requests=len(LENGTHS), heads=heads, query_tokens=queries, num_sms=PROGRAMS)
    absorb = make(**sizes, device=device)
    lens, lse = torch.tensor(LENGTHS, dtype=torch.int32, device=device), torch.empty(query.shape[:2], device=device)
    out, pool, table = absorb.output(len(query), torch.bfloat16), pool.to(device), table.to(device)
    absorb.begin_step(lens, table)
    absorb.run(*query.to(device).split([RANK, DR], dim=-1), pool, table, lens, SCALE, out, lse)
    return error(out, lse, expected, 0.25)


def rows_error(device: str) -> float:
    """Rows written to slots and read back, some of them skipped: 0 where all bytes are right."""
    latent, rope = torch.randn(9, RANK).bfloat16(), torch.randn(9, DR).bfloat16()
    slots = torch.randperm(40)[:9]
    slots[3] = -1
    pool = torch.full((40, LAYOUT.row_bytes), 0x7F, dtype=torch.uint8, device=device)
    on_device = slots.to(device)
    append_latent(latent.to(device), rope.to(device), on_device, pool)
    expected = torch.full((40, LAYOUT.row_bytes), 0x7F, dtype=torch.uint8)
    rows, kept = quantize(latent, rope), slots >= 0
    padding = slice(LAYOUT.rope_offset - 12, LAYOUT.rope_offset)
    rows[:, padding] = 0x7F
    expected[slots[kept]] = rows[kept]
    read = torch.zeros(9, RANK, device=device), torch.zeros(9, DR, device=device)
    fetch_latent(pool, on_device, *read)
    values = [part.float() for part in dequantize(rows[kept])]
    same = [torch.equal(part.cpu()[kept], value) for part, value in zip(read, values, strict=True)]
    return 0.0 if torch.equal(pool.cpu(), expected) and all(same) else 1.0
