"""Chunks, ranges of tokens that ask for memory, and the nodes that own them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


@dataclass(eq=False)
class Chunk:
    """Attributes:
    id: in the expanded buffers.
    index: of its tokens, see the module.
    node: that owns it.
    filled: tokens from the root up to which it is expanded; `index · C` when nothing is.
    worth: seconds a layer that a token of it saves; wanted: the round in which it was last asked for.
    """

    id: int
    index: int
    node: Hashable
    filled: int
    worth: float = 0.0
    wanted: int = 0


class AllocationRequest(NamedTuple):
    """A range of tokens that is worth expanding.

    Attributes:
        nodes, ends: of the branch that it ends in, see branches.py.
        start, end: tokens from the root; `start` is a multiple of a chunk.
        worth: seconds a layer that a token of it saves.
        above: position in the list of the range that this one continues, -1 where it continues none.
    """

    nodes: Sequence[Hashable]
    ends: Sequence[int]
    start: int
    end: int
    worth: float
    above: int = -1


def places(one: AllocationRequest, size: int) -> Iterator[tuple[int, Hashable]]:
    """Yield index and owner of each chunk of a range.

    Args:
        size: tokens of a chunk.
    """
    at = 0
    for index in range(one.start // size, -(-one.end // size)):
        last = min((index + 1) * size, one.end)
        while one.ends[at] < last:
            at += 1
        yield index, one.nodes[at]


class Nodes(Protocol):
    """Interface through which memory and expansion ask about nodes."""

    def length(self, node: Any) -> int:
        """Tokens of the node itself."""
        ...

    def holders(self, node: Any) -> int:
        """Return how many requests hold the node. What two or more hold keeps its worth though nobody asks for it."""
        ...

    def is_here(self, node: Any) -> bool:
        """Return whether the node's latent rows are on this rank, so that they can be expanded."""
        ...
