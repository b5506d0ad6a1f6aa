"""The papers' experiments: their cells, how a run goes on, and their tables; nothing is timed here."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bench.records import read_records, write_record
from bench.rivals import RIVALS
from lab.papers.claims import claims, snapmla_peak
from lab.papers.experiments import EXPERIMENTS, Cell
from lab.papers.values import TYPHOON_SPEED_UP
from typer.testing import CliRunner

FIGURE_3, AMLA, FIGURE_4 = "typhoonmla-figure-3", "amla-table-5", "typhoonmla-figure-4"
CELLS = {name: [cell for of_case in of.cells(name) for cell in of_case] for name, of in EXPERIMENTS.items()}


@pytest.fixture(scope="module")
def command() -> ModuleType:
    return pytest.importorskip("lab.papers.command")


@pytest.fixture(scope="module")
def runs() -> ModuleType:
    """Imported here: it imports Triton (see conftest)."""
    return pytest.importorskip("bench.measured")


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every measurement of every experiment: 600 TFLOPS for ours, 500 for the others, 0.1 ms for a stage."""
    path = tmp_path_factory.mktemp("sample") / "papers.jsonl"
    for cells in CELLS.values():
        for cell in cells:
            rate = 600 if cell.of.impl.startswith("hybrid_mla") else 500
            flops = cell.case.latent_flops(cell.case.lengths)
            record(path, cell, ms=flops / rate / 1e9 if cell.of.part == "all" else 0.1, tflops=rate)
    return path


def record(path: Path, cell: Cell, gpu: str = "NVIDIA H200", **metrics: Any) -> None:
    common = dict(gpu=gpu, command=f"python scripts/study.py papers reproduce {cell.experiment}")
    write_record(path, bench="papers", impl=cell.of.impl, part=cell.of.part, case=cell.fields(), **common, **metrics)


def test_cells_are_those_of_the_papers():
    assert {name: len(of.cases) for name, of in EXPERIMENTS.items()} == {
        FIGURE_3: 3 * 3 * 5 * 2,
        FIGURE_4: 4,
        "snapmla-figure-5": 3 * 4,
        "snapmla-figure-6": 2 * 2 * 4,
        "etap-figure-1": 2 * 8,
        AMLA: 2 * 6,
    }
    assert {name: len(cells) for name, cells in CELLS.items()} == {
        FIGURE_3: 90 * 6,
        FIGURE_4: 4 * 4,
        "snapmla-figure-5": 12 * 4 + 4,  # requests are stacked with 16 heads
        "snapmla-figure-6": 16 * 4 + 8,  # and with 32
        "etap-figure-1": 16 * 5,
        AMLA: 12 * 4,
    }
    keys = [cell.key for cells in CELLS.values() for cell in cells]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("s_q", "tokens", "us", "peak_share"), [(1, 1024, 85, 0.326), (2, 16384, 1314, 0.674), (1, 16384, 766, 0.578)]
)
def test_tflops_count_as_the_papers_do(s_q, tokens, us, peak_share):
    """AMLA's utilisation of 989 TFLOPS by its times; and by hand: 2 x 96 x 128 x 1,024 x (576 + 512)."""
    case = next(case for case, _ in EXPERIMENTS[AMLA].cases if (case.s_q, case.tail) == (s_q, tokens))
    flops, read_bytes = RIVALS["flashmla_bf16"].work(case)
    assert flops == 2 * 96 * 128 * s_q * tokens * (576 + 512)
    assert flops / (us * 1e-6) / 989e12 == pytest.approx(peak_share, rel=0.01)
    assert read_bytes == 96 * tokens * 576 * 2
    assert RIVALS["flashinfer_mla"].work(case) == (flops, read_bytes)


def test_a_run_goes_on_where_it_stopped(command, tmp_path, capsys):
    """With a stand-in for the measuring: each cell once; failures are not written, are counted, and are tried again."""
    out, asked, flaky = tmp_path / "out.jsonl", [], ["flashinfer_mla"]

    def measured(cell: Cell) -> dict[str, Any] | None:
        asked.append(cell.key)
        return None if cell.of.impl in flaky else {"ms": 1.0, "tflops": 2.0}

    def again(**options: Any) -> int:
        asked.clear()
        done = command.keys_by_gpu(out).get("cpu", set())
        return command.measure_missing(AMLA, out, done, measured, **options)

    assert again() == 12 and len(asked) == 48 and len(read_records(out)) == 36
    assert again(skip=["flashinfer_mla"]) == 0 and not asked
    flaky.clear()
    assert again() == 0 and len(asked) == 12
    assert again() == 0 and not asked
    written = read_records(out)
    assert len(written) == 48 and {one["bench"] for one in written} == {"papers"}
    assert {one["case"]["experiment"] for one in written} == {AMLA}
    assert {one["command"] for one in written} == {f"python scripts/study.py papers reproduce {AMLA}"}
    assert "amla-table-5 12/12" in capsys.readouterr().out


def test_list_needs_no_gpu(command, tmp_path, sample):
    for out, columns in ((tmp_path / "none.jsonl", ["540", "0"]), (sample, ["540", "540"])):
        found = CliRunner().invoke(command.app, ["reproduce", "--list", "--out", str(out)])
        assert found.exit_code == 0, found.output
        (line,) = (line for line in found.output.splitlines() if FIGURE_3 in line)
        assert line.split()[-2:] == columns
    assert CliRunner().invoke(command.app, ["reproduce", "figure-9"]).exit_code == 2


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_cell_has_a_function_that_measures_it(name, runs, monkeypatch):
    """And is given work to count: no kernel runs, stand-ins say what would."""
    called: list[str] = []

    def measure(function: Any, rep_ms: int, work: Any) -> dict[str, Any]:
        assert work is None or (work[0] > 0 and work[1] >= 0)
        called.append(function)
        return {"ms": 1.0}

    for stand_in in ("grouped_absorb", "flashmla_tail"):
        monkeypatch.setattr(runs, stand_in, lambda *_, stand_in=stand_in: stand_in)
    monkeypatch.setattr(runs, "our_part", lambda case, dtype, part: f"{part} {dtype}")
    monkeypatch.setattr(runs, "measure", measure)
    monkeypatch.setattr(runs, "measure_fp8_rows", lambda case, *_: measure("FP8 rows", 1, None))
    for rival, of in RIVALS.items():
        monkeypatch.setitem(runs.RIVALS, rival, of._replace(make=lambda case, rival=rival: rival))
    for cell in CELLS[name]:
        assert runs.measured(*cell.of[:3], cell.case, 20) == {"ms": 1.0}
    expected = {
        FIGURE_3: {"flashmla_bf16", "flashmla_fp8", "flashinfer_mla", "typhoon_parts", "all bf16", "all fp8"},
        FIGURE_4: {"flashmla_bf16", "flashmla_tail", "naive bf16", "naive fp8"},
        AMLA: {"flashmla_bf16", "flashmla_fp8", "flashinfer_mla", "FP8 rows"},
    }
    assert set(called) == expected.get(name, expected[AMLA] | {"grouped_absorb"})


def test_snapmla_equation_7():
    """As the paper prints it for its GPU."""
    assert snapmla_peak(148e12) / 1e12 == pytest.approx(279.6, abs=0.05)


def test_claims(sample):
    """In the sample ours is 600 / 500 = 1.2 times as fast everywhere."""
    rows = [(row["of"], row["says"], row["paper"], row["here"]) for row in claims(read_records(sample))]
    said = {says: here for _, says, _, here in rows}
    assert rows[0][0] == "TyphoonMLA" and rows[0][2] == f"{TYPHOON_SPEED_UP}x"
    assert rows[0][3].endswith("1.20x (ours BF16), 1.20x (ours, FP8 prefix)")
    assert "90 of 90 (ours BF16)" in said["faster than both everywhere"]
    assert sum("MMLU, 128 requests" in says for says in said) == 3
    amla = [row for row in rows if row[0] == "AMLA"]
    assert len(amla) == 4 and amla[0][2] == "40.9% (AMLA), 32.6% (GPU)"
    assert amla[0][3].startswith("50.6% (FlashMLA BF16)")  # 500 of 989 TFLOPS
    found = [row[2:] for row in rows if row[0] == "FlashMLA-ETAP"]
    assert ("2.78x", "1.20x (ours BF16, stacked), 1.20x (ours FP8)") in found
    assert sum("32% of 1,868 TFLOPS" in row[3] for row in rows) == 2
    assert sum("16 of 16, 1.20x to 1.20x" in row[3] for row in rows) == 1
    assert said["stage 1"].startswith("0.100 ms (stage 1)")
