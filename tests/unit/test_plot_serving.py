"""What the plots of servers show; nothing is drawn here."""

from __future__ import annotations

from bench.rank_plots import digest
from bench.rank_plots import panels as rank_panels
from bench.records import read_records
from bench.tables import RESULTS
from plot_serving import IMAGES, Line, panels, rows_and_columns, title


def record(impl: str, day: int, rate: float | None, concurrency: int = 128, **case) -> dict:
    case = dict(prompt="A", prefix=26472, heads=128, layers=4, concurrency=concurrency) | case
    return dict(impl=impl, case=case, decode_tok_s=rate, date=f"2026-01-{day:02d}T00:00:00+00:00")


def test_the_newest_of_each_case_by_backend_and_storage():
    fp8 = "--hybrid-mla-prefix-memory-gb 8 --hybrid-mla-prefix-dtype fp8_e4m3"
    found = panels(
        [
            record("hybrid_mla", 3, 30.0),
            record("hybrid_mla", 2, 20.0),
            record("hybrid_mla", 1, 10.0, concurrency=64),
            record("hybrid_mla", 4, None),  # the full batch did not last
            record("hybrid_mla", 2, 40.0, flags=fp8),
            record("hybrid_mla", 2, 50.0, kv_cache_dtype="fp8_e4m3"),
            record("sglang_flashmla", 1, 15.0),
            record("sglang_flashmla", 1, 25.0, heads=16),  # with nothing to compare it to
        ]
    )
    assert found == {
        ("A", 26472, 128, 4): {
            Line("flashmla", "BF16"): {128: 15.0},
            Line("hybrid_mla", "BF16"): {64: 10.0, 128: 30.0},
            Line("hybrid_mla", "BF16, prefix FP8"): {128: 40.0},
            Line("hybrid_mla", "FP8"): {128: 50.0},
        },
    }
    assert list(found["A", 26472, 128, 4][Line("hybrid_mla", "BF16")]) == [64, 128]


def test_a_row_for_each_model_and_a_column_for_each_prompt():
    big, small, unknown = (128, 4), (16, 16), (None, None)  # of a model that was named, not read
    panels = [("B", 7069, *small), ("A", 26472, *unknown), ("A", 26472, *big), ("mine.txt", 300, *big)]
    assert rows_and_columns(panels) == ([big, small, unknown], [("A", 26472), ("B", 7069), ("mine.txt", 300)])


def test_names():
    assert str(Line("hybrid_mla", "BF16, prefix FP8")) == "hybrid_mla, BF16, prefix FP8"
    assert title(("A", 26472, 128, 4)) == "prompt A (26,472 tokens)\n128 heads, 4 layers"


def test_the_shipped_results_can_be_drawn():
    found = panels(read_records(RESULTS / "serving.jsonl"))
    assert found
    assert all(rate > 0 for panel in found.values() for line in panel.values() for rate in line.values())


def test_the_readmes_plot_is_of_the_records():
    """If not: python scripts/plot_serving.py."""
    drawn = rank_panels(read_records(RESULTS / "rank.jsonl"))
    of_case = drawn["DeepSeek-V3, TP 8", "decode", 26472]
    assert {each.requests: each.ratio for each in of_case}.items() >= {128: "1.96x", 256: "2.85x"}.items()
    assert digest(drawn).encode() in (IMAGES / "ranks.png").read_bytes()
