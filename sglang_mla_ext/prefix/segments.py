"""Tree of shared segments, for display: what the last decode step attended to together, and what else is expanded.

Made when somebody asks, from what planning keeps anyway; it changes nothing, so that ranks go on deciding alike, and it
says nothing of the tokens but how many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from weakref import WeakKeyDictionary

from sglang_mla_ext.prefix.memory.chunks import Chunk
from sglang_mla_ext.prefix.memory.pool import ExpandedPool
from sglang_mla_ext.prefix.tree import Tree
from sglang_mla_ext.segment import Mode, Segment

KEPT = "kept"
"""The mode of a segment that is expanded, or being expanded, and that the last decode step did not attend to."""

CLIMB_LIMIT = 4096
"""Tree nodes that are looked at for the parents of kept segments; the scheduler waits meanwhile."""


@dataclass(frozen=True)
class ShownSegment:
    """Tokens `[start, end)` of a path that requests share or shared.

    Attributes:
        id: a number of its own, the same as long as the segment stands.
        parent: id of the segment that it continues; None where it begins at the first token, or that is not known.
        holders: running requests that hold it.
        mode: how the last decode step attended to it, a `Mode` or KEPT.
        chunks: of expanded tokens, how many.
    """

    id: int
    parent: int | None
    start: int
    end: int
    holders: int
    mode: str
    chunks: int

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def tokens_saved(self) -> int:
        """Tokens that a decode step does not read, because its holders read them together."""
        return 0 if self.mode == KEPT else self.tokens * (self.holders - 1)


class SegmentNumbers:
    """Gives numbers to segments: opaque, and the same again for the same place of the tree."""

    def __init__(self) -> None:
        # By the node that a segment ends in, where it begins, and whether it is expanded. Nothing here keeps a node.
        self._of: WeakKeyDictionary[Hashable, dict[tuple[int, bool], int]] = WeakKeyDictionary()
        self._next_number = count(1)

    def __call__(self, node: Hashable, start: int, *, expanded: bool) -> int:
        numbers = self._of.setdefault(node, {})
        if (start, expanded) not in numbers:
            numbers[start, expanded] = next(self._next_number)
        return numbers[start, expanded]


def shown_segments(
    planned: Sequence[Segment],
    ends: Sequence[Hashable],
    pool: ExpandedPool,
    tree: Tree | None,
    number: Callable[..., int],
    running: Mapping[Hashable, int] | None = None,
) -> list[ShownSegment]:
    """Return all segments, parents before children.

    Args:
        planned: of the last decode step, parents before children.
        ends: of each of these, the node that it ends in.
        running: requests of that step that hold a node, by node.
    """
    found: list[ShownSegment] = []
    last_of_row: dict[int, ShownSegment] = {}
    at_node: dict[Hashable, ShownSegment] = {}
    of_chunk: dict[int, ShownSegment] = {}
    for segment, node in zip(planned, ends, strict=True):
        above = last_of_row.get(segment.rows[0])
        shown = ShownSegment(
            number(node, segment.start, expanded=segment.mode is Mode.NAIVE),
            above.id if above else None,
            segment.start,
            segment.end,
            len(segment.rows),
            segment.mode.value,
            len(segment.chunks),
        )
        found.append(shown)
        last_of_row.update(dict.fromkeys(segment.rows, shown))
        at_node[node] = shown
        of_chunk.update(dict.fromkeys(segment.chunks, shown))
    if tree is not None:
        found += _kept(pool, tree, number, at_node, of_chunk, running or {})
    return found


def _kept(
    pool: ExpandedPool,
    tree: Tree,
    number: Callable[..., int],
    at_node: dict[Hashable, ShownSegment],
    of_chunk: dict[int, ShownSegment],
    running: Mapping[Hashable, int],
) -> list[ShownSegment]:
    """Return segments of the pool's chunks that are not in `of_chunk`, and add them there; earlier ones first."""
    size, left = pool.chunk_tokens, CLIMB_LIMIT
    found = []
    for stretch in sorted(_stretches(pool, of_chunk), key=lambda stretch: stretch[0].index):
        first, node = stretch[0], stretch[0].node
        attached = tree.is_attached(node)
        above, at = None, node if attached and first.index else None
        while at is not None and above is None and left:
            left -= 1
            chunk = pool.chunk(at, first.index - 1)
            above = of_chunk.get(chunk.id) if chunk is not None else None
            if above is None and (grouped := at_node.get(at)) is not None and grouped.start < first.index * size:
                above = grouped
            at = tree.parent(at)
        shown = ShownSegment(
            number(node, first.index * size, expanded=True),
            above.id if above else None,
            first.index * size,
            stretch[-1].filled,
            running.get(node, 0) if attached else 0,
            KEPT,
            len(stretch),
        )
        found.append(shown)
        of_chunk.update({chunk.id: shown for chunk in stretch})
    return found


def count_alone(running: dict[Hashable, int], ends: Sequence[Hashable], tree: Tree) -> None:
    """Add what requests hold alone to the nodes that several of them hold. The tree's own count has requests that wait
    or are in prefill, too, and copies to the host.

    Args:
        running: requests that hold a node, by node.
        ends: of these requests.
    """
    several, left = frozenset(running), CLIMB_LIMIT
    for end in ends:
        node: Hashable | None = end
        while node is not None and node not in several and left:
            running[node] = running.get(node, 0) + 1
            node, left = tree.parent(node), left - 1


def _stretches(pool: ExpandedPool, used: dict[int, ShownSegment]) -> list[list[Chunk]]:
    """Chunks that are not used, those of one node that adjoin together. One that holds nothing yet stands alone."""
    stretches: list[list[Chunk]] = []
    for chunk in pool.chunks():
        if chunk.id in used:
            continue
        if (
            stretches
            and (before := stretches[-1][-1]).node is chunk.node
            and before.filled == chunk.index * pool.chunk_tokens
        ):
            stretches[-1].append(chunk)
        else:
            stretches.append([chunk])
    return stretches
