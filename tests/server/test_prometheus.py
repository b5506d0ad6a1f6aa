"""The dashboard's and the alerts' queries, asked of a real Prometheus that scrapes a real server; and each alert, given
series that should fire it, and series that should not."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import yaml
from bench.server import free_port
from conftest import Chat, Server
from test_answers import SYSTEM, question

CONFIGS = Path(__file__).parents[2] / "configs"
ALERTS = CONFIGS / "prometheus" / "alerts.yml"
pytestmark = pytest.mark.skipif(
    not shutil.which("prometheus"), reason="needs Prometheus: apt-get install --no-install-recommends prometheus"
)


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """A Prometheus with the example's alerts that scrapes a server every second; yields its address."""
    config = yaml.safe_load((CONFIGS / "prometheus" / "scrape.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "scrape_timeout": "1s"}
    config["rule_files"] = [str(ALERTS)]
    config["scrape_configs"][0]["static_configs"] = [{"targets": [target]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    url = f"http://127.0.0.1:{free_port()}"
    command = [
        *("prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"),
        f"--web.listen-address={url.removeprefix('http://')}",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield url
    finally:
        process.terminate()
        process.wait(30)


def ask(url: str, query: str) -> list[dict[str, Any]]:
    answer = requests.get(f"{url}/api/v1/query", params={"query": query}, timeout=30).json()
    assert answer["status"] == "success", (query, answer)
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result


def value_of(result: list[dict[str, Any]]) -> float:
    """Of a query that finds one server."""
    (series,) = result
    return float(series["value"][1])


def dashboard_queries() -> dict[str, str]:
    """By panel and letter, as Grafana asks them, over half a minute."""
    panels = json.loads((CONFIGS / "grafana" / "hybrid_mla.json").read_text())["panels"]
    queries = {f"{panel['title']} {one['refId']}": one["expr"] for panel in panels for one in panel["targets"]}
    assert len(queries) > 12
    return {
        name: query.replace("$__rate_interval", "30s").replace("$instance", ".*") for name, query in queries.items()
    }


def test_every_query_finds_something(hybrid: Server, tmp_path: Path) -> None:
    """But for what is counted by reason, of which there is none yet, and alerts, none of which fires."""
    by_reason = ("Fall-backs A", "Prefill passes not mixed A")
    with prometheus(tmp_path, hybrid.base_url.removeprefix("http://")) as url:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:  # until there are a few samples of everything
            hybrid.ask(*(Chat(SYSTEM, question(i), max_tokens=8) for i in range(3)))
            with contextlib.suppress(requests.RequestException):
                found = {name: ask(url, query) for name, query in dashboard_queries().items()}
                missing = [name for name in found if not found[name] and name not in by_reason]
                if not missing and value_of(found["Decode steps by mode A"]) > 0:
                    break
            time.sleep(0.5)
        else:
            raise AssertionError(missing)
        assert 0.3 < value_of(found["Shared prefix tokens a step did not read again A"]) < 1
        for rule in rules():
            ask(url, rule["expr"])
            for metric in re.findall(r"sglang:\w+", rule["expr"]):
                assert ask(url, metric) or metric == "sglang:hybrid_mla_fallbacks_total", metric
        groups = requests.get(f"{url}/api/v1/rules", timeout=30).json()["data"]["groups"]
        assert len(groups) == 1 and all(rule["health"] != "err" for rule in groups[0]["rules"]), groups


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


REASON = "plan_pass"
NORMAL = "prefix_memory_full", "more_groups", "more_requests"  # under load
FIRING: dict[str, dict[str, str]] = {
    "HybridMLAFallsBack": {f'sglang:hybrid_mla_fallbacks_total{{reason="{REASON}"}}': "0+1x60"},
    "HybridMLAIsWrong": {"sglang:hybrid_mla_shadow_failures_total": "0x50 1x10"},
    "HybridMLASharesNothing": {
        "sglang:hybrid_mla_steps_absorb_total": "0+500x60",
        "sglang:hybrid_mla_steps_naive_total": "7x60",
        "sglang:hybrid_mla_steps_grouped_total": "0x60",
        "sglang:num_running_reqs": "100x60",
    },
    "HybridMLANeedsMemory": {"sglang:hybrid_mla_tokens_without_memory": "20000x60"},
    "HybridMLAThrashes": {
        "sglang:hybrid_mla_expanded_tokens_total": "0+256000x60",
        "sglang:hybrid_mla_evictions_total": "0+950x60",
    },
    "HybridMLAPlansSlowly": {
        "sglang:hybrid_mla_plan_seconds_total": "0+9x60",
        "sglang:hybrid_mla_forward_passes_total": "0+3000x60",
    },
    "HybridMLAIsGone": {"sglang:num_running_reqs": "3x60", "sglang:hybrid_mla_budget_bytes": "1e10x30"},
}
"""Series, a sample a minute, that fire each alert."""

QUIET: dict[str, str] = {
    f'sglang:hybrid_mla_fallbacks_total{{reason="{REASON}"}}': "3x60",
    "sglang:hybrid_mla_shadow_failures_total": "0x60",
    "sglang:hybrid_mla_steps_absorb_total": "0+500x60",
    "sglang:hybrid_mla_steps_naive_total": "0+500x60",
    "sglang:hybrid_mla_steps_grouped_total": "0x60",
    "sglang:num_running_reqs": "100x60",
    "sglang:hybrid_mla_tokens_without_memory": "0x60",
    "sglang:hybrid_mla_expanded_tokens_total": "0+256000x60",
    "sglang:hybrid_mla_evictions_total": "0+100x60",
    "sglang:hybrid_mla_plan_seconds_total": "0+1x60",
    "sglang:hybrid_mla_forward_passes_total": "0+3000x60",
    "sglang:hybrid_mla_budget_bytes": "1e10x60",
}
"""Those of a server that works, and once fell back, long ago."""


def test_alerts(tmp_path: Path) -> None:
    """By promtool: each fires from its series, and none does from a server's that works."""
    assert [rule["alert"] for rule in rules()] == list(FIRING)

    def given(series: dict[str, str], expected: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
        """What promtool is to find an hour later, by alert."""

        def labelled(name: str) -> str:
            return name.replace("{", '{instance="a",') if "{" in name else name + '{instance="a"}'

        return {
            "interval": "1m",
            "input_series": [{"series": labelled(name), "values": samples} for name, samples in series.items()],
            "alert_rule_test": [
                {"eval_time": "60m", "alertname": alert, "exp_alerts": found} for alert, found in expected.items()
            ],
        }

    another_server = {"sglang:num_running_reqs": "100x60"}  # with another backend, all the time
    too_much = {f'sglang:hybrid_mla_fallbacks_total{{reason="{reason}"}}': "0+1x60" for reason in NORMAL}
    tests = [given(series, {alert: [] for alert in FIRING}) for series in (QUIET, another_server, too_much)]
    for rule in rules():
        labels = rule["labels"] | {"instance": "a"}
        if "reason" in rule["expr"]:
            labels["reason"] = REASON
        tests.append(given(FIRING[rule["alert"]], {rule["alert"]: [{"exp_labels": labels}]}))
    first = {name: "_x55 1x5" for name in FIRING["HybridMLAFallsBack"]}
    labels = rules()[0]["labels"] | {"instance": "a", "reason": REASON}
    tests.append(given(first, {"HybridMLAFallsBack": [{"exp_labels": labels}]}))
    shown = {"labels": f'{{instance="a", reason="{REASON}"}}', "value": 1}
    for series, samples in ((first, [shown]), (QUIET, [])):  # the dashboard
        query = {"expr": dashboard_queries()["Fall-backs A"], "eval_time": "60m", "exp_samples": samples}
        tests.append(given(series, {}) | {"promql_expr_test": [query]})
    # promtool compares annotations as well, which are for people.
    bare = yaml.safe_load(ALERTS.read_text())
    for rule in bare["groups"][0]["rules"]:
        del rule["annotations"]
    (tmp_path / "alerts.yml").write_text(yaml.safe_dump(bare))
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "tests": tests}))
    found = subprocess.run(["promtool", "test", "rules", tmp_path / "tests.yml"], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    checked = subprocess.run(["promtool", "check", "rules", ALERTS], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
