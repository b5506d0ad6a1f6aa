"""Fit the constants of a decode step that are not attention's (`step` in configs/gpus) to records that are there.

    python scripts/calibrate_step.py --out configs/gpus/h200.json
    python scripts/calibrate_step.py --out configs/gpus/h20.json --derive-from h200

It needs no GPU. The records are those of `bench_serving.py --workload mixed --profile`, on models of 128 and of 16
heads, of `calibrate.py --check`, and of `bench_rank.py --workload decode`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from bench.rates_file import write_config
from bench.records import RESULTS
from bench.step_rates import derived, fitted

from sglang_mla_ext.predict.rates import Gpu


def main(
    out: Annotated[Path, typer.Option(exists=True, help="The GPU's file, configs/gpus/NAME.json.")],
    derive_from: Annotated[
        str | None, typer.Option(help="For a GPU that was not measured: the GPU to scale from, by data sheets.")
    ] = None,
) -> None:
    """Write the entry `step` of a GPU's file."""
    gpu = Gpu.from_json(out)
    records = (RESULTS / f"{name}.jsonl" for name in ("profile", "planner", "rank"))
    try:
        step = derived(gpu, Gpu.from_json(derive_from)) if derive_from else fitted(gpu, *records)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    write_config(out, {**json.loads(out.read_text(encoding="utf-8")), "step": step})


if __name__ == "__main__":
    typer.run(main)
