"""Time attention over shared, expanded prefixes on the GPU, and rivals on the same cases.

    python scripts/bench_attention.py --out benchmarks/results/attention.jsonl
    python scripts/bench_attention.py --prefix 7069 --groups 8x16 --groups 200+56x1

Every line of the output is one measurement: the median time of a CUDA graph of one call, L2 flushed before each.
DeepSeek-V3's dimensions. Parts: `naive` is the shared part alone, `merge` the merge alone, `all` both and FlashMLA over
the private tails, `all_two_streams` the same with the shared part and FlashMLA side by side, `grouped_absorb` prefixes
and tails by grouped absorb; the products with `w_kc` and `w_vc` are left out everywhere.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench.cases import DR, LATENT, PAGE_TOKENS, Case, page_table, parse_groups
from bench.ceilings import Ceilings, measure_ceilings
from bench.grouped import grouped_absorb
from bench.records import Report
from bench.rivals import RIVALS
from bench.shared import DTYPES, floor_ms, our_parts, our_work
from bench.tables import table
from bench.timing import COLUMNS as TIMES
from bench.timing import attempt, free_memory, measure, measure_rival

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


def measure_ours(case: Case, dtype: str, ceilings: Ceilings, rep_ms: int) -> list[tuple[str, dict[str, Any] | None]]:
    """Each part and its metrics, None where it failed. `floor_ms` is the shared part's, also for `all`."""
    name = f"hybrid_mla {dtype}"
    work = our_work(case, dtype)
    parts = attempt(name, our_parts, case, dtype) or {}
    if dtype == "bf16" and case.heads in STACKED_HEADS:
        if function := attempt(f"{name} grouped_absorb", grouped_absorb, case):
            parts["grouped_absorb"] = function
        lengths = [case.prefix + case.tail] * case.batch
        pages = page_table(lengths, case.sizes, case.prefix // PAGE_TOKENS)[1]
        work["grouped_absorb"] = case.latent_flops(lengths), pages * PAGE_TOKENS * (LATENT + DR) * 2
    measured = []
    for part, of_part in work.items():
        metrics = None
        if part in parts:
            metrics = attempt(f"{name} {part}", measure, parts[part], rep_ms, of_part)
        if metrics and of_part and part != "grouped_absorb":
            floor = floor_ms(case, dtype, ceilings)
            metrics |= dict(floor_ms=floor, floor_share=floor / metrics["ms"])
        measured.append((part, metrics))
    return measured


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
    report = Report("attention", out)
    failed = False
    for case in cases:
        print(case, flush=True)
        for name, rival in RIVALS.items() if rivals else ():
            if not (rival.one_group and case.spec):
                metrics = attempt(name, measure_rival, rival, case, rep_ms)
                report.add(name, case.fields(rival.dtype), metrics, part=rival.part)
                free_memory()
        for stored in dict.fromkeys(dtype or DTYPES):
            for part, metrics in measure_ours(case, stored, ceilings, rep_ms):
                report.add("hybrid_mla", case.fields(stored), metrics, part=part)
                failed |= metrics is None
            free_memory()
    print(f"attention over shared prefixes, {torch.cuda.get_device_name()}: {ceilings}")
    print(table(COLUMNS, report.rows))
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
