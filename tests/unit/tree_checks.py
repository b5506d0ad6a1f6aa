"""What must hold of what requests share, compared with whole paths as SGLang's tree has them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import takewhile
from typing import Any

from trees import TreeOfNodes

from sglang_mla_ext.prefix.tree import SharedTree


def outline(tree: TreeOfNodes, shared: SharedTree) -> list[tuple[int, int]]:
    """Of each node where it ends and which one is its parent, after checking what always holds; ends in pages."""
    assert len(shared.nodes) == len(shared.parents) == len(shared.ends) == len(set(shared.nodes))
    for at, (node, parent, end) in enumerate(zip(shared.nodes, shared.parents, shared.ends, strict=True)):
        assert -1 <= parent < at
        start = shared.ends[parent] if parent >= 0 else 0
        assert end - start == tree.view.length(node) > 0 and end % tree.page_size == 0
        assert tree.view.parent(node) is (shared.nodes[parent] if parent >= 0 else None)
        assert tree.view.is_attached(node)
    assert all(-1 <= at < len(shared.nodes) for at in shared.deepest)
    return [(end // tree.page_size, parent) for end, parent in zip(shared.ends, shared.parents, strict=True)]


def check_shared(
    tree: TreeOfNodes,
    requests: Sequence[Any],
    also: Collection[Any] = (),
    others: bool = False,
    whole: Collection[int] = (),
) -> SharedTree:
    """Compare with whole paths: a request shares its nodes down to the last one that another one of the requests holds
    too, or that is marked; all of them where its rows are several. Where nodes do not count their holders (see
    NODES_COUNT) some of these may count as one.

    Args:
        others: there are holders that are not among the requests. Nodes count them themselves; a view that counts for
            them has them from the call before, and only where something is marked.
    """
    shared = tree.view.shared(requests, also, whole)
    outline(tree, shared)
    assert shared.complete and len(shared.deepest) == len(requests)
    if not also:
        assert all(tree.view.holders(node) >= 1 for node in shared.nodes)
    paths = [tree.whole(request) for request in requests]
    holders, marked = Counter(step for path in paths for step in path), {tree.identity(node) for node in also}
    steps = [(tree.identity(node), end) for node, end in zip(shared.nodes, shared.ends, strict=True)]
    found = []
    for request, (path, at) in enumerate(zip(paths, shared.deepest, strict=True)):
        on_path = set()
        while at >= 0:
            on_path.add(steps[at])
            at = shared.parents[at]
        found.append(on_path)
        assert on_path <= set(path), "a node that the request does not hold, or not up to there"
        held = [at + 1 for at, step in enumerate(path) if holders[step] > 1 or step[0] in marked or request in whole]
        wanted = path[: max(held, default=0)]
        may_be_more = others if tree.NODES_COUNT else bool(also)
        if tree.NODES_COUNT or request in whole:
            assert on_path >= set(wanted) if may_be_more else on_path == set(wanted)
        else:
            assert may_be_more or on_path <= set(wanted)
            reached, end = max((end for _, end in on_path), default=0), max((end for _, end in wanted), default=0)
            assert reached >= end if may_be_more else reached == end
    assert set().union(*found) == set(steps), "a node that no request holds"
    if not also and not whole:
        check_pairs(paths, found)
    return shared


def check_pairs(paths: Sequence[Any], found: Sequence[set[tuple[Any, int]]]) -> None:
    """Every two requests share as many tokens as they have in common, up to nodes of the tree."""
    for one, one_path in zip(found, paths, strict=True):
        for other, other_path in zip(found, paths, strict=True):
            if one_path is not other_path:
                same = list(takewhile(lambda pair: pair[0] == pair[1], zip(one_path, other_path, strict=False)))
                assert max((end for _, end in one & other), default=0) == (same[-1][0][1] if same else 0)
