"""Count the tokens that a step of greedy speculative decoding yields with the drafting layer, on held-out dictionary
chats.

Greedy speculation writes what greedy decoding writes. So the model's own text is found first; then one pass drafts
after each of its positions, and the accepted drafts are counted from step to step, as a server would meet them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from lab.training.batches import EOS_ID, Data
from lab.training.chats import (
    INSTRUCTIONS,
    ONE_WORD,
    SHARES,
    kinds_of_question,
    long_answer,
    one_word_answers,
    phrasings,
    render_prompt,
)
from lab.training.draft import Draft, drafted
from lab.training.examination import Logits
from lab.training.network import Network, pack

SHORT_SHARE, PROSE_SHARE, PROSE_TOKENS = 0.3, 0.25, 300  # about as in the training's dictionary chats
LONGEST_ANSWER = 64
CASES_AT_ONCE = 50


class Case(NamedTuple):
    """A question."""

    prompt: list[int]
    expected: list[int]  # the dictionary's answer with its </s>; only a guess of the model's
    short: bool


class Count(NamedTuple):
    """Steps and tokens of one answer."""

    tokens: int  # after the first, which prefill gives
    steps: int  # of verification
    accepted: tuple[int, ...]  # steps in which the first, second, .. draft was accepted


def chat_cases(data: Data, count: int, seed: int) -> list[Case]:
    """Questions about words, phrased in ways that the training did not use, some of them under a passage of prose."""
    material = data.material(held_out=True)
    found = []
    for index in range(count):
        rng = random.Random(f"{seed}/acceptance/{index}")
        short, word = rng.random() < SHORT_SHARE, rng.choice(data.words)
        kinds = kinds_of_question(word, short)
        if not kinds:
            short, kinds = False, kinds_of_question(word, False)
        kind = rng.choices(kinds, [SHARES[kind] for kind in kinds])[0]
        question = phrasings(word.word, kind, held_out=True)[0].format(word.word)
        system = rng.choice(INSTRUCTIONS) + (f" {ONE_WORD}" if short else "")
        if rng.random() < PROSE_SHARE:
            system += "\n" + material.passage(rng, PROSE_TOKENS)
        answer = one_word_answers(word, kind)[0] if short else long_answer(word, kind)
        found.append(Case(data.encode(render_prompt(system, question)), [*data.encode(answer), EOS_ID], short))
    return found


def greedy(logits: Logits, cases: Sequence[Case]) -> list[list[int]]:
    """The model's greedy answers, each with its </s> or as long as is allowed.

    Every pass checks a guess of the rest, so that a memorised answer takes one or two.
    """
    answers: list[list[int]] = [[] for _ in cases]
    open_ones = list(range(len(cases)))
    while open_ones:
        guesses = [cases[index].expected[len(answers[index]) : LONGEST_ANSWER] for index in open_ones]
        documents = [cases[i].prompt + answers[i] + guess for i, guess in zip(open_ones, guesses, strict=True)]
        for index, guess, found in zip(open_ones, guesses, logits(documents), strict=True):
            likeliest = found[-len(guess) - 1 :].argmax(-1).tolist()
            right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(likeliest, guess, strict=False)))
            answers[index] += likeliest[: right + 1]
            if EOS_ID in answers[index]:
                answers[index] = answers[index][: answers[index].index(EOS_ID) + 1]
            answers[index] = answers[index][:LONGEST_ANSWER]
        open_ones = [i for i in open_ones if answers[i][-1] != EOS_ID and len(answers[i]) < LONGEST_ANSWER]
    return answers


def count_steps(prompt: int, text: Sequence[int], drafts: Sequence[Sequence[int]]) -> Count:
    """Follow a server through one answer.

    Args:
        prompt: tokens of the prompt; text: all tokens; drafts: of each position, as `drafted` returns them.
    """
    at, steps = prompt, 0  # the last token that is known
    accepted = [0] * len(drafts[0])
    while at < len(text) - 1:
        right = sum(1 for _ in takewhile(lambda x: x[0] == x[1], zip(drafts[at - 1], text[at + 1 :], strict=False)))
        accepted[:right] = (count + 1 for count in accepted[:right])
        at, steps = min(at + right + 1, len(text) - 1), steps + 1
    return Count(len(text) - 1 - prompt, steps, tuple(accepted))


def acceptance(
    logits: Logits, network: Network, draft: Draft, data: Data, cases: int = 200, steps: int = 3, seed: int = 1
) -> dict[str, float]:
    """Tokens per step of verification, as SGLang counts its accept length: accepted drafts and one more.

    Args:
        logits: of the network; cases: questions; steps: drafted tokens.
    Returns:
        `accept_length` of all tokens, of sentences alone and of one-word answers alone; `accept_1` .. the share of the
        steps that accept so many drafts; and the share of the answers that are the dictionary's.
    """
    counts: list[tuple[bool, Count]] = []
    known = 0
    device = network.frequencies.device
    drawn = chat_cases(data, cases, seed)
    for begin in range(0, cases, CASES_AT_ONCE):
        part = drawn[begin : begin + CASES_AT_ONCE]
        answers = greedy(logits, part)
        texts = [case.prompt + answer for case, answer in zip(part, answers, strict=True)]
        found = drafted(network, draft, pack(texts, device), steps).split([len(text) for text in texts])
        for case, answer, text, drafts in zip(part, answers, texts, found, strict=True):
            counts.append((case.short, count_steps(len(case.prompt), text, drafts.tolist())))
            known += answer == case.expected[:LONGEST_ANSWER]
    figures = {"accept_length": mean_length([count for _, count in counts])}
    figures["accept_length_sentences"] = mean_length([count for short, count in counts if not short])
    figures["accept_length_one_word"] = mean_length([count for short, count in counts if short])
    total = max(1, sum(count.steps for _, count in counts))
    figures |= {f"accept_{at + 1}": sum(count.accepted[at] for _, count in counts) / total for at in range(steps)}
    return figures | {"answers_of_dictionary": known / cases}


def mean_length(counts: Sequence[Count]) -> float:
    """Tokens of a step; 1 where there is no step."""
    steps = sum(count.steps for count in counts)
    return sum(count.tokens for count in counts) / steps if steps else 1.0
