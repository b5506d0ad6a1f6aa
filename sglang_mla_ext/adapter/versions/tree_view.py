"""SGLang's radix tree as the planner sees it. The only file that knows how the tree is made (0.5.17).

A running request holds `last_node`, the tree node where its cached prefix ends, and locks it and all its
ancestors, so their slots neither move nor get a new owner while it runs. When a later request diverges inside a
node, SGLang cuts the node in two: a new node takes the front part, and the old object keeps the rest with its
end unchanged. So "the node object, and the token where it ends" names the same slots before and after a split,
for as long as somebody holds the node; that pair is what expansions are identified by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_mla_ext.prefix.planner import Path, PathNode

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.radix_cache import TreeNode


class UnsupportedTree(RuntimeError):
    """SGLang runs with a prefix cache that this package cannot read."""


class TreeView:
    """Reads paths out of SGLang's tree; changes nothing in it."""

    def __init__(self, tree_cache: BasePrefixCache) -> None:
        """
        Raises:
            UnsupportedTree: not a Python radix tree.
        """
        from sglang.srt.mem_cache.radix_cache import RadixCache

        if not isinstance(tree_cache, RadixCache) or tree_cache.disable:
            raise UnsupportedTree(
                f"hybrid_mla finds shared prefixes in SGLang's Python radix tree, and this server has "
                f"{type(tree_cache).__name__}. Remove --disable-radix-cache and --radix-cache-backend, and unset "
                f"SGLANG_ENABLE_UNIFIED_RADIX_TREE and SGLANG_EXPERIMENTAL_CPP_RADIX_TREE."
            )
        self._tree = tree_cache

    def paths(self, reqs: Sequence[Req]) -> list[Path]:
        """One path for each request, root first, the root itself left out; empty where nothing is cached yet."""
        known: dict[int, Path] = {}
        return [self._path(req.last_node, known) for req in reqs]

    def path(self, node: TreeNode) -> Path:
        """The path that ends in this node."""
        return self._path(node, {})

    def _path(self, node: TreeNode | None, known: dict[int, Path]) -> Path:
        # `known` saves the walk for nodes that many requests share; it lives for one call, so ids are unambiguous.
        below: list[TreeNode] = []
        path: Path = ()
        for ancestor in _towards_root(node):
            if (found := known.get(id(ancestor))) is not None:
                path = found
                break
            below.append(ancestor)
        end = path[-1].end if path else 0
        for ancestor in reversed(below):
            end += len(ancestor.key)
            path = (*path, PathNode(ancestor, end))
            known[id(ancestor)] = path
        return path

    def slots(self, node: TreeNode, start: int, end: int) -> torch.Tensor:
        """The pool slots `[end - start]` (int64) of tokens `[start, end)` of the path that ends in this node."""
        pieces = []
        for step in self.path(node):
            first = step.end - len(step.node.key)
            if first < end and step.end > start:
                pieces.append(step.node.value[max(start - first, 0) : end - first])
        return torch.cat(pieces)

    @staticmethod
    def is_held(node: Any) -> bool:
        """Whether a request holds the node, so that its slots stay what they are."""
        return node.lock_ref > 0


def _towards_root(node: TreeNode | None) -> Iterator[TreeNode]:
    """The node and its ancestors, without the root."""
    while node is not None and node.parent is not None:
        yield node
        node = node.parent
