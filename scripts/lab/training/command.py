"""Commands of the demo model: make its training data, train it and the layer that drafts, examine a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench.records import write_record
from demo_model.checkpoint import Settings, model_config
from rich import print
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab.training import sources
from lab.training.batches import DRAFT_SHARES, Batches, Data
from lab.training.draft import Draft, config_with_draft, draft_losses
from lab.training.examination import examine
from lab.training.network import PACKED, draft_prefix, init_weights, load_network, make_network, model_losses
from lab.training.preparation import documents, write
from lab.training.trainer import DEVICE, Plan, fit

app = typer.Typer(add_completion=False, help=__doc__)
SIZES = dict(layers=5, heads=4, hidden=384, intermediate=640, q_lora_rank=128, max_positions=16384)
"""Sizes of the model, of `demo_model.checkpoint.Settings`."""

DataFolder = Annotated[Path, typer.Argument(exists=True, help="Folder that `prepare` wrote.")]
ModelFolder = Annotated[Path, typer.Argument(exists=True, help="Folder of the checkpoint.")]
Steps = Annotated[int, typer.Option(min=1, help="Steps; they set the learning rate's schedule.")]
Tokens = Annotated[int, typer.Option(min=64, help="Tokens of a batch.")]
Context = Annotated[int, typer.Option(min=64, help="Longest document.")]
Rate = Annotated[float, typer.Option(help="Highest learning rate.")]
Workers = Annotated[int, typer.Option(min=0, help="Processes that make batches.")]
WORKERS = min(14, max(0, (os.cpu_count() or 1) - 2))


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
    print(write(out, list(documents(packages)), sources.words(packages, words), vocab))


@app.command("train")
def train(
    data: DataFolder,
    out: Annotated[Path, typer.Argument(help="Folder of the checkpoint.")],
    steps: Steps = 24_000,
    tokens: Tokens = 65_536,
    context: Context = 8192,
    rate: Rate = 2e-3,
    seed: int = 0,
    workers: Workers = WORKERS,
    cases: Annotated[int, typer.Option(min=0, help="Cases of each kind in the examination.")] = 200,
) -> None:
    """Train the model: DeepSeek-V3's architecture with the real dimensions of its attention heads, 12 million weights.

    OUT then holds the checkpoint as SGLang and transformers load it, and `training.json` with the loss curve and the
    figures of the examination.
    """
    plan, material = Plan(tokens, context, rate, seed, steps, workers), Data(data)
    settings = Settings(**SIZES, vocab=material.tokenizer.get_vocab_size(), seed=seed, config_only=False)
    network = make_network(config := model_config(settings), PACKED)
    init_weights(network, seed, settings.layers)
    batches = Batches(material, tokens, context, steps, seed)
    report = fit(plan, network.to(DEVICE), lambda batch: model_losses(network, batch), batches, compiled=True)
    tensors = {name: weight.to(torch.bfloat16).cpu() for name, weight in network.state_dict().items()}
    report |= {"plan": {"model": asdict(settings), **asdict(plan)}, "bytes": save(out, tensors, config)}
    shutil.copytree(data / "tokenizer", out, dirs_exist_ok=True)
    write_report(out / "training.json", report)  # before the examination, which takes its time
    figures = examine(load_network(out).to(DEVICE), material, cases)
    print(figures)
    write_report(out / "training.json", report | {"examination": figures})


@app.command("draft")
def draft(
    data: DataFolder,
    model: ModelFolder,
    steps: Steps = 2_480,
    tokens: Tokens = 32_768,
    context: Context = 8192,
    rate: Rate = 2e-3,
    seed: int = 0,
    workers: Workers = WORKERS,
) -> None:
    """Train the layer with which the model drafts its own next tokens, for speculative decoding (NextN, MTP).

    The model's weights stay as they are, bit for bit. MODEL then holds the checkpoint with the layer, as SGLang loads
    it for `--speculative-algorithm NEXTN`, and `training_draft.json` with the losses.
    """
    plan, config = Plan(tokens, context, rate, seed, steps, workers), json.loads((model / "config.json").read_text())
    network, layer = load_network(model, PACKED).requires_grad_(False), Draft(config := config_with_draft(config))
    layer.init_weights(seed, network.model.norm.weight)
    network.to(DEVICE)
    batches = Batches(Data(data), tokens, context, steps, seed, DRAFT_SHARES)
    report = fit(plan, layer.to(DEVICE), lambda batch: draft_losses(network, layer, batch), batches, layer.balance)
    prefix = draft_prefix(config["num_hidden_layers"])
    others = {name: x for name, x in load_file(model / "model.safetensors").items() if not name.startswith(prefix)}
    size = save(model, others | {prefix + name: weight for name, weight in layer.stored().items()}, config)
    write_report(model / "training_draft.json", {"plan": asdict(plan), **report, "bytes": size})


@app.command("examine")
def examine_model(
    model: ModelFolder,
    data: DataFolder,
    cases: Annotated[int, typer.Option(min=0, help="Cases of each kind; 0 measures perplexity alone.")] = 200,
    out: Annotated[Path | None, typer.Option(help="JSON lines file to append a record to.")] = None,
) -> None:
    """Examine a checkpoint in float32, as `train` does at its end."""
    figures = examine(load_network(model).to(DEVICE), Data(data), cases)
    print(figures)
    if out is not None:
        write_record(out, bench="demo_model", impl="network", case={"cases": cases}, **figures)


def save(out: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> int:
    """Write weights and configuration of a checkpoint; return the bytes of the weights' file."""
    out.mkdir(parents=True, exist_ok=True)
    part, whole = out / "model.safetensors.part", out / "model.safetensors"
    save_file(dict(tensors), part, metadata={"format": "pt"})
    part.rename(whole)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    return whole.stat().st_size


def write_report(path: Path, report: Mapping[str, Any]) -> None:
    """Write what is reported of a run."""
    path.write_text(json.dumps(report) + "\n")
    print(f"{path.parent}: {report['bytes'] / 2**20:.2f} MiB after {report['tokens']:,} tokens")
