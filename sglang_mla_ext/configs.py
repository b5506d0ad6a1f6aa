"""Reads the configurations that the package ships, and files of the same form that a user names.

They are data: `checkpoints/`, `gpus/` and `workloads/` in the folder `configs/`, installed inside the package. What
they mean is the business of whoever asks (prefix/planner/gpu_rates.py, model_dims.py). Imports neither torch nor
SGLang.

The folder has no `__init__.py`, so `sglang_mla_ext.configs` is this module and the folder beside it is only data.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

FALLBACK_GPU = "h100"
"""Name of the rates that stand in for those of a GPU without a configuration."""


def config_names(kind: str) -> list[str]:
    """Names of the shipped configurations of a kind: `checkpoints`, `gpus` or `workloads`."""
    return sorted(entry.name.removesuffix(".json") for entry in _folder(kind).iterdir() if entry.name.endswith(".json"))


def read_config(kind: str, name: str) -> dict[str, Any]:
    """Read a shipped configuration, `configs/{kind}/{name}.json`.

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
    None if there are none. Of several that fit, the one that names the device most closely."""
    fitting = {
        name: device_fits(device_name, read_config("gpus", name)["device_words"]) for name in config_names("gpus")
    }
    best = max(fitting, key=fitting.__getitem__)
    return best if fitting[best] else None


def device_fits(device_name: str, names: Iterable[str]) -> int:
    """Return how many words of a device's name the closest of these names has; 0 where none fits.

    Whole words are compared, so that an H200 is not taken for an H20. A name of several words ("h20-3e") fits where the
    device has them all.
    """
    has = set(device_words(device_name))
    return max((len(words) for name in names if has.issuperset(words := device_words(name))), default=0)


def device_words(device_name: str) -> list[str]:
    """The words of a device's name, in lower case."""
    return [word.lower() for word in re.split(r"[^A-Za-z0-9]+", device_name) if word]


def did_you_mean(asked: str, names: Mapping[str, str], cutoff: float = 0.75) -> str:
    """Return " Did you mean X?" for a name that nobody knows, or nothing where no known one is like it.

    Args:
        names: what is compared -> what is shown for it.
    """
    close = difflib.get_close_matches(asked, names, n=1, cutoff=cutoff)
    return f" Did you mean {names[close[0]]}?" if close else ""


def _folder(kind: str) -> Traversable:
    return files("sglang_mla_ext") / "configs" / kind
