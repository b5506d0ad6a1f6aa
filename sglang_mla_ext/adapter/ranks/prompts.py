"""Properties of requests that follow from their prompts alone, which are the same on all ranks.

Trees and slots differ between ranks with requests of their own, and what is expanded may differ after a failure on one
of those that divide the heads.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.prefix.sharded.names import Names, chunk_names

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

Made = TypeVar("Made")


class PromptMemo(Generic[Made]):
    """Memo of what is made of each request's prompt, as long as SGLang has the request."""

    def __init__(self, make: Callable[[Req], Made]) -> None:
        self._make = make
        self._made: WeakKeyDictionary[Req, tuple[Any, Made]] = WeakKeyDictionary()  # with the prompt

    def __call__(self, req: Req) -> Made:
        prompt, made = self._made.get(req, (None, None))
        if made is None or prompt is not req.origin_input_ids:  # an abort replaces it
            made = self._make(req)
            self._made[req] = req.origin_input_ids, made
        return made


def is_tokens_alone(req: Req) -> bool:
    """Return whether equal tokens of a request have equal keys."""
    return req.input_embeds is None and req.positional_embed_overrides is None


class PromptNames:
    """Names of requests' prompts, chunk by chunk."""

    def __init__(self, key: bytes, chunk_tokens: int) -> None:
        """
        Args:
            key: of the names, the same on all ranks.
        """

        def names_of(req: Req) -> Names:
            return chunk_names(req.origin_input_ids, installed.namespace(req), chunk_tokens, key)

        self._names = PromptMemo(names_of)

    def __call__(self, req: Req) -> Names:
        return self._names(req) if is_tokens_alone(req) else ()


class Beginnings:
    """Compares how requests' prompts begin."""

    def __init__(self, tokens: int, requests: int) -> None:
        """
        Args:
            tokens: of a beginning; a shorter prompt is like no other.
            requests: the fewest that can pay if they share.
        """
        self._tokens, self._requests = tokens, requests
        self._beginnings = PromptMemo(self._beginning)

    def some_are_alike(self, reqs: Sequence[Req]) -> bool:
        """Return whether so many of these requests begin like another one; True also where tokens do not tell.

        A plan pays for its launches by all of its groups together, so small ones count as well.
        """
        if not all(map(is_tokens_alone, reqs)):
            return True
        counts = Counter(filter(None, map(self._beginnings, reqs)))
        return sum(count for count in counts.values() if count > 1) >= self._requests

    def _beginning(self, req: Req) -> tuple[Hashable, ...]:
        prompt = req.origin_input_ids
        if len(prompt) < self._tokens:
            return ()
        return array("q", prompt[: self._tokens]).tobytes(), installed.namespace(req)  # bytes remember their hash
