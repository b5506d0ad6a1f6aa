"""The matrix products of a model's forward pass, from its configuration: weights, how they are split, and what a batch
touches of them.

A product multiplies a batch's rows by weights `[outputs, inputs]`, in so many layers. Attention itself is elsewhere
(step.py); that of the absorbed form, by `w_kc` and `w_vc` (the halves of `kv_b_proj`), is here.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_mla_ext.configs import config_names, did_you_mean, read_config
from sglang_mla_ext.kernels.sizes import LATENT_DIMS  # plain Python
from sglang_mla_ext.predict import linear as linear_layers
from sglang_mla_ext.prefix.planner.model_dims import UnknownModelError, attention_layers, language_part, number

FP8_BYTES = 1 + 4 / 128**2  # a float32 scale for a block of 128 x 128, where none is named
BF16_BYTES = 2.0
DTYPES = {"bf16": BF16_BYTES, "fp8_e4m3": FP8_BYTES}
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk")
"""Names that models' configurations have for the number of experts that a row passes."""


FP4_WEIGHTS = "FP4 weights are for Blackwell GPUs, and were never run with hybrid_mla: use the FP8 checkpoint"


@dataclass(frozen=True)
class Product:
    """One kind of matrix product.

    Attributes:
        kind: `attention` or `linear` (split by heads, whole for what heads share), `dense`, `experts` or `head`.
        weights: elements in one layer, of all GPUs; of one expert for `experts`.
        layers: layers that have it.
        split: whether tensor-parallel ranks share it; what comes before the heads is whole on each.
        element_bytes: of the checkpoint, scales included.
        experts: routed experts of a layer; 0 for what every row passes.
        chosen: experts that a row passes; with experts that do nothing fewer than the router chooses.
    """

    name: str
    kind: str
    weights: int
    layers: int
    split: bool
    element_bytes: float
    experts: int = 0
    chosen: float = 0.0

    def touched(self, rows: int) -> float:
        """Elements of a layer that a batch reads: of all GPUs, and of experts those that at least one row chose, if
        each row chose any of them alike.

        The expected number of distinct experts among `experts`, when `rows` rows choose `chosen` each without
        repetition.
        """
        if not self.experts:
            return float(self.weights)
        return self.weights * self.experts * (1 - (1 - self.chosen / self.experts) ** rows)

    def macs(self, rows: int) -> float:
        """MACs of a layer, of all GPUs."""
        return float(rows * self.weights * (self.chosen if self.experts else 1))

    @property
    def of_heads(self) -> bool:
        """Return whether the ranks that share a request's heads share the product, for their own requests alone."""
        return self.kind in ("attention", "linear")

    @property
    def stored(self) -> int:
        """Elements of all layers, of all GPUs."""
        return self.weights * max(self.experts, 1) * self.layers


def read_model(name_or_path: str) -> Mapping[str, Any]:
    """Read a model's Hugging Face configuration, of its language part.

    Args:
        name_or_path: a shipped checkpoint's name (`deepseek-v3`), or its name on Hugging Face, with or without its
            owner, in any case; or a `config.json`, or the folder with one.
    Raises:
        UnknownModelError: there is no such model, or it has layers that nothing is known of.
    """
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UnknownModelError(f"{path} cannot be read: {error}") from None
    else:
        config = _shipped(name_or_path)
    if not isinstance(config, Mapping):
        raise UnknownModelError(f"{path} is not a model's configuration")
    config = language_part(config)
    _check_supported(config)
    return config


def _check_supported(config: Mapping[str, Any]) -> None:
    """Refuse models that a launch refuses, too, by what their configuration says. Raises UnknownModelError."""
    if config.get("index_topk"):
        raise UnknownModelError("models with sparse attention (index_topk) are not supported")
    rank, rope = LATENT_DIMS
    sizes = config.get("kv_lora_rank", rank), config.get("qk_rope_head_dim", rope)
    if sizes != LATENT_DIMS:
        raise UnknownModelError(
            f"latent rows of {sizes[0]} + {sizes[1]} elements are not supported: kernels read {rank} + {rope}"
        )


def model_names() -> list[str]:
    """Names of the shipped models whose steps are predicted: not those that only draft, nor those that are refused."""
    names = [name for name in config_names("checkpoints") if "eagle" not in name]
    return [name for name in names if "refused" not in read_config("checkpoints", name)]


def is_fp4(name: str) -> bool:
    """Return whether a checkpoint's name indicates weights in 4-bit floating point."""
    return re.search(r"(?i)(?<![a-z])(nv|mx)?fp4(?![a-z0-9])", name.rstrip("/").rpartition("/")[2]) is not None


@functools.cache
def _shipped(name: str) -> Mapping[str, Any]:
    if is_fp4(name):
        raise UnknownModelError(f"{name} is not supported: {FP4_WEIGHTS}")
    asked, predicted, known = name.lower(), model_names(), list[str]()
    for shipped in config_names("checkpoints"):
        checkpoint = read_config("checkpoints", shipped)
        names = [each.lower() for each in checkpoint["names"]]
        if asked in (of_this := (shipped, *names, *(each.partition("/")[2] for each in names))):
            if (why := checkpoint.get("refused")) is not None:
                raise UnknownModelError(f"{name} is not supported: {why}")
            if shipped in predicted:
                config: Mapping[str, Any] = checkpoint["config"]
                return config
        known += of_this if shipped in predicted else ()
    meant = did_you_mean(asked, {each: each for each in known})
    raise UnknownModelError(
        f"no model {name!r}.{meant} Known are {', '.join(predicted)}; or give a path to a config.json"
    )


def products(config: Mapping[str, Any], dtype: str = "auto") -> tuple[Product, ...]:
    """Return all products of a forward pass.

    Args:
        config: of a model with MLA, as `read_model` returns it.
        dtype: of the linear layers' weights, one of `DTYPES`; `auto` is what the checkpoint says.
    Raises:
        UnknownModelError: a dimension is missing.
    """
    linear, of_experts = _element_bytes(config, dtype)
    get = functools.partial(number, config)
    hidden, heads, rank = get("hidden_size"), get("num_attention_heads"), get("kv_lora_rank")
    nope, rope, v_dim = get("qk_nope_head_dim"), get("qk_rope_head_dim"), get("v_head_dim")
    if linear_layers.is_linear(config) and not config["linear_attn_config"].get("kda_layers"):
        raise UnknownModelError("it has layers with linear attention of a kind that nothing is known of here")
    blocks = get("num_hidden_layers", "num_layers")
    # LongCat's blocks have two attentions and two dense MLPs each, and experts beside them.
    twice = "expert_ffn_hidden_size" in config
    layers = attention_layers(config)
    q_rank = config.get("q_lora_rank")

    def attention(name: str, weights: int, split: bool = True, element_bytes: float = linear) -> Product:
        return Product(name, "attention", weights, layers, split, element_bytes)

    found = []
    if q_rank:
        found.append(attention("q_a, kv_a", hidden * (q_rank + rank + rope), split=False))
        found.append(attention("q_b", q_rank * heads * (nope + rope)))
    else:
        found.append(attention("kv_a", hidden * (rank + rope), split=False))
        found.append(attention("q", hidden * heads * (nope + rope)))
    # SGLang keeps the halves of kv_b_proj in BF16 for the absorbed form, whatever the checkpoint has.
    found.append(attention("w_kc", heads * nope * rank, element_bytes=BF16_BYTES))
    found.append(attention("w_vc", heads * v_dim * rank, element_bytes=BF16_BYTES))
    found.append(attention("o", heads * v_dim * hidden))
    if config.get("mla_use_output_gate"):
        found.append(attention("output gate", heads * v_dim * hidden))
    if linear_layers.is_linear(config):
        of_linear = linear_layers.layers(config)
        for name, weights, split in linear_layers.matrices(config):
            found.append(Product(name, "linear", weights, of_linear, split, linear))

    experts = config.get("n_routed_experts") or config.get("num_experts") or 0
    dense_first = blocks if not experts else int(config.get("first_k_dense_replace") or 0)
    moe_layers = blocks if twice else len(range(dense_first, blocks, int(config.get("moe_layer_freq") or 1)))
    dense_layers = layers if twice else blocks - moe_layers
    if dense_layers:
        width = get("intermediate_size", "ffn_hidden_size")
        found += _mlp("dense", hidden * width, dense_layers, linear)
    if experts and moe_layers:
        width = get("moe_intermediate_size", "expert_ffn_hidden_size")
        idle = int(config.get("zero_expert_num") or 0)
        chosen = get(*CHOSEN) * experts / (experts + idle)
        found.append(Product("router", "dense", hidden * (experts + idle), moe_layers, False, BF16_BYTES))
        latent = int(config.get("routed_expert_hidden_size") or hidden)
        if latent != hidden:
            each = 2 * hidden * latent
            found.append(Product("to and from experts", "dense", each, moe_layers, False, BF16_BYTES))
        for name, parts in (("experts, gate and up", 2), ("experts, down", 1)):
            each = parts * latent * width
            found.append(Product(name, "experts", each, moe_layers, True, of_experts, experts, chosen))
        if shared := _shared_experts(config):
            found += _mlp("shared expert", hidden * width * shared, moe_layers, linear)
    found.append(Product("lm_head", "head", hidden * get("vocab_size"), 1, True, BF16_BYTES))
    return tuple(found)


def all_layers(config: Mapping[str, Any]) -> int:
    """Layers with attention of any kind."""
    return attention_layers(config) + (linear_layers.layers(config) if linear_layers.is_linear(config) else 0)


def expert_layers(products: Iterable[Product]) -> int:
    """Layers whose MLP is experts."""
    return max((product.layers for product in products if product.experts), default=0)


def embedding_bytes(config: Mapping[str, Any]) -> float:
    """Bytes of the embedding, which a step reads a few rows of; none of its own where the head shares it."""
    if config.get("tie_word_embeddings"):
        return 0.0
    return float(BF16_BYTES * config["hidden_size"] * config["vocab_size"])


def mlp_width(config: Mapping[str, Any]) -> int:
    """Elements that a row has between an MLP's halves: of the dense one, or of all experts that it passes."""
    if not (config.get("n_routed_experts") or config.get("num_experts")):
        return int(config.get("intermediate_size") or config["ffn_hidden_size"])
    width = config.get("moe_intermediate_size") or config["expert_ffn_hidden_size"]
    return int(width * (number(config, *CHOSEN) + _shared_experts(config)))


def _shared_experts(config: Mapping[str, Any]) -> int:
    return int(config.get("n_shared_experts") or config.get("num_shared_experts") or 0)


def _mlp(name: str, each: int, layers: int, element_bytes: float) -> list[Product]:
    return [
        Product(f"{name}, gate and up", "dense", 2 * each, layers, True, element_bytes),
        Product(f"{name}, down", "dense", each, layers, True, element_bytes),
    ]


def _element_bytes(config: Mapping[str, Any], dtype: str) -> tuple[float, float]:
    """Bytes of an element of a linear layer, and of an expert's, scales included.

    Raises:
        UnknownModelError: a quantisation that is not known here.
    """
    if dtype != "auto":
        return DTYPES[dtype], DTYPES[dtype]
    quantisation = config.get("quantization_config")
    if not quantisation:
        return BF16_BYTES, BF16_BYTES
    method = quantisation.get("quant_method")
    if method == "fp8":
        rows, columns = quantisation.get("weight_block_size") or (128, 128)
        return (1 + 4 / (rows * columns),) * 2
    if method == "compressed-tensors":  # experts alone, with a scale a group, in BF16 where it does not say e8m0
        weights = next(iter(quantisation["config_groups"].values()))["weights"]
        scale_bytes = 1 if weights.get("scale_dtype") == "torch.uint8" else BF16_BYTES
        return BF16_BYTES, weights["num_bits"] / 8 + scale_bytes / weights["group_size"]
    raise UnknownModelError(f"weights quantised by {method!r} are not known here: give --dtype")
