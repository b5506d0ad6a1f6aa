"""Tables of whole workloads; update_tables.py writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.records import read_records
from bench.tables import NOT_MEASURED, latest, markdown

MODELS = {128: "DeepSeek-V3", 64: "Kimi-K2"}
"""By heads."""


def workloads(paths: Sequence[Path]) -> str:
    """What clients saw of each workload: the last run on each server, beside flashmla's."""
    rows, shown = [], {}
    for path in paths:
        records = latest(read_records(path), "heads", "prefix", "flags", "version")
        for heads, prefix in sorted({key[1:3] for key in records}, reverse=True):
            of_case = {backend_name(record): record for key, record in records.items() if key[1:3] == (heads, prefix)}
            for name in sorted(of_case):
                record = of_case[name]
                case = f"{path.stem}, {prefix:,} tokens", model_name(record)
                rows.append((*case, *_row(name, record, of_case.get("flashmla"))))
                shown[path, heads, prefix, name] = record
    columns = (
        *("workload, longest prompt", "heads x layers", "backend", "output tok/s", "while others wait", "step ms"),
        "first token ms, p50 / p99",
        *("between tokens ms, p50 / p99", "planning ms a pass"),
    )
    return markdown(rows, columns, shown)


def figure_cells(paths: Sequence[Path]) -> str:
    """Servers on cells of TyphoonMLA's figure 3: tokens a second while requests wait, the last run on each server."""
    found = {
        key: record
        for path in paths
        if path.exists()
        for key, record in latest(read_records(path), "heads", "prompt", "flags").items()
    }
    if not found:
        return NOT_MEASURED
    by_cell: dict[tuple[int, str], dict[str, dict[str, Any]]] = {}
    for (_, heads, cell, _), record in found.items():
        by_cell.setdefault((heads, cell), {})[backend_name(record)] = record
    rows = []
    for (heads, cell), of_cell in sorted(by_cell.items(), key=lambda item: -item[0][0]):
        base = of_cell.get("flashmla", {}).get("steady_tok_s")
        for name, record in sorted(of_cell.items()):
            rate = record["steady_tok_s"]
            ratio = f"{rate / base:.2f}x" if rate and base else "–"
            whole = f"{record['output_tok_s']:,.0f}"
            rows.append((MODELS[heads], *cell.split(", "), name, f"{rate:,.0f}" if rate else "–", ratio, whole))
    columns = ("model", "prompt", "dataset", "at a time", "backend", "tok/s while others wait", "ratio", "tok/s in all")
    return markdown(rows, columns, found)


def backend_name(record: dict[str, Any]) -> str:
    """Of a record's backend in tables; `version` in a case is of code that was replaced since."""
    if record["impl"] != "hybrid_mla":
        return str(record["impl"]).removeprefix("sglang_")
    case = record["case"]
    parts = ["hybrid_mla", *(["FP8 prefix"] if "fp8_e4m3" in case.get("flags", "") else []), case.get("version")]
    return ", ".join(filter(None, parts))


def model_name(record: dict[str, Any]) -> str:
    """Of a record's model in tables."""
    return f"{record['case']['heads']} x {record['case']['layers']}"


def _row(backend: str, record: dict[str, Any], stock: dict[str, Any] | None) -> tuple[str, ...]:
    def figure(name: str, digits: int, *, less_is_more: bool = False) -> str:
        if (value := record.get(name)) is None:
            return "-"
        text = f"{value:,.{digits}f}"
        if stock is None or stock is record or not stock.get(name):
            return text
        gain = stock[name] / value if less_is_more else value / stock[name]
        return f"{text} ({gain:.2f}x)"

    plan = record.get("plan_ms_per_step")
    return (
        backend,
        figure("output_tok_s", 0),
        figure("steady_tok_s", 0),
        figure("step_ms", 2, less_is_more=True),
        f"{record['ttft_ms']:,.0f} / {record['ttft_p99_ms']:,.0f}",
        f"{record['itl_ms']:.1f} / {record['itl_p99_ms']:,.0f}",
        "-" if plan is None else f"{plan:.2f}",
    )
