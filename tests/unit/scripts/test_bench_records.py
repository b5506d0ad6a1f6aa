"""Records of measurements: what is in them, and that files only grow."""

from __future__ import annotations

import subprocess
import sys
from datetime import datetime, timedelta, timezone
from importlib.metadata import version

import pytest
from bench import records


def test_a_record_holds_what_repeats_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "bench.py"), "--name", "two words"])
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "made" / "serving.jsonl"
    record = records.write_record(
        path, bench="serving", impl="hybrid_mla", case={"prefix": 7069, "concurrency": 128}, decode_tok_s=1.5, ttft_ms=2
    )
    assert records.read_records(path) == [record]
    assert record["bench"] == "serving"
    assert record["impl"] == "hybrid_mla"
    assert record["case"] == {"prefix": 7069, "concurrency": 128}
    assert (record["decode_tok_s"], record["ttft_ms"]) == (1.5, 2)
    assert record["torch"] == version("torch")
    assert record["command"] == "python bench.py --name 'two words'"
    age = datetime.now(timezone.utc) - datetime.fromisoformat(record["date"])
    assert timedelta(0) <= age < timedelta(minutes=1)


def test_records_are_appended(tmp_path):
    path = tmp_path / "r.jsonl"
    for value in (1, 2):
        records.write_record(path, bench="attention", impl="naive", case={}, gpu="NVIDIA H200", command="x", ms=value)
    assert [(r["ms"], r["gpu"], r["command"]) for r in records.read_records(path)] == [
        (1, "NVIDIA H200", "x"),
        (2, "NVIDIA H200", "x"),
    ]


def test_a_package_that_is_not_installed_has_no_version():
    assert records.package_version("no-such-package-here") is None


@pytest.mark.parametrize(
    ("stdout", "status", "expected"),
    [("NVIDIA H200\nNVIDIA H200\n", 0, "NVIDIA H200"), ("", 0, "cpu"), ("no devices", 9, "cpu")],
)
def test_the_driver_names_the_device(monkeypatch, stdout, status, expected):
    monkeypatch.setattr(records.shutil, "which", lambda name: "/bin/" + name)
    answer = subprocess.CompletedProcess([], status, stdout, "")
    monkeypatch.setattr(records.subprocess, "run", lambda *args, **kwargs: answer)
    assert records.device_name.__wrapped__() == expected


def test_without_a_driver_the_device_is_the_cpu(monkeypatch):
    monkeypatch.setattr(records.shutil, "which", lambda name: None)
    assert records.device_name.__wrapped__() == "cpu"


def test_outside_of_a_repository_there_is_no_commit(monkeypatch, tmp_path):
    monkeypatch.setattr(records, "__file__", str(tmp_path / "records.py"))
    assert records.commit.__wrapped__() is None
