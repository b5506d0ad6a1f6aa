"""The dimensions of an MLA model, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_mla_ext.configs import read_config_or_file


def language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A model's configuration with what is said of its language model: images' models say that under `text_config`."""
    rest = dict(config)
    text = rest.pop("text_config", None)
    return {**rest, **text} if isinstance(text, Mapping) else config


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
    def from_json(cls, name_or_path: str | Path) -> ModelDims:
        """Read a shipped model by name (`deepseek-v3`), or a Hugging Face `config.json`, or the folder with one."""
        path = Path(name_or_path)
        if path.is_dir():
            path = path / "config.json"
        return cls.from_config(read_config_or_file("models", path))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelDims:
        """Take the dimensions from a shipped model configuration or from a Hugging Face one.

        Raises:
            ValueError: the model is not an MLA model.
        """
        config = language_part(config)

        def get(*keys: str) -> int:
            for key in keys:
                if config.get(key) is not None:
                    return int(config[key])
            raise ValueError(f"not an MLA model's configuration: it has no {' or '.join(keys)}")

        return cls(
            num_layers=get("num_attention_layers", "num_hidden_layers", "num_layers"),
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
