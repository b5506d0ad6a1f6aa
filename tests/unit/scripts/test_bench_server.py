"""A script's server beside others: it takes no port, no log and no answer of theirs."""

from __future__ import annotations

import io
import os
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench.server import ServerFailedError, Started, is_free, listens, started_server, wait_until_ready
from rich.console import Console

CONSOLE = Console(file=io.StringIO())


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server of this process."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Healthy)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_port_that_is_taken(port: int, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    log.write_text("theirs")
    assert not is_free(port)
    with pytest.raises(ServerFailedError, match=f"port {port} is taken"), started_server([], port, log, CONSOLE):
        raise AssertionError("it was started")
    assert log.read_text() == "theirs"


def test_a_server_that_is_not_the_one_that_was_started(port: int, tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as ours:
        try:
            with pytest.raises(ServerFailedError, match=f"another server answers at http://127.0.0.1:{port}"):
                wait_until_ready(ours, f"http://127.0.0.1:{port}", tmp_path / "log", CONSOLE, 20)
        finally:
            ours.kill()
    answering: Any = SimpleNamespace(pid=os.getpid(), poll=lambda: None)
    wait_until_ready(answering, f"http://127.0.0.1:{port}", tmp_path / "log", CONSOLE, 20)
    assert not listens(os.getpid(), port + 1)


def test_a_server_that_ends_by_itself_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("its last words")
    with subprocess.Popen(["sh", "-c", "exit 3"]) as process:
        started = Started(process, "http://127.0.0.1:1", tmp_path / "log", CONSOLE)
        with pytest.raises(ServerFailedError, match=r"the server ended with status 3:\nits last words"):
            started.wait_for_end()
