"""Routing of prompts to data-parallel ranks: prompts that begin alike stay together, until a rank is too busy.

Every rank has a prefix cache and groups of its own, so requests that share a prompt gain little when they are dealt out
in turn: each rank computes, keeps and expands the same prefix, for a part of the group.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

SLACK = 0.125
"""Share by which a rank may have more requests than the mean, for the sake of a prompt. With DP attention the ranks
wait for each other in every step."""

LEAST_SLACK = 2
"""Requests that a rank may have more than the least busy one in any case."""

PAGE_TOKENS = 64
"""Tokens of a page, the unit in which prompts are compared, whatever SGLang's page size is."""

MAX_PAGES = 1 << 18
"""Pages that are remembered, of all ranks together: 16.8 million tokens."""

_FACTORS = np.random.default_rng(0x5EED).integers(1, 1 << 63, size=1 << 16, dtype=np.uint64) | np.uint64(1)


class PromptAffinity:
    """Remembers by 64-bit hashes which pages each rank was given.

    The hashes have no key, and a client can make prompts that collide. That costs balance, never answers: prompts are
    sent to one rank, whose own tree compares tokens. Where a name decides whose keys are read, it has a key
    (prefix/sharded/names.py).
    """

    def __init__(self, ranks: int, *, min_prefix_len: int, max_pages: int = MAX_PAGES) -> None:
        """
        Args:
            ranks: how many there are.
            min_prefix_len: tokens; less in common is no reason to stay together.
            max_pages: to remember of requests that are finished; the least recently used go first.
        """
        self._ranks, self._max_pages = ranks, max_pages
        self._min_pages = -(-min_prefix_len // PAGE_TOKENS)
        # A page is known by the hash of its prompt up to its end.
        self._holders: OrderedDict[int, int] = OrderedDict()  # ranks that were given it, as bits
        self._running: dict[int, list[int]] = {}  # unfinished requests with it, of each rank
        self._requests: dict[str, tuple[int, list[int]]] = {}  # rank and pages of each unfinished request
        self.load = [0] * ranks
        """Unfinished requests of each rank."""

    @property
    def unfinished(self) -> list[str]:
        """Requests that were assigned and not finished."""
        return list(self._requests)

    def assign(self, request: str, tokens: Sequence[int], salt: str = "", rank: int | None = None) -> int:
        """Choose a rank for a request: of those that are not too busy the one with most of its prompt, then the one
        where most requests have that in common, then the least busy.

        Args:
            tokens: of the prompt.
            salt: prompts of different salts have nothing in common.
            rank: where the request goes in any case.
        """
        self.finish(request)
        pages = self._hashes(tokens, salt)
        if rank is None:
            rank = self._best_rank(pages)
        for page in reversed(pages):  # a page is never older than those behind it
            self._holders[page] = self._holders.get(page, 0) | 1 << rank
            self._holders.move_to_end(page)
            self._running.setdefault(page, [0] * self._ranks)[rank] += 1
        while len(self._holders) > self._max_pages:
            self._holders.popitem(last=False)
        self._requests[request] = rank, pages
        self.load[rank] += 1
        return rank

    def finish(self, request: str) -> None:
        """Take note that a request is finished; one that is not known is left alone."""
        rank, pages = self._requests.pop(request, (None, []))
        if rank is None:
            return
        self.load[rank] -= 1
        for page in pages:
            self._running[page][rank] -= 1
            if not any(self._running[page]):
                del self._running[page]

    def _best_rank(self, pages: list[int]) -> int:
        matched = self._matched(pages)
        most = max(min(self.load) + LEAST_SLACK, sum(self.load) / self._ranks * (1 + SLACK))

        def merit(rank: int) -> tuple[int, int, int]:
            common = self._running.get(pages[matched[rank] - 1]) if matched[rank] else None
            return -matched[rank], -common[rank] if common else 0, self.load[rank]

        return min((rank for rank in range(self._ranks) if self.load[rank] <= most), key=merit)

    def _matched(self, pages: list[int]) -> list[int]:
        """Return how many pages at the prompt's beginning each rank was given before; 0 where those are too few."""
        matched = [0] * self._ranks
        for index, page in enumerate(pages):
            holders = self._holders.get(page, 0)
            if not holders:
                break
            for rank in range(self._ranks):
                if holders >> rank & 1 and matched[rank] == index:
                    matched[rank] = index + 1
        return [count if count >= self._min_pages else 0 for count in matched]

    def _hashes(self, tokens: Sequence[int], salt: str) -> list[int]:
        """Return hashes of the prompt, one for its tokens up to the end of each page."""
        count = min(len(tokens) // PAGE_TOKENS, self._max_pages)
        if not count:
            return []
        paged = np.asarray(tokens[: count * PAGE_TOKENS], np.int64).astype(np.uint64).reshape(count, -1)
        start = np.uint64(hash(salt) & ((1 << 64) - 1))
        with np.errstate(over="ignore"):
            of_page = (paged + np.uint64(1)) @ _FACTORS[:PAGE_TOKENS]
            of_page ^= of_page >> np.uint64(29)  # so that a page's place does not merely scale what it adds
            place = _FACTORS[np.arange(count) % len(_FACTORS)]
            hashes: list[int] = (start + np.cumsum(of_page * place)).tolist()
        return hashes
