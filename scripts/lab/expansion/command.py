"""Time the expansion of latent rows into keys and values: the fused kernel beside gather, product and copy in torch.

    python scripts/study.py expansion --out benchmarks/results/expansion.jsonl

One layer, DeepSeek-V3's dimensions, latent rows in scattered pages. Every time is the median of a CUDA graph of one
call, L2 flushed before each. The rate to compare with is that of a BF16 product of the same shape in the same run,
which reads contiguous rows and writes BF16.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench.cases import DN, DR, DV, LATENT
from bench.records import write_record
from bench.shared import DTYPES
from bench.timing import attempt, free_memory, measure
from tabulate import tabulate

from lab.expansion.implementations import IMPLEMENTATIONS, allocate, flops, rates, scattered_slots

app = typer.Typer(add_completion=False)


@app.command()
def main(
    tokens: Annotated[list[int] | None, typer.Option(min=1, help="tokens expanded by one call (repeatable)")] = None,
    heads: Annotated[list[int] | None, typer.Option(min=1, help="local heads (repeatable)")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp8: the storage (repeatable; both)")] = None,
    rep_ms: Annotated[int, typer.Option(min=1, help="ms spent on each measurement")] = 100,
    out: Annotated[Path | None, typer.Option(help="append JSON lines to this file")] = None,
) -> None:
    """Time the expansion of a prefix in one layer, fused and in torch."""
    if unknown := set(dtype or []) - set(DTYPES):
        raise typer.BadParameter(f"--dtype must be one of {', '.join(DTYPES)}, not {', '.join(unknown)}")
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU")
    rows: list[tuple[Any, ...]] = []
    failed = False
    for n_heads, n in itertools.product(heads or [128, 16], tokens or [1024, 4096, 8192, 26472]):
        weight = torch.randn(n_heads, DN + DV, LATENT, device="cuda", dtype=torch.bfloat16) / LATENT**0.5  # [H, d, r]
        slots = scattered_slots(n, "cuda")
        latent_rows = torch.randn(int(slots.max()) + 1, LATENT + DR, device="cuda", dtype=torch.bfloat16)
        a, b = latent_rows[:n, :LATENT].contiguous(), weight.flatten(0, 1).t()  # [n, r], [r, H * d]
        gemm = measure(partial(torch.mm, a, b), rep_ms, (flops(n, n_heads), 0))["tflops"]
        for stored in dict.fromkeys(dtype or DTYPES):
            buffers = allocate(n, weight, DTYPES[stored])
            for impl, make in IMPLEMENTATIONS.items():
                function = make(latent_rows, slots, weight, buffers)
                metrics = attempt(f"{impl} {stored}, {n_heads} heads, {n} tokens", measure, function, rep_ms, None)
                failed |= metrics is None
                if metrics:
                    metrics |= rates(metrics["ms"], n, n_heads, gemm)
                    if out:
                        case = dict(tokens=n, heads=n_heads, dtype=stored)
                        write_record(out, bench="expansion", impl=impl, case=case, **metrics)
                    figures = (f"{metrics['ms'] * 1e3:.1f}", f"{metrics['tflops']:.0f}", f"{metrics['gemm_share']:.0%}")
                    rows.append((n_heads, n, stored, impl, *figures))
            del buffers, function
            free_memory()
    print(tabulate(rows, ("heads", "tokens", "dtype", "what", "us", "TFLOPS", "of GEMM")))
    if failed:
        raise typer.Exit(1)
