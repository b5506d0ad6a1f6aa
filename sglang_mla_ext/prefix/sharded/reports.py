"""The reports of all ranks as the source of what requests share: chunks are known by names (names.py), so no tree is
asked. Neither what is evicted from it nor how its nodes are cut matters."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

from sglang_mla_ext.prefix.memory.pool import ExpandedPool
from sglang_mla_ext.prefix.sharded.agreement import Agreement
from sglang_mla_ext.prefix.sharded.names import Name, Names, end_of
from sglang_mla_ext.prefix.sharded.report import Report
from sglang_mla_ext.prefix.tree import SharedTree, Tree


class Reports:
    """See sharing.Source: nodes are names, of one chunk each.

    Attributes:
        tree: there is none.
        agreement: the last one; None where there is none, or everything has been forgotten since.
        forgotten: how often everything was.
    """

    def __init__(self, pool: ExpandedPool, names_of: Callable[[Any], Names], ahead: int) -> None:
        """
        Args:
            pool: of this rank.
            names_of: a request's prompt, chunk by chunk.
            ahead: chunks of a prompt that are reported behind those that all ranks had at the last agreement, as many
                as a step expands. The first report of a request has the whole prompt. Otherwise private histories of
                20,000 tokens of 128 requests would fill the report, and prompts behind them would not be shared.
        """
        self._ahead = max(ahead, 1)
        self.tree: Tree | None = None
        self._pool, self._names_of = pool, names_of
        self._paths: Sequence[Names] = ()  # of the last report
        self._report: tuple[Any, Report] | None = None  # what it was made from, and it
        self._expanded: tuple[int, list[Name]] = -1, []  # version of the pool, and names of what it has expanded
        self._distrusted: set[Hashable] = set()
        self.agreement: Agreement | None = None
        self.forgotten = 0

    # ---- before a step

    def begin(self, paths: Sequence[Names]) -> None:
        """
        Args:
            paths: `[requests]` names of the chunks of each prompt of the step whose latent rows are on this rank.
        """
        self._paths = [self._trusted(path) for path in paths]

    def report(self, rows: Sequence[int]) -> Report:
        """Return what this rank tells the others; the report of the step before, if it is the same.

        Args:
            rows: `[requests]` of each in the step.
        """
        expanded = self._expanded_names()
        had = self.agreement.had if self.agreement is not None else frozenset[Name]()
        made_from = self._paths, rows, expanded, had
        # In most steps, where only the same lists are compared.
        if self._report is None or self._report[0] != made_from:
            # By identity: a request has the same names, in the same tuple, until it ends.
            agreed_on = set(map(id, self._report[0][0])) if self._report is not None and had else ()
            paths = [_near(path, had, self._ahead) if id(path) in agreed_on else path for path in self._paths]
            self._report = made_from, Report.of(paths, rows, expanded)
        return self._report[1]

    def holder(self, name: Name) -> int | None:
        """Return a request of the last report that has a chunk's tokens, and with them all before these."""
        at = end_of(name) // self._pool.chunk_tokens - 1
        paths = enumerate(self._paths)
        return next((request for request, path in paths if len(path) > at and path[at] == name), None)

    def _trusted(self, path: Names) -> Names:
        if self._distrusted:
            cut = next((at for at, name in enumerate(path) if name in self._distrusted), len(path))
            return path[:cut]
        return path

    def _expanded_names(self) -> list[Name]:
        size, version = self._pool.chunk_tokens, self._pool.version
        if self._expanded[0] != version:
            chunks = (chunk for chunk in self._pool.chunks() if chunk.filled == (chunk.index + 1) * size)
            self._expanded = version, [chunk.node for chunk in chunks if isinstance(chunk.node, bytes)]
        return self._expanded[1]

    # ---- as a source

    def shared(
        self, requests: Sequence[Any], *, expanded_of: Collection[int] = (), whole: Collection[int] = ()
    ) -> SharedTree | None:
        """Return None: what a step shares is known when ranks have agreed on it, and prefill is not agreed on."""
        return None

    def reach(self, nodes: Sequence[Hashable], ends: Sequence[int], start: int) -> tuple[int, list[int]]:
        """See sharing.Source: as far as every rank has it expanded, by the last agreement."""
        everywhere = self.agreement.everywhere if self.agreement is not None else frozenset()
        reach, ids = 0, []
        for name, end in zip(nodes, ends, strict=True):
            chunk = self._pool.chunk(name, end // self._pool.chunk_tokens - 1)
            if name not in everywhere or chunk is None:
                break
            reach = end
            ids.append(chunk.id)
        return reach, ids

    def expanded_lens(self, requests: Sequence[Any], prefix_lens: Sequence[int]) -> list[int]:
        """See sharing.Source: as far as every rank had it expanded at the last agreement."""
        everywhere = self.agreement.everywhere if self.agreement is not None else frozenset()
        size, found = self._pool.chunk_tokens, []
        for request, cached in zip(requests, prefix_lens, strict=True):
            whole_chunks = self._names_of(request)[: cached // size]
            reach = next((at for at, name in enumerate(whole_chunks) if name not in everywhere), len(whole_chunks))
            found.append(reach * size)
        return found

    def distrust(self, nodes: Collection[Hashable]) -> None:
        """See sharing.Source: they are in no report of this rank any more."""
        self._distrusted |= set(nodes)

    def idle(self) -> None:
        """See sharing.Source. What is expanded stays, for the requests of the other ranks."""

    def forget(self) -> None:
        """See sharing.Source."""
        self._distrusted.clear()
        self.agreement = None
        self.forgotten += 1

    # ---- nodes, see memory.chunks.Nodes

    def length(self, node: Any) -> int:
        return self._pool.chunk_tokens

    def holders(self, node: Any) -> int:
        """Return 0: a name that no rank asks for any more counts as held by no request."""
        return 0

    def is_here(self, node: Any) -> bool:
        return self.holder(node) is not None


def _near(path: Names, had: Collection[Name], ahead: int) -> Names:
    """Return the path up to so many chunks behind the last one in `had`, which has all chunks before that, too."""
    if len(path) <= ahead or path[-1 - ahead] in had:
        return path
    return path[: bisect_left(path, True, key=lambda name: name not in had) + ahead]
