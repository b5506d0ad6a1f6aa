"""Start SGLang's server in a process of its own, wait until it answers, and stop it whatever happens."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol
from urllib.parse import urlsplit

import psutil
import requests
import torch
from rich.console import Console

ON_GPU = torch.cuda.is_available()
# SGLang's own launcher where it can run as it is; on a CPU the one that puts stand-ins in place first.
LAUNCHER = "sglang.launch_server" if ON_GPU else "sglang_mla_ext.launch_server"
STOCK = "flashmla" if ON_GPU else "torch_native"
SCRIPTS = Path(__file__).resolve().parents[1]
# fp32 because CPUs are slow in bf16; a small share of memory because SGLang would take nearly all of it.
CPU_ARGUMENTS = ("--device", "cpu", "--dtype", "float32", "--mem-fraction-static", "0.1", "--sleep-on-idle")
# The models that run on a CPU are tiny; on few cores, threads that wait for each other cost more than they gain, and so
# does compiling the few functions that SGLang has compiled: 11 s for one, in each process.
CPU_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
# How long a server may take until it answers; a first start compiles kernels.
START_S = 1800.0
# From a server's port, or from that of `--dist-init-addr`, to those between its own processes (`PortArgs.init_new`).
SGLANG_OFFSETS = (*range(20), *range(233, 253))
RENDEZVOUS_OFFSET = 19  # among them, and none that SGLang counts from a server's own port


class ServerFailedError(RuntimeError):
    """The server did not come to answer; the message says why, or holds the end of its log."""


def work_folder() -> Path:
    """Return where scripts keep models and logs: `.demo` at the top of the repository, which git ignores."""
    folder = Path(__file__).resolve().parents[2] / ".demo"
    folder.mkdir(exist_ok=True)
    (folder / ".gitignore").write_text("*\n")
    return folder


def console_of(width: int) -> Console:
    """Make the console of a script: as wide as the terminal, or `width` where there is none."""
    return Console() if sys.stdout.isatty() else Console(width=width)


def free_port() -> int:
    """A TCP port that is free now, as are those behind it that SGLang counts from it for itself.

    Not one of those that the system gives to clients: such a port may be taken again before a server asks for it.
    """
    while True:
        port = random.randrange(20_000, 32_000)
        if all(is_free(port + offset) for offset in SGLANG_OFFSETS):
            return port


def is_free(port: int) -> bool:
    """Return whether nobody listens on a TCP port of this machine; connections of a server that has ended do not
    count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def server_info(base_url: str) -> dict[str, Any]:
    """The state of the first scheduler in `/server_info`."""
    answer = requests.get(f"{base_url}/server_info", timeout=120)
    answer.raise_for_status()
    state: dict[str, Any] = answer.json()["internal_states"][0]
    return state


class Started:
    """A server that has been started."""

    def __init__(self, process: Process, base_url: str, log: Path, console: Console) -> None:
        self._process, self._base_url, self._log, self._console = process, base_url, log, console

    def url(self, timeout_s: float = START_S) -> str:
        """Wait until it answers, and return its base URL. Raises ServerFailedError if it ends, or is too slow."""
        wait_until_ready(self._process, self._base_url, self._log, self._console, timeout_s)
        return self._base_url

    def wait_for_end(self) -> NoReturn:
        """Wait until the server ends, which nobody asked it for. Raises ServerFailedError."""
        status = self._process.wait()
        raise ServerFailedError(f"the server ended with status {status}:\n{log_tail(self._log)}")


@contextlib.contextmanager
def started_server(
    arguments: Sequence[str],
    port: int,
    log: Path,
    console: Console,
    environment: Mapping[str, str] | None = None,
    launcher: Sequence[str] = ("-m", LAUNCHER),
) -> Iterator[Started]:
    """Start a server without waiting, so that several can start beside each other, and stop it in the end.

    Args:
        arguments: of `sglang.launch_server`, without host and port.
        log: file that takes the server's output.
        environment: variables beside this process's.
        launcher: what Python runs.
    Raises:
        ServerFailedError: its port is taken.
    """
    if not is_free(port):  # before the log of whoever listens there may be opened
        raise ServerFailedError(f"port {port} is taken: another server listens there")
    command, variables = server_command(arguments, port, launcher)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output, _sigterm_raises():
        # A session of its own, so that Ctrl-C reaches this process alone, which then stops all of the server's.
        server = subprocess.Popen(
            command,
            env=variables | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield Started(server, base_url_of(port), log, console)
        finally:
            console.print("Stopping the server")
            stop_server(server)


def python_path(*first: str) -> str:
    """PYTHONPATH for servers that import these scripts: some folders, this process's, and the scripts'."""
    return os.pathsep.join(filter(None, (*first, os.environ.get("PYTHONPATH"), str(SCRIPTS))))


def base_url_of(port: int) -> str:
    """Return where a server on this machine answers."""
    return f"http://127.0.0.1:{port}"


def server_command(
    arguments: Sequence[str], port: int, launcher: Sequence[str] = ("-m", LAUNCHER)
) -> tuple[list[str], dict[str, str]]:
    """The command that starts a server on this machine, with a GPU or without, and its environment."""
    defaults = () if ON_GPU else CPU_ARGUMENTS
    flags = (*defaults, *rendezvous(arguments, port), *arguments, "--host", "127.0.0.1", "--port", str(port))
    command = [sys.executable, *launcher, *flags]
    return command, os.environ | ({} if ON_GPU else CPU_ENVIRONMENT)


def rendezvous(arguments: Sequence[str], port: int) -> tuple[str, ...]:
    """Flags that name the port at which a server's ranks meet. By itself SGLang 0.5.17 takes one that the system gives
    to clients (see `free_port`), and asks for it seconds later."""
    if "--dp-size" in arguments and "--enable-dp-attention" not in arguments:
        return ()  # each replica needs a port of its own
    return "--nccl-port", str(port + RENDEZVOUS_OFFSET)


def load_arguments(model: str, most_requests: int) -> list[str]:
    """A server's flags for a model, and for as many requests at a time."""
    # Twice the requests: at exactly their number SGLang sometimes holds one back, and the batch is never full.
    arguments = ["--model-path", model, "--max-running-requests", str(2 * most_requests)]
    return arguments + (["--cuda-graph-max-bs-decode", str(most_requests)] if ON_GPU else [])


class Process(Protocol):
    """Part of `subprocess.Popen` that this module needs."""

    pid: int

    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def terminate(self) -> None: ...


def wait_until_ready(server: Process, base_url: str, log: Path, console: Console, timeout_s: float) -> None:
    """Wait until a server answers; raises ServerFailedError as `Started.url` does."""
    start = time.monotonic()
    with console.status("starting the server") as status:
        while (waited := time.monotonic() - start) < timeout_s:
            if server.poll() is not None:
                raise ServerFailedError(f"the server ended with status {server.returncode}:\n{log_tail(log)}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{base_url}/health", timeout=10).ok:
                    if not listens(server.pid, urlsplit(base_url).port):
                        raise ServerFailedError(f"another server answers at {base_url}: it took the port meanwhile")
                    console.print(f"Server ready after {waited:.0f} s at {base_url} (log: {log})")
                    return
            status.update(f"starting the server, {waited:.0f} s (log: {log})")
            time.sleep(0.5)
    raise ServerFailedError(f"the server did not answer within {timeout_s:.0f} s:\n{log_tail(log)}")


def listens(pid: int, port: int | None) -> bool:
    """Return whether a process, or one that it started, listens on a TCP port."""
    parent = psutil.Process(pid)
    for process in (parent, *parent.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            sockets = process.net_connections("tcp")
            if any(each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in sockets):
                return True
    return False


def log_tail(log: Path, lines: int = 30) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def stop_server(server: Process, grace_s: float = 10) -> None:
    """End the server and every process that it started; another Ctrl-C meanwhile is ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(server.pid)
        processes = [parent, *parent.children(recursive=True)]
        server.terminate()  # SGLang ends its own processes
        _, alive = psutil.wait_procs(processes, timeout=grace_s)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    server.wait()
    signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does: through its `finally` blocks."""

    def leave(signum: int, frame: object) -> None:
        raise SystemExit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
