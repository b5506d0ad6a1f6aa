"""Tables of records whose cases are not in the shipped results yet."""

from __future__ import annotations

from update_tables import expansion, fill, planner

from sglang_mla_ext.results import write_record


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_expansion(tmp_path):
    path = tmp_path / "expansion.jsonl"
    for impl, dtype, ms in (("torch", "bf16", 3.0), ("hybrid_mla", "bf16", 9.0), ("hybrid_mla", "bf16", 1.0)):
        metrics = dict(ms=ms, tflops=600.0, gemm_tflops=800.0, gemm_share=0.75)
        case = dict(tokens=4096, heads=128, dtype=dtype)
        write_record(path, bench="expansion", impl=impl, case=case, gpu="GPU", command="run it", **metrics)
    case = dict(tokens=4096, heads=16, dtype="fp8")
    write_record(path, bench="expansion", impl="hybrid_mla", case=case, gpu="GPU", command="run it", **metrics)
    lines = expansion(path).splitlines()
    assert [cells(line) for line in lines[2:4]] == [
        ["16", "FP8", "4,096", "1.000", "–", "–", "600", "75%"],
        ["128", "BF16", "4,096", "1.000", "3.000", "3.00x", "600", "75%"],
    ]
    assert lines[-1].endswith("`run it`")


def test_planner(tmp_path):
    path = tmp_path / "planner.jsonl"
    for heads, batch, loss in ((16, 2, 0.0), (16, 4, 0.05), (16, 8, 0.125), (128, 2, 0.9), (128, 2, 0.0)):
        case = dict(prefix=1024, tail=512, heads=heads, batch=batch, dtype="bf16")
        write_record(path, bench="planner", impl="hybrid_mla", case=case, gpu="GPU", command="run it", loss=loss)
    lines = planner(path).splitlines()
    assert cells(lines[0]) == ["heads", "prefix in", "cases", "within 5%", "worst loss", "where"]
    assert [cells(line) for line in lines[2:4]] == [
        ["16", "BF16", "3", "2", "12.5%", "1,024 tokens, 8 requests"],
        ["128", "BF16", "1", "1", "0.0%", "–"],
    ]


def test_a_table_goes_between_its_marks(tmp_path):
    path = tmp_path / "page.md"
    path.write_text("before\n<!-- planner -->\n<!-- end planner -->\nafter\n")
    assert not fill(path, {"planner": "table"}, write=True)
    assert path.read_text() == "before\n<!-- planner -->\ntable\n<!-- end planner -->\nafter\n"
    assert fill(path, {"planner": "table"}, write=False)
