"""Time decode attention over private tokens: our kernels over the FP8 cache beside FlashMLA.

    python scripts/bench_decode.py --out benchmarks/results/decode.jsonl
    python scripts/bench_decode.py --case 128x8192x16 --case 64x512-65536x16 --case 128x8192x16x2 --variants

Every line of the output is one measurement: the median time of a CUDA graph of one call for one layer, L2 flushed
before each. DeepSeek-V3's dimensions, pages in random order. Ours is everything from the absorbed query in BF16:
rounding it, attention, and the merge of pieces; a step's schedule, made once for all layers, is `prepare_ms`. FlashMLA
FP8 gets a query that is e4m3 already. `--variants` times the portable kernel, too, with its three ways to rescale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from bench_attention import (
    CELLS,
    Ceilings,
    attempt,
    captured,
    cells,
    free_memory,
    measure,
    measure_ceilings,
    time_ms,
)
from rich.console import Console
from rich.table import Table
from rival_attention import DR, LATENT, PAGE_TOKENS, RIVALS, SCALE, Case, page_table

from sglang_mla_ext.kernels.absorb.paged_fp8 import AbsorbFP8, TritonAbsorbFP8
from sglang_mla_ext.kernels.dispatch import append_rows, make_absorb_fp8
from sglang_mla_ext.kernels.storage.latent_rows import LatentRowLayout
from sglang_mla_ext.results import write_record

ROWS_AT_ONCE = 1 << 16
LAYOUT = LatentRowLayout()
FLASHMLA = ("flashmla_bf16", "flashmla_fp8")
DEFAULT_GRID = (
    *("128x8192x128", "64x16384x128", "32x8192x64", "128x8192x16", "16x65536x16", "1x8192x128", "128x512x128"),
    *("128x8192x64", "128x8192x32", "128x8192x8", "32x8192x128", "32x8192x16", "1x8192x16", "1x131072x16"),
    *("128x512x64", "128x512x16", "512x512x16", "128x8192x16x2", "32x8192x128x2"),
    *("64x512-65536x16", "64x512-65536x64", "64x512-65536x128"),
)
VARIANTS: dict[str, Callable[..., AbsorbFP8]] = {
    "triton": TritonAbsorbFP8,
    "triton_lattice": lambda **sizes: TritonAbsorbFP8(rescale="lattice", **sizes),
    "triton_add": lambda **sizes: TritonAbsorbFP8(rescale="add", **sizes),
}


@dataclass(frozen=True)
class DecodeCase(Case):
    """Rows that share nothing."""

    longest: int = 0  # tokens of the longest row, if they are not all as many as `tail`

    @property
    def lengths(self) -> list[int]:
        """`[batch]`: tokens of each row, if they differ evenly spaced in their logarithm, in a mixed order."""
        if not self.longest:
            return super().lengths
        tokens = np.geomspace(self.tail, self.longest, self.batch).round().astype(int)
        return np.random.default_rng(0).permutation(tokens).tolist()

    def fields(self, dtype: str) -> dict[str, Any]:
        return super().fields(dtype) | ({"longest": self.longest} if self.longest else {})


def parse_case(spec: str) -> DecodeCase:
    """Read `requests x tokens x heads`, or `x query tokens` behind that; tokens may be `shortest - longest`.

    Raises:
        typer.BadParameter: it is something else.
    """
    try:
        requests, tokens, heads, *rest = spec.split("x")
        lengths, s_q = [int(length) for length in tokens.split("-")], *map(int, rest or ["1"])
        case = DecodeCase(0, lengths[0], int(heads), (), int(requests), s_q=s_q, longest=(*lengths, 0)[1])
        if min(case.batch, case.heads, s_q, *lengths) <= 0 or len(lengths) > 2 or lengths != sorted(lengths):
            raise ValueError
    except ValueError as error:
        raise typer.BadParameter(f"a case is REQUESTSxTOKENS[-MOST]xHEADS[xQUERIES], not {spec!r}") from error
    return case


def floor_ms(case: Case, ceilings: Ceilings) -> float:
    """The shortest possible time, ms: reading the rows, or the products: those with content and values in FP8."""
    tokens = sum(case.lengths)
    memory = tokens * LAYOUT.row_bytes / ceilings.copy_gbps / 1e6
    per_tflops = 2 * case.s_q * tokens * case.heads / 1e9
    return max(memory, per_tflops * (2 * LATENT / ceilings.fp8_tflops + DR / ceilings.bf16_tflops))


class FP8Cache:
    """Random rows of a case in a pool, in pages in random order."""

    def __init__(self, case: Case) -> None:
        pages, n_pages = page_table(case.lengths, (), 0)
        order = 1 + torch.randperm(n_pages, device="cuda", dtype=torch.int32)
        self.pool = torch.zeros((n_pages + 1) * PAGE_TOKENS, LAYOUT.row_bytes, dtype=torch.uint8, device="cuda")
        for first in range(0, len(self.pool), ROWS_AT_ONCE):
            slots = torch.arange(first, min(first + ROWS_AT_ONCE, len(self.pool)), device="cuda")
            latent, rope = (torch.randn(len(slots), dim, device="cuda", dtype=torch.bfloat16) for dim in (LATENT, DR))
            append_rows(latent, rope, slots, self.pool)
        self.table = order[torch.tensor(pages, device="cuda")]
        self.lens = torch.tensor(case.lengths, dtype=torch.int32, device="cuda")


def ours(case: Case, cache: FP8Cache, make: Callable[..., AbsorbFP8]) -> tuple[Callable[[], None], Callable[[], None]]:
    """A layer's attention, and a step's schedule."""
    absorb = make(max_requests=case.batch, heads=case.heads, queries=case.s_q, device="cuda")
    rows = case.batch * case.s_q
    query = torch.randn(rows, case.heads, LATENT + DR, device="cuda", dtype=torch.bfloat16)
    q_absorbed, q_rope = query.split([LATENT, DR], dim=-1)
    out, lse = absorb.output(rows, torch.bfloat16), torch.empty(rows, case.heads, device="cuda")

    def prepare() -> None:
        absorb.begin_step(cache.lens, cache.table)

    prepare()
    return lambda: absorb.run(q_absorbed, q_rope, cache.pool, cache.table, cache.lens, SCALE, out, lse), prepare


def default(cache: FP8Cache) -> Callable[..., AbsorbFP8]:
    """What a server takes."""

    def make(device: str, **sizes: Any) -> AbsorbFP8:
        return make_absorb_fp8(cache.pool, dtype=torch.bfloat16, on_failure=lambda *told: print(*told), **sizes)

    return make


def main(
    case: Annotated[list[str] | None, typer.Option(help="REQUESTSxTOKENS[-MOST]xHEADS[xQUERIES] (repeatable)")] = None,
    variants: Annotated[bool, typer.Option(help="time other ways of our own, too")] = False,
    rep_ms: Annotated[int, typer.Option(min=1, help="ms spent on each measurement")] = 100,
    out: Annotated[Path | None, typer.Option(help="append JSON lines to this file")] = None,
) -> None:
    """Time decode attention over private tokens."""
    cases = [parse_case(spec) for spec in case or DEFAULT_GRID]
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
        for name in FLASHMLA:
            rival = RIVALS[name]
            metrics = attempt(name, lambda rival=rival, of=of: measure(rival.make(of), rep_ms, rival.work(of)))
            add(of, name, rival.dtype, metrics)
            free_memory()
        cache = FP8Cache(of)
        work = of.latent_flops(of.lengths), sum(of.lengths) * LAYOUT.row_bytes

        def measured(make: Callable[..., AbsorbFP8], of: Case = of, cache: FP8Cache = cache, work: Any = work) -> Any:
            run, prepare = ours(of, cache, make)
            metrics = measure(run, rep_ms, work) | dict(prepare_ms=time_ms(captured(prepare), rep_ms))
            floor = floor_ms(of, ceilings)
            return metrics | dict(floor_ms=floor, floor_share=floor / metrics["ms"])

        makers = {"hybrid_mla": default(cache)}
        if variants:
            makers |= {f"hybrid_mla_{name}": make for name, make in VARIANTS.items()}
        for impl, make in makers.items():
            metrics = attempt(impl, measured, make)
            failed |= metrics is None
            add(of, impl, "fp8", metrics)
        del cache
        free_memory()
        table.add_section()
    Console(width=110).print(table)
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
