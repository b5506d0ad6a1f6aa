"""Tables of records: what is in their rows, and where they go.

`test_the_pages_have_the_tables_of_the_records` holds all of them to what is published; the others are of records that
there are not, or of rules that a reader would not see.
"""

from __future__ import annotations

import json

import pytest
from bench.predictions import storage, tokens_per_s
from bench.records import newest_by, read_records, write_record
from bench.tables import CELLS, made_with, specs
from lab.accuracy.tables import goal_verdict
from tables_of import lines_of
from update_tables import fill, main

PERFORMANCE = specs()["docs/performance.md"]


def test_records_beside_each_other(tmp_path):
    """The newest of each, in the order that is asked for; a dash for one that there is not."""
    path = tmp_path / "records.jsonl"
    spec = {
        "by": ["heads", "dtype", "tokens"],
        "beside": {"ours": {"impl": "hybrid_mla"}, "torch": {"impl": "torch"}},
        "needs": ["ours"],
        "order": ["heads", "dtype"],
        "columns": {
            "heads": "{heads}",
            "dtype": "{dtype}",
            "tokens": "{tokens:,}",
            "ms": "{ms:.3f}",
            "torch ms": "{torch[ms]:.3f}",
            "gain": "{torch[ms]/ms:.2f}x",
            "TFLOPS": "{tflops:.0f}",
            "share": "{gemm_share:.0%}",
            "nothing": "{no_such_field}",
            "either": "{no_such_field} ?? {gemm_share!p:.0f}",
        },
    }
    for impl, dtype, ms in (("torch", "bf16", 3.0), ("hybrid_mla", "bf16", 9.0), ("hybrid_mla", "bf16", 1.0)):
        metrics = dict(ms=ms, tflops=600.0, gemm_tflops=800.0, gemm_share=0.75)
        case = dict(tokens=4096, heads=128, dtype=dtype)
        write_record(path, bench="expansion", impl=impl, case=case, gpu="GPU", command="run it", **metrics)
    case = dict(tokens=4096, heads=16, dtype="fp8")
    write_record(path, bench="expansion", impl="hybrid_mla", case=case, gpu="GPU", command="run it", **metrics)
    assert lines_of(spec, path)[1:] == [
        ["16", "fp8", "4,096", "1.000", "–", "–", "600", "75%", "75"],
        ["128", "bf16", "4,096", "1.000", "3.000", "3.00x", "600", "75%", "75"],
    ]


def test_one_rank(tmp_path):
    """Medians over runs; beside the fastest of SGLang's own on the same prompt, layers, GPU and cache."""
    path, h200 = tmp_path / "rank.jsonl", "NVIDIA H200"
    fp8 = "--hybrid-mla-prefix-dtype fp8_e4m3 --hybrid-mla-prefix-memory-gb 14"
    written = {}
    in_turns = "--hybrid-mla-prefix-memory-gb 9 --hybrid-mla-mixed-tokens 0"
    for impl, bench, more, gpu, rate, excluded in (
        ("sglang_flashmla", "short", {}, h200, 100.0, False),
        ("sglang_flashmla", "short", {}, h200, 300.0, False),
        ("hybrid_mla", "short", {}, h200, 400.0, False),
        ("hybrid_mla", "short", {}, h200, 500.0, False),
        ("hybrid_mla", "short", {}, h200, 900.0, False),
        ("hybrid_mla", "short", {}, h200, 9999.0, True),
        ("hybrid_mla", "short", dict(flags=in_turns), h200, 150.0, False),
        ("hybrid_mla", "short", dict(layers=61), h200, 150.0, False),
        ("sglang_flashmla", "short", dict(layers=61), h200, 50.0, False),
        ("sglang_fa3", "short", dict(layers=61), h200, 75.0, False),
        ("hybrid_mla", "short", dict(layers=61, concurrency=64), h200, 70.0, False),
        ("sglang_fa3", "short", dict(layers=61, concurrency=64), h200, 70.0, False),
        ("hybrid_mla", "short", {}, "other GPU", 150.0, False),
        ("hybrid_mla", "short", dict(layers=61, of="kimi-k2"), h200, 950.0, False),
        ("hybrid_mla", "decode", dict(layers=61, deep_gemm=True), h200, 90.0, False),
        ("sglang_fa3", "decode", dict(layers=61, deep_gemm=True), h200, 30.0, False),
        ("hybrid_mla", "short", dict(rank="dp8", layers=60, flags=fp8), h200, 150.0, False),
        ("sglang_fa3", "short", dict(rank="dp8", layers=60), h200, 50.0, False),
        ("sglang_fa3", "short", dict(rank="dp8", layers=60, flags="--page-size 64"), h200, 60.0, False),
        ("hybrid_mla", "decode", dict(deep_gemm=True, kv_cache_dtype="fp8_e4m3"), h200, 80.0, False),
        ("sglang_flashmla", "decode", dict(deep_gemm=True, kv_cache_dtype="fp8_e4m3"), h200, 40.0, False),
    ):
        case = dict(rank="tp8", layers=36, prefix=7069, concurrency=128, requests=128, output=32768) | more
        # A rate of 128 requests by the median time between two tokens; while they decode it is less in the mean.
        of_decode = dict(steady_tok_s=None, decode_tok_s=rate * 0.9, decode_itl_ms=128e3 / rate)
        rates = of_decode if bench == "decode" else dict(steady_tok_s=rate)
        metrics = dict(ttft_ms=rate, ttft_p99_ms=1234.4, itl_p99_ms=40.2) | (dict(excluded="why") if excluded else {})
        command = f"run --backend {impl} --out /somewhere/rank.jsonl --log-folder /elsewhere --seed 0"
        record = write_record(path, bench=bench, impl=impl, case=case, gpu=gpu, command=command, **rates, **metrics)
        written[bench, impl, case["rank"], case["layers"], case["concurrency"], case.get("of")] = record
    said = [tokens_per_s(written["short", impl, "tp8", 61, 128, None]) for impl in ("hybrid_mla", "sglang_fa3")]
    rows = lines_of(PERFORMANCE["one-rank-headline"], path)[1:]
    assert all(row[1] == "short answers" for row in rows)  # the long ones had DeepGEMM
    case = "short answers", "7,069", "128"
    assert rows[0] == [
        *("DeepSeek-V3, TP 8", *case, "150", "75 (fa3)", "2.00x"),
        "{:,.0f} / {:,.0f}, {:.2f}x".format(*said, said[0] / said[1]),
        *("150 / 75", "40 / 40"),
    ]
    rival = "60 (fa3, pages of 64)"
    assert rows[1][:7] == ["DeepSeek-V3, DP 8, 60 layers", *case, "150 (FP8 prefix, 14 GiB)", rival, "2.50x"]
    assert len(rows) == 2


def test_where_figures_come_from():
    common = dict(gpu="GPU", torch="2", sglang=None, commit="abcdefgh", date="2026-01-02T00:00:00+00:00")
    assert made_with([common, common]) == "GPU, torch 2"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, "BF16"),
        (dict(flags="--hybrid-mla-prefix-dtype fp8_e4m3"), "BF16, prefix FP8"),
        (dict(kv_cache_dtype="fp8_e4m3"), "FP8"),
    ],
)
def test_storage(more, expected):
    assert storage({"case": more}) == expected


def test_what_is_excluded_is_in_no_table_until_it_is_measured_again(tmp_path):
    path = tmp_path / "serving.jsonl"

    def record(rate: float) -> dict:
        return write_record(path, bench="serving", impl="hybrid_mla", case={}, rate=rate, gpu="GPU", command="run it")

    def rates() -> list[float]:
        return [record["rate"] for record in newest_by(read_records(path))]

    ours = record(20.0)
    assert rates() == [20.0]
    path.write_text(path.read_text().replace(json.dumps(ours), json.dumps(ours | {"excluded": "disturbed"})))
    assert rates() == []
    record(30.0)
    assert rates() == [30.0]


def test_the_pages_have_the_tables_of_the_records():
    main(check=True)


def test_accuracy_of_a_model(tmp_path):
    path = tmp_path / "accuracy.jsonl"

    def record(impl: str, case: dict, **metrics: float) -> None:
        case = dict(study="demo", **case)
        write_record(path, bench="accuracy", impl=impl, case=case, gpu="cpu", command="run it", **metrics)

    def around(name: str, value: float) -> dict:
        return {name: value, f"{name}_low": value - 0.05, f"{name}_high": value + 0.05}

    spec = specs()["docs/accuracy.md"]["model"]
    spec = spec | {"needs": ["prose", "dictionary", "lookup_512"]}
    for impl, change in (("sglang_bf16", None), ("hybrid_mla", 0.02), ("wrong_lse_base", 20.0), ("sglang_fp8", 1.0)):
        change_pct = {} if change is None else around("perplexity_change_pct", change)
        record(impl, dict(task="prose", tokens=5000), perplexity=20.0, **change_pct)
        if impl == "sglang_fp8":  # not complete
            continue
        points = {} if change is None else around("dictionary_acc_diff_points", 0.0)
        record(impl, dict(task="dictionary", questions=500), dictionary_acc=0.99, **points)
        points = {} if change is None else around("lookup_acc_diff_points", -change)
        record(impl, dict(task="lookup", length=512, questions=200), lookup_acc=0.875, **points)
    headings, *rows = lines_of(spec, path)
    assert headings == [
        *("", "perplexity, 5,000 tokens", "change %", "dictionary %, 500 questions"),
        *("look-ups in 512 tokens %, 200 questions", "goals"),
    ]
    no_difference = "99.0, +0.00 (-0.05 to +0.05)"
    assert rows == [
        ["BF16", "20.000", "–", "99.0", "87.5", "–"],
        [
            *("prefix expanded in BF16", "20.000", "+0.02 (-0.03 to +0.07)", no_difference),
            *("87.5, -0.02 (-0.07 to +0.03)", "met"),
        ],
        [
            *("control: wrong base", "20.000", "+20.00 (+19.95 to +20.05)", no_difference),
            *("87.5, -20.00 (-20.05 to -19.95)", "missed"),
        ],
    ]


def test_goals_are_met_missed_or_open():
    def verdict(low: float, high: float) -> str:
        ends = dict(perplexity_change_pct=low, perplexity_change_pct_low=low, perplexity_change_pct_high=high)
        return goal_verdict([ends, dict(other=1)])

    assert verdict(-0.1, 0.1) == "met" and verdict(0.05, 0.15) == "open" and verdict(-0.2, 0.2) == "open"
    assert verdict(0.11, 0.2) == "missed" and verdict(-0.3, -0.2) == "missed"
    assert goal_verdict([dict(other=1)]) is None
    records = [dict(lookup_acc_diff_points=0.1, lookup_acc_diff_points_low=0.0, lookup_acc_diff_points_high=0.4)]
    assert goal_verdict(records, noise=True) == "met" and goal_verdict(records) == "open"
    records[0]["lookup_acc_diff_points_low"] = 0.01
    assert goal_verdict(records, noise=True) == "missed"


def test_intervals_in_cells():
    record = dict(x=-0.04, x_low=-0.3, x_high=0.26)
    assert CELLS.cell("{x:i1}", record) == "+0.0 (-0.3 to +0.3)" and CELLS.cell("{y:i1}", record) == "–"
    assert CELLS.cell("{x:i1}", dict.fromkeys(record, 0.0)) == "±0"


def test_a_table_goes_between_its_marks(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- planner -->\n<!-- end planner -->\nafter\n")
    assert not fill(path, {"planner": "table"}, write=True)
    assert path.read_text() == "before\n<!-- planner -->\ntable\n<!-- end planner -->\nafter\n"
    assert fill(path, {"planner": "table"}, write=False)
