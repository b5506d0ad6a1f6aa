"""The command line starts a server; one that cannot work stops with one message that says what to change."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from bench.server import LAUNCHER
from conftest import Chat, Server
from demo import MODEL
from server_pool import ServerPool

LAUNCH = [sys.executable, "-m", "sglang_mla_ext.launch_server", "--device", "cpu", "--attention-backend", "hybrid_mla"]


def test_command_line_starts_a_server(cramped: Server) -> None:
    """The other servers are forks; this one's processes were spawned by SGLang and imported everything themselves."""
    assert cramped.process.args[1:3] == ["-m", LAUNCHER]
    assert len(cramped.ask(Chat("You are a dictionary.", "Who are you?", 4))[0].tokens) == 4
    assert cramped.info()["counters"]["fallbacks"] == {}


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--disable-radix-cache",), "--disable-radix-cache is not supported yet: remove it."),
        (("--kv-cache-dtype", "fp8_e5m2"), "--kv-cache-dtype fp8_e5m2 is not supported: remove it, or use fp8_e4m3."),
        (
            ("--prefill-attention-backend", "hybrid_mla", "--decode-attention-backend", "torch_native"),
            "it is for decode",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_launch_stops(servers: ServerPool, tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    command = [*LAUNCH, "--model-path", str(MODEL), *flags]
    errors = tmp_path / "stderr"
    with open(os.devnull, "wb") as nowhere, errors.open("wb") as stderr:
        process = servers.popen(command, env=dict(os.environ), stdout=nowhere, stderr=stderr)
    assert process.wait(timeout=120) == 1
    printed = errors.read_text()
    assert message in printed.partition("error: ")[2]
    assert "Traceback" not in printed
