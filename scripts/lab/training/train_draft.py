"""Train the layer with which the demo model drafts its own next tokens, for speculative decoding (NextN, MTP).

    python scripts/study.py training draft .demo/data configs/demo_model .demo/drafting --minutes 4

The data come from `prepare`, the model from `train`; its weights stay as they are, bit for bit.
At the end OUT holds the checkpoint with the layer, as SGLang loads it for `--speculative-algorithm NEXTN`, the layer
alone (`draft.pt`), and `training_draft.json` with the losses and with the tokens per step that it measured on chats
held out of the training. A layer that was trained elsewhere is put into a checkpoint with `--layer draft.pt`.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from lab.training.acceptance import acceptance
from lab.training.batches import Data
from lab.training.checkpoints import load_network, logits_of, stored, write_draft
from lab.training.draft import config_with_draft, load_draft
from lab.training.draft_trainer import draft_trainer
from lab.training.trainer import Plan, console, data_workers


def main(
    data: Annotated[Path, typer.Argument(exists=True, help="Folder that `prepare` wrote.")],
    model: Annotated[Path, typer.Argument(exists=True, help="Folder of the trained model.")],
    out: Annotated[Path, typer.Argument(help="Folder of the checkpoint with the layer; may be the model's.")],
    minutes: Annotated[float | None, typer.Option(help="Training time; sets the learning rate's schedule.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps instead of minutes.")] = None,
    layer: Annotated[Path | None, typer.Option(exists=True, help="A trained layer to put into the model.")] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of a batch.")] = 32_768,
    context: Annotated[int, typer.Option(min=64, help="Longest document.")] = 8192,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-3,
    seed: int = 0,
    workers: Annotated[int | None, typer.Option(help="Processes that make batches.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the step; pays in long runs.")] = False,
    cases: Annotated[int, typer.Option(min=1, help="Held-out questions that the tokens per step are of.")] = 400,
) -> None:
    """Train the layer, write the checkpoint, count accepted drafts."""
    if [minutes, steps, layer].count(None) != 2:
        raise typer.BadParameter("give one of --minutes, --steps and --layer")
    config = config_with_draft(json.loads((model / "config.json").read_text()))
    if layer is not None:
        size = write_draft(torch.load(layer, weights_only=True), config, model, out)
        console.print(f"{out}: {size / 2**20:.2f} MiB")
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    workers, material = data_workers(workers), Data(data)
    network = load_network(model, device)
    network = network if on_gpu else network.float()
    plan = Plan(tokens, context, rate, seed, minutes, steps)
    trainer = draft_trainer(plan, network, config, material, device, workers, compiled)
    trainer.train()
    trained = stored(trainer.module)
    size = write_draft(trained, config, model, out)
    torch.save(trained, out / "draft.pt")
    report = {"plan": asdict(plan), **trainer.done(size)}
    (out / "training_draft.json").write_text(json.dumps(report) + "\n")
    console.print(f"{out}: {size / 2**20:.2f} MiB after {report['tokens']:,} tokens; counting accepted drafts")
    network, draft = load_network(out, device), load_draft(out, device)
    if not on_gpu:
        network, draft = network.float(), draft.float()
    figures = acceptance(logits_of(network, device), network, draft, material, cases)
    for name, value in figures.items():
        console.print(f"  {name:28} {value:.4f}")
    (out / "training_draft.json").write_text(json.dumps(report | {"acceptance": figures}) + "\n")
