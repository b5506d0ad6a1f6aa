"""Source of shared prefixes: the reports of all ranks, from which each rank finds the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_mla_ext.prefix.sharded.names import Name
from sglang_mla_ext.prefix.sharded.report import Report
from sglang_mla_ext.prefix.tree import SharedTree
from sglang_mla_ext.rows import Rows


@dataclass(frozen=True, eq=False)
class Agreement:
    """Attributes:
    reports: of all ranks, in their order.
    had: names of chunks that every rank has, of its requests or expanded.
    tree: of these; its requests are those of all ranks, rank by rank.
    everywhere: names of chunks that every rank has expanded.
    """

    reports: tuple[Report, ...]
    had: frozenset[Name]
    tree: SharedTree
    everywhere: frozenset[Name]

    @classmethod
    def of(cls, reports: Sequence[Report], chunk: int) -> Agreement:
        """
        Args:
            chunk: tokens of a chunk.
        """
        had = frozenset.intersection(*(frozenset((*report.names, *report.held)) for report in reports))
        places: dict[Name, int] = {}
        names: list[Name] = []
        parents: list[int] = []
        ends: list[int] = []
        deepest: list[int] = []
        for report in reports:
            above: list[int] = []  # of each name: its place here, or that of the last one above it that has one
            for name, parent in zip(report.names, report.parents, strict=True):
                at = above[parent] if parent >= 0 else -1
                if (known := places.get(name)) is not None:  # with all above it: a name stands for a path
                    at = known
                elif name in had and (parent < 0 or (at >= 0 and names[at] == report.names[parent])):
                    places[name] = len(names)
                    names.append(name)
                    parents.append(at)
                    ends.append((ends[at] if at >= 0 else 0) + chunk)
                    at = places[name]
                above.append(at)
            deepest += [above[place] if place >= 0 else -1 for place in report.deepest]
        everywhere = frozenset.intersection(*(frozenset(each.held) for each in reports))
        return cls(tuple(reports), had, SharedTree(names, parents, ends, deepest), everywhere)

    def rows_of_all(self, query_tokens: int) -> Rows | None:
        """Return the rows of all requests; None where each has its query tokens, which costs count by requests.

        Args:
            query_tokens: rows of a request in a step that verifies drafts, otherwise 1.
        """
        rows = [count for report in self.reports for count in report.rows]
        return None if all(count == query_tokens for count in rows) else Rows.of(rows)

    def rows_of_each(self, each: int) -> list[range]:
        """Return the rows of each request of all ranks, of which rank r has `[r * each, (r + 1) * each)`."""
        found = []
        for rank, report in enumerate(self.reports):
            first = rank * each
            for count in report.rows:
                found.append(range(first, first + count))
                first += count
        return found

    def requests_of(self, rank: int) -> range:
        """Return a rank's requests among those of all."""
        first = sum(len(report.rows) for report in self.reports[:rank])
        return range(first, first + len(self.reports[rank].rows))
