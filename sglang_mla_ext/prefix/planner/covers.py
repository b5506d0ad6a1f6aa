"""The ways to attend to the tokens of each branch, and what they save.

A branch may be attended to together with tokens above it that no other branch attends to: its part then begins where
one of the branches above begins. So each branch has a list of possible beginnings, its own first, and for each of these
the ways that there are. How many branches are joined to one is bounded, so that the work is linear in the branches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sglang_mla_ext.prefix.planner.branches import Branch, Branches, Part
from sglang_mla_ext.segment import Mode

Gain = Callable[[int, int, int], float]
"""`gain(rows, start, end)`: what attending together to tokens `[start, end)` saves over plain absorb, in seconds a
layer, if the step launches that way anyway; <= 0 where it does not pay."""

Expanded = Callable[[int], int]
"""`expanded(index)`: tokens from the root up to which a branch is expanded without a gap, from the chunk on in which it
begins; 0 where it is not at all."""

NAIVE, GROUPED = 1, 2
"""Ways to attend together, as bits."""

FEW = 32
"""Branches of a small tree, at most. Each of these counts, so plans are searched more thoroughly."""

JOINED, JOINED_OF_MANY = 4, 1
"""Branches above that one may be joined to at most before room is looked at, of a few branches and of many."""


@dataclass(frozen=True)
class Ways:
    """Ways in which rows can attend together, and what that saves.

    Attributes:
        naive: None where there is no naive attention; grouped: None where there is no grouped absorb.
        chunk: tokens of a chunk of expanded tokens; branches that others follow end with a multiple of it in any mode,
            or there would be segments of a few tokens. page: tokens of a page, for grouped absorb; it divides a chunk.
        min_prefix_len: no path of segments is shorter than this. Rows that leave it early may share less.
    """

    naive: Gain | None
    grouped: Gain | None
    chunk: int
    page: int
    min_prefix_len: int = 1

    @property
    def modes(self) -> int:
        """The ways that there are, as bits."""
        return NAIVE * (self.naive is not None) | GROUPED * (self.grouped is not None)


class Cover(NamedTuple):
    """A way to attend to a branch, from one of its beginnings on.

    Attributes:
        modes: of its parts, as bits.
        ends: whether it may be the last of a path; goes_on: whether branches below may be used, too.
    """

    parts: tuple[Part, ...]
    gain: float
    modes: int
    ends: bool
    goes_on: bool


class Covers(NamedTuple):
    """The ways to attend to a branch.

    Attributes:
        by_beginning: `[beginnings]`, the branch's own beginning first, then those of branches above.
        joins: by how many places the list of a child is longer: 1, and 0 for a branch within one chunk, which begins
            where its children do.
    """

    by_beginning: list[list[Cover]]
    joins: int


def whole(branches: Branches) -> Expanded:
    """Return how far each branch is expanded if everything is: up to its end."""
    return lambda index: branches[index].end


def all_covers(branches: Branches, ways: Ways, expanded: Expanded) -> list[Covers]:
    """`[branches]` how each could be attended to, as the last one of a path and with branches below."""
    chunk = ways.chunk
    has_kids = [False] * len(branches)
    for branch in branches:
        if branch.parent >= 0:
            has_kids[branch.parent] = True
    most = JOINED if len(branches) <= FEW else JOINED_OF_MANY
    # Of each branch: where it may begin, in which branch that is, and how far its tokens are expanded from there on.
    begins: list[list[tuple[int, int, int]]] = []
    found: list[Covers] = []
    for index, branch in enumerate(branches):
        begin, reach, end = branch.start // chunk * chunk, expanded(index), branch.end // chunk * chunk
        starts = [(begin, index, reach)]
        if (parent := branch.parent) >= 0:
            skipped = begins[parent][0][0] == begin  # the parent lies within one chunk
            for start, first, above in begins[parent][skipped : most + skipped]:
                starts.append((start, first, max(reach, begin) if above >= begin else above))
        begins.append(starts)
        by_beginning = []
        for start, first, limit in starts:
            through = end if has_kids[index] else -1
            covers = _covers(index, first, branch, start, branch.end, ways, limit, through)
            if has_kids[index] and end != branch.end:
                covers += _covers(index, first, branch, start, end, ways, limit, through)
            by_beginning.append(covers)
        found.append(Covers(by_beginning, int(begin != end)))
    return found


def _covers(
    index: int, first: int, branch: Branch, begin: int, end: int, ways: Ways, expanded: int, through: int
) -> list[Cover]:
    """The ways to attend to tokens from `begin` up to `end`, or to fewer: naive as far as they are expanded, grouped
    absorb alone, or first the one and then the other.

    Args:
        first: the branch that `begin` is in.
        expanded: how far tokens are expanded from there on; through: where a part has to end that others follow.
    """
    paged = end // ways.page * ways.page
    shortest = ways.min_prefix_len if end == branch.end else math.inf
    rows = branch.rows
    covers = []
    if ways.naive is not None and (reach := min(expanded, end)) > begin:
        gain = ways.naive(rows, begin, reach)
        naive = Part(index, first, begin, reach, Mode.NAIVE, gain)
        if reach >= shortest or reach == through:
            covers.append(Cover((naive,), gain, NAIVE, reach >= shortest, reach == through))
        if ways.grouped is not None and reach < paged and reach % ways.page == 0:
            rest = ways.grouped(rows, reach, paged)
            both = (naive, Part(index, first, reach, paged, Mode.GROUPED_ABSORB, rest))
            if paged >= shortest or paged == through:
                covers.append(Cover(both, gain + rest, NAIVE | GROUPED, paged >= shortest, paged == through))
    if ways.grouped is not None and begin < paged and (paged >= shortest or paged == through):
        gain = ways.grouped(rows, begin, paged)
        grouped = (Part(index, first, begin, paged, Mode.GROUPED_ABSORB, gain),)
        covers.append(Cover(grouped, gain, GROUPED, paged >= shortest, paged == through))
    return covers
