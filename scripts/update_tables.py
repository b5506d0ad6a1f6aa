"""Write the tables of measured figures into README.md and docs from benchmarks/results, so that none is ever typed.

python scripts/update_tables.py            # --check: only say whether they are up to date
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from tabulate import tabulate

from sglang_mla_ext.results import read_records

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
RIVAL = "sglang_flashmla"
PARTS = ("naive", "merge", "empty_plan")


def latest(records: Iterable[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The newest record for each `(impl, case[name], ...)`."""
    return {
        (record["impl"], *(record["case"].get(name) for name in names)): record
        for record in sorted(records, key=lambda record: record["date"])
    }


def compared(path: Path, names: tuple[str, ...], headers: tuple[str, ...]) -> str:
    """A table of hybrid_mla beside SGLang's own backend: decode throughput and time to first token."""
    records = latest(read_records(path), *names)
    rows = []
    for (impl, *case), ours in records.items():
        stock = records.get((RIVAL, *case))
        if impl != "hybrid_mla" or stock is None or ours["decode_tok_s"] is None:
            continue
        rate, stock_rate = ours["decode_tok_s"], stock["decode_tok_s"]
        times = f"{ours['ttft_ms']:,.0f} / {stock['ttft_ms']:,.0f}"
        rows.append((*case, f"{rate:,.0f}", f"{stock_rate:,.0f}", f"{rate / stock_rate:.2f}x", times))
    columns = (*headers, "hybrid_mla tok/s", "flashmla tok/s", "ratio", "first token ms, ours / stock")
    return markdown(sorted(rows, key=lambda row: row[: len(headers)]), columns, records)


def attention(path: Path) -> str:
    """A table of the kernels' times over the shared prefix."""
    records = read_records(path)
    parts = {part: latest((r for r in records if r["part"] == part), "heads", "batch", "prefix") for part in PARTS}
    rows = []
    for (impl, heads, batch, prefix), naive in sorted(parts["naive"].items(), key=lambda item: item[0][1:]):
        merge_us = parts["merge"][impl, heads, batch, prefix]["ms"] * 1e3
        empty_us = parts["empty_plan"][impl, heads, batch, None]["ms"] * 1e3
        rates = f"{naive['tflops']:.0f}", f"{naive['gbps']:,.0f}"
        rows.append((heads, batch, prefix, f"{naive['ms']:.3f}", *rates, f"{merge_us:.1f}", f"{empty_us:.1f}"))
    columns = ("heads", "requests", "prefix", "naive ms", "TFLOPS", "GB/s", "merge us", "empty plan us")
    return markdown(rows, columns, parts["naive"])


def markdown(rows: list[tuple[Any, ...]], columns: tuple[str, ...], records: dict[tuple[Any, ...], Any]) -> str:
    """A table, and below it where its figures come from."""
    align = ("right",) * len(columns)
    table = tabulate(rows, columns, tablefmt="github", colalign=align, disable_numparse=True)
    return f"{table}\n\n{provenance(records)}"


def provenance(records: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    """Where the figures come from: GPU, versions, commits, dates, commands."""
    lines = []
    for command in dict.fromkeys(record["command"] for record in records.values()):
        first = next(record for record in records.values() if record["command"] == command)
        where = f"{first['gpu']}, torch {first['torch']}, sglang {first['sglang']}"
        lines.append(f"{where}, commit {first['commit']}, {first['date'][:10]}: `{command}`")
    return "\n\n".join(lines)


def main(check: Annotated[bool, typer.Option("--check", help="Write nothing; exit status 1 if out of date.")] = False):
    """Fill the marked places."""
    engine = ("heads", "layers", "tp", "prompt"), ("heads", "layers", "TP", "prefix")
    serving = ("heads", "layers", "prompt"), ("heads", "layers", "prompt")
    tables = {
        "README.md": {
            "engine": compared(RESULTS / "engine.jsonl", *engine),
            "serving": compared(RESULTS / "serving.jsonl", *serving),
        },
        "docs/performance.md": {"attention": attention(RESULTS / "attention.jsonl")},
    }
    stale = [name for name, of_file in tables.items() if not fill(REPOSITORY / name, of_file, write=not check)]
    if check and stale:
        print("out of date:", *stale)
        raise typer.Exit(1)


def fill(path: Path, tables: dict[str, str], *, write: bool) -> bool:
    """Put tables between their marks, `<!-- NAME -->` and `<!-- end NAME -->`.

    Returns:
        whether the file had them already.
    """
    text = before = path.read_text(encoding="utf-8")
    for name, table in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)"
        text, count = re.subn(
            pattern, lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text, flags=re.DOTALL
        )
        if count != 1:
            raise typer.BadParameter(f"{path} has {count} places for the table {name!r}")
    if write:
        path.write_text(text, encoding="utf-8")
    return text == before


if __name__ == "__main__":
    typer.run(main)
