"""SGLang's native API for many clients at once: token ids in, token ids with log-probabilities out."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from bench.soak_judge import Answer

Shape = tuple[str, float | str]
"""A sampling parameter and its value."""
RUNNERS_UP = 8
"""Tokens beside the best one that the stock server names: a random model in BF16 has three and more as likely."""
# A client that waits longer than that was forgotten.
TIMEOUT_S = 300


class RefusedError(RuntimeError):
    """The server answered with an error; `status` is HTTP's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"status {status}: {message}")
        self.status = status


def session(timeout_s: float = TIMEOUT_S) -> aiohttp.ClientSession:
    """Open as many connections as there are requests, each of which may take so long."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, force_close=True), timeout=aiohttp.ClientTimeout(total=timeout_s)
    )


def body(ids: Sequence[int], output_tokens: int, shape: Shape | None = None, **more: Any) -> dict[str, Any]:
    """A greedy request with an answer of exactly so many tokens; `more` goes beside.

    Args:
        shape: one more sampling parameter.
    """
    sampling = {"temperature": 0, "max_new_tokens": output_tokens, "ignore_eos": True} | dict([shape] if shape else [])
    return {"input_ids": list(ids), "sampling_params": sampling, "return_logprob": True, **more}


async def post(client: aiohttp.ClientSession, url: str, content: Mapping[str, Any]) -> Any:
    """The JSON of an answer. Raises RefusedError, or aiohttp's errors where there is no answer."""
    async with client.post(url, json=content) as response:
        text = await response.text()
        if response.status != 200:
            raise RefusedError(response.status, text[:300])
        with contextlib.suppress(json.JSONDecodeError):
            return json.loads(text)
        return text


async def flush(client: aiohttp.ClientSession, url: str, within_s: float = 60) -> None:
    """Empty the cache of a server as soon as it is idle. Raises TimeoutError where it does not become that."""
    try:
        await post(client, f"{url}/flush_cache?timeout={within_s}", {})
    except RefusedError:
        raise TimeoutError("the server does not become idle") from None


async def last_chunk(client: aiohttp.ClientSession, url: str, content: Mapping[str, Any], seen: list[Any]) -> Any:
    """The last piece of a streamed answer, which holds all of it; each piece replaces the one in `seen`.

    But for the one that says that a request was aborted while it waited: SGLang puts a single token into it.
    """
    async with client.post(url, json={**content, "stream": True}) as response:
        if response.status != 200:
            raise RefusedError(response.status, (await response.text())[:300])
        async for line in response.content:
            data = line.removeprefix(b"data:").strip()
            if data and data != b"[DONE]":
                piece = json.loads(data)
                if "error" in piece:
                    raise RefusedError(200, json.dumps(piece["error"])[:300])
                if ran(piece["meta_info"]):
                    seen[:] = [piece]
    return seen[0] if seen else None


def ran(meta: Mapping[str, Any]) -> bool:
    """Return whether an answer comes from a running request, and not from one that was aborted while it waited."""
    return "num_retractions" in meta


def answer_of(response: Mapping[str, Any]) -> Answer:
    """Return what SGLang says of an answer; with `top_logprobs_num` above 1 it knows the runners-up."""
    meta = response["meta_info"]
    if "output_token_logprobs" not in meta:
        return Answer(tuple(response["output_ids"]), None)
    chosen, tops = meta["output_token_logprobs"], meta.get("output_top_logprobs") or []
    others = (
        tuple((token, logprob) for logprob, token, _ in top if token != own[1])
        for own, top in zip(chosen, tops, strict=False)
    )
    return Answer(tuple(response["output_ids"]), tuple(logprob for logprob, *_ in chosen), tuple(others))


class StockAnswers:
    """Greedy answers of the stock server, each prompt asked once, or once more if a longer answer is wanted of it.

    Args:
        url: of a server under no pressure.
        at_a_time: requests in flight.
        at_least: tokens that are asked for.
    """

    def __init__(self, url: str, at_a_time: int = 16, at_least: int = 1) -> None:
        self._url, self._free, self._at_least = url, asyncio.Semaphore(at_a_time), at_least
        self._known: dict[tuple[str, tuple[int, ...], Shape | None], Answer] = {}
        self._client: aiohttp.ClientSession | None = None
        self.weights = ""
        """Weights that the server has now."""

    async def __aenter__(self) -> StockAnswers:
        self._client = session()
        return self

    async def __aexit__(self, *unused: object) -> None:
        assert self._client is not None
        await self._client.close()

    async def update(self, model: str, weights: str) -> None:
        """Load weights, and answer with them from now on.

        Not before the server is idle: SGLang 0.5.17 may still hold a request whose answer it has given, and its
        scheduler then ends, as it cannot flush the cache.
        """
        assert self._client is not None
        if weights != self.weights:
            await flush(self._client, self._url)
            await post(self._client, f"{self._url}/update_weights_from_disk", {"model_path": model})
            self.weights = weights

    async def __call__(self, ids: tuple[int, ...], tokens: int, shape: Shape | None = None) -> Answer:
        assert self._client is not None
        known = self._known.get((self.weights, ids, shape))
        if known is None or len(known.ids) < tokens:
            tokens = max(tokens, self._at_least)
            async with self._free:
                asked = body(ids, tokens, shape, top_logprobs_num=1 + RUNNERS_UP)
                response = await post(self._client, f"{self._url}/generate", asked)
            known = self._known[self.weights, ids, shape] = answer_of(response)
        return known
