"""The table of servers with several ranks, beside SGLang's own backend; update_tables.py writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.records import read_records
from bench.serving_tables import RIVAL
from bench.tables import latest, markdown

ROUTED = "--hybrid-mla-dp-routing prefix"
COLUMNS = (
    *("ranks divide", "load", "requests", "dealt out", "hybrid_mla tok/s", "flashmla tok/s", "ratio"),
    *("hybrid_mla first token ms, median / last", "flashmla's"),
)


def ranks(path: Path) -> str:
    """Throughput by how ranks divide the work and by load, the last run on each server, beside flashmla's.

    Tokens per second while all requests decode; where requests wait for a place, while they do.
    """
    names = ("dp", "bench", "prompt", "concurrency", "routed")
    shown = latest((record | {"case": described(record)} for record in read_records(path)), *names)
    rows = []
    for (impl, dp, bench, prompt, requests, routed), ours in sorted(shown.items(), key=lambda item: item[0][1]):
        stock = shown.get((RIVAL, dp, bench, prompt, requests, False))
        if impl == RIVAL or stock is None:
            continue
        divided = f"requests, DP {dp}" if dp > 1 else f"heads, TP {ours['case']['tp']}"
        dealt = "by prefix" if routed else "by SGLang" if dp > 1 else "-"
        load = " ".join(filter(None, ("prompt" if bench == "serving" else bench, prompt)))
        rates = f"{rate(ours):,.0f}", f"{rate(stock):,.0f}", f"{rate(ours) / rate(stock):.2f}x"
        rows.append((divided, load, requests, dealt, *rates, first_token(ours), first_token(stock)))
    return markdown(rows, COLUMNS, shown)


def described(record: dict[str, Any]) -> dict[str, Any]:
    """A record's case with what tells rows apart."""
    case = record["case"]
    return case | {"dp": case.get("dp", 1), "bench": record["bench"], "routed": ROUTED in case.get("flags", "")}


def rate(record: dict[str, Any]) -> float:
    """Tokens per second, as `ranks` says."""
    found: float = record.get("steady_tok_s") or record["decode_tok_s"]
    return found


def first_token(record: dict[str, Any]) -> str:
    return f"{record['ttft_ms']:,.0f} / {record['ttft_last_ms']:,.0f}"
