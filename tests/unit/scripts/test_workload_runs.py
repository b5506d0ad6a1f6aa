"""What a run of a workload measures, from results of SGLang's client; neither a server nor the client is started."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import bench_serving
import numpy as np
import pytest
import typer
from bench import beside, client, server, workload_runs
from bench.client import ClientFailedError
from bench.records import read_records
from bench.server import ServerFailedError, Started
from bench.workload_runs import Run, Timings, record_run, run_workload, runs_tables, timings
from bench.workloads import Workload, make_workload
from demo import MODEL
from typer.testing import CliRunner


def workload(**config: Any) -> Workload:
    config = {"tree": [{"tokens": 5, "requests": 4}], "own_tokens": 2, "output_tokens": 3, **config}
    return make_workload("tiny", config, np.arange(100), (0,))


def details(ttfts: Sequence[float], itls: Sequence[Sequence[float]], duration: float = 2.0) -> dict[str, Any]:
    return {
        "completed": len(ttfts),
        "duration": duration,
        "ttfts": list(ttfts),
        "itls": [list(of_request) for of_request in itls],
        "output_lens": [1 + len(of_request) for of_request in itls],
        "errors": [""] * len(ttfts),
    }


def test_percentiles() -> None:
    """Each request counts once for its first token, each gap once, whoever it belongs to."""
    found = timings(details([0.1, 0.2, 0.3, 9.0], [[0.01, 0.03]] * 3 + [[0.02, 5.0]]), workload(), None, 0.25)
    assert found.ttft_ms == pytest.approx(250) and found.ttft_last_ms == pytest.approx(9000)
    assert 8000 < found.ttft_p99_ms < 9000 and found.itl_ms == pytest.approx(25) and 4000 < found.itl_p99_ms < 5000
    assert found.output_tok_s == 4 * 3 / 2.0 and found.plan_ms_per_step == 0.25


def test_the_full_batch_counts_where_all_are_sent_at_once() -> None:
    result = details([0.1] * 4, [[0.01] * 100] * 4)
    full = timings(result, workload(), None, None)
    assert full.decode_tok_s == pytest.approx(400, rel=0.02) and full.decode_itl_ms == pytest.approx(10)
    assert timings(result, workload(at_a_time=2), None, None).decode_tok_s is None
    assert timings(result, workload(turns=2, tool_tokens=1), None, None).decode_tok_s is None


def test_answers_of_one_token_have_no_gaps() -> None:
    found = timings(details([0.1] * 4, [[]] * 4), workload(output_tokens=1), None, None)
    assert found.itl_ms is found.itl_p99_ms is found.decode_tok_s is found.decode_itl_ms is None


def test_what_the_client_is_given() -> None:
    single, several = workload(stream_interval=4), workload(turns=3, tool_tokens=2)
    assert single.bodies()[0][0]["sampling_params"] == {
        "temperature": 0,
        "max_new_tokens": 3,
        "ignore_eos": True,
        "stream_interval": 4,
    }
    for one in (single, several):
        for bodies, session in zip(one.bodies(), one.sessions, strict=True):
            assert [turn["input_ids"] for turn in bodies] == [turn.ids for turn in session]


class Server:
    """A server's answers, in the order in which it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[Any] = []
        monkeypatch.setattr(workload_runs.requests, "post", self.post)
        monkeypatch.setattr(workload_runs, "server_info", self.info)

    def post(self, url: str, json: Any = None, **options: Any) -> Any:
        self.log.append((url.rpartition("/")[2], json and json["input_ids"]))
        return self

    def raise_for_status(self) -> None: ...

    def info(self, url: str) -> dict[str, Any]:
        self.log.append("info")
        return {}


def test_the_cache_holds_the_shared_prompts_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What puts them there is not counted."""
    server = Server(monkeypatch)
    tree = [{"tokens": 5, "requests": 2, "below": [{"tokens": 3, "requests": 1}]}, {"requests": 1}]

    def run(url: str, sent: Workload, *others: Any) -> dict[str, Any]:
        server.log.append(sent.at_a_time)
        assert (sent.requests, sent.output_tokens) == (4, 12)
        return details([0.1] * 4, [[0.01, 0.01]] * 4)

    monkeypatch.setattr(workload_runs, "run_client", run)
    asked = workload(tree=tree, at_a_time=3)
    run_workload("http://host", asked, tmp_path / "log")
    (longest,) = asked.cached
    assert server.log == [("flush_cache", None), ("generate", longest), "info", 3, "info"]
    assert len(longest) == 8


def test_a_warm_up_is_not_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It meets the shared prompt in the cache, which is not emptied behind it."""
    server = Server(monkeypatch)

    def run(url: str, sent: Workload, *others: Any) -> dict[str, Any]:
        server.log.append(sent.requests)
        return details([0.1] * 4, [[0.01, 0.01]] * 4)

    monkeypatch.setattr(workload_runs, "run_client", run)
    asked = workload()
    found = run_workload("http://host", replace(asked, warm_up=asked.sessions[:2]), tmp_path / "log")
    assert server.log == [("flush_cache", None), ("generate", asked.cached[0]), 2, "info", 4, "info"]
    assert found.output_tok_s == 4 * 3 / 2.0


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Run the client for two requests of three tokens each; what it writes is given, None for nothing."""

    def run(result: dict[str, Any] | None, status: int = 0, **options: Any) -> dict[str, Any]:
        def run_script(arguments: list[str], log: Path) -> int:
            flags = dict(zip(arguments[3::2], arguments[4::2], strict=True))
            assert flags.get("--max-concurrency") == options.get("expected")
            lines = Path(arguments[0]).read_text().splitlines()
            assert [json.loads(line)["turns"] for line in lines] == asked.bodies()
            if result is not None:
                Path(flags["--output-file"]).write_text(json.dumps(result))
            return status

        monkeypatch.setattr(client, "run_script", run_script)
        asked = workload(tree=[{"tokens": 5, "requests": 2}], at_a_time=options.get("at_a_time"))
        return client.run_client("http://host", asked, tmp_path / "log")

    return run


def test_the_client_answers(answer: Callable[..., dict[str, Any]]) -> None:
    result = details([0.1, 0.2], [[0.1, 0.1], [0.1, 0.1]])
    assert answer(result) == result
    assert answer(result, at_a_time=1, expected="1") == result


def test_what_counts_as_a_failure(answer: Callable[..., dict[str, Any]]) -> None:
    good = details([0.1, 0.2], [[0.1, 0.1], [0.1, 0.1]])
    with pytest.raises(ClientFailedError, match="status 1"):
        answer(good, status=1)
    with pytest.raises(ClientFailedError, match="status 0"):
        answer(None)
    with pytest.raises(ClientFailedError, match=r"1 of 2 requests answered.* too long"):
        answer(good | {"completed": 1, "errors": ["", "prompt too long"]})
    with pytest.raises(ClientFailedError, match="5 of 6 tokens"):  # as an answer that was aborted
        answer(good | {"output_lens": [3, 2]})


@pytest.mark.parametrize("status", [0, 3])
def test_the_client_is_a_process_of_its_own(status: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script, log = tmp_path / "script.py", tmp_path / "log"
    script.write_text("import sys\nprint('ran', *sys.argv[1:])\nsys.exit(int(sys.argv[1]))\n")
    monkeypatch.setattr(client, "SCRIPT", script)
    monkeypatch.setattr(client, "IMPORTED", ())
    assert client.run_script([str(status), "--flag"], log) == status
    assert log.read_text() == f"ran {status} --flag\n"


STEADY = Timings(2.0, 100.0, None, None, 10.0, 20.0, 30.0, 1.0, 2.0, None, None)


def test_records(tmp_path: Path) -> None:
    out, sharing = tmp_path / "records.jsonl", {"mode": "naive", "steps": {"naive": 3}, "group_size": 4}
    ours = replace(STEADY, decode_tok_s=800.0, plan_ms_per_step=0.12345, sharing=sharing)
    asked = workload(name="A", turns=2, tool_tokens=1, at_a_time=2)
    record_run(out, Run("hybrid_mla --hybrid-mla-mode naive", workload(), 1, ours), {"tp": 1})
    record_run(out, Run("flashmla", asked, 2, STEADY), {"tp": 1})
    first, second = read_records(out)
    assert (first["bench"], first["impl"], first["run"]) == ("tiny", "hybrid_mla", 1)
    assert first["case"]["flags"] == "--hybrid-mla-mode naive" and first["case"]["tp"] == 1
    assert (first["step_ms"], first["plan_ms_per_step"], first["hybrid_mla"]) == (5.0, 0.1235, sharing)
    assert (second["impl"], second["run"], second["plan_ms_per_step"]) == ("sglang_flashmla", 2, None)
    assert second["decode_tok_s"] is second["step_ms"] is None
    assert {name: second["case"][name] for name in ("prompt", "prefix", "requests", "concurrency", "output")} == {
        "prompt": "A",
        "prefix": 5,
        "requests": 8,
        "concurrency": 2,
        "output": 24,
    }
    assert second["case"]["digest"] == asked.digest != first["case"]["digest"]


def test_the_table_has_medians_and_ratios() -> None:
    runs = [
        Run("hybrid_mla", workload(), i, replace(STEADY, output_tok_s=rate)) for i, rate in enumerate((150, 900, 300))
    ]
    runs += [Run("flashmla", workload(), 1, STEADY), Run("hybrid_mla", workload(name="B"), 1, STEADY)]
    both, alone = (text.splitlines() for text in runs_tables(runs, ["hybrid_mla", "flashmla"]))
    assert [both[0], alone[0]] == [f"{name}: medians over runs" for name in ("tiny", "tiny B")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in (*both[3:], *alone[3:])]
    assert [(row[0], row[1], row[2], row[-1]) for row in rows] == [
        ("hybrid_mla", "3", "300", "3.00x"),
        ("flashmla", "1", "100", "1.00x"),
        ("hybrid_mla", "1", "100", "2.00"),  # the last column is the time between tokens: there is no ratio
    ]


def test_ratios_are_of_what_others_wait_for_where_they_do() -> None:
    ours = replace(STEADY, output_tok_s=90.0, steady_tok_s=400.0)
    runs = [Run("hybrid_mla", workload(), 1, ours), Run("flashmla", workload(), 1, replace(STEADY, steady_tok_s=200.0))]
    (text,) = runs_tables(runs, ["hybrid_mla", "flashmla"])
    assert "2.00x" in text


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(bench_serving.main)
    return CliRunner().invoke(app, ["--model", str(MODEL), *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workload", "mixed", "--concurrency", "8"), "has its own prompts"),
        (("--workload", "mmlu"), "no tree"),
        (("--workload", "nothing"), "no configuration"),
        (("--workload", "/nowhere/x.json"), "No such file"),
    ],
)
def test_what_the_command_refuses(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    found = invoke(*arguments, "--log-folder", str(tmp_path))
    assert found.exit_code == 2 and message in " ".join(found.output.split())


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "start bad, ready bad, run bad, end bad, start good, ready good, {runs}, end good, start ill, end ill"),
        (
            ["--together"],
            "start bad, start good, start ill, ready bad, ready good, run bad, {runs}, end ill, end good, end bad",
        ),
    ],
)
def test_a_backend_that_fails_does_not_end_the_others(
    flags: list[str], expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One does not answer all, one does not start. Those that start together are measured when all are there."""
    happened: list[str] = []
    waited: list[str] = []

    @contextlib.contextmanager
    def started(arguments: list[str], *others: Any) -> Iterator[Started]:
        name = arguments[1]
        assert arguments[arguments.index("--max-running-requests") + 1] == "256"
        happened.append(f"start {name}")
        try:
            yield Started(name, f"url of {name}", tmp_path, None)  # type: ignore[arg-type]
        finally:
            happened.append(f"end {name}")

    def wait(name: str, *others: Any) -> None:
        waited.append(name)
        if name == "ill":
            raise ServerFailedError("no memory")
        happened.append(f"ready {name}")

    def run(url: str, *others: Any) -> Timings:
        name = url.removeprefix("url of ")
        happened.append(f"run {name}")
        if name == "bad":
            raise ClientFailedError("not all answered")
        return STEADY

    monkeypatch.setattr(beside, "started_server", started)
    monkeypatch.setattr(server, "wait_until_ready", wait)
    monkeypatch.setattr(beside, "run_workload", run)
    backends = [word for name in ("bad", "good", "ill") for word in ("--backend", name)]
    found = invoke("--workload", "burst", "--runs", "2", *backends, *flags, "--log-folder", str(tmp_path))
    assert found.exit_code == 1 and found.output.count("run 2") == 2
    assert "bad: not all answered" in found.output and "ill: no memory" in found.output
    assert waited == ["bad", "good", "ill"]  # once each
    assert ", ".join(happened) == expected.format(runs=", ".join(["run good"] * 4))
