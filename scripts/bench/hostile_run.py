"""Send the attacks of `hostile_attacks.py` to a server; time them, and read what it shows meanwhile."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.generate import RefusedError, answer_of, flush, post, session
from bench.hostile_attacks import MARKERS, SALT_MARKER, Attack, traces
from bench.soak_judge import Answer

STATUS_PATH = "/hybrid_mla/status"
SHOWN_PATHS = (STATUS_PATH, "/hybrid_mla")
READ_EACH_S = 0.1


@dataclass
class Played:
    """Outcome of an attack on one server.

    Attributes:
        statuses: of HTTP, of each request in the order in which they were sent; 0 where the connection broke.
        answers: the answer of each request; None where it was refused, or asked for no log-probabilities.
        cached: for each request the tokens that were found in the cache.
        most_holders: the most requests that were seen to hold one segment together.
        traces: of prompts or salts, in what the server shows.
        reads: how often what it shows was read.
    """

    seconds: float = 0.0
    statuses: list[int] = field(default_factory=list)
    answers: list[Answer | None] = field(default_factory=list)
    cached: list[int | None] = field(default_factory=list)
    most_holders: int = 0
    traces: set[str] = field(default_factory=set)
    reads: int = 0


async def play(url: str, attack: Attack, *, reads_status: bool) -> Played:
    """
    Args:
        reads_status: whether to read its status page meanwhile, which disturbs timings.
    """
    played = Played()
    async with session() as client:
        await flush(client, url)
        watcher = asyncio.create_task(_read_again(client, url, played)) if reads_status else None
        begin = time.monotonic()
        for wave in attack.waves:
            for status, answer, cached in await asyncio.gather(*(_ask(client, url, content) for content in wave)):
                played.statuses.append(status)
                played.answers.append(answer)
                played.cached.append(cached)
        played.seconds = time.monotonic() - begin
        if watcher is not None:
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)
            await _read_shown(client, url, played)
    return played


async def _ask(
    client: aiohttp.ClientSession, url: str, content: Mapping[str, Any]
) -> tuple[int, Answer | None, int | None]:
    try:
        response = await post(client, f"{url}/generate", content)
    except RefusedError as error:
        return error.status, None, None
    except (aiohttp.ClientError, TimeoutError):
        return 0, None, None
    if not isinstance(response, dict):
        return 200, None, None
    answer = answer_of(response) if content.get("return_logprob") else None
    return 200, answer, response["meta_info"].get("cached_tokens")


async def _read_again(client: aiohttp.ClientSession, url: str, played: Played) -> None:
    while True:
        await _read_shown(client, url, played)
        await asyncio.sleep(READ_EACH_S)


async def _read_shown(client: aiohttp.ClientSession, url: str, played: Played) -> None:
    """Search what the server shows for words and salts of the prompts, and see who holds what together."""
    for path in SHOWN_PATHS:
        async with client.get(f"{url}{path}") as response:
            shown = await response.text()
        played.traces |= set(traces(shown, [*MARKERS, SALT_MARKER]))
        if path == STATUS_PATH:
            status = json.loads(shown)
            played.traces |= set(_lists_of_numbers(status))
            held = (segment["holders"] for rank in status["ranks"] for segment in rank["segments"])
            played.most_holders = max(played.most_holders, *held, 0)
    played.reads += 1


def _lists_of_numbers(shown: Any) -> list[str]:
    """Return where a status holds numbers in a row, as token ids would be."""
    if isinstance(shown, dict):
        return [found for value in shown.values() for found in _lists_of_numbers(value)]
    if isinstance(shown, list):
        numbers = any(isinstance(value, int | float) for value in shown)
        return ["numbers in a row"] if numbers else [found for value in shown for found in _lists_of_numbers(value)]
    return []
