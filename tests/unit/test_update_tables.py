"""Tables of records: what is in their rows, and where they go.

`test_the_pages_have_the_tables_of_the_records` holds all of them to what is published; the others are of records that
there are not, or of rules that a reader would not see.
"""

from __future__ import annotations

import json

import pytest
from bench.rank_predictions import tokens_per_s
from bench.rank_tables import one_rank, one_rank_headline
from bench.records import read_records, write_record
from bench.serving_tables import pairs, rates, template
from bench.tables import Spec, provenance, table_of
from lab.accuracy.tables import accuracy_model, goal_verdict, interval
from update_tables import fill, main


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_records_beside_each_other(tmp_path):
    """The newest of each, in the order that is asked for; a dash for one that there is not."""
    path = tmp_path / "records.jsonl"
    spec = Spec(
        by=("heads", "dtype", "tokens"),
        beside={"ours": ("hybrid_mla",), "torch": ("torch",)},
        optional=("torch",),
        order=("heads", "dtype"),
        headings="heads | dtype | tokens | ms | torch ms | gain | TFLOPS | share",
        cells="{heads} | {dtype} | {tokens:,} | {ms:.3f} | {torch[ms]:.3f} | {torch[ms]/ms:.2f}x | {tflops:.0f}"
        "| {gemm_share:.0%}",
    )
    for impl, dtype, ms in (("torch", "bf16", 3.0), ("hybrid_mla", "bf16", 9.0), ("hybrid_mla", "bf16", 1.0)):
        metrics = dict(ms=ms, tflops=600.0, gemm_tflops=800.0, gemm_share=0.75)
        case = dict(tokens=4096, heads=128, dtype=dtype)
        write_record(path, bench="expansion", impl=impl, case=case, gpu="GPU", command="run it", **metrics)
    case = dict(tokens=4096, heads=16, dtype="fp8")
    write_record(path, bench="expansion", impl="hybrid_mla", case=case, gpu="GPU", command="run it", **metrics)
    lines = table_of(spec, path).splitlines()
    assert [cells(line) for line in lines[2:4]] == [
        ["16", "fp8", "4,096", "1.000", "–", "–", "600", "75%"],
        ["128", "bf16", "4,096", "1.000", "3.000", "3.00x", "600", "75%"],
    ]
    assert lines[-1].startswith("GPU, torch") and table_of(spec, tmp_path / "none") == ""


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
        case = dict(rank="tp8", layers=36, prefix=7069, concurrency=128) | more
        # A rate of 128 requests by the median time between two tokens; while they decode it is less in the mean.
        of_decode = dict(steady_tok_s=None, decode_tok_s=rate * 0.9, decode_itl_ms=128e3 / rate)
        rates = of_decode if bench == "decode" else dict(steady_tok_s=rate)
        metrics = dict(ttft_ms=rate, ttft_p99_ms=1234.4, itl_p99_ms=40.2) | (dict(excluded="why") if excluded else {})
        command = f"run --backend {impl} --out /somewhere/rank.jsonl --log-folder /elsewhere --seed 0"
        record = write_record(path, bench=bench, impl=impl, case=case, gpu=gpu, command=command, **rates, **metrics)
        written[bench, impl, case["rank"], case["layers"], case["concurrency"], case.get("of")] = record
    lines = one_rank(path).splitlines()
    rank = ("tp8", "36", "H200", "7,069", "128")
    load, decode = (("short", *rank), ("decode, DeepGEMM", *rank))
    dp8 = ("short", "dp8", "60", *rank[2:])
    assert [cells(line) for line in lines if line.startswith("|")][2:] == [
        [*decode, "flashmla, FP8 cache", "1", "40", "1.00x", "40 / 1,234", "40"],
        [*decode, "hybrid_mla, FP8 cache", "1", "80", "2.00x", "80 / 1,234", "40"],
        ["decode, DeepGEMM", "tp8", "61", *rank[2:], "fa3", "1", "30", "1.00x", "30 / 1,234", "40"],
        ["decode, DeepGEMM", "tp8", "61", *rank[2:], "hybrid_mla", "1", "90", "3.00x", "90 / 1,234", "40"],
        [*dp8, "fa3, pages of 64", "1", "60", "1.00x", "60 / 1,234", "40"],
        [*dp8, "hybrid_mla, FP8 prefix, 14 GiB", "1", "150", "2.50x", "150 / 1,234", "40"],
        [*load, "flashmla", "2", "200", "1.00x", "200 / 1,234", "40"],
        [*load, "hybrid_mla", "3", "500", "2.50x", "500 / 1,234", "40"],
        [*load, "hybrid_mla, 9 GiB, nothing rides", "1", "150", "0.75x", "150 / 1,234", "40"],
        ["short", "tp8", "61", "H200", "7,069", "64", "fa3", "1", "70", "1.00x", "70 / 1,234", "40"],
        ["short", "tp8", "61", "H200", "7,069", "64", "hybrid_mla", "1", "70", "1.00x", "70 / 1,234", "40"],
        ["short", "tp8", "61", "H200", "7,069", "128", "fa3", "1", "75", "1.00x", "75 / 1,234", "40"],
        ["short", "tp8", "61", "H200", "7,069", "128", "hybrid_mla", "1", "150", "2.00x", "150 / 1,234", "40"],
    ]
    headline = one_rank_headline(path).splitlines()
    said = [tokens_per_s(written["short", impl, "tp8", 61, 128, None]) for impl in ("hybrid_mla", "sglang_fa3")]
    rows = [cells(line) for line in headline if line.startswith("|")][2:]
    case = "short answers", "7,069", "128"
    assert rows[0] == [
        *("DeepSeek-V3, TP 8", *case, "150", "75 (fa3)", "2.00x"),
        "{:,.0f} / {:,.0f}, {:.2f}x".format(*said, said[0] / said[1]),
        *("150 / 75", "40 / 40"),
    ]
    rival = "60 (fa3, pages of 64)"
    assert rows[1][:7] == ["DeepSeek-V3, DP 8, 60 layers", *case, "150 (FP8 prefix, 14 GiB)", rival, "2.50x"]
    assert len(rows) == 2 and headline[-1].startswith(f"{h200}, torch")


def test_where_figures_come_from():
    common = dict(gpu="GPU", torch="2", sglang=None, commit="abcdefgh", date="2026-01-02T00:00:00+00:00")
    assert provenance({(n,): common for n in range(3)}) == "GPU, torch 2, commit abcdefg, 2026-01-02"


def test_compared(tmp_path):
    """Like is compared with like: the same dtype of the cache and the same output; the newest output is shown."""
    path = tmp_path / "serving.jsonl"
    fp8 = dict(kv_cache_dtype="fp8_e4m3")
    for impl, output, rate, more in (
        ("sglang_flashmla", 256, 10.0, {}),
        ("hybrid_mla", 256, 11.0, {}),
        ("sglang_flashmla", 768, 10.0, {}),
        ("hybrid_mla", 768, 20.0, {}),
        ("hybrid_mla", 768, 25.0, dict(flags="--hybrid-mla-prefix-dtype fp8_e4m3")),
        ("hybrid_mla", 1024, 90.0, {}),  # nothing to compare it with
        ("sglang_flashmla", 768, 15.0, fp8),
        ("hybrid_mla", 768, 30.0, fp8),
    ):
        case = dict(prompt="A", concurrency=128, output=output, **more)
        write_record(path, bench="serving", impl=impl, case=case, decode_tok_s=rate, gpu="GPU", command="run it")
    found = pairs(read_records(path), ("prompt", "concurrency"))
    assert {case: rates(*pair) for case, pair in found.items()} == {
        ("A", 128, "BF16"): ("20", "10", "2.00x"),
        ("A", 128, "BF16, prefix FP8"): ("25", "10", "2.50x"),
        ("A", 128, "FP8"): ("30", "15", "2.00x"),
    }


def test_what_is_excluded_is_in_no_table_until_it_is_measured_again(tmp_path):
    path = tmp_path / "serving.jsonl"

    def record(impl: str, rate: float) -> dict:
        case = dict(prompt="A", concurrency=128, output=768)
        return write_record(path, bench="serving", impl=impl, case=case, decode_tok_s=rate, gpu="GPU", command="run it")

    def rows() -> list[tuple[str, str, str]]:
        return [rates(*pair) for pair in pairs(read_records(path), ("prompt", "concurrency")).values()]

    record("sglang_flashmla", 10.0)
    ours = record("hybrid_mla", 20.0)
    assert len(rows()) == 1
    path.write_text(path.read_text().replace(json.dumps(ours), json.dumps(ours | {"excluded": "disturbed"})))
    assert rows() == []
    record("hybrid_mla", 30.0)
    assert rows() == [("30", "10", "3.00x")]


def test_a_template_has_capitals_where_commands_differ():
    found = template(["python a.py --p A --p B --server-arg '--x y'", "python a.py --p B --server-arg '--x y' --n-x 3"])
    assert found == "python a.py --p P --server-arg '--x y' --n-x N_X"
    assert template(["python a.py --p A --p B"] * 2) == "python a.py --p A --p B"
    for other in ("python b.py --p A", "python a.py A", "python a.py --flag --p A"):
        with pytest.raises(ValueError, match="with options that take a value"):
            template(["python a.py --p A", other])


def test_the_pages_have_the_tables_of_the_records():
    main(check=True)


def test_accuracy_of_a_model(tmp_path):
    path = tmp_path / "accuracy.jsonl"

    def record(impl: str, case: dict, **metrics: float) -> None:
        case = dict(study="demo", **case)
        write_record(path, bench="accuracy", impl=impl, case=case, gpu="cpu", command="run it", **metrics)

    def around(name: str, value: float) -> dict:
        return {name: value, f"{name}_low": value - 0.05, f"{name}_high": value + 0.05}

    for impl, change in (("sglang_bf16", None), ("hybrid_mla", 0.02), ("wrong_lse_base", 20.0), ("sglang_fp8", 1.0)):
        change_pct = {} if change is None else around("perplexity_change_pct", change)
        record(impl, dict(task="prose", tokens=5000), perplexity=20.0, **change_pct)
        if impl == "sglang_fp8":  # not complete
            continue
        points = {} if change is None else around("dictionary_acc_diff_points", 0.0)
        record(impl, dict(task="dictionary", questions=500), dictionary_acc=0.99, **points)
        points = {} if change is None else around("lookup_acc_diff_points", -change)
        record(impl, dict(task="lookup", length=512, questions=200), lookup_acc=0.875, **points)
    lines = accuracy_model(path).splitlines()
    assert cells(lines[0]) == [
        *("", "perplexity, 5,000 tokens", "change %", "dictionary %, 500 questions"),
        *("look-ups in 512 tokens %, 200 questions", "goals"),
    ]
    no_difference = "99.0, +0.00 (-0.05 to +0.05)"
    assert [cells(line) for line in lines[2:5]] == [
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
    assert goal_verdict([dict(other=1)]) == "–"
    records = [dict(lookup_acc_diff_points=0.1, lookup_acc_diff_points_low=0.0, lookup_acc_diff_points_high=0.4)]
    assert goal_verdict(records, noise=True) == "met" and goal_verdict(records) == "open"
    records[0]["lookup_acc_diff_points_low"] = 0.01
    assert goal_verdict(records, noise=True) == "missed"


def test_intervals_in_cells():
    record = dict(x=-0.04, x_low=-0.3, x_high=0.26)
    assert interval(record, "x", 1) == "+0.0 (-0.3 to +0.3)" and interval(record, "y", 1) == "–"
    assert interval(dict.fromkeys(record, 0.0), "x", 1) == "±0"


def test_a_table_goes_between_its_marks(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- planner -->\n<!-- end planner -->\nafter\n")
    assert not fill(path, {"planner": "table"}, write=True)
    assert path.read_text() == "before\n<!-- planner -->\ntable\n<!-- end planner -->\nafter\n"
    assert fill(path, {"planner": "table"}, write=False)
