"""Write the tables of measured figures into README.md from benchmarks/results, so that none is ever typed.

python scripts/update_readme.py            # --check: only say whether README.md is up to date
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
    rows.sort(key=lambda row: [str(value) for value in row])
    return tabulate(rows, columns, tablefmt="github", colalign=("right",) * len(columns)) + "\n\n" + provenance(records)


def attention(path: Path) -> str:
    """A table of the kernel's times over the shared prefix."""
    records = latest((r for r in read_records(path) if r["part"] == "naive"), "heads", "prefix", "batch")
    rows = [
        (heads, prefix, batch, f"{r['ms']:.3f}", f"{r['tflops']:.0f}", f"{r['gbps']:,.0f}")
        for (_, heads, prefix, batch), r in sorted(records.items(), key=lambda item: item[0][1:])
    ]
    columns = ("heads", "prefix", "requests", "ms", "TFLOPS", "GB/s")
    return tabulate(rows, columns, tablefmt="github", colalign=("right",) * 6) + "\n\n" + provenance(records)


def provenance(records: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    """Where the figures come from: GPU, versions, commits, dates, commands."""
    lines = []
    for command in dict.fromkeys(record["command"] for record in records.values()):
        first = next(record for record in records.values() if record["command"] == command)
        where = f"{first['gpu']}, torch {first['torch']}, sglang {first['sglang']}"
        lines.append(f"{where}, commit {first['commit']}, {first['date'][:10]}: `{command}`")
    return "\n\n".join(lines)


def main(check: Annotated[bool, typer.Option("--check", help="Write nothing; exit status 1 if out of date.")] = False):
    """Fill the marked parts of README.md."""
    tables = {
        "engine": compared(
            RESULTS / "engine.jsonl", ("heads", "layers", "tp", "prompt"), ("heads", "layers", "TP", "prefix")
        ),
        "serving": compared(RESULTS / "serving.jsonl", ("heads", "layers", "prompt"), ("heads", "layers", "prompt")),
        "attention": attention(RESULTS / "attention.jsonl"),
    }
    readme = REPOSITORY / "README.md"
    text = before = readme.read_text(encoding="utf-8")
    for name, table in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(\n<!-- end {name} -->)"
        text, count = re.subn(pattern, lambda match, table=table: match[1] + table + match[2], text, flags=re.DOTALL)
        if count != 1:
            raise typer.BadParameter(f"README.md has {count} places for the table {name!r}")
    if not check:
        readme.write_text(text, encoding="utf-8")
    elif text != before:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
