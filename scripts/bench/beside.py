"""Servers that run beside each other, each on a GPU of its own, and are measured at the same time."""

from __future__ import annotations

import concurrent.futures
import contextlib
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import requests
from rich.console import Console

from bench.client import ClientFailedError
from bench.profile import NoTraceError
from bench.server import START_S, ServerFailedError, free_port, started_server

LONGEST_S = 86_400.0
"""Longest time that a group is measured where there is no other limit."""


@dataclass(frozen=True)
class Placed:
    """A server that is to be started.

    Attributes:
        backend: of attention, and its flags.
        turn: of those in which servers are started, from 0.
        gpu: as CUDA_VISIBLE_DEVICES says it; None for where it will.
        log: file that takes its output.
    """

    backend: str
    turn: int
    gpu: str | None
    log: Path

    @property
    def client_log(self) -> Path:
        """File that takes the client's output."""
        return self.log.with_suffix(".client.log")


def in_turns(backends: Sequence[str], gpus: Sequence[str | None], swap: bool, logs: Path) -> list[list[Placed]]:
    """Return which servers run at the same time, one group after the other: as many as there are GPUs.

    Args:
        swap: all once more in reverse order: where two share two GPUs, each on the other's.
    """
    turns = [backends, backends[::-1]] if swap else [backends]
    return [
        [
            Placed(name, turn, gpu, logs / f"server-{turn}-{first + place}-{shlex.split(name)[0]}.log")
            for place, (name, gpu) in enumerate(zip(names[first:], gpus, strict=False))
        ]
        for turn, names in enumerate(turns)
        for first in range(0, len(names), len(gpus))
    ]


def measure_beside(
    group: Sequence[Placed],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    measure: Callable[[str, Placed], None],
    end: float,
    console: Console,
    at_a_time: int | None = None,
) -> bool:
    """Start servers, and measure them when all that start have started.

    Args:
        arguments, environment: of every server.
        measure: is given a server's URL, in a thread.
        end: of `time.monotonic()`, when all servers are stopped whatever they do.
        at_a_time: so many of them; None for all at the same time.
    Returns:
        whether nothing failed, and there was time for all of it.
    """
    failed: list[str] = []

    def left(most: float) -> float:
        return min(most, max(0.0, end - time.monotonic()))

    def say(placed: Placed, what: object) -> None:
        failed.append(placed.backend)
        console.print(f"{placed.backend}: {what}", style="red", markup=False, highlight=False)

    # Servers end before their threads are waited for: a client whose server is gone ends as well.
    with ThreadPoolExecutor(at_a_time or len(group)) as threads, contextlib.ExitStack() as servers:
        started = []
        for placed in group:
            attention, *flags = shlex.split(placed.backend)
            variables = {**environment} | ({"CUDA_VISIBLE_DEVICES": placed.gpu} if placed.gpu else {})
            flags = ["--attention-backend", attention, *flags, *arguments]
            server = started_server(flags, free_port(), placed.log, console, variables)
            started.append((placed, servers.enter_context(server)))
        urls = []
        for placed, server in started:
            try:
                urls.append((placed, server.url(left(START_S))))
            except ServerFailedError as error:
                say(placed, error)
        for placed, client in [(placed, threads.submit(measure, url, placed)) for placed, url in urls]:
            try:
                client.result(left(LONGEST_S))
            except concurrent.futures.TimeoutError:
                say(placed, "no time left")
            except (ClientFailedError, NoTraceError, requests.RequestException) as error:
                say(placed, error)
    return not failed
