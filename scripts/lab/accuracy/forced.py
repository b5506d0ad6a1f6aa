"""A logit processor for SGLang's `--enable-custom-logit-processor`: answers with given tokens, and how likely each was.

What SGLang reports of a processed step are log-probabilities after the processor. So of the processed logits two
entries are finite: the given token's, which is 0, and another one's, which is that token's own log-probability less 1.
The difference of the two log-probabilities reported is the difference of the two logits.

Only for requests that are prefilled in one piece: SGLang samples after each piece, and drops all but the last.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import dill
import torch

NEVER = -1e30
MARGIN = 1.0
"""Distance of the other entry below any log-probability, so that greedy sampling takes the given token."""


class Forced:
    """Processor in SGLang's form (`sampling/custom_logit_processor.py`), not derived from it: to import SGLang takes as
    long as everything else here. `custom_params` of a request: `{"tokens": [...]}`, what it is to answer."""

    def __call__(self, logits: torch.Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> torch.Tensor:
        """Process `logits [requests, vocab]`, one row for each of `custom_param_list`."""
        given = torch.tensor([[next_token(params)] for params in custom_param_list or ()], device=logits.device)
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(1, given)
        forced = torch.full_like(logits, NEVER)
        forced.scatter_(1, (given + 1) % logits.shape[1], (logprobs - MARGIN).to(logits.dtype))
        return forced.scatter_(1, given, 0.0)


def next_token(params: dict[str, Any]) -> int:
    """The token of this step. SGLang keeps a request's parameters from its first step to its last."""
    at = params.get("at", 0)
    params["at"] = at + 1
    tokens: list[int] = params["tokens"]
    return tokens[min(at, len(tokens) - 1)]  # with overlap, one step more than there are tokens


def request(ids: Sequence[int], tokens: Sequence[int]) -> dict[str, Any]:
    """The body of a request that answers `tokens`, at least one, to `ids`; `logprobs_of` reads the answer."""
    return {
        "input_ids": list(ids),
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": len(tokens),
            "ignore_eos": True,
            "custom_params": {"tokens": list(tokens)},
        },
        "custom_logit_processor": json.dumps({"callable": dill.dumps(Forced).hex()}),
        "return_logprob": True,
        "top_logprobs_num": 2,
    }


def logprobs_of(response: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
    """The model's own log-probability of each of the tokens.

    Raises:
        RuntimeError: the server answered something else.
    """
    if response["output_ids"] != list(tokens):
        raise RuntimeError("the server did not answer what it was given: --enable-custom-logit-processor is missing")
    pairs = response["meta_info"]["output_top_logprobs"]
    return [other - given + MARGIN for (given, *_), (other, *_) in pairs]
