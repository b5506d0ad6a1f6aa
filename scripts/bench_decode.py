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

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from bench.cases import Case, parse_case
from bench.measured import Asked, measure_cases
from bench.rivals import RIVALS

from sglang_mla_ext.kernels.absorb.stacking import STACKED_HEADS

DEFAULT_GRID = (
    *("128x8192x128", "64x16384x128", "32x8192x64", "128x8192x16", "16x65536x16", "1x8192x128", "128x512x128"),
    *("128x8192x64", "128x8192x32", "128x8192x8", "32x8192x128", "32x8192x16", "1x8192x16", "1x131072x16"),
    *("128x512x64", "128x512x16", "512x512x16", "128x8192x16x2", "32x8192x128x2"),
    *("64x512-65536x16", "64x512-65536x64", "64x512-65536x128"),
)
STOCK = ("flashmla_bf16", "flashmla_fp8", "fa3_bf16")
COLUMNS = {"requests": "{batch}", "tokens": "{tail}-{longest} ?? {tail}", "heads": "{heads}", "queries": "{s_q}"}
COLUMNS |= {"what": "{impl}"}


def asked(case: Case) -> Iterator[Asked]:
    """Yield what is timed in a case."""
    yield from ((name, "all", RIVALS[name].dtype) for name in STOCK)
    if case.heads in STACKED_HEADS:
        yield "hybrid_mla_bf16", "all", "bf16"
    yield "hybrid_mla", "all", "fp8"


def main(
    case: Annotated[
        list[str] | None, typer.Option(help=r"REQUESTSxTOKENS[-MOST]xHEADS\[xQUERIES] (repeatable)")
    ] = None,
    rep_ms: Annotated[int, typer.Option(min=1, help="ms spent on each measurement")] = 100,
    out: Annotated[Path | None, typer.Option(help="append JSON lines to this file")] = None,
) -> None:
    """Time decode attention over private tokens."""
    try:
        cases = [parse_case(spec) for spec in case or DEFAULT_GRID]
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    title = "decode over private tokens"
    measure_cases(cases, asked, title=title, columns=COLUMNS, rep_ms=rep_ms, out=out)


if __name__ == "__main__":
    typer.run(main)
