"""What a request may ask for, with its tokens in mixed steps: the stock backend's answers, beside requests that ask for
nothing."""

from __future__ import annotations

import json
import random
import re
import string
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import requests
from conftest import Reference, Server
from demo import MODEL
from tokenizers import Tokenizer

TOKENS = 48
"""Of an answer."""
ASKING = 4
"""Requests of a kind."""
OWN_TOKENS = 20
DISALLOWED = b"csglang.srt.sampling.custom_logit_processor\nDisallowedTokensLogitsProcessor\n."
"""The pickled name of one of SGLang's logit processors."""


def prompt(seed: int, own_tokens: int = OWN_TOKENS) -> list[int]:
    """Tokens that all prompts begin with, and others that no other prompt goes on with."""
    common = random.Random("common").choices(range(10, 4000), k=80)
    return common + random.Random(seed).choices(range(10, 4000), k=own_tokens)


def asking(input_ids: list[int], max_new_tokens: int = TOKENS, body: Any = (), **sampling: Any) -> dict[str, Any]:
    """The body of a request to `/generate`."""
    params = {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": True, **sampling}
    return {"input_ids": input_ids, "sampling_params": params, **dict(body)}


@dataclass
class Answer:
    """Of a request that is being answered.

    Attributes:
        last: what has come of it.
        begun: its first tokens have come, or it has ended.
    """

    last: dict[str, Any] = field(default_factory=dict)
    begun: threading.Event = field(default_factory=threading.Event)
    found: Future[dict[str, Any]] | None = None

    def result(self) -> dict[str, Any]:
        assert self.found is not None
        return self.found.result(120)


class Asked:
    """Sends requests to a server, each in a thread of its own."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._threads = ThreadPoolExecutor(32)

    def __call__(self, body: dict[str, Any]) -> Answer:
        answer = Answer()
        answer.found = self._threads.submit(self._read, body, answer)
        return answer

    def one_by_one(self, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
        """Each when the one before is being answered."""
        answers = []
        for body in bodies:
            answers.append(self(body))
            assert answers[-1].begun.wait(120)
        return answers

    def post(self, path: str, **body: Any) -> Any:
        response = requests.post(f"{self.server.base_url}/{path}", json=body, timeout=60)
        response.raise_for_status()
        return response

    def _read(self, body: dict[str, Any], answer: Answer) -> dict[str, Any]:
        try:
            url, pieces = f"{self.server.base_url}/generate", 0
            with requests.post(url, json={**body, "stream": True}, stream=True, timeout=120) as response:
                for line in response.iter_lines():
                    if line.startswith(b"data: {"):
                        answer.last = json.loads(line.removeprefix(b"data: "))
                        pieces += 1
                        if pieces == 3:
                            answer.begun.set()
        finally:
            answer.begun.set()
        return answer.last


def same(answer: dict[str, Any]) -> tuple[Any, ...]:
    """What has to be equal: the text, why it ended, and its number of tokens."""
    info = answer["meta_info"]
    return answer["text"], info["finish_reason"], info["completion_tokens"]


@contextmanager
def mixing(server: Server, tokens: int) -> Iterator[None]:
    """So many new tokens, at least, are computed in mixed steps meanwhile, and nothing fails. Nothing is cached yet."""
    server.flush()
    before = server.info()["counters"]
    yield
    after = server.info()["counters"]
    assert after["steps_mixed"] > before["steps_mixed"], after
    assert after["tokens_mixed"] - before["tokens_mixed"] >= tokens, after
    assert after["fallbacks"] == before["fallbacks"] and not after["shadow_failures"], after


@pytest.fixture(scope="module")
def stock_asked(stock: Reference) -> Asked:
    return Asked(stock)


@pytest.fixture(scope="module")
def asked(mixed: Server) -> Asked:
    return Asked(mixed)


@pytest.fixture(scope="module")
def plain(stock_asked: Asked) -> list[dict[str, Any]]:
    """Answers of the stock backend to requests that ask for nothing, and last a long one."""
    bodies = [*(asking(prompt(seed)) for seed in range(ASKING)), LONG]
    return [stock_asked.post("generate", **body).json() for body in bodies]


LONG = asking(prompt(99), max_new_tokens=150)


def over_a_boundary(tokens: list[int]) -> str:
    """Two letters or signs, one of a token and one of the next, that come for the first time there."""
    decode = Tokenizer.from_file(str(MODEL / "tokenizer.json")).decode
    printable = set(string.printable) - set(string.whitespace)
    for end in range(10, TOKENS - 2):
        left, right = decode(tokens[end - 1 : end]), decode(tokens[end : end + 1])
        found = left[-2:] + right[:2]
        new = found not in decode(tokens[:end]) and found in decode(tokens[: end + 1])
        if left and right and printable.issuperset(found) and new:
            return found
    raise AssertionError("there is none")


KINDS: dict[str, Callable[[list[int], list[int]], dict[str, Any]]] = {
    "json_schema": lambda own, all_tokens: {
        "json_schema": json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": 40, "maxItems": 60})
    },
    "regex": lambda own, all_tokens: {"regex": "(yes |no |maybe ){60}"},
    "ebnf": lambda own, all_tokens: {"ebnf": 'root ::= ("yes " | "no "){60}'},
    "penalties": lambda own, all_tokens: {
        "frequency_penalty": 1.5,
        "presence_penalty": 1.0,
        "repetition_penalty": 1.3,
    },
    "logit_bias": lambda own, all_tokens: {"logit_bias": dict.fromkeys(map(str, set(own)), -100.0)},
    "custom logit processor": lambda own, all_tokens: {
        "body": {"custom_logit_processor": json.dumps({"callable": DISALLOWED.hex()})},
        "custom_params": {"token_ids": sorted(set(all_tokens))},
    },
    "stop over a boundary": lambda own, all_tokens: {"stop": [over_a_boundary(own)]},
    "min_new_tokens": lambda own, all_tokens: {
        "stop_token_ids": own[:3],
        "min_new_tokens": 24,
        "ignore_eos": False,
    },
}
"""From a plain answer's tokens, and those of all plain answers, to what is asked for in place of it."""
GRAMMARS = ("json_schema", "regex", "ebnf")


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_request_asks_for(kind: str, stock_asked: Asked, asked: Asked, plain: list[dict[str, Any]]) -> None:
    *without, long = plain
    all_tokens = [token for answer in without for token in answer["output_ids"]]
    bodies = [
        asking(prompt(seed), **KINDS[kind](answer["output_ids"], all_tokens)) for seed, answer in enumerate(without)
    ]
    expected = [same(answer.result()) for answer in [stock_asked(body) for body in bodies]]
    assert not {text for text, *_ in expected} & {answer["text"] for answer in without}, "it changes every answer"
    if kind in GRAMMARS:
        asked(bodies[0]).result()  # compiling one may take longer than the answer that the others are to join
    with mixing(asked.server, (ASKING - 1) * OWN_TOKENS):
        beside, *answers = asked.one_by_one([LONG, *bodies])
        actual = [same(answer.result()) for answer in answers]
    assert actual == expected
    assert same(beside.result()) == same(long)


def test_turns_of_sessions(stock_asked: Asked, asked: Asked) -> None:
    """Second turns come while those of other sessions run."""

    def turns(server: Asked) -> list[tuple[Any, ...]]:
        sessions = [server.post("open_session", capacity_of_str_len=4096).json() for _ in range(3)]
        first = server.one_by_one(
            [asking(prompt(seed), body={"session_params": {"id": each}}) for seed, each in enumerate(sessions, 30)]
        )
        of_first = [answer.result() for answer in first]
        second = []
        for seed, (session, answer) in enumerate(zip(sessions, of_first, strict=True), 40):
            continued = {"session_params": {"id": session, "rid": answer["meta_info"]["id"]}}
            second.append(asking(prompt(seed)[-OWN_TOKENS:], body=continued))
        of_second = [answer.result() for answer in server.one_by_one(second)]
        for session in sessions:
            server.post("close_session", session_id=session)
        assert all(answer["meta_info"]["prompt_tokens"] > len(prompt(0)) + OWN_TOKENS for answer in of_second)
        return [same(answer) for answer in (*of_first, *of_second)]

    expected = turns(stock_asked)
    with mixing(asked.server, 3 * OWN_TOKENS):
        beside = asked(LONG)
        assert beside.begun.wait(120)
        assert turns(asked) == expected
        beside.result()


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_pause_and_continue(mode: str, asked: Asked, plain: list[dict[str, Any]]) -> None:
    """What comes in the pause runs with the others after it."""
    with mixing(asked.server, OWN_TOKENS):
        answers = asked.one_by_one([LONG, asking(prompt(0)), asking(prompt(1))])
        asked.post("pause_generation", mode=mode)
        answers.append(asked(asking(prompt(2))))
        time.sleep(0.3)
        assert answers[0].found is not None and not answers[0].found.done()
        asked.post("continue_generation")
        assert answers[-1].begun.wait(120)
        answers += asked.one_by_one([asking(prompt(3))])
        actual = [same(answer.result()) for answer in answers]
    assert actual == [same(answer) for answer in (plain[-1], *plain[:-1])]


def test_a_request_of_higher_priority_takes_the_place_of_another(stock_asked: Asked, asked: Asked) -> None:
    """Twelve are all that run; some are taken back, and go on later."""
    low = [asking(prompt(seed), max_new_tokens=160, body={"priority": 0}) for seed in range(50, 62)]
    high = [asking(prompt(seed), body={"priority": 90}) for seed in range(70, 73)]
    expected = [same(answer.result()) for answer in [stock_asked(body) for body in (*low, *high)]]
    with mixing(asked.server, OWN_TOKENS):
        answers = [*asked.one_by_one(low[:1]), *map(asked, low[1:])]
        assert all(answer.begun.wait(120) for answer in answers)
        answers += map(asked, high)
        found = [answer.result() for answer in answers]
    assert [same(answer) for answer in found] == expected
    taken_back = [answer["meta_info"]["num_retractions"] for answer in found]
    assert sum(taken_back[:12]) >= 1 and not any(taken_back[12:]), taken_back


def test_empty_prompts_are_refused(asked: Asked, plain: list[dict[str, Any]]) -> None:
    """Whatever runs beside them; and who runs beside them is answered as ever."""
    beside = asked(asking(prompt(0)))
    assert beside.begun.wait(120)
    for body in ({"input_ids": [[]]}, {"input_ids": []}, {"input_ids": [prompt(1), []]}, {"text": ""}, {"text": [""]}):
        url, params = f"{asked.server.base_url}/generate", {"temperature": 0, "max_new_tokens": 3}
        response = requests.post(url, json={**body, "sampling_params": params}, timeout=60)
        assert response.status_code == 400 and "empty" in response.text, (body, response.text)
    assert same(beside.result()) == same(plain[0])
    asked.server.flush()


def test_with_the_longest_prefix_first(mixed_in_pieces: Server, plain: list[dict[str, Any]]) -> None:
    """Scheduled by `lpm`, in pieces, and while requests are taken back."""
    assert requests.get(f"{mixed_in_pieces.base_url}/server_info", timeout=60).json()["schedule_policy"] == "lpm"
    asked = Asked(mixed_in_pieces)
    with mixing(mixed_in_pieces, ASKING * OWN_TOKENS):
        answers = asked.one_by_one([LONG, *(asking(prompt(seed)) for seed in range(ASKING))])
        actual = [same(answer.result()) for answer in answers]
    assert actual == [same(answer) for answer in (plain[-1], *plain[:-1])]


def test_a_prompt_in_pieces_is_cancelled_by_its_id(mixed_in_pieces: Server, plain: list[dict[str, Any]]) -> None:
    """After some of its pieces; nothing of it stays, and nobody else's answer changes."""
    asked, tokens = Asked(mixed_in_pieces), 4000
    beside = asked.one_by_one([LONG, asking(prompt(0))])
    before = mixed_in_pieces.log.stat().st_size
    cancelled = asked(asking(prompt(80, tokens), body={"rid": "to be cancelled"}))
    while not pieces(mixed_in_pieces, before):
        time.sleep(0.005)
    asked.post("abort_request", rid="to be cancelled")
    reason = cancelled.result()["meta_info"]["finish_reason"]
    assert reason["type"] == "abort", reason
    beside.append(asked(asking(prompt(1))))
    assert [same(answer.result()) for answer in beside] == [same(plain[-1]), same(plain[0]), same(plain[1])]
    assert sum(pieces(mixed_in_pieces, before)) < tokens - 200, "it was cancelled on the way"
    mixed_in_pieces.flush()
    assert mixed_in_pieces.info()["expanded_bytes"] == 0


def pieces(server: Server, since: int) -> list[int]:
    """Return the new tokens of each piece of a long prompt, read in a server's log from an offset on.

    Batches that leave fewer than 100 tokens waiting are left out: requests that were retracted come back in such.
    """
    log = server.log.read_bytes()[since:].decode(errors="replace")
    found = re.findall(r"Prefill batch.*?#new-token: (\d+),.*?#pending-token: (\d+)", log)
    return [int(tokens) for tokens, left in found if int(left) >= 100]


def test_the_pool_is_full_while_a_prompt_is_in_pieces(stock_asked: Asked, asked: Asked) -> None:
    """Running requests lock all of the tree that the prompt leaves free, and take slots in each step that computes a
    piece of it: what is left of it still finds a place (sgl-project/sglang#30743)."""
    own, count, pool = 400, 8, 4096
    running = [asking(prompt(seed, own), max_new_tokens=200) for seed in range(90, 90 + count)]
    expected = [same(answer.result()) for answer in [stock_asked(body) for body in running]]
    with mixing(asked.server, own):
        answers = asked.one_by_one(running)
        asked.post("pause_generation", mode="in_place")
        time.sleep(0.5)
        taken = sum(answer.last["meta_info"]["completion_tokens"] for answer in answers)
        free = pool - len(prompt(0, 0)) - count * own - taken
        filling = asking(prompt(89, free - 26), max_new_tokens=4)
        answers.append(asked(filling))
        time.sleep(0.5)
        asked.post("continue_generation")
        actual = [same(answer.result()) for answer in answers]
    assert actual == [*expected, same(stock_asked(filling).result())]
    assert asked.server.process.poll() is None
    asked.server.flush()
