"""What stands in the way of a launch, and what to change in it: said by launch/limits.py, and by a release's folder of
what that release has besides. Imports nothing of SGLang.
"""

from __future__ import annotations

from typing import NamedTuple


class Remedy(NamedTuple):
    """What to leave out of a launch line and what to put in; launch/remedies.py applies it.

    Attributes:
        leave_out: flags, with their values, and environment variables.
        put_in: arguments; `{tp}` is the line's own number of tensor-parallel ranks, `{value}` that of what is left out.
    """

    leave_out: tuple[str, ...]
    put_in: tuple[str, ...] = ()


class Finding(NamedTuple):
    """Something that stands in the way.

    Attributes:
        code: what it is, for programs: a flag that is not supported is its own code.
        text: the same for people, with what to change.
        remedy: what to change, where a server can do without it.
    """

    code: str
    text: str
    remedy: Remedy | None = None


def unsupported(flag: str, given: bool) -> list[Finding]:
    """That a flag is not supported yet, where it is given."""
    return [Finding(flag, f"{flag} is not supported yet: remove it.")] if given else []
