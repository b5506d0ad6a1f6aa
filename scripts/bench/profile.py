"""Measure where the GPU's time goes in some steps of a server under load, by torch's profiler in the server itself."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import requests

GPU_EVENTS = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Categories of a trace's events that take time on the GPU."""

LONGEST_NAME = 160
"""Characters that are kept of a kernel's name: templates have thousands."""

TRACES = "*.trace.json.gz"
PATIENCE_S = 180
"""Longest time that the server may take to write a trace."""


class NoTraceError(RuntimeError):
    """The server has written no trace."""


@dataclass(frozen=True)
class Profile:
    """Activity of the GPU while it was watched.

    Attributes:
        span_ms: from the first kernel's start to the last one's end; busy_ms: of it, while any kernel ran.
        kernels: by name, `(ms, launches)` in all, the longest first. Kernels that ran side by side count in full.
    """

    span_ms: float
    busy_ms: float
    kernels: dict[str, tuple[float, int]]


class Profiler:
    """Ask a server for a profile while a workload runs.

        profiler = Profiler(url, folder, after_s=5, steps=10)
        with profiler:
            ...  # the workload
        profile = profiler.read()

    The host is not watched, which would slow it down: what it costs is seen where the GPU waits.

    Args:
        folder: for traces; the server makes it.
        after_s: seconds to wait before the first step; 0 watches from the next step on.
        steps: forward passes.
    """

    def __init__(self, url: str, folder: Path, *, after_s: float, steps: int) -> None:
        self._url, self._folder, self._steps = url, folder, steps
        self._later = threading.Timer(after_s, self._start)
        self._before: set[Path] = set()

    def __enter__(self) -> None:
        self._before = set(self._folder.glob(TRACES))
        self._later.start()

    def __exit__(self, *error: object) -> None:
        self._later.cancel()
        self._later.join()

    def read(self) -> Profile:
        """Wait for the trace, and count.

        Raises:
            NoTraceError: there is none. The load may have ended before the profiler began.
        """
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            for path in set(self._folder.glob(TRACES)) - self._before:
                with contextlib.suppress(EOFError, json.JSONDecodeError):  # it is still being written
                    return count(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])
            time.sleep(0.5)
        raise NoTraceError(f"the server has written no trace to {self._folder} within {PATIENCE_S} s")

    def _start(self) -> None:
        wanted = {"output_dir": str(self._folder), "num_steps": self._steps, "activities": ["GPU"]}
        requests.post(f"{self._url}/start_profile", json=wanted, timeout=PATIENCE_S).raise_for_status()


def count(events: Iterable[Mapping[str, Any]]) -> Profile:
    """Count what a trace of torch's profiler has of the GPU; raises NoTraceError if nothing ran there."""
    on_gpu = [event for event in events if event.get("ph") == "X" and event.get("cat") in GPU_EVENTS]
    if not on_gpu:
        raise NoTraceError("nothing ran on the GPU while it was watched")
    frame = pd.DataFrame(on_gpu, columns=["ts", "dur", "name"]).sort_values("ts")
    ends = frame.ts + frame.dur
    done = ends.cummax().shift(fill_value=frame.ts.iloc[0])  # when all kernels before have ended
    busy_us = (ends - frame.ts.clip(lower=done)).clip(lower=0).sum()
    of_name = frame.groupby(frame.name.str[:LONGEST_NAME]).dur.agg(["sum", "size"]).sort_values("sum", ascending=False)
    kernels = {str(name): (us / 1e3, int(launches)) for name, us, launches in of_name.itertuples()}
    return Profile(float(ends.max() - frame.ts.iloc[0]) / 1e3, float(busy_us) / 1e3, kernels)
