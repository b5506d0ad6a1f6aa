"""Coverage of paths: how far they are expanded, and which of their chunks are still to be filled."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from sglang_mla_ext.prefix.memory.chunks import AllocationRequest, Chunk, places
from sglang_mla_ext.prefix.memory.pool import ExpandedPool
from sglang_mla_ext.prefix.tree import SharedTree

Covered = tuple[int, tuple[int, ...]]
"""Tokens of a path that are expanded without a gap, from the first one on, and the ids of the chunks that hold them."""


def missing(pool: ExpandedPool, one: AllocationRequest) -> Iterator[Chunk]:
    """Yield the chunks of a range that are not expanded as far as it reaches, in order, up to the first that is not
    there."""
    for index, node in places(one, pool.chunk_tokens):
        chunk = pool.chunk(node, index)
        if chunk is None:
            return
        if chunk.filled < min((index + 1) * pool.chunk_tokens, one.end):
            yield chunk


def covered(pool: ExpandedPool, nodes: Sequence[Hashable], ends: Sequence[int], start: int) -> tuple[int, list[int]]:
    """Return how far consecutive nodes are expanded, from the chunk on that holds token `start`, where the first of
    them begins.

    Returns:
        tokens from the root, 0 where not even the first chunk is expanded; and the ids of the chunks.
    """
    size, at = pool.chunk_tokens, 0
    index, ids, reach = start // size, [], 0
    ending = None  # the last chunk with this index whose node ends inside of it: it holds what is before that end
    while at < len(nodes):
        chunk = pool.chunk(nodes[at], index)
        last = (index + 1) * size
        if ends[at] < last:
            ending = chunk if chunk is not None and chunk.filled > index * size else ending
            at += 1
            continue
        if chunk is None or chunk.filled < last:  # only one that its node ends in is ever filled in part
            break
        ids.append(chunk.id)
        reach, ending = last, None
        index += 1
    if ending is not None:
        ids.append(ending.id)
        reach = ending.filled
    return reach, ids


def covered_paths(pool: ExpandedPool, tree: SharedTree) -> list[Covered]:
    """Return `[requests]` how far the path of each is expanded without a gap."""
    found: dict[int, Covered] = {-1: (0, ())}
    for node in tree.deepest:
        if node not in found:
            tokens, chunks = covered(pool, *tree.path(node), 0)
            found[node] = tokens, tuple(chunks)
    return [found[node] for node in tree.deepest]
