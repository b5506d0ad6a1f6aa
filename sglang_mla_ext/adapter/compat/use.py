"""One thing that this package uses of SGLang, and the list of them for a release; checked by contract.py, see there.

Imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sglang_mla_ext.adapter.compat.reads import Read


@dataclass(frozen=True)
class Use:
    """One thing used of SGLang.

    Attributes:
        path: dotted path to it.
        kind: what it has to be: `class`, `function`, `attribute`, or `list` (an attribute that holds a list).
        why: what for.
        params: the leading parameter names that we rely on, in order; a class's are its constructor's.
        keywords: further parameters that we pass by name.
    """

    path: str
    kind: str
    why: str
    params: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True)
class Release:
    """One column of the contract: what is used of one line of releases, and what that reads of a backend.

    Attributes:
        fields_of: see SourceTree.
    """

    uses: tuple[Use, ...]
    read_of_backend: tuple[Read, ...]
    fields_of: Mapping[str, str] = field(default_factory=dict, hash=False)


def function(path: str, params: str, why: str, keywords: str = "") -> tuple[Use]:
    """A function below `sglang.srt`; parameters as words."""
    return (Use(f"sglang.srt.{path}", "function", why, tuple(params.split()), tuple(keywords.split())),)


def attributes(owner: str, names: str, why: str, kind: str = "attribute") -> tuple[Use, ...]:
    """Attributes, as words, of a class or module below `sglang.srt`."""
    return tuple(Use(f"sglang.srt.{owner}.{name}", kind, why) for name in names.split())


def methods(owner: str, names: str, why: str) -> tuple[Use, ...]:
    """Methods of such a class that take no argument."""
    return tuple(Use(f"sglang.srt.{owner}.{name}", "function", why, ("self",)) for name in names.split())
