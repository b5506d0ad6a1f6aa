"""Whether requests begin alike, by their prompts alone.

Ranks that divide the heads have the same requests, but what is expanded, and with it what a step shares, may differ
after a failure on one of them. What they must decide alike without asking each other follows from the prompts.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from sglang_mla_ext.adapter.compat import installed

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class Beginnings:
    """Compares the beginnings of prompts; remembers those of the requests that SGLang still has."""

    def __init__(self, tokens: int, requests: int) -> None:
        """
        Args:
            tokens: of a beginning; a shorter prompt is like no other.
            requests: that have to begin alike.
        """
        self._tokens, self._requests = tokens, requests
        self._known: WeakKeyDictionary[Req, tuple[Any, Hashable]] = WeakKeyDictionary()

    def some_are_alike(self, reqs: Sequence[Req]) -> bool:
        """Return whether so many of these requests begin alike; True also where tokens do not tell."""
        if any(req.input_embeds is not None or req.positional_embed_overrides is not None for req in reqs):
            return True
        counts = Counter(filter(None, map(self._beginning, reqs)))
        return max(counts.values(), default=0) >= self._requests

    def _beginning(self, req: Req) -> Hashable:
        prompt, beginning = self._known.get(req, (None, None))
        if prompt is not req.origin_input_ids:  # an abort replaces it
            prompt = req.origin_input_ids
            ids = array("q", prompt[: self._tokens]).tobytes() if len(prompt) >= self._tokens else None
            beginning = None if ids is None else (ids, installed.namespace(req))  # bytes remember their hash
            self._known[req] = prompt, beginning
        return beginning
