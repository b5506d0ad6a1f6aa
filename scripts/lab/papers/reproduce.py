"""Repeat experiments of the papers on this GPU: those that need kernels only, without a server.

    python scripts/study.py papers reproduce --list
    python scripts/study.py papers reproduce typhoonmla-figure-3
    python scripts/study.py papers reproduce all

Every line of the output is one measurement: the median time of a CUDA graph of one call for one layer, L2 flushed
before each. A measurement that the file has already, from this kind of GPU, is not repeated: a run that was stopped
goes on where it was. What fails is said, is not written, and stops nothing else. The products with `w_kc` and `w_vc`
are left out everywhere but in TyphoonMLA's figure 4, where they are bars of their own.
update_tables.py fills docs/results.md.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench.records import RESULTS, device_name, read_records, write_record
from rich.console import Console
from rich.table import Table

from lab.papers.experiments import EXPERIMENTS, Cell, Key, key

ALL = "all"
REP_MS = 20


def keys_by_gpu(out: Path) -> dict[str, set[Key]]:
    """Return what the file has, by GPU; a record that is marked as excluded does not count."""
    found: dict[str, set[Key]] = {}
    for record in read_records(out) if out.exists() else []:
        if not record.get("excluded"):
            found.setdefault(record["gpu"], set()).add(key(record["impl"], record["part"], record["case"]))
    return found


def overview(out: Path) -> Table:
    """Return how many measurements each experiment has, and how many of them the file has, by GPU."""
    found = keys_by_gpu(out)
    table = Table(title=f"measurements in {out}")
    for column in ("experiment", "of", "cases", "measurements", *(found or {"measured": set()})):
        table.add_column(column, justify="right" if table.columns else "left")
    for name, experiment in EXPERIMENTS.items():
        cells = [cell.key for of_case in experiment.cells(name) for cell in of_case]
        measured = [str(sum(cell in of_gpu for cell in cells)) for of_gpu in found.values()] or ["0"]
        table.add_row(name, experiment.title, str(len(experiment.cases)), str(len(cells)), *measured)
    return table


def missing(name: str, done: set[Key], skip: Iterable[str]) -> list[list[Cell]]:
    """The measurements of an experiment that are still to be made, by case; none of an implementation in `skip`."""
    cases = (
        [cell for cell in of_case if cell.key not in done and cell.of.impl not in skip]
        for of_case in EXPERIMENTS[name].cells(name)
    )
    return [of_case for of_case in cases if of_case]


def reproduce(
    name: str,
    out: Path,
    done: set[Key],
    measured: Callable[[Cell], dict[str, Any] | None],
    *,
    rep_ms: int = REP_MS,
    skip: Iterable[str] = (),
    after_case: Callable[[], None] = lambda: None,
) -> int:
    """Measure what is missing of an experiment and append it to the file.

    Args:
        done: measurements that are not repeated.
        measured: makes one measurement; None where it failed.
    Returns:
        how many failed.
    """
    options = ["--rep-ms", str(rep_ms)] if rep_ms != REP_MS else []
    command = shlex.join(["python", "scripts/study.py", "papers", "reproduce", name, *options])
    failed = 0
    cases = missing(name, done, skip)
    for index, of_case in enumerate(cases):
        times = []
        for cell in of_case:
            metrics = measured(cell)
            if metrics is None:
                failed += 1
                continue
            of = cell.of
            write_record(
                out, bench="papers", impl=of.impl, part=of.part, case=cell.fields(), command=command, **metrics
            )
            times.append(f"{of.label} {metrics['ms'] * 1e3:.0f} us")
        after_case()
        print(f"{name} {index + 1}/{len(cases)}: {of_case[0].case}: {', '.join(times)}", flush=True)
    return failed


def main(
    name: Annotated[str, typer.Argument(help=f"{', '.join(EXPERIMENTS)} or {ALL}")] = ALL,
    out: Annotated[Path, typer.Option(help="append JSON lines to this file")] = RESULTS / "papers.jsonl",
    rep_ms: Annotated[int, typer.Option(min=1, help="ms spent on each measurement")] = REP_MS,
    again: Annotated[bool, typer.Option("--again", help="measure also what the file has already")] = False,
    skip: Annotated[list[str] | None, typer.Option(help="an implementation to leave out (repeatable)")] = None,
    list_only: Annotated[bool, typer.Option("--list", help="say what there is and what is measured")] = False,
) -> None:
    """Repeat one of the papers' experiments, or all."""
    if name != ALL and name not in EXPERIMENTS:
        raise typer.BadParameter(f"NAME must be one of {', '.join(EXPERIMENTS)} or {ALL}, not {name}")
    if list_only:
        Console(width=110).print(overview(out))
        return
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU; --list does not")
    from bench.timing import attempt, free_memory

    from lab.papers import runs

    def measured(cell: Cell) -> dict[str, Any] | None:
        what = f"{cell.experiment}: {cell.of.label}, {cell.case}"
        metrics: dict[str, Any] | None = attempt(what, runs.measured, cell, rep_ms)
        if metrics is None:
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                print(f"the GPU is lost to this process; run again, with --skip {cell.of.impl}", flush=True)
                raise typer.Exit(1) from error
        return metrics

    done = set() if again else keys_by_gpu(out).get(device_name(), set())
    names = list(EXPERIMENTS) if name == ALL else [name]
    options: dict[str, Any] = dict(rep_ms=rep_ms, skip=skip or (), after_case=free_memory)
    if failed := sum(reproduce(each, out, done, measured, **options) for each in names):
        print(f"{failed} measurements failed; the next run tries them again")
        raise typer.Exit(1)
