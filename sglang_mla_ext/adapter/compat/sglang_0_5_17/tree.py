"""Reader of SGLang 0.5.17's radix tree of Python objects, by the locks that it counts on its nodes."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from sglang_mla_ext.adapter.compat.shared_nodes import Forks
from sglang_mla_ext.adapter.compat.tree_view import TreeView, UnsupportedTree
from sglang_mla_ext.prefix.tree import SharedTree

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.radix_cache import TreeNode

_RID, _LAST_NODE = attrgetter("rid"), attrgetter("last_node")


class NodeHandle:
    """A handle of one node of SGLang's tree. There is one for each node, as long as anybody keeps it.

    Attributes:
        root: of the tree that the node was in; a flush begins another.
    """

    __slots__ = ("__weakref__", "node", "root")

    def __init__(self, node: TreeNode, root: TreeNode) -> None:
        self.node = node
        self.root = root

    def __repr__(self) -> str:
        return f"NodeHandle({self.node.id})"


class NodeTreeView(TreeView):
    """See TreeView, also for each method.

    "The node object, and the token where it ends" names the same slots before and after a split, for as long as
    somebody holds the node; a handle stands for the object, and expansions are identified by that pair.
    """

    def __init__(self, tree_cache: BasePrefixCache) -> None:
        from sglang.srt.mem_cache.radix_cache import RadixCache

        if not isinstance(tree_cache, RadixCache) or tree_cache.disable:
            raise UnsupportedTree(
                f"hybrid_mla finds shared prefixes in SGLang's Python radix tree, and this server has "
                f"{type(tree_cache).__name__}. Remove --disable-radix-cache and --radix-cache-backend, and unset "
                f"SGLANG_ENABLE_UNIFIED_RADIX_TREE and SGLANG_EXPERIMENTAL_CPP_RADIX_TREE."
            )
        self._cache = tree_cache
        # By the id of the node, which its handle keeps from being given to another object.
        self._handles: WeakValueDictionary[int, NodeHandle] = WeakValueDictionary()
        self._forks = Forks()
        self._listed: dict[TreeNode, tuple[NodeHandle, int]] = {}  # the shared nodes of the last call, and their ends

    def state(self, requests: Sequence[Req]) -> Hashable:
        return tuple(map(_RID, requests)), tuple(map(id, map(_LAST_NODE, requests)))

    def hold(self, requests: Sequence[Req]) -> object:
        return list(map(_LAST_NODE, requests))

    def ends(self, held: Sequence[TreeNode | None]) -> Sequence[NodeHandle]:
        return [self._handle(node) for node in held if node is not None and node.parent is not None]

    def shared(
        self,
        requests: Sequence[Req],
        also: Collection[Any] = (),
        whole: Collection[int] = (),
        of: Collection[int] | None = None,
    ) -> SharedTree:
        """See prefix.tree.Tree and Forks. A node that somebody else holds, or that is being copied to the host, is
        listed too."""
        ends, marked = list(map(_LAST_NODE, requests)), {handle.node for handle in also}
        in_pass = not marked or of is not None
        nodes, parents, deepest, complete = self._forks.shared(ends, marked, whole, of, remember=in_pass)
        listed = self._listed
        known: dict[TreeNode, tuple[NodeHandle, int]] = {}
        handles: list[NodeHandle] = []
        node_ends: list[int] = []
        for node, parent in zip(nodes, parents, strict=True):
            found = listed.get(node)
            if found is None:
                start = node_ends[parent] if parent >= 0 else 0
                found = self._handle(node), start + len(node.key)
            known[node] = found
            handles.append(found[0])
            node_ends.append(found[1])  # no split changes it
        if in_pass:
            self._listed = known
        return SharedTree(handles, parents, node_ends, deepest, complete)

    def forget(self) -> None:
        self._forks.forget()
        self._listed = {}

    def length(self, node: NodeHandle) -> int:
        return len(node.node.key)

    def parent(self, node: NodeHandle) -> NodeHandle | None:
        return None if (parent := node.node.parent) is None or parent.parent is None else self._handle(parent)

    def holders(self, node: NodeHandle) -> int:
        return int(node.node.lock_ref)

    def is_attached(self, node: NodeHandle) -> bool:
        """See prefix.tree.Tree.

        SGLang evicts leaves, so a node is in the tree as long as its parent has it as a child. With a cache on the host
        (HiCache) an evicted node stays there without slots, and gets others when a request needs its tokens again: it
        counts as attached, because what was expanded from it is right for them. Where that cache has to drop nodes with
        all below, they lose their slots on both sides.
        """
        tree_node, parent = node.node, node.node.parent
        if node.root is not self._cache.root_node or (tree_node.value is None and tree_node.host_value is None):
            return False
        return parent.children.get(tree_node.key.child_key(self._cache.page_size)) is tree_node

    def slots(self, node: NodeHandle, node_end: int, start: int, end: int) -> torch.Tensor:
        import torch

        pieces = []
        tree_node, last = node.node, node_end
        while last > start:
            first = last - len(tree_node.key)
            if first < end:
                pieces.append(tree_node.value[max(start - first, 0) : end - first])
            tree_node, last = tree_node.parent, first
        return torch.cat(pieces[::-1])

    def _handle(self, node: TreeNode) -> NodeHandle:
        handle = self._handles.get(id(node))
        if handle is None:
            handle = self._handles[id(node)] = NodeHandle(node, self._cache.root_node)
        return handle
