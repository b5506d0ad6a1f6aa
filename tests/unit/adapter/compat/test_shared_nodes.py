"""What requests of a batch share, read from SGLang's own radix tree and compared with whole paths."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from tree_checks import check_shared, outline
from trees import Tree, TreeOfNodes

from sglang_mla_ext.adapter.compat import installed, shared_nodes
from sglang_mla_ext.prefix.tree import SharedTree


@pytest.fixture(params=Tree.KINDS, ids=str)
def tree(request: pytest.FixtureRequest) -> TreeOfNodes:
    return Tree(*request.param)


# -- what requests share -----------------------------------------------------------------------------------------------


def chain(tree: Any, text: str, count: int) -> tuple[Any, list[Any]]:
    """A request that alone holds a chain of so many nodes, each of one page; and the nodes, top first."""
    request = None
    for length in range(1, count + 1):
        longer = tree.run((text * count)[:length])
        if request is not None:
            tree.finish(request)
        request = longer
    path = [node for node, _ in tree.whole(request)]
    assert len(path) == count
    return request, path


class Visits:
    """Counts the nodes that are visited on the way to shared ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        climb = shared_nodes._climb

        def counted(node: Any, top: Any, left: int) -> Any:
            found = climb(node, top, left)
            self.count += left - found[2]
            return found

        monkeypatch.setattr(shared_nodes, "_climb", counted)

    def taken(self) -> int:
        count, self.count = self.count, 0
        return count


@pytest.fixture
def visits(monkeypatch: pytest.MonkeyPatch) -> Visits:
    return Visits(monkeypatch)


def test_shared_nodes_come_with_parents_and_ends(tree: Any) -> None:
    requests = [tree.run(text) for text in ("system-ab", "system-ac", "syd", "other", "system-a")]
    shared = check_shared(tree, requests)
    assert outline(tree, shared) == [(2, -1), (8, 0)] and shared.deepest == [1, 1, 0, -1, 1]
    assert shared.nodes == check_shared(tree, requests).nodes, "the same handles"
    assert check_shared(tree, requests[::-1]).deepest == [1, -1, 0, 1, 1]
    assert outline(tree, check_shared(tree, requests[1:3], others=True))[0] == (2, -1)


def test_nothing_is_shared_by_nobody_and_by_one(tree: Any) -> None:
    assert tree.view.shared([]) == SharedTree([], [], [], [])
    alone = tree.run("abc")
    assert tree.view.shared([alone]) == SharedTree([], [], [], [-1])
    at_root, not_yet = (SimpleNamespace(rid="x", last_node=node) for node in (tree.root, None))
    assert tree.view.shared([at_root, alone, not_yet]) == SharedTree([], [], [], [-1] * 3)


def test_one_request_holds_what_is_marked_too(tree: Any) -> None:
    first, second = tree.run("abcdef"), tree.run("abcxyz")
    front, back = tree.path(tree.handle(first))
    tree.finish(second)
    assert check_shared(tree, [first], also=[front.node]).nodes == [front.node]
    assert check_shared(tree, [first], also=[back.node, front.node]).nodes == [front.node, back.node]
    assert check_shared(tree, [first], also={back.node: 1}.keys()).ends == [front.end, back.end], "with all above it"
    assert check_shared(tree, [first, tree.run("other")], also=[tree.handle(second)]).nodes == []
    assert check_shared(tree, [first]).nodes == [], "nothing of it is remembered"


def test_all_of_a_request_with_several_rows_counts_as_shared(tree: Any) -> None:
    """For this call alone, whatever else the request shares, and if it holds nothing."""
    requests = [tree.run(text) for text in ("system-ab", "system-ac", "other")]
    one, two, alone = ([*(step.end for step in path)] for path in tree.paths(requests))
    shared = check_shared(tree, requests, whole={2})
    assert [shared.ends[at] for at in shared.deepest] == [one[-2], two[-2], alone[-1]]
    shared = check_shared(tree, requests, whole={0, 2})
    assert [shared.ends[at] for at in shared.deepest] == [one[-1], two[-2], alone[-1]]
    assert check_shared(tree, requests, whole=range(3)).deepest == check_shared(tree, requests, whole={0, 1, 2}).deepest
    assert check_shared(tree, requests).deepest[2] == -1, "nothing of it is remembered"
    marked = [tree.path(tree.handle(requests[1]))[-1].node]
    assert check_shared(tree, requests[1:], also=marked, whole={1}).deepest != [-1, -1]
    at_root, not_yet = (SimpleNamespace(rid="x", last_node=node) for node in (tree.root, None))
    assert check_shared(tree, [at_root, requests[2], not_yet], whole={0, 1, 2}).deepest == [-1, 0, -1]


def test_what_others_hold_may_be_listed(tree: Any) -> None:
    """A request that is not in the batch, or a copy to the host: the tree's own count does not say who."""
    first, second, _ = tree.run("abc-x"), tree.run("def-x"), tree.run("abc-y")
    shared = check_shared(tree, [first, second], others=True)
    assert outline(tree, shared) in ([(4, -1)], []) and shared.deepest[1] == -1


def test_equal_text_under_different_extra_keys_is_not_shared(tree: Any) -> None:
    keys = (None, "tenant", "tenant", "other")
    requests = [tree.run("system" + end, key) for key, end in zip(keys, "abcd", strict=True)]
    assert check_shared(tree, requests).deepest == [-1, 0, 0, -1]
    assert check_shared(tree, [*requests, tree.run("syste", "other")]).deepest == [-1, 0, 0, 1, 1]


# -- what is remembered ------------------------------------------------------------------------------------------------


def test_a_private_chain_is_walked_once(tree: Any, visits: Visits) -> None:
    request, path = chain(tree, "abc", 30)
    for expected in (30, 0, 0):
        assert check_shared(tree, [request]).nodes == [] and visits.taken() == expected

    newcomer = tree.run("abcabcabcabX")  # joins inside the chain
    assert check_shared(tree, [request, newcomer]).deepest == [10, 10]
    assert visits.taken() == len(path) - 11 + 1, "what is now private, and the newcomer's end"
    assert check_shared(tree, [request, newcomer]).deepest == [10, 10] and visits.taken() == 0

    tree.finish(newcomer)  # its fork is private again: the search goes on from there
    assert check_shared(tree, [request]).nodes == [] and visits.taken() == 11
    assert check_shared(tree, [request]).nodes == [] and visits.taken() == 0


def test_a_split_in_a_private_part_is_seen(tree: Any, visits: Visits) -> None:
    prompts = [tree.run("systemX"), tree.run("systemYabcdef")]
    for _ in range(2):
        assert outline(tree, check_shared(tree, prompts)) == [(6, -1)]
    visits.taken()
    newcomer = tree.run("systemYabcZ")
    shared = check_shared(tree, [*prompts, newcomer])
    assert outline(tree, shared) == [(6, -1), (10, 0)] and shared.deepest == [0, 1, 1]
    assert visits.taken() == 1, "the newcomer's end alone"
    tree.finish(newcomer)
    assert outline(tree, check_shared(tree, prompts)) == [(6, -1)] and visits.taken() == 1
    tree.finish(tree.run("systemYaZ"))  # a split without a newcomer
    assert outline(tree, check_shared(tree, prompts)) == [(6, -1)] and visits.taken() == tree.NODES_COUNT


def test_joining_at_the_very_end_and_at_the_root(tree: Any) -> None:
    request, _ = chain(tree, "ab", 6)
    assert check_shared(tree, [request]).deepest == [-1]
    twin = tree.run("ababab")
    assert twin.last_node == request.last_node
    assert check_shared(tree, [request, twin]).deepest == [5, 5]
    tree.finish(twin)
    assert check_shared(tree, [request]).deepest == [-1]
    assert check_shared(tree, [request, tree.run("aX")]).deepest == [0, 0]


def test_a_request_that_goes_on_in_another_node(tree: Any) -> None:
    """Retracted and prefilled again, or one chunk further."""
    one, two = tree.run("system-a"), tree.run("system-b")
    check_shared(tree, [one, two])
    longer = tree.run("system-ab")
    tree.finish(one)
    one.last_node = longer.last_node
    assert check_shared(tree, [one, two]).deepest == [0, 0]


def test_a_call_for_a_part_of_the_batch_does_not_forget_the_rest(tree: Any, visits: Visits) -> None:
    request, _ = chain(tree, "abc", 20)
    other, _ = chain(tree, "xyz", 20)
    check_shared(tree, [request, other])
    assert visits.taken() == 40
    check_shared(tree, [other])
    check_shared(tree, [request], also=[tree.handle(request)])
    check_shared(tree, [request, other])
    assert visits.taken() == 0


def test_the_view_keeps_the_nodes_of_two_calls(tree: Any) -> None:
    def evicted() -> weakref.ref:
        requests = [tree.run("system-a"), tree.run("system-b")]
        check_shared(tree, requests)
        node = weakref.ref(tree.view.hold(requests)[0])
        tree.finish(*requests)
        tree.evict(10**6)
        return node

    other = tree.run("other")
    for let_go in (lambda: [tree.view.shared([other]), tree.view.shared([other])], tree.view.forget):
        node = evicted()
        gc.collect()
        assert node() is not None
        let_go()
        gc.collect()
        assert node() is None
    assert check_shared(tree, [other, tree.run("other")]).deepest == [0, 0]


# -- limits ------------------------------------------------------------------------------------------------------------


def test_a_long_search_goes_on_in_the_next_call(tree: Any, monkeypatch: pytest.MonkeyPatch, visits: Visits) -> None:
    monkeypatch.setattr(shared_nodes, "WALK_LIMIT", 16)
    one, _ = chain(tree, "ab", 20)
    two, _ = chain(tree, "ac", 20)
    pair = [tree.run("prompt-x"), tree.run("prompt-y")]
    requests = [*pair, one, two]  # both chains share their first node
    found = [tree.view.shared(requests) for _ in range(4)]
    assert [shared.complete for shared in found] == [False, False, True, True]
    assert [shared.deepest for shared in found] == [[0, 0, -1, -1], [1, 1, 0, -1], [1, 1, 0, 0], [1, 1, 0, 0]]
    assert visits.taken() == 2 + 19 + 19
    assert outline(tree, found[-1]) == [(1, -1), (7, -1)]
    again = installed.TreeView(tree.cache)
    assert [again.shared(requests).deepest for _ in range(3)] == [shared.deepest for shared in found[:3]]


def test_a_search_that_ends_at_the_limit_is_complete(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_nodes, "WALK_LIMIT", 20)
    request, _ = chain(tree, "ab", 20)
    assert tree.view.shared([request]).complete
    longer, _ = chain(tree, "xy", 21)
    assert not tree.view.shared([longer]).complete and tree.view.shared([longer]).complete


def test_a_newcomer_below_a_search_that_was_broken_off(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_nodes, "WALK_LIMIT", 12)
    request, _ = chain(tree, "ab", 20)
    assert not tree.view.shared([request]).complete
    assert check_shared(tree, [request, tree.run("ab" * 8 + "X")]).deepest == [15, 15]


def test_marked_nodes_within_the_limit(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    request, path = chain(tree, "ab", 20)
    steps = tree.path(tree.handle(request))
    assert [tree.identity(step.node) for step in steps] == path
    top, end = steps[0].node, steps[-1].node
    monkeypatch.setattr(shared_nodes, "WALK_LIMIT", 10)
    requests = [request] * (1 + tree.NODES_COUNT)  # who counts those of a call counts one that is named twice
    shared = tree.view.shared(requests, also=[top])
    assert not shared.complete and shared.deepest == [-1] * len(requests)
    assert tree.view.shared([request], also=[top, end]).deepest == [19]


def test_of_too_many_shared_nodes_the_upper_ones_are_listed(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_nodes, "SHARED_LIMIT", 8)
    long, _ = chain(tree, "ab", 10)
    requests = [long, tree.run("ab" * 5), tree.run("xy"), tree.run("xy"), tree.run("abaX")]
    shared = tree.view.shared(requests)
    assert not shared.complete and outline(tree, shared) == [*((at + 1, at - 1) for at in range(7)), (2, -1)]
    assert shared.deepest == [6, 6, 7, 7, 2]
    monkeypatch.setattr(shared_nodes, "SHARED_LIMIT", 4)  # and so more than is looked at
    shared = tree.view.shared(requests)
    assert not shared.complete and shared.nodes == [] and shared.deepest == [-1] * 5
    shared = tree.view.shared(requests[:1:-1])
    of_others = [(1, -1), (2, 0), (3, 1)] * tree.NODES_COUNT
    assert shared.complete and outline(tree, shared) == [*of_others, (2, -1)]
    monkeypatch.setattr(shared_nodes, "SHARED_LIMIT", 11)
    assert check_shared(tree, requests).complete
