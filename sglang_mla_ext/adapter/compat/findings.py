"""Findings: what prevents a launch, and what to change in it. They come from launch/limits.py, and from a release's
class for flags that only this release has. Imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Remedy(NamedTuple):
    """A change of a launch line, applied by launch/remedies.py.

    Attributes:
        leave_out: flags, with their values, and environment variables.
        put_in: arguments; `{tp}` is the line's own number of tensor-parallel ranks, `{value}` that of what is left out.
    """

    leave_out: tuple[str, ...]
    put_in: tuple[str, ...] = ()


class Finding(NamedTuple):
    """Something that prevents a launch.

    Attributes:
        code: a name for programs: a flag that is not supported is its own code.
        text: the same for people, with what to change.
        remedy: what to change, where a server can do without it.
    """

    code: str
    text: str
    remedy: Remedy | None = None


def unsupported(flags: Mapping[str, bool]) -> list[Finding]:
    """Refuse those of some flags that are given: they are not supported yet."""
    return [Finding(flag, f"{flag} is not supported yet: remove it.") for flag, given in flags.items() if given]
