"""Who owns which chunk of the memory for expanded prefixes: budget, growth, lookup, eviction.

Pure bookkeeping on the host; the memory itself is `kernels.layout.ExpandedBuffers`. Every decision depends only on
the tree and on the plan, never on time or on free memory of a device, so that all tensor-parallel ranks decide alike.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field

from sglang_mla_ext.prefix.planner import Path, PathNode

PathOf = Callable[[Hashable], Path]
"""The present path of a tree node; it changes when a node on it is cut in two."""


@dataclass(eq=False)
class Expansion:
    """A prefix whose keys and values are kept, or are being, expanded.

    Attributes:
        anchor: the tree node on whose path it lies.
        target: tokens it is meant to cover, from the first one.
        done: tokens expanded so far.
        usable: tokens that a plan may use: what was complete when `target` was last reached.
        chunks: ids of the chunks that hold them, in order.
        counted: whether it is among the counters' expansions.
    """

    anchor: Hashable
    target: int = 0
    done: int = 0
    usable: int = 0
    chunks: list[int] = field(default_factory=list)
    counted: bool = False

    @property
    def complete(self) -> bool:
        return self.done >= self.target


class ExpandedPool:
    """Chunks and the expansions that own them.

    Invariant: every chunk is either free or owned by exactly one expansion.
    """

    def __init__(self, num_chunks: int, chunk_tokens: int) -> None:
        self.num_chunks = num_chunks
        self.chunk_tokens = chunk_tokens
        self.expansions: list[Expansion] = []
        self.version = 0
        """Grows whenever a plan made earlier may no longer be the best or may no longer be valid."""
        self._free = list(range(num_chunks))

    @property
    def used_chunks(self) -> int:
        return self.num_chunks - len(self._free)

    @property
    def free_tokens(self) -> int:
        return len(self._free) * self.chunk_tokens

    def reserve(self, path: Path, tokens: int, path_of: PathOf, *, minimum: int) -> Expansion | None:
        """Find or make the expansion for the first `tokens` tokens of a path, as far as memory reaches.

        One that covers them, or is about to, is taken as it is; one that ends on the path grows; else a new one starts.
        Memory that does not suffice shortens the target.
        Args:
            path: root first; `tokens` is at most its end.
            path_of: the present path of a tree node.
            minimum: fewer tokens than this are not worth having.
        Returns:
            the expansion, or None where memory does not reach `minimum`.
        """
        covered, covering = self.coverage(path, tokens, path_of)
        on_path = {step.node for step in path}
        growing = max((e for e in self.expansions if e.anchor in on_path), key=lambda e: e.target, default=None)
        owned = growing.chunks if growing else []
        target = min(tokens, len(owned) * self.chunk_tokens + self.free_tokens)
        if max(covered, target) < minimum:
            return None
        if covering is not None and covered >= target:
            return covering
        if growing is None:
            growing = Expansion(anchor=path[-1].node)
            self.expansions.append(growing)
        growing.anchor, growing.target = path[-1].node, target
        while len(growing.chunks) * self.chunk_tokens < target:
            growing.chunks.append(heapq.heappop(self._free))
        return growing

    def coverage(self, path: Path, tokens: int, path_of: PathOf) -> tuple[int, Expansion | None]:
        """How many of the first `tokens` tokens of a path some expansion covers or is about to, and which one."""
        on_path = {step.node for step in path}
        best: tuple[int, Expansion | None] = (0, None)
        for expansion in self.expansions:
            common = max((step.end for step in path_of(expansion.anchor) if step.node in on_path), default=0)
            length = min(common, expansion.target, tokens)
            if length > best[0]:
                best = (length, expansion)
        return best

    def advance(self, expansion: Expansion, tokens: int) -> None:
        """Record that `tokens` more tokens are expanded."""
        expansion.done += tokens
        assert expansion.done <= expansion.target
        if expansion.complete:
            expansion.usable = expansion.done
            self.version += 1

    def lookup(self, path_of: PathOf) -> dict[Hashable, tuple[int, Expansion]]:
        """For every tree node that an expansion covers: how many tokens, and which expansion.

        A node's tokens are covered from the first one on, up to the node's end or the end of the expansion.
        """
        covered: dict[Hashable, tuple[int, Expansion]] = {}
        for expansion in self.expansions:
            for step in path_of(expansion.anchor):
                tokens = min(step.end, expansion.usable)
                if tokens > (covered[step.node][0] if step.node in covered else 0):
                    covered[step.node] = (tokens, expansion)
        return covered

    def release_unheld(self, path_of: PathOf, is_held: Callable[[Hashable], bool]) -> int:
        """Cut every expansion back to the part that some request still holds; drop those that nobody does.

        Returns:
            how many were dropped.
        """
        dropped = 0
        for expansion in list(self.expansions):
            if is_held(expansion.anchor):
                continue
            held = [step for step in path_of(expansion.anchor) if is_held(step.node)]
            if held:
                self._shorten(expansion, held[-1])
            else:
                self.drop(expansion)
                dropped += 1
        return dropped

    def drop(self, expansion: Expansion) -> None:
        self.expansions.remove(expansion)
        self._give_back(expansion.chunks)
        self.version += 1

    def drop_all(self) -> int:
        """Forget everything; returns how many expansions there were."""
        count = len(self.expansions)
        for expansion in list(self.expansions):
            self.drop(expansion)
        return count

    def _shorten(self, expansion: Expansion, last: PathNode) -> None:
        expansion.anchor = last.node
        expansion.target = min(expansion.target, last.end)
        expansion.done = min(expansion.done, last.end)
        expansion.usable = min(expansion.usable, last.end)
        if expansion.complete:
            expansion.usable = expansion.done
        keep = -(-expansion.target // self.chunk_tokens)
        self._give_back(expansion.chunks[keep:])
        del expansion.chunks[keep:]
        self.version += 1

    def _give_back(self, chunks: Iterable[int]) -> None:
        for chunk in chunks:
            heapq.heappush(self._free, chunk)
