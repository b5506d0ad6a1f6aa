"""A mirror of a radix tree whose nodes have numbers: the nodes on the paths of requests, and how many requests hold
each. Imports nothing of SGLang.

The tree is asked for the path of a request when the request comes, and not again. Until then it may have been split in
places that the mirror knows as one node; that does no harm, since whoever holds the end of a node holds its front. When
a path shows a node that is new here and has another child in the tree, it may have been put between two nodes that are
known. Which is the lower one is not on the path, so those are asked again that could be, until one is found: at most
one is, because a node that several others were below was on their paths. One answer serves all new nodes that were put
below the same one, so each candidate waits to be asked once, however many there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

ASK_LIMIT = 1 << 13
"""The most nodes that one call has the tree list on paths, and those of the last paths besides. The next call goes on
from there."""
PATHS_AT_ONCE = 8


class PathNode(Protocol):
    """A node on a path: its number, the tokens from the root to its end, and how many children it has."""

    @property
    def node_id(self) -> int: ...
    @property
    def path_end(self) -> int: ...
    @property
    def num_children(self) -> int: ...


class MirrorNode:
    """A node of the tree. There is one for each number, as long as anybody keeps it.

    Attributes:
        parent: the lowest known node above; the root's is None.
        lock_ref: how many counted requests hold it, by the name that shared_nodes.py knows.
    """

    __slots__ = ("__weakref__", "end", "id", "lock_ref", "parent")

    def __init__(self, number: int, parent: MirrorNode | None, end: int) -> None:
        self.id, self.parent, self.end, self.lock_ref = number, parent, end, 0

    def __repr__(self) -> str:
        return f"MirrorNode({self.id})"


class _Front(NamedTuple):
    """The new nodes at the end of a path.

    Attributes:
        node: the first of them.
        above: the lowest node above that is not of this call.
        children: the new nodes, and how many children each has in the tree.
    """

    node: MirrorNode
    above: MirrorNode
    children: list[tuple[MirrorNode, int]]


class _Search(NamedTuple):
    """A search below one node for those that new ones were put above: for each of `fronts` one of `left`, or none.
    Numbers, in order, so that it keeps no node that nobody else does."""

    fronts: dict[int, None]
    left: dict[int, None]


class Mirror:
    """The nodes on the paths of requests. See the module."""

    def __init__(self, paths: Callable[[Sequence[int]], list[Sequence[PathNode]]]) -> None:
        """
        Args:
            paths: from below the root to nodes with these numbers; KeyError where one is not in the tree.
        """
        self._paths = paths
        self._root = MirrorNode(-1, None, 0)
        self._nodes: WeakValueDictionary[int, MirrorNode] = WeakValueDictionary()
        self._counts: Counter[MirrorNode] = Counter()  # requests that end in a node, of the last call that counted
        self._last: dict[int, MirrorNode] = {}  # where requests of the last two calls end; None of them is freed
        self._before: dict[int, MirrorNode] = {}
        self._searches: dict[int, _Search] = {}  # by the number of the node above
        self._fronts: list[_Front] = []  # for which there may be something to search, of this call
        self._fresh: set[MirrorNode] = set()  # those whose paths this call has seen
        self._made: dict[MirrorNode, MirrorNode] = {}  # those that it has seen first, and the lowest other one above

    def forget(self) -> None:
        """Forget all requests: none is left. Nodes stay as long as somebody else keeps them."""
        self._count(Counter())
        self._last, self._before, self._searches = {}, {}, {}

    def known(self, numbers: Iterable[int | None]) -> list[MirrorNode]:
        """Return the nodes with these numbers, but for those that are not in the mirror."""
        found = (self._nodes.get(number) for number in numbers if number is not None)
        return [node for node in found if node is not None]

    def follow(self, ends: Sequence[int | None], *, count: bool) -> tuple[list[MirrorNode | None], bool]:
        """Return the nodes in which requests end, brought up to date.

        Args:
            ends: their numbers; None for a request without a path.
            count: these are the requests that `lock_ref` counts from now on.
        Returns:
            `[requests]` nodes, perhaps the root; None where there is none, or there was no time to ask. And whether
            there was.
        """
        left = ASK_LIMIT
        known: dict[int, MirrorNode] = {}
        missing: list[int] = []
        for number in dict.fromkeys(ends):
            if number is None:
                continue
            node = self._nodes.get(number)
            if node is not None:
                known[number] = node
            else:
                missing.append(number)
        asked = 0
        while asked < len(missing) and left > 0:
            some = missing[asked : asked + PATHS_AT_ONCE]
            asked += len(some)
            for number, path in zip(some, self._ask(some), strict=True):
                left -= len(path or ())
                if path is not None:
                    known[number] = self._add(path)
        complete = self._search(left) and asked == len(missing)
        found = [None if number is None else known.get(number) for number in ends]
        if count:
            self._count(Counter(node for node in found if node is not None))
            self._last, self._before = known, self._last
        else:
            self._last = self._last | known
        self._fresh.clear()
        self._made.clear()
        return found, complete

    @contextmanager
    def counted(self, found: Sequence[MirrorNode | None]) -> Iterator[None]:
        """Count, meanwhile, the requests that end in these nodes in `lock_ref`, too."""
        more = Counter(node for node in found if node is not None) - self._counts
        for node, requests in more.items():
            _hold(node, requests)
        try:
            yield
        finally:
            for node, requests in more.items():
                _hold(node, -requests)

    # ---- the structure

    def _ask(self, numbers: Sequence[int]) -> list[Sequence[PathNode] | None]:
        """Return the paths of nodes, None for those that are not in the tree."""
        try:
            return list(self._paths(numbers))
        except KeyError:
            if len(numbers) == 1:
                return [None]
            return [self._ask([number])[0] for number in numbers]

    def _add(self, path: Sequence[PathNode]) -> MirrorNode:
        """Take in a path, and return its last node."""
        parent, at = self._root, len(path)
        while at:  # all that is above a node that this call has seen is known
            node = self._nodes.get(path[at - 1].node_id)
            if node in self._fresh:
                parent = node
                break
            at -= 1
        above = self._made.get(parent, parent)
        new: list[tuple[MirrorNode, int]] = []
        for step in path[at:]:
            node = self._nodes.get(step.node_id)
            if node is None:
                node = self._nodes[step.node_id] = MirrorNode(step.node_id, parent, step.path_end)
                self._made[node] = above
                new.append((node, step.num_children))
            else:
                if node.parent is not parent:
                    _move(node, parent)
                above = node
                new.clear()  # this is what was below them
            self._fresh.add(node)
            parent = node
        on_path = len(new) - 1
        if any(children > (at < on_path) for at, (_, children) in enumerate(new)):
            self._fronts.append(_Front(new[0][0], above, new))
        return parent

    def _search(self, left: int) -> bool:
        """Ask for what could be below new nodes, for `left` more nodes of paths. Return whether that was all."""
        self._drop_searches()
        below: dict[MirrorNode | None, list[MirrorNode]] | None = None
        while self._fronts or (self._searches and left > 0):
            if self._fronts:
                if below is None:
                    below = {}
                    for node in self._nodes.values():
                        below.setdefault(node.parent, []).append(node)
                for front, above, candidates in _candidates(self._fronts, below, self._fresh):
                    search = self._searches.setdefault(above.id, _Search({}, {}))
                    search.fronts[front.id] = None
                    search.left.update(dict.fromkeys(candidate.id for candidate in candidates))
                self._fronts.clear()
                continue
            above_id, search = next(reversed(self._searches.items()))
            some = [search.left.popitem()[0] for _ in range(min(PATHS_AT_ONCE, len(search.left)))]
            some = [number for number in some if self._is_to_be_asked(number, above_id)]
            for path in self._ask(some) if some else ():
                left -= len(path or ())
                if path is not None:
                    self._add(path)
                    for step in path:
                        search.fronts.pop(step.node_id, None)
            if not search.fronts or not search.left:
                del self._searches[above_id]
        return not self._searches

    def _drop_searches(self) -> None:
        """Drop the searches for new nodes that nobody holds any more."""
        for above_id, search in list(self._searches.items()):
            for number in [number for number in search.fronts if number not in self._nodes]:
                del search.fronts[number]
            if not search.fronts:
                del self._searches[above_id]

    def _is_to_be_asked(self, number: int, above_id: int) -> bool:
        """Return whether somebody still holds a node, it is where it was, and this call has not seen it."""
        node = self._nodes.get(number)
        return node is not None and node not in self._fresh and node.parent is not None and node.parent.id == above_id

    # ---- who holds what

    def _count(self, counts: Counter[MirrorNode]) -> None:
        for node in counts.keys() | self._counts.keys():
            if more := counts[node] - self._counts[node]:
                _hold(node, more)
        self._counts = counts


def _candidates(
    fronts: Sequence[_Front], below: Mapping[MirrorNode | None, list[MirrorNode]], fresh: Collection[MirrorNode]
) -> Iterator[tuple[MirrorNode, MirrorNode, list[MirrorNode]]]:
    """Yield new nodes, what is above them, and what could be below, where not all of their children are known."""
    for front, above, new in fronts:
        if any(children > len(below.get(node, ())) for node, children in new):
            candidates = [node for node in below.get(above, ()) if node.end > front.end and node not in fresh]
            if candidates:
                yield front, above, candidates


def _move(node: MirrorNode, parent: MirrorNode) -> None:
    """Put a node below another, which came between it and what was above."""
    if node.parent is not None:
        _hold(node.parent, -node.lock_ref)
    _hold(parent, node.lock_ref)
    node.parent = parent


def _hold(node: MirrorNode, requests: int) -> None:
    """Count so many more requests as holders of a node and all above it."""
    above: MirrorNode | None = node
    while above is not None:
        above.lock_ref += requests
        above = above.parent
