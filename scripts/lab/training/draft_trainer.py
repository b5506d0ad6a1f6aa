"""The training of the drafting layer on the frozen model: losses of three steps of a draft, and the run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.training.batches import Batch, Batches, Data, stream
from lab.training.draft import Draft
from lab.training.draft_attention import pick_own_attention
from lab.training.network import Network, pick_attention
from lab.training.trainer import CLIP, autocast, batch_keys, console, make_optimizer, progress_of, rate_at

SHARES = {"prose": 0.1, "dictionary": 0.65, "lookup": 0.25}  # of the tokens
STEP_WEIGHTS = (1.0, 0.8, 0.64)  # of the losses; a later draft counts only where those before it are accepted
BALANCE_RATE = 1e-3  # of the router's bias, as DeepSeek-V3's
LOG_EVERY = 20
LINES = 25  # printed over a run


@dataclass(frozen=True)
class DraftPlan:
    """Settings of a run."""

    tokens: int  # of a batch
    context: int  # longest document
    rate: float
    seed: int
    minutes: float | None  # either these
    steps: int | None  # or these


def losses(network: Network, draft: Draft, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Divergence from the model's own distribution, and how often the likeliest tokens agree, of each step.

    Tokens are the data's in every step; the hidden states of later steps are the layer's own, as when it is served. A
    row counts where its token and the one that it predicts are an answer's, or prose.

    Returns:
        The weighted sum of the losses, the losses `[steps]` and the agreements `[steps]`.
    """
    packed, kept = batch.packed, []
    with torch.no_grad():
        hidden = network(packed)
        logits = network.lm_head(hidden)
    divergences, agreements = [], []
    for ahead in range(1, len(STEP_WEIGHTS) + 1):
        hidden = draft(network.model.embed_tokens(packed.tokens.roll(-ahead)), hidden, packed, kept)
        found = F.log_softmax(network.lm_head(hidden).float(), dim=-1)
        wanted = F.log_softmax(logits.roll(-ahead, 0).float(), dim=-1)
        same_document = packed.positions.roll(-ahead) == packed.positions + ahead
        weights = batch.weights.roll(-ahead) * (batch.weights > 0) * same_document
        total = weights.sum().clamp(min=1)
        each = F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
        divergences.append((each * weights).sum() / total)
        agreements.append(((found.argmax(-1) == wanted.argmax(-1)) * weights).sum() / total)
    together = torch.stack(divergences)
    return (together * together.new_tensor(STEP_WEIGHTS)).sum(), together.detach(), torch.stack(agreements)


class DraftTrainer:
    """Layer, optimizer and data of a run.

    Args:
        network: the model; its weights do not change.
        config: its configuration, with a drafting layer.
        compiled: whether to compile the step with torch.compile; if that fails, the run continues without.
    """

    def __init__(
        self,
        plan: DraftPlan,
        network: Network,
        config: dict,
        data: Data,
        device: torch.device,
        workers: int,
        compiled: bool,
    ) -> None:
        self.plan, self.device, self.workers = plan, device, workers
        self.network = network.requires_grad_(False)
        dims = (config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"])
        attend, why = pick_attention(device, config["num_attention_heads"], dims)
        attend_own, why_own = pick_own_attention(device, config["num_attention_heads"], dims)
        console.print(f"attention: {why}; of later steps: {why_own}")
        for layer in network.model.layers:
            layer.self_attn.attend = attend
        self.draft = Draft(config, attend, attend_own)
        self.draft.init_weights(plan.seed, network.model.norm.weight.detach())
        self.draft.to(device)
        self.batches = Batches(data, plan.tokens, plan.seed, SHARES)
        self.optimizer = make_optimizer(self.draft, plan.rate, device)
        self.losses: Callable = torch.compile(losses, dynamic=False) if compiled else losses
        self.step, self.seconds = 0, 0.0
        self.curve: list[dict[str, float]] = []

    def gradients(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Leave the gradients of a batch in the layer and return its losses."""
        self.optimizer.zero_grad(set_to_none=True)
        try:
            with autocast(self.device):
                found = self.losses(self.network, self.draft, batch)
            found[0].backward()
        except torch._dynamo.exc.TorchDynamoException as error:
            console.print(f"[yellow]torch.compile failed, going on without: {str(error)[:300]}")
            self.losses = losses
            return self.gradients(batch)
        return found

    def update(self, batch: Batch, rate: float) -> tuple[Tensor, Tensor, Tensor]:
        """One step."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        found = self.gradients(batch)
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), CLIP)
        self.optimizer.step()
        self.draft.mlp.balance(BALANCE_RATE)
        return found

    def train(self) -> None:
        """Train until the plan's end."""
        began, printed = time.monotonic(), -1.0

        def seconds() -> float:
            return time.monotonic() - began

        self.draft.train()
        keys = batch_keys(self.plan, 0, seconds)
        batches = stream(self.batches, keys, self.workers, pin=self.device.type == "cuda")
        while (progress := progress_of(self.plan, self.step, seconds())) < 1:
            found = self.update(next(batches).to(self.device), rate_at(self.plan, self.step, progress))
            self.step += 1
            if self.step % LOG_EVERY == 0 or self.step == self.plan.steps:
                self.log(found, seconds())
                if progress >= printed + 1 / LINES:
                    printed = progress
                    row = self.curve[-1]
                    agreement = " ".join(f"{row[f'agreement_{at}']:.3f}" for at in range(1, len(STEP_WEIGHTS) + 1))
                    speed = self.step * self.plan.tokens / seconds() / 1e3
                    console.print(
                        f"step {self.step} {seconds():.0f} s, {speed:,.0f}k tokens/s: "
                        f"loss {row['loss']:.3f}, agreement {agreement}"
                    )
        self.seconds = seconds()
        self.draft.eval()

    def log(self, found: tuple[Tensor, Tensor, Tensor], seconds: float) -> None:
        """A row of the curve."""
        row = {"step": self.step, "seconds": round(seconds, 2), "loss": float(found[0].detach())}
        for name, values in (("divergence", found[1]), ("agreement", found[2])):
            row |= {f"{name}_{at}": value for at, value in enumerate(values.tolist(), start=1)}
        self.curve.append(row)
