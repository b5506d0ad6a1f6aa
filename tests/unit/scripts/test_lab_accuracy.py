"""The fidelity study: its truth, measures and data, and that its studies give every row, at small sizes."""

from __future__ import annotations

import math

import pytest
import torch
from bench.records import write_record
from bench.tables import specs
from lab.accuracy import drawn
from tables_of import lines_of


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_the_truth_is_attention() -> None:
    q, k, v = (torch.randn(n, 8, generator=generator()).bfloat16() for n in (3, 50, 50))
    expected = torch.softmax(q.double() @ k.double().T * 0.3, dim=1) @ v.double()
    torch.testing.assert_close(drawn.attention(q, k, v, 0.3), expected)


def test_measures() -> None:
    truth = torch.tensor([[3.0, 4.0], [0.0, 0.0]])
    found = drawn.measures(truth + torch.tensor([[4.0, -3.0], [0.0, 0.0]]), truth)  # at a right angle, as long
    assert found["rmse"] == pytest.approx(5 / math.sqrt(4))
    assert found["rel_err"] == pytest.approx(1.0)
    assert found["cos_dist"] == pytest.approx(1 - math.sqrt(0.5))
    assert drawn.measures(truth, truth) == dict(rmse=0.0, cos_dist=pytest.approx(0.0, abs=1e-15), rel_err=0.0)


def test_mean() -> None:
    assert drawn.mean([dict(a=1.0, b=2.0), dict(a=3.0, b=2.0)]) == dict(a=2.0, b=2.0)


@pytest.mark.parametrize("sizes", ["equal", "spread"])
def test_the_cache_is_within_the_ranges_of_the_figure(sizes: str) -> None:
    content, rope = drawn.cache_like_figure_3(4000, sizes, generator())
    assert content.dtype == rope.dtype == torch.bfloat16
    assert 5 < content.abs().max() <= 10 and 900 < rope.abs().max() <= 1000
    assert content.float().abs().median() < 0.6  # concentrated around zero
    deviations = content.float().std(dim=1)
    assert (deviations.max() / deviations.min() > 100) == (sizes == "spread")


def test_queries_make_scores_of_the_deviation_asked_for() -> None:
    keys = torch.logspace(0, 2, 64) * torch.randn(3000, 64, generator=generator())
    scores = drawn.queries_for(keys, 4.0, 5, generator()).float() @ keys.T
    torch.testing.assert_close(scores.std(dim=1), torch.full((5,), 4.0), rtol=0.02, atol=0)


def test_distributions() -> None:
    uniform = drawn.drawn("uniform", 3.0, (10_000,), generator())
    assert uniform.abs().max() <= 3 and uniform.std().item() == pytest.approx(3**0.5, rel=0.02)
    assert drawn.drawn("normal", 2.0, (10_000,), generator()).std().item() == pytest.approx(2, rel=0.03)
    outliers = drawn.with_outliers((1_000_000,), generator())
    assert outliers.var().item() == pytest.approx(1.1, rel=0.02)
    assert drawn.student_t((10_000,), 5, generator()).var().item() == pytest.approx(5 / 3, rel=0.2)


def test_every_study_gives_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "ROTARY_LOGIT_STD", (4.0,))
    monkeypatch.setattr(drawn, "AMLA_NORMAL", (1.0,))
    monkeypatch.setattr(drawn, "AMLA_UNIFORM", (50.0,))
    snapmla = list(drawn.snapmla(tokens=200, heads=2, samples=1))
    assert [name for name, _, _ in snapmla] == 2 * [*drawn.SNAPMLA_NAMES.values(), "bf16"]
    errors = {name: metrics["rel_err"] for name, _, metrics in snapmla[:7]}
    assert errors["bf16"] < errors["hybrid_mla"] < errors["snapmla_config_a"]
    amla = list(drawn.amla(tokens=600, heads=2, samples=2))
    assert [name for name, _, _ in amla] == 2 * list(drawn.AMLA_NAMES.values())
    assert all(metrics["rel_err"] < 4e-3 for _, _, metrics in amla)
    assert [case["tokens"] for _, case, _ in drawn.etap((100,))] == [100] * 3


def test_tables(tmp_path) -> None:
    path = tmp_path / "accuracy.jsonl"

    def record(impl: str, case: dict, **metrics: float) -> None:
        write_record(path, bench="accuracy", impl=impl, case=case, gpu="cpu", command="run it", **metrics)

    for number, impl in enumerate(("bf16", *drawn.SNAPMLA_NAMES.values())):
        case = dict(study="snapmla", token_sizes="equal", rotary_logit_std=4.0)
        for factor in (9.0, 1.0):  # the last record counts
            record(impl, case, rmse=factor * number, cos_dist=0.25, rel_err=0.5)
    for number, impl in enumerate(drawn.AMLA_NAMES.values()):
        record(impl, dict(study="amla", distribution="uniform", size=3.0), rel_err=number / 1000)
    record("fp16", dict(study="etap", distribution="normal", tokens=8192), rms=0.5, rmse=1e-5, rel_err=2e-5)

    of_page = specs()["docs/accuracy.md"]
    cache = lines_of(of_page["cache"], path)
    assert cache[0][3:] == ["BF16", "ours", "SnapMLA", "A", "B", "C", "D"]
    assert cache[1] == ["equal", "4", "RMSE", *(f"{number:.2e}" for number in range(7))]
    assert [line[2:4] for line in cache[2:4]] == [["1 - cosine", "2.50e-01"], ["relative L2", "5.00e-01"]]
    assert lines_of(of_page["rescale"], path)[1] == ["uniform", "3", "0.00e+00", "1.00e-03", "2.00e-03", "3.00e-03"]
    assert lines_of(of_page["fp16"], path)[1] == ["normal", "8,192", "5.00e-01", "1.00e-05", "2.00e-05"]
