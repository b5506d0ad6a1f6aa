"""Measure experiments of the papers again on this GPU: those that need kernels only, without a server.

Every line of the output is one measurement: the median time of a CUDA graph of one call for one layer, L2 flushed
before each. A measurement that the file has already, from this kind of GPU, is not repeated: a run that was stopped
goes on where it was. What fails is said, is not written, and stops nothing else. The products with `w_kc` and `w_vc`
are left out. update_tables.py fills docs/results.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench.records import RESULTS, device_name, read_records, write_record
from tabulate import tabulate

from lab.papers.experiments import EXPERIMENTS, Cell, Key, key

ALL = "all"
REP_MS = 20  # spent on each measurement
app = typer.Typer(add_completion=False, help=__doc__)


@app.callback()
def group() -> None:
    """Keep `reproduce` a command of its own."""


def keys_by_gpu(out: Path) -> dict[str, set[Key]]:
    """Return what the file has, by GPU; a record that is marked as excluded does not count."""
    found: dict[str, set[Key]] = {}
    for record in read_records(out) if out.exists() else []:
        if not record.get("excluded"):
            found.setdefault(record["gpu"], set()).add(key(record["impl"], record["part"], record["case"]))
    return found


def overview(out: Path) -> str:
    """Return how many measurements each experiment has, and how many of them the file has, by GPU."""
    found = keys_by_gpu(out) or {"measured": set()}
    rows = []
    for name, experiment in EXPERIMENTS.items():
        cells = {cell.key for of_case in experiment.cells(name) for cell in of_case}
        rows.append((name, len(experiment.cases), len(cells), *(len(cells & of_gpu) for of_gpu in found.values())))
    return tabulate(rows, ("experiment", "cases", "measurements", *found))


def measure_missing(
    name: str,
    out: Path,
    done: set[Key],
    measured: Callable[[Cell], dict[str, Any] | None],
    *,
    skip: Iterable[str] = (),
    after_case: Callable[[], None] = lambda: None,
) -> int:
    """Measure what is missing of an experiment and append it to the file.

    Args:
        done: measurements that are not repeated; skip: implementations that are not measured.
        measured: makes one measurement; None where it failed.
    Returns:
        how many failed.
    """
    command = f"python scripts/study.py papers reproduce {name}"
    failed, cases = 0, list(EXPERIMENTS[name].cells(name))
    for index, of_case in enumerate(cases, start=1):
        times = []
        for cell in of_case:
            if cell.key in done or cell.of.impl in skip:
                continue
            of, metrics = cell.of, measured(cell)
            if metrics is None:
                failed += 1
                continue
            case = cell.fields()
            write_record(out, bench="papers", impl=of.impl, part=of.part, case=case, command=command, **metrics)
            times.append(f"{of.label} {metrics['ms'] * 1e3:.0f} us")
        if times:
            after_case()
            print(f"{name} {index}/{len(cases)}: {of_case[0].case}: {', '.join(times)}", flush=True)
    return failed


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(help=f"{', '.join(EXPERIMENTS)} or {ALL}")] = ALL,
    out: Annotated[Path, typer.Option(help="append JSON lines to this file")] = RESULTS / "papers.jsonl",
    skip: Annotated[list[str] | None, typer.Option(help="an implementation to leave out (repeatable)")] = None,
    list_only: Annotated[bool, typer.Option("--list", help="say what there is and what is measured")] = False,
) -> None:
    """Repeat one of the papers' experiments, or all."""
    if name != ALL and name not in EXPERIMENTS:
        raise typer.BadParameter(f"NAME must be one of {', '.join(EXPERIMENTS)} or {ALL}, not {name}")
    if list_only:
        print(overview(out))
        return
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU; --list does not")
    from bench import measured as kernels
    from bench.timing import attempt, free_memory

    def measured(cell: Cell) -> dict[str, Any] | None:
        what = f"{cell.experiment}: {cell.of.label}, {cell.case}"
        metrics: dict[str, Any] | None = attempt(what, kernels.measured, *cell.of[:3], cell.case, REP_MS)
        if metrics is None:
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                print(f"the GPU is lost to this process; run again, with --skip {cell.of.impl}", flush=True)
                raise typer.Exit(1) from error
        return metrics

    done = keys_by_gpu(out).get(device_name(), set())
    failed = 0
    for each in EXPERIMENTS if name == ALL else [name]:
        failed += measure_missing(each, out, done, measured, skip=skip or (), after_case=free_memory)
    if failed:
        print(f"{failed} measurements failed; the next run tries them again")
        raise typer.Exit(1)
