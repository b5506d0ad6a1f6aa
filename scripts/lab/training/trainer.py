"""Train a module on batches: schedule, steps, the curve of losses."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from lab.training.batches import Batch, Batches

BETAS, WEIGHT_DECAY, CLIP, LEAST_RATE = (0.9, 0.95), 0.1, 1.0, 0.02
WARMUP_STEPS = 200
POINTS, LINES = (
    400,
    25,
)  # of the curve of losses, and printed; the losses between are not read: the device need not wait
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

Losses = Callable[[Batch], tuple[Tensor, dict[str, Tensor]]]
"""The loss of a batch, and the figures that are logged beside it."""


@dataclass(frozen=True)
class Plan:
    """Settings of a run."""

    tokens: int  # of a batch
    context: int  # longest document
    rate: float  # highest learning rate
    seed: int
    steps: int
    workers: int  # processes that make batches

    def share_of_rate(self, step: int) -> float:
        """Return the learning rate over the highest one: linear warm-up, then a cosine."""
        warmup = min(1.0, (step + 1) / min(WARMUP_STEPS, self.steps // 10 + 1))
        return warmup * (LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * min(step / self.steps, 1.0))))


def fit(
    plan: Plan,
    module: torch.nn.Module,
    losses: Losses,
    batches: Batches,
    after_step: Callable[[], None] = lambda: None,
    compiled: bool = False,
) -> dict[str, Any]:
    """Train a module on DEVICE.

    Args:
        losses: of a batch, computed in BF16 on a GPU, and in the weights' own precision elsewhere.
        after_step: is called after each step.
        compiled: compile the losses on a GPU; that pays in long runs alone.
    Returns:
        what a report says of the run.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_float32_matmul_precision("high")
    on_gpu, count = DEVICE.type == "cuda", sum(weight.numel() for weight in module.parameters())
    print(f"{count:,} weights on {DEVICE}, {plan.workers} processes for data")
    if compiled and on_gpu:
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is
        losses = torch.compile(losses, dynamic=False)
    matrices = [weight for weight in module.parameters() if weight.dim() > 1]  # only these decay
    others = [weight for weight in module.parameters() if weight.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=plan.rate, betas=BETAS, fused=on_gpu)
    schedule = LambdaLR(optimizer, plan.share_of_rate)
    ahead = {"num_workers": plan.workers, "prefetch_factor": 4} if plan.workers else {}
    loader = DataLoader(batches, batch_size=None, pin_memory=on_gpu, **ahead)
    curve: list[dict[str, float]] = []
    began = time.monotonic()
    module.train()
    for step, batch in enumerate(loader, start=1):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(DEVICE.type, dtype=torch.bfloat16, enabled=on_gpu):
            loss, figures = losses(Batch(*(part.to(DEVICE, non_blocking=True) for part in batch)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        after_step()
        if step % max(1, plan.steps // POINTS) == 0 or step == plan.steps:
            row = {name: float(f"{value.detach():.5g}") for name, value in {"loss": loss, **figures}.items()}
            curve.append({"step": step, "seconds": round(time.monotonic() - began, 2), **row})
            if step == plan.steps or len(curve) % max(1, POINTS // LINES) == 1:
                print(", ".join(f"{name} {value:g}" for name, value in curve[-1].items()), flush=True)
    module.eval()
    run = {"steps": plan.steps, "tokens": plan.steps * plan.tokens, "seconds": round(time.monotonic() - began)}
    return {**run, "weights": count, "curve": curve}
