"""The tree of shared segments that people see."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest
from test_shared_prefixes import PAGE, Server

from sglang_mla_ext.observe import segment_entry
from sglang_mla_ext.prefix import segments
from sglang_mla_ext.prefix.segments import KEPT, ShownSegment

CHUNK = 256 // PAGE  # pages


@pytest.fixture
def tree(new_tree: Any) -> Any:
    return new_tree(PAGE)


def shown(server: Server) -> list[tuple[int, int, int, str, int | None]]:
    """Start and tokens in pages, holders, mode, and the position of the parent."""
    found = server.prefixes.shown_segments()
    at = {each.id: place for place, each in enumerate(found)}
    assert len(at) == len(found), "two with one number"
    assert all(each.parent is None or at[each.parent] < place for place, each in enumerate(found)), "parents first"
    assert sum(each.chunks for each in found) == server.pool.used_chunks
    return [(each.start // PAGE, each.tokens // PAGE, each.holders, each.mode, at.get(each.parent)) for each in found]


def test_nothing_is_shared(tree: Any) -> None:
    server = Server(tree)
    assert shown(server) == []
    server.decode(tree.run("abcdefgh"))
    assert shown(server) == []


def test_segments_of_a_plan_nest_and_what_nobody_uses_any_more_is_kept(tree: Any) -> None:
    server = Server(tree)
    top, left, right = "s" * CHUNK, "l" * CHUNK, "r" * CHUNK
    requests = [tree.run(top + below + end) for below in (left, right) for end in ("x", "y")]
    for _ in range(4):
        server.decode(*requests)
    nested = [(0, CHUNK, 4, "naive", None), (CHUNK, CHUNK, 2, "naive", 0), (CHUNK, CHUNK, 2, "naive", 0)]
    assert shown(server) == nested
    numbers = {each.id for each in server.prefixes.shown_segments()}
    server.decode(*requests[:2])  # the other two run no more, or wait
    (joined, alone) = server.prefixes.shown_segments()
    assert (joined.mode, joined.tokens, joined.holders, joined.tokens_saved) == ("naive", 2 * 256, 2, 512)
    assert (alone.mode, alone.start, alone.tokens, alone.tokens_saved) == (KEPT, 256, 256, 0)
    assert alone.parent == joined.id and alone.id in numbers
    server.prefixes.forget()
    assert shown(server) == []


def test_requests_that_wait_are_no_holders(tree: Any) -> None:
    """The tree counts whoever keeps a node from eviction: requests in prefill, and those that wait for a step."""
    server = Server(tree)
    top, left, right = "s" * CHUNK, "l" * CHUNK, "r" * CHUNK
    requests = [tree.run(top + below + end) for below in (left, right) for end in "xyz"]
    for _ in range(4):
        server.decode(*requests)
    assert [each[2] for each in shown(server)] == [6, 3, 3]
    tree.run(top + left + "w")
    tree.run(top + right + "w")
    for running, holders in ((requests[:3], [3, 0]), (requests[:4], [4, 3, 1])):
        server.decode(*running)
        found = server.prefixes.shown_segments()
        assert [each.holders for each in found] == holders, "of those that ran"
        assert max(each.holders for each in found) <= len(running) == server.prefixes.plan.requests
    server.prefixes.pool.drop({node for _, nodes in server.prefixes.held() for node in nodes})
    server.decode(*requests[:5])  # nothing of it is expanded yet: segments are kept that running requests hold
    assert max(each.holders for each in server.prefixes.shown_segments()) <= 5


def test_what_is_being_expanded_and_what_is_idle(tree: Any) -> None:
    server = Server(tree, expand_tokens_per_step=256)
    requests = [tree.run("a" * 3 * CHUNK + end) for end in "xy"]
    server.decode(*requests)
    assert [each[3] for each in shown(server)].count(KEPT) >= 1
    for _ in range(3):
        server.decode(*requests)
    assert [each[:4] for each in shown(server)] == [(0, 3 * CHUNK, 2, "naive")]
    server.prefixes.idle()
    assert [(start, tokens, mode) for start, tokens, _, mode, _ in shown(server)] == [(0, 3 * CHUNK, KEPT)]


def test_looking_changes_nothing_and_keeps_nothing(tree: Any) -> None:
    server = Server(tree)
    requests = [tree.run("a" * CHUNK + end) for end in "xy"]
    server.decode(*requests)
    version, plan = server.pool.version, server.prefixes.plan
    first, again = server.prefixes.shown_segments(), server.prefixes.shown_segments()
    assert first == again and (server.pool.version, server.prefixes.plan) == (version, plan)
    server.prefixes.forget()
    del plan
    gc.collect()
    assert len(server.prefixes._numbers._of) == 0


def test_parents_are_looked_for_within_a_bound(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tree)
    top = "s" * CHUNK
    requests = [tree.run(top + below * CHUNK + end) for below in "lr" for end in "xy"]
    for _ in range(4):
        server.decode(*requests)
    server.prefixes.idle()
    assert [parent for *_, parent in shown(server)] == [None, 0, 0]
    monkeypatch.setattr(segments, "CLIMB_LIMIT", 0)
    assert [parent for *_, parent in shown(server)] == [None, None, None]


def test_an_entry_says_what_a_segment_takes_and_saves() -> None:
    entry = segment_entry(ShownSegment(7, 3, 256, 768, 5, "naive", 2), chunk_bytes=1000, latent_bytes=10)
    assert json.loads(json.dumps(entry)) == {
        "id": 7,
        "parent": 3,
        "start": 256,
        "tokens": 512,
        "holders": 5,
        "mode": "naive",
        "expanded_bytes": 2000,
        "tokens_saved": 4 * 512,
        "bytes_saved": 4 * 5120,
    }


def test_without_a_tree_there_is_nothing() -> None:
    assert segments.shown_segments((), [], segments.ExpandedPool(2, 256), None, segments.SegmentNumbers()) == []
