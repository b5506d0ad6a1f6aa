"""The tree that a batch shares as branches: consecutive nodes that the same requests hold."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Sequence
from typing import NamedTuple

from sglang_mla_ext.prefix.tree import SharedTree
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Mode, Segment


class Branch(NamedTuple):
    """Consecutive nodes that the same requests hold.

    Attributes:
        nodes: their handles, from the root down; ends: `[nodes]` tokens from the root to the end of each.
        start: tokens before them.
        parent: index of the branch above, -1 for none; before this one.
        rows: of all these requests, as a gain counts them: one of each, or one for each new token of a mixed step.
        requests: how many.
    """

    nodes: list[Hashable]
    ends: list[int]
    start: int
    parent: int
    rows: int
    requests: int

    @property
    def end(self) -> int:
        """Return the tokens up to the end of its last node."""
        return self.ends[-1]


class Part(NamedTuple):
    """A range of tokens that all requests of a branch hold, and how it is attended to: what becomes a segment.

    Attributes:
        branch: index of the branch that it ends in; first: of the one that it begins in, the same or one above.
        gain: what it saves, in seconds a layer, where costs are modelled.
    """

    branch: int
    first: int
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

    def __init__(self, tree: SharedTree, rows: Rows | None = None) -> None:
        """
        Args:
            rows: of the requests, where they have several; one each by default.
        """
        parents, ends, nodes = tree.parents, tree.ends, tree.nodes
        counts = _held_by(tree, [1] * len(tree.deepest))
        row_counts = counts if rows is None else _held_by(tree, rows.lens)
        self._branches: list[Branch] = []
        branch_of = [-1] * len(nodes)  # that a node is in, or that its nearest ancestor in one is in
        for node, (parent, end, count, row_count) in enumerate(zip(parents, ends, counts, row_counts, strict=True)):
            above = branch_of[parent] if parent >= 0 else -1
            if row_count < 2:
                branch_of[node] = above
                continue
            if above >= 0 and self._branches[above].requests == count:  # the same ones: a child has no others
                branch = self._branches[above]
                branch.nodes.append(nodes[node])
                branch.ends.append(end)
                branch_of[node] = above
                continue
            branch_of[node] = len(self._branches)
            start = ends[parent] if parent >= 0 else 0
            self._branches.append(Branch([nodes[node]], [end], start, above, row_count, count))
        self.requests = len(tree.deepest)
        self.tokens = sum(branch.end - branch.start for branch in self._branches)
        self._last = [branch_of[node] if node >= 0 else -1 for node in tree.deepest]  # of each request
        self._ordered: tuple[list[int], list[int]] | None = None

    def __len__(self) -> int:
        return len(self._branches)

    def __getitem__(self, index: int) -> Branch:
        return self._branches[index]

    def __iter__(self) -> Iterator[Branch]:
        return iter(self._branches)

    def requests_of(self, index: int) -> list[int]:
        """The requests that hold a branch, in any order."""
        # Numbered depth first, those below a branch stand side by side.
        if self._ordered is None:
            own: list[list[int]] = [[] for _ in self._branches]
            for request, branch in enumerate(self._last):
                if branch >= 0:
                    own[branch].append(request)
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
            self._ordered = order, begins
        order, begins = self._ordered
        return order[begins[index] : begins[index] + self._branches[index].requests]

    def path(self, part: Part) -> list[int]:
        """The branches that a part is in, from the one down that it begins in."""
        path = [part.branch]
        while path[-1] != part.first:
            path.append(self._branches[path[-1]].parent)
        return path[::-1]

    def nodes_of(self, part: Part) -> tuple[list[Hashable], list[int]]:
        """The nodes of the branches that a part is in, and tokens from the root to the end of each."""
        branches = [self._branches[index] for index in self.path(part)]
        return [node for branch in branches for node in branch.nodes], [
            end for branch in branches for end in branch.ends
        ]

    def nearest(self, index: int, used: Container[int]) -> int:
        """The branch itself or the nearest one above it that is used, -1 for none. One that lies within a chunk may be
        skipped."""
        while index >= 0 and index not in used:
            index = self._branches[index].parent
        return index

    def segment(self, part: Part, chunks: tuple[int, ...] = ()) -> Segment:
        """A part as a segment of all requests that hold its branch.

        Args:
            chunks: of a naive one, see Segment.
        """
        return Segment(tuple(sorted(self.requests_of(part.branch))), part.start, part.end, part.mode, chunks)


def _held_by(tree: SharedTree, weights: Sequence[int]) -> list[int]:
    """`[nodes]` the weights of the requests that hold each, added up."""
    held = [0] * len(tree.nodes)
    for node, weight in zip(tree.deepest, weights, strict=True):
        if node >= 0:
            held[node] += weight
    for node in range(len(tree.nodes) - 1, -1, -1):
        if (parent := tree.parents[node]) >= 0:
            held[parent] += held[node]
    return held
