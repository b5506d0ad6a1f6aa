"""Measure cells of experiments.py on the GPU."""

from __future__ import annotations

from typing import Any

from bench.decode import FP8Cache, default, measure_ours
from bench.grouped import grouped_absorb
from bench.rivals import RIVALS, flashmla_tail
from bench.shared import our_parts, our_work, tail_work
from bench.timing import measure, measure_rival

from lab.papers.experiments import Cell


def measured(cell: Cell, rep_ms: int) -> dict[str, Any]:
    """Metrics of a cell: `ms`, `tflops`, `gbps`."""
    case, (impl, part, dtype, _) = cell.case, cell.of
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
