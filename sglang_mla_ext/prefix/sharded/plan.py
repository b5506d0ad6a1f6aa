"""Plan of a step that shares sharded prefixes, over the requests of all ranks."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from sglang_mla_ext.prefix.memory.chunks import AllocationRequest
from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.prefix.planner.planner import Planned
from sglang_mla_ext.prefix.sharded.agreement import Agreement
from sglang_mla_ext.prefix.sharded.report import fingerprint
from sglang_mla_ext.segment import Mode, Segment

ChunkNames = tuple[Hashable, ...]


@dataclass(frozen=True, eq=False)
class ShardedPlan:
    """Plan of what a step shares, over the requests of all ranks.

    Attributes:
        mine: of this rank's requests.
        own: `[mine.segments]` index in `segments` of the one that each is a part of.
        each: rows that every rank has, some of them padding.
        segments: of all ranks; row `i` of rank `r` is `r * each + i`.
        names: `[segments]` of the chunks of each.
    """

    mine: Plan
    own: tuple[int, ...]
    each: int
    segments: tuple[Segment, ...]
    names: tuple[ChunkNames, ...]

    @classmethod
    def of(cls, planned: Planned, agreement: Agreement, rank: int, each: int) -> ShardedPlan:
        """
        Args:
            planned: for the requests of all ranks, all of it naive.
            rank: this one.
        """
        mine = agreement.requests_of(rank)
        rows_of = agreement.rows_of_each(each)
        of_all, of_mine, own = [], [], []
        for index, segment in enumerate(planned.plan.segments):
            rows = tuple(chain.from_iterable(rows_of[request] for request in segment.rows))
            of_all.append(replace(segment, rows=rows))
            if holders := tuple(request - mine.start for request in segment.rows if request in mine):
                of_mine.append(replace(segment, rows=holders))
                own.append(index)
        names = tuple(names for _, names in planned.held())
        return cls(Plan(len(mine), tuple(of_mine)), tuple(own), each, tuple(of_all), names)

    def fingerprint(self, asked: Sequence[AllocationRequest]) -> int:
        """Return a hash of the plan and of the allocation requests that were made with it, the same on all ranks that
        made the same. What is one rank's own is left out: its requests, and ids of chunks."""
        words = array("q", (self.each, len(self.segments), len(self.names), len(asked)))
        for segment, names in zip(self.segments, self.names, strict=False):
            words.extend((segment.start, segment.end, segment.mode is Mode.NAIVE, len(segment.rows), len(names)))
            words.extend(segment.rows)
            words.frombytes(_joined(names))
        for one in asked:
            words.extend((one.start, one.end, one.above, len(one.nodes)))
            words.frombytes(array("d", (one.worth,)).tobytes() + _joined(one.nodes))
        return fingerprint(words)


def _joined(names: Sequence[Hashable]) -> bytes:
    return b"".join(name for name in names if isinstance(name, bytes))
