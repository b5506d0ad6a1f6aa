"""Measure an implementation of attention, or a part of it, on a case."""

from __future__ import annotations

from typing import Any

from bench.cases import Case
from bench.decode import measure_fp8_rows
from bench.grouped import grouped_absorb
from bench.rivals import RIVALS, flashmla_tail
from bench.shared import our_part, our_work, tail_work
from bench.timing import measure


def measured(impl: str, part: str, dtype: str, case: Case, rep_ms: int) -> dict[str, Any]:
    """Metrics: `ms`, `tflops`, `gbps`.

    Args:
        impl: of `RIVALS`; `hybrid_mla`, over expanded prefixes where rows share one, else over FP8 rows; or
            `hybrid_mla_bf16`, grouped absorb over BF16 pages with nothing grouped.
        part: `all`, FlashMLA's `tail` alone, or of `hybrid_mla` the shared part (`naive`) or `grouped_absorb`.
    """
    if part == "tail":
        return measure(flashmla_tail(case), rep_ms, tail_work(case))
    if impl == "hybrid_mla_bf16" or part == "grouped_absorb":
        return measure(grouped_absorb(case), rep_ms, RIVALS["flashmla_bf16"].work(case))
    if impl in RIVALS:
        return measure(RIVALS[impl].make(case), rep_ms, RIVALS[impl].work(case))
    if case.sizes:
        return measure(our_part(case, dtype, part), rep_ms, our_work(case, dtype)[part])
    return measure_fp8_rows(case, rep_ms)
