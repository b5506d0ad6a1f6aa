"""The demo model in transformers' DeepSeek-V3 class, trained on documents that are packed into one flat batch."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention
from transformers import AttentionInterface, DeepseekV3Config, DeepseekV3ForCausalLM

from lab.training.batches import Batch

PACKED = "packed"  # transformers' name for `attend`
_flex_attention = torch.compile(flex_attention, dynamic=False)
_block_mask = torch.compile(create_block_mask, dynamic=False)


def packed_mask(positions: Tensor, steps: int = 1) -> Any:
    """Return the mask under which documents of a batch do not attend to each other.

    A row sees the keys of its document up to its own. Keys of later draft steps follow those of all rows, step by
    step; of these a row sees its own alone.

    Args:
        positions: `[tokens]`, each document from 0.
        steps: draft steps whose keys there are.
    Returns:
        what `attend` takes for `tokens` queries and `steps * tokens` keys.
    """
    tokens, documents = len(positions), (positions == 0).cumsum(0)

    def visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        at = key % tokens
        return torch.where(key < tokens, (documents[row] == documents[at]) & (at <= row), at == row)

    make = _block_mask if positions.is_cuda else create_mask
    return make(visible, 1, 1, tokens, steps * tokens, device=positions.device)


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float, **unused: Any
) -> tuple[Tensor, None]:
    """Attend under a `packed_mask`, as one of transformers' attention functions.

    On a GPU in BF16: FlexAttention wants one dtype, which autocast's queries and keys have not.

    Args:
        query, key, value: `[1, heads, tokens, dim]`.
    """
    if query.is_cuda:
        query, key, value = (x.to(torch.bfloat16) for x in (query, key, value))
        out = _flex_attention(query, key, value, block_mask=attention_mask, scale=scaling)
    else:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(PACKED, attend)


def init_weights(module: nn.Module, seed: int, layers: int) -> None:
    """Draw normal weights; those that write to the residual stream are smaller the more layers there are."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in module.named_parameters():
        if weight.dim() > 1:
            writes = name.endswith(("o_proj.weight", "down_proj.weight", "down_proj"))
            scale = 0.02 * (1 / math.sqrt(2 * layers) if writes else 1.0)
            weight.data.copy_(torch.randn(weight.shape, generator=generator) * scale)


def hidden_states(network: DeepseekV3ForCausalLM, tokens: Tensor, positions: Tensor) -> Tensor:
    """Return the last hidden states `[tokens, hidden]` of packed documents, of which `lm_head` makes logits."""
    given = dict(input_ids=tokens[None], position_ids=positions[None], attention_mask=packed_mask(positions))
    return network.model(**given, use_cache=False).last_hidden_state[0]


def model_losses(network: DeepseekV3ForCausalLM, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted mean loss per token, and the plain means over prose and over answers."""
    logits = network.lm_head(hidden_states(network, batch.tokens, batch.positions))
    each = F.cross_entropy(logits.float(), batch.targets, reduction="none")
    prose, answers = batch.weights == 1, batch.weights > 1
    mean = (each * batch.weights).sum() / batch.weights.sum().clamp(min=1)
    parts = {"prose": prose, "answers": answers}
    return mean, {name: (each * part).sum() / part.sum().clamp(min=1) for name, part in parts.items()}


def draft_prefix(layers: int) -> str:
    """Return what names of the layer that drafts begin with in a checkpoint of a model with so many layers."""
    return f"model.layers.{layers}."


def make_network(config: dict[str, Any], attention: str = "sdpa") -> DeepseekV3ForCausalLM:
    """Make a model in float32, with weights that transformers draws.

    Args:
        config: `config.json`, as make_demo_model writes it.
        attention: a name that transformers knows; PACKED for `hidden_states`.
    """
    # A copy, because transformers adds to what it is given.
    return DeepseekV3ForCausalLM(DeepseekV3Config(**deepcopy(config), attn_implementation=attention))


def load_network(folder: Path, attention: str = "sdpa") -> DeepseekV3ForCausalLM:
    """Load a checkpoint in float32, without its layer that drafts; attention: as in `make_network`."""
    network = make_network(json.loads((folder / "config.json").read_text()), attention)
    tensors, behind = load_file(folder / "model.safetensors"), draft_prefix(network.config.num_hidden_layers)
    network.load_state_dict({name: tensor for name, tensor in tensors.items() if not name.startswith(behind)})
    return network.eval()
