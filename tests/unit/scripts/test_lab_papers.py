"""What the papers print, from their own formulas; and where it cannot be had from them, what the formula gives."""

from __future__ import annotations

import paper_formulas as formulas
import pytest
from lab.papers.claims import snapmla_peak
from lab.papers.values import AMLA_TABLE_5, TYPHOON_STAGES_MS, TYPHOON_STAGES_RATIO, TYPHOON_TABLE_3
from paper_formulas import ASCEND, ASCEND_ROOFLINE, GPU_OF_AMLA, PAPER_UNIT

from sglang_mla_ext.predict.weights import products, read_model
from sglang_mla_ext.prefix.planner.model_dims import ModelDims

V3, K2 = ModelDims.from_json("deepseek-v3"), ModelDims.from_json("kimi-k2")


def test_typhoon_table_1():
    one = formulas.typhoon_table_1(V3, batch=1, shared=1, other=0)
    assert one["naive"].macs == one["typhoon"].macs == 40 * PAPER_UNIT
    assert one["absorb"].macs == 136 * PAPER_UNIT
    assert one["naive"].words == 40 * PAPER_UNIT and one["absorb"].words == pytest.approx(0.5625 * PAPER_UNIT)
    other = formulas.typhoon_table_1(V3, batch=7, shared=0, other=1)
    assert other["typhoon"] == other["absorb"] and other["absorb"].macs == 7 * 136 * PAPER_UNIT
    assert other["naive"].words / other["typhoon"].words == pytest.approx(71, abs=1)  # "approximately 70"
    both = formulas.typhoon_table_1(V3, batch=3, shared=100, other=10, query_tokens=2)
    assert both["typhoon"].macs == 6 * (100 * 40 + 10 * 136) * PAPER_UNIT
    assert both["typhoon"].words == 100 * 40 * PAPER_UNIT + 3 * 10 * 576


def test_typhoon_threshold():
    assert int(formulas.typhoon_threshold(V3, ASCEND)) == 61
    assert formulas.typhoon_threshold(K2, ASCEND) == formulas.typhoon_threshold(V3, ASCEND)
    assert formulas.typhoon_threshold(V3, ASCEND, query_tokens=4) == pytest.approx(61.4 / 4, abs=0.1)


def test_typhoon_figure_6():
    """Absorb is bound by computing from a batch of 1 (DeepSeek-V3) or 2 (Kimi-K2) on; naive reaches 3.4 times that."""
    assert formulas.typhoon_ridge(V3, ASCEND_ROOFLINE, "absorb") < 1
    assert 1 < formulas.typhoon_ridge(K2, ASCEND_ROOFLINE, "absorb") < 2
    rates = {
        mode: [formulas.typhoon_roofline(V3, ASCEND_ROOFLINE, 2**power, 4096, mode) for power in range(11)]
        for mode in ("naive", "absorb")
    }
    assert rates["absorb"] == pytest.approx([rates["absorb"][0]] * 11)
    assert rates["naive"][-1] / rates["absorb"][-1] == pytest.approx(3.4)
    assert all(
        (naive > absorb) == (2**power > 64) for power, (naive, absorb) in enumerate(zip(*rates.values(), strict=True))
    )


def test_typhoon_figure_7():
    """Naive is constant up to 128; Typhoon is absorb up to 64 with figure 6's rates, and up to 61 with section 4's."""
    seconds = {2**power: formulas.typhoon_seconds(V3, ASCEND_ROOFLINE, 2**power, 4096, 0) for power in range(11)}
    assert len({of["naive"] for batch, of in seconds.items() if batch <= 128}) == 1
    assert seconds[256]["naive"] > seconds[128]["naive"]
    assert formulas.typhoon_ridge(V3, ASCEND, "naive") == pytest.approx(209, abs=0.5)
    assert formulas.typhoon_ridge(V3, ASCEND_ROOFLINE, "naive") == pytest.approx(222, abs=0.5)
    assert all(of["typhoon"] == of["absorb"] for batch, of in seconds.items() if batch <= 64)
    assert all(of["typhoon"] == of["naive"] < of["absorb"] for batch, of in seconds.items() if batch > 64)
    at_64 = formulas.typhoon_seconds(V3, ASCEND, 64, 4096, 0)
    assert at_64["typhoon"] < at_64["absorb"]


def test_typhoon_figure_8_is_not_what_the_formula_gives():
    of = formulas.typhoon_seconds(V3, ASCEND, 512, 4096, 128)
    assert of["absorb"] / of["typhoon"] == pytest.approx(3.17, abs=0.01)  # printed: up to 2, measured


def test_typhoon_figure_4():
    """The ratio of the shared parts; the times themselves are 3.6 and 3.2 times those of the formula."""
    absorb_only, stage_1, stage_2 = (TYPHOON_STAGES_MS[name] for name in ("absorb only", "stage 1", "stage 2"))
    assert (absorb_only - stage_2) / stage_1 == pytest.approx(TYPHOON_STAGES_RATIO, abs=0.05)
    shared = formulas.typhoon_seconds(K2, ASCEND, 1024, 4096, 0)
    assert shared["absorb"] / shared["typhoon"] == pytest.approx(3.4)
    assert stage_1 * 1e-3 / shared["typhoon"] == pytest.approx(3.6, abs=0.1)
    assert stage_2 * 1e-3 / formulas.typhoon_seconds(K2, ASCEND, 1024, 0, 512)["typhoon"] == pytest.approx(3.2, abs=0.1)


@pytest.mark.parametrize(
    ("attention_ms", "total_ms", "thousands"), [row for of_prompt in TYPHOON_TABLE_3.values() for row in of_prompt]
)
def test_typhoon_table_3(attention_ms, total_ms, thousands):
    rest_ms = total_ms - attention_ms
    assert rest_ms == pytest.approx(28.1, abs=0.11)  # one model's rest, whatever the prompt
    assert formulas.typhoon_token_rate(attention_ms, rest_ms) / 1e3 == pytest.approx(thousands, abs=0.0055)


def test_typhoon_speed_up_is_not_the_ratio_of_its_rates():
    assert pytest.approx(1.474, abs=0.001) == 127.2 / 86.3  # printed: up to 1.48


def test_typhoon_figure_5():
    weights = sum(product.stored for product in products(read_model("deepseek-v3")))
    overhead = {
        (requests, longest): formulas.typhoon_footprint(V3, weights, requests * 1024, longest * 1024).overhead
        for requests in (4, 8, 16, 32)
        for longest in (32, 64, 128, 256)
    }
    assert overhead[4, 32] == pytest.approx(0.30, abs=0.01)
    assert overhead[16, 128] == pytest.approx(0.021, abs=0.001) and overhead[32, 256] < 0.006
    assert {cell for cell, share in overhead.items() if share <= 0.03} == {
        *((8, 256), (16, 128), (16, 256), (32, 64), (32, 128), (32, 256))
    }


def test_snapmla_equation_7():
    assert snapmla_peak(148e12) / 1e12 == pytest.approx(279.6, abs=0.05)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries", "mla", "intensity"),
    [
        (64, 64, 1, False, 1),
        (64, 8, 1, False, 8),
        (64, 1, 1, True, 121),
        (128, 1, 1, True, 242),
        (128, 1, 2, True, 484),
    ],
)
def test_amla_table_2(heads, kv_heads, queries, mla, intensity):
    """The formula's values: the printed ones are not in the text."""
    dims = (576, 512) if mla else (128, 128)
    assert round(formulas.amla_intensity(heads, kv_heads, queries, *dims, shared=mla)) == intensity


@pytest.mark.parametrize(
    ("queries", "context", "us", "printed"),
    [(*case, us, share) for case, (*_, us, share) in AMLA_TABLE_5.items()],
)
def test_amla_table_5(queries, context, us, printed):
    """The GPU's column. Times are printed in whole microseconds."""
    found = formulas.amla_utilisation(V3, GPU_OF_AMLA, us * 1e-6, context, queries)
    assert 100 * found == pytest.approx(printed, rel=0.007)
