"""The status routes and the page on an app with SGLang's own API key, and `sglang-mla top` that asks it."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import browser
import pytest
from playwright.sync_api import expect
from rich.console import Console
from typer.testing import CliRunner

from sglang_mla_ext import cli, status, top
from sglang_mla_ext.adapter.launch import limits, status_routes
from sglang_mla_ext.observe import Counters, report
from sglang_mla_ext.prefix.planner.plan import Plan

DOCS = Path(__file__).resolve().parents[2] / "docs"
NOT_MIXED = "prefill pass not mixed: 2 × hidden_states"
NASTY = '<img src=x onerror="document.title=1"> & \x1b[31m'


def entry(saved: int = 0, **more: Any) -> dict[str, Any]:
    """As Steps.status makes it."""
    counters = Counters(shared_tokens_saved=saved, steps_naive=7)
    counters.fallbacks[NASTY] = 3
    counters.not_mixed["hidden_states"] = 2
    common = {"start": 0, "tokens": 512, "holders": 8, "mode": "naive", "expanded_bytes": 3 << 20}
    saves = {"tokens_saved": 3584, "bytes_saved": 5 << 20}
    segments = [
        {"id": 4, "parent": None, **common, **saves},
        {"id": 9, "parent": 4, **common, **saves, "start": 512, "mode": "grouped_absorb", "holders": 2},
        {
            "id": 2,
            "parent": 9,
            **common,
            "start": 768,
            "mode": "kept",
            "holders": 1,
            "tokens_saved": 0,
            "bytes_saved": 0,
        },
    ]
    return {
        **report(counters, Plan(11), 6 << 20, 20 << 20, 30),
        **{"rank": 0, "requests": 11, "pause": 64, "description": "naive and so on", "segments": segments},
        **more,
    }


class Manager:
    """SGLang's tokenizer manager of two data-parallel ranks."""

    server_args: Any = None

    def __init__(self) -> None:
        self.asked = 0

    async def get_internal_state(self) -> list[dict[str, Any]]:
        """Answers come in another order each time."""
        self.asked += 1
        states = [
            {"hybrid_mla": entry(self.asked * 1000), "prompt": "secret words"},
            {"hybrid_mla": entry(pause=0, rank=1)},
        ]
        return states[:: -1 if self.asked % 2 else 1]


class Served:
    """An app with our routes, on a port of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, api_key: str | None) -> None:
        import uvicorn
        from fastapi import FastAPI
        from sglang.srt.utils import auth

        self.manager, app = Manager(), FastAPI()
        module: Any = SimpleNamespace(get_global_state=lambda: SimpleNamespace(tokenizer_manager=self.manager))
        monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.http_server", module)
        monkeypatch.setattr(limits, "is_asked_for", lambda args: True)
        if api_key is None:
            status_routes.after_app_is_looked_at(auth.app_has_admin_force_endpoints(app), app)
        else:
            keys = {"api_key": api_key, "admin_api_key": None}
            status_routes.after_key_is_asked_for(auth.add_api_key_middleware(app, **keys), app, **keys)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],))
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()

    def get(self, path: str, key: str | None = None, method: str = "GET") -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(self.url + path, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@contextlib.contextmanager
def serving(monkeypatch: pytest.MonkeyPatch, api_key: str | None = None) -> Iterator[Served]:
    served = Served(monkeypatch, api_key)
    try:
        yield served
    finally:
        served.close()


def test_the_published_schema_is_current() -> None:
    assert (DOCS / "status.schema.json").read_text() == status.schema() + "\n", "python -m sglang_mla_ext.status"


def test_it_loads_without_docstrings() -> None:
    subprocess.run([sys.executable, "-OO", "-c", "import sglang_mla_ext.status, sglang_mla_ext.cli"], check=True)


def test_every_field_is_described() -> None:
    found = json.loads(status.schema())
    for name, kind in {**found["$defs"], "Status": found}.items():
        for field, said in kind["properties"].items():
            assert said.get("description") or "$ref" in said, f"{name}.{field}"


def test_nothing_but_the_schema_is_answered() -> None:
    """Whatever else a rank reports: the group list, or something that a later SGLang puts beside it."""
    states = [{"hybrid_mla": {**entry(), "text": "secret words"}, "input_ids": [1, 2]}]
    found = status.status(states, 5.0).model_dump()
    assert "secret" not in json.dumps(found) and "input_ids" not in json.dumps(found)
    assert set(found["ranks"][0]) == set(status.Rank.model_fields)
    assert status.status([{}], 5.0).ranks == []


def test_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch) as served:
        code, body = served.get("/hybrid_mla/status")
        assert code == 200 and [rank["rank"] for rank in json.loads(body)["ranks"]] == [0, 1]
        assert "secret" not in body
        assert served.get("/hybrid_mla") == (200, status_routes.page().decode())
        for _ in range(5):
            served.get("/hybrid_mla/status")
        assert served.manager.asked < 5, "many viewers are one"
        assert "/hybrid_mla/status" in json.loads(served.get("/openapi.json")[1])["paths"]


def test_sglangs_key_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, "sesame") as served:
        for key in (None, "wrong"):
            assert served.get("/hybrid_mla/status", key) == (401, '{"error":"Unauthorized"}')
            assert served.get("/hybrid_mla", key) == (401, status_routes.page().decode())
            assert served.get("/other", key) == (401, '{"error":"Unauthorized"}')
        assert served.manager.asked == 0
        assert served.get("/hybrid_mla/status", "sesame")[0] == served.get("/hybrid_mla", "sesame")[0] == 200
        assert served.get("/other", "sesame")[0] == 404


def test_the_head_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch) as served:
        assert [served.get(path, method="HEAD") for path in ("/hybrid_mla", "/hybrid_mla/status")] == [(200, "")] * 2
        assert set(json.loads(served.get("/openapi.json")[1])["paths"]["/hybrid_mla"]) == {"get"}
    with serving(monkeypatch, "sesame") as served:
        for path in ("/hybrid_mla", "/hybrid_mla/status"):
            assert served.get(path, method="HEAD") == (401, "") and served.get(path, "sesame", "HEAD") == (200, "")
        assert served.get("/hybrid_mla", method="POST")[0] == 401


def test_a_server_with_another_backend_has_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch) as served:
        monkeypatch.setattr(limits, "is_asked_for", lambda args: False)
        app = SimpleNamespace(routes=[])
        status_routes.after_app_is_looked_at(False, app)
        del served
    broken = SimpleNamespace()
    status_routes.after_app_is_looked_at(False, broken)  # logged, and the server serves


def test_the_page_needs_nothing_from_outside() -> None:
    page = status_routes.page().decode()
    assert "://" not in page and "innerHTML" not in page and " src=" not in page and "<link" not in page


def test_the_page_asks_for_the_key_and_shows_text_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, "sesame") as served, browser.opened() as (page, errors):
        page.goto(f"{served.url}/hybrid_mla")
        expect(page.locator("#ask")).to_be_visible()
        state, sections = page.locator("#state"), page.locator("section")
        expect(state).to_have_text("locked")
        page.fill("#key", "wrong")
        page.click("button")
        expect(state).to_have_text("that is not the key")
        page.fill("#key", "sesame")
        page.click("button")
        expect(sections).to_have_count(2)
        said = page.inner_text("body")
        assert "3 × <img src=x onerror" in said and page.title() == "hybrid_mla"
        assert "paused after a failure, for 64 forward passes" in said and "30 tokens worth expanding" in said
        assert NOT_MIXED in said
        assert said.count("tokens 512 to 1,024 · 2 holders · continues #4") == 2
        assert said.count("continues #9 · its first 256 tokens are stored in #9, too") == 2
        box = "(box => [box.left, box.right].map(Math.round))(each.getBoundingClientRect())"
        first, second, kept = page.evaluate(f"[...document.querySelectorAll('li i')].slice(0, 3).map(each => {box})")
        assert first[1] == second[0] > first[0] and second[0] < kept[0] < second[1] < kept[1], (
            "each where its tokens are"
        )
        expect(page.locator("body")).to_contain_text(re.compile(r"[1-9][0-9,]*/s\s*tokens saved in decode"))
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "fits a phone"
        assert errors == []
        page.goto(f"{served.url}/hybrid_mla")  # the key is kept as long as the tab
        expect(sections).to_have_count(2)
        served.close()
        expect(state).to_contain_text("the server does not answer, for", timeout=30_000)
        assert page.get_attribute("body", "class") == "gone"


def run_top(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli.app, ["top", "--interval", "0.6", *arguments])
    return result.exit_code, result.output


def test_top(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, "sesame") as served:
        code, said = run_top("--url", served.url, "--api-key", "sesame")  # no terminal: it ends, as with --once
        assert code == 0 and "rank 0" in said and "rank 1" in said and "\x1b" not in said
        for text in (
            "6.0 MiB",
            "budget of 20.0 MiB",
            "3 × <img",
            "512 tokens grouped absorb",
            "naive, #4, from token 0, 8 holders",
            "idle, #2, from token 768, 1 holder, its first 256",
            NOT_MIXED,
        ):
            assert text in said, text
        rate = said.split("/s")[0].split()[-1]
        assert 500 < float(rate.replace(",", "")) < 2000
        for key in ((), ("--api-key", "wrong")):
            code, said = run_top("--url", served.url, *key)
            assert code == 1 and "key" in said
        url = served.url
        address = url.removeprefix("http://")
        assert run_top("--url", address, "--api-key", "sesame")[0] == 0, "without a scheme"
        assert run_top("--url", f"{url}/nowhere", "--api-key", "sesame")[1].count("has no /hybrid_mla/status") == 1
    code, said = run_top("--url", url)
    assert code == 1 and "refused" in said
    assert "refused" in run_top("--url", address)[1]
    assert run_top("--url", "nonsense")[0] == 1


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    ],
    ids=["no HTTP", "cut off", "cut off in a chunk"],
)
def test_top_takes_half_an_answer_for_none(answer: bytes) -> None:
    """As from a server that ends, or of another kind."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def once() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=once)
        thread.start()
        with pytest.raises(top.NoAnswerError):
            top.ask(f"http://127.0.0.1:{server.getsockname()[1]}")
        thread.join()


def test_top_refuses_an_address_that_is_none() -> None:
    for address in ("localhost:3000O", "a b"):
        code, said = run_top("--url", address)
        assert code == 1 and said.startswith(f"http://{address}: ")


def test_a_rank_keeps_its_number_whoever_answers_first() -> None:
    """SGLang hands over the answers as they come."""
    states = [{"hybrid_mla": entry(saved, rank=rank)} for rank, saved in ((2, 20), (0, 0), (1, 10))]
    found = status.status([*states, {"of": "another backend"}], 1.0).ranks
    assert [(each.rank, each.counters.shared_tokens_saved) for each in found] == [(0, 0), (1, 10), (2, 20)]


def test_the_page_and_top_have_the_same_words() -> None:
    """Of the totals: one name for one thing."""
    (rank,) = status.status([{"hybrid_mla": entry()}], 1.0).model_dump()["ranks"]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(
        top._rank(rank, False, dict.fromkeys(("shared_tokens_saved", "prefill_tokens_saved", "tokens_mixed")))
    )
    shown, page = console.export_text(), status_routes.page().decode()
    of_page = re.search(r"decode steps: (.*?)· \$\{number\(counters.expansions", page, re.DOTALL)
    of_top = re.search(r"steps: (.*?);", shown)
    assert of_page and of_top
    said = [re.findall(r"(?:\$\{[^}]*\}|\d+) (\w+)", found[1]) for found in (of_page, of_top)]
    assert said == [["naive", "grouped", "absorb"]] * 2
    assert "plain" not in page


def test_top_has_no_rate_over_a_restart() -> None:
    first = status.status([{"hybrid_mla": entry(500)}], 1.0).model_dump()
    second = status.status([{"hybrid_mla": entry(100)}], 3.0).model_dump()
    assert top._rates(second, first, second["ranks"][0])["shared_tokens_saved"] is None
    assert top._rates(first, None, first["ranks"][0])["shared_tokens_saved"] is None
    assert top._rates({**first, "time": 2.0}, {**second, "time": 0.0}, first["ranks"][0])["shared_tokens_saved"] == 200


@pytest.mark.parametrize(("count", "said"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 40, "5.0 TiB")])
def test_size(count: int, said: str) -> None:
    assert top.size(count) == said
