"""Tiny workloads of every kind through `bench_serving.py`, against servers that run: what is sent, and the records."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bench_serving
import numpy as np
import pytest
import typer
from bench import client, workload_runs
from bench.records import read_records
from conftest import Reference, Server
from demo import MODEL
from server_pool import ServerPool
from typer.testing import CliRunner

REPOSITORY = Path(__file__).resolve().parents[2]
TINY: dict[str, dict[str, Any]] = {
    "mixed": {
        "tree": [{"tokens": 96, "requests": 3, "below": [{"tokens": 64, "requests": 3}]}, {"requests": 2}],
        "own_tokens": [3, 20],
        "output_tokens": 96,  # a rate needs all to decode for a quarter of that
    },
    "churn": {
        "tree": [{"tokens": 96, "requests": 8}],
        "own_tokens": [3, 20],
        "output_tokens": [3, 9],
        "at_a_time": 3,
        "stream_interval": 2,
    },
    "agents": {
        "tree": [{"tokens": 96, "requests": 3}],
        "own_tokens": [3, 9],
        "output_tokens": [4, 7],
        "turns": 3,
        "tool_tokens": [5, 20],
    },
    "burst": {
        "own_tokens": 8,
        "output_tokens": 2,
        "cases": [{"name": name, "tree": [{"tokens": size, "requests": 4}]} for name, size in (("A", 96), ("B", 64))],
    },
}


@pytest.fixture
def measure(servers: ServerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Measure a server: `(server, backend, workloads) -> records`. Its client is a fork of what the servers are."""

    def run_script(arguments: Sequence[str], log: Path) -> int:
        command = [sys.executable, "-m", "scripts.bench.sglang_client", *arguments]
        with log.open("ab") as output:
            process = servers.popen(command, env=dict(os.environ), stdout=output, stderr=output)
        return process.wait(timeout=120)

    monkeypatch.setattr(client, "run_script", run_script)
    monkeypatch.chdir(REPOSITORY)
    app = typer.Typer()
    app.command()(bench_serving.main)

    def run(server: Server, backend: str, *workloads: str, runs: int = 1) -> list[dict[str, Any]]:
        out = tmp_path / f"{backend}.jsonl"
        arguments = ["--model", str(MODEL), "--base-url", server.base_url, "--backend", backend, "--runs", str(runs)]
        for name in workloads:
            file = tmp_path / f"{name}.json"
            file.write_text(json.dumps(TINY[name]))
            arguments += ["--workload", str(file)]
        done = CliRunner().invoke(app, [*arguments, "--out", str(out), "--log-folder", str(tmp_path)])
        assert done.exit_code == 0, f"{done.output}\n{(tmp_path / 'running.client.log').read_text()[-3000:]}"
        return read_records(out)

    return run


@pytest.fixture
def details(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Results of SGLang's client, one for each time that it runs."""
    found: list[dict[str, Any]] = []

    def run(*arguments: Any) -> dict[str, Any]:
        found.append(client.run_client(*arguments))
        return found[-1]

    monkeypatch.setattr(workload_runs, "run_client", run)
    return found


def test_every_workload(hybrid: Server, measure: Any, details: list[dict[str, Any]]) -> None:
    records = measure(hybrid, "hybrid_mla", *TINY)
    assert [record["bench"] for record in records] == ["mixed", "churn", "agents", "burst", "burst"]
    for record in records:
        assert record["output_tok_s"] == pytest.approx(record["case"]["output"] / record["duration_s"], rel=0.05)
        assert 0 < record["ttft_ms"] <= record["ttft_p99_ms"] <= record["ttft_last_ms"]
        # Both tokens of an answer in a burst may come in one piece, if SGLang sends more slowly than it decodes.
        in_one_piece = record["bench"] == "burst" and record["itl_ms"] is record["itl_p99_ms"] is None
        assert in_one_piece or 0 <= record["itl_ms"] <= record["itl_p99_ms"]
        assert record["impl"] == "hybrid_mla" and record["plan_ms_per_step"] > 0
        assert record["hybrid_mla"]["steps"]["naive"] > 0 or record["bench"] == "burst"
    mixed, churn, agents, *bursts = records
    # No rate, if on a loaded machine one of the requests came when the others had nearly ended.
    of_mixed, *_ = details
    full = client.full_batch(np.array(of_mixed["ttfts"]), [np.array(gaps) for gaps in of_mixed["itls"]])
    rate, between = full or (None, None)
    assert mixed["decode_tok_s"] == (rate and pytest.approx(rate, abs=0.1))
    assert mixed["step_ms"] == (rate and pytest.approx(8e3 / rate, rel=1e-2))
    assert mixed["decode_itl_ms"] == (between and pytest.approx(between * 1e3, abs=1e-3))
    assert churn["decode_tok_s"] is agents["decode_tok_s"] is None
    assert [record["case"]["requests"] for record in records] == [8, 8, 9, 4, 4]
    assert [record["case"]["concurrency"] for record in records] == [8, 3, 3, 4, 4]
    assert [(record["case"]["prompt"], record["case"]["prefix"]) for record in bursts] == [("A", 96), ("B", 64)]


def test_a_stock_backend_in_two_runs(stock: Reference, measure: Any) -> None:
    first, second = measure(stock, "torch_native", "churn", runs=2)
    assert (first["run"], second["run"]) == (1, 2) and first["case"] == second["case"]
    assert first["impl"] == "sglang_torch_native"
    assert first["plan_ms_per_step"] is first["hybrid_mla"] is None
