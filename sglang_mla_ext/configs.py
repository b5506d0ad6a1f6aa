"""Reads the configurations that the package ships, and files of the same form that a user names.

They are data: `models/`, `gpus/` and `workloads/` in the folder `configs/`, installed inside the package. What they
mean is the business of whoever asks (prefix/gpu_rates.py, model_dims.py). Imports neither torch nor SGLang.

The folder has no `__init__.py`, so `sglang_mla_ext.configs` is this module and the folder beside it is only data.
"""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

FALLBACK_GPU = "h100"
"""Name of the rates that stand in for those of a GPU without a configuration."""


def config_names(kind: str) -> list[str]:
    """Names of the shipped configurations of a kind: `gpus`, `models` or `workloads`."""
    return sorted(entry.name.removesuffix(".json") for entry in _folder(kind).iterdir() if entry.name.endswith(".json"))


def read_config(kind: str, name: str) -> dict[str, Any]:
    """One shipped configuration, `configs/{kind}/{name}.json`.

    Raises:
        ValueError: there is no such configuration; the message lists those that exist.
    """
    if name not in (known := config_names(kind)):
        raise ValueError(f"no configuration {name!r} in {kind}; there are: {', '.join(known)}")
    config: dict[str, Any] = json.loads((_folder(kind) / f"{name}.json").read_text(encoding="utf-8"))
    return config


def read_config_or_file(kind: str, name_or_path: str | Path) -> dict[str, Any]:
    """A shipped configuration by its name, or a JSON file by a path that ends in `.json`.

    Raises:
        ValueError: there is no such configuration; the message lists those that exist.
        OSError: the file cannot be read.
    """
    path = Path(name_or_path)
    if path.suffix != ".json":
        return read_config(kind, str(name_or_path))
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return config


def gpu_config_of(device_name: str) -> str | None:
    """Name of the shipped rates for a device, by the name that torch or the driver gives it ("NVIDIA H200", "cpu");
    None if there are none.

    Whole words are compared, so that an H200 is not taken for an H20.
    """
    words = set(device_words(device_name))
    known = (name for name in config_names("gpus") if words.intersection(read_config("gpus", name)["device_words"]))
    return next(known, None)


def device_words(device_name: str) -> list[str]:
    """The words of a device's name, in lower case."""
    return [word.lower() for word in re.split(r"[^A-Za-z0-9]+", device_name) if word]


def _folder(kind: str) -> Traversable:
    return files("sglang_mla_ext") / "configs" / kind
