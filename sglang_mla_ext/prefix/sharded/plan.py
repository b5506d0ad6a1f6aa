"""The plan of a step of all ranks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_mla_ext.prefix.memory.pool import Want
from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.prefix.sharded.names import Names
from sglang_mla_ext.prefix.sharded.report import fingerprint
from sglang_mla_ext.segment import Mode, Segment


@dataclass(frozen=True, eq=False)
class ShardedPlan:
    """What a step shares.

    Attributes:
        mine: of this rank's requests.
        own: `[mine.segments]` which of `segments` each is a part of.
        each: rows that every rank has, some of them padding.
        segments: of all ranks; row `i` of rank `r` is `r * each + i`.
        names: `[segments]` of the chunks of each.
    """

    mine: Plan
    own: tuple[int, ...]
    each: int
    segments: tuple[Segment, ...]
    names: tuple[Names, ...]

    @property
    def my_names(self) -> list[Names]:
        """`[mine.segments]` of the chunks of each."""
        return [self.names[index] for index in self.own]

    def fingerprint(self, wants: Sequence[Want]) -> int:
        """Return a hash of the plan and of the requests for memory that were made with it, the same on all ranks that
        made the same. What is one rank's own is left out: its requests, and ids of chunks."""
        words = array("q", (self.each, len(self.segments), len(self.names), len(wants)))
        for segment, names in zip(self.segments, self.names, strict=False):
            words.extend((segment.start, segment.end, segment.mode is Mode.NAIVE, len(segment.rows), len(names)))
            words.extend(segment.rows)
            words.frombytes(b"".join(names))
        for want in wants:
            words.extend((want.start, want.end, want.above, len(want.nodes)))
            words.frombytes(array("d", (want.worth,)).tobytes() + b"".join(want.nodes))
        return fingerprint(words)
