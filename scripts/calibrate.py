"""Measure the rates of a GPU for the cost model (configs/gpus), and check what the cost model chooses with them.

    python scripts/calibrate.py --out configs/gpus/h200.json --check --out-records benchmarks/results/planner.jsonl
    python scripts/calibrate.py --out configs/gpus/h200.json --refit benchmarks/results/planner.jsonl    # without a GPU
    python scripts/calibrate.py --out configs/gpus/h100.json --exchange benchmarks/results/exchange.jsonl    # likewise

A rate is the median over the few cases that it bounds; each case is the median time of a CUDA graph of one call, with
L2 flushed before each. The naive kernel's tiles are chosen by timing candidates back to back, because at the GPU's
power limit another tile may be the fastest than in a short run. `--check` times every mode on a grid of cases
(bench/planner_grid.py) and every plan on trees of nested and mixed prompts (bench/step_plans.py; their records go to
`plans.jsonl` beside those of the grid), and compares what is chosen with the fastest. With `--out`, the modes'
overheads and what a segment costs are then replaced by those with which the choices lose least;
`--refit` does only that, from records, and `--exchange` the cost of exchanges between ranks, from those of
`bench_exchange.py`. DeepSeek-V3's dimensions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench.calibration import calibrate
from bench.plan_trees import plans_table
from bench.planner_grid import check
from bench.planner_verdicts import newest, report, verdicts
from bench.rates_file import is_of, refit, starting_config, write_exchange
from bench.records import read_records
from bench.step_plans import check_plans

from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates, rates_for
from sglang_mla_ext.segment import Mode

PLANS = "plans.jsonl"
"""File of the records of trees, beside those of the grid."""


def of_this_gpu(path: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Records of the GPU that these rates are of."""
    return [record for record in read_records(path) if is_of(record["gpu"], config)]


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
    """Measure this GPU's rates (--out), or check the choices made with them (--check), or both.

    The check takes the rates just written, else those shipped for this GPU. With both, and with --refit, the overheads
    are those with which the choices lose least.
    """
    if exchange_from:
        if not out or not out.exists() or check_choices or refit_from:
            raise typer.BadParameter("--exchange is for --out with a file that exists, alone")
        try:
            write_exchange(out, read_records(exchange_from))
        except ValueError as error:
            raise typer.BadParameter(f"{exchange_from}: {error}") from error
        return
    if refit_from:
        if not out or not out.exists() or check_choices:
            raise typer.BadParameter("--refit is for --out with a file that exists, without --check")
        config = json.loads(out.read_text(encoding="utf-8"))
        try:
            of_trees = refit_from.with_name(PLANS)
            plans = of_this_gpu(of_trees, config) if of_trees.exists() else []
            refit(out, of_this_gpu(refit_from, config), newest(plans))
        except ValueError as error:
            raise typer.BadParameter(f"{refit_from}: {error} on {config['name']}") from error
        return
    if not out and not check_choices:
        raise typer.BadParameter("give --out, --check or both")
    if out_records and not check_choices:
        raise typer.BadParameter("--out-records is for --check")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise typer.BadParameter("needs a Hopper GPU")
    device, complete = torch.cuda.get_device_name(), True
    if out:
        try:
            start = starting_config(out, device)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from error
        complete = calibrate(out, *start, rep_ms)
    if check_choices:
        rates = GpuRates.from_json(out) if out else rates_for(device)
        records, all_measured = check(rates, rep_ms, out_records)
        plans, all_plans = check_plans(rates, rep_ms, out_records and out_records.with_name(PLANS))
        complete &= all_measured and all_plans
        if out and any(Mode.ABSORB.value in record["ms"] and len(record["ms"]) > 1 for record in records):
            refit(out, records, plans)
        else:
            print(report(verdicts(records, rates)))
            print(plans_table(plans, rates))
    if not complete:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
