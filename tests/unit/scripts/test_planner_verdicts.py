"""What is said of the planner's choices in measured cases, and the overheads fitted to them; nothing is timed here."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from types import ModuleType

import pytest
from bench import rates_file
from bench.planner_verdicts import Verdict, failures, summary, verdicts, with_fitted_overheads
from bench.records import read_records, write_record

from sglang_mla_ext.configs import read_config
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.prefix.planner.model_dims import ModelDims
from sglang_mla_ext.segment import Mode

V3 = ModelDims.of("deepseek-v3")


@pytest.fixture(scope="module")
def planner_checks() -> ModuleType:
    """Imported here: it imports Triton (see conftest)."""
    return pytest.importorskip("bench.planner_checks")


def verdict(absorb: float, naive: float, chosen: Mode, rows: int = 64) -> Verdict:
    case = dict(heads=16, prefix=1024, batch=rows, dtype="fp8")
    return Verdict(case, {"absorb": absorb, "naive": naive}, chosen.value)


def record(absorb: float, naive: float | None, batch: int = 64, **more: str) -> dict:
    ms = {"absorb": absorb} | ({} if naive is None else {"naive": naive})
    return {"case": dict(prefix=26472, tail=512, heads=128, batch=batch, dtype="bf16"), "ms": ms, **more}


def test_loss_is_relative_to_the_fastest_mode():
    bad = verdict(0.2, 0.25, Mode.NAIVE)
    assert (bad.best, bad.loss) == ("absorb", pytest.approx(0.25))
    assert verdict(0.2, 0.25, Mode.ABSORB).loss == 0


def test_only_the_cases_that_lose_are_shown():
    found = [
        verdict(0.2, 0.25, Mode.NAIVE, rows=32),
        verdict(0.2, 0.204, Mode.NAIVE, rows=48),
        verdict(0.3, 0.2, Mode.ABSORB, rows=64),
    ]
    lines = failures(found).splitlines()
    assert lines[0].split() == [
        "heads", "prefix", "requests", "dtype", "absorb", "us", "naive", "us", "chosen", "loss"
    ]  # fmt: skip
    assert [line.split() for line in lines[2:]] == [
        ["16", "1024", "64", "fp8", "300", "200", "absorb", "50%"],
        ["16", "1024", "32", "fp8", "200", "250", "naive", "25%"],
    ]
    assert failures(found[1:2]) == ""
    said = summary(found)
    assert said == "1 of 3 cases within 5%; the worst loses 50.0%: 16 heads, 1,024 tokens, 64 requests, fp8"
    assert summary([]) == "nothing was measured"


def test_the_newest_record_of_a_case_is_judged_among_the_modes_it_has():
    rates = GpuRates.from_json("h200")
    old, new = record(9.0, 1.0, date="2026-01-01"), record(2.0, 1.0, date="2026-01-02")
    alone = record(1.0, None, batch=512)
    second, first = sorted(verdicts([new, alone, old], rates), key=lambda found: -found.case["batch"])
    assert (first.ms, first.chosen, first.loss) == ({"absorb": 2.0, "naive": 1.0}, "naive", 0)
    assert (second.case["batch"], second.chosen) == (512, "absorb")


def measured_by(rates: GpuRates) -> list[dict]:
    """Records of a GPU on which every mode takes exactly what the cost model says with these rates."""
    found = []
    batches, dtypes = (2, 8, 32, 128, 512), ("bf16", "fp8")
    for heads, prefix, batch, dtype in itertools.product((16, 128), (1024, 7069), batches, dtypes):
        cost = CostModel(V3, heads, rates, expanded_element_bytes=1 if dtype == "fp8" else 2)
        modes = [mode for mode in Mode if mode is not Mode.GROUPED_ABSORB or heads == 16]
        case = dict(prefix=prefix, tail=512, heads=heads, batch=batch, dtype=dtype)
        found.append({"case": case, "ms": {mode.value: cost.seconds(mode, batch, prefix) * 1e3 for mode in modes}})
    return found


def with_overheads(**overheads: tuple[float, float]) -> GpuRates:
    """The H200's rates with these overheads in us, constant and per root of a row."""
    rates = GpuRates.from_json("h200")
    modes = {
        mode: replace(of_mode, overhead_s=us[0] / 1e6, overhead_per_root_row_s=us[1] / 1e6)
        for mode, of_mode in rates.modes.items()
        for us in [overheads.get(mode.value, (0.0, 0.0))]
    }
    return replace(rates, modes=modes)


def test_fitted_overheads_are_those_of_the_gpu():
    true = with_overheads(absorb=(2.0, 0.0), grouped_absorb=(0.0, 0.3), naive=(30.0, 0.2))
    records = measured_by(true)
    fitted = with_fitted_overheads(records, with_overheads(naive=(5.0, 0.0)))
    for mode in Mode:
        for name in ("overhead_s", "overhead_per_root_row_s"):
            assert getattr(fitted.modes[mode], name) == pytest.approx(getattr(true.modes[mode], name), abs=2e-7), mode
    assert all(verdict.loss == 0 for verdict in verdicts(records, fitted))


def test_choices_count_more_than_times():
    """Times that no overhead can explain: the choices are right nevertheless, and a mode not measured keeps its own."""
    rates = with_overheads(grouped_absorb=(7.0, 0.5))
    records = [record(1.0, 3.0, 4), record(1.0, 0.9, 64), record(1.0, 0.1, 512)]
    fitted = with_fitted_overheads(records, rates)
    assert all(verdict.loss == 0 for verdict in verdicts(records, fitted))
    assert fitted.modes[Mode.GROUPED_ABSORB] == rates.modes[Mode.GROUPED_ABSORB]


def test_no_overheads_without_a_comparison():
    with pytest.raises(ValueError, match="no record"):
        with_fitted_overheads([record(1.0, None)], GpuRates.from_json("h200"))


def test_refit_writes_the_overheads_and_their_source(tmp_path, capsys):
    """From the records of this GPU alone, and again without a change."""
    out, records = tmp_path / "h200.json", tmp_path / "planner.jsonl"
    config = read_config("gpus", "h200")
    config["source"] = "absorb: x. By hand. naive: kernels/a.py."
    out.write_text(rates_file.to_json(config))
    true = with_overheads(grouped_absorb=(0.0, 0.3), naive=(30.0, 0.2))
    for of_case in measured_by(true):
        write_record(records, bench="planner", impl="hybrid_mla", gpu="NVIDIA H200", command="run it", **of_case)
    other = record(1.0, 9.0, 512)
    write_record(records, bench="planner", impl="hybrid_mla", gpu="NVIDIA H20", command="run it", **other)

    for _ in range(2):
        run_calibrate("--out", out, "--refit", records)
        found = json.loads(out.read_text())
        assert found["modes"]["naive"]["overhead_s"] == pytest.approx(30e-6, abs=2e-7)
        assert found["modes"]["grouped_absorb"]["overhead_per_root_row_s"] == pytest.approx(3e-7, abs=2e-9)
        assert found["source"] == f"absorb: x. By hand. naive: kernels/a.py. {rates_file.FITTED}"
        assert "40 of 40 cases within 5%" in capsys.readouterr().out
    for mode in Mode:
        of_mode, before = found["modes"][mode.value], config["modes"][mode.value]
        kept = [name for name in before if not name.startswith("overhead")]
        assert {name: of_mode[name] for name in kept} == {name: before[name] for name in kept}, mode


def run_calibrate(*arguments: object) -> None:
    """Run the script's command line in this process."""
    import typer
    from typer.testing import CliRunner

    app = typer.Typer()
    app.command()(pytest.importorskip("calibrate").main)
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    print(result.output)
    assert result.exit_code == 0, result.output


def test_check_of_a_gpu_that_is_as_the_model_says(planner_checks, monkeypatch, tmp_path):
    """Every mode's time is the model's, but for one case that naive cannot run: nothing loses, the check is partial."""
    rates = GpuRates.from_json("h200")
    made = []

    def modelled(mode):
        def make(case, dtype, tile):
            made.append((mode, dtype, tile.block_rows))
            if mode is Mode.NAIVE and (case.heads, case.prefix, case.batch, dtype) == (16, 1024, 2, "fp8"):
                raise RuntimeError("no room")
            size = planner_checks.DTYPES[dtype].itemsize
            cost = CostModel(V3, case.heads, rates, expanded_element_bytes=size)
            return cost.seconds(mode, case.batch, case.prefix) * 1e3

        return make

    monkeypatch.setattr(planner_checks, "CHECKED", {mode: modelled(mode) for mode in (Mode.ABSORB, Mode.NAIVE)})
    monkeypatch.setattr(planner_checks, "measure", lambda ms, rep_ms, work: {"ms": ms})
    monkeypatch.setattr(planner_checks, "free_memory", lambda: None)  # it collects garbage, of all tests before, too
    path = tmp_path / "planner.jsonl"
    found, complete = planner_checks.check(rates, 20, path)
    assert not complete
    records = read_records(path)
    assert [{name: of_case[name] for name in ("case", "ms")} for of_case in records] == found
    assert {of_case["bench"] for of_case in records} == {"planner"}
    assert records[0]["case"] == dict(prefix=1024, tail=512, heads=128, batch=2, dtype="bf16")
    assert set(records[0]["ms"]) == {"absorb", "naive"}
    assert not {"chosen", "best", "loss"}.intersection(records[0])  # they depend on the rates
    assert len([mode for mode, *_ in made if mode is Mode.ABSORB]) == 108  # once for both storages
    assert {rows for mode, _, rows in made if mode is Mode.NAIVE} == {64, 128}

    judged = verdicts(records, rates)
    assert summary(judged).startswith("216 of 216 cases within 5%; the worst loses 0.0%")
    assert {of_case.chosen for of_case in judged} == {"absorb", "naive"}
