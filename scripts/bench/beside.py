"""Backends compared: servers that run beside each other, each on a GPU of its own, or that share one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import math
import shlex
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import typer
from rich.console import Console

from bench.client import ClientFailedError
from bench.profile import NoTraceError, Profiler
from bench.server import START_S, ServerFailedError, free_port, started_server
from bench.workload_runs import Run, describe_run, record_profile, record_run, run_workload, runs_tables, server_case
from bench.workloads import Workload
from sglang_mla_ext.prefix.planner.model_dims import ModelDims

FAILURES = (ClientFailedError, NoTraceError, requests.RequestException)
"""Errors of a measurement that do not end those of other servers."""

LONGEST_S = 86_400.0
"""Longest time that a group is measured where there is no other limit."""


@dataclass(frozen=True)
class Placed:
    """A server that is to be started.

    Attributes:
        backend: of attention, and its flags.
        gpu: as CUDA_VISIBLE_DEVICES says it; None for where it will.
        log: file that takes its output.
    """

    backend: str
    gpu: str | None
    log: Path

    @property
    def client_log(self) -> Path:
        """File that takes the client's output."""
        return self.log.with_suffix(".client.log")


def in_turns(backends: Sequence[str], gpus: Sequence[str | None], logs: Path) -> list[list[Placed]]:
    """Return which servers run at the same time, one group after the other: as many as there are GPUs."""
    placed = [
        Placed(name, gpu, logs / f"server-{number}-{shlex.split(name)[0]}.log")
        for number, (name, gpu) in enumerate(zip(backends, itertools.cycle(gpus), strict=False))
    ]
    return [placed[first : first + len(gpus)] for first in range(0, len(placed), len(gpus))]


@dataclass
class Comparison:
    """Workloads that are measured on a server of each backend, and what was found.

    Attributes:
        backends: of attention, with their flags.
        described: fields of each record's case.
        logs: folder for the output of servers and clients.
        rounds: how often each workload is measured on each server.
        traces: folder of profiles, each of one more run after the last round; None for no profiles.
    """

    backends: Sequence[str]
    workloads: Sequence[Workload]
    dims: ModelDims | None
    described: Mapping[str, Any]
    out: Path | None
    logs: Path
    console: Console
    rounds: int = 1
    traces: Path | None = None
    found: list[Run] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def measure(self, url: str, placed: Placed) -> None:
        """Run all workloads on a server; raises what is in FAILURES."""
        on = {"on": placed.gpu} if placed.gpu else {}
        for number, workload in itertools.product(range(self.rounds), self.workloads):
            timings = run_workload(url, workload, placed.client_log)
            run = Run(placed.backend, workload, 1 + number, timings)
            self.found.append(run)
            where = f"{placed.backend} on GPU {placed.gpu}" if on else placed.backend
            self.console.print(f"{where}: {describe_run(run)}", markup=False, highlight=False)
            if self.out:
                record_run(self.out, run, server_case(url, self.dims) | self.described | on)
            if self.traces and workload.profile and number == self.rounds - 1:
                profiler = Profiler(url, self.traces, **workload.profile)
                run_workload(url, workload, placed.client_log, watch=profiler)
                profile = profiler.read()
                busy = f"the GPU was busy for {profile.busy_ms:.1f} of {profile.span_ms:.1f} ms"
                self.console.print(f"{workload.title}: {busy}")
                if self.out:
                    record_profile(self.out, run, profile, server_case(url, self.dims))

    def measure_running(self, url: str) -> None:
        """Measure a server that runs, of the one backend; ends as `run` does."""
        placed = Placed(self.backends[0], None, self.logs / "running.log")
        try:
            self.measure(url, placed)
        except FAILURES as error:
            self._fail(placed, error)
        self._finish()

    def run(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        *,
        gpus: str | None = None,
        together: bool = False,
        end: float = math.inf,
    ) -> None:
        """Start servers, as many at a time as there are GPUs, measure them, and print a table for each workload.

        Args:
            arguments, environment: of every server.
            together: start all at once on the same GPUs, and measure one at a time.
            end: of `time.monotonic()`, when all servers are stopped whatever they do.
        Raises:
            typer.Exit: something failed, or there was no time for all of it.
        """
        places = gpus.split(",") if gpus else [None] * (len(self.backends) if together else 1)
        for group in in_turns(self.backends, places, self.logs):
            if time.monotonic() >= end:
                break
            self.console.rule(" beside ".join(placed.backend for placed in group))
            self._run_group(group, arguments, environment, end, at_a_time=1 if together else len(group))
        self._finish()

    def _run_group(
        self,
        group: Sequence[Placed],
        arguments: Sequence[str],
        environment: Mapping[str, str],
        end: float,
        at_a_time: int,
    ) -> None:
        """Start servers, and measure them when all that start have started."""

        def left(most: float) -> float:
            return min(most, max(0.0, end - time.monotonic()))

        # Servers end before their threads are waited for: a client whose server is gone ends as well.
        with ThreadPoolExecutor(at_a_time) as threads, contextlib.ExitStack() as servers:
            started = []
            for placed in group:
                attention, *flags = shlex.split(placed.backend)
                variables = {**environment} | ({"CUDA_VISIBLE_DEVICES": placed.gpu} if placed.gpu else {})
                flags = ["--attention-backend", attention, *flags, *arguments]
                server = started_server(flags, free_port(), placed.log, self.console, variables)
                started.append((placed, servers.enter_context(server)))
            urls = []
            for placed, server in started:
                try:
                    urls.append((placed, server.url(left(START_S))))
                except ServerFailedError as error:
                    self._fail(placed, error)
            for placed, client in [(placed, threads.submit(self.measure, url, placed)) for placed, url in urls]:
                try:
                    client.result(left(LONGEST_S))
                except concurrent.futures.TimeoutError:
                    self._fail(placed, "no time left")
                except FAILURES as error:
                    self._fail(placed, error)

    def _fail(self, placed: Placed, what: object) -> None:
        self.failed.append(placed.backend)
        self.console.print(f"{placed.backend}: {what}", style="red", markup=False, highlight=False)

    def _finish(self) -> None:
        for each in runs_tables(self.found, self.backends):
            self.console.print(each, markup=False, highlight=False, soft_wrap=True)
        if self.failed:
            raise typer.Exit(1)
