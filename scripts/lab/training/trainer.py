"""The training of the demo model: schedule, losses, steps, and states from which a stopped run resumes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import typer
from demo_model.checkpoint import Settings, model_config
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from lab.training.batches import Batch, Batches, Data, stream
from lab.training.network import Network, pick_attention

STATE = "training.pt"
SHORT_CONTEXT, LONG_SHARE = 2048, 0.35  # documents are short at first, and long in this last part of the training
BETAS, WEIGHT_DECAY, CLIP, LEAST_RATE = (0.9, 0.95), 0.1, 1.0, 0.02
WARMUP_STEPS = 200
LOG_EVERY = 20  # steps; the losses between are not read, so that the device need not wait
console = Console()


@dataclass(frozen=True)
class Plan:
    """Settings of a run; a stopped run resumes only with the same ones."""

    model: Settings
    tokens: int  # of a batch
    context: int
    rate: float
    seed: int
    minutes: float | None  # either these
    steps: int | None  # or these


@dataclass
class Run:
    """Progress of a run."""

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


def make_optimizer(module: torch.nn.Module, rate: float, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; only matrices decay."""
    weights = [weight for weight in module.parameters() if weight.dim() == 2]
    others = [weight for weight in module.parameters() if weight.dim() != 2]
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}],
        lr=rate,
        betas=BETAS,
        fused=device.type == "cuda",
    )


def autocast(device: torch.device) -> Any:
    """BF16 on a GPU, the weights' own precision elsewhere."""
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()


def batch_keys(plan: Any, step: int, seconds: Callable[[], float]) -> Iterator[tuple[int, int]]:
    """Number and context of each batch, from a step on."""
    while True:
        yield step, context_at(plan, progress_of(plan, step, seconds()))
        step += 1


class Trainer:
    """Network, optimizer and data of a run.

    Args:
        compiled: whether to compile the step with torch.compile; if that fails, the run continues without.
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
        self.optimizer = make_optimizer(self.network, plan.rate, device)
        self.losses: Callable = torch.compile(losses, dynamic=False) if compiled else losses

    def gradients(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Leave the gradients of a batch in the network and return its losses."""
        self.optimizer.zero_grad(set_to_none=True)
        try:
            with autocast(self.device):
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
        return batch_keys(self.plan, self.run.step, seconds)

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
        """Write the state atomically."""
        out.mkdir(parents=True, exist_ok=True)
        state = {"plan": asdict(self.plan), "run": asdict(self.run)}
        state |= {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, out / f"{STATE}.part")
        (out / f"{STATE}.part").rename(out / STATE)

    def resume(self, out: Path) -> None:
        """Resume from a saved state, if there is one."""
        if not (out / STATE).is_file():
            return
        state = torch.load(out / STATE, map_location=self.device, weights_only=True)
        if state["plan"] != asdict(self.plan):
            raise typer.BadParameter(f"{out / STATE} belongs to a run with other settings; remove it or repeat them")
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.run = Run(**state["run"])
        console.print(f"going on from step {self.run.step}")
