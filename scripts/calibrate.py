"""Measure the rates of a GPU for the cost model (configs/gpus), and check what the cost model chooses with them.

    python scripts/calibrate.py --out configs/gpus/h200.json --check --out-records benchmarks/results/planner.jsonl
    python scripts/calibrate.py --out configs/gpus/h200.json --refit benchmarks/results/planner.jsonl    # without a GPU
    python scripts/calibrate.py --out configs/gpus/h100.json --exchange benchmarks/results/exchange.jsonl    # likewise

A rate is the median over the few cases that it bounds; each case is the median time of a CUDA graph of one call, with
L2 flushed before each. The naive kernel's tiles are chosen by timing candidates back to back, because at the GPU's
power limit another tile may be the fastest than in a short run. The check (bench/planner_checks.py) times every mode on
a grid of cases and every plan on trees of nested and mixed prompts, whose records go to `plans.jsonl` beside those of
the grid, and compares what is chosen with the fastest. With `--out`, which always
checks, the modes' overheads and what a segment costs become those with which the choices lose least; `--refit` does
only that, from records, and `--exchange` the cost of exchanges between ranks, from those of `bench_exchange.py`.
DeepSeek-V3's dimensions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from bench.calibration import calibrate
from bench.planner_checks import check, check_plans
from bench.planner_verdicts import newest, plans_table, report, verdicts
from bench.rates_file import is_of, refit, starting_config, write_exchange
from bench.records import read_records

from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates, rates_for
from sglang_mla_ext.segment import Mode

PLANS = "plans.jsonl"
"""File of the records of trees, beside those of the grid."""


def main(
    out: Annotated[Path | None, typer.Option(help="Measure, and write the rates to this file; it may exist.")] = None,
    check_choices: Annotated[bool, typer.Option("--check", help="Time what the cost model chooses from.")] = False,
    out_records: Annotated[Path | None, typer.Option(help="Append the check's JSON lines to this file.")] = None,
    refit_from: Annotated[
        Path | None, typer.Option("--refit", help="Only fit the overheads in --out to a check's records.", exists=True)
    ] = None,
    exchange_from: Annotated[
        Path | None,
        typer.Option("--exchange", help="Only fit the exchanges in --out to records.", exists=True),
    ] = None,
    rep_ms: Annotated[int, typer.Option(min=1, help="ms spent on each measurement, but for those of tiles.")] = 20,
) -> None:
    """Measure this GPU's rates, and check the choices made with them (--out); or check the shipped ones (--check)."""
    if source := refit_from or exchange_from:
        if not out or not out.exists() or check_choices or (refit_from and exchange_from):
            raise typer.BadParameter("--refit and --exchange are for --out with a file that exists, each alone")
        try:
            fit_to_records(out, source, exchange=source is exchange_from)
        except ValueError as error:
            raise typer.BadParameter(f"{source}: {error}") from error
        return
    if not out and not check_choices:
        raise typer.BadParameter("give --out or --check")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise typer.BadParameter("needs a Hopper GPU")
    device, complete = torch.cuda.get_device_name(), True
    if out:
        try:
            start = starting_config(out, device)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        complete = calibrate(out, *start, rep_ms)
    rates = GpuRates.from_json(out) if out else rates_for(device)
    records, all_measured = check(rates, rep_ms, out_records)
    plans, all_plans = check_plans(rates, rep_ms, out_records and out_records.with_name(PLANS))
    if out and any(Mode.ABSORB.value in record["ms"] and len(record["ms"]) > 1 for record in records):
        refit(out, records, plans)
    else:
        print(report(verdicts(records, rates)))
        print(plans_table(plans, rates))
    if not (complete and all_measured and all_plans):
        raise typer.Exit(1)


def fit_to_records(out: Path, source: Path, *, exchange: bool) -> None:
    """Fit the exchanges in a file of rates to records, or else the overheads to those of its GPU."""
    config = json.loads(out.read_text(encoding="utf-8"))
    if exchange:
        write_exchange(out, read_records(source))
        return
    of_trees = source.with_name(PLANS)
    records, plans = (
        [record for record in read_records(path) if is_of(record["gpu"], config)] if path.exists() else []
        for path in (source, of_trees)
    )
    refit(out, records, newest(plans))


if __name__ == "__main__":
    typer.run(main)
