"""Examination of the demo model: perplexity of held-out prose, dictionary questions, look-ups in long prompts.

The cases come from chats.py. An answer of greedy decoding is right if each of its tokens, including </s>, is the
likeliest one after those before it; this takes one forward pass and no generation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DeepseekV3ForCausalLM

from lab.training.batches import EOS_ID, Data
from lab.training.chats import Case, dictionary_cases, lookup_cases

WINDOW, STRIDE = 4096, 2048
"""Tokens of a window over a document, and from one window to the next."""
LOOKUP_TOKENS = {512: 500, 2048: 2000, 8192: 8000}
"""Prompt tokens for each nominal length; they leave room for the answer."""


@torch.inference_mode()
def logits_of(network: DeepseekV3ForCausalLM, document: list[int]) -> Tensor:
    """Return logits `[tokens, vocab]` of a document."""
    logits: Tensor = network(input_ids=torch.tensor([document], device=network.device), use_cache=False).logits[0]
    return logits


def perplexity(network: DeepseekV3ForCausalLM, data: Data) -> dict[str, float]:
    """Perplexity per token of the held-out documents, in windows that overlap.

    A token is predicted from those before it in its window: at least `WINDOW - STRIDE`, or all that its document has.
    """
    losses, count = 0.0, 0
    for index in range(len(data.held_out)):
        document = data.held_out.document(index).tolist()
        for begin, first, end in windows(len(document)):
            found = logits_of(network, document[begin : end - 1])[first - begin - 1 :]
            targets = torch.tensor(document[first:end], device=found.device)
            losses += float(F.cross_entropy(found, targets, reduction="sum"))
            count += len(targets)
    return {"perplexity": math.exp(losses / count), "perplexity_tokens": count}


def windows(tokens: int) -> Iterator[tuple[int, int, int]]:
    """Windows over a document: where each begins, the first token that it predicts, and its end.

    Each token but the first is predicted once; a window has up to `WINDOW` tokens before the last that it predicts.
    """
    first = 1
    while first < tokens:
        end = min(tokens, (first + STRIDE) if first > 1 else WINDOW + 1)
        yield max(0, end - 1 - WINDOW), first, end
        first = end


def is_right(network: DeepseekV3ForCausalLM, data: Data, case: Case) -> bool:
    """Return whether greedy decoding gives one of the accepted answers."""
    prompt = data.encode(case.prompt)
    answers = [[*data.encode(answer), EOS_ID] for answer in case.accepted]
    found = (logits_of(network, prompt + answer[:-1])[len(prompt) - 1 :] for answer in answers)
    return any(logits.argmax(-1).tolist() == answer for logits, answer in zip(found, answers, strict=True))


def examine(network: DeepseekV3ForCausalLM, data: Data, count: int, seed: int = 1) -> dict[str, float]:
    """Return all figures, of `count` cases of each kind; with 0 the perplexity alone."""
    figures = perplexity(network, data)
    if not count:
        return figures

    def accuracy(cases: Sequence[Case]) -> float:
        return fmean(is_right(network, data, case) for case in cases)

    by_kind = {kind: accuracy(cases) for kind, cases in dictionary_cases(data.words, count, seed).items()}
    figures |= {f"dictionary_acc_{kind}": value for kind, value in by_kind.items()}
    figures["dictionary_acc"] = fmean(by_kind.values())
    material = data.material(held_out=True)
    for length, tokens in LOOKUP_TOKENS.items():
        cases = lookup_cases(material, count, tokens, lambda text: len(data.encode(text)), seed)
        figures[f"lookup_acc_{length}"] = accuracy(cases)
    return figures
