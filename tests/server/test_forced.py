"""Answers that the accuracy study forces (scripts/lab/accuracy/forced.py), on the real server."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from bench.generate import post, session
from conftest import Server, counting
from lab.accuracy import forced


def test_forced_answers_have_the_log_probabilities_of_a_prompt(hybrid: Server) -> None:
    """Two texts over one prefix at once, each decoded token by token over it, against one prefill of the whole text."""
    draw = random.Random(0)
    lengths = (120, 63, 49)  # texts that run together even where one of them is taken later
    prefix, *texts = ([draw.randrange(10, 500) for _ in range(count)] for count in lengths)
    bodies = [forced.request([*prefix, text[0]], text[1:]) for text in texts]
    once = {"sampling_params": {"max_new_tokens": 1}, "return_logprob": True}

    async def both(requests: list[dict[str, Any]]) -> list[Any]:
        async with session() as client:
            return await asyncio.gather(*(post(client, f"{hybrid.base_url}/generate", body) for body in requests))

    hybrid.flush()
    whole = asyncio.run(both([{"input_ids": prefix + text, "logprob_start_len": 120, **once} for text in texts]))
    hybrid.flush()
    with counting(hybrid) as counted:
        answers = asyncio.run(both(bodies))
    assert counted.steps_naive >= 5
    for text, answer, prompt in zip(texts, answers, whole, strict=True):
        expected = [value for value, *_ in prompt["meta_info"]["input_token_logprobs"][1:]]
        assert forced.logprobs_of(answer, text[1:]) == pytest.approx(expected, abs=2e-3)
