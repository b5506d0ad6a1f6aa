"""Measure cells of experiments.py on the GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from bench.cases import DN, DV, LATENT, Case
from bench.decode import FP8Cache, default, measure_ours
from bench.grouped import grouped_absorb
from bench.rivals import RIVALS, flashmla_tail
from bench.shared import our_parts, our_work, tail_work
from bench.timing import measure, measure_rival

from lab.papers.experiments import Cell


def measured(cell: Cell, rep_ms: int) -> dict[str, Any]:
    """Metrics of a cell: `ms`, `tflops`, `gbps`."""
    case, (impl, part, dtype, _) = cell.case, cell.of
    if impl == "torch":
        return measure(projection(case, part), rep_ms, (2 * case.batch * case.heads * DN * LATENT, 0))
    if part == "tail":
        return measure(flashmla_tail(case), rep_ms, tail_work(case))
    if impl == "hybrid_mla_bf16":
        return measure(grouped_absorb(case), rep_ms, RIVALS["flashmla_bf16"].work(case))
    if impl != "hybrid_mla":
        return measure_rival(RIVALS[impl], case, rep_ms)
    if case.sizes:
        return measure(our_parts(case, dtype)[part], rep_ms, our_work(case, dtype)[part])
    cache = FP8Cache(case)
    return measure_ours(case, cache, default(cache), rep_ms)


def projection(case: Case, part: str) -> Callable[[], torch.Tensor]:
    """The product of a step's rows with `w_kc`, before absorb, or with `w_vc`, after it; as a server runs them."""
    width, out = (DN, LATENT) if part == "w_kc" else (LATENT, DV)
    rows = torch.randn(case.batch, case.heads, width, device="cuda", dtype=torch.bfloat16)  # [B, H, width]
    weight = torch.randn(case.heads, width, out, device="cuda", dtype=torch.bfloat16)
    return lambda: torch.bmm(rows.transpose(0, 1), weight)  # [H, B, out]
