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
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from sglang_mla_ext.prefix.tree import SharedTree
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


class Branch(NamedTuple):
    """Consecutive nodes that the same rows hold.

    Attributes:
        nodes: their handles, from the root down; ends: `[nodes]` tokens from the root to the end of each.
        start, end: tokens before and behind them.
        parent: index of the branch above, -1 for none; before this one.
        rows: how many.
    """

    nodes: list[Hashable]
    ends: list[int]
    start: int
    end: int
    parent: int
    rows: int


class Part(NamedTuple):
    """A range of a branch's tokens, and how it is attended to: what becomes a segment.

    Attributes:
        branch: index of the branch.
        gain: what it saves, in seconds a layer, where costs are modelled.
    """

    branch: int
    start: int
    end: int
    mode: Mode
    gain: float


class Branches:
    """The branches of a tree, parents before children, each of two rows or more.

    Attributes:
        requests: of the batch.
        tokens: of all branches together.
    """

    def __init__(self, tree: SharedTree) -> None:
        parents, ends, nodes = tree.parents, tree.ends, tree.nodes
        counts = [0] * len(nodes)
        for node in tree.deepest:
            if node >= 0:
                counts[node] += 1
        for node in range(len(nodes) - 1, -1, -1):
            if (parent := parents[node]) >= 0:
                counts[parent] += counts[node]
        self._branches: list[Branch] = []
        branch_of = [-1] * len(nodes)  # that a node is in, or that its nearest ancestor in one is in
        for node, (parent, end, count) in enumerate(zip(parents, ends, counts, strict=True)):
            above = branch_of[parent] if parent >= 0 else -1
            if count < 2:
                branch_of[node] = above
                continue
            if above >= 0 and self._branches[above].rows == count:  # the same rows: a child has no others
                branch = self._branches[above]
                branch.nodes.append(nodes[node])
                branch.ends.append(end)
                self._branches[above] = branch._replace(end=end)
                branch_of[node] = above
                continue
            branch_of[node] = len(self._branches)
            start = ends[parent] if parent >= 0 else 0
            self._branches.append(Branch([nodes[node]], [end], start, end, above, count))
        self.requests = len(tree.deepest)
        self.tokens = sum(branch.end - branch.start for branch in self._branches)
        self._last = [branch_of[node] if node >= 0 else -1 for node in tree.deepest]  # of each row
        self._rows: tuple[list[int], list[int]] | None = None

    def __len__(self) -> int:
        return len(self._branches)

    def __getitem__(self, index: int) -> Branch:
        return self._branches[index]

    def __iter__(self) -> Iterator[Branch]:
        return iter(self._branches)

    def _rows_of(self, index: int) -> list[int]:
        """The rows that hold a branch, in any order."""
        # Numbered depth first, the rows below a branch stand side by side.
        if self._rows is None:
            own: list[list[int]] = [[] for _ in self._branches]
            for row, branch in enumerate(self._last):
                if branch >= 0:
                    own[branch].append(row)
            children: list[list[int]] = [[] for _ in self._branches]
            for branch in range(len(self._branches) - 1, -1, -1):
                if (parent := self._branches[branch].parent) >= 0:
                    children[parent].append(branch)
            order: list[int] = []
            begins = [0] * len(self._branches)
            pending = [branch for branch in range(len(self._branches)) if self._branches[branch].parent < 0]
            while pending:
                branch = pending.pop()
                begins[branch] = len(order)
                order += own[branch]
                pending += children[branch]
            self._rows = order, begins
        order, begins = self._rows
        return order[begins[index] : begins[index] + self._branches[index].rows]

    def last_row(self, index: int) -> int:
        """The last of the rows that hold a branch."""
        return max(self._rows_of(index))

    def segment(self, part: Part, chunks: tuple[int, ...] = ()) -> Segment:
        """A part as a segment of all rows that hold its branch.

        Args:
            chunks: of a naive one, see Segment.
        """
        return Segment(tuple(sorted(self._rows_of(part.branch))), part.start, part.end, part.mode, chunks)


Gain = Callable[[int, int, int], float]
"""`gain(rows, start, end)`: what attending together to tokens `[start, end)` saves over plain absorb, in seconds a
layer, if the step launches that way anyway; <= 0 where it does not pay."""

Launch = Callable[[Mode, int], float]
"""`launch(mode, rows)`: what a step pays, in seconds a layer, for attending in this way at all, with so many rows."""

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


def whole(branches: Branches) -> Expanded:
    """As if everything were expanded."""
    return lambda index: branches[index].end


def plan_step(branches: Branches, ways: Ways, expanded: Expanded, launch: Launch) -> list[Part]:
    """The parts of a step that save the most, what it launches for them counted, parents before children."""
    # The same ranges are judged once more for each choice of ways.
    ways = replace(ways, naive=ways.naive and cache(ways.naive), grouped=ways.grouped and cache(ways.grouped))
    best = plan_parts(branches, ways, expanded)
    at_most = sum(part.gain for part in best)  # with one way of two, no more is saved
    most = at_most - _launches(best, branches, launch)
    if at_most > max(most, 0.0) and ways.naive is not None and ways.grouped is not None:
        for fewer in (replace(ways, naive=None), replace(ways, grouped=None)):
            parts = plan_parts(branches, fewer, expanded)
            saved = sum(part.gain for part in parts) - _launches(parts, branches, launch)
            if saved > most:
                best, most = parts, saved
    return best if most > 0 else []


def _launches(parts: Sequence[Part], branches: Branches, launch: Launch) -> float:
    """What a step pays for the ways that its parts take."""
    rows: dict[Mode, int] = {}
    found: set[tuple[Mode, int]] = set()  # branches that have a part of this mode
    for part in parts:  # parents come first, and have all rows of their children
        at = part.branch
        while at >= 0 and (part.mode, at) not in found:
            at = branches[at].parent
        if at < 0:
            rows[part.mode] = rows.get(part.mode, 0) + branches[part.branch].rows
        found.add((part.mode, part.branch))
    return sum(launch(mode, of_mode) for mode, of_mode in rows.items())


def plan_parts(branches: Branches, ways: Ways, expanded: Expanded) -> list[Part]:
    """The parts that save the most if launches cost nothing, parents before children; see the module."""
    kids = [0.0] * len(branches)  # Σ T of the children
    chosen: list[tuple[list[Part], bool] | None] = [None] * len(branches)  # and whether the branches below are used
    for index in range(len(branches) - 1, -1, -1):
        branch = branches[index]
        best, total = None, 0.0
        for parts in _covers(index, branch, branch.end, ways, expanded(index)):
            gain = sum(part.gain for part in parts)
            if gain > total and parts[-1].end >= ways.min_prefix_len:
                best, total = (parts, False), gain
        if kids[index] > 0:
            begin, end = branch.start // ways.chunk * ways.chunk, branch.end // ways.chunk * ways.chunk
            through: list[list[Part]] = [[]]  # within one chunk, which the branches below take
            if begin < end:
                covers = _covers(index, branch, end, ways, expanded(index))
                through = [parts for parts in covers if parts[-1].end == end]
            for parts in through:
                gain = sum(part.gain for part in parts) + kids[index]
                if gain > total:
                    best, total = (parts, True), gain
        chosen[index] = best
        if branch.parent >= 0:
            kids[branch.parent] += total

    found: list[Part] = []
    used = [False] * len(branches)
    for index, choice in enumerate(chosen):
        above = branches[index].parent
        if choice is not None and (above < 0 or used[above]):
            parts, used[index] = choice
            found += parts
    return found


def _covers(index: int, branch: Branch, end: int, ways: Ways, expanded: int) -> list[list[Part]]:
    """The ways to attend to a branch's tokens up to `end`, or to fewer: naive as far as it is expanded, grouped absorb
    alone, or first the one and then the other."""
    begin = branch.start // ways.chunk * ways.chunk
    paged = end // ways.page * ways.page
    covers = []
    if ways.naive is not None and (reach := min(expanded, end)) > begin:
        naive = Part(index, begin, reach, Mode.NAIVE, ways.naive(branch.rows, begin, reach))
        covers.append([naive])
        behind = reach // ways.page * ways.page
        if ways.grouped is not None and behind == reach < paged:
            rest = ways.grouped(branch.rows, reach, paged)
            covers.append([naive, Part(index, reach, paged, Mode.GROUPED_ABSORB, rest)])
    if ways.grouped is not None and begin < paged:
        covers.append([Part(index, begin, paged, Mode.GROUPED_ABSORB, ways.grouped(branch.rows, begin, paged))])
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
        branch = part.branch
        while branch >= 0 and branch not in last:
            branch = branches[branch].parent
        above.append(last.get(branch, -1))
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
