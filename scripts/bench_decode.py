"""Time decode attention over private tokens: our kernels over the FP8 cache, and over BF16 pages, beside SGLang's.

    python scripts/bench_decode.py --out benchmarks/results/decode.jsonl
    python scripts/bench_decode.py --case 128x8192x16 --case 64x512-65536x16 --case 128x8192x16x2 --portable
    python scripts/bench_decode.py --queries

Every line of the output is one measurement: the median time of a CUDA graph of one call for one layer, L2 flushed
before each. DeepSeek-V3's dimensions, pages in random order. Ours covers everything from the absorbed
BF16 query on: rounding it, attention, and the merge of split tails; a step's schedule, made once for all layers, is
`prepare_ms`. FlashMLA FP8 gets a query that is already e4m3. Where a server stacks requests, `hybrid_mla_bf16` is
grouped absorb over BF16 pages with nothing grouped. `--queries` takes cases of speculative decoding's verify step
instead; `--portable` also times the portable kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench.ceilings import measure_ceilings
from bench.decode import STOCK, DecodeCase, FP8Cache, default, floor_ms, measure_ours, parse_case
from bench.grouped import grouped_absorb
from bench.records import write_record
from bench.rivals import RIVALS
from bench.timing import CELLS, attempt, cells, free_memory, measure, measure_rival
from rich.console import Console
from rich.table import Table

from sglang_mla_ext.kernels.absorb.paged_fp8 import AbsorbFP8, TritonAbsorbFP8
from sglang_mla_ext.kernels.absorb.stacking import STACKED_HEADS

DEFAULT_GRID = (
    *("128x8192x128", "64x16384x128", "32x8192x64", "128x8192x16", "16x65536x16", "1x8192x128", "128x512x128"),
    *("128x8192x64", "128x8192x32", "128x8192x8", "32x8192x128", "32x8192x16", "1x8192x16", "1x131072x16"),
    *("128x512x64", "128x512x16", "512x512x16", "128x8192x16x2", "32x8192x128x2"),
    *("64x512-65536x16", "64x512-65536x64", "64x512-65536x128"),
)
VERIFY_GRID = (
    *("128x8192x16x4", "128x1024x16x4", "32x8192x16x4", "1x8192x16x4", "128x8192x16x2", "128x8192x16x8"),
    *("128x8192x8x4", "128x8192x32x4", "128x8192x64x4", "128x1024x64x4", "64x8192x128x4", "128x1024x128x4"),
    *("1x8192x128x4", "64x8192x128x2"),
)


def main(
    case: Annotated[list[str] | None, typer.Option(help="REQUESTSxTOKENS[-MOST]xHEADS[xQUERIES] (repeatable)")] = None,
    queries: Annotated[bool, typer.Option(help="cases with several query tokens of a request")] = False,
    portable: Annotated[bool, typer.Option("--portable", help="time the portable kernel, too")] = False,
    rep_ms: Annotated[int, typer.Option(min=1, help="ms spent on each measurement")] = 100,
    out: Annotated[Path | None, typer.Option(help="append JSON lines to this file")] = None,
) -> None:
    """Time decode attention over private tokens."""
    cases = [parse_case(spec) for spec in case or (VERIFY_GRID if queries else DEFAULT_GRID)]
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU")
    ceilings = measure_ceilings(rep_ms)
    free_memory()
    table = Table(title=f"decode over private tokens, {torch.cuda.get_device_name()}: {ceilings}")
    for column in ("requests", "tokens", "heads", "queries", "what", *CELLS):
        table.add_column(column, justify="right")

    def add(of: DecodeCase, impl: str, dtype: str, metrics: dict[str, Any] | None) -> None:
        if not metrics:
            return
        if out is not None:
            write_record(out, bench="attention", impl=impl, case=of.fields(dtype), part="all", **metrics)
        tokens = f"{of.tail}-{of.longest}" if of.longest else str(of.tail)
        table.add_row(str(of.batch), tokens, str(of.heads), str(of.s_q), impl, *cells(metrics))

    failed = False
    for of in cases:
        print(of, flush=True)
        for name in STOCK:
            rival = RIVALS[name]
            add(of, name, rival.dtype, attempt(name, measure_rival, rival, of, rep_ms))
            free_memory()
        if of.heads in STACKED_HEADS:
            in_pages = RIVALS["flashmla_bf16"].work(of)
            metrics = attempt("hybrid_mla_bf16", lambda of=of, work=in_pages: measure(grouped_absorb(of), rep_ms, work))
            failed |= metrics is None
            add(of, "hybrid_mla_bf16", "bf16", metrics)
            free_memory()
        cache = FP8Cache(of)
        makers: dict[str, Callable[..., AbsorbFP8]] = {"hybrid_mla": default(cache)}
        if portable:
            makers["hybrid_mla_triton"] = TritonAbsorbFP8
        for impl, make in makers.items():
            metrics = attempt(impl, measure_ours, of, cache, make, rep_ms)
            failed |= metrics is None
            if metrics:
                floor = floor_ms(of, ceilings)
                metrics |= dict(floor_ms=floor, floor_share=floor / metrics["ms"])
            add(of, impl, "fp8", metrics)
        del cache
        free_memory()
        table.add_section()
    Console(width=110).print(table)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
