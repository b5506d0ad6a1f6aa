"""The study speculative: what its records and its table say; the engines need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
from bench.engine import write_model
from lab.speculative.command import dtype_of, table_of


def run(verify_ms: float, step_ms: float) -> dict[str, Any]:
    return {"verify_ms": verify_ms, "step_ms": step_ms, "accepted_tok_s": 1000.0}


def test_the_table_has_medians_beside_the_last_backends() -> None:
    results = {
        ("hybrid_mla", 7069, 48): [run(1.0, 4.0), run(5.0, 9.0), run(2.0, 5.0)],
        ("flashmla", 7069, 48): [run(6.0, 10.0)],
        ("hybrid_mla", 0, 1): [run(1.0, 2.0)],
    }
    table = table_of(results, ["hybrid_mla", "flashmla"])
    rows = list(zip(*(column._cells for column in table.columns), strict=True))
    assert ("7069", "48", "hybrid_mla", "2.000", "3.00x", "5.000", "2.00x", "1000") in rows
    assert ("7069", "48", "flashmla", "6.000", "1.00x", "10.000", "1.00x", "1000") in rows
    assert ("0", "1", "hybrid_mla", "1.000", "-", "2.000", "-", "1000") in rows


@pytest.mark.parametrize(
    ("backend", "prefix", "cache", "dtype"),
    [
        ("hybrid_mla", "auto", "auto", "bf16"),
        ("hybrid_mla", "fp8_e4m3", "auto", "fp8"),
        ("flashmla", "fp8_e4m3", "auto", "bf16"),
        ("flashmla", "auto", "fp8_e4m3", "fp8_cache"),
        ("hybrid_mla", "fp8_e4m3", "fp8_e4m3", "fp8_cache"),
    ],
)
def test_what_is_stored(backend: str, prefix: str, cache: str, dtype: str) -> None:
    assert dtype_of(backend, prefix, cache) == dtype


def test_the_model_has_a_layer_that_drafts(tmp_path: Any) -> None:
    write_model(tmp_path, 4, 16, 1024, nextn=True)
    assert '"num_nextn_predict_layers": 1' in (tmp_path / "config.json").read_text()
