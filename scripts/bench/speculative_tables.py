"""The table of speculative decoding; update_tables.py writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.records import read_records
from bench.tables import latest, markdown

STORED = {"bf16": "BF16", "fp8": "BF16, prefix FP8", "fp8_cache": "FP8"}
CASE = ("heads", "layers", "prefix", "batch", "draft_tokens")


def speculative(path: Path) -> str:
    """Each case of hybrid_mla beside flashmla's with the same draft, where both were measured."""
    records = latest(read_records(path), *CASE, "dtype")
    rows, shown = [], {}
    for key, ours in sorted(records.items(), key=lambda item: item[0][1:]):
        stock_dtype = "fp8_cache" if key[-1] == "fp8_cache" else "bf16"
        stock_key = ("sglang_flashmla", *key[1:-1], stock_dtype)
        if key[0] != "hybrid_mla" or stock_key not in records:
            continue
        stock = records[stock_key]
        shown |= {key: ours, stock_key: stock}
        heads, layers, prefix, batch, tokens = key[1:-1]
        case = f"{heads} x {layers}", f"{prefix:,}", batch, tokens, STORED[key[-1]]
        rows.append((*case, *(_beside(ours, stock, name) for name in ("verify_ms", "step_ms")), _tokens(ours, stock)))
    columns = (
        *("heads x layers", "shared tokens", "requests", "tokens a request", "cache"),
        *("verify ms: hybrid_mla / flashmla", "whole step ms", "accepted tok/s"),
    )
    return markdown(rows, columns, shown)


def _beside(ours: dict[str, Any], stock: dict[str, Any], name: str) -> str:
    return f"{ours[name]:.2f} / {stock[name]:.2f} ({stock[name] / ours[name]:.2f}x)"


def _tokens(ours: dict[str, Any], stock: dict[str, Any]) -> str:
    return f"{ours['accepted_tok_s']:,.0f} / {stock['accepted_tok_s']:,.0f}"
