"""The training of a module on batches: schedule, steps, the curve of losses; and the losses of the demo model."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from lab.training.batches import Batch, Batches, stream
from lab.training.network import Network

SHORT_CONTEXT, LONG_SHARE = 2048, 0.35  # documents are short at first, and long in this last part of the training
BETAS, WEIGHT_DECAY, CLIP, LEAST_RATE = (0.9, 0.95), 0.1, 1.0, 0.02
WARMUP_STEPS = 200
LOG_EVERY = 20  # steps; the losses between are not read, so that the device need not wait
LINES = 25  # printed over a run
console = Console()

Losses = Callable[[Batch], tuple[Tensor, dict[str, Tensor]]]
"""The loss of a batch, and the figures that are logged beside it."""


@dataclass(frozen=True)
class Plan:
    """Settings of a run."""

    tokens: int  # of a batch
    context: int  # longest document
    rate: float
    seed: int
    minutes: float | None  # either these
    steps: int | None  # or these

    def progress(self, step: int, seconds: float) -> float:
        """Return the share of the run that is done."""
        return step / self.steps if self.steps else seconds / (60 * (self.minutes or 0))

    def rate_at(self, step: int, progress: float) -> float:
        """Return the learning rate: linear warm-up, then a cosine."""
        warmup = min(1.0, (step + 1) / (min(WARMUP_STEPS, self.steps // 10 + 1) if self.steps else WARMUP_STEPS))
        cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return self.rate * warmup * (LEAST_RATE + (1 - LEAST_RATE) * cosine)

    def context_at(self, progress: float) -> int:
        """Return the tokens of the longest document."""
        return self.context if progress >= 1 - LONG_SHARE else min(self.context, SHORT_CONTEXT)


def losses(network: Network, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted mean loss per token, and the plain means over prose and over answers."""
    logits = network.lm_head(network(batch.packed))
    each = F.cross_entropy(logits.float(), batch.targets, reduction="none")
    prose, answers = batch.weights == 1, batch.weights > 1
    mean = (each * batch.weights).sum() / batch.weights.sum().clamp(min=1)
    parts = {"prose": prose, "answers": answers}
    return mean, {name: (each * part).sum() / part.sum().clamp(min=1) for name, part in parts.items()}


def data_workers(asked: int | None) -> int:
    """Return the processes that make batches; a few less than there are cores where nothing was asked for."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_float32_matmul_precision("high")
    return min(14, max(0, (os.cpu_count() or 1) - 2)) if asked is None else asked


class Trainer:
    """Module, optimizer and data of a run.

    Args:
        losses: of a batch; it is compiled if `compiled`, and if that fails, the run continues without.
        after_step: is called after each step.
    """

    def __init__(
        self,
        plan: Plan,
        module: torch.nn.Module,
        losses: Losses,
        batches: Batches,
        device: torch.device,
        workers: int,
        compiled: bool,
        after_step: Callable[[], None] = lambda: None,
    ) -> None:
        self.plan, self.module, self.device, self.workers = plan, module, device, workers
        self.batches, self.after_step, self.plain_losses = batches, after_step, losses
        self.losses: Losses = torch.compile(losses, dynamic=False) if compiled else losses
        weights = [weight for weight in module.parameters() if weight.dim() == 2]  # only matrices decay
        others = [weight for weight in module.parameters() if weight.dim() != 2]
        groups = [{"params": weights, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=plan.rate, betas=BETAS, fused=device.type == "cuda")
        self.step, self.seconds = 0, 0.0
        self.curve: list[dict[str, float]] = []
        self.weights = sum(weight.numel() for weight in module.parameters())
        console.print(f"{self.weights:,} weights on {device}, {workers} processes for data")

    def gradients(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Leave the gradients of a batch in the module and return its losses."""
        self.optimizer.zero_grad(set_to_none=True)
        on_gpu = self.device.type == "cuda"  # BF16 there, the weights' own precision elsewhere
        precision: Any = torch.autocast("cuda", dtype=torch.bfloat16) if on_gpu else nullcontext()
        try:
            with precision:
                found = self.losses(batch)
            found[0].backward()
        except torch._dynamo.exc.TorchDynamoException as error:
            console.print(f"[yellow]torch.compile failed, going on without: {str(error)[:300]}")
            self.losses = self.plain_losses
            return self.gradients(batch)
        return found

    def update(self, batch: Batch, rate: float) -> tuple[Tensor, dict[str, Tensor]]:
        """Take one step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        found = self.gradients(batch)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), CLIP)
        self.optimizer.step()
        self.after_step()
        return found

    def train(self) -> None:
        """Train until the plan's end."""
        began, printed, plan = time.monotonic(), -1.0, self.plan

        def seconds() -> float:
            return time.monotonic() - began

        def keys() -> Iterator[tuple[int, int]]:
            step = 0
            while True:
                yield step, plan.context_at(plan.progress(step, seconds()))
                step += 1

        self.module.train()
        batches = stream(self.batches, keys(), self.workers, pin=self.device.type == "cuda")
        while (progress := plan.progress(self.step, seconds())) < 1:
            loss, figures = self.update(next(batches).to(self.device), plan.rate_at(self.step, progress))
            self.step += 1
            if self.step % LOG_EVERY == 0 or self.step == plan.steps:
                row = {name: float(value.detach()) for name, value in {"loss": loss, **figures}.items()}
                self.curve.append({"step": self.step, "seconds": round(seconds(), 2), **row})
                if progress >= printed + 1 / LINES:
                    printed = progress
                    speed = self.step * plan.tokens / seconds() / 1e3
                    said = ", ".join(f"{name} {value:.3f}" for name, value in row.items())
                    console.print(f"step {self.step} {seconds():.0f} s, {speed:,.0f}k tokens/s: {said}")
        self.seconds = seconds()
        self.module.eval()

    def done(self, size: int) -> dict[str, Any]:
        """Return what a report says of the run, with the bytes of the checkpoint."""
        kept = self.curve[:: max(1, len(self.curve) // 400)] + self.curve[-1:]
        curve = [{name: float(f"{value:.5g}") for name, value in row.items()} for row in kept]
        run = {"steps": self.step, "tokens": self.step * self.plan.tokens, "seconds": round(self.seconds)}
        return {**run, "weights": self.weights, "bytes": size, "curve": curve}
