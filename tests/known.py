"""Small random checkpoints of models that people serve: their own `config.json`, with other sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from demo_model.checkpoint import TOKENS, Settings, weights, write
from demo_model.rank import READ_AS_TEXT

from sglang_mla_ext.configs import read_config
from sglang_mla_ext.prefix.planner.model_dims import language_part

EXPERT_WIDTH = 32
"""Of one expert's MLP: they are as many as the model has."""

LINEAR_HEADS, LINEAR_DIM = 4, 64
"""Of layers with linear attention, every second one of a model that has such."""


@dataclass(frozen=True)
class Known:
    """What a checkpoint depends on.

    Attributes:
        name: of the model, in configs/checkpoints.
        layers: of its decoder. The experts are as many as the model has.
        heads: None for as many as the model has.
        linear_dtype: in which SGLang makes some weights of layers with linear attention, whatever --dtype is.
    """

    name: str
    layers: int = 2
    hidden: int = 256
    intermediate: int = 512
    q_lora_rank: int = 64
    vocab: int = 2048
    heads: int | None = None
    linear_dtype: str = "float32"
    seed: int = 0
    version: int = 3  # of the output; raise it when the weights change


def make_known(out: Path, known: Known) -> bool:
    """Write the checkpoint unless it exists already.

    Returns:
        Whether anything was written.
    """
    return write(out, known, known_config(known), lambda: known_weights(known))


def known_config(known: Known) -> dict[str, Any]:
    """`config.json`: the model's own but for sizes and tokens, in BF16, without a layer that drafts. Kimi-K3's, a model
    of images, is read as one of text."""
    published = read_config("checkpoints", known.name)["config"]
    text = _of_text(known, {**language_part(published)})
    if "text_config" not in published:
        return text
    said_twice = {name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id", "torch_dtype")}
    return published | {"text_config": text} | READ_AS_TEXT | said_twice


def _of_text(known: Known, config: dict[str, Any]) -> dict[str, Any]:
    """A small model's configuration from the published one of its language part."""
    small = {
        "hidden_size": known.hidden,
        "num_hidden_layers": known.layers,
        "num_layers": known.layers,
        "vocab_size": known.vocab,
        "q_lora_rank": known.q_lora_rank,
        "intermediate_size": known.intermediate,
        "ffn_hidden_size": known.intermediate,
        "moe_intermediate_size": EXPERT_WIDTH,
        "expert_ffn_hidden_size": EXPERT_WIDTH,
    }
    config.pop("quantization_config", None)
    if "linear_attn_config" in config:
        kinds = {"kda_layers": range(1, known.layers + 1, 2), "full_attn_layers": range(2, known.layers + 1, 2)}
        sizes = {"num_heads": LINEAR_HEADS, "head_dim": LINEAR_DIM}
        config["linear_attn_config"] |= {name: list(layers) for name, layers in kinds.items()} | sizes
        config["torch_dtype"] = known.linear_dtype
        small |= {"routed_expert_hidden_size": known.hidden // 2, "attn_res_block_size": 2, "pad_token_id": 0}
    if known.heads is not None:
        small |= {"num_attention_heads": known.heads, "num_key_value_heads": known.heads}
    if "llama_4_scaling" in config:
        small |= {
            # So that short prompts are scaled, too: 64 tokens by 1.07, 7,000 by 1.47.
            "llama_4_scaling": {"original_max_position_embeddings": 64, "beta": 0.1},
            # Under Mistral's name SGLang computes the same in BF16, whatever --dtype is.
            "architectures": ["DeepseekV3ForCausalLM"],
            "first_k_dense_replace": 1,
        }
    config |= {field: size for field, size in small.items() if config.get(field) is not None}
    return {**config, **TOKENS, "num_nextn_predict_layers": 0}


def known_weights(known: Known) -> dict[str, torch.Tensor]:
    """Random BF16 weights under their Hugging Face names: attention and dense MLPs as `checkpoint.weights` makes them,
    and mixtures of experts beside or in place of these."""
    config = {**language_part(known_config(known))}
    two = config["model_type"] == "longcat_flash"  # attentions a layer, each with an MLP, and experts besides
    dense = weights(
        Settings(
            layers=known.layers * (2 if two else 1),
            heads=config["num_attention_heads"],
            hidden=known.hidden,
            intermediate=known.intermediate,
            q_lora_rank=config["q_lora_rank"] or 0,
            vocab=known.vocab,
            max_positions=config["max_position_embeddings"],
            seed=known.seed,
            config_only=False,
        ),
        nope_dim=config["qk_nope_head_dim"],
        v_dim=config["v_head_dim"],
    )
    generator = torch.Generator().manual_seed(known.seed + 1)
    if two:
        tensors = {_in_pairs(name): tensor for name, tensor in dense.items()}
        for layer in range(known.layers):
            tensors |= _experts(f"model.layers.{layer}.mlp", "router.classifier", "router", config, generator)
        return tensors
    if "linear_attn_config" in config:
        return _beside_linear_layers(dense, config, generator)
    if "llama_4_scaling" in config:
        # Its YaRN and its scaled queries make attention twice as sharp as DeepSeek-V3's, so that BF16's rounding alone
        # changes first tokens.
        dense = {name: tensor / 2 if "q_b_proj" in name else tensor for name, tensor in dense.items()}
    first = config["first_k_dense_replace"]
    sparse = {f"model.layers.{layer}.mlp" for layer in range(first, known.layers)}
    tensors = {name: tensor for name, tensor in dense.items() if not name.startswith(tuple(sparse))}
    for prefix in sorted(sparse):
        tensors |= _experts(prefix, "gate", "gate", config, generator)
    return tensors


def _in_pairs(name: str) -> str:
    """The name of a tensor of every second of DeepSeek's layers as the second half of LongCat-Flash's."""
    if not name.startswith("model.layers."):
        return name
    _, _, layer, part, *rest = name.split(".")
    pair, half = divmod(int(layer), 2)
    return ".".join(["model.layers", str(pair), "mlps" if part == "mlp" else part, str(half), *rest])


def _beside_linear_layers(
    dense: dict[str, torch.Tensor], config: dict[str, Any], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Kimi-Linear's: linear attention (KDA) in place of some layers' own, and experts in place of all MLPs but the
    first ones. Kimi-K3's has gates with all columns, one on MLA's result, residuals that are mixed, and experts of
    another width than the rest."""
    hidden, linear = config["hidden_size"], config["linear_attn_config"]
    heads, dim = linear["num_heads"], linear["head_dim"]
    full_rank, latent = linear.get("use_full_rank_gate"), config.get("routed_expert_hidden_size")
    replaced = {f"model.layers.{layer - 1}.self_attn" for layer in linear["kda_layers"]}
    first = config["first_k_dense_replace"]
    sparse = {f"model.layers.{layer}.mlp": layer for layer in range(first, config["num_hidden_layers"])}
    tensors = {name: tensor for name, tensor in dense.items() if not name.startswith((*replaced, *sparse))}

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=generator) / math.sqrt(columns)).to(torch.bfloat16)

    for prefix in sorted(replaced):
        for name in ("q", "k", "v"):
            tensors[f"{prefix}.{name}_proj.weight"] = matrix(heads * dim, hidden)
            window = linear["short_conv_kernel_size"]
            tensors[f"{prefix}.{name}_conv1d.weight"] = torch.randn(heads * dim, 1, window, generator=generator) / 2
        for name in ("f",) if full_rank else ("f", "g"):
            tensors[f"{prefix}.{name}_a_proj.weight"] = matrix(dim, hidden)
            tensors[f"{prefix}.{name}_b_proj.weight"] = matrix(heads * dim, dim)
        if full_rank:
            tensors[f"{prefix}.g_proj.weight"] = matrix(heads * dim, hidden)
        out = 2 * matrix(hidden, heads * dim)
        out[0] = 0  # the first element is the same for all tokens, see checkpoint.weights
        tensors |= {
            f"{prefix}.A_log": torch.rand(1, 1, heads, 1, generator=generator),
            f"{prefix}.dt_bias": torch.randn(heads * dim, generator=generator) - 3,  # what is kept lasts some 20 tokens
            f"{prefix}.b_proj.weight": matrix(heads, hidden),
            f"{prefix}.o_norm.weight": torch.ones(dim, dtype=torch.bfloat16),
            f"{prefix}.o_proj.weight": out,
        }
    if config.get("mla_use_output_gate"):
        for layer in linear["full_attn_layers"]:
            values = config["num_attention_heads"] * config["v_head_dim"]
            tensors[f"model.layers.{layer - 1}.self_attn.g_proj.weight"] = matrix(values, hidden)
    if config.get("attn_res_block_size"):
        parts = ("self_attention", "mlp")
        mixed = [f"model.layers.{layer}.{part}" for layer in range(config["num_hidden_layers"]) for part in parts]
        for prefix in [*mixed, "model.output_attn"]:
            tensors[f"{prefix}_res_norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
            tensors[f"{prefix}_res_proj.weight"] = matrix(1, hidden)
    for layer in sparse.values() if latent else ():
        prefix = f"model.layers.{layer}.mlp"
        tensors |= {
            f"{prefix}.routed_expert_down_proj.weight": matrix(latent, hidden),
            f"{prefix}.routed_expert_norm.weight": torch.ones(latent, dtype=torch.bfloat16),
            # What the chosen experts give is normed, so that it is large beside the rest, and BF16's rounding, which
            # changes the choice, would change most tokens.
            f"{prefix}.routed_expert_up_proj.weight": matrix(hidden, latent) / 8,
        }
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    counted = config | {"n_routed_experts": config["num_experts"], "n_shared_experts": config["num_shared_experts"]}
    for layer in sparse.values():
        prefix = f"model.layers.{layer}.{'mlp' if latent else 'block_sparse_moe'}"
        for name, tensor in _experts(prefix, "gate", "gate", counted, generator, latent).items():
            *parts, kind, weight = name.split(".")
            own = names.get(kind, kind) if "experts" in parts else kind
            tensors[".".join([*parts, own, weight])] = tensor
    return tensors


def _experts(
    prefix: str,
    gate: str,
    bias: str,
    config: dict[str, Any],
    generator: torch.Generator,
    latent: int | None = None,
) -> dict[str, torch.Tensor]:
    """A mixture of experts: the router's product `gate` and its correction in `bias`, experts, those shared by all.

    Args:
        latent: what the experts take and give, where that is not the hidden state.
    """
    hidden, width, routed = config["hidden_size"], EXPERT_WIDTH, config["n_routed_experts"]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        values = torch.randn(rows, columns, generator=generator) / math.sqrt(columns)
        return values.to(torch.bfloat16)

    targets = routed + config.get("zero_expert_num", 0)
    tensors = {
        f"{prefix}.{gate}.weight": matrix(targets, hidden),
        f"{prefix}.{bias}.e_score_correction_bias": torch.zeros(targets),
    }
    shared = config.get("n_shared_experts", 0)
    for expert in [*(f"experts.{index}" for index in range(routed)), *["shared_experts"][:shared]]:
        inner = width * shared if expert == "shared_experts" else width
        size = hidden if expert == "shared_experts" else latent or hidden
        down = matrix(size, inner)
        down[0] = 0  # the first element is the same for all tokens, see checkpoint.weights
        tensors |= {
            f"{prefix}.{expert}.gate_proj.weight": matrix(inner, size),
            f"{prefix}.{expert}.up_proj.weight": matrix(inner, size),
            f"{prefix}.{expert}.down_proj.weight": down,
        }
    return tensors
