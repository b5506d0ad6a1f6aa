"""A whole model as one of eight ranks holds it: the model's own configuration with a rank's share of its sizes.

What a rank computes on a GPU of its own, without the communication between ranks. SGLang draws the weights
(`--load-format dummy`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from demo_model.checkpoint import BOS, EOS, SPECIAL_TOKENS, YARN_ORIGINAL_POSITIONS, write
from sglang_mla_ext.configs import read_config

MODELS = ("deepseek-v3", "kimi-k2")
RANKS = 8
LAYERS = 61
MAX_POSITIONS = 65536
DIVIDED = {  # how ranks divide the model: the fields that they divide among them
    "tp8": ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size", "vocab_size"),
    "dp8": ("n_routed_experts", "vocab_size"),
}
"""With tensor parallelism a rank has a slice of every matrix. With DP attention it has all heads, whole experts, the
whole dense MLPs of the first layers (`--moe-dense-tp-size 1`), and a slice of the LM head."""


@dataclass(frozen=True)
class Rank:
    """What a folder depends on: how ranks divide which model, and how many of its layers there are."""

    divided: str
    layers: int = LAYERS
    model: str = MODELS[0]
    version: int = 3  # of the output; raise it when the configuration or the tokenizer changes


def make_rank(out: Path, rank: Rank) -> bool:
    """Write a rank's configuration and a tokenizer, without weights, unless they exist already.

    Returns:
        Whether anything was written.
    """
    config = rank_config(rank)
    return write(out, asdict(rank), config["vocab_size"], lambda: (config, None))


def rank_config(rank: Rank) -> dict[str, Any]:
    """`config.json`: the model's own but for what ranks divide, the layers, and the layer that drafts.

    A token goes to eight of the experts that are there. With DP attention that is what comes to a rank's experts: an
    eighth of what eight times as many tokens send.
    """
    config = {**read_config("checkpoints", rank.model)["config"]}
    config |= {field: config[field] // RANKS for field in DIVIDED[rank.divided]}
    tokens = {"bos_token_id": SPECIAL_TOKENS.index(BOS), "eos_token_id": SPECIAL_TOKENS.index(EOS)}
    yarn = config["rope_scaling"] | {"factor": MAX_POSITIONS / YARN_ORIGINAL_POSITIONS}
    # transformers knows Kimi-K2's type only by code in its checkpoint; the architecture is DeepSeek-V3's.
    sizes = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": rank.layers,
        "max_position_embeddings": MAX_POSITIONS,
        "num_nextn_predict_layers": 0,
    }
    return config | tokens | sizes | {"rope_scaling": yarn}
