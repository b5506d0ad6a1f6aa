"""Any order of requests on SGLang's trees that give out numbers for nodes: what is shared is what whole paths share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from conftest import NODES_ARE_NUMBERS
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test
from numbered_trees import CORES, PAGE_SIZES, OfCore, check_shared
from tree_traffic import TreeTraffic

from sglang_mla_ext.prefix.tree import SharedTree

pytestmark = pytest.mark.skipif(not NODES_ARE_NUMBERS, reason="the installed SGLang's tree gives out its nodes")


class Traffic(TreeTraffic):
    """And views are asked now and then."""

    kind: tuple[int, str]

    def new_tree(self) -> OfCore:
        return OfCore(*self.kind)

    @rule()
    def flush(self) -> None:
        if not self.running:
            self.tree.cache.reset()
            self.tree.view.forget()

    @rule(data=st.data())
    def ask(self, data: Any) -> None:
        batch = data.draw(st.permutations(self.running))
        shared = check_shared(self.tree, batch)
        check_holders(shared, batch, self.tree)
        self.kept.update(zip(shared.nodes, shared.ends, strict=True))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def ask_for_some(self, data: Any) -> None:
        batch = data.draw(st.lists(st.sampled_from(self.running), unique_by=id))
        marked = data.draw(st.lists(st.sampled_from(list(self.kept)), unique=True)) if self.kept else []
        check_shared(self.tree, batch, also=marked)

    @invariant()
    def kept_nodes(self) -> None:
        for node, end in self.kept.items():
            assert self.tree.view.is_attached(node) == self.tree.is_there(node.id)
            assert node.end == end
            above, ends = node, []
            while above is not None:
                ends.append(above.end)
                above = self.tree.view.parent(above)
            assert ends == sorted(ends, reverse=True)


def check_holders(shared: SharedTree, batch: Sequence[Any], tree: OfCore) -> None:
    numbers = Counter(number for request in batch for number, _ in tree.whole(request))
    for node in shared.nodes:
        assert tree.view.holders(node) == numbers[node.id] > 1


@pytest.mark.parametrize("kind", [(size, core) for core in CORES for size in PAGE_SIZES], ids=str)
def test_any_traffic(kind: tuple[int, str]) -> None:
    machine = type("TrafficOfPages", (Traffic,), {"kind": kind})
    run_state_machine_as_test(machine, settings=settings(max_examples=12, stateful_step_count=40, deadline=None))


def test_long_histories() -> None:
    """More requests and deeper paths than hypothesis makes."""
    drawn = random.Random(0)
    for core in CORES:
        tree = OfCore(1, core)
        running: list[Any] = []
        for step in range(500):
            if running and drawn.random() < 0.45:
                tree.finish(running.pop(drawn.randrange(len(running))))
            else:
                running.append(tree.run("".join(drawn.choice("ab") for _ in range(drawn.randrange(1, 24)))))
            if drawn.random() < 0.1:
                tree.evict(drawn.randrange(1, 60))
            if step % 3 == 0:
                check_shared(tree, drawn.sample(running, len(running)) if drawn.random() < 0.7 else running[::2])
