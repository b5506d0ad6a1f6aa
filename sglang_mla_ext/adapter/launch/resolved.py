"""The type of SGLang's arguments after SGLang has decided on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from sglang_mla_ext.adapter.compat import installed

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


class ResolvedArgs:
    """`ServerArgs` as SGLang decided on them, with the same names. Only `resolved` makes one: a function that takes it
    reads no value that the user left open."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


def resolved(args: ServerArgs | ResolvedArgs) -> ResolvedArgs:
    """Return the resolved arguments of a server whose arguments SGLang has decided on."""
    return cast(ResolvedArgs, installed.resolved(args))
