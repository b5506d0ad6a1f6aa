"""Grouped absorb, as a server runs it, on a case of decode attention (cases.Case)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import NoReturn

import torch

from bench.cases import DR, LATENT, PAGE_TOKENS, SCALE, Case, page_table

GROUPED_HEADS = (8, 16, 32)
"""Heads of a rank with which a server stacks requests."""


def grouped_absorb(case: Case) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Prefixes, tails and merge in the latent space, BF16: out `[B * s_q, H, 512]`, lse `[B * s_q, H]` float32, natural
    log.

    Whole pages of a prefix are shared; tokens after the last whole page belong to the tails.
    """
    from sglang_mla_ext.kernels.absorb.schedule import LatentSegment
    from sglang_mla_ext.kernels.absorb.stacking import rows_per_tile
    from sglang_mla_ext.kernels.dispatch import make_grouped_absorb

    if rows_per_tile(case.heads) is None:
        raise ValueError(f"a server does not stack requests of {case.heads} heads")
    shared = case.prefix // PAGE_TOKENS
    pages, n_pages = page_table(case.lengths, case.sizes, shared)
    table = torch.tensor(pages, dtype=torch.int32, device="cuda")  # [B, pages]
    slots = table[..., None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, dtype=torch.int32, device="cuda")
    latent = torch.randn(n_pages, PAGE_TOKENS, 1, LATENT + DR, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(case.batch * case.s_q, case.heads, LATENT + DR, device="cuda", dtype=torch.bfloat16)
    req_to_token = slots.flatten(1)  # [B, tokens]

    def refuse(reason: str, error: BaseException) -> NoReturn:
        raise RuntimeError(reason) from error

    sizes = dict(max_rows=len(query), max_tokens=req_to_token.shape[1], queries=case.s_q)
    dims = dict(heads=case.heads, kv_lora_rank=LATENT)
    grouped = make_grouped_absorb(req_to_token, latent, **dims, on_failure=refuse, **sizes)
    if grouped is None:
        raise RuntimeError("the kernel of grouped absorb needs a Hopper GPU")
    end = shared * PAGE_TOKENS
    groups = [
        LatentSegment(tuple(range(first * case.s_q, last * case.s_q)), 0, end)
        for first, last in pairwise([0, *accumulate(case.sizes)])
    ]
    prefix_lens = torch.zeros(case.batch, dtype=torch.int32, device="cuda")
    prefix_lens[: sum(case.sizes)] = end
    grouped.plan(groups if end else [], len(query))
    requests, lengths = torch.arange(case.batch, device="cuda"), torch.tensor(case.lengths, device="cuda")
    grouped.begin_step(req_to_token, requests, lengths, prefix_lens)
    parts = query.split([LATENT, DR], dim=-1)
    return lambda: grouped.run(*parts, latent, SCALE)
