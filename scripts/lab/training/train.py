"""Train the demo model: DeepSeek-V3's architecture with the real dimensions of its attention heads, 12 million weights.

    python scripts/study.py training train .demo/data .demo/model --minutes 15

The data come from `prepare`. OUT then holds the checkpoint as SGLang and transformers load it, and `training.json` with
the loss curve and the figures of the examination.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from demo_model.checkpoint import Settings, model_config

from lab.training.batches import Batches, Data
from lab.training.checkpoints import load_network, logits_of, write_checkpoint
from lab.training.examination import examine
from lab.training.network import Network, attention
from lab.training.trainer import Plan, Trainer, console, data_workers, losses


def main(
    data: Annotated[Path, typer.Argument(help="Folder that `prepare` wrote.")],
    out: Annotated[Path, typer.Argument(help="Folder of the checkpoint.")],
    minutes: Annotated[float | None, typer.Option(help="Training time; sets the learning rate's schedule.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps instead of minutes.")] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens of a batch.")] = 65_536,
    context: Annotated[int, typer.Option(min=64, help="Longest document.")] = 8192,
    rate: Annotated[float, typer.Option(help="Highest learning rate.")] = 2e-3,
    layers: Annotated[int, typer.Option(min=1)] = 5,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    hidden: Annotated[int, typer.Option(min=16)] = 384,
    intermediate: Annotated[int, typer.Option(min=16, help="Width of the dense MLP.")] = 640,
    q_lora_rank: Annotated[int, typer.Option(min=16)] = 128,
    max_positions: Annotated[int, typer.Option(min=4096, help="Longest context of the configuration.")] = 16384,
    seed: int = 0,
    workers: Annotated[int | None, typer.Option(help="Processes that make batches.")] = None,
    compiled: Annotated[bool | None, typer.Option("--compile/--no-compile", help="By default on a GPU.")] = None,
    cases: Annotated[int, typer.Option(min=1, help="Cases of each kind in the examination.")] = 200,
    lengths: Annotated[str, typer.Option(help="Prompt lengths of look-ups in it.")] = "512,2048,8192",
    prose_tokens: Annotated[int | None, typer.Option(help="Tokens of held-out prose in it; all by default.")] = None,
) -> None:
    """Train, write the checkpoint, examine it."""
    if (minutes is None) == (steps is None):
        raise typer.BadParameter("give either --minutes or --steps")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workers, material = data_workers(workers), Data(data)
    vocab = material.tokenizer.get_vocab_size()
    settings = Settings(
        layers=layers,
        heads=heads,
        hidden=hidden,
        intermediate=intermediate,
        q_lora_rank=q_lora_rank,
        vocab=vocab,
        max_positions=max_positions,
        seed=seed,
        config_only=False,
    )
    plan = Plan(tokens, context, rate, seed, minutes, steps)
    network = Network(model_config(settings), attention(device))
    network.init_weights(seed)
    network.to(device)
    on_gpu = device.type == "cuda" if compiled is None else compiled
    trainer = Trainer(plan, network, partial(losses, network), Batches(material, tokens, seed), device, workers, on_gpu)
    trainer.train()
    size = write_checkpoint(network, settings, data / "tokenizer", out)
    report = {"plan": {"model": asdict(settings), **asdict(plan)}, **trainer.done(size)}
    (out / "training.json").write_text(json.dumps(report) + "\n")
    console.print(f"{out}: {size / 2**20:.2f} MiB after {report['tokens']:,} tokens; examining")
    network = load_network(out, device)
    wanted = [int(length) for length in lengths.split(",")]
    figures = examine(logits_of(network, device), material, cases, lengths=wanted, prose_tokens=prose_tokens)
    for name, value in figures.items():
        console.print(f"  {name:28} {value:.4f}")
    (out / "training.json").write_text(json.dumps(report | {"examination": figures}) + "\n")
