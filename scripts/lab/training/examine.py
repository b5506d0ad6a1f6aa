"""Examine an existing checkpoint of the demo model, as `train` does at its end.

python scripts/study.py training examine configs/demo_model .demo/data --out benchmarks/results/demo_model.jsonl
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from bench.records import write_record

from lab.training.batches import Data
from lab.training.checkpoints import load_network, logits_of
from lab.training.examination import examine, perplexity


def main(
    model: Annotated[Path, typer.Argument(exists=True, help="Folder of the checkpoint.")],
    data: Annotated[Path, typer.Argument(exists=True, help="Folder that `prepare` wrote.")],
    cases: Annotated[int, typer.Option(min=0, help="Cases of each kind; 0 measures perplexity alone.")] = 200,
    out: Annotated[Path | None, typer.Option(help="JSON lines file to append a record to.")] = None,
) -> None:
    """Print the figures; append a record. On a CPU in float32, on a GPU in BF16."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, material = load_network(model, device), Data(data)
    if device.type == "cpu":
        network = network.float()
    logits = logits_of(network, device)
    figures = examine(logits, material, cases) if cases else perplexity(logits, material)
    for name, value in figures.items():
        print(f"{name:28} {value:.4f}")
    if out is not None:
        write_record(out, bench="demo_model", impl="network", case={"cases": cases}, **figures)
