"""Grouped absorb beside naive attention: which shared prefix is attended to in which way, and what is expanded then."""

from __future__ import annotations

from typing import Any

import pytest
from test_shared_prefixes import COST, PAGE, Server, mixed_groups

from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gains import Gains
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.segment import Mode

NO_MEMORY = {"chunks": 0, "ways": {"naive": False, "grouped_page": PAGE}}
BOTH = {"mode": "auto", "ways": {"grouped_page": PAGE}}


def cost_with(**seconds_per_row: float) -> CostModel:
    """A cost model in which a mode takes so long for each row and token, and a segment's naive attention a second
    more."""

    class Fixed(CostModel):
        def token_seconds(self, mode: Mode, group_size: int, from_memory: bool) -> float:
            return seconds_per_row[mode.value] * group_size

        def segment_seconds(self, mode: Mode, group_size: int) -> float:
            return float(mode is Mode.NAIVE)

        overhead_seconds = segment_seconds

    return Fixed(COST.dims, COST.local_heads, COST.rates)


@pytest.fixture
def tree(new_tree: Any) -> Any:
    return new_tree(PAGE)


def modes_of(server: Server, *requests: Any) -> list[tuple[tuple[int, ...], float, str]]:
    """Rows, length in pages and mode of each group of a decode step."""
    server.decode(*requests)
    return [(group.rows, group.end / PAGE, group.mode.value) for group in server.prefixes.plan.segments]


@pytest.mark.parametrize("mode", ["auto", "grouped_absorb"])
def test_without_memory_shared_prefixes_are_grouped(tree: Any, mode: str) -> None:
    server = Server(tree, mode=mode, cost=cost_with(absorb=3, grouped_absorb=2, naive=1), **NO_MEMORY)
    requests = [tree.run("systemprompt-" + letter) for letter in "ab"] + [tree.run("else")]
    server.prefixes.before_prefill(requests, [])
    assert modes_of(server, *requests) == [((0, 1), 13, "grouped_absorb")]
    assert server.prefixes.plan.prefix_lens == (13 * PAGE, 13 * PAGE, 0)
    assert server.expander.calls == [] and not server.counters.fallbacks, "nothing was meant to be expanded"


def test_mode_grouped_absorb_never_expands_and_takes_every_prefix_that_is_long_enough(tree: Any) -> None:
    server = Server(tree, mode="grouped_absorb", min_prefix_len=4 * PAGE, ways={"grouped_page": PAGE})
    requests = [tree.run(text) for text in ("fouraaa", "fourbbb", "twoaa", "twobb")]
    assert modes_of(server, *requests) == [((0, 1), 4, "grouped_absorb")]
    assert server.expander.calls == []


@pytest.mark.parametrize("mode", ["absorb", "naive"])
def test_other_modes_do_not_group(tree: Any, mode: str) -> None:
    server = Server(tree, mode=mode, ways={"grouped_page": PAGE})
    requests = [tree.run("systemprompt-" + letter) for letter in "ab"]
    assert {mode for _, _, mode in modes_of(server, *requests)} <= {"naive"}


def test_expands_only_what_then_beats_grouped_absorb(tree: Any) -> None:
    """Naive beats plain absorb either way."""
    requests = [tree.run("systemprompt-" + letter) for letter in "abc"]
    slower = Server(tree, cost=cost_with(absorb=3, grouped_absorb=1, naive=2), **BOTH)
    assert modes_of(slower, *requests) == [((0, 1, 2), 13, "grouped_absorb")]
    assert slower.expander.calls == []
    faster = Server(tree, cost=cost_with(absorb=3, grouped_absorb=2, naive=1), **BOTH)
    assert modes_of(faster, *requests) == [((0, 1, 2), 13, "naive")]
    assert faster.expander.calls == [(0, 13 * PAGE)]


def test_grouped_behind_what_is_expanded_and_again_when_that_is_gone(tree: Any) -> None:
    cost = cost_with(absorb=3, grouped_absorb=2, naive=1)
    server = Server(tree, cost=cost, expand_tokens_per_step=512, **BOTH)
    requests = [tree.run("systemprompt-" + letter) for letter in "ab"]
    assert modes_of(server, *requests) == [((0, 1), 8, "naive"), ((0, 1), 13, "grouped_absorb")]
    assert modes_of(server, *requests) == [((0, 1), 13, "naive")]
    server.prefixes.forget()
    assert modes_of(server, *requests)[0][1:] == (8, "naive")


def test_what_finds_no_memory_is_grouped(tree: Any) -> None:
    """Room for one of two prefixes."""
    server = Server(tree, chunks=4, cost=cost_with(absorb=3, grouped_absorb=2, naive=1), **BOTH)
    ours = [tree.run("sixteen-letters-" + letter) for letter in "abc"]
    theirs = [tree.run("SIXTEEN-LETTERS-" + letter) for letter in "ab"]
    assert modes_of(server, *ours, *theirs) == [((0, 1, 2), 16, "naive"), ((3, 4), 16, "grouped_absorb")]


def test_a_branch_of_few_is_grouped_below_what_is_expanded_for_many(tree: Any) -> None:
    """Naive's second a segment is worth it for ten rows, not for two."""
    server = Server(tree, cost=cost_with(absorb=3e-3, grouped_absorb=2e-3, naive=1e-3), **BOTH)
    requests = [tree.run("eightlet" + str(index)) for index in range(8)]
    requests += [tree.run("eightlet" + "four" + letter) for letter in "ab"]
    everybody = tuple(range(10))
    assert modes_of(server, *requests) == [(everybody, 8, "naive"), ((8, 9), 12, "grouped_absorb")]
    assert server.prefixes.plan.prefix_lens == (8 * PAGE,) * 8 + (12 * PAGE,) * 2
    assert server.pool.used_chunks == 2


def test_memory_goes_where_grouped_absorb_does_not_save_as_much(tree: Any) -> None:
    """Of two prefixes with room for one: naive saves 8 a token for four requests, grouped absorb 7 of these; for three
    requests 6 and nothing."""

    class Stepped(CostModel):
        def token_seconds(self, mode: Mode, group_size: int, from_memory: bool) -> float:
            grouped = 7 if group_size > 3 else -1
            saved = {Mode.ABSORB: 0, Mode.NAIVE: 2 * group_size, Mode.GROUPED_ABSORB: grouped}[mode]
            return (9 * group_size - saved) * 1e-3

    server = Server(tree, chunks=4, cost=Stepped(COST.dims, COST.local_heads, COST.rates), **BOTH)
    four = [tree.run("sixteen-letters-" + letter) for letter in "abcd"]
    three = [tree.run("SIXTEEN-LETTERS-" + letter) for letter in "abc"]
    assert modes_of(server, *four, *three) == [((0, 1, 2, 3), 16, "grouped_absorb"), ((4, 5, 6), 16, "naive")]


def test_gains() -> None:
    cost = cost_with(absorb=3, grouped_absorb=2, naive=1)
    auto = Gains.of(HybridMLAOptions(), cost, naive=True, grouped=True)
    assert (auto.naive(2, 0, 10), auto.grouped(2, 0, 10)) == (39, 20)
    assert (auto.naive(2, 10, 20), auto.grouped(2, 10, 20)) == (39, 20)
    assert Gains.of(HybridMLAOptions(), cost, naive=True, grouped=False).grouped is None
    assert Gains.of(HybridMLAOptions(), cost, naive=False, grouped=True).naive is None
    for mode, has_naive, has_grouped in (
        ("naive", True, False),
        ("grouped_absorb", False, True),
        ("absorb", False, False),
    ):
        gains = Gains.of(HybridMLAOptions(mode=mode), cost, naive=True, grouped=True)
        assert (gains.naive is not None, gains.grouped is not None) == (has_naive, has_grouped)
        assert all(gain(9, 10, 20) > 0 for gain in gains[:2] if gain)


def test_plain_absorb_reads_what_all_share_from_the_cache_only_if_all_of_it_fits() -> None:
    cost = CostModel(COST.dims, 16, GpuRates.from_json("h200"))
    fits = cost.rates.l2_bytes // cost.latent_row_bytes
    alone, beside = (
        Gains.of(HybridMLAOptions(), cost, naive=True, grouped=True, step_tokens=tokens) for tokens in (0, fits + 1)
    )
    assert beside.naive(4, 0, 1024) > alone.naive(4, 0, 1024)
    assert beside.grouped(4, 1024, 2048) > alone.grouped(4, 1024, 2048)
    assert beside.naive(4, 0, fits + 64) == alone.naive(4, 0, fits + 64)


def test_rows_of_one_request_are_grouped_where_nothing_is_expanded(tree: Any) -> None:
    """Behind what is, in the same step; one with a row of its own takes part in what they have in common."""
    server = Server(tree, mode="grouped_absorb", ways={"grouped_page": PAGE})
    first, second = tree.run("systemprompt-a"), tree.run("systemprompt-bcdef")
    assert mixed_groups(server, [first], [2]) == [((0,), 0, 14)]
    assert mixed_groups(server, [first, second], [1, 3]) == [((0, 1), 0, 12), ((1,), 12, 18)], "cut at a whole chunk"
    server = Server(tree, **BOTH, cost=cost_with(absorb=1.0, naive=0.1, grouped_absorb=0.2))
    assert server.decode(first, second) == [((0, 1), 13)]
    server.expander.taken()
    assert mixed_groups(server, [second], [3], mixed=True) == [((0,), 0, 13), ((0,), 13, 18)]
    assert [segment.mode for segment in server.prefixes.plan.segments] == [Mode.NAIVE, Mode.GROUPED_ABSORB]
