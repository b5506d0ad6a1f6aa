"""The training of the drafting layer on the frozen model: losses of three steps of a draft."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.training.batches import Batch, Batches, Data
from lab.training.draft import Draft
from lab.training.draft_attention import own_attention
from lab.training.network import Network, attention
from lab.training.trainer import Plan, Trainer

SHARES = {"prose": 0.1, "dictionary": 0.65, "lookup": 0.25}  # of the tokens
STEP_WEIGHTS = (1.0, 0.8, 0.64)  # of the losses; a later draft counts only where those before it are accepted
BALANCE_RATE = 1e-3  # of the router's bias, as DeepSeek-V3's


def losses(network: Network, draft: Draft, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the divergence from the model's own distribution, and how often the likeliest tokens agree.

    Tokens are the data's in every step; the hidden states of later steps are the layer's own, as when it is served. A
    row counts where its token and the one that it predicts are an answer's, or prose.

    Returns:
        The weighted sum of the steps' divergences; each of them, and each step's agreement.
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
    total_loss = torch.stack([each * weight for each, weight in zip(divergences, STEP_WEIGHTS, strict=True)]).sum()
    figures = {f"divergence_{at}": value.detach() for at, value in enumerate(divergences, start=1)}
    return total_loss, figures | {f"agreement_{at}": value for at, value in enumerate(agreements, start=1)}


def draft_trainer(
    plan: Plan,
    network: Network,
    config: dict[str, Any],
    data: Data,
    device: torch.device,
    workers: int,
) -> Trainer:
    """Make the trainer of a new layer; its `module` is the layer.

    Args:
        network: the model; its weights do not change.
        config: its configuration, with a drafting layer.
    """
    network.requires_grad_(False)
    for layer in network.model.layers:
        layer.self_attn.attend = attention(device)
    draft = Draft(config, attention(device), own_attention(device))
    draft.init_weights(plan.seed, network.model.norm.weight.detach())
    draft.to(device)
    batches = Batches(data, plan.tokens, plan.seed, SHARES)
    of_batch, balance = lambda batch: losses(network, draft, batch), lambda: draft.mlp.balance(BALANCE_RATE)
    # Not compiled: that pays in long runs alone.
    return Trainer(plan, draft, of_batch, batches, device, workers, False, balance)
