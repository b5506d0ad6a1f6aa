"""Commands of the demo model: make its training data, train it and the layer that drafts, examine a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench.records import write_record
from demo_model.checkpoint import Settings, model_config

from lab.training import sources
from lab.training.batches import Batches, Data
from lab.training.checkpoints import load_network, logits_of, stored, write_checkpoint, write_draft
from lab.training.draft import config_with_draft
from lab.training.draft_trainer import draft_trainer
from lab.training.examination import examine, perplexity
from lab.training.network import Network, attention
from lab.training.preparation import documents, write
from lab.training.trainer import Plan, Trainer, console, data_workers, losses

app = typer.Typer(add_completion=False, help=__doc__)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = dict(layers=5, heads=4, hidden=384, intermediate=640, q_lora_rank=128, max_positions=16384)
"""Sizes of the model, of `demo_model.checkpoint.Settings`."""

DataFolder = Annotated[Path, typer.Argument(exists=True, help="Folder that `prepare` wrote.")]
ModelFolder = Annotated[Path, typer.Argument(exists=True, help="Folder of the checkpoint.")]
Minutes = Annotated[float | None, typer.Option(help="Training time; sets the learning rate's schedule.")]
Steps = Annotated[int | None, typer.Option(help="Steps instead of minutes.")]
Tokens = Annotated[int, typer.Option(min=64, help="Tokens of a batch.")]
Context = Annotated[int, typer.Option(min=64, help="Longest document.")]
Rate = Annotated[float, typer.Option(help="Highest learning rate.")]
Workers = Annotated[int | None, typer.Option(help="Processes that make batches.")]


@app.command("prepare")
def prepare_data(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    packages: Annotated[Path, typer.Option(help="Folder of the unpacked packages.")] = Path(".demo/packages"),
    vocab: Annotated[int, typer.Option(min=512, max=65536, help="Tokens in the vocabulary.")] = 4096,
    words: Annotated[int, typer.Option(min=100, help="Words of the dictionary.")] = 10_000,
) -> None:
    """Make the training data from Debian packages of fixed versions: tokenizer, prose, words, names, values.

    Packages that are not in the folder are fetched with apt-get. Chats are not stored: chats.py draws them from what is
    written here. See configs/demo_model/README.md for the licences.
    """
    sources.fetch(packages)
    statistics = write(out, list(documents(packages)), sources.words(packages, words), vocab)
    print(json.dumps(statistics, indent=1))


@app.command("train")
def train(
    data: DataFolder,
    out: Annotated[Path, typer.Argument(help="Folder of the checkpoint.")],
    minutes: Minutes = None,
    steps: Steps = None,
    tokens: Tokens = 65_536,
    context: Context = 8192,
    rate: Rate = 2e-3,
    seed: int = 0,
    workers: Workers = None,
    cases: Annotated[int, typer.Option(min=1, help="Cases of each kind in the examination.")] = 200,
) -> None:
    """Train the model: DeepSeek-V3's architecture with the real dimensions of its attention heads, 12 million weights.

    OUT then holds the checkpoint as SGLang and transformers load it, and `training.json` with the loss curve and the
    figures of the examination.
    """
    plan, material = plan_of(tokens, context, rate, seed, minutes, steps), Data(data)
    settings = Settings(**SIZES, vocab=material.tokenizer.get_vocab_size(), seed=seed, config_only=False)
    network = Network(model_config(settings), attention(DEVICE))
    network.init_weights(seed)
    network.to(DEVICE)
    batches, workers = Batches(material, tokens, seed), data_workers(workers)
    compiled = DEVICE.type == "cuda"
    trainer = Trainer(plan, network, lambda batch: losses(network, batch), batches, DEVICE, workers, compiled)
    trainer.train()
    size = write_checkpoint(network, settings, data / "tokenizer", out)
    report = {"plan": {"model": asdict(settings), **asdict(plan)}, **trainer.done(size)}
    write_report(out / "training.json", report)  # before the examination, which takes its time
    figures = examine(logits_of(load_network(out, DEVICE), DEVICE), material, cases)
    show(figures)
    write_report(out / "training.json", report | {"examination": figures})


@app.command("draft")
def draft(
    data: DataFolder,
    model: ModelFolder,
    out: Annotated[Path, typer.Argument(help="Folder of the checkpoint with the layer; may be the model's.")],
    minutes: Minutes = None,
    steps: Steps = None,
    tokens: Tokens = 32_768,
    context: Context = 8192,
    rate: Rate = 2e-3,
    seed: int = 0,
    workers: Workers = None,
) -> None:
    """Train the layer with which the model drafts its own next tokens, for speculative decoding (NextN, MTP).

    The model's weights stay as they are, bit for bit. OUT then holds the checkpoint with the layer, as SGLang loads it
    for `--speculative-algorithm NEXTN`, and `training_draft.json` with the losses.
    """
    plan, material = plan_of(tokens, context, rate, seed, minutes, steps), Data(data)
    config = config_with_draft(json.loads((model / "config.json").read_text()))
    network = load_network(model, DEVICE)
    network = network if DEVICE.type == "cuda" else network.float()
    trainer = draft_trainer(plan, network, config, material, DEVICE, data_workers(workers))
    trainer.train()
    size = write_draft(stored(trainer.module), config, model, out)
    write_report(out / "training_draft.json", {"plan": asdict(plan), **trainer.done(size)})


@app.command("examine")
def examine_model(
    model: ModelFolder,
    data: DataFolder,
    cases: Annotated[int, typer.Option(min=0, help="Cases of each kind; 0 measures perplexity alone.")] = 200,
    out: Annotated[Path | None, typer.Option(help="JSON lines file to append a record to.")] = None,
) -> None:
    """Examine a checkpoint, as `train` does at its end; on a CPU in float32, on a GPU in BF16."""
    network, material = load_network(model, DEVICE), Data(data)
    if DEVICE.type == "cpu":
        network = network.float()
    logits = logits_of(network, DEVICE)
    figures = examine(logits, material, cases) if cases else perplexity(logits, material)
    show(figures)
    if out is not None:
        write_record(out, bench="demo_model", impl="network", case={"cases": cases}, **figures)


def plan_of(tokens: int, context: int, rate: float, seed: int, minutes: float | None, steps: int | None) -> Plan:
    """Make the settings of a run; raises typer.BadParameter where its end is not given, or given twice."""
    if (minutes is None) == (steps is None):
        raise typer.BadParameter("give either --minutes or --steps")
    return Plan(tokens, context, rate, seed, minutes, steps)


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write what is reported of a run."""
    path.write_text(json.dumps(report) + "\n")
    console.print(f"{path.parent}: {report['bytes'] / 2**20:.2f} MiB after {report['tokens']:,} tokens")


def show(figures: Mapping[str, float]) -> None:
    """Print the figures of an examination."""
    for name, value in figures.items():
        console.print(f"{name:28} {value:.4f}")
