"""Grouped absorb, as a server runs it, on a case of decode attention (cases.Case)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NoReturn

import torch

from bench.cases import DR, LATENT, PAGE_TOKENS, SCALE, Case, padded, page_table
from sglang_mla_ext.segment import Mode, Segment


def grouped_absorb(case: Case, cuts: int = 1) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Prefixes, tails and merge in the latent space, BF16: out `[B * s_q, H, 512]`, lse `[B * s_q, H]` float32, natural
    log.

    Whole pages of a prefix are shared; tokens after the last whole page belong to the tails.

    Args:
        cuts: segments that each prefix stands in.
    """
    shared = case.prefix // PAGE_TOKENS
    pages, n_pages = page_table(case.lengths, case.sizes, shared)
    end = shared * PAGE_TOKENS
    bounds = [shared * cut // cuts * PAGE_TOKENS for cut in range(cuts + 1)]
    groups = [
        Segment(tuple(range(first, last)), *ends, mode=Mode.GROUPED_ABSORB)
        for first, last in pairwise([0, *accumulate(case.sizes)])
        for ends in pairwise(bounds)
    ]
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
    query = torch.randn(batch * query_tokens, heads, LATENT + DR, device="cuda", dtype=torch.bfloat16)
    req_to_token = slots.flatten(1)  # [B, tokens]

    def refuse(error: BaseException) -> NoReturn:
        raise RuntimeError("the kernels of grouped absorb do not run here") from error

    sizes = dict(max_rows=len(query), max_tokens=req_to_token.shape[1], query_tokens=query_tokens)
    in_segments = query_tokens * sum(len(segment.rows) for segment in segments)
    sizes |= dict(max_segments=max(1, len(segments)), max_segment_rows=max(len(query), in_segments))
    dims = dict(heads=heads, kv_lora_rank=LATENT)
    grouped = make_grouped_absorb(req_to_token, latent, **dims, on_failure=refuse, **sizes)
    if grouped is None:
        raise RuntimeError("the kernel of grouped absorb needs a Hopper GPU")
    grouped.plan(segments, batch)
    requests, tail_starts = torch.arange(batch, device="cuda"), torch.tensor(starts, dtype=torch.int32, device="cuda")
    grouped.begin_step(req_to_token, requests, torch.tensor(lengths, device="cuda"), tail_starts)
    parts = query.split([LATENT, DR], dim=-1)
    return lambda: grouped.run(*parts, latent, SCALE)
