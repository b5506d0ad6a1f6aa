"""Find the nodes of a radix tree that several requests hold, by the locks that are counted on them: by SGLang where its
nodes are Python objects, by mirror.py where they are numbers.

A running request locks the node that its cached prefix ends in, and all above it. So `lock_ref` never grows from a node
to its child, and the nodes that one request alone holds are the lower part of its path. Where they begin is remembered,
because a conversation of a thousand turns has a thousand of them. Imports nothing of SGLang.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

WALK_LIMIT = 1 << 16
"""The most nodes that one call visits on the way to shared ones. The next call goes on from there."""
SHARED_LIMIT = 8192
"""The most shared nodes that are listed; twice as many are looked at."""


class TreeNode(Protocol):
    """A node of SGLang's tree, or of mirror.py.

    Attributes:
        id: its number, smaller than those of nodes that came later.
        parent: the root's is None.
        lock_ref: how many requests hold it.
    """

    @property
    def id(self) -> int: ...
    @property
    def parent(self) -> TreeNode | None: ...
    @property
    def lock_ref(self) -> int: ...
    def __hash__(self) -> int: ...


Fork = tuple[TreeNode, "TreeNode | None"]
"""Pair of nodes between which the part of a path begins that one request holds alone: the deepest node that others hold
too, or the root, and the child of it that the request holds alone, None where there is none. Where a search was broken
off, the first one is the node to be looked at next. A plain tuple, because a batch has a thousand."""


class SharedNodes(NamedTuple):
    """Shared nodes as in `prefix.tree.SharedTree`, but nodes of the caller's class in place of handles, and without
    their ends."""

    nodes: list[Any]
    parents: list[int]
    deepest: list[int]
    complete: bool


class Forks:
    """The forks of the requests in the last two calls. Keeps their nodes from being freed."""

    def __init__(self) -> None:
        self._last: dict[TreeNode, Fork] = {}  # by the node that a path ends in
        self._before: dict[TreeNode, Fork] = {}

    def forget(self) -> None:
        self._last, self._before = {}, {}

    def shared(
        self,
        ends: Sequence[TreeNode | None],
        marked: Collection[TreeNode],
        whole: Collection[int],
        of: Collection[int] | None,
        *,
        remember: bool,
    ) -> SharedNodes:
        """Return what paths share; see prefix.tree.Tree.

        A call with `marked` walks up all that the paths in `of` hold alone; others do so once for each path. What they
        find is kept until two calls later, and with it the nodes: `forget` when no request is left.

        Args:
            ends: the node that each path ends in; None for a path of none.
            marked, whole, of: see `also`, `whole` and `of` there.
            remember: False in a question beside the passes, for what is marked.
        """
        forks: list[TreeNode | None] = [None] * len(ends)
        complete = True
        if remember:
            forks, complete = self._find(ends)
        if marked:
            forks, all_marked = _with_marked(forks, ends, marked, range(len(ends)) if of is None else of)
            complete &= all_marked
        if whole:
            forks = [ends[path] if path in whole else fork for path, fork in enumerate(forks)]
        found = _all_above(forks)
        return found._replace(complete=found.complete and complete)

    def _find(self, ends: Sequence[TreeNode | None]) -> tuple[list[TreeNode | None], bool]:
        """Find the forks of paths.

        Args:
            ends: the node that each path ends in; None for a path of none.
        Returns:
            the node of each fork, perhaps the root; None for a path of none or one that the limit broke off. And
            whether all were found.
        """
        # Two calls, because between those for a whole batch there may be one for a few requests of it.
        last, before = self._last, self._before
        known: dict[TreeNode, Fork] = {}
        nodes: list[TreeNode | None] = []
        left, complete = WALK_LIMIT, True
        for end in ends:
            if end is None:
                nodes.append(None)
                continue
            fork = last.get(end) or before.get(end)
            if fork is None:
                node, top = fork = end, None
            else:
                node, top = fork
                if top is not None:
                    if top.lock_ref > 1:  # a newcomer below the fork
                        node, top = fork = end, None
                    elif top.parent is not node and top.parent is not None:  # a split, and perhaps a newcomer
                        node, top = fork = top.parent, top
            if node.lock_ref < 2 and node.parent is not None:
                node, top, left = _climb(node, top, left)
                fork = node, top
                if node.lock_ref < 2 and node.parent is not None:
                    complete, known[end] = False, fork
                    nodes.append(None)
                    continue
            known[end] = fork
            nodes.append(node)
        self._last, self._before = known, last
        return nodes, complete


def _with_marked(
    forks: Sequence[TreeNode | None], ends: Sequence[TreeNode | None], marked: Collection[TreeNode], of: Collection[int]
) -> tuple[list[TreeNode | None], bool]:
    """Return these forks, but for paths in `of` the last node that others hold or that is marked; and whether all were
    found."""
    nodes, left = list(forks), WALK_LIMIT
    for path in of:
        node = ends[path]
        while left and node is not None and node.lock_ref < 2 and node not in marked and node.parent is not None:
            node = node.parent
            left -= 1
        nodes[path] = node if left else forks[path]
    return nodes, left > 0


def _climb(node: TreeNode, top: TreeNode | None, left: int) -> tuple[TreeNode, TreeNode | None, int]:
    """Go up from a fork that others no longer hold to the first node that they do, or the root, over at most `left`
    nodes. Return that node, the one below it, and how many of `left` remain."""
    while left and node.lock_ref < 2:
        above = node.parent
        if above is None:
            break
        top = node
        node = above
        left -= 1
    return node, top, left


def _all_above(forks: Sequence[TreeNode | None]) -> SharedNodes:
    """Return all nodes from these forks to the root, each once. Their order does not depend on that of the forks."""
    nodes: list[TreeNode] = []
    parents: list[int] = []
    deepest: list[int] = []
    index: dict[TreeNode, int] = {}
    left, complete = 2 * SHARED_LIMIT, True
    for fork in forks:
        if fork is None:
            deepest.append(-1)
            continue
        at = index.get(fork)
        if at is None:
            below: list[TreeNode] = []
            node = fork
            while at is None:
                if node.parent is None:
                    at = index[node] = -1
                elif len(below) == left:
                    break
                else:
                    below.append(node)
                    node = node.parent
                    at = index.get(node)
            if at is None:
                complete, left = False, 0
                deepest.append(-1)
                continue
            left -= len(below)
            for node in reversed(below):
                parents.append(at)
                at = index[node] = len(nodes)
                nodes.append(node)
        deepest.append(at)
    if len(nodes) > 1:
        nodes, parents, deepest = _by_age(nodes, parents, deepest)
    if len(nodes) > SHARED_LIMIT:
        return _upper(nodes, parents, deepest)
    return SharedNodes(nodes, parents, deepest, complete)


def _by_age(
    nodes: list[TreeNode], parents: list[int], deepest: list[int]
) -> tuple[list[TreeNode], list[int], list[int]]:
    """Order nodes: parents first, and below each the older nodes, by SGLang's own count, first."""
    order = sorted(range(len(nodes)), key=lambda at: nodes[at].id)
    below: list[list[int]] = [[] for _ in nodes]
    pending: list[int] = []
    for at in reversed(order):
        (below[parents[at]] if parents[at] >= 0 else pending).append(at)
    places = [-1] * (len(nodes) + 1)  # and of -1
    order = []
    while pending:
        at = pending.pop()
        places[at] = len(order)
        order.append(at)
        pending += below[at]
    return [nodes[at] for at in order], [places[parents[at]] for at in order], [places[at] for at in deepest]


def _upper(nodes: list[TreeNode], parents: list[int], deepest: list[int]) -> SharedNodes:
    """Leave out the nodes that are farthest from the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    kept = set(sorted(range(len(nodes)), key=depths.__getitem__)[:SHARED_LIMIT])
    places: list[int] = []  # of a node, or of the last one above it that is kept
    upper = SharedNodes([], [], [], False)
    for at, (node, parent) in enumerate(zip(nodes, parents, strict=True)):
        place = places[parent] if parent >= 0 else -1
        if at in kept:
            upper.parents.append(place)
            place = len(upper.nodes)
            upper.nodes.append(node)
        places.append(place)
    upper.deepest.extend(places[at] if at >= 0 else -1 for at in deepest)
    return upper
