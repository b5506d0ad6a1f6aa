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
    """Prefixes, tails and merge in the latent space, BF16: out `[B, H, 512]`, lse `[B, H]` float32, natural log.

    Whole pages of a prefix are shared; tokens after the last whole page belong to the tails.
    """
    from sglang_mla_ext.kernels.absorb.grouped import make_grouped_absorb, stacking_for
    from sglang_mla_ext.prefix.cost_model import Mode
    from sglang_mla_ext.prefix.planner import Group

    stacking = stacking_for(case.heads)
    if stacking is None:
        raise ValueError(f"a server does not stack requests of {case.heads} heads")
    shared = case.prefix // PAGE_TOKENS
    pages, n_pages = page_table(case.lengths, case.sizes, shared)
    table = torch.tensor(pages, dtype=torch.int32, device="cuda")  # [B, pages]
    slots = table[..., None] * PAGE_TOKENS + torch.arange(PAGE_TOKENS, dtype=torch.int32, device="cuda")
    latent = torch.randn(n_pages, PAGE_TOKENS, 1, LATENT + DR, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(case.batch, case.heads, LATENT + DR, device="cuda", dtype=torch.bfloat16)
    req_to_token = slots.flatten(1)  # [B, tokens]

    def refuse(reason: str, error: BaseException) -> NoReturn:
        raise RuntimeError(reason) from error

    sizes = dict(max_rows=case.batch, max_tokens=req_to_token.shape[1])
    grouped = make_grouped_absorb(req_to_token, latent, stacking, kv_lora_rank=LATENT, on_failure=refuse, **sizes)
    end = shared * PAGE_TOKENS
    groups = [
        Group(tuple(range(first, last)), None, 0, end, Mode.GROUPED_ABSORB)
        for first, last in pairwise([0, *accumulate(case.sizes)])
    ]
    prefix_lens = torch.zeros(case.batch, dtype=torch.int32, device="cuda")
    prefix_lens[: sum(case.sizes)] = end
    grouped.plan(groups if end else [], case.batch)
    rows, lengths = torch.arange(case.batch, device="cuda"), torch.tensor(case.lengths, device="cuda")
    grouped.prepare(req_to_token, rows, lengths, prefix_lens)
    return lambda: grouped.run(query, latent, SCALE)
