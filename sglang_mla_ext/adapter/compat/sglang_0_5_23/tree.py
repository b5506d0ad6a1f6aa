"""Reader of SGLang 0.5.23's radix tree, whose nodes have numbers, through a mirror of the part that requests hold.

The tree's core answers two questions about a node: what the path to it is, which costs the length of the path, and
whether the node is still there. It counts no holders that could be read. So what is known of it is kept in mirror.py;
this ties that to the planner's protocol.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from sglang_mla_ext.adapter.compat.mirror import Mirror, MirrorNode, PathNode
from sglang_mla_ext.adapter.compat.shared_nodes import Forks
from sglang_mla_ext.adapter.compat.tree_view import TreeView, UnsupportedTree
from sglang_mla_ext.prefix.tree import SharedTree

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import UnifiedTreeCoreInterface

_RID, _LAST_NODE = attrgetter("rid"), attrgetter("last_node")


class NumberedTreeView(TreeView):
    """See TreeView, also for each method. Handles are the mirror's nodes.

    `last_node` is a number, and numbers are not given twice, not even after a flush. So a number names the same slots,
    up to the same end, as long as somebody holds the node.
    """

    def __init__(self, tree_cache: BasePrefixCache) -> None:
        """See TreeView. Any core will do: SGLang takes the one in Python where that in Rust lacks something."""
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        if not isinstance(tree_cache, UnifiedRadixCache) or tree_cache.disable:
            raise UnsupportedTree(
                "hybrid_mla finds shared prefixes in SGLang's own radix tree, and this server has "
                f"{type(tree_cache).__name__}. Remove --disable-radix-cache and --radix-cache-backend, and unset "
                "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND."
            )
        self._core: UnifiedTreeCoreInterface = tree_cache.tree_core
        self._mirror = Mirror(self._paths)
        self._forks = Forks()

    def _paths(self, ids: Sequence[int]) -> list[Sequence[PathNode]]:
        """Return the paths from below the root to these nodes.

        Raises:
            KeyError: one of them is not in the tree.
        """
        return list(self._core.collect_path_info(ids))

    def state(self, requests: Sequence[Req]) -> Hashable:
        return tuple(map(_RID, requests)), tuple(map(_LAST_NODE, requests))

    def hold(self, requests: Sequence[Req]) -> object:
        """See prefix.tree.Tree. Numbers are not reused; what the mirror knows of the nodes is kept."""
        return self._mirror.known(map(_LAST_NODE, requests))

    def ends(self, held: Sequence[MirrorNode]) -> Sequence[MirrorNode]:
        return held

    def shared(
        self,
        requests: Sequence[Req],
        also: Collection[Any] = (),
        whole: Collection[int] = (),
        of: Collection[int] | None = None,
    ) -> SharedTree:
        """See prefix.tree.Tree and Forks. A split that was made for a request that never was in a call is not seen: its
        two nodes count as one, which all who hold its end share."""
        ends, marked = list(map(_LAST_NODE, requests)), set(also)
        in_pass = not marked or of is not None
        found, all_known = self._mirror.follow(ends, count=in_pass)
        with nullcontext() if in_pass else self._mirror.counted(found):
            nodes, parents, deepest, complete = self._forks.shared(found, marked, whole, of, remember=in_pass)
        node_ends = [node.end for node in nodes]
        return SharedTree(nodes, parents, node_ends, deepest, complete and all_known)

    def forget(self) -> None:
        self._forks.forget()
        self._mirror.forget()

    def length(self, node: MirrorNode) -> int:
        """See prefix.tree.Tree. As of the last call of `shared`."""
        return node.end - (node.parent.end if node.parent is not None else 0)

    def parent(self, node: MirrorNode) -> MirrorNode | None:
        """See prefix.tree.Tree. As of the last call of `shared`."""
        return None if node.parent is None or node.parent.parent is None else node.parent

    def holders(self, node: MirrorNode) -> int:
        """See prefix.tree.Tree: of the requests in the last call of `shared`."""
        return node.lock_ref

    def is_attached(self, node: MirrorNode) -> bool:
        """See prefix.tree.Tree. With a cache on the host (HiCache) an evicted node stays in the tree without slots, and
        gets others when a request needs its tokens again: it counts as attached."""
        try:
            self._core.is_root(node.id)
        except KeyError:
            return False
        return True

    def slots(self, node: MirrorNode, node_end: int, start: int, end: int) -> torch.Tensor:
        last, above = node, node.parent
        assert above is not None, "the root has no tokens"
        while above.end > start and above.parent is not None:
            if above.end >= end:
                last = above
            above = above.parent
        until = self._core.root_node_handle() if above.parent is None else above.id
        slots: torch.Tensor = self._core.collect_full_device_indices(last.id, until)
        return slots[start - above.end : end - above.end]
