"""Time decode attention over private tokens: our kernels over the FP8 cache, and over BF16 pages, beside SGLang's.

    python scripts/bench_decode.py --out benchmarks/results/decode.jsonl
    python scripts/bench_decode.py --case 128x8192x16 --case 64x512-65536x16 --case 128x8192x16x2

Every line of the output is one measurement: the median time of a CUDA graph of one call for one layer, L2 flushed
before each. DeepSeek-V3's dimensions, pages in random order. Ours covers everything from the absorbed
BF16 query on: rounding it, attention, and the merge of split tails; a step's schedule, made once for all layers, is
`prepare_ms`. FlashMLA FP8 gets a query that is already e4m3. Where a server stacks requests, `hybrid_mla_bf16` is
grouped absorb over BF16 pages with nothing grouped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from bench.decode import STOCK, floor_ms, parse_case
from bench.measured import measured
from bench.records import Report
from bench.rivals import RIVALS
from bench.tables import table
from bench.timing import COLUMNS as TIMES
from bench.timing import attempt, free_memory, measure_ceilings

from sglang_mla_ext.kernels.absorb.stacking import STACKED_HEADS

DEFAULT_GRID = (
    *("128x8192x128", "64x16384x128", "32x8192x64", "128x8192x16", "16x65536x16", "1x8192x128", "128x512x128"),
    *("128x8192x64", "128x8192x32", "128x8192x8", "32x8192x128", "32x8192x16", "1x8192x16", "1x131072x16"),
    *("128x512x64", "128x512x16", "512x512x16", "128x8192x16x2", "32x8192x128x2"),
    *("64x512-65536x16", "64x512-65536x64", "64x512-65536x128"),
)
CASE = {"requests": "{batch}", "tokens": "{tail}-{longest} ?? {tail}", "heads": "{heads}", "queries": "{s_q}"}
COLUMNS = CASE | {"what": "{impl}"} | TIMES


def main(
    case: Annotated[list[str] | None, typer.Option(help="REQUESTSxTOKENS[-MOST]xHEADS[xQUERIES] (repeatable)")] = None,
    rep_ms: Annotated[int, typer.Option(min=1, help="ms spent on each measurement")] = 100,
    out: Annotated[Path | None, typer.Option(help="append JSON lines to this file")] = None,
) -> None:
    """Time decode attention over private tokens."""
    cases = [parse_case(spec) for spec in case or DEFAULT_GRID]
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU")
    ceilings = measure_ceilings(rep_ms)
    free_memory()
    report, failed = Report("attention", out), False
    for of in cases:
        print(of, flush=True)
        stacked = ["hybrid_mla_bf16"] if of.heads in STACKED_HEADS else []
        for name in (*STOCK, *stacked, "hybrid_mla"):
            dtype = RIVALS[name].dtype if name in RIVALS else "bf16" if name in stacked else "fp8"
            metrics = attempt(name, measured, name, "all", dtype, of, rep_ms)
            if metrics and name == "hybrid_mla":
                floor = floor_ms(of, ceilings)
                metrics |= dict(floor_ms=floor, floor_share=floor / metrics["ms"])
            failed |= metrics is None and name not in STOCK
            report.add(name, of.fields(dtype), metrics, part="all")
            free_memory()
    print(f"decode over private tokens, {torch.cuda.get_device_name()}: {ceilings}")
    print(table(COLUMNS, report.rows))
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
