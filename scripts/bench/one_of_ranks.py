"""Attention of one of several ranks that hold a prompt together, on one GPU: what a rank computes in a layer, with a
copy within the GPU in place of each all-to-all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.cases import DN, DR, DV, SCALE, Case
from bench.rivals import flashmla_bf16, flashmla_tail
from bench.shared import our_parts, shared_attention, shared_bytes
from sglang_mla_ext.kernels.naive.spread import SpreadAttention


def layers_of_rank(case: Case, ranks: int, dtype: str) -> dict[str, tuple[Callable[[], Any], int]]:
    """What a rank's layer does with its rows, and the rows of all ranks in that rank's heads.

    Args:
        case: a rank's own rows, one group, with all heads.
        ranks: as many as there are, each with as many rows on the same prompt.
        dtype: of the expanded prompt; see bench.shared.DTYPES.
    Returns:
        by name what to time, and the bytes of the expanded prompt in a layer: `flashmla` expands nothing, `alone` every
        rank by itself, and `spread` each its heads.
    """
    own = Case(case.prefix, case.tail, case.heads // ranks, (ranks * case.batch,))
    attention, _ = shared_attention(own, dtype)
    spread = SpreadAttention(
        attention,
        Tensor.copy_,
        ranks=ranks,
        heads=case.heads,
        max_rows=case.batch,
        qk_nope_head_dim=DN,
        qk_rope_head_dim=DR,
        v_head_dim=DV,
        dtype=torch.bfloat16,
        device="cuda",
    )
    query = torch.randn(case.batch, case.heads, DN + DR, dtype=torch.bfloat16, device="cuda")
    tail = flashmla_tail(case)
    merged = torch.randn(case.batch, case.heads, DV, dtype=torch.bfloat16, device="cuda")

    def of_spread() -> None:
        spread.run(0, query[..., :DN], query[..., DN:], SCALE)
        _, lse = tail()  # [B, 1, H, 512], [B, H, 1]
        spread.merge(merged, lse.squeeze(-1), merged)

    return {
        "flashmla": (flashmla_bf16(case), 0),
        "alone": (our_parts(case, dtype)["all_two_streams"], shared_bytes(case, dtype)),
        "spread": (of_spread, shared_bytes(own, dtype)),
    }
