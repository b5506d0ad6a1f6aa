"""The layer that drafts: DeepSeek-V3's next-token prediction (NextN, MTP) as SGLang runs it for speculative decoding.

    x_i = W_eh [enorm(embed(t_(i+1))); hnorm(h_i)]
    h'_i = shared_head.norm(layer(x_i));   logits_i = lm_head(h'_i)

h_i is the model's hidden state after its final norm, at position i; logits_i are of token i+2. Step s of a draft runs
the same layer at position i+s-1 on token i+s and on the h' of the step before. A row has the keys of the first step up
to its position, which are made of the model's hidden states, and one key of its own from each later step so far.
Embedding and lm_head are the model's own. SGLang makes this layer a mixture of experts whatever the model's others are.

Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2; SGLang's models/deepseek_nextn.py, which feeds normed states.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

from lab.training.batches import Batch
from lab.training.network import PACKED, hidden_states, init_weights, packed_mask

EXPERT_WIDTH = 256
"""`moe_intermediate_size`: with eight experts and a shared one the layer has 7.7 MiB."""

STEP_WEIGHTS = (1.0, 0.8, 0.64)  # of a draft's losses; a later one counts only where those before it are accepted
BALANCE_RATE = 1e-3  # of the router's bias, as DeepSeek-V3's


def config_with_draft(config: dict[str, Any]) -> dict[str, Any]:
    """Return the model's `config.json` with a drafting layer; what describes the other layers stays."""
    return config | {"moe_intermediate_size": EXPERT_WIDTH, "num_nextn_predict_layers": 1}


class Draft(DeepseekV3DecoderLayer):
    """The layer.

    Args:
        config: of the model, from `config_with_draft`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        of_layer = DeepseekV3Config(**deepcopy(config), attn_implementation=PACKED, experts_implementation="eager")
        of_layer.first_k_dense_replace = 0
        super().__init__(of_layer, layer_idx=0)
        hidden, eps = of_layer.hidden_size, of_layer.rms_norm_eps
        self.enorm, self.hnorm = DeepseekV3RMSNorm(hidden, eps), DeepseekV3RMSNorm(hidden, eps)
        self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
        self.shared_head = nn.ModuleDict({"norm": DeepseekV3RMSNorm(hidden, eps)})
        self.register_buffer("load", torch.zeros(of_layer.n_routed_experts), persistent=False)
        self.mlp.experts.register_forward_pre_hook(self._count)

    def _count(self, experts: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        """Count the tokens of each expert since the last `balance`; the second argument is the chosen ones' numbers."""
        self.load += torch.bincount(arguments[1].flatten(), minlength=len(self.load))

    def init_weights(self, seed: int, final_norm: Tensor) -> None:
        """Begin with the sum of the layer's two inputs, in the scale that the head is used to.

        Args:
            final_norm: `[hidden]`, weight of the model's final norm.
        """
        init_weights(self, seed, layers=1)
        self.eh_proj.weight.data += 0.5 * torch.eye(len(final_norm)).repeat(1, 2)
        # Half of it, so that a layer that knows nothing yet is less sure.
        self.shared_head["norm"].weight.data.copy_(0.5 * final_norm)

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, rotary: nn.Module, cache: DynamicCache
    ) -> Tensor:
        """Run one step of the draft for every position at once.

        Args:
            embedded: `[tokens, hidden]`, row i of token i+s in step s; what the last rows of a document have does not
                matter to its others.
            hidden: `[tokens, hidden]`, the model's in the first step, then what this function returned.
            positions: `[tokens]`, each document from 0.
            rotary: of the model.
            cache: keys of the steps before; this step's are added.
        Returns:
            `[tokens, hidden]`, of which `lm_head` makes the logits of token i+s+1.
        """
        step = cache.get_seq_length() // len(positions)
        x = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))[None]
        turns, mask = rotary(x, positions[None] + step), packed_mask(positions, step + 1)
        x = super().forward(x, position_embeddings=turns, attention_mask=mask, past_key_values=cache)
        return self.shared_head["norm"](x[0])

    @torch.no_grad()
    def balance(self) -> None:
        """Make experts that had more tokens than others since the last call less likely to be chosen."""
        self.mlp.gate.e_score_correction_bias += BALANCE_RATE * torch.sign(self.load.mean() - self.load)
        self.load.zero_()

    def stored(self) -> dict[str, Tensor]:
        """Return the layer's tensors as a checkpoint has them: BF16, but for the router's bias, each expert's apart."""
        tensors = {name: weight.to(torch.bfloat16) for name, weight in self.state_dict().items()}
        tensors["mlp.gate.e_score_correction_bias"] = self.mlp.gate.e_score_correction_bias
        both, down = (tensors.pop(f"mlp.experts.{name}") for name in ("gate_up_proj", "down_proj"))
        for expert, (gate, up) in enumerate(both.unflatten(1, (2, -1))):
            of_expert = {"gate_proj": gate, "up_proj": up, "down_proj": down[expert]}
            tensors |= {f"mlp.experts.{expert}.{name}.weight": weight for name, weight in of_expert.items()}
        return {name: weight.cpu().contiguous() for name, weight in tensors.items()}


def draft_losses(network: DeepseekV3ForCausalLM, draft: Draft, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the divergence from the model's own distribution, and how often the likeliest tokens agree.

    Tokens are the data's in every step; the hidden states of later steps are the layer's own, as when it is served. A
    row counts where its token and the one that it predicts are an answer's, or prose.

    Returns:
        The weighted sum of the steps' divergences; each of them, and each step's agreement.
    """
    tokens, positions, cache, figures = batch.tokens, batch.positions, DynamicCache(), {}
    with torch.no_grad():
        hidden = hidden_states(network, tokens, positions)
        logits = network.lm_head(hidden)
    for ahead in range(1, len(STEP_WEIGHTS) + 1):
        embedded = network.model.embed_tokens(tokens.roll(-ahead))
        hidden = draft(embedded, hidden, positions, network.model.rotary_emb, cache)
        found = F.log_softmax(network.lm_head(hidden).float(), dim=-1)
        wanted = F.log_softmax(logits.roll(-ahead, 0).float(), dim=-1)
        same_document = positions.roll(-ahead) == positions + ahead
        weights = batch.weights.roll(-ahead) * (batch.weights > 0) * same_document
        total = weights.sum().clamp(min=1)
        each = F.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
        figures[f"divergence_{ahead}"] = (each * weights).sum() / total
        figures[f"agreement_{ahead}"] = ((found.argmax(-1) == wanted.argmax(-1)) * weights).sum() / total
    loss = torch.stack([weight * figures[f"divergence_{at}"] for at, weight in enumerate(STEP_WEIGHTS, start=1)]).sum()
    return loss, figures
