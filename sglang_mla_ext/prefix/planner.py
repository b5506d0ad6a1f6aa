"""From the tree that a batch shares to a plan: which rows attend together to which range of tokens, and in which way.

A *run* is consecutive nodes of the tree that the same rows hold. What attending together at a run saves is independent
of the runs below it but for one thing: what is shared is the upper part of every path, so that a row's tail is
contiguous, and a run is of use only with all above it. So with `gain(r)` for a run alone

    T(r) = max(0, gain(r) + Σ T(children of r))

one pass from the leaves finds the best plan: a run is in it where T is positive for it and all above. What a step pays
for launching naive attention or grouped absorb at all is weighed against the whole plan.

Expanded tokens stand in chunks at absolute multiples of a chunk's size. Where the runs below are used too, a run ends
with its last whole chunk, and those below begin there; only the last one of a path ends where its tokens end.

A row is a request here, however many query tokens it has in a step: they all share what it shares.

Pure Python; knows neither SGLang nor torch. The same tree and rows give the same plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

from sglang_mla_ext.prefix.cost_model import Mode
from sglang_mla_ext.prefix.tree import SharedTree


@dataclass(frozen=True)
class Group:
    """Rows that attend together to keys `[start, end)` of their common prefix.

    Attributes:
        rows: batch rows, ascending; two or more.
        node: the tree node that the range ends in.
        start, end: the key range.
        mode: how the range is attended to.
        gain: what that saves, in seconds a layer, where costs are modelled.
        run: index of its run, see `Runs`.
    """

    rows: tuple[int, ...]
    node: Hashable
    start: int
    end: int
    mode: Mode
    gain: float = field(default=0.0, compare=False)
    run: int = field(default=-1, compare=False)


@dataclass(frozen=True)
class Plan:
    """What one step does. Rows that are in no group attend to all their keys by plain absorb.

    Attributes:
        num_rows: rows of the batch.
        groups: from the root down; the groups of one row adjoin, from its first token on.
    """

    num_rows: int
    groups: tuple[Group, ...] = ()
    prefix_lens: tuple[int, ...] = field(init=False)
    """`[num_rows]` tokens of each row that groups cover."""
    depth: int = field(init=False)
    """The most groups that a row is in."""

    def __post_init__(self) -> None:
        lens, depths = [0] * self.num_rows, [0] * self.num_rows
        for group in self.groups:
            for row in group.rows:
                assert lens[row] == group.start, "a row's groups must adjoin, from the first token on"
                lens[row] = group.end
                depths[row] += 1
        object.__setattr__(self, "prefix_lens", tuple(lens))
        object.__setattr__(self, "depth", max(depths, default=0))

    def of_mode(self, mode: Mode) -> tuple[Group, ...]:
        """The groups that attend in this way."""
        return tuple(group for group in self.groups if group.mode is mode)


class Run(NamedTuple):
    """Consecutive nodes that the same rows hold.

    Attributes:
        nodes: their handles, from the root down; ends: `[nodes]` tokens from the root to the end of each.
        start, end: tokens before and behind them.
        parent: index of the run above, -1 for none; before this one.
        rows: how many.
    """

    nodes: list[Hashable]
    ends: list[int]
    start: int
    end: int
    parent: int
    rows: int


class Runs:
    """The runs of a tree, parents before children, each of two rows or more.

    Attributes:
        num_rows: of the batch.
        tokens: of all runs together.
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
        self._runs: list[Run] = []
        run_of = [-1] * len(nodes)  # that a node is in, or that its nearest ancestor in one is in
        for node, (parent, end, count) in enumerate(zip(parents, ends, counts, strict=True)):
            above = run_of[parent] if parent >= 0 else -1
            if count < 2:
                run_of[node] = above
                continue
            if above >= 0 and self._runs[above].rows == count:  # the same rows: a child has no others
                run = self._runs[above]
                run.nodes.append(nodes[node])
                run.ends.append(end)
                self._runs[above] = run._replace(end=end)
                run_of[node] = above
                continue
            run_of[node] = len(self._runs)
            start = ends[parent] if parent >= 0 else 0
            self._runs.append(Run([nodes[node]], [end], start, end, above, count))
        self.num_rows = len(tree.deepest)
        self.tokens = sum(run.end - run.start for run in self._runs)
        self._last = [run_of[node] if node >= 0 else -1 for node in tree.deepest]  # of each row
        self._rows: tuple[list[int], list[int]] | None = None

    def __len__(self) -> int:
        return len(self._runs)

    def __getitem__(self, index: int) -> Run:
        return self._runs[index]

    def __iter__(self) -> Iterator[Run]:
        return iter(self._runs)

    def rows_of(self, index: int) -> tuple[int, ...]:
        """The rows that hold a run, ascending."""
        # Numbered depth first, the rows below a run stand side by side.
        if self._rows is None:
            own: list[list[int]] = [[] for _ in self._runs]
            for row, run in enumerate(self._last):
                if run >= 0:
                    own[run].append(row)
            children: list[list[int]] = [[] for _ in self._runs]
            for run in range(len(self._runs) - 1, -1, -1):
                if (parent := self._runs[run].parent) >= 0:
                    children[parent].append(run)
            order: list[int] = []
            begins = [0] * len(self._runs)
            pending = [run for run in range(len(self._runs)) if self._runs[run].parent < 0]
            while pending:
                run = pending.pop()
                begins[run] = len(order)
                order += own[run]
                pending += children[run]
            self._rows = order, begins
        order, begins = self._rows
        return tuple(sorted(order[begins[index] : begins[index] + self._runs[index].rows]))


Gain = Callable[[int, int, int], float]
"""`gain(rows, start, end)`: what attending together to tokens `[start, end)` saves over plain absorb, in seconds a
layer, if the step launches that way anyway; <= 0 where it does not pay."""

Launch = Callable[[Mode, int], float]
"""`launch(mode, rows)`: what a step pays, in seconds a layer, for attending in this way at all, with so many rows."""

Expanded = Callable[[int], int]
"""`expanded(run)`: tokens from the root up to which a run is expanded without a gap, from the chunk on in which it
begins; 0 where it is not at all."""


@dataclass(frozen=True)
class Ways:
    """In which ways rows can attend together, and what that saves.

    Attributes:
        naive: None where there is no naive attention; grouped: None where there is no grouped absorb.
        chunk: tokens of a chunk of expanded tokens; runs that others follow end with a multiple of it in any mode, or
            there would be segments of a few tokens. page: tokens of a page, for grouped absorb; it divides a chunk.
        min_prefix_len: no path of groups is shorter than this. Rows that leave it early may share less.
    """

    naive: Gain | None
    grouped: Gain | None
    chunk: int
    page: int
    min_prefix_len: int = 1


class _Part(NamedTuple):
    """A range of a run, and how it is attended to."""

    start: int
    end: int
    mode: Mode
    gain: float


def whole(runs: Runs) -> Expanded:
    """As if everything were expanded."""
    return lambda run: runs[run].end


def plan_step(runs: Runs, ways: Ways, expanded: Expanded, launch: Launch) -> list[Group]:
    """The groups of a step that save the most, what it launches for them counted, parents before children."""
    # The same ranges are judged once more for each choice of ways.
    ways = replace(ways, naive=ways.naive and cache(ways.naive), grouped=ways.grouped and cache(ways.grouped))
    best = plan_groups(runs, ways, expanded)
    at_most = sum(group.gain for group in best)  # with one way of two, no more is saved
    most = at_most - _launches(best, launch)
    if at_most > max(most, 0.0) and ways.naive is not None and ways.grouped is not None:
        for fewer in (replace(ways, naive=None), replace(ways, grouped=None)):
            groups = plan_groups(runs, fewer, expanded)
            saved = sum(group.gain for group in groups) - _launches(groups, launch)
            if saved > most:
                best, most = groups, saved
    return best if most > 0 else []


def _launches(groups: Sequence[Group], launch: Launch) -> float:
    """What a step pays for the ways that its groups take."""
    rows: dict[Mode, set[int]] = {}
    for group in groups:
        rows.setdefault(group.mode, set()).update(group.rows)
    return sum(launch(mode, len(of_mode)) for mode, of_mode in rows.items())


def plan_groups(runs: Runs, ways: Ways, expanded: Expanded) -> list[Group]:
    """The groups that save the most if launches cost nothing, parents before children; see the module."""
    kids = [0.0] * len(runs)  # Σ T of the children
    chosen: list[tuple[list[_Part], bool] | None] = [None] * len(runs)  # and whether the runs below are used
    for index in range(len(runs) - 1, -1, -1):
        run = runs[index]
        best, total = None, 0.0
        for parts in _covers(run, run.end, ways, expanded(index)):
            gain = sum(part.gain for part in parts)
            if gain > total and parts[-1].end >= ways.min_prefix_len:
                best, total = (parts, False), gain
        if kids[index] > 0:
            begin, end = run.start // ways.chunk * ways.chunk, run.end // ways.chunk * ways.chunk
            through: list[list[_Part]] = [[]]  # within one chunk, which the runs below take
            if begin < end:
                covers = _covers(run, end, ways, expanded(index))
                through = [parts for parts in covers if parts[-1].end == end]
            for parts in through:
                gain = sum(part.gain for part in parts) + kids[index]
                if gain > total:
                    best, total = (parts, True), gain
        chosen[index] = best
        if run.parent >= 0:
            kids[run.parent] += total

    groups = []
    used = [False] * len(runs)
    for index, choice in enumerate(chosen):
        run = runs[index]
        if choice is None or (run.parent >= 0 and not used[run.parent]):
            continue
        parts, used[index] = choice
        if parts:
            rows = runs.rows_of(index)
            groups += [Group(rows, run.nodes[-1], p.start, p.end, p.mode, p.gain, index) for p in parts]
    return groups


def _covers(run: Run, end: int, ways: Ways, expanded: int) -> list[list[_Part]]:
    """The ways to attend to a run's tokens up to `end`, or to fewer: naive as far as it is expanded, grouped absorb
    alone, or first the one and then the other."""
    begin = run.start // ways.chunk * ways.chunk
    paged = end // ways.page * ways.page
    covers = []
    if ways.naive is not None and (reach := min(expanded, end)) > begin:
        naive = _Part(begin, reach, Mode.NAIVE, ways.naive(run.rows, begin, reach))
        covers.append([naive])
        behind = reach // ways.page * ways.page
        if ways.grouped is not None and behind == reach < paged:
            rest = ways.grouped(run.rows, reach, paged)
            covers.append([naive, _Part(reach, paged, Mode.GROUPED_ABSORB, rest)])
    if ways.grouped is not None and begin < paged:
        covers.append([_Part(begin, paged, Mode.GROUPED_ABSORB, ways.grouped(run.rows, begin, paged))])
    return covers


@dataclass(frozen=True)
class Capacity:
    """What the static buffers of a step hold.

    Attributes:
        groups: how many.
        rows: of all groups together, where a row counts once for each group that it is in.
    """

    groups: int
    rows: int


def limit_groups(groups: Sequence[Group], runs: Runs, capacity: Capacity) -> tuple[list[Group], int]:
    """Drop groups until the others fit, each time the one that saves least of those that no other follows.

    Returns:
        the groups that are left, in their order, and how many were dropped.
    """
    count, rows = len(groups), sum(len(group.rows) for group in groups)
    if count <= capacity.groups and rows <= capacity.rows:
        return list(groups), 0
    last: dict[int, int] = {}  # of each run: its last group
    above: list[int] = []
    for index, group in enumerate(groups):
        run = group.run
        while run >= 0 and run not in last:
            run = runs[run].parent
        above.append(last.get(run, -1))
        last[group.run] = index
    followers = [0] * len(groups)
    for index in above:
        if index >= 0:
            followers[index] += 1
    leaves = [(group.gain, -index) for index, group in enumerate(groups) if not followers[index]]
    heapq.heapify(leaves)
    dropped = set()
    while count > capacity.groups or rows > capacity.rows:
        index = -heapq.heappop(leaves)[1]
        dropped.add(index)
        count, rows = count - 1, rows - len(groups[index].rows)
        if (parent := above[index]) >= 0:
            followers[parent] -= 1
            if not followers[parent]:
                heapq.heappush(leaves, (groups[parent].gain, -parent))
    return [group for index, group in enumerate(groups) if index not in dropped], len(dropped)
