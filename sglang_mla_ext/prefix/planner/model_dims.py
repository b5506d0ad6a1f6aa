"""The dimensions of an MLA model, from its configuration."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_mla_ext.configs import read_config


class UnknownModelError(ValueError):
    """Model that is not known, or whose configuration lacks something; the message says what is missing."""


def language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A model's configuration with what is said of its language model: images' models say that under `text_config`."""
    rest = dict(config)
    text = rest.pop("text_config", None)
    return {**rest, **text} if isinstance(text, Mapping) else config


def number(config: Mapping[str, Any], *keys: str) -> int:
    """Return the first of these that a model's configuration has. Raises UnknownModelError: it has none of them."""
    for key in keys:
        if config.get(key) is not None:
            return int(config[key])
    raise UnknownModelError(f"not the whole configuration of an MLA model: it has no {' or '.join(keys)}")


def attention_layers(config: Mapping[str, Any]) -> int:
    """Layers with MLA; LongCat's blocks have two each. Raises UnknownModelError: there are none."""
    blocks = number(config, "num_hidden_layers", "num_layers")
    if "expert_ffn_hidden_size" in config:
        layers = 2 * blocks
    elif linear := config.get("linear_attn_config"):  # layers are numbered from 1
        layers = sum(layer <= blocks for layer in linear["full_attn_layers"])
    else:
        layers = blocks
    if layers < 1:
        raise UnknownModelError("it has no layers with MLA")
    return layers


@dataclass(frozen=True)
class ModelDims:
    """Dimensions of an MLA model that attention depends on.

    Attributes:
        num_layers: attention layers; more than the decoder blocks where a block has two.
        num_heads: query heads of the whole model, before tensor parallelism.
    """

    num_layers: int
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    hidden_size: int

    @classmethod
    def of(cls, name_or_folder: str | Path) -> ModelDims:
        """Read a shipped model by name (`deepseek-v3`), or the folder with a Hugging Face `config.json`."""
        folder = Path(name_or_folder)
        if folder.is_dir():
            return cls.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        return cls.from_config(read_config("checkpoints", str(name_or_folder))["config"])

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelDims:
        """Take the dimensions from a model's configuration, as on Hugging Face.

        Raises:
            UnknownModelError: the model is not an MLA model.
        """
        config = language_part(config)
        get = functools.partial(number, config)
        return cls(
            num_layers=attention_layers(config),
            num_heads=get("num_attention_heads"),
            kv_lora_rank=get("kv_lora_rank"),
            qk_nope_head_dim=get("qk_nope_head_dim"),
            qk_rope_head_dim=get("qk_rope_head_dim"),
            v_head_dim=get("v_head_dim"),
            hidden_size=get("hidden_size"),
        )

    @property
    def latent_dim(self) -> int:
        """Elements of a latent row: 576 for DeepSeek-V3."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def absorb_macs(self) -> int:
        """MACs of absorb per query row, head and key: 1088 for DeepSeek-V3."""
        return self.latent_dim + self.kv_lora_rank

    @property
    def naive_macs(self) -> int:
        """MACs of naive per query row, head and key: 320 for DeepSeek-V3."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim + self.v_head_dim
