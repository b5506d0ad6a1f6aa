"""SGLang's own serving benchmark, with sessions of token ids that are read from a file: what `client.run_client` runs.

Its `generated-shared-prefix` data set sends text, so that the server's tokenizer, not the GPU, sets the time to the
first token. Here each line of the file is a session of one turn or several, `{"turns": [{"input_ids": [...],
"sampling_params": {...}}, ...]}`; all else is SGLang's. The prompt of a turn is that of the turn before, the token ids
of its answer, and the turn's own; it is sent when the turn before is answered.

    python scripts/bench/sglang_client.py sessions.jsonl [flags of sglang.benchmark.serving]
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from sglang_mla_ext.adapter.cpu import stubs

if stubs.needed():
    stubs.install()

from sglang.benchmark import datasets, serving

ANSWER: ContextVar[list[int]] = ContextVar("ANSWER")
"""Takes the token ids of the answer to the request that this task has sent."""


@dataclass
class Sessions(datasets.common.BaseDataset):
    """Sessions of a file."""

    path: Path

    @classmethod
    def from_args(cls, args: Namespace) -> Sessions:
        return cls(Path(args.dataset_path))

    def load(self, tokenizer: Any, model_id: str | None = None) -> list[datasets.DatasetRow]:
        return [session(json.loads(line)["turns"]) for line in self.path.read_text().splitlines()]


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
        if "output_ids" in piece:
            ANSWER.get()[:] = piece["output_ids"]  # of the whole answer so far
        return piece


def main() -> None:
    """Run SGLang's benchmark on the file; other arguments are passed on to it."""
    serving.orjson = EveryPiece
    serving.wrap_multi_turn_request_func = in_sessions
    # The client's list of data sets is fixed; `custom` is the one that reads a user's file.
    datasets.DATASET_MAPPING["custom"] = Sessions
    path, *flags = sys.argv[1:]
    sys.argv[1:] = ["--backend", "sglang", "--dataset-name", "custom", "--dataset-path", path, *flags]
    serving.cli_main()


if __name__ == "__main__":
    main()
