"""A whole model as one of its ranks holds it: the model's own configuration with a rank's share of its sizes.

What a rank computes on a GPU of its own, without the communication between ranks. SGLang draws the weights
(`--load-format dummy`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo_model.checkpoint import TOKENS, YARN_ORIGINAL_POSITIONS, write
from sglang_mla_ext.configs import read_config

K3, K3_MLA = "kimi-k3", "kimi-k3-mla"
"""Kimi-K3 itself, which needs SGLang 0.5.23; and its layers with MLA alone, in DeepSeek-V3's class."""
ALL_LAYERS = {"deepseek-v3": 61, "kimi-k2": 61, K3: 93, K3_MLA: 24}
MODELS = tuple(ALL_LAYERS)
LAYERS = ALL_LAYERS[MODELS[0]]
MAX_POSITIONS = 65536
_HEADS = ("num_attention_heads", "num_key_value_heads")
_SLICES = (*_HEADS, "intermediate_size", "moe_intermediate_size", "vocab_size")
_EXPERTS = ("n_routed_experts", "vocab_size")
DIVIDED = {"tp4": _SLICES, "tp8": _SLICES, "tp16": _SLICES, "dp4": _EXPERTS, "dp8": _EXPERTS}
"""Fields of a model that ranks divide among them, by the way of division. With tensor parallelism a rank has a slice of
every matrix. With DP attention it has all heads, whole experts, the whole dense MLPs of the first layers
(`--moe-dense-tp-size 1`), and a slice of the LM head."""
OF_K3 = ("tp8", "tp16")
"""Divisions of Kimi-K3."""
_WHOLE_EXPERTS = (*_HEADS, "intermediate_size", "num_experts", "num_experts_per_token", "vocab_size")


@dataclass(frozen=True)
class Rank:
    """Content of a folder: how ranks divide which model, and how many of its layers there are.

    Attributes:
        running: of these ranks, behind one server, on a GPU each.
        drafts: with the model's own layer that drafts (NextN).
    """

    divided: str
    layers: int = LAYERS
    model: str = MODELS[0]
    running: int = 1
    drafts: bool = False
    version: int = 5  # of the output; raise it when the configuration or the tokenizer changes

    def __post_init__(self) -> None:
        if self.model in (K3, K3_MLA) and self.divided not in OF_K3:
            raise ValueError(f"{self.model} is divided by {' or '.join(OF_K3)}, not {self.divided}")
        if self.drafts and self.model in (K3, K3_MLA):
            raise ValueError(f"{self.model} has no layer that drafts")
        if self.ranks % self.running or (self.running > 1 and self.model in (K3, K3_MLA)):
            raise ValueError(f"{self.running} ranks of {self.model}'s {self.divided} cannot run together")

    @property
    def ranks(self) -> int:
        """Number of ranks that divide the model."""
        return int(self.divided[2:])


READ_AS_TEXT = {"vision_config": {"vt_num_hidden_layers": 1}, "language_model_only": True}
"""Fields of a model of images: these are refused, and their tower has one layer."""


def make_rank(out: Path, rank: Rank) -> bool:
    """Write a rank's configuration and a tokenizer, without weights, unless they exist already; return whether anything
    was written."""
    return write(out, rank, rank_config(rank))


def rank_config(rank: Rank) -> dict[str, Any]:
    """Return `config.json`: the model's own but for what ranks divide, the layers, and the layer that drafts.

    A token goes to eight of the experts that are there. With DP attention that is what comes to a rank's experts: an
    eighth of what eight times as many tokens send; ranks that run together share the experts of as many.
    """
    if rank.model == K3:
        return _kimi_k3(rank)
    if rank.model == K3_MLA:
        return _mla_of_kimi_k3(rank)
    whole = read_config("checkpoints", rank.model)["config"]
    return _as_deepseek(rank, _divided(whole, DIVIDED[rank.divided], rank.ranks // rank.running))


def _kimi_k3(rank: Rank) -> dict[str, Any]:
    """The whole model, since SGLang 0.5.23 keeps states for its prefix cache for that class alone, but read as one of
    text. Layers are of both kinds in their order. Experts are whole, as with `--ep-size` of as many ranks, and a token
    goes to so few of them as come to a rank's in the mean: slices would be padded to a third more. Left out are experts
    for all tokens, which would be whole, too (of a rank's weights 2 % to 3 %), and the router's product with the
    others' experts."""
    config = read_config("checkpoints", K3)["config"]
    text = config["text_config"]
    linear, tokens = text["linear_attn_config"], TOKENS | {"pad_token_id": 0}
    kinds = {
        kind: [layer for layer in linear[kind] if layer <= rank.layers] for kind in ("kda_layers", "full_attn_layers")
    }
    of_rank = {
        "linear_attn_config": linear | kinds | {"num_heads": linear["num_heads"] // rank.ranks},
        "num_hidden_layers": rank.layers,
        "head_dim": text["hidden_size"] // text["num_attention_heads"],  # not the rank's, which may be odd
        "num_shared_experts": 0,
        "max_position_embeddings": MAX_POSITIONS,
    }
    return (
        config | {"text_config": _divided(text, _WHOLE_EXPERTS, rank.ranks) | tokens | of_rank} | READ_AS_TEXT | tokens
    )


def _mla_of_kimi_k3(rank: Rank) -> dict[str, Any]:
    """DeepSeek-V3's layers with Kimi-K3's heads, all other sizes of MLA being the same, in BF16 as Kimi-K3's; with its
    experts for all tokens as the MLP. They rotate keys, and have no gate on the result, one product of six."""
    text = read_config("checkpoints", K3)["config"]["text_config"]
    wide = text["moe_intermediate_size"] * text["num_shared_experts"]
    own = {name: text[name] for name in (*_HEADS, "hidden_size", "vocab_size", "q_lora_rank", "kv_lora_rank")}
    config = read_config("checkpoints", MODELS[0])["config"] | own | {"intermediate_size": wide}
    config = _divided(config, (*_HEADS, "intermediate_size", "vocab_size"), rank.ranks)
    del config["quantization_config"]
    return _as_deepseek(rank, config) | {"first_k_dense_replace": rank.layers}


def _divided(config: Mapping[str, Any], fields: tuple[str, ...], ranks: int) -> dict[str, Any]:
    return {**config} | {field: config[field] // ranks for field in fields}


def _as_deepseek(rank: Rank, config: dict[str, Any]) -> dict[str, Any]:
    """Set what is alike in all ranks of DeepSeek-V3's architecture."""
    of_rank = {
        # transformers knows Kimi-K2's type only by code in its checkpoint; the architecture is DeepSeek-V3's.
        "model_type": "deepseek_v3",
        "num_hidden_layers": rank.layers,
        "max_position_embeddings": MAX_POSITIONS,
        "num_nextn_predict_layers": int(rank.drafts),
        "rope_scaling": config["rope_scaling"] | {"factor": MAX_POSITIONS / YARN_ORIGINAL_POSITIONS},
    }
    return config | TOKENS | of_rank
