"""Facts about a tree that gives out numbers of its nodes, and what it is asked for it, on SGLang's own cores. What
is said of every tree is in test_tree_view.py and test_shared_nodes.py."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tree_checks import check_shared, outline
from trees import TreeOfNumbers

from sglang_mla_ext.adapter.compat import mirror

pytestmark = pytest.mark.release("0.5.23+", reason="before, the tree gives out its nodes")


@pytest.fixture(params=TreeOfNumbers.KINDS, ids=str)
def tree(request: pytest.FixtureRequest) -> TreeOfNumbers:
    return TreeOfNumbers(*request.param)


class Asked:
    """Counts the paths that the tree is asked for, and their nodes."""

    def __init__(self, tree: TreeOfNumbers) -> None:
        self.paths = self.nodes = 0
        original = tree.view._mirror._paths

        def counted(ids: Sequence[int]) -> Any:
            paths = original(ids)
            self.paths += len(paths)
            self.nodes += sum(map(len, paths))
            return paths

        tree.view._mirror._paths = counted

    def taken(self) -> int:
        taken, self.paths, self.nodes = self.paths, 0, 0
        return taken


# -- identities --------------------------------------------------------------------------------------------------------


def test_a_split_leaves_the_number_with_its_end(tree: TreeOfNumbers) -> None:
    """The claim that expansions are identified by."""
    first = tree.run("abcdef")
    (before,) = tree.whole(first)
    slots = first.slots
    tree.run("abcxyz")
    tree.run("ax")
    path = tree.whole(first)
    assert [end // tree.page_size for _, end in path] == [1, 3, 6] and path[-1] == before
    core = tree.cache.tree_core
    assert torch.equal(core.collect_full_device_indices(before[0], tree.root), slots)


def test_numbers_are_not_given_twice(tree: TreeOfNumbers) -> None:
    numbers = set()
    for text in ("abc", "abd", "xyz") * 4:
        request = tree.run(text)
        path = tree.whole(request)
        tree.finish(request)
        tree.evict(10**6)
        assert not any(tree.is_there(number) for number, _ in path)
        assert not numbers & {number for number, _ in path}
        numbers |= {number for number, _ in path} | {tree.root}
        if text == "xyz":
            tree.cache.reset()
            assert tree.root not in numbers


def test_a_handle_survives_a_split_and_dies_with_its_node(tree: TreeOfNumbers) -> None:
    first = tree.run("abcdef")
    node = tree.handle(first)
    check_shared(tree, [first])
    assert tree.view.length(node) == 6 * tree.page_size and tree.view.parent(node) is None
    second = tree.run("abcxyz")
    shared = check_shared(tree, [first, second])
    assert outline(tree, shared) == [(3, -1)]
    (front,) = shared.nodes
    assert tree.handle(first) is node and tree.view.parent(node) is front
    assert tree.view.length(node) == tree.view.length(front) == 3 * tree.page_size
    assert [tree.view.holders(each) for each in (node, front)] == [1, 2]
    other = tree.handle(second)
    check_shared(tree, [second])
    assert [tree.view.holders(each) for each in (node, front, other)] == [0, 1, 1]
    tree.finish(first)
    assert tree.view.is_attached(node), "not held, but still cached"
    tree.evict(1)
    assert [tree.view.is_attached(each) for each in (front, node, other)] == [True, False, True]
    tree.cache.reset()
    assert not any(tree.view.is_attached(each) for each in (front, node, other))


def test_a_node_that_is_kept_is_found_below_a_new_front(tree: TreeOfNumbers) -> None:
    """Nobody holds it any more: what was expanded for it goes to the front, which the newcomer holds."""
    first = tree.run("abcdef")
    check_shared(tree, [first])
    node = tree.handle(first)
    tree.finish(first)
    check_shared(tree, [])
    newcomer = tree.run("abcxyz")
    check_shared(tree, [newcomer])
    assert tree.view.length(node) == 3 * tree.page_size
    assert tree.view.parent(node) is tree.view.parent(tree.handle(newcomer)) is not None


def test_a_request_whose_node_is_gone_shares_nothing(tree: TreeOfNumbers) -> None:
    """One more step of a request that has finished: its node may have been evicted."""
    gone, one, two = tree.run("gone"), tree.run("system-a"), tree.run("system-b")
    tree.finish(gone)
    tree.evict(1)
    assert tree.view.shared([gone, one, two]).deepest == [-1, 0, 0]


# -- what is asked -----------------------------------------------------------------------------------------------------


def test_the_tree_is_asked_for_newcomers_alone(tree: TreeOfNumbers) -> None:
    asked = Asked(tree)
    requests = [tree.run(f"system-{letter}") for letter in "abcdefgh"]
    shared = tree.view.shared(requests)
    assert asked.taken() == 8
    for batch in (requests, requests[::-1], requests[:3], requests):
        tree.view.shared(batch)
        assert asked.taken() == 0
    newcomer = tree.run("system-x")  # splits nothing
    assert tree.view.shared([*requests, newcomer]).nodes == shared.nodes and asked.taken() == 1
    newcomer = tree.run("sysX")  # splits what all have in common
    assert outline(tree, tree.view.shared([*requests, newcomer])) == [(3, -1), (7, 0)]
    assert asked.taken() == 2, "and the node that it was cut from"
    tree.view.shared([*requests[:4], tree.run("system-axy"), tree.run("system-axz")])
    assert asked.taken() == 2, "a leaf that became an inner node"


def test_a_search_is_bounded_and_goes_on(tree: TreeOfNumbers, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [tree.run(f"system-{letter}abc") for letter in "abcdefghijklmnopqrstuvwxyz" * 2]
    check_shared(tree, requests)
    newcomer = tree.run("system-aX")
    assert any(end == 8 * tree.page_size for _, end in tree.whole(newcomer))
    monkeypatch.setattr(mirror, "PATHS_AT_ONCE", 2)
    monkeypatch.setattr(mirror, "ASK_LIMIT", 10)
    calls = 1
    while not (shared := tree.view.shared([*requests, newcomer])).complete:
        calls += 1
        assert calls < 20
    assert calls > 1 and (8, 0) in outline(tree, shared)
    check_shared(tree, [*requests, newcomer])


def test_newcomers_are_bounded_too(tree: TreeOfNumbers, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [tree.run(f"system-{letter}") for letter in "abcdefghijklmnop"]
    monkeypatch.setattr(mirror, "PATHS_AT_ONCE", 2)
    monkeypatch.setattr(mirror, "ASK_LIMIT", 9)
    first = tree.view.shared(requests)
    assert not first.complete and first.deepest == [0] * 6 + [-1] * 10
    monkeypatch.setattr(mirror, "ASK_LIMIT", 100)
    check_shared(tree, requests)


def siblings(tree: TreeOfNumbers, count: int) -> tuple[list[str], list[Any]]:
    """Texts below one page, whose nodes are four deep, and a request on each."""
    texts = [f"s{chr(0x4E00 + at)}abcdefgh" for at in range(count)]
    for text in texts:
        for length in (4, 6, 8):
            tree.finish(tree.run(text[:length]))
    return texts, [tree.run(text) for text in texts]


def test_searches_of_many_arrivals_share_what_they_ask() -> None:
    """At each of four depths a hundred cut one of 1,024 siblings, any of which could be what was cut."""
    tree = TreeOfNumbers(1, "rust")
    signs = [chr(0x4E00 + at) for at in range(1024)]
    levels = ["", "s", "st", "stu"]
    requests = [tree.run(level + sign + "abc") for level in levels for sign in signs]
    while not tree.view.shared(requests).complete:
        pass
    asked, mirror_of = Asked(tree), tree.view._mirror
    requests += [tree.run(level + sign + "X") for level in levels for sign in signs[:1000:10]]
    calls = 1
    while not (shared := tree.view.shared(requests)).complete:
        calls += 1
        assert sum(len(search.fronts) + len(search.left) for search in mirror_of._searches.values()) <= 4 * 1124
        assert calls < 10
    assert asked.paths <= 4 * 1124 and not mirror_of._searches
    assert len(shared.nodes) == 3 + 400
    cut = {*signs[:1000:10]}
    ends = [shared.ends[at] if at >= 0 else 0 for at in shared.deepest]
    texts = [level + sign for level in levels for sign in signs]
    assert ends[: len(texts)] == [len(text) - (text[-1] not in cut) for text in texts]


def test_arrivals_one_by_one_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a call has time for a few of the siblings only."""
    tree = TreeOfNumbers(1, "rust")
    texts, requests = siblings(tree, 64)
    tree.view.shared(requests)
    monkeypatch.setattr(mirror, "ASK_LIMIT", 40)
    mirror_of = tree.view._mirror
    for text in texts[:20]:
        requests.append(tree.run(text[:3] + "X"))
        tree.view.shared(requests)
        assert sum(len(search.left) for search in mirror_of._searches.values()) <= 64
    calls = 0
    while not tree.view.shared(requests).complete:
        calls += 1
        assert calls < 20
    check_shared(tree, requests)


def test_what_nobody_holds_is_searched_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = TreeOfNumbers(1, "rust")
    texts, requests = siblings(tree, 64)
    tree.view.shared(requests)
    monkeypatch.setattr(mirror, "ASK_LIMIT", 6)
    newcomer = tree.run(texts[0][:3] + "X")
    assert not tree.view.shared([*requests, newcomer]).complete
    front = weakref.ref(tree.view.parent(tree.handle(newcomer)))
    tree.finish(newcomer)
    asked = Asked(tree)
    for _ in range(3):
        complete = tree.view.shared(requests).complete
    gc.collect()
    assert complete and front() is None and not tree.view._mirror._searches
    assert asked.paths < 32, "not all of the siblings"


def test_the_last_new_node_is_searched_for(tree: TreeOfNumbers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a path shows one above a node that is known, and one below it: what the first is above is on the path."""
    monkeypatch.setattr(mirror, "PATHS_AT_ONCE", 2)
    requests = [tree.run("abcdef"), *(tree.run("abcdef" + letter * 4) for letter in "ghijklmnop")]
    check_shared(tree, requests)
    front = tree.run("abcX")
    requests += [tree.run("abcdefggX"), front]  # the child that is asked last is the one that was cut
    assert outline(tree, check_shared(tree, requests)) == [(3, -1), (6, 0), (8, 1)]


# -- time --------------------------------------------------------------------------------------------------------------


def test_a_thousand_requests_on_one_prompt() -> None:
    tree = TreeOfNumbers(1, "rust")
    requests = [tree.run(f"system-{at:04}") for at in range(1024)]
    started = time.process_time()
    tree.view.shared(requests)
    first = time.process_time() - started
    started = time.process_time()
    for at in range(10):
        tree.view.shared(requests if at % 2 else requests[:-1])
    assert first < 0.5 and (time.process_time() - started) / 10 < 0.02, "far above what it takes"
