"""Tables of decode throughput in servers and engines, beside SGLang's own backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.records import read_records
from bench.tables import latest, markdown

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
