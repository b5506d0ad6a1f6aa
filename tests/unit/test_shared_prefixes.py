"""From running requests to plans: what is expanded when, and that a plan's chunks hold its rows' own tokens.

The tree is SGLang's; the expander is a fake that remembers what was written where.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_mla_ext.kernels.naive.schedule import ExpandedSegment
from sglang_mla_ext.kernels.storage.expanded import CHUNK_TOKENS
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix import shared_prefixes
from sglang_mla_ext.prefix.cost_model import CostModel, GpuRates, Mode, ModelDims
from sglang_mla_ext.prefix.expanded_pool import ExpandedPool
from sglang_mla_ext.prefix.planner import Plan
from sglang_mla_ext.prefix.shared_prefixes import SharedPrefixes

PAGE = 64  # tokens; one letter of a prompt
COST = CostModel(ModelDims.from_json("deepseek-v3"), 16, GpuRates.from_json("cpu"))
FULL = "prefix memory full"


class FakeExpander:
    """Writes, instead of keys and values, the number that the tree has for each latent row."""

    def __init__(self, rows: dict[int, int]) -> None:
        self.rows = rows
        self.memory: dict[tuple[int, int], int] = {}
        self.calls: list[tuple[int, int]] = []  # first token, tokens
        self.error: Exception | None = None

    def expand(self, slots: torch.Tensor, chunks: Sequence[int], start: int) -> None:
        if self.error:
            raise self.error
        assert len(slots) > 0
        self.calls.append((start, len(slots)))
        for position, slot in enumerate(slots.tolist(), start):
            chunk, offset = divmod(position, CHUNK_TOKENS)
            self.memory[chunks[chunk], offset] = self.rows[slot]

    def taken(self) -> int:
        """Tokens expanded since the last call."""
        tokens = sum(count for _, count in self.calls)
        self.calls.clear()
        return tokens


class Server:
    """A tree, the requests that run on it, and the shared prefixes under test."""

    def __init__(
        self, tree: Any, chunks: int = 64, ways: dict[str, Any] | None = None, cost: CostModel = COST, **options: Any
    ) -> None:
        self.tree = tree
        self.expander = FakeExpander(tree.rows)
        self.counters = Counters()
        self.pool = ExpandedPool(chunks, CHUNK_TOKENS)
        options = {"mode": "naive", **options}
        self.prefixes = SharedPrefixes(
            HybridMLAOptions(**options), cost, self.pool, self.expander, self.counters, **(ways or {})
        )
        self.prefixes.attach(tree.view)

    def decode(self, *requests: Any) -> list[tuple[tuple[int, ...], int]]:
        """Plan a decode step and check what must always hold; returns rows and length of each naive group, in pages."""
        plan, groups = self.prefixes.before_decode(requests)
        self.check(plan, groups, requests)
        return [(group.rows, group.tokens / PAGE) for group in groups]

    def check(self, plan: Plan, groups: tuple[ExpandedSegment, ...], requests: Sequence[Any]) -> None:
        assert plan is self.prefixes.plan and plan.num_rows == len(requests)
        shared = zip(plan.prefix_lens, requests, strict=True)
        assert all(length <= len(request.slots) for length, request in shared)
        naive = plan.of_mode(Mode.NAIVE)
        assert [(group.rows, group.end) for group in naive] == [(g.rows, g.tokens) for g in groups]
        for group in groups:
            assert len(group.rows) >= 2
            assert len({requests[row].extra_key for row in group.rows}) == 1
            held = [divmod(token, CHUNK_TOKENS) for token in range(group.tokens)]
            contents = [self.expander.memory[group.chunks[chunk], offset] for chunk, offset in held]
            for row in group.rows:
                own = [self.tree.rows[slot] for slot in requests[row].slots[: group.tokens].tolist()]
                assert contents == own, "the chunks hold another prefix"


@pytest.fixture
def tree(new_tree: Any) -> Any:
    return new_tree(PAGE)


# -- when a prefix is expanded -----------------------------------------------------------------------------------------


def test_at_prefill_as_soon_as_two_requests_share_it(tree: Any) -> None:
    server = Server(tree)
    first = tree.run("systemprompt-a")
    server.prefixes.before_prefill([first], [])
    assert server.expander.taken() == 0
    second = tree.run("systemprompt-b")
    server.prefixes.before_prefill([second], [first])
    assert server.expander.taken() == 13 * PAGE and server.counters.expansions == 1
    assert server.decode(first, second) == [((0, 1), 13)]
    assert server.expander.taken() == 0


def test_at_decode_where_prefill_missed_it(tree: Any) -> None:
    server = Server(tree)
    requests = [tree.run("systemprompt-a"), tree.run("systemprompt-b"), tree.run("else")]
    assert server.decode(*requests) == [((0, 1), 13)]
    assert server.expander.calls == [(0, 13 * PAGE)]


def test_only_from_the_minimum_length_on(tree: Any) -> None:
    requests = [tree.run("fouraaa"), tree.run("fourbbb")]
    assert Server(tree, min_prefix_len=4 * PAGE + 1).decode(*requests) == []
    assert Server(tree, min_prefix_len=4 * PAGE).decode(*requests) == [((0, 1), 4)]


def test_never_in_mode_absorb(tree: Any) -> None:
    server = Server(tree, mode="absorb")
    requests = [tree.run("systemprompt-" + letter) for letter in "abcdefgh"]
    server.prefixes.before_prefill(requests, [])
    assert server.decode(*requests) == []
    assert server.expander.calls == [] and server.pool.used_chunks == 0 and server.counters == Counters()


def test_in_mode_auto_where_the_cost_model_says_so(tree: Any) -> None:
    server = Server(tree, mode="auto")
    requests = [tree.run("systemprompt-" + letter) for letter in "abcdef"]
    smallest = COST.smallest_profitable_group(13 * PAGE)
    assert 2 < smallest <= len(requests)
    assert server.decode(*requests[: smallest - 1]) == []
    assert server.decode(*requests[:smallest]) == [(tuple(range(smallest)), 13)]


def test_never_for_equal_text_of_different_tenants(tree: Any) -> None:
    server = Server(tree)
    requests = [tree.run("systemprompt", key) for key in (None, "x", "y")]
    server.prefixes.before_prefill(requests, [])
    assert server.decode(*requests) == [] and server.expander.taken() == 0
    requests += [tree.run("systemprompt", key) for key in ("y", "x")]
    assert server.decode(*requests) == [((1, 4), 12), ((2, 3), 12)]


def test_never_without_a_tree(tree: Any) -> None:
    prefixes = SharedPrefixes(HybridMLAOptions(), COST, ExpandedPool(4, CHUNK_TOKENS), FakeExpander({}), Counters())
    requests = [tree.run("systemprompt"), tree.run("systemprompt")]
    prefixes.before_prefill(requests, [])
    prefixes.release_unheld()
    assert prefixes.before_decode(requests) == (Plan(2), ())


# -- for prefill itself ------------------------------------------------------------------------------------------------


def parts_of(server: Server, *requests: Any, new_tokens: int = 9, always: bool = True) -> list[int]:
    """Tokens of each request's prompt that a prefill step would find expanded, checked against the tree."""
    lens = [len(request.slots) for request in requests]
    parts = server.prefixes.expanded_parts(requests, lens, [new_tokens] * len(requests), always=always)
    for request, part in zip(requests, parts, strict=True):
        held = [divmod(token, CHUNK_TOKENS) for token in range(part.tokens)]
        contents = [server.expander.memory[part.chunks[chunk], offset] for chunk, offset in held]
        assert contents == [server.tree.rows[slot] for slot in request.slots[: part.tokens].tolist()]
    return [part.tokens for part in parts]


def test_prefill_may_expand_at_once_what_sglang_would_expand_for_each_request(tree: Any) -> None:
    """Also where decode would not gain from it, and then every request of the step uses it."""
    server = Server(tree, mode="auto", expand_tokens_per_step=64)
    requests = [tree.run("systemprompt-" + letter) for letter in "ab"]
    server.prefixes.before_prefill(requests, [])
    assert parts_of(server, *requests) == [0, 0] and server.expander.taken() == 0
    server.prefixes.before_prefill(requests, [], affordable=2 * 13 * PAGE)
    assert server.expander.taken() == 13 * PAGE
    assert parts_of(server, *requests) == [13 * PAGE] * 2
    lone = tree.run("systemprompt")
    assert parts_of(server, *requests, lone, tree.run("else")) == [13 * PAGE] * 2 + [12 * PAGE, 0]


def test_prefill_uses_no_more_than_is_cached_for_the_request(tree: Any) -> None:
    server = Server(tree)
    requests = [tree.run("systemprompt-" + letter) for letter in "ab"]
    server.prefixes.before_prefill(requests, [])
    parts = server.prefixes.expanded_parts(requests, [5 * PAGE + 3, 0], [1, 1], always=True)
    assert [part.tokens for part in parts] == [5 * PAGE + 3, 0]


def test_prefill_that_would_gain_nothing_is_plain(tree: Any) -> None:
    server = Server(tree, mode="auto")
    requests = [tree.run("systemprompt-" + letter) for letter in "ab"]
    server.prefixes.before_prefill(requests, [], affordable=10**6)
    assert parts_of(server, *requests, new_tokens=1, always=False) == [0, 0]
    assert parts_of(server, *requests, new_tokens=500, always=False) == [13 * PAGE] * 2


def test_optional_expansion_makes_no_room_and_counts_no_failure(tree: Any) -> None:
    server = Server(tree, chunks=4)  # 16 pages
    running = [tree.run("systemprompt-" + letter) for letter in "ab"]
    server.decode(*running)
    newcomers = [tree.run("other" + letter) for letter in "ab"]
    server.prefixes.before_prefill(newcomers, running, affordable=10**6)
    assert parts_of(server, *running) == [13 * PAGE] * 2
    assert sum(server.counters.fallbacks.values()) <= 1  # decode's own wish, not that of prefill again


# -- how fast ----------------------------------------------------------------------------------------------------------


def test_no_step_expands_more_than_allowed_and_no_plan_uses_half_a_prefix(tree: Any) -> None:
    server = Server(tree, expand_tokens_per_step=300)
    requests = [tree.run("sixteen-letters-a"), tree.run("sixteen-letters-b")]  # 16 pages, 1024 tokens
    server.prefixes.before_prefill(requests, [])
    assert server.expander.taken() == 300
    assert [(server.decode(*requests), server.expander.taken()) for _ in range(4)] == [
        ([], 300),
        ([], 300),
        ([((0, 1), 16)], 124),
        ([((0, 1), 16)], 0),
    ]
    assert server.counters.expansions == 1


def test_prefixes_take_turns_the_most_worthwhile_first(tree: Any) -> None:
    server = Server(tree, expand_tokens_per_step=512)
    requests = [tree.run("AAAAAAAA" + letter) for letter in "123"] + [tree.run("BBBBBBBB" + letter) for letter in "12"]
    assert server.decode(*requests) == [((0, 1, 2), 8)]
    assert server.decode(*requests) == [((0, 1, 2), 8), ((3, 4), 8)]


def test_the_finished_part_is_used_while_a_longer_prefix_is_expanded(tree: Any) -> None:
    server = Server(tree, expand_tokens_per_step=256)
    first, second = tree.run("four11111111xx"), tree.run("four2222")
    assert server.decode(first, second) == [((0, 1), 4)]
    third = tree.run("four11111111yy")
    assert [server.decode(first, third) for _ in range(2)] == [[((0, 1), 4)], [((0, 1), 12)]]
    assert server.expander.calls == [(0, 256), (256, 256), (512, 256)] and server.pool.used_chunks == 3
    assert (server.counters.expansions, server.counters.extensions) == (1, 1)


# -- when a plan is made again -----------------------------------------------------------------------------------------


def test_a_plan_is_kept_until_something_changes(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Plan:
        calls.append(args)
        return plan_groups(*args, **kwargs)

    plan_groups = shared_prefixes.plan_groups
    monkeypatch.setattr(shared_prefixes, "plan_groups", counted)

    def plans_made(*requests: Any) -> bool:
        calls.clear()
        server.decode(*requests)
        return bool(calls)

    server = Server(tree)
    requests = [tree.run("systemprompt-" + letter) for letter in "abc"]
    server.decode(*requests)
    server.decode(*requests)  # the step after an expansion looks whether more is to do
    plan = server.prefixes.plan
    assert not plans_made(*requests) and server.prefixes.plan is plan
    assert plans_made(*reversed(requests)), "the rows' order changed"
    assert plans_made(*requests[:2]), "a request left"
    assert plans_made(*requests), "a request came"
    assert not plans_made(*requests)
    requests[0].last_node = tree.run("systemprompt-aaa").last_node
    assert plans_made(*requests), "a request's node changed"
    assert not plans_made(*requests)
    server.pool.drop(server.pool.expansions[0])
    assert plans_made(*requests), "an expansion went away"


# -- when an expansion goes away ---------------------------------------------------------------------------------------


def test_stays_while_one_request_holds_it_and_goes_with_the_last(tree: Any) -> None:
    server = Server(tree)
    first, second, other = tree.run("systemprompt-a"), tree.run("systemprompt-b"), tree.run("x")
    server.decode(first, second, other)
    tree.finish(first)
    assert server.decode(second, other) == [] and server.pool.used_chunks == 4
    assert server.expander.taken() == 13 * PAGE
    third = tree.run("systemprompt-c")
    assert server.decode(second, other, third) == [((0, 2), 13)] and server.expander.taken() == 0
    tree.finish(second, third)
    assert server.decode(other) == [] and server.pool.used_chunks == 0 and server.counters.evictions == 1


def test_goes_when_the_server_is_idle(tree: Any) -> None:
    server = Server(tree)
    requests = [tree.run("systemprompt-a"), tree.run("systemprompt-b")]
    server.decode(*requests)
    server.prefixes.idle()
    assert server.pool.used_chunks == 4, "a request holds it"
    tree.finish(*requests)
    server.prefixes.idle()
    assert server.pool.used_chunks == 0 and server.counters.evictions == 1
    assert server.prefixes.plan == Plan(0)


def test_forget_drops_everything_and_the_next_step_expands_again(tree: Any) -> None:
    server = Server(tree)
    requests = [tree.run("systemprompt-a"), tree.run("systemprompt-b")]
    server.decode(*requests)
    server.prefixes.forget()
    assert server.prefixes.plan == Plan(0) and server.pool.used_chunks == 0 and server.counters.evictions == 1
    server.expander.taken()
    server.expander.memory.clear()
    assert server.decode(*requests) == [((0, 1), 13)] and server.expander.taken() == 13 * PAGE


def test_recovers_from_an_expander_that_failed(tree: Any) -> None:
    server = Server(tree)
    requests = [tree.run("systemprompt-a"), tree.run("systemprompt-b")]
    server.expander.error = RuntimeError("no memory")
    with pytest.raises(RuntimeError, match="no memory"):
        server.decode(*requests)
    server.prefixes.forget()  # as the backend does
    server.expander.error = None
    assert server.decode(*requests) == [((0, 1), 13)]


# -- splits ------------------------------------------------------------------------------------------------------------


def test_a_request_that_diverges_inside_uses_the_first_part(tree: Any) -> None:
    server = Server(tree)
    first, second = tree.run("systemprompt-a"), tree.run("systemprompt-b")
    server.decode(first, second)
    server.expander.taken()
    third = tree.run("systemprom...")
    server.prefixes.before_prefill([third], [first, second])
    assert server.decode(first, second, third) == [((0, 1, 2), 10)]
    assert server.expander.taken() == 0 and server.pool.used_chunks == 4 and server.counters.evictions == 0
    assert server.decode(third, second) == [((0, 1), 10)]
    tree.finish(first, second)
    fourth = tree.run("systemprom,,,")
    assert server.decode(third, fourth) == [((0, 1), 10)]
    assert server.expander.taken() == 0 and server.pool.used_chunks == 3, "cut back to what is held"


# -- little memory -----------------------------------------------------------------------------------------------------


def test_a_prefix_is_shortened_to_the_memory(tree: Any) -> None:
    server = Server(tree, chunks=2)
    requests = [tree.run("sixteen-letters-a"), tree.run("sixteen-letters-b")]
    assert server.decode(*requests) == [((0, 1), 2 * CHUNK_TOKENS / PAGE)]
    assert not server.counters.fallbacks


@pytest.mark.parametrize("chunks", [0, 1])
def test_falls_back_where_memory_is_less_than_the_minimum(tree: Any, chunks: int) -> None:
    server = Server(tree, chunks=chunks, min_prefix_len=300)
    requests = [tree.run("sixteen-letters-a"), tree.run("sixteen-letters-b")]
    assert server.decode(*requests) == []
    assert server.counters.fallbacks == {FULL: 1} and server.pool.used_chunks == 0


def test_unwanted_expansions_make_room(tree: Any) -> None:
    server = Server(tree, chunks=4)
    ours = [tree.run("sixteen-letters-a"), tree.run("sixteen-letters-b")]
    server.decode(*ours)
    tree.finish(ours[1])
    theirs = [tree.run("SIXTEEN-LETTERS-a"), tree.run("SIXTEEN-LETTERS-b")]
    assert server.decode(ours[0], *theirs) == [((1, 2), 16)]
    assert server.counters.evictions == 1 and not server.counters.fallbacks


def test_wanted_expansions_stay(tree: Any) -> None:
    server = Server(tree, chunks=4)
    ours = [tree.run("sixteen-letters-a"), tree.run("sixteen-letters-b")]
    server.decode(*ours)
    theirs = [tree.run("SIXTEEN-LETTERS-a"), tree.run("SIXTEEN-LETTERS-b")]
    assert server.decode(*ours, *theirs) == [((0, 1), 16)]
    assert server.counters.evictions == 0 and server.counters.fallbacks[FULL] == 1


def test_no_fall_back_is_counted_where_what_fits_is_used(tree: Any) -> None:
    server = Server(tree, chunks=3)
    first, second = tree.run("sixteen-letters-a"), tree.run("sixteen-letters-b")
    assert server.decode(first, second) == [((0, 1), 12)]
    third = tree.run("sixteen-letter..")
    assert server.decode(first, second, third) == [((0, 1, 2), 12)]
    assert not server.counters.fallbacks


def test_nothing_is_dropped_where_no_room_is_needed(tree: Any) -> None:
    server = Server(tree, chunks=6)
    ours = [tree.run("sixteen-letters-a"), tree.run("sixteen-letters-b")]
    theirs = [tree.run("EIGHTLET-a"), tree.run("EIGHTLET-b")]
    server.decode(*ours, *theirs)
    tree.finish(theirs[1])
    assert server.decode(*ours, theirs[0]) == [((0, 1), 16)]
    assert server.counters.evictions == 0, "its memory was not needed, and its next user may come soon"


def test_prefill_uses_memory_of_requests_that_have_left(tree: Any) -> None:
    server = Server(tree, chunks=4)
    ours = [tree.run("fouraaaaaaaaaaaa1"), tree.run("fouraaaaaaaaaaaa2")]
    server.decode(*ours)
    tree.finish(*ours)
    server.expander.taken()
    theirs = [tree.run("fourbbbbbbbbbbbb1"), tree.run("fourbbbbbbbbbbbb2")]
    server.prefixes.before_prefill(theirs, [])
    assert server.expander.taken() == 12 * PAGE and not server.counters.fallbacks


# -- anything ----------------------------------------------------------------------------------------------------------

PROMPTS = ["aaaaaaaa1", "aaaaaaaa2", "aaaaaaaabbbb", "aaaaaaaabbbbb", "aaaa", "aaaacc", "bbbbbbbb", "bbbbbbbbbbbb"]
TENANTS = [None, None, None, "tenant"]
EVENTS = st.one_of(
    st.tuples(st.just("run"), st.lists(st.tuples(st.sampled_from(PROMPTS), st.sampled_from(TENANTS)), min_size=1)),
    st.tuples(st.just("finish"), st.integers(0, 20)),
    st.tuples(st.just("evict"), st.integers(1, 2000)),
    st.tuples(st.just("leave"), st.booleans()),
)


@settings(max_examples=400, deadline=None)
@given(
    history=st.lists(EVENTS, min_size=5, max_size=30),
    chunks=st.sampled_from([0, 1, 3, 4, 6, 8]),
    per_step=st.sampled_from([100, 256, 4096]),
    prefill_first=st.booleans(),
)
def test_any_history(
    new_tree: Any, history: list[tuple[str, Any]], chunks: int, per_step: int, prefill_first: bool
) -> None:
    server = Server(new_tree(PAGE), chunks=chunks, expand_tokens_per_step=per_step, min_prefix_len=128)
    tree, running = server.tree, []
    for event, what in history:
        if event == "run":
            requests = [tree.run(text, tenant) for text, tenant in what]
            if prefill_first:
                server.prefixes.before_prefill(requests, running)
                assert server.expander.taken() <= per_step
            running += requests
        elif event == "finish" and running:
            tree.finish(running.pop(what % len(running)))
        elif event == "evict":
            tree.evict(what)
        elif event == "leave":
            tree.finish(*running)
            running.clear()
            if what:
                tree.cache.reset()
                server.prefixes.forget()
            else:
                server.prefixes.idle()
            assert server.pool.used_chunks == 0
        server.decode(*running)
        assert server.expander.taken() <= per_step
        owned = [chunk for expansion in server.pool.expansions for chunk in expansion.chunks]
        assert len(set(owned)) == len(owned) == server.pool.used_chunks <= chunks
