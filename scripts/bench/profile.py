"""Measure where the GPU's time goes in some steps of a server under load, by torch's profiler in the server itself."""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

GPU_EVENTS = {"kernel", "gpu_memcpy", "gpu_memset"}
"""Categories of a trace's events that take time on the GPU."""

LONGEST_NAME = 160
"""Characters that are kept of a kernel's name: templates have thousands."""

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
    """Asks a server for a profile while a workload runs.

        profiler = Profiler(url, folder, after_s=5, steps=10)
        with profiler:
            ...  # the workload
        profile = profiler.read()

    The host is not watched, which would slow it down: what it costs is seen where the GPU waits.
    """

    def __init__(self, url: str, folder: Path, *, after_s: float, steps: int) -> None:
        """
        Args:
            folder: for traces; the server makes it.
            after_s: seconds to wait before the first step; 0 watches from the next step on.
            steps: forward passes.
        """
        self._url, self._folder, self._after_s, self._steps = url, folder, after_s, steps
        self._thread = threading.Thread(target=self._start)
        self._left = threading.Event()
        self._before: set[Path] = set()

    def __enter__(self) -> Profiler:
        self._before = set(self._traces())
        if self._after_s:
            self._thread.start()
        else:
            self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self._left.set()
        if self._after_s:
            self._thread.join()

    def read(self) -> Profile:
        """Wait for the trace, and count.

        Raises:
            NoTraceError: there is none. The load may have ended before the profiler began.
        """
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            for path in set(self._traces()) - self._before:
                try:
                    return read_trace(path)
                except (EOFError, json.JSONDecodeError):  # it is still being written
                    pass
            time.sleep(0.5)
        raise NoTraceError(f"the server has written no trace to {self._folder} within {PATIENCE_S} s")

    def _traces(self) -> Iterable[Path]:
        return self._folder.glob("*.trace.json.gz")

    def _start(self) -> None:
        if self._after_s and self._left.wait(self._after_s):
            return
        wanted = {"output_dir": str(self._folder), "num_steps": self._steps, "activities": ["GPU"]}
        requests.post(f"{self._url}/start_profile", json=wanted, timeout=PATIENCE_S).raise_for_status()


def read_trace(path: Path) -> Profile:
    """Count what a trace of torch's profiler has of the GPU.

    Raises:
        NoTraceError: nothing ran on the GPU.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return count(json.load(file)["traceEvents"])


def count(events: Iterable[Mapping[str, Any]]) -> Profile:
    """Count a trace's events; raises NoTraceError as `read_trace` does."""
    on_gpu = sorted(
        (event["ts"], event["ts"] + event["dur"], event["name"][:LONGEST_NAME])
        for event in events
        if event.get("ph") == "X" and event.get("cat") in GPU_EVENTS
    )
    if not on_gpu:
        raise NoTraceError("nothing ran on the GPU while it was watched")
    time_us: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    busy_us, done = 0.0, on_gpu[0][0]
    for begin, end, name in on_gpu:
        time_us[name] += end - begin
        launches[name] += 1
        busy_us += max(0.0, end - max(begin, done))
        done = max(done, end)
    kernels = {name: (of_name / 1e3, launches[name]) for name, of_name in time_us.most_common()}
    return Profile((done - on_gpu[0][0]) / 1e3, busy_us / 1e3, kernels)
