"""Measure implementations of attention, or parts of them, on cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import typer

from bench.cases import Case
from bench.ours import floor_ms, grouped_absorb, measure_fp8_rows, our_part, our_work, tail_work
from bench.records import Report
from bench.rivals import RIVALS, flashmla_tail
from bench.tables import table
from bench.timing import COLUMNS, attempt, free_memory, measure, measure_ceilings

Asked = tuple[str, str, str]
"""Implementation, part and dtype: as of `measured`."""


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


def measure_cases(
    cases: Iterable[Case],
    asked: Callable[[Case], Iterable[Asked]],
    *,
    title: str,
    columns: Mapping[str, str],
    rep_ms: int,
    out: Path | None,
) -> None:
    """Time what is asked for in each case, append records to a file, and print a table.

    Ours over expanded prefixes and over FP8 rows stands beside its floor.

    Args:
        columns: of the table, before those of times.
    Raises:
        typer.Exit: one of ours failed.
    """
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU")
    ceilings = measure_ceilings(rep_ms)
    free_memory()
    report, failed = Report("attention", out), False
    for case in cases:
        print(case, flush=True)
        for of in asked(case):
            impl, part, dtype = of
            metrics = attempt(" ".join(of), measured, *of, case, rep_ms)
            if metrics and impl == "hybrid_mla" and part != "grouped_absorb":
                floor = floor_ms(case, dtype, ceilings)
                metrics |= dict(floor_ms=floor, floor_share=floor / metrics["ms"])
            failed |= metrics is None and impl.startswith("hybrid_mla")
            report.add(impl, case.fields(dtype), metrics, part=part)
            free_memory()
    print(f"{title}, {torch.cuda.get_device_name()}: {ceilings}")
    print(table(columns | COLUMNS, report.rows))
    if failed:
        raise typer.Exit(1)
