"""The constants of a decode step come from the records, and with them the serving grid is predicted."""

from __future__ import annotations

import pytest
from bench.predictions import WITHIN, of_file
from bench.records import RESULTS
from bench.step_rates import derived, fitted

from sglang_mla_ext.configs import read_config
from sglang_mla_ext.predict.rates import Gpu
from sglang_mla_ext.segment import Mode

RECORDS = [RESULTS / f"{name}.jsonl" for name in ("profile", "planner", "rank")]


def test_the_shipped_constants_are_those_of_the_records():
    found = fitted(Gpu.from_json("h200"), *RECORDS)
    assert found == read_config("gpus", "h200")["step"]


@pytest.mark.parametrize("name", ["h100", "h20", "a100"])
def test_constants_of_gpus_that_were_not_measured(name):
    gpu = Gpu.from_json(name)
    if not gpu.step.source.startswith("DERIVED"):
        pytest.skip("was measured since")
    assert derived(gpu, Gpu.from_json("h200")) == read_config("gpus", name)["step"]
    with pytest.raises(ValueError, match="data sheets"):
        derived(Gpu.from_json("cpu"), gpu)


def test_records_of_other_gpus_do_not_count():
    with pytest.raises(ValueError, match="no records of NVIDIA A100"):
        fitted(Gpu.from_json("a100"), *RECORDS)


@pytest.mark.parametrize(
    ("name", "least", "missed"),
    [
        ("serving", 73, set()),
        ("engine", 6, set()),
        ("speculative", 20, set()),
        # Measured with a kernel for the FP8 cache that has become faster since.
        ("context", 8, {("hybrid_mla", 128, 16384 + 64)}),
        # Kimi-K3's MLA layers alone: steps of 3 to 20 ms, of which constants of larger models are a large share.
        ("rank", 10, {("hybrid_mla", 6, 528), ("sglang_fa3", 6, 528), ("sglang_fa3", 12, 528)}),
    ],
)
def test_measured_steps_are_predicted_within_15_percent(name, least, missed):
    found = of_file(name)
    assert len(found) >= least
    off = [cell for cell in found if abs(cell.off) > WITHIN]
    assert {(cell.record["impl"], cell.record["case"]["heads"], cell.measured.tail) for cell in off} <= missed


def test_modes_are_those_that_the_servers_took():
    for cell in of_file("serving"):
        sharing = cell.record["hybrid_mla"]
        assert cell.step.cover.mode is (Mode(sharing["mode"]) if sharing else Mode.ABSORB)


def test_tails():
    tails = {cell.measured.tail for name in ("serving", "engine") for cell in of_file(name)}
    assert tails == {122 + 384, 128 + 128}
