"""Owners of chunks of the memory for expanded prefixes: budget, splits, eviction.

A chunk holds the expanded tokens `[k · C, (k + 1) · C)` of a path, for its index k and C tokens a chunk. It belongs to
the tree node in which the last of them lies, so requests below that node share it, whatever else they hold; a node that
ends inside a chunk may own a chunk of its own for what is before its end. Nothing is stored twice but such remainders:
at most one chunk less a token for each branch.

Memory goes to what saves most per token. A chunk that is asked for takes the place of the one that is worth least, if
that is worth clearly less, so that two of nearly equal worth do not evict each other in turn. Chunks that nobody asks
for may stay as long as their node is in the tree.

Pure bookkeeping on the host; the memory itself is `kernels.storage.expanded.ExpandedBuffers`. Every decision depends
only on the tree and on what was asked for before, never on time or on free memory of a device, so that all
tensor-parallel ranks decide alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

from sglang_mla_ext.prefix.memory.chunks import AllocationRequest, Chunk, Nodes, places
from sglang_mla_ext.prefix.tree import Tree

HYSTERESIS = 1.25
"""Factor by which the worth of a chunk must exceed that of another one to take its place."""

GRACE = 8
"""Rounds for which a chunk that two requests no longer hold keeps its worth: they may be between two steps."""

_Victim = tuple[float, int, int, int, Chunk]
"""Worth, round, minus the index, id, and the chunk: in this order they are evicted, and no two ids are equal."""


@dataclass(eq=False)
class _Owned:
    """The chunks of a node, by index. `length`: tokens of the node when it was last looked at."""

    end: int
    length: int
    chunks: dict[int, Chunk] = field(default_factory=dict)


class ExpandedPool:
    """Chunks and the nodes that own them.

    Invariant: every chunk is either free or owned by exactly one node.

    Attributes:
        version: grows whenever a plan made earlier may no longer be the best, or may no longer be valid.
        waiting: whether something was not given memory that it will be given soon, if nothing else changes.
    """

    def __init__(self, num_chunks: int, chunk_tokens: int) -> None:
        self.num_chunks = num_chunks
        self.chunk_tokens = chunk_tokens
        self.version = 0
        self.waiting = False
        self._free = list(range(num_chunks))
        self._owned: dict[Hashable, _Owned] = {}
        self._round = 0
        self._some_in_grace = False

    @property
    def used_chunks(self) -> int:
        return self.num_chunks - len(self._free)

    @property
    def nodes(self) -> set[Hashable]:
        """Nodes that own chunks."""
        return set(self._owned)

    def chunks(self) -> Iterator[Chunk]:
        """Yield the owned chunks, node by node, in the order of their tokens."""
        for owned in self._owned.values():
            yield from (owned.chunks[index] for index in sorted(owned.chunks))

    # ---- the tree changes

    def follow(self, tree: Tree) -> int:
        """Update the owners after changes of the tree: chunks of a node that was split go to the nodes that now end
        where the chunks do, and chunks of nodes that have left the tree are dropped.

        Returns:
            how many chunks were dropped.
        """
        dropped = 0
        for node in list(self._owned):
            owned = self._owned.get(node)
            if owned is None:
                continue
            if not tree.is_attached(node):
                dropped += self._drop_node(node)
            elif tree.length(node) != owned.length:
                self._hand_up(tree, node, owned)
        return dropped

    def _hand_up(self, tree: Tree, node: Hashable, owned: _Owned) -> None:
        """Give chunks that end before the node begins to the node above, and so on. Where that has some of its own,
        because the split was seen late, these are as good."""
        while True:
            owned.length = tree.length(node)
            start = owned.end - owned.length
            early = [chunk for chunk in owned.chunks.values() if (chunk.index + 1) * self.chunk_tokens <= start]
            if not early:
                return
            above = tree.parent(node)
            heir = self._owned.setdefault(above, _Owned(start, 0))
            for chunk in early:
                del owned.chunks[chunk.index]
                if chunk.index in heir.chunks:
                    heapq.heappush(self._free, chunk.id)
                    continue
                chunk.node = above
                heir.chunks[chunk.index] = chunk
            if not owned.chunks:
                del self._owned[node]
            self.version += 1
            node, owned = above, heir

    # ---- who gets memory

    def allot(
        self,
        asked: Sequence[AllocationRequest],
        nodes: Nodes,
        shared: Iterable[Sequence[Hashable]] = (),
        *,
        evict: bool = True,
    ) -> tuple[list[int], int]:
        """Run one round: give chunks to the ranges that are asked for, as far as memory reaches.

        Args:
            asked: the most worthwhile first; one that continues another behind that one.
            shared: the nodes, branch by branch, that the requests of this round share: what is not asked for of these
                is worth nothing any more, whatever it was worth before.
            evict: whether chunks that are worth less may be taken for them. Without, this is no round of its own.
        Returns:
            `[asked]` tokens from the root up to which each range has chunks, and how many chunks were evicted.
        """
        self._round += evict
        if evict:
            for one in asked:
                for index, node in places(one, self.chunk_tokens):
                    if (chunk := self.chunk(node, index)) is not None:
                        chunk.worth, chunk.wanted = one.worth, self._round
            self.waiting = False
        victims: list[_Victim] | None = None
        evicted, reached = 0, list[int]()
        for one in asked:
            reach = one.start
            if one.above >= 0 and reached[one.above] < one.start:
                reached.append(reach)  # there is a gap above
                continue
            for index, node in places(one, self.chunk_tokens):
                if self.chunk(node, index) is None:
                    if not self._free and evict:
                        if victims is None:
                            victims = self._by_worth(nodes, set(chain.from_iterable(shared)))
                        evicted += self._evict_for(one.worth, victims)
                    if not self._free:
                        break
                    self._allocate(nodes, node, one, index)
                reach = min((index + 1) * self.chunk_tokens, one.end)
            reached.append(reach)
        return reached, evicted

    def chunk(self, node: Hashable, index: int) -> Chunk | None:
        """Return the chunk with this index that a node owns; None where there is none."""
        owned = self._owned.get(node)
        return owned.chunks.get(index) if owned is not None else None

    def _allocate(self, nodes: Nodes, node: Hashable, one: AllocationRequest, index: int) -> None:
        owned = self._owned.get(node)
        if owned is None:
            end = one.ends[one.nodes.index(node)]
            owned = self._owned[node] = _Owned(end, nodes.length(node))
        chunk = Chunk(heapq.heappop(self._free), index, node, index * self.chunk_tokens, one.worth, self._round)
        owned.chunks[index] = chunk

    def _by_worth(self, nodes: Nodes, shared: set[Hashable]) -> list[_Victim]:
        """Return every chunk, as a heap: the deepest of the least worth first."""
        heap: list[_Victim] = []
        self._some_in_grace = False
        for node, owned in self._owned.items():
            kept = nodes.holders(node) >= 2
            for chunk in owned.chunks.values():
                if node in shared and chunk.wanted != self._round:
                    chunk.worth = 0.0
                in_grace = not kept and self._round - chunk.wanted <= GRACE
                self._some_in_grace |= in_grace
                heap.append((chunk.worth if kept or in_grace else 0.0, chunk.wanted, -chunk.index, chunk.id, chunk))
        heapq.heapify(heap)
        return heap

    def _evict_for(self, worth: float, victims: list[_Victim]) -> int:
        """Free the chunk that is worth least, if `worth` is clearly more; return how many were freed, 0 or 1."""
        if not victims or victims[0][0] * HYSTERESIS >= worth:
            self.waiting = self._some_in_grace
            return 0
        self._drop_chunk(heapq.heappop(victims)[-1])
        return 1

    def fill(self, chunk: Chunk, end: int) -> None:
        """Record that a chunk is expanded up to token `end`."""
        chunk.filled = end
        self.version += 1

    # ---- dropping

    def drop(self, nodes: Iterable[Hashable]) -> int:
        """Forget what these nodes own; returns how many chunks that were."""
        return sum(self._drop_node(node) for node in nodes if node in self._owned)

    def _drop_node(self, node: Hashable) -> int:
        chunks = list(self._owned[node].chunks.values())
        for chunk in chunks:
            self._drop_chunk(chunk)
        return len(chunks)

    def _drop_chunk(self, chunk: Chunk) -> None:
        owned = self._owned[chunk.node]
        del owned.chunks[chunk.index]
        if not owned.chunks:
            del self._owned[chunk.node]
        heapq.heappush(self._free, chunk.id)
        self.version += 1
