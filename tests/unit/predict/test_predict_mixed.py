"""Mixed steps: new tokens are rows more of a predicted step, and so many of them may be mixed in."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from demo_model.rank import Rank, rank_config

from sglang_mla_ext.kernels.sizes import MAX_ROWS
from sglang_mla_ext.predict.mixed import MOST_NEW, ROWS_STEP, SLOWER, bound, evened, mixed_step, pass_layer_seconds
from sglang_mla_ext.predict.rates import Gpu
from sglang_mla_ext.predict.sharing import PLAIN, Cover
from sglang_mla_ext.predict.step import NOBODY, Arriving, Deployment, attention_seconds, predict
from sglang_mla_ext.predict.weights import read_model

V3 = read_model("deepseek-v3")
H100, H200 = Gpu.from_json("h100"), Gpu.from_json("h200")
EIGHT = Deployment(V3, H200, 8)
NAIVE = Cover(naive=7069)


def test_nobody_is_no_row():
    alone = predict(EIGHT, EIGHT.cover(128, 7069), 128, 7069, 200)
    assert mixed_step(EIGHT, 128, 7069, 200, NOBODY) == alone


def test_a_new_row_costs_a_decode_row():
    """But for attention to what requests have of their own, 128 and 64 new tokens are 192 requests."""
    mixed = predict(EIGHT, NAIVE, 128, 7069, 0, arriving=Arriving(64, 64))
    rows = predict(EIGHT, NAIVE, 192, 7069, 0)
    assert mixed.products == rows.products
    assert (mixed.exchanges, mixed.overhead) == pytest.approx((rows.exchanges, rows.overhead))
    assert mixed.attention == pytest.approx(rows.attention, rel=0.01)


def test_new_rows_attend_to_what_their_request_has():
    assert Arriving(64).own == 32.5 and Arriving(64, 4).own == 8.5 and Arriving(64, 4, history=100).own == 108.5

    def seconds(arriving: Arriving) -> float:
        return attention_seconds(EIGHT, NAIVE, 128, 7069, 200, arriving=arriving)

    times = [seconds(arriving) for arriving in (NOBODY, Arriving(128, 4), Arriving(128), Arriving(128, 1, 8192))]
    assert times == sorted(times) and times[3] > 1.5 * times[2]


def test_weights_are_read_once():
    """Over an expanded prefix a step with 128 new tokens takes a tenth more; over latent rows more than that."""
    of = Deployment(V3, H100, 8)
    plain, mixed = (mixed_step(of, 128, 7069, 184, Arriving(tokens)).seconds for tokens in (0, 128))
    assert plain < mixed < 1.1 * plain
    one_by_one = [predict(of, PLAIN, 128, 26472, 184, arriving=Arriving(tokens)).seconds for tokens in (0, 128)]
    assert one_by_one[1] > 1.3 * one_by_one[0]


@pytest.mark.parametrize("dp", [1, 8])
@pytest.mark.parametrize("prefix", [0, 7069, 26472])
@pytest.mark.parametrize("running", [8, 32, 128, 600, 1000, 2000])
def test_the_bound_is_the_largest(dp, prefix, running):
    of = dataclasses.replace(EIGHT, dp=dp)
    found = bound(of, running * dp, prefix, 300)
    assert found % ROWS_STEP == 0 and 0 <= found <= MOST_NEW and (not found or running <= MAX_ROWS)
    alone = mixed_step(of, running * dp, prefix, 300, NOBODY).seconds
    for tokens in range(found, MOST_NEW + 1, ROWS_STEP):
        slower = mixed_step(of, running * dp, prefix, 300, Arriving(tokens * dp, dp)).seconds / alone
        assert (slower <= SLOWER) == (tokens == found) or running > MAX_ROWS


def test_a_pass_of_its_own_reads_the_weights():
    """29 ms of a tp8 rank's 61 layers, of which 20 are the experts'; attention and tokens are not in it."""
    rank = Deployment(rank_config(Rank("tp8", 61)), Gpu.from_json("h200"))
    assert 61 * pass_layer_seconds(rank) == pytest.approx(29e-3, rel=0.03)
    fewer = dataclasses.replace(rank, config=rank_config(Rank("tp8", 36)))
    assert pass_layer_seconds(fewer) == pytest.approx(pass_layer_seconds(rank), rel=0.05)
    with pytest.raises(ValueError, match="no constants"):
        pass_layer_seconds(Deployment(V3, Gpu.from_json("cpu")))


def test_bounds():
    assert [bound(EIGHT, running, 7069, 184) for running in (1, 24, 128, 1024, 1025)] == [0, 320, 1024, 0, 0]
    assert bound(EIGHT, 128, 26472, 184) > bound(EIGHT, 128, 26472, 184, chunks=33) > 0
    # Drafts: rows of a verify step, of which 4 are a request's.
    assert bound(dataclasses.replace(EIGHT, query_tokens=4), 256, 7069, 184) == 896
    assert bound(Deployment(V3, Gpu.from_json("cpu")), 128, 7069, 184) == 0


def test_a_server_that_asks_loads_little():
    code = "import sys, sglang_mla_ext.predict.mixed\nassert not {'rich', 'typer', 'torch', 'numpy'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


@pytest.mark.parametrize(
    ("most", "coming", "waiting", "expected"),
    [(512, 0, 10, 256), (512, 205, 10, 320), (512, 100, 1300, 384), (512, 600, 10, 512), (200, 600, 900, 200)],
)
def test_ranks_whose_steps_are_padded_to_the_largest(most: int, coming: float, waiting: float, expected: int) -> None:
    assert evened(most, coming, waiting) == expected
