"""Tables of kernel times and of the planner's choices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from bench.planner_verdicts import LARGEST_LOSS, verdicts
from bench.records import read_records
from bench.tables import STORAGE_NAMES, latest, markdown
from sglang_mla_ext.prefix.planner.gpu_rates import rates_for

ATTENTION_CASE = {"heads": "heads", "batch": "requests", "prefix": "prefix", "tail": "tail", "spec": "groups"}
ATTENTION_TIMES = {  # column: impl, part, dtype
    "FlashMLA BF16 ms": ("flashmla_bf16", "all", "bf16"),
    "FlashMLA FP8 ms": ("flashmla_fp8", "all", "fp8"),
    "FA3 BF16 ms": ("fa3_bf16", "all", "bf16"),
    "FlashInfer BF16 ms": ("flashinfer_mla", "all", "bf16"),
    "TyphoonMLA parts ms": ("typhoon_parts", "all", "bf16"),
    "ours BF16 ms": ("hybrid_mla", "all", "bf16"),
    "ours FP8 ms": ("hybrid_mla", "all", "fp8"),
    "grouped absorb BF16 ms": ("hybrid_mla", "grouped_absorb", "bf16"),
    "BF16 shared part ms": ("hybrid_mla", "naive", "bf16"),
    "FP8 shared part ms": ("hybrid_mla", "naive", "fp8"),
}
STOCK = ("FlashMLA BF16 ms", "FA3 BF16 ms", "FlashInfer BF16 ms")
"""What SGLang's backends take over a BF16 cache."""
DEFAULT = "FA3 BF16 ms"
"""What SGLang takes of them on Hopper where nothing is said: without it nothing is compared with the fastest."""
ATTENTION_GAINS = {"fastest stock / ours BF16": "ours BF16 ms", "fastest stock / ours FP8": "ours FP8 ms"}
ATTENTION_FLOORS = {"FP8 shared part ms": "of its floor"}
DECODE_TIMES = {  # impl: column
    "flashmla_bf16": "FlashMLA BF16 ms",
    "flashmla_fp8": "FlashMLA FP8 ms",
    "fa3_bf16": DEFAULT,
    "hybrid_mla": "ours ms",
}


def attention(path: Path) -> str:
    """A table of the kernels' times over shared prefixes, rivals first. Columns without any figure are left out, and so
    is FlashInfer's where FA3 was not measured."""
    records = read_records(path)
    records = [record for record in records if "tail" in record["case"]] or records  # the older ones lack the tails
    found = {
        column: latest(
            (record for record in records if (record["impl"], record["part"], record["case"]["dtype"]) == what),
            *ATTENTION_CASE,
        )
        for column, what in ATTENTION_TIMES.items()
    }
    if not found[DEFAULT]:
        found["FlashInfer BF16 ms"] = {}
    shown = {(column, *case): record for column, of in found.items() for (_, *case), record in of.items()}
    rows = []
    for case in sorted({tuple(case) for _, *case in shown}, key=lambda case: [(v is not None, v) for v in case]):
        measured = {column: shown.get((column, *case)) for column in ATTENTION_TIMES}
        ms = {column: record["ms"] for column, record in measured.items() if record}
        times = (f"{ms[column]:.3f}" if column in ms else None for column in ATTENTION_TIMES)
        gains = (gain(ms, ours) for ours in ATTENTION_GAINS.values())
        floors = [shown.get((column, *case), {}).get("floor_share") for column in ATTENTION_FLOORS]
        rows.append((*case, *times, *gains, *(share and f"{share:.0%}" for share in floors)))
    columns = (*ATTENTION_CASE.values(), *ATTENTION_TIMES, *ATTENTION_GAINS, *ATTENTION_FLOORS.values())
    kept = [index for index in range(len(columns)) if any(row[index] is not None for row in rows)]
    cells = [tuple("–" if row[index] is None else row[index] for index in kept) for row in rows]
    return markdown(cells, tuple(columns[index] for index in kept), shown)


def gain(ms: Mapping[str, float], ours: str) -> str | None:
    """How many times as long the fastest of `STOCK` takes as ours; None where `DEFAULT` or ours was not measured.

    Args:
        ms: of each column that has a figure; ours: a column.
    """
    if DEFAULT not in ms or ours not in ms:
        return None
    return f"{min(ms[column] for column in STOCK if column in ms) / ms[ours]:.2f}x"


def decode(path: Path) -> str:
    """A table of decode over private tokens: ours over FP8 rows beside what SGLang has."""
    records = latest(read_records(path), "batch", "tail", "longest", "heads", "s_q")
    shown = {key: record for key, record in records.items() if key[0] in DECODE_TIMES}
    with_default = any(DECODE_TIMES[impl] == DEFAULT for impl, *_ in shown)
    times = {impl: column for impl, column in DECODE_TIMES.items() if with_default or column != DEFAULT}
    rows = []
    for case in {key[1:] for key in records}:
        found = {impl: records.get((impl, *case)) for impl in times}
        own, stock = found["hybrid_mla"], found["flashmla_bf16"]
        if own is None or stock is None:
            continue
        batch, tokens, longest, heads, query_tokens = case
        cells = ("–" if record is None else f"{record['ms']:.3f}" for record in found.values())
        ms = {times[impl]: record["ms"] for impl, record in found.items() if record}
        ratio = gain(ms, times["hybrid_mla"]) or "–" if with_default else f"{stock['ms'] / own['ms']:.2f}x"
        lengths = f"{tokens:,} to {longest:,}" if longest else f"{tokens:,}"
        rows.append((heads, batch, query_tokens, lengths, *cells, ratio, f"{own['floor_share']:.0%}"))
    cases = ("heads", "requests", "query tokens", "tokens")
    against = "fastest BF16 stock" if with_default else "FlashMLA BF16"
    columns = (*cases, *times.values(), f"{against} / ours", "of its floor")
    return markdown(sorted(rows, key=lambda row: (-row[0], row[2], -row[1], row[3])), columns, shown)


def planner(path: Path) -> str:
    """A table of how often the choice with the shipped rates is the fastest mode or nearly, and of the worst choice."""
    records = latest(read_records(path), "heads", "dtype", "prefix", "tail", "batch")
    found = []
    for gpu in dict.fromkeys(record["gpu"] for record in records.values()):
        found += verdicts((record for record in records.values() if record["gpu"] == gpu), rates_for(gpu))
    rows = []
    for heads, dtype in sorted({(verdict.heads, verdict.dtype) for verdict in found}):
        of_row = [verdict for verdict in found if (verdict.heads, verdict.dtype) == (heads, dtype)]
        within = sum(verdict.loss <= LARGEST_LOSS for verdict in of_row)
        worst = max(of_row, key=lambda verdict: verdict.loss)
        where = f"{worst.prefix:,} tokens, {worst.batch} requests" if worst.loss else "–"
        rows.append((heads, STORAGE_NAMES[dtype], len(of_row), within, f"{worst.loss:.1%}", where))
    columns = ("heads", "prefix in", "cases", f"within {LARGEST_LOSS:.0%}", "worst loss", "where")
    return markdown(rows, columns, records)
