"""Configurations of known models, for launch lines that name a model which is not at hand: SGLang reads the
configuration when it resolves its arguments, and would download it."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_mla_ext.configs import config_names, read_config


def known_as(model: str) -> str | None:
    """The name on Hugging Face that a model's path stands for: that name itself, or a folder of the last part of it.
    None where it is not known."""
    names = [name for config in config_names("checkpoints") for name in read_config("checkpoints", config)["names"]]
    last = _last_part(model)
    return model if model in names else next((name for name in names if _last_part(name) == last), None)


def write_config(model: str, folder: Path) -> Path:
    """Write a known model's `config.json` below `folder`.

    Returns:
        the folder that it is in, to launch with.
    """
    for config in config_names("checkpoints"):
        checkpoint = read_config("checkpoints", config)
        if model in checkpoint["names"]:
            written = folder / config
            written.mkdir(exist_ok=True)
            (written / "config.json").write_text(json.dumps(checkpoint["config"]), encoding="utf-8")
            return written
    raise KeyError(model)


def _last_part(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2].lower()
