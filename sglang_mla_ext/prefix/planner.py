"""From the tree that a batch shares to a plan: which rows attend together to which segment, and in which way.

A *branch* is consecutive nodes of the tree that the same rows hold. What attending together at a branch saves is
independent of the branches below it but for one thing: what is shared is the upper part of every path, so that a row's
tail is contiguous, and a branch is of use only with all above it. So with `gain(b)` for a branch alone

    T(b) = max(0, gain(b) + Σ T(children of b))

one pass from the leaves finds the best plan: a branch is in it where T is positive for it and all above. What a step
pays for launching naive attention or grouped absorb at all is weighed against the whole plan.

Expanded tokens stand in chunks at absolute multiples of a chunk's size. Where the branches below are used too, a branch
ends with its last whole chunk, and those below begin there; only the last one of a path ends where its tokens end.

A row is a request here, however many query tokens it has in a step: they all share what it shares.

Pure Python; knows neither SGLang nor torch. The same tree and rows give the same plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_mla_ext.prefix.branches import Branch, Branches, Part
from sglang_mla_ext.prefix.launches import GROUPED, NAIVE, Launch, launch_cost, launched_by, unpaid
from sglang_mla_ext.segment import Mode, Segment


@dataclass(frozen=True)
class Plan:
    """What one step does. Requests that are in no segment attend to all their keys by plain absorb.

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


Gain = Callable[[int, int, int], float]
"""`gain(rows, start, end)`: what attending together to tokens `[start, end)` saves over plain absorb, in seconds a
layer, if the step launches that way anyway; <= 0 where it does not pay."""

Expanded = Callable[[int], int]
"""`expanded(index)`: tokens from the root up to which a branch is expanded without a gap, from the chunk on in which it
begins; 0 where it is not at all."""


@dataclass(frozen=True)
class Ways:
    """In which ways rows can attend together, and what that saves.

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


ROUNDS = 6
"""How often a step's plan is made again without what launches cost more than it gains."""


class _Cover(NamedTuple):
    """A way to attend to a branch, from its first chunk on.

    Attributes:
        modes: of its parts, as bits.
        goes_on: whether the branches below are used, too.
    """

    parts: tuple[Part, ...]
    gain: float
    modes: int
    goes_on: bool = False


def whole(branches: Branches) -> Expanded:
    """As if everything were expanded."""
    return lambda index: branches[index].end


def plan_step(
    branches: Branches, ways: Ways, expanded: Expanded, launch: Launch, capacity: Capacity
) -> tuple[list[Part], int]:
    """The parts of a step that save the most, what it launches for them counted, as many as it has room for; see
    `limit_parts`."""
    covers = _all_covers(branches, ways, expanded)
    allowed = [NAIVE | GROUPED]
    if ways.naive is not None and ways.grouped is not None:
        allowed += [NAIVE, GROUPED]  # with one way of two the ranges gain less, but nothing is paid for the other
    best: list[Part] = []
    most = 0.0
    for modes in allowed:
        barred = dict.fromkeys(range(len(branches)), (NAIVE | GROUPED) & ~modes)
        for _ in range(ROUNDS):
            parts = _choose(branches, covers, barred)
            launched = launched_by(parts, branches)
            saved = sum(part.gain for part in parts) - launch_cost(launched, launch)
            if saved > most:
                best, most = parts, saved
            if not (dropped := unpaid(launched, launch)):
                break
            for each in dropped:
                barred[each.branch] |= each.mode
    return limit_parts(best, branches, capacity)


def _choose(branches: Branches, covers: Sequence[Sequence[_Cover]], barred: Mapping[int, int]) -> list[Part]:
    """What saves the most if launches cost nothing.

    Args:
        barred: ways that are not taken, of a branch.
    """
    parents = [branch.parent for branch in branches]
    kids = [0.0] * len(branches)  # Σ T of the children
    chosen: list[_Cover | None] = [None] * len(branches)
    for index in range(len(branches) - 1, -1, -1):
        best, total, below = None, 0.0, kids[index]
        without = barred.get(index, 0)
        for cover in covers[index]:
            if cover.modes & without or (cover.goes_on and below <= 0):
                continue
            gain = cover.gain + below if cover.goes_on else cover.gain
            if gain > total:
                best, total = cover, gain
        chosen[index] = best
        if (parent := parents[index]) >= 0:
            kids[parent] += total

    plan: list[Part] = []
    used = [False] * len(branches)
    for index, (choice, parent) in enumerate(zip(chosen, parents, strict=True)):
        if choice is None or (parent >= 0 and not used[parent]):
            continue
        plan += choice.parts
        used[index] = choice.goes_on
    return plan


def _all_covers(branches: Branches, ways: Ways, expanded: Expanded) -> list[list[_Cover]]:
    """`[branches]` how each could be attended to, as the last one of a path and with branches below."""
    has_kids = [False] * len(branches)
    for branch in branches:
        if branch.parent >= 0:
            has_kids[branch.parent] = True
    found = []
    for index, branch in enumerate(branches):
        reach = expanded(index)
        last = _covers(index, branch, branch.end, ways, reach)
        covers = [cover for cover in last if cover.parts[-1].end >= ways.min_prefix_len]
        if has_kids[index]:
            begin, end = branch.start // ways.chunk * ways.chunk, branch.end // ways.chunk * ways.chunk
            through = last if end == branch.end else _covers(index, branch, end, ways, reach)
            covers += [_Cover(c.parts, c.gain, c.modes, True) for c in through if c.parts[-1].end == end]
            if begin == end:  # within one chunk, which the branches below take
                covers.append(_Cover((), 0.0, 0, True))
        found.append(covers)
    return found


def _covers(index: int, branch: Branch, end: int, ways: Ways, expanded: int) -> list[_Cover]:
    """The ways to attend to a branch's tokens up to `end`, or to fewer: naive as far as it is expanded, grouped absorb
    alone, or first the one and then the other."""
    begin = branch.start // ways.chunk * ways.chunk
    paged = end // ways.page * ways.page
    covers = []
    if ways.naive is not None and (reach := min(expanded, end)) > begin:
        gain = ways.naive(branch.rows, begin, reach)
        naive = Part(index, begin, reach, Mode.NAIVE, gain)
        covers.append(_Cover((naive,), gain, NAIVE))
        if ways.grouped is not None and reach < paged and reach % ways.page == 0:
            rest = ways.grouped(branch.rows, reach, paged)
            both = (naive, Part(index, reach, paged, Mode.GROUPED_ABSORB, rest))
            covers.append(_Cover(both, gain + rest, NAIVE | GROUPED))
    if ways.grouped is not None and begin < paged:
        gain = ways.grouped(branch.rows, begin, paged)
        covers.append(_Cover((Part(index, begin, paged, Mode.GROUPED_ABSORB, gain),), gain, GROUPED))
    return covers


@dataclass(frozen=True)
class Capacity:
    """What the static buffers of a step hold.

    Attributes:
        segments: how many.
        rows: of all segments together, where a row counts once for each segment that it is in.
    """

    segments: int
    rows: int


def limit_parts(parts: Sequence[Part], branches: Branches, capacity: Capacity) -> tuple[list[Part], int]:
    """Drop parts until the others fit, each time the one that saves least of those that no other follows.

    Returns:
        the parts that are left, in their order, and how many were dropped.
    """
    count, rows = len(parts), sum(branches[part.branch].rows for part in parts)
    if count <= capacity.segments and rows <= capacity.rows:
        return list(parts), 0
    last: dict[int, int] = {}  # of each branch: its last part
    above: list[int] = []
    for index, part in enumerate(parts):
        above.append(last.get(branches.nearest(part.branch, last), -1))
        last[part.branch] = index
    followers = [0] * len(parts)
    for index in above:
        if index >= 0:
            followers[index] += 1
    leaves = [(part.gain, -index) for index, part in enumerate(parts) if not followers[index]]
    heapq.heapify(leaves)
    dropped = set()
    while count > capacity.segments or rows > capacity.rows:
        index = -heapq.heappop(leaves)[1]
        dropped.add(index)
        count, rows = count - 1, rows - branches[parts[index].branch].rows
        if (parent := above[index]) >= 0:
            followers[parent] -= 1
            if not followers[parent]:
                heapq.heappush(leaves, (parts[parent].gain, -parent))
    return [part for index, part in enumerate(parts) if index not in dropped], len(dropped)
