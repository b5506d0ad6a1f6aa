"""Paths and slots, read from SGLang's own radix tree."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trees import Step, Tree, TreeOfNodes

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.compat.tree_view import UnsupportedTree


@pytest.fixture(params=Tree.KINDS, ids=str)
def tree(request: pytest.FixtureRequest) -> TreeOfNodes:
    return Tree(*request.param)


def pages(tree: Any, path: tuple[Step, ...]) -> list[int]:
    """Where each node of a path ends, in pages; one page is one letter of a request's text."""
    assert all(step.end % tree.page_size == 0 for step in path)
    return [step.end // tree.page_size for step in path]


def test_requests_that_share_a_prompt_share_its_node(tree: Any) -> None:
    first, second = tree.run("system-a"), tree.run("system-b")
    one, two = tree.paths([first, second])
    assert pages(tree, one) == pages(tree, two) == [7, 8]
    assert one[0] == two[0] and one[0].node is two[0].node
    assert one[1].node is not two[1].node
    assert tree.paths([second, first]) == [two, one]
    assert tree.path(one[-1].node) == one


def test_nothing_cached_is_an_empty_path(tree: Any) -> None:
    tree.run("abc")
    at_root, not_yet = SimpleNamespace(last_node=tree.root), SimpleNamespace(last_node=None)
    assert tree.paths([at_root, not_yet]) == [(), ()]
    assert tree.paths([]) == []


def test_a_node_keeps_its_end_through_splits(tree: Any) -> None:
    """The claim that expansions are identified by: the old object keeps the back part, and its end."""
    first = tree.run("abcdef")
    (old,) = tree.path(tree.handle(first))
    slots = tree.slots(old.node, 0, old.end)

    tree.run("abcxyz")
    tree.look()
    after = tree.path(old.node)
    assert pages(tree, after) == [3, 6] and after[-1] == old
    tree.run("ax")
    tree.look()
    again = tree.path(old.node)
    assert pages(tree, again) == [1, 3, 6] and again[1:] == after
    assert tree.paths([first]) == [again], "the same handle for the same node"
    assert torch.equal(tree.slots(old.node, 0, old.end), slots)


def test_a_split_front_is_held_like_the_node_it_was_cut_from(tree: Any) -> None:
    first, second = tree.run("abcdef"), tree.run("abcxyz")
    front, back = tree.path(tree.handle(first))
    end_of_second = tree.handle(second)
    tree.finish(second)
    tree.look()
    assert tree.view.holders(front.node) and tree.view.holders(back.node)
    assert not tree.view.holders(end_of_second)
    tree.finish(first)
    tree.look()
    assert not tree.view.holders(front.node) and not tree.view.holders(back.node)


def test_a_node_has_one_handle_as_long_as_the_handle_is_kept(tree: Any) -> None:
    """Handles are compared and hashed by identity, so that a node is recognised on other requests' paths."""
    first = tree.run("system-a")
    kept = tree.handle(first)
    assert tree.handle(first) is kept and tree.paths([tree.run("system-a")])[0][-1].node is kept
    other = tree.run("other")
    gone = weakref.ref(tree.handle(other))
    tree.finish(other)
    for _ in range(2):  # whose nodes it keeps, if any
        tree.look()
    gc.collect()
    assert gone() is None, "the view itself keeps no handle"


def test_the_state_follows_requests_and_their_nodes(tree: Any) -> None:
    one, two = tree.run("system-a"), tree.run("system-b")
    state = tree.view.state([one, two])
    assert tree.view.state([one, two]) == state and hash(state) is not None
    assert tree.view.state([two, one]) != state
    assert tree.view.state([one]) != state
    assert tree.view.state([replace(one, rid="another"), two]) != state
    assert tree.view.state([replace(one, last_node=two.last_node), two]) != state
    tree.run("sys")
    assert tree.view.state([one, two]) == state, "a split does not change where they end"


def test_nodes_that_are_held_do_not_cease_to_exist(tree: Any) -> None:
    """Their ids stay theirs, even when no request and no tree has them any more."""
    request = tree.run("system-a")
    tree.look()
    held = tree.view.hold([request])
    node = weakref.ref(held[0])
    tree.finish(request)
    tree.evict(10**6)
    del request
    for _ in range(3):
        tree.look()
    gc.collect()
    assert node() is not None
    del held
    gc.collect()
    assert node() is None


def test_slots_are_those_of_the_first_request_that_computed_them(tree: Any) -> None:
    first, second = tree.run("system-a"), tree.run("system-bc")
    shared = 7 * tree.page_size
    assert torch.equal(first.slots[:shared], second.slots[:shared])
    for request in (first, second):
        length = len(request.slots)
        for start, end in ((0, length), (0, shared), (shared, length), (shared - 1, shared + 1), (1, 2), (3, length)):
            slots = tree.slots(tree.handle(request), start, end)
            assert torch.equal(slots, request.slots[start:end]) and slots.dtype == torch.int64


def test_equal_text_under_different_extra_keys_shares_no_node(tree: Any) -> None:
    requests = [tree.run("system", extra_key) for extra_key in (None, "tenant", "tenant", "other")]
    nodes = [{id(step.node) for step in path} for path in tree.paths(requests)]
    assert nodes[1] == nodes[2]
    assert not nodes[0] & nodes[1] and not nodes[0] & nodes[3] and not nodes[1] & nodes[3]
    slots = [set(tree.slots(tree.handle(request), 0, 6 * tree.page_size).tolist()) for request in requests]
    assert slots[1] == slots[2] and not slots[0] & slots[1] and not slots[0] & slots[3] and not slots[1] & slots[3]


def test_lengths_parents_and_holders(tree: Any) -> None:
    first = tree.run("abcdef")
    node = tree.handle(first)
    assert tree.view.length(node) == 6 * tree.page_size and tree.view.parent(node) is None
    tree.look()
    assert tree.view.holders(node) == 1
    second = tree.run("abcxyz")
    tree.look()
    front = tree.view.parent(node)
    assert tree.view.length(node) == tree.view.length(front) == 3 * tree.page_size
    assert tree.view.parent(front) is None and tree.view.parent(tree.handle(second)) is front
    assert [tree.view.holders(handle) for handle in (node, front)] == [1, 2]
    tree.finish(first, second)
    tree.look()
    assert [tree.view.holders(handle) for handle in (node, front)] == [0, 0]


def test_evicted_nodes_are_detached(tree: Any) -> None:
    first, second = tree.run("abcdef"), tree.run("abcxyz")
    front, back = (step.node for step in tree.path(tree.handle(first)))
    other = tree.handle(second)
    assert all(map(tree.view.is_attached, (front, back, other)))
    tree.finish(first)
    assert tree.view.is_attached(back), "not held, but still cached"
    tree.evict(1)
    assert [tree.view.is_attached(node) for node in (front, back, other)] == [True, False, True]
    again = tree.handle(tree.run("abcdef"))
    assert again is not back and tree.view.is_attached(again)
    assert not tree.view.is_attached(back), "another node is in its place"


def test_nodes_of_a_flushed_tree_are_detached(tree: Any) -> None:
    request = tree.run("abc-d"), tree.run("abc-e")
    nodes = [step.node for step in tree.path(tree.handle(request[0]))]
    assert len(nodes) == 2 and all(map(tree.view.is_attached, nodes))
    tree.flush()
    assert not any(map(tree.view.is_attached, nodes))
    assert tree.view.is_attached(tree.handle(tree.run("abc-d")))


@pytest.mark.release("0.5.17", reason="fields of its nodes; test_tree_on_host.py has a cache on the host")
def test_nodes_on_the_host_are_attached_until_they_are_dropped(tree: Any) -> None:
    """As HiCache leaves them."""
    request = tree.run("abcdef")
    node = tree.handle(request)
    slots, request.last_node.value = request.last_node.value, None
    request.last_node.host_value = slots
    assert tree.view.is_attached(node)
    request.last_node.host_value = None
    assert not tree.view.is_attached(node)


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(Tree.KINDS),
    st.lists(st.tuples(st.text("ab", min_size=1, max_size=7), st.sampled_from([None, "tenant"])), min_size=1),
)
def test_any_order_of_prompts(kind: tuple[int, str | None], prompts: list[tuple[str, str | None]]) -> None:
    tree = Tree(*kind)
    requests, first_paths = [], []
    for prompt in prompts:
        requests.append(tree.run(*prompt))
        tree.look()
        first_paths.append(tree.path(tree.handle(requests[-1])))
    paths = tree.paths(requests)
    for request, before, path in zip(requests, first_paths, paths, strict=True):
        assert set(before) <= set(path), "a held node changed its end"
        assert path == tree.path(tree.handle(request))
        assert path[-1].end == len(request.slots)
        middle = path[-1].end // 2
        for start, end in ((0, path[-1].end), (middle, path[-1].end), (0, middle + 1), (middle, middle + 1)):
            assert torch.equal(tree.slots(tree.handle(request), start, end), request.slots[start:end])
    for one, (text, key) in zip(paths, prompts, strict=True):
        for other, (other_text, other_key) in zip(paths, prompts, strict=True):
            pairs = zip(text, other_text, strict=False) if key == other_key else ()
            common = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
            assert max((step.end for step in one if step in other), default=0) == common * tree.page_size


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(Tree.KINDS), st.lists(st.text("ab", min_size=2, max_size=7), min_size=1))
def test_a_tree_of_pairs_of_tokens(kind: tuple[int, str | None], prompts: list[str]) -> None:
    """As SGLang keeps it for EAGLE's drafts: a slot is shared where the token behind it is the same, too. Nodes have as
    many slots as they have pairs, in whole pages."""
    tree = Tree(*kind, pairs=True)
    page_size = tree.page_size
    requests = [tree.run(prompt) for prompt in prompts]
    ends = []
    for request, path in zip(requests, tree.paths(requests), strict=True):
        ends.append([step.end for step in path])
        assert all(end % page_size == 0 for end in ends[-1]) and max(ends[-1], default=0) == len(request.slots)
        assert [(tree.identity(step.node), step.end) for step in path] == tree.whole(request)
        if path:
            assert torch.equal(tree.slots(tree.handle(request), 0, len(request.slots)), request.slots)
    shared = tree.view.shared(requests)
    for one, (text, last) in enumerate(zip(prompts, shared.deepest, strict=True)):
        expected = 0
        for other, other_text in enumerate(prompts):
            tokens, others = ([letter for letter in each for _ in range(page_size)] for each in (text, other_text))
            same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False))))
            pages = max(same - 1, 0) // page_size * page_size
            assert torch.equal(requests[one].slots[:pages], requests[other].slots[:pages])
            if one != other:
                expected = max(expected, pages)
        assert (shared.ends[last] if last >= 0 else 0) == expected


@pytest.mark.release("0.5.17", reason="0.5.23 has no ChunkCache")
def test_refuses_what_is_no_radix_tree() -> None:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.chunk_cache import ChunkCache
    from sglang.srt.mem_cache.radix_cache import RadixCache

    params = CacheInitParams(disable=True, req_to_token_pool=None, token_to_kv_pool_allocator=None, page_size=1)
    with pytest.raises(UnsupportedTree, match=r"ChunkCache\. Remove --disable-radix-cache"):
        installed.TreeView(ChunkCache(params))
    with pytest.raises(UnsupportedTree, match="RadixCache"):
        installed.TreeView(RadixCache.create_simulated(disable=True))


@pytest.mark.release("0.5.23+", reason="one tree is for all servers")
def test_refuses_other_caches() -> None:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    cache = UnifiedRadixCache.__new__(UnifiedRadixCache)
    cache.disable = True
    for other in (cache, object()):
        with pytest.raises(UnsupportedTree, match=r"Remove --disable-radix-cache"):
            installed.TreeView(other)
