"""Tests of what ranks compare and share at start, by Gloo as in a server."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from sharded_ranks import CHUNK

from sglang_mla_ext.adapter.ranks import ranks
from sglang_mla_ext.options import HybridMLAOptions
from sglang_mla_ext.prefix.planner.gpu_rates import GpuRates
from sglang_mla_ext.prefix.sharded.names import KEY_BYTES
from sglang_mla_ext.reasons import NotSharded

H200 = GpuRates.from_json("h200")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """Number of ranks -> what each of them found."""
    command = [
        sys.executable,
        str(Path(__file__).parents[2].joinpath("gloo_ranks.py")),
        str(tmp_path_factory.mktemp("ranks")),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "2", "4"], capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    of_all = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[{")]
    return {len(of_ranks): of_ranks for of_ranks in of_all}


@pytest.mark.parametrize("count", [2, 4])
def test_ranks_in_processes_of_their_own(count: int, found: dict[int, list[dict[str, Any]]]) -> None:
    """They have one key; options that differ stop all of them with both values; and where the plan of one of them is
    changed by hand, all share nothing in that step, and nobody waits."""
    one = found[count][0]
    assert found[count] == [one] * count
    others = "rank 1" if count == 2 else "ranks 1, 2, 3"
    assert f". --hybrid-mla-min-prefix-len: 32 on rank 0, 2048 on {others}. " in one["differ"]
    assert len(bytes.fromhex(one["key"])) == KEY_BYTES
    before, faulty, after = one["steps"][-3:]
    assert (
        before == [[0, 4 * CHUNK, list(range(count))]]
        and faulty == NotSharded.PLANS_DIFFER.code
        and not one["failures"]
    )
    assert after == [[0, 4 * CHUNK, [2 * row for row in range(count)]]]


def test_each_start_has_a_key_of_its_own(found: dict[int, list[dict[str, Any]]]) -> None:
    assert found[2][0]["key"] != found[4][0]["key"]


def rules(monkeypatch: pytest.MonkeyPatch, rates: GpuRates = H200, most_mixed: int = 256, **asked: str) -> Any:
    for name, value in asked.items():
        monkeypatch.setenv(f"SGLANG_HYBRID_MLA_{name.upper()}", value)
    found = ranks.rules(HybridMLAOptions.from_env(), rates, most_mixed)
    return {name: str(value) for name, value in found.items()}


CHANGED = {"prefix_dtype": "bf16", "mode": "absorb", "dp_routing": "prefix", "prefix_sharding": "off"}
"""Other values than the default, of options that are no numbers."""


@pytest.mark.parametrize("option", [each.name for each in fields(HybridMLAOptions)])
def test_every_option_is_compared(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = rules(monkeypatch)
    default, other = getattr(HybridMLAOptions(), option), CHANGED.get(option, "1024")
    lines = ranks.differing([mine, rules(monkeypatch, **{option: other})])
    other = str(getattr(HybridMLAOptions.from_env(), option))
    assert f"--hybrid-mla-{option.replace('_', '-')}: {default} on rank 0, {other} on rank 1" in lines
    more = [line for line in lines if not line.startswith("--")]
    assert len(lines) - len(more) == 1 and all(line.startswith("memory for expanded") for line in more)


def test_releases_and_gpus_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = rules(monkeypatch)
    assert ranks.differing([mine, rules(monkeypatch), mine]) == []
    (line,) = ranks.differing([mine, rules(monkeypatch, GpuRates.from_json("h100")), mine])
    assert line.startswith(f"rates of the GPU: {H200.name} (") and "on ranks 0, 2, " in line and "on rank 1" in line
    (line,) = ranks.differing([mine, rules(monkeypatch, replace(H200, l2_bytes=1))])
    assert line.count(H200.name) == 2, "of one name with other numbers"
    assert ranks.differing([mine, rules(monkeypatch, most_mixed=64)]) == [
        "mixed tokens in a step: 256 on rank 0, 64 on rank 1"
    ]
    monkeypatch.setattr(ranks, "installed_version", lambda: "0.5.0")
    monkeypatch.setattr(ranks, "__version__", "0.0.1")
    package, sglang = ranks.differing([mine, rules(monkeypatch)])
    assert package.startswith("sglang-mla-ext: ") and package.endswith("0.0.1 on rank 1")
    assert sglang.startswith("sglang: ") and sglang.endswith("0.5.0 on rank 1")
    assert ranks.differing([{"old": "1"}, {}]) == ["old: 1 on rank 0, not known on rank 1"]


def test_one_rank_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "tp_group", lambda: pytest.fail("there is no group"))
    ranks.check_alike({"alike": 1})
