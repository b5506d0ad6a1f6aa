"""SGLang's own serving benchmark, with prompts that are token ids read from a file.

Its `generated-shared-prefix` data set sends text, so that the server's tokenizer, not the GPU, sets the time to the
first token. Here each line of the file is `{"input_ids": [...], "sampling_params": {...}}`; all else is SGLang's.

Or each line is a session, `{"turns": [{"input_ids": ..., "sampling_params": ...}, ...]}`. The prompt of a turn is that
of the turn before, the token ids of its answer, and the turn's own; it is sent when the turn before is answered.

    python scripts/bench_client.py prompts.jsonl [flags of sglang.benchmark.serving]
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from sglang_mla_ext.adapter.cpu import stubs

if stubs.needed():
    stubs.install()

from sglang.benchmark import datasets, serving

ANSWER: ContextVar[list[int] | None] = ContextVar("ANSWER", default=None)
"""Takes the token ids of the answer to the request that this task has sent; None where nobody asks for them."""


class TokenIdDataset(datasets.common.BaseDataset):
    """Requests, or sessions of several turns, from a file of token ids."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    @classmethod
    def from_args(cls, args: Namespace) -> TokenIdDataset:
        return cls(args.dataset_path)

    def load(self, tokenizer: Any, model_id: str | None = None) -> list[datasets.DatasetRow]:
        lines = map(json.loads, self.path.read_text().splitlines())
        return [session(line["turns"]) if "turns" in line else request(line) for line in lines]


def request(line: dict[str, Any]) -> datasets.DatasetRow:
    """A request of its own."""
    return datasets.DatasetRow(
        prompt=line["input_ids"],
        prompt_len=len(line["input_ids"]),
        output_len=line["sampling_params"]["max_new_tokens"],
        extra_request_body={"sampling_params": line["sampling_params"]},
    )


def session(turns: list[dict[str, Any]]) -> datasets.DatasetRow:
    """Turns in the form in which SGLang's client knows them: lists of messages. It asks only that they have a role."""
    return datasets.DatasetRow(
        prompt=[[{"role": "user", "content": turn}] for turn in turns],
        prompt_len=sum(len(turn["input_ids"]) for turn in turns),
        output_len=sum(turn["sampling_params"]["max_new_tokens"] for turn in turns),
    )


def in_sessions(request_func: Callable[..., Awaitable[Any]], backend: str) -> Callable[..., Awaitable[list[Any]]]:
    """Return what SGLang's client calls to send a session; its own function speaks in text."""

    async def send(request_func_input: Any, pbar: Any = None) -> list[Any]:
        ids: list[int] = []
        outputs: list[Any] = []
        for (message,) in request_func_input.prompt:
            turn = message["content"]
            ids += turn["input_ids"]
            answer: list[int] = []
            ANSWER.set(answer)
            output = await request_func(
                replace(
                    request_func_input,
                    prompt=ids,
                    prompt_len=len(ids),
                    output_len=turn["sampling_params"]["max_new_tokens"],
                    extra_request_body={"sampling_params": turn["sampling_params"]},
                )
            )
            outputs.append(output)
            if output.success and len(answer) != output.output_len:
                output.success = False
                output.error = f"{len(answer)} token ids in an answer of {output.output_len}"
            if not output.success:
                break
            ids += answer
        if pbar is not None:
            pbar.update(1)
        return outputs

    return send


class EveryPiece:
    """orjson as SGLang's client uses it. Tokens that are not text yet (a part of a character) count as others do.

    The client takes a piece of an answer without text for none. With random weights an answer may begin with hundreds
    of such tokens, and its first token would seem to come when the others end.
    """

    @staticmethod
    def loads(data: bytes) -> Any:
        piece = orjson.loads(data)
        if piece.get("meta_info", {}).get("completion_tokens"):
            piece["text"] = piece.get("text") or " "
        answer = ANSWER.get()
        if answer is not None and "output_ids" in piece:
            answer[:] = piece["output_ids"]  # of the whole answer so far
        return piece


def main() -> None:
    """Run SGLang's benchmark on the file; other arguments are passed on to it."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("prompts", type=Path, help="JSON lines with input_ids and sampling_params")
    arguments, flags = parser.parse_known_args()
    serving.orjson = EveryPiece
    serving.wrap_multi_turn_request_func = in_sessions
    # The client's list of data sets is fixed; `custom` is the one that reads a user's file.
    datasets.DATASET_MAPPING["custom"] = TokenIdDataset
    data = ["--dataset-name", "custom", "--dataset-path", str(arguments.prompts)]
    sys.argv[1:] = ["--backend", "sglang", *data, *flags]
    serving.cli_main()


if __name__ == "__main__":
    main()
