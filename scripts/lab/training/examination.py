"""Examination of the demo model: perplexity of held-out prose, dictionary questions, look-ups in long prompts.

The cases come from chats.py. An answer of greedy decoding is right if each of its tokens, including </s>, is the
likeliest one after those before it; this takes one forward pass and no generation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

import torch
import torch.nn.functional as F
from torch import Tensor

from lab.training.batches import EOS_ID, Data
from lab.training.chats import Case, dictionary_cases, lookup_cases

LOOKUP_TOKENS = {512: 500, 2048: 2000, 8192: 8000}
"""Prompt tokens for each nominal length; they leave room for the answer."""

Logits = Callable[[list[list[int]]], list[Tensor]]
"""Documents of tokens -> logits `[tokens, vocab]` of each."""


def perplexity(logits: Logits, data: Data, window: int = 4096, stride: int = 2048) -> dict[str, float]:
    """Perplexity per token of the held-out documents, in windows that overlap.

    A token is predicted from those before it in its window: at least `window - stride`, or all that its document has.
    """
    prose, losses, count = data.held_out, 0.0, 0
    for index in range(len(prose)):
        document = prose.document(index).tolist()
        for begin, first, end in windows(len(document), window, stride):
            found = logits([document[begin : end - 1]])[0][first - begin - 1 :].float()
            targets = torch.tensor(document[first:end], device=found.device)
            losses += float(F.cross_entropy(found, targets, reduction="sum"))
            count += len(targets)
    return {"perplexity": math.exp(losses / count), "perplexity_tokens": count}


def windows(tokens: int, window: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Windows over a document: where each begins, the first token that it predicts, and its end.

    Each token but the first is predicted once; a window has up to `window` tokens before the last that it predicts.
    """
    first = 1
    while first < tokens:
        end = min(tokens, (first + stride) if first > 1 else window + 1)
        yield max(0, end - 1 - window), first, end
        first = end


def is_right(logits: Logits, data: Data, case: Case) -> bool:
    """Return whether greedy decoding gives one of the accepted answers."""
    prompt = data.encode(case.prompt)
    answers = [[*data.encode(answer), EOS_ID] for answer in case.accepted]
    found = logits([prompt + answer[:-1] for answer in answers])
    return any(one[len(prompt) - 1 :].argmax(-1).tolist() == answer for one, answer in zip(found, answers, strict=True))


def accuracy(logits: Logits, data: Data, cases: Sequence[Case]) -> float:
    """Share of the cases that are right."""
    return fmean(is_right(logits, data, case) for case in cases)


def examine(logits: Logits, data: Data, count: int = 200, seed: int = 1) -> dict[str, float]:
    """Return all figures, of `count` cases of each kind."""
    figures = perplexity(logits, data)
    by_kind = {kind: accuracy(logits, data, cases) for kind, cases in dictionary_cases(data.words, count, seed).items()}
    figures |= {f"dictionary_acc_{kind}": value for kind, value in by_kind.items()}
    figures["dictionary_acc"] = fmean(by_kind.values())
    material = data.material(held_out=True)
    for length, tokens in LOOKUP_TOKENS.items():
        cases = lookup_cases(material, count, tokens, lambda text: len(data.encode(text)), seed)
        figures[f"lookup_acc_{length}"] = accuracy(logits, data, cases)
    return figures
