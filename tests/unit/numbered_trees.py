"""SGLang's trees that give out numbers for nodes, each with a core, and what must hold of what requests share there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

from conftest import TreeOfNumbers

from sglang_mla_ext.prefix.tree import SharedTree

PAGE_SIZES = (1, 64)
CORES = ("rust", "python")


class OfCore(TreeOfNumbers):
    """A tree with a core."""

    def __init__(self, page_size: int, core: str, pairs: bool = False) -> None:
        self.core = core
        super().__init__(page_size, pairs)

    def whole(self, request: Any) -> list[tuple[int, int]]:
        """Number and end of each node on a request's path, as the tree itself has it now."""
        (path,) = self.view._paths([request.last_node])
        return [(node.node_id, node.path_end) for node in path]

    def is_there(self, number: int) -> bool:
        try:
            self.view._paths([number])
        except KeyError:
            return False
        return True


def check_shared(
    tree: OfCore, requests: Sequence[Any], also: Collection[Any] = (), whole: Collection[int] = ()
) -> SharedTree:
    """Compares with whole paths: every two requests share as many tokens as they have in common, up to nodes of the
    tree; a request that shares with nobody, or holds nothing that is marked, shares nothing, if not all of it counts as
    shared."""
    shared = tree.view.shared(requests, also, whole)
    assert shared.complete and len(shared.deepest) == len(requests) and len(set(shared.nodes)) == len(shared.nodes)
    paths = [tree.whole(request) for request in requests]
    for at, (node, parent, end) in enumerate(zip(shared.nodes, shared.parents, shared.ends, strict=True)):
        assert -1 <= parent < at and tree.view.is_attached(node)
        assert tree.view.parent(node) is (shared.nodes[parent] if parent >= 0 else None)
        assert tree.view.length(node) == end - (shared.ends[parent] if parent >= 0 else 0) > 0
    found = []
    for path, at in zip(paths, shared.deepest, strict=True):
        steps = []
        while at >= 0:
            steps.append((shared.nodes[at].id, shared.ends[at]))
            at = shared.parents[at]
        assert set(steps) <= set(path), "a node that the request does not hold, or not up to there"
        found.append(dict(steps))
    holders = Counter(step for path in paths for step in path)
    for request, (path, steps) in enumerate(zip(paths, found, strict=True)):
        if request in whole:
            assert set(steps.items()) == set(path)
            continue
        common = max((end for number, end in path if holders[number, end] > 1), default=0)
        marked = max((node.end for node in also if (node.id, node.end) in path), default=0)
        reached = max(steps.values(), default=0)
        assert reached == max(common, marked) or (also and reached >= max(common, marked))
    for one, one_path in zip(found, paths, strict=True):
        for other, other_path in zip(found, paths, strict=True):
            common = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one_path, other_path, strict=False))))
            if one_path is not other_path and not also and not whole:
                assert max((one[n] for n in one.keys() & other.keys()), default=0) == ([(0, 0), *one_path])[common][1]
    return shared


def outline(tree: OfCore, shared: SharedTree) -> list[tuple[int, int]]:
    return [(end // tree.page_size, parent) for end, parent in zip(shared.ends, shared.parents, strict=True)]
