"""Train the demo model: DeepSeek-V3's architecture with the real dimensions of its attention heads, 12 million weights.

    python scripts/train_demo_model.py .demo/data .demo/model --minutes 15

The data come from prepare_demo_data.py. The same command goes on where a run was stopped; `--stop-after` stops it.
At the end OUT holds the checkpoint as SGLang and transformers load it, `training.json` with the loss curve and the
figures of the examination, and `training.png` where matplotlib is installed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from demo_accuracy import Logits, examine
from demo_batches import Batch, Batches, Data, stream
from demo_network import Attend, Network, load_weights, pack, pick_attention
from make_demo_model import Settings, model_config
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import save_file
from torch import Tensor

STATE = "training.pt"
SHORT_CONTEXT, LONG_SHARE = 2048, 0.35  # documents are short at first, and long in this last part of the training
BETAS, WEIGHT_DECAY, CLIP, LEAST_RATE = (0.9, 0.95), 0.1, 1.0, 0.02
WARMUP_STEPS = 200
LOG_EVERY = 20  # steps; the losses between are not read, so that the device need not wait

console = Console()


@dataclass(frozen=True)
class Plan:
    """What a run does; a stopped run goes on only with the same one."""

    model: Settings
    tokens: int  # of a batch
    context: int
    rate: float
    seed: int
    minutes: float | None  # either these
    steps: int | None  # or these


@dataclass
class Run:
    """How far a run is."""

    step: int = 0
    seconds: float = 0.0
    curve: list[dict[str, float]] = field(default_factory=list)


def progress_of(plan: Plan, step: int, seconds: float) -> float:
    """Share of the run that is done."""
    return step / plan.steps if plan.steps else seconds / (60 * plan.minutes)


def rate_at(plan: Plan, step: int, progress: float) -> float:
    """Learning rate: linear warm-up, then a cosine."""
    warmup = min(1.0, (step + 1) / (min(WARMUP_STEPS, plan.steps // 10 + 1) if plan.steps else WARMUP_STEPS))
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return plan.rate * warmup * (LEAST_RATE + (1 - LEAST_RATE) * cosine)


def context_at(plan: Plan, progress: float) -> int:
    """Longest document."""
    return plan.context if progress >= 1 - LONG_SHARE else min(plan.context, SHORT_CONTEXT)


def losses(network: Network, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted mean loss per token; the plain means over prose and over answers."""
    logits = network.lm_head(network(batch.packed))
    each = F.cross_entropy(logits.float(), batch.targets, reduction="none")
    prose, answers = batch.weights == 1, batch.weights > 1
    mean = (each * batch.weights).sum() / batch.weights.sum().clamp(min=1)
    return mean, (each * prose).sum() / prose.sum().clamp(min=1), (each * answers).sum() / answers.sum().clamp(min=1)


class Trainer:
    """Network, optimizer and data of a run.

    Args:
        compiled: whether torch.compile makes the step; if it fails, the run goes on without.
    """

    def __init__(self, plan: Plan, data: Data, device: torch.device, workers: int, compiled: bool) -> None:
        self.plan, self.device, self.workers, self.run = plan, device, workers, Run()
        self.batches = Batches(data, plan.tokens, plan.seed)
        config = model_config(plan.model)
        dims = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"])
        attend, why = pick_attention(device, plan.model.heads, dims)
        console.print(f"attention: {why}")
        self.network = Network(config, attend)
        self.network.init_weights(plan.seed)
        self.network.to(device)
        weights = [weight for weight in self.network.parameters() if weight.dim() == 2]
        others = [weight for weight in self.network.parameters() if weight.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": weights, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
            lr=plan.rate,
            betas=BETAS,
            fused=device.type == "cuda",
        )
        self.losses: Callable = torch.compile(losses, dynamic=False) if compiled else losses

    def autocast(self) -> Any:
        return torch.autocast("cuda", dtype=torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def gradients(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Leave the gradients of a batch in the network and return its losses."""
        self.optimizer.zero_grad(set_to_none=True)
        try:
            with self.autocast():
                found = self.losses(self.network, batch)
            found[0].backward()
        except torch._dynamo.exc.TorchDynamoException as error:
            console.print(f"[yellow]torch.compile failed, going on without: {str(error)[:300]}")
            self.losses = losses
            return self.gradients(batch)
        return tuple(loss.detach() for loss in found)

    def step(self, batch: Batch, rate: float) -> tuple[Tensor, Tensor, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        found = self.gradients(batch)
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), CLIP)
        self.optimizer.step()
        return found

    def keys(self, seconds: Callable[[], float]) -> Iterator[tuple[int, int]]:
        """Number and context of each batch, from the run's step on."""
        step = self.run.step
        while True:
            yield step, context_at(self.plan, progress_of(self.plan, step, seconds()))
            step += 1

    def train(self, out: Path, stop_after: float | None, save_every: float) -> bool:
        """Train until the plan's end.

        Args:
            stop_after: minutes after which to stop all the same.
            save_every: minutes between saved states.
        Returns:
            Whether the plan's end is reached.
        """
        began, before, saved = time.monotonic(), self.run.seconds, time.monotonic()

        def seconds() -> float:
            return before + time.monotonic() - began

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        total = self.plan.steps or int(60 * self.plan.minutes)
        batches = stream(self.batches, self.keys(seconds), self.workers, pin=self.device.type == "cuda")
        with Progress(*columns, TextColumn("{task.fields[loss]}"), console=console) as bar:
            task = bar.add_task("steps" if self.plan.steps else "seconds", total=total, loss="")
            while (progress := progress_of(self.plan, self.run.step, seconds())) < 1:
                if stop_after is not None and time.monotonic() - began >= 60 * stop_after:
                    break
                rate = rate_at(self.plan, self.run.step, progress)
                found = self.step(next(batches).to(self.device), rate)
                self.run.step += 1
                if self.run.step % LOG_EVERY == 0 or self.run.step == self.plan.steps:
                    loss, prose, answers = (float(value) for value in found)
                    row = {"step": self.run.step, "seconds": round(seconds(), 2), "rate": rate, "loss": loss}
                    self.run.curve.append(row | {"prose": prose, "answers": answers})
                    per_second = (self.run.step * self.plan.tokens) / max(seconds(), 1e-9)
                    line = f"loss {loss:.3f} prose {prose:.3f} answers {answers:.3f}  {per_second / 1e3:,.0f}k tokens/s"
                    bar.update(task, completed=self.run.step if self.plan.steps else int(seconds()), loss=line)
                    if not console.is_terminal and self.run.step % (10 * LOG_EVERY) == 0:
                        console.print(f"step {self.run.step} {line}")
                if time.monotonic() - saved >= 60 * save_every:
                    self.run.seconds = seconds()
                    self.save(out)
                    saved = time.monotonic()
        self.run.seconds = seconds()
        self.save(out)
        return progress_of(self.plan, self.run.step, self.run.seconds) >= 1

    def save(self, out: Path) -> None:
        """Write the state, whole or not at all."""
        out.mkdir(parents=True, exist_ok=True)
        state = {"plan": asdict(self.plan), "run": asdict(self.run)}
        state |= {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, out / f"{STATE}.part")
        (out / f"{STATE}.part").rename(out / STATE)

    def resume(self, out: Path) -> None:
        """Go on from a saved state, if there is one."""
        if not (out / STATE).is_file():
            return
        state = torch.load(out / STATE, map_location=self.device, weights_only=True)
        if state["plan"] != asdict(self.plan):
            raise typer.BadParameter(f"{out / STATE} belongs to a run with other settings; remove it or repeat them")
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.run = Run(**state["run"])
        console.print(f"going on from step {self.run.step}")


def write_checkpoint(network: Network, settings: Settings, tokenizer: Path | None, out: Path) -> int:
    """Write BF16 weights, configuration and tokenizer.

    Returns:
        Bytes of the weights' file.
    """
    out.mkdir(parents=True, exist_ok=True)
    tensors = {name: weight.to(torch.bfloat16).cpu().contiguous() for name, weight in network.state_dict().items()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(model_config(settings), indent=2) + "\n")
    if tokenizer:
        shutil.copytree(tokenizer, out, dirs_exist_ok=True)
    return (out / "model.safetensors").stat().st_size


def logits_of(network: Network, device: torch.device) -> Logits:
    """The network as the examination calls it."""

    @torch.inference_mode()
    def logits(documents: list[list[int]]) -> list[Tensor]:
        found = network.lm_head(network(pack(documents, device)))
        return list(found.split([len(document) for document in documents]))

    return logits


def load_network(folder: Path, device: torch.device, attend: Attend | None = None) -> Network:
    """A checkpoint in BF16, as it is shipped."""
    config = json.loads((folder / "config.json").read_text())
    network = Network(config, *([attend] if attend else []))
    load_weights(network, folder)
    frequencies = network.frequencies
    network.to(device=device, dtype=torch.bfloat16)
    network.frequencies = frequencies.to(device)  # in float32 still
    return network


def thinned(curve: list[dict[str, float]], rows: int = 400) -> list[dict[str, float]]:
    """About so many rows of a curve, and the last one, in few digits."""
    kept = curve[:: max(1, len(curve) // rows)] + curve[-1:]
    return [{name: float(f"{value:.5g}") for name, value in row.items()} for row in kept]


def draw_curve(curve: list[dict[str, float]], path: Path) -> None:
    """The losses over time, if matplotlib is there."""
    try:
        import matplotlib
    except ImportError:
        console.print("no matplotlib, no picture of the losses")
        return
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name in ("prose", "answers"):
        axes.plot([row["seconds"] / 60 for row in curve], [row[name] for row in curve], label=name, linewidth=0.8)
    axes.set(xlabel="minutes", ylabel="loss per token", ylim=(0, None), title="Training of the demo model")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(
    data: Annotated[Path, typer.Argument(help="Folder that prepare_demo_data.py wrote.")],
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


if __name__ == "__main__":
    typer.run(main)
