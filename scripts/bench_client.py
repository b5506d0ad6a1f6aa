"""SGLang's own serving benchmark, with prompts that are token ids read from a file.

Its `generated-shared-prefix` data set sends text, so that the server's tokenizer, not the GPU, sets the time to the
first token. Here each line of the file is `{"input_ids": [...], "sampling_params": {...}}`; all else is SGLang's.

    python scripts/bench_client.py prompts.jsonl [flags of sglang.benchmark.serving]
"""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any

import orjson

from sglang_mla_ext.adapter.cpu import standins

if standins.needed():
    standins.install()

from sglang.benchmark import datasets, serving


class TokenIdDataset(datasets.common.BaseDataset):
    """Requests from a file of token ids."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    @classmethod
    def from_args(cls, args: Namespace) -> TokenIdDataset:
        return cls(args.dataset_path)

    def load(self, tokenizer: Any, model_id: str | None = None) -> list[datasets.DatasetRow]:
        requests = map(json.loads, self.path.read_text().splitlines())
        return [
            datasets.DatasetRow(
                prompt=request["input_ids"],
                prompt_len=len(request["input_ids"]),
                output_len=request["sampling_params"]["max_new_tokens"],
                extra_request_body={"sampling_params": request["sampling_params"]},
            )
            for request in requests
        ]


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
        return piece


def main() -> None:
    """Run SGLang's benchmark on the file; what is not ours to read is passed on to it."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("prompts", type=Path, help="JSON lines with input_ids and sampling_params")
    arguments, flags = parser.parse_known_args()
    serving.orjson = EveryPiece
    # The client's list of data sets is fixed; `custom` is the one that reads a user's file.
    datasets.DATASET_MAPPING["custom"] = TokenIdDataset
    data = ["--dataset-name", "custom", "--dataset-path", str(arguments.prompts)]
    sys.argv[1:] = ["--backend", "sglang", *data, *flags]
    serving.cli_main()


if __name__ == "__main__":
    main()
