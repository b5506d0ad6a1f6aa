"""Run a workload on a server: what is measured, its record, and the table of several."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import requests

from bench.client import (
    HYBRID,
    describe_sharing,
    full_batch,
    plan_ms_between,
    run_client,
    sharing_between,
    steady_rate,
)
from bench.profile import Profile
from bench.records import write_record
from bench.server import server_info
from bench.tables import table
from bench.workloads import Workload
from sglang_mla_ext.prefix.planner.model_dims import ModelDims


@dataclass(frozen=True)
class Timings:
    """One run of a workload.

    Attributes:
        duration_s: from the first request to the last answer.
        output_tok_s: tokens of all answers by that time.
        decode_tok_s: tokens per second while every request decodes; None if that never lasted, or was never meant to.
        steady_tok_s: tokens per second while requests wait for a place; None where none does, or has several turns.
        ttft_ms, ttft_p99_ms, ttft_last_ms: time to the first token: the median, the 99th percentile, the last
            request's.
        itl_ms, itl_p99_ms: time between two tokens of an answer, the mean within a piece; the median over all tokens,
            and the 99th percentile. None where no answer has two.
        plan_ms_per_step: the host's mean time to plan a forward pass; None for a stock backend.
        sharing: of `sharing_between`.
        decode_itl_ms: time between two tokens while every request decodes, the median; None as `decode_tok_s`.
    """

    duration_s: float
    output_tok_s: float
    decode_tok_s: float | None
    steady_tok_s: float | None
    ttft_ms: float
    ttft_p99_ms: float
    ttft_last_ms: float
    itl_ms: float | None
    itl_p99_ms: float | None
    plan_ms_per_step: float | None
    sharing: dict[str, Any] | None
    decode_itl_ms: float | None = None


DIGITS = {
    **{"duration_s": 3, "output_tok_s": 1, "decode_tok_s": 1, "step_ms": 4, "decode_itl_ms": 3, "steady_tok_s": 1},
    **{"ttft_ms": 1, "ttft_p99_ms": 1, "ttft_last_ms": 1, "itl_ms": 3, "itl_p99_ms": 3, "plan_ms_per_step": 4},
}
"""Figures of a record, and their decimal places; `step_ms` is of a decode step of all requests."""


@dataclass(frozen=True)
class Run:
    """Timings, and whose. `number` counts runs of the same workload on the same server, from 1."""

    backend: str
    workload: Workload
    number: int
    timings: Timings


def run_workload(url: str, workload: Workload, log: Path, watch: AbstractContextManager[Any] | None = None) -> Timings:
    """Empty the server's cache, put the shared prompts into it, warm up, and run a workload.

    Args:
        log: file that takes the client's output.
        watch: is entered while the workload runs.
    Raises:
        ClientFailedError: not all was answered.
        requests.RequestException: the server is not idle, or refuses a prompt.
    """
    requests.post(f"{url}/flush_cache", params={"timeout": 60}, timeout=120).raise_for_status()
    for prompt in workload.cached:
        cache: dict[str, Any] = {"input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        requests.post(f"{url}/generate", json=cache, timeout=600).raise_for_status()
    if workload.warm_up:
        run_client(url, replace(workload, sessions=workload.warm_up), log)
    before = server_info(url)
    with watch or nullcontext():
        details = run_client(url, workload, log)
    after = server_info(url)
    return timings(details, workload, sharing_between(before, after), plan_ms_between(before, after))


def timings(
    details: dict[str, Any], workload: Workload, sharing: dict[str, Any] | None, plan_ms: float | None
) -> Timings:
    """Timings from the result of SGLang's client."""
    first = np.array(details["ttfts"])
    gaps = [np.array(of_request) for of_request in details["itls"]]
    between = np.concatenate(gaps)
    single = workload.requests == len(workload.sessions)
    full = full_batch(first, gaps) if workload.all_at_once else None
    return Timings(
        duration_s=details["duration"],
        output_tok_s=workload.output_tokens / details["duration"],
        decode_tok_s=full[0] if full else None,
        steady_tok_s=steady_rate(first, gaps, workload.concurrency) if single else None,
        ttft_ms=float(np.median(first)) * 1e3,
        ttft_p99_ms=float(np.percentile(first, 99)) * 1e3,
        ttft_last_ms=float(first.max()) * 1e3,
        itl_ms=float(np.median(between)) * 1e3 if len(between) else None,
        itl_p99_ms=float(np.percentile(between, 99)) * 1e3 if len(between) else None,
        plan_ms_per_step=plan_ms,
        sharing=sharing,
        decode_itl_ms=full[1] * 1e3 if full else None,
    )


def server_case(url: str, dims: ModelDims | None) -> dict[str, Any]:
    """Return what a record's case says of a server, and of its model if that is known."""
    info = server_info(url)
    case = {
        "dtype": info.get("dtype"),
        "kv_cache_dtype": info.get("kv_cache_dtype"),
        "tp": info.get("tp_size"),
        "client": "http",
    }
    if (ranks := max(info.get("dp_size", 1), info.get("attn_dp_size", 1))) > 1:  # SGLang 0.5.17, 0.5.23
        case["dp"] = ranks
    return case | ({"layers": dims.num_layers, "heads": dims.num_heads} if dims else {})


def record_run(out: Path, run: Run, server: dict[str, Any]) -> None:
    """Append a run to a file of records.

    Args:
        server: what the case says of the server and its model.
    """
    rate = run.timings.decode_tok_s
    figures = vars(run.timings) | {"step_ms": run.workload.requests / rate * 1e3 if rate else None}
    metrics = {name: figures[name] and round(figures[name], digits) for name, digits in DIGITS.items()}
    of = impl_and_case(run.backend, run.workload, server)
    write_record(out, bench=run.workload.name, **of, run=run.number, **metrics, hybrid_mla=run.timings.sharing)


def impl_and_case(backend: str, workload: Workload, server: dict[str, Any]) -> dict[str, Any]:
    """Return whose a record is, and of what; `server` as of `record_run`."""
    attention, *flags = shlex.split(backend)
    case: dict[str, Any] = {
        "prefix": workload.longest_prefix,
        "requests": workload.requests,
        "concurrency": workload.concurrency,
        "output": workload.output_tokens,
        "stream_interval": workload.stream_interval,
        "digest": workload.digest,
        **server,
    }
    if workload.case:
        case = {"prompt": workload.case} | case
    if flags:
        case["flags"] = shlex.join(flags)
    return {"impl": attention if attention == HYBRID else f"sglang_{attention}", "case": case}


def record_profile(out: Path, run: Run, profile: Profile, server: dict[str, Any]) -> None:
    """Append a profile to a file of records; `server` as of `record_run`."""
    assert run.workload.profile
    write_record(
        out,
        bench="profile",
        workload=run.workload.name,
        **impl_and_case(run.backend, run.workload, server),
        **run.workload.profile,
        span_ms=round(profile.span_ms, 3),
        busy_ms=round(profile.busy_ms, 3),
        kernels={name: [round(ms, 4), launches] for name, (ms, launches) in profile.kernels.items()},
    )


def describe_run(run: Run) -> str:
    """Return one line for the console."""
    measured = run.timings
    steady = f" ({measured.steady_tok_s:,.0f} while others wait)" if measured.steady_tok_s else ""
    if measured.decode_itl_ms:
        steady += f", {measured.decode_itl_ms:,.2f} ms between tokens while all decode"
    parts = [
        f"{run.workload.title}, run {run.number}: {measured.output_tok_s:,.0f} tok/s{steady}",
        f"first token {measured.ttft_ms:,.0f} ms, last request's {measured.ttft_last_ms:,.0f} ms",
    ]
    return ", ".join(parts + describe_sharing(measured.sharing))


COLUMNS = {
    "backend": "{backend}",
    "runs": "{runs}",
    "output tok/s": "{output_tok_s:,.0f}",
    "decode tok/s": "{decode_tok_s:,.0f}",
    "decode ITL ms": "{decode_itl_ms:,.2f}",
    "steady tok/s": "{steady_tok_s:,.0f}",
    "TTFT ms p50": "{ttft_ms:,.0f}",
    "p99": "{ttft_p99_ms:,.0f}",
    "last": "{ttft_last_ms:,.0f}",
    "ITL ms p50": "{itl_ms:,.2f}",
    "ITL p99": "{itl_p99_ms:,.2f}",
    "plan ms per step": "{plan_ms_per_step:,.3f}",
}
COMPARED = ("steady_tok_s", "decode_tok_s", "output_tok_s")
"""Throughputs, of which the first that a workload has is compared."""


def runs_tables(runs: Iterable[Run], backends: Sequence[str]) -> Iterator[str]:
    """Yield a table for each workload with a row for each backend: the medians over its runs, and the throughput's
    ratio to the first stock backend's, while others wait or while all decode where that was measured."""
    figures = pd.DataFrame([{"title": run.workload.title, "backend": run.backend, **vars(run.timings)} for run in runs])
    stock = next((name for name in backends if shlex.split(name)[0] != HYBRID), None)
    columns = COLUMNS | {f"tok/s vs {stock}": "{ratio:.2f}x"}
    for title, of_workload in figures.groupby("title") if len(figures) else ():
        by_backend = of_workload.drop(columns=["title", "sharing"]).groupby("backend")
        medians = by_backend.median().astype(object).assign(runs=by_backend.size())
        rows = {name: medians.loc[name].dropna().to_dict() for name in backends if name in medians.index}
        reference = rows.get(stock or "", {})
        compared = next((name for name in COMPARED if name in reference), COMPARED[-1])
        for name, row in rows.items():
            row["backend"] = name
            if compared in row and reference:
                row["ratio"] = row[compared] / reference[compared]
        yield f"{title}: medians over runs\n{table(columns, list(rows.values()))}"
