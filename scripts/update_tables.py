"""Write the tables of measured figures into README.md and docs from benchmarks/results, so that none is ever typed.

python scripts/update_tables.py            # --check: only say whether they are up to date
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from accuracy_tables import accuracy_cache, accuracy_fp16, accuracy_model, accuracy_rescale
from performance_tables import ablation, attention, context, decode, expansion, planner, power, prefill, steps
from result_tables import REPOSITORY, RESULTS, latest, markdown

from sglang_mla_ext.results import read_records

RIVAL = "sglang_flashmla"
BF16, FP8_PREFIX, FP8 = "BF16", "BF16, prefix FP8", "FP8"  # what `storage` returns


def compared(path: Path, names: tuple[str, ...], headers: tuple[str, ...]) -> str:
    """A table of decode throughput, hybrid_mla's beside SGLang's own backend's.

    Both with a cache of the same dtype, and as many tokens of output; of several such numbers the one measured last.
    """
    found = [record for record in read_records(path) if record["decode_tok_s"] is not None]
    for record in found:
        record["case"]["storage"] = storage(record)
    records = latest(found, *names, "output", "storage")
    shown: dict[tuple[Any, ...], tuple[dict[str, Any], dict[str, Any]]] = {}
    for (impl, *case, output, stored), ours in records.items():
        stock = records.get((RIVAL, *case, output, FP8 if stored == FP8 else BF16))
        earlier = shown.get((*case, stored))
        if impl == "hybrid_mla" and stock is not None and (earlier is None or earlier[0]["date"] <= ours["date"]):
            shown[(*case, stored)] = ours, stock
    rows = []
    for case, (ours, stock) in sorted(shown.items()):
        rate, stock_rate = ours["decode_tok_s"], stock["decode_tok_s"]
        lengths = [ours["case"]["output"]] if "output" in ours["case"] else []
        rows.append((*case, *lengths, f"{rate:,.0f}", f"{stock_rate:,.0f}", f"{rate / stock_rate:.2f}x"))
    lengths = ["tokens of output"] if any("output" in ours["case"] for ours, _ in shown.values()) else []
    columns = (*headers, "cache", *lengths, "hybrid_mla tok/s", "flashmla tok/s", "ratio")
    return markdown(rows, columns, {(case, index): pair[index] for case, pair in shown.items() for index in range(2)})


def storage(record: dict[str, Any]) -> str:
    """How a server stored its latent cache, and expanded prefixes where these differ from it."""
    case = record["case"]
    if case.get("kv_cache_dtype") == "fp8_e4m3":
        return FP8
    asked = case.get("dtype") == "fp8" or "fp8_e4m3" in case.get("flags", "")
    return FP8_PREFIX if asked else BF16


def main(check: Annotated[bool, typer.Option("--check", help="Write nothing; exit status 1 if out of date.")] = False):
    """Fill the marked places."""
    engine = ("heads", "layers", "prompt", "concurrency"), ("heads", "layers", "prefix", "requests")
    serving = ("heads", "layers", "prompt", "concurrency"), ("heads", "layers", "prompt", "requests")
    tables = {
        "README.md": {
            "engine": compared(RESULTS / "engine.jsonl", *engine),
            "serving": compared(RESULTS / "serving.jsonl", *serving),
        },
        "docs/performance.md": {
            "attention": attention(RESULTS / "attention.jsonl"),
            "steps": steps(RESULTS / "attention.jsonl"),
            "decode": decode(RESULTS / "decode.jsonl"),
            "power": power(RESULTS / "power.jsonl"),
            "context": context(RESULTS / "context.jsonl"),
            "ablation": ablation(RESULTS / "ablation.jsonl"),
            "expansion": expansion(RESULTS / "expansion.jsonl"),
            "prefill": prefill(RESULTS / "prefill.jsonl"),
            "planner": planner(RESULTS / "planner.jsonl"),
        },
        "docs/accuracy.md": {
            "model": accuracy_model(RESULTS / "accuracy.jsonl"),
            "cache": accuracy_cache(RESULTS / "accuracy.jsonl"),
            "rescale": accuracy_rescale(RESULTS / "accuracy.jsonl"),
            "fp16": accuracy_fp16(RESULTS / "accuracy.jsonl"),
        },
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
