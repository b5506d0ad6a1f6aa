"""Time attention over shared, expanded prefixes on the GPU, and rivals on the same cases.

    python scripts/bench_attention.py --out benchmarks/results/attention.jsonl
    python scripts/bench_attention.py --prefix 7069 --groups 8x16 --groups 200+56x1

Every line of the output is one measurement: the median time of a CUDA graph of one call, L2 flushed before each.
DeepSeek-V3's dimensions. Parts: `naive` is the shared part alone, `all` it, the merge, and FlashMLA over the private
tails, `grouped_absorb` prefixes and tails by grouped absorb; the products with `w_kc` and `w_vc` are left out
everywhere. `floor_ms` is the shared part's, also for `all`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated

import torch
import typer
from bench.cases import Case, parse_groups
from bench.measured import measured
from bench.records import Report
from bench.rivals import RIVALS
from bench.shared import DTYPES, floor_ms
from bench.tables import table
from bench.timing import COLUMNS as TIMES
from bench.timing import attempt, free_memory, measure_ceilings

from sglang_mla_ext.kernels.absorb.stacking import STACKED_HEADS

DEFAULT_GRID = [  # prefix, heads, batches
    (26472, 128, [64, 128, 256, 512]),
    (7069, 128, [128, 512]),
    (4759, 128, [128, 1024]),
    (26472, 64, [128, 512]),
    (26472, 16, [128, 512]),
]
CASE = {name: f"{{{name}}}" for name in ("heads", "prefix", "batch", "spec", "dtype", "impl", "part")}
COLUMNS = CASE | TIMES


def cases_of(
    prefix: list[int] | None, heads: list[int] | None, batch: list[int] | None, groups: list[str] | None, tail: int
) -> list[Case]:
    """The cases that the options ask for: the default grid without any, else their product."""
    if not (prefix or heads or batch or groups):
        return [Case(length, tail, n, (rows,)) for length, n, batches in DEFAULT_GRID for rows in batches]
    batch = batch or ([] if groups else [128, 512])
    batches = [((rows,), 0, None) for rows in batch] + [(*parse_groups(spec), spec) for spec in groups or []]
    return [Case(*case, *of) for *case, of in itertools.product(prefix or [26472], [tail], heads or [128], batches)]


def main(
    prefix: Annotated[list[int] | None, typer.Option(min=1, help="tokens of the shared prefix (repeatable)")] = None,
    heads: Annotated[list[int] | None, typer.Option(min=1, help="local heads (repeatable)")] = None,
    batch: Annotated[list[int] | None, typer.Option(min=1, help="requests that share the prefix (repeatable)")] = None,
    groups: Annotated[list[str] | None, typer.Option(help="several groups: 8x16, 200+56x1 (repeatable)")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="bf16, fp8: our storage (repeatable; both)")] = None,
    tail: Annotated[int, typer.Option(min=1, help="private tokens of each request")] = 512,
    rivals: Annotated[bool, typer.Option(help="time other kernels too")] = True,
    rep_ms: Annotated[int, typer.Option(min=1, help="ms spent on each measurement")] = 100,
    out: Annotated[Path | None, typer.Option(help="append JSON lines to this file")] = None,
) -> None:
    """Time attention over shared prefixes: a default grid of cases, or every combination of the options given."""
    if unknown := set(dtype or []) - set(DTYPES):
        raise typer.BadParameter(f"--dtype must be one of {', '.join(DTYPES)}, not {', '.join(unknown)}")
    try:
        cases = cases_of(prefix, heads, batch, groups, tail)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU")
    ceilings = measure_ceilings(rep_ms)
    free_memory()
    report, failed = Report("attention", out), False
    for case in cases:
        print(case, flush=True)
        asked = [(name, "all", of.dtype) for name, of in RIVALS.items() if rivals and not (of.one_group and case.spec)]
        asked += [
            ("hybrid_mla", part, stored) for stored in dict.fromkeys(dtype or DTYPES) for part in ("naive", "all")
        ]
        if case.heads in STACKED_HEADS and "bf16" in (dtype or DTYPES):
            asked.append(("hybrid_mla", "grouped_absorb", "bf16"))
        for impl, part, stored in asked:
            metrics = attempt(f"{impl} {part} {stored}", measured, impl, part, stored, case, rep_ms)
            if metrics and impl == "hybrid_mla" and part != "grouped_absorb":
                floor = floor_ms(case, stored, ceilings)
                metrics |= dict(floor_ms=floor, floor_share=floor / metrics["ms"])
            failed |= metrics is None and impl == "hybrid_mla"
            report.add(impl, case.fields(stored), metrics, part=part)
            free_memory()
    print(f"attention over shared prefixes, {torch.cuda.get_device_name()}: {ceilings}")
    print(table(COLUMNS, report.rows))
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
