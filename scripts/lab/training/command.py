"""Commands of the demo model: make its training data, train it and the layer that drafts, examine a checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import torch
import typer
from bench.records import write_record
from demo_model.checkpoint import Settings, model_config

from lab.training import sources
from lab.training.acceptance import acceptance
from lab.training.batches import Batches, Data
from lab.training.checkpoints import load_network, logits_of, stored, write_checkpoint, write_draft
from lab.training.draft import config_with_draft, load_draft
from lab.training.draft_trainer import draft_trainer
from lab.training.examination import examine, perplexity
from lab.training.network import Network, attention
from lab.training.preparation import documents, write
from lab.training.trainer import Plan, Trainer, console, data_workers, losses

app = typer.Typer(add_completion=False, help=__doc__)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


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
    """Train the model: DeepSeek-V3's architecture with the real dimensions of its attention heads, 12 million weights.

    OUT then holds the checkpoint as SGLang and transformers load it, and `training.json` with the loss curve and the
    figures of the examination.
    """
    if (minutes is None) == (steps is None):
        raise typer.BadParameter("give either --minutes or --steps")
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
    network = Network(model_config(settings), attention(DEVICE))
    network.init_weights(seed)
    network.to(DEVICE)
    on_gpu = DEVICE.type == "cuda" if compiled is None else compiled
    of_batch, batches = lambda batch: losses(network, batch), Batches(material, tokens, seed)
    trainer = Trainer(plan, network, of_batch, batches, DEVICE, workers, on_gpu)
    trainer.train()
    size = write_checkpoint(network, settings, data / "tokenizer", out)
    report = {"plan": {"model": asdict(settings), **asdict(plan)}, **trainer.done(size)}
    (out / "training.json").write_text(json.dumps(report) + "\n")
    console.print(f"{out}: {size / 2**20:.2f} MiB after {report['tokens']:,} tokens; examining")
    logits = logits_of(load_network(out, DEVICE), DEVICE)
    wanted = [int(length) for length in lengths.split(",")]
    figures = examine(logits, material, cases, lengths=wanted, prose_tokens=prose_tokens)
    for name, value in figures.items():
        console.print(f"  {name:28} {value:.4f}")
    (out / "training.json").write_text(json.dumps(report | {"examination": figures}) + "\n")


@app.command("draft")
def draft(
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
    """Train the layer with which the model drafts its own next tokens, for speculative decoding (NextN, MTP).

    The model's weights stay as they are, bit for bit. OUT then holds the checkpoint with the layer, as SGLang loads it
    for `--speculative-algorithm NEXTN`, the layer alone (`draft.pt`), and `training_draft.json` with the losses and the
    tokens per step on chats held out of the training.
    """
    if [minutes, steps, layer].count(None) != 2:
        raise typer.BadParameter("give one of --minutes, --steps and --layer")
    config = config_with_draft(json.loads((model / "config.json").read_text()))
    if layer is not None:
        size = write_draft(torch.load(layer, weights_only=True), config, model, out)
        console.print(f"{out}: {size / 2**20:.2f} MiB")
        return
    on_gpu = DEVICE.type == "cuda"
    workers, material = data_workers(workers), Data(data)
    network = load_network(model, DEVICE)
    network = network if on_gpu else network.float()
    plan = Plan(tokens, context, rate, seed, minutes, steps)
    trainer = draft_trainer(plan, network, config, material, DEVICE, workers, compiled)
    trainer.train()
    trained = stored(trainer.module)
    size = write_draft(trained, config, model, out)
    torch.save(trained, out / "draft.pt")
    report = {"plan": asdict(plan), **trainer.done(size)}
    (out / "training_draft.json").write_text(json.dumps(report) + "\n")
    console.print(f"{out}: {size / 2**20:.2f} MiB after {report['tokens']:,} tokens; counting accepted drafts")
    network, drafting = load_network(out, DEVICE), load_draft(out, DEVICE)
    if not on_gpu:
        network, drafting = network.float(), drafting.float()
    figures = acceptance(logits_of(network, DEVICE), network, drafting, material, cases)
    for name, value in figures.items():
        console.print(f"  {name:28} {value:.4f}")
    (out / "training_draft.json").write_text(json.dumps(report | {"acceptance": figures}) + "\n")


@app.command("examine")
def examine_model(
    model: Annotated[Path, typer.Argument(exists=True, help="Folder of the checkpoint.")],
    data: Annotated[Path, typer.Argument(exists=True, help="Folder that `prepare` wrote.")],
    cases: Annotated[int, typer.Option(min=0, help="Cases of each kind; 0 measures perplexity alone.")] = 200,
    out: Annotated[Path | None, typer.Option(help="JSON lines file to append a record to.")] = None,
) -> None:
    """Examine a checkpoint, as `train` does at its end; on a CPU in float32, on a GPU in BF16."""
    network, material = load_network(model, DEVICE), Data(data)
    if DEVICE.type == "cpu":
        network = network.float()
    logits = logits_of(network, DEVICE)
    figures = examine(logits, material, cases) if cases else perplexity(logits, material)
    for name, value in figures.items():
        print(f"{name:28} {value:.4f}")
    if out is not None:
        write_record(out, bench="demo_model", impl="network", case={"cases": cases}, **figures)
