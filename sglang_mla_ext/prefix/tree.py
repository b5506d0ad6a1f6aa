"""Interface of a server's radix tree for the planner: the part of it that a batch shares, and single nodes by handle.

A *handle* stands for one node. There is one for each node as long as anybody keeps it, it is equal by identity, and it
survives a split: the node it stands for then begins later, and ends where it ended. Requests are the server's own
objects, which are only passed through here.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol


@dataclass(frozen=True)
class SharedTree:
    """The nodes that two or more requests of a batch hold. There may be others among them that only one does.

    Two requests share tokens as far as they hold the same nodes, so requests of different namespaces (LoRA adapter,
    cache salt) never do: their trees meet only in the root, which is left out.

    Attributes:
        nodes: handles, parents before children.
        parents: `[nodes]` index of each node's parent, -1 below the root.
        ends: `[nodes]` tokens from the root to the end of each node; whole pages. A node begins where its parent ends.
        deepest: `[requests]` index of the last of these nodes on each request's path, -1 where there is none. The
            request holds it and all above it.
        complete: False where looking for them took too long and was broken off: some requests share more.
    """

    nodes: Sequence[Hashable]
    parents: Sequence[int]
    ends: Sequence[int]
    deepest: Sequence[int]
    complete: bool = True

    def without(self, nodes: Collection[Hashable]) -> SharedTree:
        """Return the tree as if requests held none of these nodes, nor any below them."""
        above: list[int] = []  # of each node: itself or the last one above it that is left, -1 for none
        for index, (node, parent) in enumerate(zip(self.nodes, self.parents, strict=True)):
            left = parent < 0 or above[parent] == parent
            above.append(index if left and node not in nodes else above[parent] if parent >= 0 else -1)
        return replace(self, deepest=[above[node] if node >= 0 else -1 for node in self.deepest])

    def path(self, node: int) -> tuple[list[Hashable], list[int]]:
        """Return the nodes from the root to this one, and the tokens from the root to the end of each."""
        places = []
        while node >= 0:
            places.append(node)
            node = self.parents[node]
        places.reverse()
        return [self.nodes[place] for place in places], [self.ends[place] for place in places]

    def from_request(self, first: int) -> SharedTree:
        """Return the tree as if there were only the requests from this one on, and the nodes that they hold."""
        if not first:
            return self
        deepest = self.deepest[first:]
        held = [False] * len(self.nodes)
        for node in deepest:
            while node >= 0 and not held[node]:
                held[node], node = True, self.parents[node]
        places, kept = [-1] * (len(held) + 1), [node for node, is_held in enumerate(held) if is_held]
        for place, node in enumerate(kept):
            places[node] = place
        return SharedTree(
            [self.nodes[node] for node in kept],
            [places[self.parents[node]] for node in kept],
            [self.ends[node] for node in kept],
            [places[node] for node in deepest],
            self.complete,
        )


class Tree(Protocol):
    """The radix tree of a server."""

    def state(self, requests: Sequence[Any]) -> Hashable:
        """Differs where a request, or the node that its cached prefix ends in, is another one. It speaks for the nodes
        only while they exist, so it goes with what `hold` returned."""
        ...

    def hold(self, requests: Sequence[Any]) -> object:
        """Keeps the nodes that requests end in from ceasing to exist, and so their identities from being reused."""
        ...

    def ends(self, held: Any) -> Sequence[Hashable]:
        """Handles of the nodes that `hold` returned: where its requests end, but for those that are not known."""
        ...

    def shared(
        self,
        requests: Sequence[Any],
        also: Collection[Hashable] = (),
        whole: Collection[int] = (),
        of: Collection[int] | None = None,
    ) -> SharedTree:
        """Return the nodes that requests share. The cost is the number of distinct nodes that two or more requests
        hold; nodes that only one request holds cost once, as long as the request ends in the same node.

        Args:
            also: handles of nodes that count as shared even if only one request holds them.
            whole: indices of requests of which all nodes count as shared, because they have several rows.
            of: indices of requests whose paths are searched for `also`; None for all, in a question beside the passes,
                of which nothing is remembered.
        """
        ...

    def forget(self) -> None:
        """Lets go of the nodes of earlier calls of `shared`: no request is left, or the tree was flushed."""
        ...

    def length(self, node: Any) -> int:
        """Tokens of the node itself. Fewer than before: it was split, and its parents hold those in front."""
        ...

    def parent(self, node: Any) -> Hashable | None:
        """The handle of the node above; None below the root."""
        ...

    def holders(self, node: Any) -> int:
        """Return the number of requests that hold the node, or slightly more. While there are any, the slots of its
        tokens do not change."""
        ...

    def is_attached(self, node: Any) -> bool:
        """Return whether the node is still in the tree, so that requests can come to hold it."""
        ...
