"""From the tree that a batch shares to a plan: which rows attend together to which segment, and in which way.

A *branch* is consecutive nodes of the tree that the same rows hold. What is shared is the upper part of every path, so
that a row's tail is contiguous: a branch is of use only with all above it, or joined to those below it. `covers.py` has
the ways to attend to each, `choice.py` finds what saves the most at given prices, `launches.py` the prices of rows, and
`room.py` what to join and to drop where a step has no room for everything.

Expanded tokens stand in chunks at absolute multiples of a chunk's size. Where the branches below are used too, a branch
ends with its last whole chunk, and those below begin there; only the last one of a path ends where its tokens end.

A row is a request here, however many query tokens it has in a step: they all share what it shares.

The same tree and rows give the same plan.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_mla_ext.prefix.planner.branches import Branches, Part
from sglang_mla_ext.prefix.planner.choice import Chooser
from sglang_mla_ext.prefix.planner.covers import Expanded, Ways, all_covers
from sglang_mla_ext.prefix.planner.launches import Launch, best_choice
from sglang_mla_ext.prefix.planner.room import Capacity, best_with_room, fits
from sglang_mla_ext.segment import Mode, Segment


@dataclass(frozen=True)
class Plan:
    """Plan of one step. Requests that are in no segment attend to all their keys by plain absorb.

    Attributes:
        requests: of the batch.
        segments: whose rows are requests, from the root down; those of one request adjoin, from its first token on.
    """

    requests: int
    segments: tuple[Segment, ...] = ()
    prefix_lens: tuple[int, ...] = field(init=False)
    """`[requests]` tokens of each that segments cover."""
    depth: int = field(init=False)
    """The most segments that a request is in."""

    def __post_init__(self) -> None:
        lens, depths = [0] * self.requests, [0] * self.requests
        for segment in self.segments:
            for request in segment.rows:
                assert lens[request] == segment.start, "a request's segments must adjoin, from the first token on"
                lens[request] = segment.end
                depths[request] += 1
        object.__setattr__(self, "prefix_lens", tuple(lens))
        object.__setattr__(self, "depth", max(depths, default=0))

    def of_mode(self, mode: Mode) -> tuple[Segment, ...]:
        """The segments that are attended to in this way."""
        return tuple(segment for segment in self.segments if segment.mode is mode)


class Chosen(NamedTuple):
    """The parts that a step shares, parents before children, and how many more it has no room for."""

    parts: Sequence[Part]
    dropped: int


def plan_step(branches: Branches, ways: Ways, expanded: Expanded, launch: Launch, capacity: Capacity) -> Chosen:
    """The parts of a step that save the most, what it launches for them counted, as many as it has room for."""
    if not ways.modes:
        return Chosen((), 0)
    covers = all_covers(branches, ways, expanded)
    choosers = functools.cache(lambda modes: Chooser(branches, covers, ways, modes))
    best = best_choice(choosers, ways.modes, launch)
    if fits(best.parts, branches, capacity):
        return Chosen(best.parts, 0)
    parts = best_with_room(choosers, ways.modes, best, launch, capacity)
    return Chosen(parts, max(len(best.parts) - len(parts), 1))
