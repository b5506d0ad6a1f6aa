"""Tables of servers with several ranks, and of one rank of a whole model, beside SGLang's own backend; update_tables.py
writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from demo_model.rank import LAYERS, MODELS

from bench.records import read_records
from bench.serving_tables import RIVAL
from bench.tables import latest, markdown
from bench.workload_tables import backend_name

ROUTED = "--hybrid-mla-dp-routing prefix"
COLUMNS = (
    *("ranks divide", "load", "requests", "dealt out", "hybrid_mla tok/s", "flashmla tok/s", "ratio"),
    *("hybrid_mla first token ms, median / last", "flashmla's"),
)
ONE_RANK_COLUMNS = (
    *("load", "rank", "layers", "prompt", "requests", "backend", "runs", "tok/s", "ratio"),
    *("first token ms, median / p99", "between tokens ms, p99"),
)
HEADLINE_COLUMNS = (
    *("load", "prompt", "requests", "hybrid_mla tok/s", "fastest of SGLang's tok/s", "ratio"),
    *("first token ms, median: ours / theirs", "between tokens ms, p99: ours / theirs"),
)
LOADS = {"decode": "all decode", "short": "short answers, others wait"}
STOCK_BACKENDS = ("fa3", "flashinfer", "flashmla")

Case = tuple[Any, ...]


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


def one_rank(path: Path) -> str:
    """A rank of a whole model: each backend by load, the medians over its runs, beside the fastest of SGLang's own."""
    found = runs(read_records(path))
    rows = []
    for (*case, backend), of_case in sorted(found.items()):
        stock = fastest_stock(found, tuple(case), backend)
        ratio = f"{middle(of_case) / middle(found[stock]):.2f}x" if stock else "–"
        load, rank, layers, prompt, requests, _ = case
        first = f"{middle(of_case, 'ttft_ms'):,.0f} / {middle(of_case, 'ttft_p99_ms'):,.0f}"
        between = f"{middle(of_case, 'itl_p99_ms'):,.0f}"
        measured = (len(of_case), f"{middle(of_case):,.0f}", ratio, first, between)
        rows.append((load, rank, layers, f"{prompt:,}", requests, backend, *measured))
    return markdown(rows, ONE_RANK_COLUMNS, numbered(found))


def one_rank_headline(path: Path) -> str:
    """The rows of the README: a tensor-parallel rank with all its layers, our backend as it comes beside the fastest of
    SGLang's own, where that was measured."""
    found = runs(read_records(path))
    rows, shown = [], {}
    for (*case, backend), ours in sorted(found.items()):
        stock = fastest_stock(found, tuple(case), backend)
        load, rank, layers, prompt, requests, _ = case
        if (backend, rank, layers) != ("hybrid_mla", "tp8", LAYERS) or load not in LOADS or stock is None:
            continue
        theirs = found[stock]
        rates = f"{middle(ours):,.0f}", f"{middle(theirs):,.0f} ({stock[-1]})", f"{middle(ours) / middle(theirs):.2f}x"
        first = (f"{middle(each, 'ttft_ms'):,.0f}" for each in (ours, theirs))
        between = (f"{middle(each, 'itl_p99_ms'):,.0f}" for each in (ours, theirs))
        rows.append((LOADS[load], f"{prompt:,}", requests, *rates, " / ".join(first), " / ".join(between)))
        shown |= {(*case, "ours"): ours, (*case, "stock"): theirs}
    return markdown(rows, HEADLINE_COLUMNS, numbered(shown))


def runs(records: Iterable[dict[str, Any]]) -> dict[Case, list[dict[str, Any]]]:
    """`(load, rank, layers, prompt, requests, GPU, backend)` -> its records, without those that are `excluded`. Their
    commands name no folder of the machine that they ran on."""
    found: dict[Case, list[dict[str, Any]]] = {}
    for record in records:
        if record.get("excluded"):
            continue
        case = record["case"]
        load = record["bench"] + (", DeepGEMM" if case.get("deep_gemm") else "")
        of = "" if case.get("of", MODELS[0]) == MODELS[0] else f" of {case['of']}"
        of_model = load, (case.get("rank") or "-") + of, case["layers"]
        key = (*of_model, case["prefix"], case["concurrency"], record["gpu"], served_by(record))
        command = re.sub(r"--out \S*/", "--out benchmarks/results/", record["command"])
        command = re.sub(r" --log-folder \S+", "", command)
        found.setdefault(key, []).append(record | {"command": command})
    return found


def served_by(record: dict[str, Any]) -> str:
    """A backend's name in tables of one rank."""
    case = record["case"]
    in_turns = "--hybrid-mla-mixed-tokens 0" in case.get("flags", "")
    of_cache = ", FP8 cache" if case.get("kv_cache_dtype") == "fp8_e4m3" else ""
    return backend_name(record) + (", nothing rides" if in_turns else "") + of_cache


def fastest_stock(found: dict[Case, list[dict[str, Any]]], case: Case, backend: str) -> Case | None:
    """Key of what a backend of these tables is compared with: the fastest of SGLang's own over the same cache."""
    of_cache = ", FP8 cache" if backend.endswith(", FP8 cache") else ""
    own = (key for key in found if key[:-1] == case and key[-1] in {name + of_cache for name in STOCK_BACKENDS})
    return max(own, key=lambda key: middle(found[key]), default=None)


def middle(records: Iterable[dict[str, Any]], name: str | None = None) -> float:
    """The median of a figure, by default of tokens per second."""
    return median(record[name] if name else rate(record) for record in records)


def numbered(found: dict[Case, list[dict[str, Any]]]) -> dict[Case, dict[str, Any]]:
    """All records behind a table, the earliest of each command first."""
    every = sorted((each for of_case in found.values() for each in of_case), key=lambda record: record["date"])
    return {(number,): record for number, record in enumerate(every)}
