"""Any order of requests on SGLang's own radix tree: what is shared is what whole paths share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test
from tree_checks import check_shared
from tree_traffic import TreeTraffic
from trees import Tree, TreeOfNodes

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.prefix.tree import SharedTree


class Traffic(TreeTraffic):
    """And views are asked now and then."""

    kind: tuple[int, str | None]

    def new_tree(self) -> TreeOfNodes:
        return Tree(*self.kind)

    @rule()
    def flush(self) -> None:
        if not self.running:
            self.tree.flush()
            self.tree.view.forget()

    @rule(data=st.data())
    def ask(self, data: Any) -> None:
        batch = data.draw(st.permutations(self.running))
        shared = check_shared(self.tree, batch)
        check_holders(self.tree, shared, batch)
        if self.tree.NODES_COUNT:
            fresh = installed.TreeView(self.tree.cache).shared(batch)
            assert (fresh.parents, fresh.ends, fresh.deepest) == (shared.parents, shared.ends, shared.deepest)
            assert list(map(self.tree.identity, fresh.nodes)) == list(map(self.tree.identity, shared.nodes))
        self.kept.update(zip(shared.nodes, shared.ends, strict=True))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def ask_for_some(self, data: Any) -> None:
        batch = data.draw(st.lists(st.sampled_from(self.running), unique_by=id))
        marked = data.draw(st.lists(st.sampled_from(list(self.kept)), unique=True)) if self.kept else []
        check_shared(self.tree, batch, also=marked, others=True)

    @invariant()
    def kept_nodes(self) -> None:
        paths = [self.tree.whole(request) for request in self.running]
        for handle, end in self.kept.items():
            identity, above, ends = self.tree.identity(handle), handle, [end]
            assert self.tree.view.is_attached(handle) == self.tree.is_there(identity, end)
            if self.tree.NODES_COUNT:
                assert self.tree.view.holders(handle) == sum((identity, end) in path for path in paths)
            while above is not None:
                ends.append(ends[-1] - self.tree.view.length(above))
                above = self.tree.view.parent(above)
            assert ends == sorted(set(ends), reverse=True) and ends[-1] == 0


def check_holders(tree: TreeOfNodes, shared: SharedTree, batch: Sequence[Any]) -> None:
    holders = Counter(step for request in batch for step in tree.whole(request))
    for node, end in zip(shared.nodes, shared.ends, strict=True):
        assert tree.view.holders(node) == holders[tree.identity(node), end] > 1


@pytest.mark.parametrize("kind", Tree.KINDS, ids=str)
def test_any_traffic(kind: tuple[int, str | None]) -> None:
    machine = type("TrafficOfPages", (Traffic,), {"kind": kind})
    examples = 50 // len(Tree.KINDS)
    run_state_machine_as_test(machine, settings=settings(max_examples=examples, stateful_step_count=40, deadline=None))


def test_long_histories() -> None:
    """More requests and deeper paths than hypothesis makes."""
    drawn = random.Random(0)
    for kind in (kind for kind in Tree.KINDS if kind[0] == 1):
        tree = Tree(*kind)
        running: list[Any] = []
        for step in range(500):
            if running and drawn.random() < 0.45:
                tree.finish(running.pop(drawn.randrange(len(running))))
            else:
                running.append(tree.run("".join(drawn.choice("ab") for _ in range(drawn.randrange(1, 24)))))
            if drawn.random() < 0.1:
                tree.evict(drawn.randrange(1, 60))
            if step % 3 == 0:
                batch = drawn.sample(running, len(running)) if drawn.random() < 0.7 else running[::2]
                check_shared(tree, batch, others=True)
