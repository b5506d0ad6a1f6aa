"""The interface through which the prefix tree of any supported release is read. Imports nothing of SGLang."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from sglang_mla_ext.prefix.tree import Tree

if TYPE_CHECKING:
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache


class UnsupportedTree(RuntimeError):
    """SGLang runs with a prefix cache that this package cannot read."""


class TreeView(Tree, ABC):
    """A reader of SGLang's radix tree: lists paths, and changes nothing in it.

    A running request locks the node where its cached prefix ends, `last_node`, and all above it, so their slots neither
    move nor get a new owner while it runs. When a later request diverges inside a node, SGLang cuts the node in two: a
    new one takes the front part, and the old one keeps the rest with its end unchanged.
    """

    @abstractmethod
    def __init__(self, tree_cache: BasePrefixCache) -> None:
        """
        Raises:
            UnsupportedTree: another kind of prefix cache, or none.
        """

    @abstractmethod
    def slots(self, node: Any, node_end: int, start: int, end: int) -> torch.Tensor:
        """Return the pool slots `[end - start]` (int64) of tokens `[start, end)` of the path that ends in a node.

        Args:
            node: handle of a node that a request holds.
            node_end: tokens from the root to the end of that node.
        """
