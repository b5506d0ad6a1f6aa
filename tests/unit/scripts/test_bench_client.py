"""What our thin layer over SGLang's benchmark client does: token ids, and sessions that go on from their answers."""

from __future__ import annotations

import asyncio
import json
from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from bench import sglang_client
from sglang.benchmark import serving


def turn(*ids: int, output: int = 2) -> dict[str, Any]:
    return {"input_ids": list(ids), "sampling_params": {"max_new_tokens": output, "ignore_eos": True}}


@pytest.mark.parametrize(("text", "tokens", "expected"), [("", 3, " "), ("", 0, ""), ("a", 3, "a")])
def test_tokens_without_text_are_tokens(text: str, tokens: int, expected: str) -> None:
    """Half a character is no text yet, but it is a token; the piece that only ends an answer is none."""
    piece = sglang_client.EveryPiece.loads(orjson.dumps({"text": text, "meta_info": {"completion_tokens": tokens}}))
    assert piece["text"] == expected


def test_pieces_of_errors_are_left_alone() -> None:
    assert sglang_client.EveryPiece.loads(b'{"error": {"message": "no"}}') == {"error": {"message": "no"}}


def test_a_file_of_sessions(tmp_path: Any) -> None:
    """SGLang's client takes our turns for several, where there is one, too."""
    file = tmp_path / "sessions.jsonl"
    sessions = [[turn(1, 2, 3, output=5)], [turn(1, 2), turn(3, output=4)]]
    file.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in sessions))
    one, many = sglang_client.Sessions.from_args(Namespace(dataset_path=str(file))).load(None)
    assert (one.prompt_len, one.output_len) == (3, 5) and (many.prompt_len, many.output_len) == (3, 6)
    assert one.prompt[0][0]["content"]["sampling_params"]["ignore_eos"]
    assert all(serving._normalize_round_messages(of_turn) for row in (one, many) for of_turn in row.prompt)


@dataclass
class Input:
    """As much of SGLang's RequestFuncInput as a session changes."""

    prompt: Any
    prompt_len: int = 0
    output_len: int = 0
    extra_request_body: dict[str, Any] = field(default_factory=dict)


@dataclass
class Output:
    success: bool = True
    output_len: int = 0
    error: str = ""


class Endpoint:
    """A server's side: the answer to a prompt is its length, in as many tokens as were asked for, in pieces."""

    def __init__(self, fails_at: int | None = None, loses: int = 0) -> None:
        self.asked: list[list[int]] = []
        self._fails_at, self._loses = fails_at, loses

    async def __call__(self, request: Any, pbar: Any = None) -> Output:
        self.asked.append(list(request.prompt))
        assert request.prompt_len == len(request.prompt)
        count = request.extra_request_body["sampling_params"]["max_new_tokens"]
        assert request.output_len == count
        if len(self.asked) == self._fails_at:
            return Output(success=False, error="no")
        ids = [100 * len(request.prompt) + index for index in range(count)]
        for end in range(1, count + 1 - self._loses):
            await asyncio.sleep(0)  # other sessions' pieces come between
            piece = {"text": "", "output_ids": ids[:end], "meta_info": {"completion_tokens": end}}
            sglang_client.EveryPiece.loads(orjson.dumps(piece))
        return Output(output_len=count)


def send(endpoint: Endpoint, *sessions: list[dict[str, Any]]) -> list[list[Output]]:
    one = sglang_client.in_sessions(endpoint, "sglang")

    async def all_of_them() -> list[list[Output]]:
        rows = [sglang_client.session(turns).prompt for turns in sessions]
        return list(await asyncio.gather(*(asyncio.create_task(one(Input(row))) for row in rows)))

    return asyncio.run(all_of_them())


def test_a_turn_goes_on_from_the_answer_before() -> None:
    endpoint = Endpoint()
    (outputs,) = send(endpoint, [turn(1, 2), turn(3, output=1), turn(4)])
    assert endpoint.asked == [[1, 2], [1, 2, 200, 201, 3], [1, 2, 200, 201, 3, 500, 4]]
    assert [output.output_len for output in outputs] == [2, 1, 2]


def test_sessions_keep_their_answers_apart() -> None:
    endpoint = Endpoint()
    send(endpoint, [turn(1, output=3), turn(2)], [turn(7, 8, output=3), turn(9)])
    assert sorted(endpoint.asked) == [[1], [1, 100, 101, 102, 2], [7, 8], [7, 8, 200, 201, 202, 9]]


def test_a_session_ends_with_the_turn_that_fails() -> None:
    endpoint = Endpoint(fails_at=2)
    (outputs,) = send(endpoint, [turn(1), turn(2), turn(3)])
    assert [output.success for output in outputs] == [True, False] and len(endpoint.asked) == 2


def test_an_answer_whose_ids_are_not_all_known_has_failed() -> None:
    """As from a server that sends only what is new (--incremental-streaming-output)."""
    (outputs,) = send(Endpoint(loses=1), [turn(1), turn(2)])
    assert [(output.success, output.error) for output in outputs] == [(False, "1 token ids in an answer of 2")]
