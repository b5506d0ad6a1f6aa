"""The status page, `sglang-mla top` and the JSON behind both, while a server shares nested prompts."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import browser
import requests
from conftest import Chat, Server
from playwright.sync_api import expect
from test_answers import NAMES, SYSTEM, question
from test_nested import CHAPTERS, DOCUMENTS

from sglang_mla_ext.status import Status

PROMPTS = [SYSTEM] * 2 + [DOCUMENTS[1]] * 2 + [CHAPTERS[0]] * 2 + [CHAPTERS[1]] * 2
TOKENS = 500


@contextlib.contextmanager
def sharing(server: Server) -> Iterator[None]:
    """Chats run that share prompts on three levels."""
    server.flush()
    chats = [Chat(prompt, question(index), TOKENS) for index, prompt in enumerate(PROMPTS)]
    thread = threading.Thread(target=server.ask, args=chats)
    thread.start()
    try:
        yield
    finally:
        requests.post(f"{server.base_url}/abort_request", json={"abort_all": True}, timeout=60)
        thread.join()


def status(server: Server) -> Any:
    answer = requests.get(f"{server.base_url}/hybrid_mla/status", timeout=60)
    answer.raise_for_status()
    return answer.json()


def test_page_and_top_of_a_server_at_work(hybrid: Server) -> None:
    with browser.opened() as (page, errors), sharing(hybrid):
        page.goto(f"{hybrid.base_url}/hybrid_mla")
        body = page.locator("body")
        expect(page.locator("#state")).to_contain_text(re.compile("^live"), timeout=30_000)
        expect(body).to_contain_text("8 holders", timeout=120_000)
        expect(page.locator("li", has_text="continues #").nth(1)).to_be_visible(timeout=60_000)
        found = status(hybrid)
        command = [sys.executable, "-m", "sglang_mla_ext.cli", "top", "--url", hybrid.base_url, "--once"]
        top = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
        expect(body).to_contain_text(re.compile(r"[1-9][0-9,]*/s\s*tokens saved in decode"), timeout=60_000)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, "fits a phone"
        shown = page.content()
        assert errors == []
    (rank,) = Status.model_validate(found).ranks
    segments = {each.id: each for each in rank.segments}
    assert rank.requests == 8 and rank.expanded_bytes == sum(each.expanded_bytes for each in rank.segments)
    for each in rank.segments:
        above = segments.get(each.parent)
        end = above.start + above.tokens if above else 0
        # Chunks that are kept beside those in use begin with a chunk, which may be inside of the segment above.
        assert each.start == end or (each.mode == "kept" and above and above.start < each.start < end)
        assert each.mode == "kept" or (each.tokens_saved == each.tokens * (each.holders - 1) > 0 < each.bytes_saved)
    assert max(each.holders for each in rank.segments) == 8
    assert "8 holders" in top and "/s  tokens in decode" in top
    for text in (json.dumps(found), shown, top):
        assert not any(word in text for word in (*NAMES, "station", "quiet")), "words of a prompt"
