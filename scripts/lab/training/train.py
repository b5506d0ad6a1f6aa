"""Train the demo model: DeepSeek-V3's architecture with the real dimensions of its attention heads, 12 million weights.

    python scripts/study.py training train .demo/data .demo/model --minutes 15

The data come from `prepare`. The same command resumes a stopped run; `--stop-after` stops one.
At the end OUT holds the checkpoint as SGLang and transformers load it, `training.json` with the loss curve and the
figures of the examination, and `training.png` where matplotlib is installed.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from demo_model.checkpoint import Settings

from lab.training.batches import Data
from lab.training.checkpoints import draw_curve, load_network, logits_of, thinned, write_checkpoint
from lab.training.examination import examine
from lab.training.trainer import Plan, Trainer, console


def main(
    data: Annotated[Path, typer.Argument(help="Folder that `prepare` wrote.")],
    out: Annotated[Path, typer.Argument(help="Folder of the checkpoint and of the training's state.")],
    minutes: Annotated[float | None, typer.Option(help="Training time; sets the learning rate's schedule.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps instead of minutes.")] = None,
    stop_after: Annotated[float | None, typer.Option(help="Stop after so many minutes; a second call goes on.")] = None,
    save_every: Annotated[float, typer.Option(help="Minutes between saved states.")] = 3.0,
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
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_float32_matmul_precision("high")
    material = Data(data)
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
    plan = Plan(settings, tokens, context, rate, seed, minutes, steps)
    if workers is None:
        workers = min(14, max(0, (os.cpu_count() or 1) - 2))
    on_gpu = device.type == "cuda"
    trainer = Trainer(plan, material, device, workers, on_gpu if compiled is None else compiled)
    weights = sum(weight.numel() for weight in trainer.network.parameters())
    console.print(f"{weights:,} weights on {device}, {workers} processes for data")
    trainer.resume(out)
    if not trainer.train(out, stop_after, save_every):
        console.print(f"stopped at step {trainer.run.step}, {trainer.run.seconds / 60:.1f} minutes; call again")
        return
    size = write_checkpoint(trainer.network, settings, data / "tokenizer", out)
    done = {"steps": trainer.run.step, "tokens": trainer.run.step * tokens, "seconds": round(trainer.run.seconds)}
    console.print(f"{out}: {size / 2**20:.2f} MiB after {done['tokens']:,} tokens; examining")
    draw_curve(trainer.run.curve, out / "training.png")
    report = {"plan": asdict(plan), **done, "weights": weights, "bytes": size, "curve": thinned(trainer.run.curve)}
    (out / "training.json").write_text(json.dumps(report) + "\n")
    network = load_network(out, device)
    wanted = [int(length) for length in lengths.split(",")]
    figures = examine(logits_of(network, device), material, cases, lengths=wanted, prose_tokens=prose_tokens)
    for name, value in figures.items():
        console.print(f"  {name:28} {value:.4f}")
    (out / "training.json").write_text(json.dumps(report | {"examination": figures}) + "\n")
