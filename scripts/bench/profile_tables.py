"""The table of where the GPU's time goes, from records of `bench_serving.py --profile`."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from bench.records import read_records
from bench.tables import latest, markdown
from bench.workload_tables import backend_name, model_name

KINDS = {
    "shared, naive": r"naive_prefix",
    "latent": r"splitkv_mla|mla_combine|absorb|BatchMLA|mla_metadata|schedule_tails|fill_page_table",
    "merge, join": r"^merge_kernel|join_parts|merge_attn_states",
    "prefill": r"PrefillWithKVCache|concat_mla_k",
    "expansion": r"expand_prefix",
    "dense": r"nvjet|gemm|cublas|splitKreduce",
}
"""What a kernel is for, by its name, the first that matches; the others are `other`."""


def kind_of(kernel: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), "other")


def profiles(path: Path) -> str:
    """ms of the GPU by what it did, over all forward passes that were watched."""
    records = latest(read_records(path), "heads", "prefix", "prompt", "flags")
    rows = []
    for record in sorted(records.values(), key=lambda record: (record["workload"], -record["case"]["heads"])):
        time_ms: Counter[str] = Counter()
        for kernel, (ms, _) in record["kernels"].items():
            time_ms[kind_of(kernel)] += ms
        of_kinds = (f"{time_ms[kind]:.1f}" if time_ms[kind] >= 0.05 else "-" for kind in (*KINDS, "other"))
        workload = " ".join(filter(None, (record["workload"], record["case"].get("prompt"))))
        waits = f"{record['span_ms'] - record['busy_ms']:.1f}"
        what = (workload, model_name(record), backend_name(record), record["steps"])
        rows.append((*what, f"{record['span_ms']:.1f}", waits, *of_kinds))
    columns = ("workload", "heads x layers", "backend", "passes", "ms in all", "GPU waits", *KINDS, "other")
    return markdown(rows, columns, records)
