"""What differs between releases of SGLang, as it is for the one that is installed.

A name is looked for in the folder of the installed release, then in those before it (releases.py); the oldest has every
name.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from sglang_mla_ext.adapter.compat.contract import line
from sglang_mla_ext.adapter.compat.releases import folders


@cache
def _releases() -> list[Any]:
    """The folders of the installed release and of those before it, that one first."""
    found = folders()
    names = list(found)
    return [found[name] for name in reversed(names[: names.index(line()) + 1])]


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for release in _releases():
            if hasattr(release, name):
                return getattr(release, name)
    raise AttributeError(f"no supported release of SGLang has {name!r} in {__name__}")
