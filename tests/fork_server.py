"""One process that imports SGLang once and is then forked into the launchers of all servers, or into programs of tests.

A server is three processes, and SGLang spawns two of them, so that each imports SGLang anew: 25 s of CPU time each, on
two cores half a minute and more for a server whose model loads in two seconds. A fork starts with everything imported.

From the fork on it is `python -m LAUNCHER ARGUMENTS` or `python FILE ARGUMENTS`: run as `__main__`, with its own
environment, log and session, and an interpreter that ends as usual. Two things differ from the command line.
Environment variables that SGLang reads at import have the values of this process. And SGLang's scheduler and
detokenizer are forked from the launcher instead of being spawned by it; what a spawned process has anew, they have too:
plug-ins not loaded yet, and default signal handlers.

Only for the CPU: CUDA does not survive a fork.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import IO, Any

MESSAGE_BYTES = 1 << 20

RUN_FIRST = "RUN_FIRST_OF_TESTS"
"""The environment variable that names a file to run in a server before its launcher."""


def environment_without_sglangs(folders: Sequence[str]) -> dict[str, str]:
    """This process's, without SGLang's variables, for a process that imports from these folders first."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    return {**found, "PYTHONPATH": os.pathsep.join(folders)}


class ForkServer:
    """The process, as its parent sees it.

    Args:
        log: file that takes what its imports print.
        environment: what must be known when SGLang is imported, and all else.
        modules: what it imports, in this order; of `module:function` it calls the function.
    """

    def __init__(self, log: Path, environment: Mapping[str, str], modules: Sequence[str]) -> None:
        self._log = log
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, log.open("wb") as output:
            # A session of its own, which Ctrl-C does not reach; it ends when this process closes the socket or dies.
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *modules],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(
        self, command: Sequence[str], env: Mapping[str, str], stdout: IO[bytes], stderr: IO[bytes]
    ) -> ForkedProcess:
        """Run `[python, "-m", module, *arguments]` or `[python, file, *arguments]` in a fork, in a session of its own;
        waits for the imports.

        Args:
            env: its environment, beside what the imports have set.
            stdout, stderr: files, which may be one.
        """
        request = {"command": list(command), "environment": dict(env), "folder": os.getcwd()}
        answer = self._ask(request, [stdout.fileno(), stderr.fileno()])
        return ForkedProcess(self, answer["pid"])

    def run(self, command: Sequence[str], log: Path, timeout_s: float) -> str:
        """As `start`, to its end. Returns what it printed. Raises subprocess.TimeoutExpired."""
        with log.open("wb") as output:
            process = self.start(command, {}, output, output)
        try:
            process.wait(timeout_s)
        finally:
            process.terminate()
        return log.read_text(errors="replace")

    def poll(self, pid: int) -> int | None:
        """The exit status of a process started here, negative for a signal; None while it runs."""
        status: int | None = self._ask({"poll": pid})["status"]
        return status

    def close(self) -> None:
        """End it, and with it what was started and still runs."""
        self._control.close()
        self._process.wait()

    def _ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> dict[str, Any]:
        with contextlib.suppress(ConnectionError):
            socket.send_fds(self._control, [json.dumps(request).encode()], list(files))
            if answer := self._control.recv(MESSAGE_BYTES):
                found: dict[str, Any] = json.loads(answer)
                return found
        raise RuntimeError(f"the fork server ended:\n{self._log.read_text(errors='replace')[-5000:]}")


class ForkedProcess:
    """As much of `subprocess.Popen` as its users need."""

    def __init__(self, forks: ForkServer, pid: int) -> None:
        self._forks, self.pid, self.returncode = forks, pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.poll(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired."""
        start = time.monotonic()
        while self.poll() is None:
            if timeout is not None and time.monotonic() - start > timeout:
                raise subprocess.TimeoutExpired("forked process", timeout)
            time.sleep(0.02)
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(self.pid, signal.SIGTERM)


def _serve(control: socket.socket) -> tuple[list[str], dict[str, str]] | None:
    """Answer requests. Returns the command and its environment in each fork, None at the end in the process itself."""
    status: dict[int, int] = {}

    def reap(*signal_arguments: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                status[ended[0]] = os.waitstatus_to_exitcode(ended[1])

    signal.signal(signal.SIGCHLD, reap)
    while True:
        message, files, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
        if not message:
            return None
        request = json.loads(message)
        if "poll" in request:
            control.send(json.dumps({"status": status.get(request["poll"])}).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            os.chdir(request["folder"])
            for ours, standard in zip(files, (1, 2), strict=True):
                os.dup2(ours, standard)
                os.close(ours)
            return request["command"], request["environment"]
        for file in files:
            os.close(file)
        control.send(json.dumps({"pid": pid}).encode())


def _run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Become the launcher."""
    from multiprocessing.context import SpawnProcess

    from sglang.srt.utils.common import kill_itself_when_parent_died

    kill_itself_when_parent_died()
    os.environ.update(environment)
    is_file = command[1] != "-m"
    if is_file:
        sys.path[0] = os.path.dirname(command[1])
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))  # as in a new interpreter
    SpawnProcess._Popen = staticmethod(_fork_as_if_spawned)
    if is_file:
        sys.argv = list(command[1:])
        runpy.run_path(command[1], run_name="__main__")
        return
    if RUN_FIRST in environment:
        runpy.run_path(environment[RUN_FIRST], run_name="__main__")
    sys.argv = list(command[2:])
    runpy.run_module(command[2], run_name="__main__", alter_sys=True)


def _fork_as_if_spawned(process: Any) -> Any:
    """What multiprocessing calls to start a process of its method "spawn"."""
    from multiprocessing.popen_fork import Popen

    process._target = functools.partial(_as_if_spawned, process._target)
    return Popen(process)


def _as_if_spawned(target: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    from sglang.srt import plugins

    plugins._plugins_loaded = False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    target(*args, **kwargs)


def _wait_and_receive(receive: Callable[..., Any], requests: Any, **options: Any) -> Any:
    requests.poll(100)  # ms; ends when there is one
    return receive(requests, **options)


def _index_what_hooks_replace(registry: Any) -> None:
    """For each of our hooks SGLang looks at all names of all modules, which takes each process that has them 2 s. Here
    modules that were imported before a fork are looked at once."""
    holders: dict[int, list[ModuleType]] = {}
    before = {module for module in sys.modules.values() if isinstance(module, ModuleType)}
    for module in before:
        for value in vars(module).values():
            if type(value) in (FunctionType, type) and str(value.__module__).startswith("sglang"):
                holders.setdefault(id(value), []).append(module)

    def propagate(original: object, wrapped: object, source: object) -> int:
        later = [module for module in sys.modules.values() if isinstance(module, ModuleType) and module not in before]
        count = 0
        for module in {*holders.get(id(original), ()), *later} - {source}:
            for name in [name for name, value in list(vars(module).items()) if value is original]:
                setattr(module, name, wrapped)
                count += 1
        return count

    registry._propagate_patch = propagate


def main(control: socket.socket, modules: Sequence[str]) -> None:
    """Import, then serve; returns at the end of the process and of each of its forks."""
    sys.path[0] = os.getcwd()  # as `python -m` has it
    for module in modules:
        if isinstance(found := pkgutil.resolve_name(module), FunctionType):
            found()
    # SGLang wants 10 GiB to stay free beside a host cache, however small that is and whatever else runs.
    importlib.import_module("sglang.srt.mem_cache.pool_host.base").HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    # What deals out requests to data-parallel ranks looks for new ones without a pause, and takes a core for that.
    controller = importlib.import_module("sglang.srt.managers.data_parallel_controller")
    controller.sock_recv = functools.partial(_wait_and_receive, controller.sock_recv)
    _index_what_hooks_replace(importlib.import_module("sglang.srt.plugins.hook_registry"))
    gc.collect()
    gc.freeze()  # so that collections in the forks leave shared pages alone
    if forked := _serve(control):
        _run(*forked)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
