"""From running requests to plans: what is expanded when, and that a plan's chunks hold its rows' own tokens.

The tree is SGLang's; the expander is a fake that remembers what was written where.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_mla_ext.kernels.storage.expanded import CHUNK_TOKENS
from sglang_mla_ext.observe import Counters, report
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.predict import sharing
from sglang_mla_ext.prefix.memory.pool import GRACE, ExpandedPool
from sglang_mla_ext.prefix.planner import break_even
from sglang_mla_ext.prefix.planner import planner as planner_module
from sglang_mla_ext.prefix.planner.branches import Branches, Part
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.prefix.planner.model_dims import ModelDims
from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.prefix.planner.planner import Planner
from sglang_mla_ext.prefix.planner.room import Capacity
from sglang_mla_ext.prefix.radix import RadixSource
from sglang_mla_ext.prefix.sharing import Sharing
from sglang_mla_ext.prefix.tree import SharedTree
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Mode

PAGE = 64  # tokens; one letter of a prompt
COST = CostModel(ModelDims.of("deepseek-v3"), 16, GpuRates.from_json("cpu"))
FULL = "prefix_memory_full"


class FakeExpander:
    """Writes, instead of keys and values, the number that the tree has for each latent row."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree
        self.memory: dict[tuple[int, int], int] = {}
        self.calls: list[tuple[int, int]] = []  # first token, tokens
        self.error: Exception | None = None

    def expand(self, node: Any, node_end: int, start: int, end: int, chunks: Sequence[int]) -> None:
        if self.error:
            raise self.error
        slots = self.tree.view.slots(node, node_end, start, end)
        assert len(slots) == end - start > 0 and start % CHUNK_TOKENS == 0
        assert len(chunks) == -(-len(slots) // CHUNK_TOKENS)
        self.calls.append((start, len(slots)))
        for position, slot in enumerate(slots.tolist()):
            chunk, offset = divmod(position, CHUNK_TOKENS)
            self.memory[chunks[chunk], offset] = self.tree.rows[slot]

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
        self.expander = FakeExpander(tree)
        self.counters = Counters()
        self.pool = ExpandedPool(chunks, CHUNK_TOKENS)
        options = {"mode": "naive", **options}
        ways = {"capacity": Capacity(256, 1000), **(ways or {})}
        decodes = ways.pop("decodes", True)
        planner = Planner(HybridMLAOptions(**options), cost, chunk_tokens=CHUNK_TOKENS, counters=self.counters, **ways)
        source = RadixSource(self.pool, self.counters, tree.view)
        self.prefixes = Sharing(source, self.pool, planner, self.expander, self.counters, decodes=decodes)

    def decode(self, *requests: Any) -> list[tuple[tuple[int, ...], int]]:
        """Plan a decode step and check what must always hold; returns rows and end of each naive group, in pages."""
        plan = self.prefixes.plan_decode(requests)
        self.check(plan, requests)
        return [(segment.rows, segment.end / PAGE) for segment in plan.of_mode(Mode.NAIVE)]

    def check(self, plan: Plan, requests: Sequence[Any]) -> None:
        assert plan is self.prefixes.plan and plan.requests == len(requests)
        shared = zip(plan.prefix_lens, requests, strict=True)
        assert all(length <= len(request.slots) for length, request in shared)
        for segment in plan.of_mode(Mode.NAIVE):
            assert len(segment.rows) >= 2
            assert len({requests[row].extra_key for row in segment.rows}) == 1
            held = [divmod(token, CHUNK_TOKENS) for token in range(segment.tokens)]
            contents = [self.expander.memory[segment.chunks[chunk], offset] for chunk, offset in held]
            for row in segment.rows:
                own = requests[row].slots[segment.start : segment.end].tolist()
                assert contents == [self.tree.rows[slot] for slot in own], "the chunks hold another prefix"


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
    smallest = break_even.smallest_profitable_group(COST, 13 * PAGE)
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
    pool, counters = ExpandedPool(4, CHUNK_TOKENS), Counters()
    planner = Planner(HybridMLAOptions(), COST, Capacity(256, 1000), CHUNK_TOKENS, counters)
    prefixes = Sharing(RadixSource(pool, counters), pool, planner, FakeExpander(tree), counters)
    requests = [tree.run("systemprompt"), tree.run("systemprompt")]
    prefixes.before_prefill(requests, [])
    assert prefixes.plan_decode(requests) == Plan(2)


# -- for prefill itself ------------------------------------------------------------------------------------------------


def parts_of(server: Server, *requests: Any, new_tokens: int = 9, always: bool = True) -> list[int]:
    """Tokens of each request's prompt that a prefill step would find expanded, checked against the tree."""
    lens = [len(request.slots) for request in requests]
    plan = server.prefixes.plan_prefill(requests, lens, [new_tokens] * len(requests), always=always)
    assert plan.depth <= 1 and all(segment.start == 0 for segment in plan.segments)
    for segment in plan.segments:
        held = [divmod(token, CHUNK_TOKENS) for token in range(segment.tokens)]
        contents = [server.expander.memory[segment.chunks[chunk], offset] for chunk, offset in held]
        for request in segment.rows:
            own = requests[request].slots[: segment.tokens].tolist()
            assert contents == [server.tree.rows[slot] for slot in own]
    return list(plan.prefix_lens)


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


@pytest.mark.parametrize("mode", ["auto", "naive"])
def test_a_server_that_only_prefills_expands_for_prefill(tree: Any, mode: str) -> None:
    """What a step shares with requests that are being sent, as much as SGLang would expand for it; where that is
    nothing, what is forced."""
    server = Server(tree, mode=mode, ways={"decodes": False}, expand_tokens_per_step=CHUNK_TOKENS)
    sent = [tree.run("systemprompt-" + letter) for letter in "ab"]
    server.prefixes.before_prefill([tree.run("else")], sent, affordable=10**6)
    assert server.expander.taken() == 0, "the step has no part in it"
    newcomer = tree.run("systemprompt-c")
    server.prefixes.before_prefill([newcomer], sent)
    assert server.expander.taken() == (CHUNK_TOKENS if mode == "naive" else 0)
    server.prefixes.before_prefill([newcomer], sent, affordable=10**6)
    assert parts_of(server, newcomer) == [13 * PAGE]


def test_a_server_that_only_prefills_has_memory_for_what_comes_later(tree: Any) -> None:
    server = Server(tree, mode="auto", chunks=4, ways={"decodes": False})  # 16 pages
    early = [tree.run("systemprompt-" + letter) for letter in "ab"]
    server.prefixes.before_prefill(early, [], affordable=10**6)
    assert parts_of(server, *early) == [13 * PAGE] * 2
    tree.finish(*early)
    late = [tree.run("otherprompt-" + letter) for letter in "ab"]
    for _ in range(10):  # two requests may be between two steps for so long
        server.prefixes.before_prefill(late, [], affordable=10**6)
    assert parts_of(server, *late) == [12 * PAGE] * 2


def test_prefill_uses_no_more_than_is_cached_for_the_request(tree: Any) -> None:
    server = Server(tree)
    requests = [tree.run("systemprompt-" + letter) for letter in "ab"]
    server.prefixes.before_prefill(requests, [])
    plan = server.prefixes.plan_prefill(requests, [5 * PAGE + 3, 0], [1, 1], always=True)
    assert plan.prefix_lens == (5 * PAGE + 3, 0)


def test_prefill_that_would_gain_nothing_is_plain(tree: Any) -> None:
    server = Server(tree, mode="auto")
    requests = [tree.run("systemprompt-" + letter) for letter in "ab"]
    server.prefixes.before_prefill(requests, [], affordable=10**6)
    assert parts_of(server, *requests, new_tokens=1, always=False) == [0, 0]
    assert parts_of(server, *requests, new_tokens=500, always=False) == [13 * PAGE] * 2


def test_prefill_counts_its_tokens_where_decode_counts_several_for_each_request(tree: Any) -> None:
    """As above: what a step of verified drafts costs has no part in it."""
    server = Server(tree, mode="auto", cost=replace(COST, query_tokens=8))
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


def test_no_step_expands_more_than_allowed_and_plans_use_what_is_there(tree: Any) -> None:
    """Whole chunks, four pages each, and at least one of them a step."""
    requests = [tree.run("seventeen-letters-a"), tree.run("seventeen-letters-b")]  # 18 pages
    for per_step, taken in ((1, 256), (300, 256), (600, 512)):
        server = Server(tree, expand_tokens_per_step=per_step)
        server.prefixes.before_prefill(requests, [])
        reached = server.expander.taken()
        assert reached == taken
        while reached < 18 * PAGE:
            reached = min(reached + taken, 18 * PAGE)
            assert server.decode(*requests) == [((0, 1), reached / PAGE)]
            assert server.expander.taken() <= taken and server.prefixes.plan.prefix_lens == (reached,) * 2
        assert server.decode(*requests) == [((0, 1), 18)] and server.expander.taken() == 0
        assert server.counters.expansions == 1 and server.counters.expanded_tokens == 18 * PAGE


def test_prefixes_take_turns_the_most_worthwhile_first(tree: Any) -> None:
    server = Server(tree, expand_tokens_per_step=512)
    requests = [tree.run("AAAAAAAA" + letter) for letter in "123"] + [tree.run("BBBBBBBB" + letter) for letter in "12"]
    assert server.decode(*requests) == [((0, 1, 2), 8)]
    assert server.decode(*requests) == [((0, 1, 2), 8), ((3, 4), 8)]


def test_what_is_there_is_used_while_more_is_expanded(tree: Any) -> None:
    server = Server(tree, expand_tokens_per_step=256)
    first, second = tree.run("four11111111xx"), tree.run("four2222")
    assert server.decode(first, second) == [((0, 1), 4)]
    third = tree.run("four11111111yy")
    assert [server.decode(first, third) for _ in range(2)] == [[((0, 1), 8)], [((0, 1), 12)]]
    assert server.expander.calls == [(0, 256), (256, 256), (512, 256)] and server.pool.used_chunks == 3


# -- nesting -----------------------------------------------------------------------------------------------------------


def test_three_levels_hold_every_chunk_once(tree: Any) -> None:
    """A system prompt for all, a document for some, a conversation for two: boundaries inside chunks round down, so two
    documents below one prompt each begin with the chunk in which they part."""
    server = Server(tree)
    system, document, other = "system", "document-one", "document-two"  # 6 and 12 pages
    texts = [system + document + "talk" + "1", system + document + "talk" + "2", system + document + "3"]
    requests = [tree.run(text) for text in [*texts, system + other + "4", system + other + "5", system + "6"]]
    everybody, documents = ((0, 1, 2, 3, 4, 5), 4), ((0, 1, 2, 3, 4), 12)
    assert sorted(server.decode(*requests)) == sorted(
        [everybody, documents, ((0, 1, 2), 16), ((0, 1), 22), ((3, 4), 18)]
    )
    assert server.prefixes.plan.prefix_lens == tuple(PAGE * pages for pages in (22, 22, 16, 18, 18, 4))
    # Pages 0 to 16 once, 12 to 18 for the second document, 16 to 22 for the conversation.
    assert server.pool.used_chunks == 4 + 2 + 2
    assert parts_of(server, *requests) == [PAGE * pages for pages in (22, 22, 16, 18, 18, 4)]
    lone = tree.run(system + document + "alone")
    assert parts_of(server, lone) == [16 * PAGE], "a prefill of one request"


def test_groups_below_one_prompt_hold_one_copy_and_leave_none(tree: Any) -> None:
    """Three groups came one after the other, each below the same prompt, and have left."""
    server = Server(tree)
    prompt = "a-prompt-of-sixty-four-pages" + "." * 36
    for name in "xyz":
        group = [tree.run(prompt + name * 8 + letter) for letter in "12"]
        server.decode(*group)
        tree.finish(*group)
    assert server.pool.used_chunks == 16 + 3 * 2
    two = [tree.run(prompt + letter) for letter in "12"]
    tree.evict(10**6)
    assert server.decode(*two) == [((0, 1), 64)]
    assert server.pool.used_chunks == 16, "what SGLang took back is gone"


def test_depth_of_a_long_conversation(tree: Any) -> None:
    """Parallel samples of a conversation of 50 turns: one run, whatever the tree's nodes are."""
    server = Server(tree)
    text = ""
    for turn in range(50):
        text += chr(ord("A") + turn) * 3
        tree.finish(tree.run(text))
    samples = [tree.run(text) for _ in range(8)]
    assert [server.decode(*samples) for _ in range(3)][-1] == [(tuple(range(8)), 150)]
    assert server.expander.calls == [(0, 4096), (4096, 4096), (8192, 150 * PAGE - 8192)]


@settings(max_examples=25, deadline=None)
@given(
    history=st.lists(st.lists(st.integers(0, 30), max_size=12, unique=True), min_size=1, max_size=8),
    chunks=st.sampled_from([2, 4, 7, 40]),
    shuffler=st.randoms(use_true_random=False),
)
def test_rows_in_another_order_share_the_same(new_tree: Any, history: Any, chunks: int, shuffler: Any) -> None:
    """As on ranks that order their requests differently: the same segments, in the same chunks."""
    tree = new_tree(PAGE)
    one, other = Server(tree, chunks=chunks), Server(tree, chunks=chunks)
    texts = ["", "aaaaaa", "aaaaaabbbb", "aaaaaacccc", "aaaabbbb", "dddddddd"]
    requests = [tree.run(texts[index % 6] + f"-{index}") for index in range(31)]
    for batch in history:
        mixed = shuffler.sample(batch, len(batch))
        one.decode(*(requests[index] for index in batch))
        other.decode(*(requests[index] for index in mixed))
        plans = [
            {(frozenset(rows[row] for row in each.rows), each.start, each.end, each.mode) for each in plan.segments}
            for plan, rows in ((one.prefixes.plan, batch), (other.prefixes.plan, mixed))
        ]
        assert plans[0] == plans[1]
        assert {(c.index, c.node, c.id) for c in chunks_of(one)} == {(c.index, c.node, c.id) for c in chunks_of(other)}


def chunks_of(server: Server) -> list[Any]:
    return [chunk for node in server.pool._owned.values() for chunk in node.chunks.values()]


# -- when a plan is made again -----------------------------------------------------------------------------------------


def test_a_plan_is_kept_until_something_changes(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> Plan:
        calls.append(args)
        return plan_step(*args, **kwargs)

    plan_step = planner_module.plan_step
    monkeypatch.setattr(planner_module, "plan_step", counted)

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
    server.pool.drop(server.pool.nodes)
    assert plans_made(*requests), "an expansion went away"


@pytest.mark.parametrize("end", ["forget", "idle"])
def test_the_nodes_of_a_plan_live_as_long_as_the_plan(tree: Any, end: str) -> None:
    """A plan is recognised by its requests' nodes, and a node's identity is reused once it is gone: a request that is
    retracted and prefilled again could come back with another node of the same identity. A plan that has ended keeps
    no tree alive."""
    server = Server(tree, mode="absorb")
    requests = [tree.run("one"), tree.run("two")]
    server.decode(*requests)
    nodes = list(map(weakref.ref, server.prefixes.source.tree.hold(requests)))
    assert len(nodes) == len(requests)
    tree.finish(*requests)
    tree.evict(10**6)
    requests.clear()
    gc.collect()
    assert all(node() is not None for node in nodes)
    getattr(server.prefixes, end)()
    gc.collect()
    assert all(node() is None for node in nodes)


@pytest.mark.parametrize("way", ["an eviction", "distrust"])
def test_a_tree_that_was_flushed_is_let_go(tree: Any, way: str) -> None:
    """Neither what was looked through for an eviction nor what is distrusted keeps its nodes."""
    server = Server(tree, chunks=4)
    requests = [tree.run("sixteen-letters-" + letter) for letter in "ab"]
    server.decode(*requests)
    if way == "an eviction":
        requests += [tree.run("SIXTEEN-LETTERS-" + letter) for letter in "abc"]
        server.decode(*requests)
        assert server.counters.evictions
    else:
        server.prefixes.distrust({node for _, nodes in server.prefixes.held() for node in nodes})
        assert server.decode(*requests) == []
    nodes = list(map(weakref.ref, server.prefixes.source.tree.hold(requests)))
    assert len(nodes) == len(requests)
    tree.finish(*requests)
    tree.cache.reset()
    requests.clear()
    server.prefixes.idle()
    gc.collect()
    assert server.pool.used_chunks == 0 and all(node() is None for node in nodes)


# -- when an expansion goes away ---------------------------------------------------------------------------------------


def test_stays_as_long_as_its_node_is_in_the_tree(tree: Any) -> None:
    """Its next users may come soon, and nobody wants the room."""
    server = Server(tree)
    first, second, other = tree.run("systemprompt-a"), tree.run("systemprompt-b"), tree.run("x")
    server.decode(first, second, other)
    tree.finish(first, second)
    assert server.decode(other) == [] and server.pool.used_chunks == 4
    assert server.expander.taken() == 13 * PAGE
    third, fourth = tree.run("systemprompt-c"), tree.run("systemprompt-d")
    assert server.decode(third, other, fourth) == [((0, 2), 13)] and server.expander.taken() == 0
    tree.finish(third, fourth)
    tree.evict(10**6)
    assert server.decode(other, other) == [] and server.pool.used_chunks == 0 and server.counters.evictions == 4


def test_an_idle_server_keeps_what_is_in_the_tree(tree: Any) -> None:
    server = Server(tree)
    requests = [tree.run("systemprompt-a"), tree.run("systemprompt-b")]
    server.decode(*requests)
    tree.finish(*requests)
    server.prefixes.idle()
    assert server.pool.used_chunks == 4 and server.prefixes.plan == Plan(0)
    tree.evict(10**6)
    server.prefixes.idle()
    assert server.pool.used_chunks == 0 and server.counters.evictions == 4


def test_forget_drops_everything_and_the_next_step_expands_again(tree: Any) -> None:
    server = Server(tree)
    requests = [tree.run("systemprompt-a"), tree.run("systemprompt-b")]
    server.decode(*requests)
    server.prefixes.forget()
    assert server.prefixes.plan == Plan(0) and server.pool.used_chunks == 0 and server.counters.evictions == 4
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
    third = tree.run("systemprom...")  # 10 pages in common, two whole chunks
    server.prefixes.before_prefill([third], [first, second])
    assert server.decode(first, second, third) == [((0, 1, 2), 8), ((0, 1), 13)]
    assert server.expander.taken() == 0 and server.pool.used_chunks == 4 and server.counters.evictions == 0
    tree.finish(first, second)
    fourth = tree.run("systemprom,,,")
    assert server.decode(third, fourth) == [((0, 1), 10)]
    assert server.expander.taken() == 2 * PAGE, "what the two have beside whole chunks"


# -- little memory -----------------------------------------------------------------------------------------------------


def test_a_prefix_is_shortened_to_the_memory(tree: Any) -> None:
    server = Server(tree, chunks=2)
    requests = [tree.run("sixteen-letters-a"), tree.run("sixteen-letters-b")]
    assert server.decode(*requests) == [((0, 1), 2 * CHUNK_TOKENS / PAGE)]
    assert server.prefixes.expansion.tokens_without_memory == 2 * CHUNK_TOKENS and not server.counters.fallbacks


@pytest.mark.parametrize("chunks", [0, 1])
def test_falls_back_where_memory_is_less_than_the_minimum(tree: Any, chunks: int) -> None:
    server = Server(tree, chunks=chunks, min_prefix_len=300)
    requests = [tree.run("sixteen-letters-a"), tree.run("sixteen-letters-b")]
    assert server.decode(*requests) == []
    assert server.counters.fallbacks == {FULL: 1} and server.expander.calls == []


def test_what_is_held_alone_makes_room(tree: Any) -> None:
    """At once for what is worth more, and a little later for anything."""
    server = Server(tree, chunks=4)
    ours = [tree.run("sixteen-letters-a"), tree.run("sixteen-letters-b")]
    server.decode(*ours)
    tree.finish(ours[1])
    theirs = [tree.run("SIXTEEN-LETTERS-a"), tree.run("SIXTEEN-LETTERS-b")]
    assert [server.decode(ours[0], *theirs) for _ in range(GRACE + 2)][-1] == [((1, 2), 16)]
    assert server.counters.evictions == 4 and server.prefixes.expansion.tokens_without_memory == 0
    many = [tree.run("OTHER-LETTERS..." + letter) for letter in "abc"]
    assert server.decode(ours[0], *theirs, *many) == [((3, 4, 5), 16)]


def test_one_that_is_there_stays_beside_one_that_saves_as_much(tree: Any) -> None:
    server = Server(tree, chunks=4)
    ours = [tree.run("sixteen-letters-a"), tree.run("sixteen-letters-b")]
    server.decode(*ours)
    theirs = [tree.run("SIXTEEN-LETTERS-a"), tree.run("SIXTEEN-LETTERS-b")]
    for _ in range(20):
        assert server.decode(*theirs, *ours) == [((2, 3), 16)]
        assert server.decode(*ours, *theirs) == [((0, 1), 16)]
    assert server.counters.evictions == 0 and server.counters.fallbacks[FULL]


def test_a_leftover_request_does_not_keep_the_pool(tree: Any) -> None:
    """Two requests share a document below a page that everybody begins with, and it fills the pool; then many come
    for a product's prompt below the same page. Also after one of the two has left."""
    for leftover in (1, 2):
        server = Server(tree, chunks=12, mode="auto", cost=CostModel(COST.dims, 16, GpuRates.from_json("h20")))
        document = [tree.run("!document" + "." * 39 + letter) for letter in "ab"]
        server.prefixes.before_prefill(document, [], affordable=10**6)
        assert server.pool.used_chunks == 12
        tree.finish(*document[leftover:])
        product = [tree.run(f"!product{'.' * 33}{index:03d}") for index in range(100)]
        assert server.decode(*document[:leftover], *product)[0][1] >= 40


def test_remainders_of_prompts_that_were_prefilled_in_pieces_make_room(tree: Any) -> None:
    server = Server(tree, chunks=3)
    prompts = ["sixteen-letters", "SIXTEEN-LETTERS"]
    for pages in (6, 9, 15):
        requests = [tree.run(prompt[:pages] + letter * (pages == 15)) for letter in "ab" for prompt in prompts]
        server.decode(*requests)
        server.decode(*requests)
        tree.finish(*requests)
    requests = [tree.run(text + letter) for text in ("sixteen-let", "SIXTEEN-") for letter in "ab"]
    groups = [server.decode(*requests) for _ in range(2)][-1]
    assert sum(-(-end // 4) for _, end in groups) == 3, "every chunk is of use"


def test_nothing_is_dropped_where_no_room_is_needed(tree: Any) -> None:
    server = Server(tree, chunks=6)
    ours = [tree.run("sixteen-letters-a"), tree.run("sixteen-letters-b")]
    theirs = [tree.run("EIGHTLET-a"), tree.run("EIGHTLET-b")]
    server.decode(*ours, *theirs)
    tree.finish(theirs[1])
    assert server.decode(*ours, theirs[0]) == [((0, 1), 16)]
    assert server.counters.evictions == 0, "its memory was not needed, and its next user may come soon"


def test_no_more_groups_than_there_is_room_for(tree: Any) -> None:
    server = Server(tree, ways={"capacity": Capacity(2, 1000)})
    requests = [tree.run(name * pages + letter) for name, pages in (("a", 4), ("b", 8), ("c", 12)) for letter in "12"]
    assert server.decode(*requests) == [((2, 3), 8), ((4, 5), 12)]
    assert sum(server.counters.fallbacks.values()) == 1 and server.pool.used_chunks == 5, "nothing for the third"


def test_where_rows_run_out_a_prefix_of_all_is_joined_to_what_follows_it(tree: Any) -> None:
    """Both halves attend to the same chunks of it, which are expanded once."""
    server = Server(tree, ways={"capacity": Capacity(256, 4)}, expand_tokens_per_step=1 << 20)
    texts = ["left" * 8 + "-a", "left" * 8 + "-b", "RIGHT-HALF" * 4 + "-a", "RIGHT-HALF" * 4 + "-b"]
    requests = [tree.run("everybody---" + text) for text in texts]
    assert server.decode(*requests) == [((0, 1), 45), ((2, 3), 53)]
    plan = server.prefixes.plan
    assert [(segment.start, len(segment.chunks)) for segment in plan.segments] == [(0, 12), (0, 14)]
    left, right = (segment.chunks for segment in plan.segments)
    assert left[:3] == right[:3] and not set(left[3:]) & set(right[3:])
    assert server.pool.used_chunks == 3 + 9 + 11
    assert server.expander.taken() == (12 + 33 + 41) * PAGE
    (_, ours), (_, theirs) = server.prefixes.held()
    assert len(ours) == len(theirs) == 2 and ours[0] is theirs[0] and ours[1] is not theirs[1]
    assert [shown.tokens for shown in server.prefixes.shown_segments()] == [45 * PAGE, 53 * PAGE]


# -- rows of any number ------------------------------------------------------------------------------------------------


def mixed_groups(
    server: Server, requests: Sequence[Any], counts: Sequence[int], mixed: bool = False
) -> list[tuple[tuple[int, ...], int, int]]:
    """Plan a step in which requests have so many rows, without any expansion, and check what must always hold; rows,
    which are requests, start and end of each segment, in pages."""
    lens = [len(request.slots) for request in requests]
    plan = server.prefixes.plan_rows(requests, Rows.of(counts), lens, mixed=mixed)
    assert (plan is server.prefixes.plan) == mixed, "no decode step without requests that decode"
    assert plan.requests == len(requests) and server.expander.calls == []
    for segment in plan.segments:
        assert sum(counts[request] for request in segment.rows) >= 2
        for request in segment.rows:
            slots = requests[request].slots[segment.start : segment.end].tolist()
            assert len(slots) == segment.tokens
            for position, slot in enumerate(slots if segment.mode is Mode.NAIVE else ()):
                chunk, offset = divmod(position, CHUNK_TOKENS)
                assert server.expander.memory[segment.chunks[chunk], offset] == server.tree.rows[slot]
    return [(segment.rows, segment.start // PAGE, segment.end // PAGE) for segment in plan.segments]


def test_rows_of_one_request_share_what_is_expanded_of_its_own_path(tree: Any) -> None:
    server = Server(tree)
    first, second, alone = tree.run("systemprompt-a"), tree.run("systemprompt-b"), tree.run("else")
    assert mixed_groups(server, [first], [5]) == [], "nothing is expanded for it"
    assert server.decode(first, second) == [((0, 1), 13)] and server.expander.taken() == 13 * PAGE
    assert mixed_groups(server, [first], [5]) == [((0,), 0, 13)]
    assert mixed_groups(server, [first], [1]) == []
    assert mixed_groups(server, [alone, first, second], [9, 1, 4]) == [((1, 2), 0, 13)]
    assert mixed_groups(server, [alone, first], [9, 1], mixed=True) == [] == report_of(server)["groups"]
    assert mixed_groups(server, [alone, first, second], [9, 1, 4], mixed=True) == [((1, 2), 0, 13)]
    assert mixed_groups(server, [alone, first], [9, 1]) == [] and len(server.prefixes.shown_segments()) == 1
    assert [(entry["requests"], entry["mode"]) for entry in report_of(server)["groups"]] == [(2, "naive")]
    assert server.decode(first, second) == [((0, 1), 13)], "a decode step behind it is planned anew"
    assert not server.counters.fallbacks and server.expander.calls == []


def report_of(server: Server) -> dict[str, Any]:
    return report(server.counters, server.prefixes.plan, 0, 0, 0)


def test_a_gain_counts_rows_and_not_requests(tree: Any) -> None:
    """So many of one request pay as so many requests of one row each."""
    server = Server(tree, mode="auto")
    requests = [tree.run("systemprompt-" + letter) for letter in "abcdef"]
    smallest = break_even.smallest_profitable_group(COST, 13 * PAGE)
    assert server.decode(*requests)
    server.expander.taken()
    assert mixed_groups(server, requests[:1], [smallest - 1]) == []
    assert mixed_groups(server, requests[:1], [smallest]) == [((0,), 0, 13)]
    assert mixed_groups(server, requests[:2], [1, smallest - 2]) == []
    assert mixed_groups(server, requests[:2], [1, smallest - 1]) == [((0, 1), 0, 13)]


def test_a_plan_of_rows_stays_below_what_is_cached(tree: Any) -> None:
    server = Server(tree)
    requests = [tree.run("systemprompt-a"), tree.run("systemprompt-b")]
    server.decode(*requests)
    lens = [13 * PAGE, 13 * PAGE]
    assert server.prefixes.plan_rows(requests, Rows.of([1, 2]), lens).prefix_lens == (13 * PAGE,) * 2
    with pytest.raises(RuntimeError, match="longer than what is cached"):
        server.prefixes.plan_rows(requests, Rows.of([1, 2]), [13 * PAGE, 13 * PAGE - 1])


def test_capacity_counts_rows(tree: Any) -> None:
    server = Server(tree, ways={"capacity": Capacity(256, 10)})
    requests = [tree.run("systemprompt-a"), tree.run("systemprompt-b")]
    server.decode(*requests)
    server.expander.taken()
    assert mixed_groups(server, requests, [4, 6]) == [((0, 1), 0, 13)] and not server.counters.fallbacks
    assert mixed_groups(server, requests, [4, 7]) == []
    assert dict(server.counters.fallbacks) == {"more_groups": 1}


def test_how_much_of_each_request_is_expanded(tree: Any) -> None:
    server = Server(tree)
    first, second, alone = tree.run("systemprompt-a"), tree.run("systemprompt-b"), tree.run("else")
    assert server.prefixes.source.expanded_lens([first, alone], [14 * PAGE, 4 * PAGE]) == [0, 0]
    server.decode(first, second)
    assert server.prefixes.source.expanded_lens([first, alone, second], [14 * PAGE, 4 * PAGE, 100]) == [
        13 * PAGE,
        0,
        100,
    ]
    server.tree.finish(second)
    assert server.prefixes.source.expanded_lens([first], [14 * PAGE]) == [13 * PAGE], "whoever else holds it"


@settings(max_examples=80, deadline=None)
@given(
    parents=st.lists(st.integers(0, 1 << 30), max_size=8),
    requests=st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 3)), min_size=1, max_size=6),
)
def test_branches_are_runs_of_nodes_that_the_same_requests_hold(
    parents: list[int], requests: list[tuple[int, int]]
) -> None:
    """Against whole paths: every node with two rows and more is in one of them, and no other is."""
    above = [number % (index + 1) - 1 for index, number in enumerate(parents)]
    ends: list[int] = []
    for index, parent in enumerate(above):
        ends.append((ends[parent] if parent >= 0 else 0) + index + 1)
    deepest, counts = [number % (len(above) + 1) - 1 for number, _ in requests], [count for _, count in requests]
    branches = Branches(SharedTree(list(range(len(above))), above, ends, deepest), Rows.of(counts))
    holders: list[set[int]] = [set() for _ in above]
    for request, node in enumerate(deepest):
        while node >= 0:
            holders[node].add(request)
            node = above[node]
    found = [node for branch in branches for node in branch.nodes]
    assert sorted(found) == [node for node, held in enumerate(holders) if sum(counts[each] for each in held) > 1]
    for index, branch in enumerate(branches):
        (held,) = {frozenset(holders[node]) for node in branch.nodes}
        segment = branches.segment(Part(index, index, branch.start, branch.end, Mode.NAIVE, 0.0))
        assert segment.rows == tuple(sorted(held)) and branch.requests == len(held)
        assert branch.rows == sum(counts[request] for request in held)
        assert branch.ends == [ends[node] for node in branch.nodes] and branch.end == branch.ends[-1]
        first = above[branch.nodes[0]]
        assert branch.start == (ends[first] if first >= 0 else 0)
        assert branch.parent == next((at for at, other in enumerate(branches) if first in other.nodes), -1)
        assert all(above[node] == before for before, node in pairwise(branch.nodes))


# -- one snapshot a pass -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("counts", [None, [3, 1, 5, 4]], ids=["prefill", "mixed"])
def test_a_pass_asks_the_tree_once(tree: Any, counts: list[int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """And decides as if it had asked again, for these requests alone."""
    server = Server(tree, mode="auto", ways={"grouped_page": PAGE}, cost=COST)
    running = [tree.run("systemprompt-" + letter) for letter in "abcdef"]
    gone = [tree.run("other-prompt" * 2 + letter) for letter in "abcdef"]
    server.decode(*running, *gone)
    server.decode(*running, *gone)
    tree.finish(*gone)
    newcomers = [tree.run(text) for text in ("systemprompt-x", "else", "other-prompt" * 2 + "a", "systemp")]
    lens = [len(request.slots) for request in newcomers]
    shared, calls = tree.view.shared, []
    monkeypatch.setattr(tree.view, "shared", lambda *args, **given: (calls.append(args), shared(*args, **given))[1])
    rows = None if counts is None else Rows.of(counts)
    seen = server.prefixes.before_prefill(newcomers, running, 10**6 if rows is None else 0, rows=rows)
    assert seen is not None

    def planned(**given: Any) -> Plan:
        if rows is not None:
            return server.prefixes.plan_rows(newcomers, rows, lens, **given)
        return server.prefixes.plan_prefill(newcomers, lens, [500] * 4, always=True, **given)

    plan = planned(shared=seen)
    # A prompt that ends inside of another one's node splits it, which is seen when the tree is asked.
    assert len(calls) <= 2 and server.counters.fallbacks == {}
    calls.clear()
    assert planned(shared=seen) == plan and calls == []
    assert planned() == plan and calls and max(plan.prefix_lens) > 8 * PAGE


@settings(max_examples=80, deadline=None)
@given(
    parents=st.lists(st.integers(0, 1 << 30), max_size=8),
    requests=st.lists(st.integers(0, 1 << 30), min_size=1, max_size=6),
    first=st.integers(0, 6),
)
def test_a_snapshot_of_some_requests_has_their_paths(parents: list[int], requests: list[int], first: int) -> None:
    above = [number % (index + 1) - 1 for index, number in enumerate(parents)]
    ends = list(itertools.accumulate(range(1, len(above) + 1)))
    deepest = [number % (len(above) + 1) - 1 for number in requests]

    def paths(of: SharedTree) -> list[list[tuple[Any, int]]]:
        found: list[list[tuple[Any, int]]] = []
        for node in of.deepest:
            found.append([])
            while node >= 0:
                found[-1].append((of.nodes[node], of.ends[node]))
                assert of.parents[node] < node
                node = of.parents[node]
        return found

    whole = SharedTree([f"node {index}" for index in range(len(above))], above, ends, deepest)
    some = whole.from_request(first)
    assert paths(some) == paths(whole)[first:]
    assert not first or set(some.nodes) == {node for path in paths(some) for node, _ in path}
    assert list(some.nodes) == [node for node in whole.nodes if node in set(some.nodes)]


# -- anything ----------------------------------------------------------------------------------------------------------

PROMPTS = ["aaaaaaaa1", "aaaaaaaa2", "aaaaaaaabbbb", "aaaaaaaabbbbb", "aaaa", "aaaacc", "bbbbbbbb", "bbbbbbbbbbbb"]
TENANTS = [None, None, None, "tenant"]
EVENTS = st.one_of(
    st.tuples(st.just("run"), st.lists(st.tuples(st.sampled_from(PROMPTS), st.sampled_from(TENANTS)), min_size=1)),
    st.tuples(st.just("finish"), st.integers(0, 20)),
    st.tuples(st.just("evict"), st.integers(1, 2000)),
    st.tuples(st.just("leave"), st.booleans()),
)


@settings(max_examples=100, deadline=None)
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
                assert server.expander.taken() <= max(per_step, CHUNK_TOKENS)
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
            assert server.pool.used_chunks == 0 or not what
        server.decode(*running)
        assert server.expander.taken() <= max(per_step, CHUNK_TOKENS)
        owned = [chunk.id for chunk in chunks_of(server)]
        assert len(set(owned)) == len(owned) == server.pool.used_chunks <= chunks


# ---- what `sglang-mla plan` says of a server


def test_a_plan_on_paper_is_the_servers(tree: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory, too little and enough, for a prompt of 26,432 tokens and what is behind its last page."""
    monkeypatch.setattr(FakeExpander, "expand", lambda *args: None)  # how is not asked here
    requests = [tree.run("s" * 413 + chr(200 + index)) for index in range(200)]
    seen: dict[int, set[Any]] = {8: set(), 16: set(), 128: set()}
    for heads, chunks, count in itertools.product(seen, (0, 33, 104), (2, 16, 200)):
        cost = replace(COST, local_heads=heads, rates=GpuRates.from_json("h200"))
        ways = {"naive": chunks > 0, "grouped_page": PAGE if heads < 128 else None, "capacity": Capacity(256, 2048)}
        server = Server(tree, chunks, ways, cost, mode="auto", expand_tokens_per_step=30_000)
        for _ in range(2):
            planned = server.prefixes.plan_decode(requests[:count])
        found = [
            [replace(segment, chunks=()) for segment in plan.segments]
            for plan in (planned, sharing.plan(cost, count, 413 * PAGE + 40, chunks))
        ]
        assert found[0] == found[1], (heads, chunks, count)
        seen[heads].add(tuple(segment.mode for segment in planned.segments))
    naive, grouped = Mode.NAIVE, Mode.GROUPED_ABSORB
    assert seen == {8: {(naive,), (grouped,)}, 16: {(naive,), (naive, grouped), (grouped,)}, 128: {(), (naive,)}}
