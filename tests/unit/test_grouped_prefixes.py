"""Grouped absorb beside naive attention: which shared prefix is attended to in which way, and what is expanded then."""

from __future__ import annotations

from typing import Any

import pytest
from test_shared_prefixes import COST, PAGE, Server

from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.cost_model import CostModel, Mode
from sglang_mla_ext.prefix.gains import Gains
from sglang_mla_ext.prefix.planner import SPARE_ENTRIES, Stacking

STACKING = Stacking(PAGE, rows_per_entry=4)
NO_MEMORY = {"chunks": 0, "ways": {"naive": False, "stacking": STACKING}}
BOTH = {"mode": "auto", "ways": {"stacking": STACKING}}


def cost_with(**seconds_per_row: float) -> CostModel:
    """A cost model in which a mode takes so long for each row and token, and naive one second more."""

    class Fixed(CostModel):
        def seconds(self, mode: Mode, group_size: int, tokens: int) -> float:
            return seconds_per_row[mode.value] * group_size * tokens + (mode is Mode.NAIVE)

    return Fixed(COST.dims, COST.local_heads, COST.rates)


@pytest.fixture
def tree(new_tree: Any) -> Any:
    return new_tree(PAGE)


def modes_of(server: Server, *requests: Any) -> list[tuple[tuple[int, ...], float, str]]:
    """Rows, length in pages and mode of each group of a decode step."""
    server.decode(*requests)
    return [(group.rows, group.end / PAGE, group.mode.value) for group in server.prefixes.plan.groups]


@pytest.mark.parametrize("mode", ["auto", "grouped_absorb"])
def test_without_memory_shared_prefixes_are_grouped(tree: Any, mode: str) -> None:
    server = Server(tree, mode=mode, cost=cost_with(absorb=3, grouped_absorb=2, naive=1), **NO_MEMORY)
    requests = [tree.run("systemprompt-" + letter) for letter in "ab"] + [tree.run("else")]
    server.prefixes.before_prefill(requests, [])
    assert modes_of(server, *requests) == [((0, 1), 13, "grouped_absorb")]
    assert server.prefixes.plan.prefix_lens == (13 * PAGE, 13 * PAGE, 0)
    assert server.expander.calls == [] and not server.counters.fallbacks, "nothing was meant to be expanded"


def test_mode_grouped_absorb_never_expands_and_takes_every_prefix_that_is_long_enough(tree: Any) -> None:
    server = Server(tree, mode="grouped_absorb", min_prefix_len=4 * PAGE, ways={"stacking": STACKING})
    requests = [tree.run(text) for text in ("fouraaa", "fourbbb", "twoaa", "twobb")]
    assert modes_of(server, *requests) == [((0, 1), 4, "grouped_absorb")]
    assert server.expander.calls == []


@pytest.mark.parametrize("mode", ["absorb", "naive"])
def test_other_modes_do_not_group(tree: Any, mode: str) -> None:
    server = Server(tree, mode=mode, ways={"stacking": STACKING})
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


def test_grouped_until_the_expansion_is_complete_and_again_when_it_is_gone(tree: Any) -> None:
    cost = cost_with(absorb=3, grouped_absorb=2, naive=1)
    server = Server(tree, cost=cost, expand_tokens_per_step=300, **BOTH)
    requests = [tree.run("systemprompt-" + letter) for letter in "ab"]
    assert [modes_of(server, *requests)[0][2] for _ in range(3)] == ["grouped_absorb", "grouped_absorb", "naive"]
    server.prefixes.forget()
    assert modes_of(server, *requests)[0][2] == "grouped_absorb"


def test_what_finds_no_memory_is_grouped(tree: Any) -> None:
    """Room for one of two prefixes."""
    server = Server(tree, chunks=4, cost=cost_with(absorb=3, grouped_absorb=2, naive=1), **BOTH)
    ours = [tree.run("sixteen-letters-" + letter) for letter in "abc"]
    theirs = [tree.run("SIXTEEN-LETTERS-" + letter) for letter in "ab"]
    assert modes_of(server, *ours, *theirs) == [((0, 1, 2), 16, "naive"), ((3, 4), 16, "grouped_absorb")]


def test_no_more_groups_than_entries(tree: Any) -> None:
    """Groups of five rows fill two entries of four rows."""
    server = Server(tree, mode="grouped_absorb", min_prefix_len=1, **NO_MEMORY)
    prompts = [chr(ord("A") + index) * (index + 1) for index in range(20)]
    requests = [tree.run(prompt) for prompt in prompts for _ in range(5)]
    groups = modes_of(server, *requests)
    assert len(groups) == (25 + SPARE_ENTRIES) // 2
    assert min(pages for _, pages, _ in groups) == 20 - len(groups) + 1, "the shortest were left out"


def test_gains() -> None:
    cost = cost_with(absorb=3, grouped_absorb=2, naive=1)
    auto = Gains.of(HybridMLAOptions(), cost, naive=True, grouped=True)
    assert (auto.naive(2, 10), auto.grouped(2, 10), auto.expand(2, 10)) == (39, 20, 19)
    assert auto.expand(2, 10) == min(cost.seconds(mode, 2, 10) for mode in (Mode.ABSORB, Mode.GROUPED_ABSORB)) - 21
    alone = Gains.of(HybridMLAOptions(), cost, naive=True, grouped=False)
    assert alone.grouped is None and alone.expand(2, 10) == alone.naive(2, 10) == 39
    for options, ways in ((HybridMLAOptions(), {"naive": False}), (HybridMLAOptions(mode="grouped_absorb"), {})):
        gains = Gains.of(options, cost, **{"naive": True, "grouped": True, **ways})
        assert gains.naive(9, 999) == gains.expand(9, 999) == 0 and gains.grouped(9, 999) > 0
    assert Gains.of(HybridMLAOptions(mode="naive"), cost, naive=True, grouped=True).grouped is None
