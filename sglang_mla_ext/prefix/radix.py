"""Source of shared prefixes: the radix tree of one server."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import Any

from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.memory.coverage import covered, covered_paths
from sglang_mla_ext.prefix.memory.pool import ExpandedPool
from sglang_mla_ext.prefix.tree import SharedTree, Tree
from sglang_mla_ext.reasons import Fallback


class RadixSource:
    """See sharing.Source.

    Attributes:
        tree: None until SGLang has built it, which is after the attention backend.
    """

    def __init__(self, pool: ExpandedPool, counters: Counters, tree: Tree | None = None) -> None:
        """
        Args:
            pool: is brought up to date with the tree.
        """
        self._pool, self._counters, self.tree = pool, counters, tree
        self._distrusted: set[Hashable] = set()

    def shared(
        self, requests: Sequence[Any], *, expanded_of: Collection[int] = (), whole: Collection[int] = ()
    ) -> SharedTree | None:
        """See sharing.Source. Some changes of the tree are seen only when it is asked what requests share."""
        if self.tree is None:
            return None
        found = self._ask(self.tree, requests, expanded_of, whole)
        if not found.complete:
            self._counters.fall_back(Fallback.TREE_TOO_DEEP)
        if self._distrusted:
            self._forgive_what_left(self.tree)
            found = found.without(self._distrusted)
        return found

    def reach(self, nodes: Sequence[Hashable], ends: Sequence[int], start: int) -> tuple[int, list[int]]:
        """See coverage.covered."""
        return covered(self._pool, nodes, ends, start)

    def expanded_lens(self, requests: Sequence[Any], prefix_lens: Sequence[int]) -> list[int]:
        """See sharing.Source."""
        if self.tree is None or not self._pool.used_chunks:
            return [0] * len(requests)
        found = covered_paths(self._pool, self._ask(self.tree, requests, None))
        return [min(length, cached) for (length, _), cached in zip(found, prefix_lens, strict=True)]

    def _ask(
        self, tree: Tree, requests: Sequence[Any], expanded_of: Collection[int] | None, whole: Collection[int] = ()
    ) -> SharedTree:
        """Ask the tree what requests share, and bring memory up to date with it.

        Args:
            expanded_of: see `shared`; None for all, in a question beside the passes.
        """
        marked = expanded_of is None or len(expanded_of) > 0
        found = tree.shared(requests, also=self._pool.nodes if marked else (), whole=whole, of=expanded_of)
        version = self._pool.version
        self._counters.evictions += self._pool.follow(tree)
        if marked and self._pool.version != version:  # chunks have other owners, or none
            found = tree.shared(requests, also=self._pool.nodes, whole=whole, of=expanded_of)
        return found

    def distrust(self, nodes: Collection[Hashable]) -> None:
        """See sharing.Source. Of a node that is split later, the upper part is trusted again."""
        self._distrusted |= set(nodes)

    def idle(self) -> None:
        """See sharing.Source."""
        if self.tree is not None:
            self._counters.evictions += self._pool.follow(self.tree)
            self._forgive_what_left(self.tree)
            self.tree.forget()

    def forget(self) -> None:
        """See sharing.Source."""
        self._distrusted.clear()
        if self.tree is not None:
            self.tree.forget()

    def _forgive_what_left(self, tree: Tree) -> None:
        """A handle keeps its node, and with it the whole tree that it was in."""
        self._distrusted = {node for node in self._distrusted if tree.is_attached(node)}

    # ---- nodes, see memory.chunks.Nodes

    def length(self, node: Any) -> int:
        assert self.tree is not None, "there are no nodes without a tree"
        return self.tree.length(node)

    def holders(self, node: Any) -> int:
        assert self.tree is not None, "there are no nodes without a tree"
        return self.tree.holders(node)

    def is_here(self, node: Any) -> bool:
        return True
