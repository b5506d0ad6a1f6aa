"""Gives memory to prefixes that are worth expanding, and has them expanded, piece by piece.

The expander is a protocol here: the adapter knows SGLang and the kernels, this folder neither.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.memory.chunks import AllocationRequest, Chunk, Nodes
from sglang_mla_ext.prefix.memory.coverage import missing
from sglang_mla_ext.prefix.memory.pool import ExpandedPool
from sglang_mla_ext.reasons import Fallback

logger = logging.getLogger(__name__)


class Expander(Protocol):
    """Computes keys and values of a prefix."""

    def expand(self, node: Hashable, node_end: int, start: int, end: int, chunks: Sequence[int]) -> None:
        """Expand tokens `[start, end)` of a path, in all layers.

        Args:
            node: a node on the path in which or behind which the tokens end; node_end: tokens from the root to its end.
            start: a multiple of a chunk's size.
            chunks: ids of the chunks that hold the tokens, in order.
        """
        ...


class _Missing(NamedTuple):
    """Part of a range that is to be expanded: its missing chunks, and where its memory ends."""

    asked: AllocationRequest
    reach: int
    chunks: list[Chunk]


class Expansion:
    """See the module.

    Attributes:
        under_way: whether the last `allot` found something to expand, so that the next one may, too.
        tokens_without_memory: that were worth expanding at the last `allot`, and for which there was no memory.
    """

    def __init__(
        self, pool: ExpandedPool, nodes: Nodes, expander: Expander | None, counters: Counters, shortest: int
    ) -> None:
        """
        Args:
            nodes: that own chunks of the pool.
            expander: None where the pool has no chunks.
            shortest: tokens from the root up to which a range must have memory to be expanded.
        """
        self._pool, self._nodes, self._expander, self._counters = pool, nodes, expander, counters
        self._shortest = shortest
        self._missing: list[_Missing] = []
        self._announced = False
        self.under_way = False
        self.tokens_without_memory = 0

    def allot(self, asked: Sequence[AllocationRequest], shared: Sequence[Sequence[Hashable]]) -> None:
        """Give memory to what is asked for; arguments are those of `ExpandedPool.allot`."""
        reached, evicted = self._pool.allot(asked, self._nodes, shared)
        self._counters.evictions += evicted
        self.tokens_without_memory = sum(one.end - reach for one, reach in zip(asked, reached, strict=True))
        if not all(map(self._is_of_use, asked, reached)):
            self._counters.fall_back(Fallback.PREFIX_MEMORY_FULL)
        self._missing = list(self._not_expanded(asked, reached))
        self.under_way = bool(self._missing)

    def expand(self, most: int) -> None:
        """Expand at most `most` tokens, but one chunk at least, of what the last `allot` gave memory to."""
        left, self._missing = self._missing, []
        self._expand(left, most)

    def expand_in_free_memory(self, asked: Sequence[AllocationRequest], most: int) -> None:
        """Expand `most` tokens of what one step asks for, which takes no memory from anything else."""
        reached, _ = self._pool.allot([one._replace(worth=0.0) for one in asked], self._nodes, evict=False)
        left = list(self._not_expanded(asked, reached))
        self.under_way |= bool(left)
        self._expand(left, most)

    def forget(self) -> None:
        """Expand nothing that was asked for: what was known is no more."""
        self._missing, self.under_way, self.tokens_without_memory = [], False, 0

    def _is_of_use(self, one: AllocationRequest, reach: int) -> bool:
        """Return whether memory reaches far enough into a range."""
        return reach > one.start and reach >= self._shortest

    def _not_expanded(self, asked: Sequence[AllocationRequest], reached: Sequence[int]) -> Iterator[_Missing]:
        for one, reach in zip(asked, reached, strict=True):
            if self._is_of_use(one, reach) and (chunks := list(missing(self._pool, one._replace(end=reach)))):
                yield _Missing(one, reach, chunks)

    def _expand(self, ranges: Sequence[_Missing], most: int) -> None:
        left = max(most // self._pool.chunk_tokens, 1)
        for one in ranges:
            chunks = list(takewhile(self._can_expand, one.chunks[:left]))
            for piece in _consecutive(chunks):
                self._expand_piece(one, piece)
            if len(chunks) == len(one.chunks):
                self._count_expansion(one.reach)
            left -= len(chunks)
            if not left:
                break

    def _can_expand(self, chunk: Chunk) -> bool:
        is_owned = self._pool.chunk(chunk.node, chunk.index) is chunk  # it may have been dropped since it was allotted
        return is_owned and self._nodes.is_here(chunk.node)

    def _expand_piece(self, one: _Missing, piece: Sequence[Chunk]) -> None:
        assert self._expander is not None, "chunks without an expander"
        size, node = self._pool.chunk_tokens, piece[-1].node
        start, end = piece[0].index * size, min((piece[-1].index + 1) * size, one.reach)
        node_end = one.asked.ends[one.asked.nodes.index(node)]
        self._expander.expand(node, node_end, start, end, [chunk.id for chunk in piece])
        for chunk in piece:
            self._pool.fill(chunk, min((chunk.index + 1) * size, one.reach))
        self._counters.expanded_tokens += end - start

    def _count_expansion(self, tokens: int) -> None:
        self._counters.expansions += 1
        log = logger.debug if self._announced else logger.info
        log("hybrid_mla: expanded a shared prefix of %d tokens", tokens)
        self._announced = True


def _consecutive(chunks: Sequence[Chunk]) -> list[list[Chunk]]:
    """Cut where an index is left out."""
    pieces: list[list[Chunk]] = []
    for chunk in chunks:
        if pieces and pieces[-1][-1].index + 1 == chunk.index:
            pieces[-1].append(chunk)
        else:
            pieces.append([chunk])
    return pieces
