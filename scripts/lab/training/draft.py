"""The layer that drafts: DeepSeek-V3's next-token prediction (NextN, MTP) as SGLang runs it for speculative decoding.

    x_i = W_eh [enorm(embed(t_(i+1))); hnorm(h_i)]
    h'_i = shared_head.norm(layer(x_i));   logits_i = lm_head(h'_i)

h_i is the model's hidden state after its final norm, at position i; logits_i are of token i+2. Step s of a draft runs
the same layer at position i+s-1 on token i+s and on the h' of the step before. Embedding and lm_head are the model's
own. SGLang makes this layer a mixture of experts whatever the model's others are.

Parameters have their Hugging Face names after `model.layers.N.`, N being the number of the model's layers.

Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2; SGLang's models/deepseek_nextn.py, which feeds normed states.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from lab.training.draft_attention import AttendOwn, attend_own_each
from lab.training.network import MLP, Attend, Attention, Packed, RMSNorm, attend_each, turns, yarn_frequencies

EXPERT_WIDTH = 256
"""`moe_intermediate_size`: with eight experts and a shared one the layer has 7.7 MiB."""

BIAS = "mlp.gate.e_score_correction_bias"  # the one tensor of a checkpoint in float32


def config_with_draft(config: dict[str, Any]) -> dict[str, Any]:
    """The model's `config.json` with a drafting layer; what describes the other layers stays."""
    return config | {"moe_intermediate_size": EXPERT_WIDTH, "num_nextn_predict_layers": 1}


class Gate(nn.Module):
    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))


class Experts(nn.Module):
    """Routed experts and a shared one, DeepSeek-V3's router without groups.

    The experts are small: all of them are computed for every token, and those that are not chosen weigh nothing.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        hidden, wide, count = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
        self.chosen, self.scale = config["num_experts_per_tok"], config["routed_scaling_factor"]
        self.gate = Gate(hidden, count)
        self.experts = nn.ModuleList(MLP(hidden, wide) for _ in range(count))
        self.shared_experts = MLP(hidden, wide * config["n_shared_experts"])
        self.register_buffer("load", torch.zeros(count), persistent=False)  # tokens of each expert, while training

    def route(self, x: Tensor) -> Tensor:
        """Weights `[tokens, experts]` float32, 0 for those that are not chosen. The bias decides only which are."""
        scores = F.linear(x, self.gate.weight).float().sigmoid()
        chosen = (scores + self.gate.e_score_correction_bias.float()).topk(self.chosen, dim=-1).indices
        weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        if self.training:
            with torch.no_grad():
                self.load += (weights > 0).float().sum(0)
        return weights / weights.sum(-1, keepdim=True) * self.scale

    def stacked(self, name: str, dim: int) -> Tensor:
        """Return one matrix of all experts."""
        return torch.cat([getattr(expert, name).weight for expert in self.experts], dim=dim)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.silu(F.linear(x, self.stacked("gate_proj", 0))) * F.linear(x, self.stacked("up_proj", 0))
        inner = inner.unflatten(-1, (len(self.experts), -1)) * self.route(x).unsqueeze(-1).to(inner.dtype)
        return F.linear(inner.flatten(-2), self.stacked("down_proj", 1)) + self.shared_experts(x)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Make experts that had more tokens than others since the last call less likely to be chosen."""
        self.gate.e_score_correction_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Draft(nn.Module):
    """The layer.

    Args:
        config: of the model, from `config_with_draft`.
        attend: of the first step, as in the model's layers; attend_own: of the later ones.
    """

    def __init__(
        self, config: dict[str, Any], attend: Attend = attend_each, attend_own: AttendOwn = attend_own_each
    ) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.enorm, self.hnorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.input_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Attention(config, attend)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = Experts(config)
        self.shared_head = nn.Module()
        self.shared_head.norm = RMSNorm(hidden, eps)
        self.attend_own = attend_own
        self.register_buffer("frequencies", yarn_frequencies(config), persistent=False)

    def init_weights(self, seed: int, final_norm: Tensor) -> None:
        """Normal weights, smaller for those that write to the residual stream.

        The layer begins with the sum of its two inputs, in the scale that the head is used to.

        Args:
            final_norm: `[hidden]`, weight of the model's final norm.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 0.02 * (1 / math.sqrt(2) if writes else 1.0)
                weight.data.copy_(torch.randn(weight.shape, generator=generator) * scale)
        self.eh_proj.weight.data += 0.5 * torch.eye(len(final_norm)).repeat(1, 2)
        # Half of it, so that a layer that knows nothing yet is less sure.
        self.shared_head.norm.weight.data.copy_(0.5 * final_norm.float().cpu())

    def forward(self, embedded: Tensor, hidden: Tensor, packed: Packed, kept: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Run one step of the draft for every position at once.

        Args:
            embedded: `[tokens, hidden]`, row i of token i+s in step s; what the last rows of a document have does not
                matter to its others.
            hidden: `[tokens, hidden]`, the model's in the first step, then what this function returned.
            kept: keys and values `[tokens, heads, dim]` of the steps before; this step's are added.
        Returns:
            `[tokens, hidden]`, of which `lm_head` makes the logits of token i+s+1.
        """
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        cos, sin = turns(packed.positions + len(kept), self.frequencies)
        q, *of_step = self.self_attn.project(self.input_layernorm(x), cos, sin)
        kept.append((of_step[0], of_step[1]))
        (k, v), *own = kept
        if own:
            own_k, own_v = (torch.stack(tensors, dim=1) for tensors in zip(*own, strict=True))
            out = self.attend_own(q, k, v, own_k, own_v, packed, self.self_attn.scale)
        else:
            out = self.self_attn.attend(q, k, v, packed, self.self_attn.scale)
        x = x + self.self_attn.o_proj(out.flatten(-2))
        return self.shared_head.norm(x + self.mlp(self.post_attention_layernorm(x)))


def prefix_of(config: dict[str, Any]) -> str:
    """Return what the layer's names begin with in a checkpoint."""
    return f"model.layers.{config['num_hidden_layers']}."


def load_draft(folder: Path, device: torch.device, attend: Attend = attend_each) -> Draft:
    """The layer of a checkpoint in BF16, as it is shipped."""
    config = json.loads((folder / "config.json").read_text())
    prefix = prefix_of(config)
    draft = Draft(config, attend)
    tensors = load_file(folder / "model.safetensors")
    draft.load_state_dict({name[len(prefix) :]: x for name, x in tensors.items() if name.startswith(prefix)})
    kept = {name: buffer for name, buffer in draft.named_buffers() if name in (BIAS, "frequencies")}
    draft.to(device=device, dtype=torch.bfloat16)
    draft.mlp.gate.e_score_correction_bias = kept[BIAS].to(device)
    draft.frequencies = kept["frequencies"].to(device)  # kept in float32, as the bias
    return draft.eval()
