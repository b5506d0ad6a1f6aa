"""Run SGLang's benchmark client (sglang_client.py) against a server, and what follows from its timings."""

from __future__ import annotations

import heapq
import json
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.workloads import Workload
from sglang_mla_ext.observe import MAXIMA

SCRIPT = Path(__file__).with_name("sglang_client.py")
HYBRID = "hybrid_mla"
# The full batch must last for this share of the longest request's decoding, or its throughput does not count.
SMALLEST_FULL_SHARE = 0.25
# Servers are ready when a client starts; one that was stopped since must not be waited for.
READY_S = 5
# The client takes longer to import than many a measurement: it is imported once, in a process that is forked for each.
IMPORTED = ("sglang_mla_ext.launch_server", "sglang.benchmark.serving")  # the first puts stand-ins in place on a CPU


class ClientFailedError(RuntimeError):
    """The benchmark client failed, or not all of its requests were answered."""


def run_client(url: str, workload: Workload, log: Path) -> dict[str, Any]:
    """Send a workload's sessions, and time their tokens.

    Args:
        log: file that takes the client's output.
    Returns:
        SGLang's result with its details: `ttfts` and `itls` in s, by request, and more.
    Raises:
        ClientFailedError
    """
    with tempfile.TemporaryDirectory() as folder:
        data, output = Path(folder) / "sessions.jsonl", Path(folder) / "result.jsonl"
        data.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in workload.bodies()))
        flags = {"base-url": url, "warmup-requests": 0, "output-file": output, "ready-check-timeout-sec": READY_S}
        if workload.at_a_time is not None:
            flags["max-concurrency"] = workload.at_a_time
        arguments = [str(data), "--output-details", "--disable-tqdm"]
        arguments += [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        status = run_script(arguments, log)
        if status or not output.exists():
            raise ClientFailedError(f"the client ended with status {status}; see {log}")
        details: dict[str, Any] = json.loads(output.read_text())
    for what, answered, asked in (
        ("requests", details["completed"], workload.requests),
        ("tokens", sum(details["output_lens"]), workload.output_tokens),
    ):
        if answered != asked:
            error = next(filter(None, details["errors"]), "")[-300:]
            raise ClientFailedError(f"{answered} of {asked} {what} answered; see {log} {error}".rstrip())
    return details


def run_script(arguments: Sequence[str], log: Path) -> int:
    """Run `sglang_client.py` in a process of its own, and return its exit status."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    process = context.Process(target=_client, args=(SCRIPT, list(arguments), log), daemon=True)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def _client(script: Path, arguments: list[str], log: Path) -> None:
    with log.open("ab") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")


def full_batch(first_s: np.ndarray, gaps_s: list[np.ndarray]) -> tuple[float, float] | None:
    """Tokens per second, and the median time between two tokens of an answer, over the time in which every request is
    between its first and its last token.

    Args:
        first_s: `[requests]` time to the first token; all were sent at the same time.
        gaps_s: for each request the times between its tokens.
    Returns:
        None if that time is too small a share of the decoding.
    """
    times = [first + np.cumsum(gaps) for first, gaps in zip(first_s, gaps_s, strict=True)]
    begin, end = first_s.max(), min(t[-1] if len(t) else 0.0 for t in times)
    longest = max((t[-1] - first for t, first in zip(times, first_s, strict=True) if len(t)), default=0.0)
    if end - begin < SMALLEST_FULL_SHARE * longest or end <= begin:
        return None
    within = np.concatenate([gaps[(t > begin) & (t <= end)] for t, gaps in zip(times, gaps_s, strict=True)])
    return len(within) / float(end - begin), float(np.median(within))


def steady_rate(first_s: np.ndarray, gaps_s: list[np.ndarray], at_a_time: int) -> float | None:
    """Tokens per second while there are requests that wait for a place: from the first tokens of those that begin at
    once to the moment in which the last request begins.

    The client says how long each request took and not when it began; it lets them in in their order, each when one
    ends.

    Args:
        first_s: `[requests]` time to the first token; gaps_s: for each request the times between its tokens.
        at_a_time: requests in flight.
    Returns:
        None where no request waits, or the last one begins before all of the first have a token.
    """
    if len(first_s) <= at_a_time:
        return None
    begun = np.zeros(len(first_s))
    ends = [float(first + gaps.sum()) for first, gaps in zip(first_s[:at_a_time], gaps_s, strict=False)]
    heapq.heapify(ends)
    for request in range(at_a_time, len(first_s)):
        begun[request] = ends[0]
        heapq.heapreplace(ends, float(begun[request] + first_s[request] + gaps_s[request].sum()))
    begin, end = float(first_s[:at_a_time].max()), float(begun.max())
    if end <= begin:
        return None
    tokens = 0
    for start, first, gaps in zip(begun, first_s, gaps_s, strict=True):
        times = start + first + np.concatenate([[0.0], np.cumsum(gaps)])
        tokens += int(np.count_nonzero((times > begin) & (times <= end)))
    return tokens / (end - begin)


def sharing_between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any] | None:
    """Return what hybrid_mla did between two readings of `/server_info`; None for a stock backend.

    Returns:
        `mode` of most decode steps, `steps` by mode, `group_size` as the mean over groups and steps (0 without any),
        `prefills` over expanded prefixes, `expansions`, `fallbacks` by reason where there are any, and `counters`:
        all that gained anything, under the server's names.
    """
    if HYBRID not in after:
        return None
    earlier, later = before[HYBRID]["counters"], after[HYBRID]["counters"]
    gained = {
        name: value - earlier[name] for name, value in later.items() if isinstance(value, int) and name not in MAXIMA
    }
    steps = {name.removeprefix("steps_"): count for name, count in gained.items() if name.startswith("steps_")}
    read, saved = gained["shared_tokens_read"], gained["shared_tokens_saved"]
    sharing = {
        "mode": max(steps, key=lambda mode: steps[mode]),
        "steps": steps,
        "group_size": round((read + saved) / read, 1) if read else 0,
        "prefills": gained["prefills_naive"],
        "expansions": gained["expansions"],
        "counters": {name: count for name, count in gained.items() if count},
    }
    if fallbacks := Counter(later["fallbacks"]) - Counter(earlier["fallbacks"]):
        sharing["fallbacks"] = dict(fallbacks)
    return sharing


def describe_sharing(sharing: Mapping[str, Any] | None) -> list[str]:
    """Return what the console says of `sharing_between`."""
    if sharing is None:
        return []
    steps = ", ".join(f"{count:,} {mode}" for mode, count in sharing["steps"].items() if count)
    said = [f"steps: {steps or 'none'}; groups of {sharing['group_size']:g}"]
    return said + [f"{count} times {reason}" for reason, count in sharing.get("fallbacks", {}).items()]


def plan_ms_between(before: dict[str, Any], after: dict[str, Any]) -> float | None:
    """The host's time in ms for planning a forward pass, the mean between two readings of `/server_info`.

    Returns:
        None for a stock backend, and where no pass lies between them.
    """
    if HYBRID not in after:
        return None
    earlier, later = before[HYBRID]["counters"], after[HYBRID]["counters"]
    passes = later["forward_passes"] - earlier["forward_passes"]
    return (later["plan_seconds"] - earlier["plan_seconds"]) / passes * 1e3 if passes else None
