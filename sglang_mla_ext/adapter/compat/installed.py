"""What differs between releases of SGLang, as it is for the one that is installed.

Each supported line of releases has a folder here, `sglang_X_Y_Z`, with what it does otherwise than the one before; the
oldest has every name. A name is looked for in the folder of the installed release, then in those before it.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

from sglang_mla_ext.adapter.compat.contract import SUPPORTED, line


@cache
def _releases() -> list[Any]:
    """The folders of the installed release and of those before it, that one first."""
    names = list(SUPPORTED)
    names = names[: names.index(line()) + 1]
    package = __name__.rpartition(".")[0]
    return [import_module(f"{package}.sglang_{name.replace('.', '_')}") for name in reversed(names)]


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for release in _releases():
            if hasattr(release, name):
                return getattr(release, name)
    raise AttributeError(f"no supported release of SGLang has {name!r} in {__name__}")
