"""Profiles of a server: what is asked for, and how a trace is counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from bench import profile


def event(name: str, begin: float, length: float, category: str = "kernel") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": length}


EVENTS = [
    event("b", 2000, 1000),
    event("a", 0, 1000),
    event("a", 500, 1000),  # on another stream, beside the first
    event("copy", 5000, 500, "gpu_memcpy"),
    event("on the host", 0, 90_000, "cpu_op"),
    {"ph": "M", "name": "process_name"},
]


def test_time_of_kernels_and_of_the_gpu() -> None:
    found = profile.count(EVENTS)
    assert found.span_ms == 5.5 and found.busy_ms == 3.0
    assert found.kernels == {"a": (2.0, 2), "b": (1.0, 1), "copy": (0.5, 1)} and next(iter(found.kernels)) == "a"


def test_a_trace_without_a_kernel_is_an_error() -> None:
    with pytest.raises(profile.NoTraceError, match="nothing ran"):
        profile.count([event("on the host", 0, 1, "cpu_op")])


class Server:
    """Answers `/start_profile` as SGLang does; the trace comes when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def post(self, url: str, json: dict[str, Any], timeout: float) -> Server:
        self.asked.append((url, json))
        return self

    def raise_for_status(self) -> None:
        pass


@pytest.mark.parametrize("after_s", [0, 0.01])
def test_the_profiler_reads_the_trace_of_its_own_run(
    after_s: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = Server()
    monkeypatch.setattr(profile.requests, "post", server.post)
    (tmp_path / "old.trace.json.gz").write_bytes(b"of another run")
    profiler = profile.Profiler("http://server", tmp_path, after_s=after_s, steps=3)
    with profiler:
        while not server.asked:
            pass
    with gzip.open(tmp_path / "new.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": EVENTS}, file)
    assert profiler.read().busy_ms == 3.0
    ((url, asked),) = server.asked
    assert url == "http://server/start_profile" and asked["num_steps"] == 3 and asked["output_dir"] == str(tmp_path)


def test_a_load_that_ends_early_is_not_profiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    server = Server()
    monkeypatch.setattr(profile.requests, "post", server.post)
    monkeypatch.setattr(profile, "PATIENCE_S", 0)
    profiler = profile.Profiler("http://server", tmp_path, after_s=60, steps=3)
    with profiler:
        pass
    assert not server.asked
    with pytest.raises(profile.NoTraceError, match="no trace"):
        profiler.read()
