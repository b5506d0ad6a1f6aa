"""Has prefixes expanded that are worth it, piece by piece, as far as there is memory for them.

The expander is a protocol here: the adapter knows SGLang and the kernels, this folder neither.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Sequence
from typing import Protocol

from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.memory.pool import Chunk, ExpandedPool, Want
from sglang_mla_ext.prefix.tree import Tree

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


class Expansion:
    """See the module.

    Attributes:
        under_way: whether the last call found something to expand, so that the next one may, too.
        tokens_without_memory: that were worth expanding in the last call, and for which there was no memory.
    """

    def __init__(self, pool: ExpandedPool, expander: Expander | None, counters: Counters, min_prefix_len: int) -> None:
        """
        Args:
            expander: None where the pool has no chunks.
            min_prefix_len: no prefix is expanded that is shorter than this.
        """
        self._pool, self._expander, self._counters = pool, expander, counters
        self._min_prefix_len = min_prefix_len
        self._announced = False
        self.under_way = False
        self.tokens_without_memory = 0

    def expand(self, wants: Sequence[Want], tree: Tree, shared: Iterable[Sequence[Hashable]], most: int) -> None:
        """Give memory to what is wanted, and expand `most` tokens more of it.

        Args:
            wants, shared: as `ExpandedPool.allot` takes them.
        """
        reached, evicted = self._pool.allot(wants, tree, shared)
        self._counters.evictions += evicted
        self.tokens_without_memory = sum(want.end - reach for want, reach in zip(wants, reached, strict=True))
        if any(not self._is_of_use(want, reach) for want, reach in zip(wants, reached, strict=True)):
            self._counters.fall_back("prefix memory full")
        self.under_way = self._expand(wants, reached, most)

    def expand_in_free_memory(self, wants: Sequence[Want], tree: Tree, most: int) -> None:
        """Expand `most` tokens of what one step wants, which takes no memory from anything else."""
        reached, _ = self._pool.allot([want._replace(worth=0.0) for want in wants], tree, evict=False)
        self.under_way |= self._expand(wants, reached, most)

    def _expand(self, wants: Sequence[Want], reached: Sequence[int], most: int) -> bool:
        """Expand at most `most` tokens, but one chunk at least; whether there was something to do."""
        left = max(most // self._pool.chunk_tokens, 1)
        worked = False
        for want, reach in zip(wants, reached, strict=True):
            if not self._is_of_use(want, reach):
                continue
            missing = list(self._pool.missing(want._replace(end=reach)))
            if not missing:
                continue
            worked = True
            for piece in _consecutive(missing[:left]):
                self._expand_piece(want, reach, piece)
            if len(missing) <= left:
                self._count_expansion(reach)
            left -= min(left, len(missing))
            if not left:
                break
        return worked

    def _is_of_use(self, want: Want, reach: int) -> bool:
        """Whether memory reaches far enough into a range."""
        return reach > want.start and reach >= self._min_prefix_len

    def _expand_piece(self, want: Want, reach: int, piece: Sequence[Chunk]) -> None:
        size, node = self._pool.chunk_tokens, piece[-1].node
        start, end = piece[0].index * size, min((piece[-1].index + 1) * size, reach)
        node_end = want.ends[want.nodes.index(node)]
        self._expander.expand(node, node_end, start, end, [chunk.id for chunk in piece])
        for chunk in piece:
            self._pool.fill(chunk, min((chunk.index + 1) * size, reach))
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
