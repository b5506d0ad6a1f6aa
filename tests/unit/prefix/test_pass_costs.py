"""Prefill passes inside of CUDA graphs and outside of them: which is predicted to be sooner, and what is expanded."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.prefix.planner.model_dims import ModelDims
from sglang_mla_ext.prefix.planner.pass_costs import MOST_FETCHED, PassCosts


def costs(heads: int) -> PassCosts:
    cost = CostModel(ModelDims.of("deepseek-v3"), heads, GpuRates.from_json("h200"))
    return PassCosts(cost, cost.rates.passes.graph_layer_s)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(
    ("prefix", "end", "new", "leaves"),
    [
        (7040, 7040, 200, False),  # an expanded prompt, and a question
        (7040, 0, 200, False),
        (0, 0, 512, False),
        (0, 0, 8192, True),  # absorb over itself costs more than launches
        (20_000, 20_000, 8192, True),
    ],
)
def test_long_pieces_of_text_leave_the_graph(heads: int, prefix: int, end: int, new: int, leaves: bool) -> None:
    of_pass = [prefix], [end], [new]
    found = costs(heads)
    assert (found.eager(*of_pass) < found.in_graph(*of_pass)) == leaves


@pytest.mark.parametrize("heads", [16, 128])
def test_a_history_is_expanded_for_enough_new_tokens(heads: int) -> None:
    """Making keys and values of a token costs 131,072 multiply-adds a head, and saves 768 for each new token: 171 of
    them, and some more for launches."""
    found = costs(heads)
    assert not found.pays_alone(100, 50_000)
    assert found.pays_alone(700, 50_000)
    assert not found.pays_alone(700, 64), "launches cost more"


def test_what_a_pass_makes_is_paid_once() -> None:
    found, of_pass = costs(16), ([30_000, 30_000], [30_000, 30_000], [300, 300])
    for way in (found.eager, found.in_graph):
        assert way(*of_pass, 20_000) - way(*of_pass) == pytest.approx(found.cost.making_seconds(20_000))


def test_rows_of_an_fp8_cache_are_fetched_up_to_a_bound() -> None:
    found = replace(costs(16), fetches=True)
    assert found.in_graph([MOST_FETCHED], [0], [1]) == math.inf
    assert found.in_graph([MOST_FETCHED], [1], [1]) < math.inf
    assert costs(16).in_graph([MOST_FETCHED], [0], [1]) < math.inf
