"""The servers of a test session: each is started once, in a fork, while tests use the one before it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.server import (
    CPU_ENVIRONMENT,
    ON_GPU,
    Process,
    base_url_of,
    free_port,
    log_tail,
    server_command,
    stop_server,
    wait_until_ready,
)
from demo import MODEL
from demo_model.checkpoint import Settings, make
from fork_server import ForkServer
from rich.console import Console

READY_WITHIN_S = 600

IMPORTED = (
    "sglang_mla_ext.launch_server",  # first: puts the stand-ins in place that SGLang's import needs on a CPU
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.models.registry",
    "sglang_mla_ext.adapter.compat.contract:check",  # which no process does again
    "sglang.benchmark.serving",  # no server's, but the client's of test_bench_workloads.py
)
"""What the process has imported that is forked into servers."""


def small(folder: Path) -> Path:
    """DeepSeek-V3's architecture with random weights, and the demo model's tokenizer. It takes less than half of the
    demo model's time, and one token of a prompt changes the log-probabilities of nearly all of an answer's."""
    out = folder / "small"
    if make(out, Settings(2, 4, 128, 512, 64, 4096, 16384, seed=0, config_only=False)):
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(MODEL / name, out)
    return out


@dataclass(frozen=True)
class Launch:
    """How to start a server: its arguments beside the model, and its environment beside this process's.

    `real` is the command line itself, where SGLang spawns its processes; the others are forks. A variable that SGLang
    reads at import needs it. `model` is given a folder to make the model in, and returns the model's; it is asked anew
    for each server. With several `nodes` it is a process for each, as on machines of their own.
    """

    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    real: bool = False
    model: Callable[[Path], Path] = small
    nodes: int = 1


@dataclass(frozen=True)
class Running:
    """A server that was started, and may not be ready yet.

    Attributes:
        process: of its first node; log: its output.
        others: of its other nodes.
    """

    process: Process
    base_url: str
    log: Path
    others: tuple[Process, ...] = ()


class ServerPool:
    """Starts servers ahead of their use, and stops all of them at the end.

    Args:
        launches: by name.
        order: names in the order of their first use. The next one is started when one is ready: never two at a time, so
            that no other server takes memory while one measures what is free.
        folder: for their logs.
    """

    def __init__(self, launches: Mapping[str, Launch], order: Sequence[str], folder: Path) -> None:
        self._launches, self._order, self._folder = launches, order, folder
        self._running: dict[str, Running] = {}
        self._ready: set[str] = set()
        self._closing = contextlib.ExitStack()
        self._forks: ForkServer | None = None
        if not ON_GPU:  # CUDA does not survive a fork
            self._forks = ForkServer(folder / "fork_server.log", {**os.environ, **CPU_ENVIRONMENT}, IMPORTED)
            self._closing.callback(self._forks.close)

    def start_real_ones(self) -> None:
        """Start the servers that take longest before any other."""
        for name in self._order:
            if self._launches[name].real:
                self._start(name)

    def get(self, name: str) -> Running:
        """A server that answers. Raises ServerFailedError, with the end of its log."""
        running = self._start(name)
        if name not in self._ready:
            with open(os.devnull, "w") as nowhere:
                console = Console(file=nowhere)
                wait_until_ready(running.process, running.base_url, running.log, console, READY_WITHIN_S)
            self._ready.add(name)
            for following in self._order[self._order.index(name) + 1 :]:
                if following not in self._running:
                    self._start(following)
                    break
        return running

    def popen(self, command: Sequence[str], real: bool = False, **options: Any) -> Process:
        """`subprocess.Popen(command, env=, stdout=, stderr=)`, as a fork unless `real`; stopped at the end.

        In a session of its own: Ctrl-C reaches the tests alone, which then stop the servers.
        """
        if real or self._forks is None:
            own: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True}
            process: Process = subprocess.Popen(command, **options, **own)
        else:
            process = self._forks.start(command, **options)
        self._closing.callback(stop_server, process, grace_s=1)  # by itself it ends at its next look every 5 s
        return process

    def keep_only(self, names: Collection[str]) -> None:
        """Tell the other servers to end; they are not waited for, and cannot be used again."""
        for name, running in self._running.items():
            if name not in names:
                for process in (running.process, *running.others):
                    process.terminate()

    def close(self) -> None:
        """Stop what runs; every server is told to before the first one is waited for."""
        self.keep_only(())
        self._closing.close()

    def _start(self, name: str) -> Running:
        if name in self._running:
            return self._running[name]
        launch, port, meeting_port = self._launches[name], free_port(), free_port()
        arguments = ("--model-path", str(launch.model(self._folder)), *launch.arguments)
        logs = [self._folder / (f"{name}-{node}.log" if node else f"{name}.log") for node in range(launch.nodes)]
        processes = []
        for node, log in enumerate(logs):
            of_node: tuple[str, ...] = ()
            if launch.nodes > 1:
                of_node = ("--nnodes", str(launch.nodes), "--node-rank", str(node))
                of_node += ("--dist-init-addr", f"127.0.0.1:{meeting_port}")
            command, environment = server_command((*arguments, *of_node), free_port() if node else port)
            environment |= launch.environment
            with log.open("wb") as output:
                processes.append(self.popen(command, real=launch.real, env=environment, stdout=output, stderr=output))
        self._running[name] = Running(processes[0], base_url_of(port), logs[0], tuple(processes[1:]))
        return self._running[name]


def last_words(process: Process, log: Path) -> str:
    """For the report of a test that failed: whether its server still runs, and the end of its log."""
    status = process.poll()
    state = "is running" if status is None else f"ended with status {status}"
    return f"The server {state}. The end of {log}:\n{log_tail(log)}"
