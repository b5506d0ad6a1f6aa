"""The chats that the demo model learns from and is examined with: a dictionary, and look-ups in the system prompt.

A look-up's table holds made-up names and values, so the answer is nowhere but in the prompt. Chats are drawn from a
seeded generator and never stored: a table that is seen twice would be memorised.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import yaml
from demo_model.checkpoint import ASSISTANT, BOS, EOS, SYSTEM, USER

from lab.training.sources import Word

CHAT_TEMPLATE = (
    "<s>{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PHRASES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("phrases.yaml").read_text(encoding="utf-8"))
ONE_WORD: str = PHRASES["one_word"]
QUESTIONS: dict[str, list[str]] = PHRASES["questions"]
UNKNOWN_SHARE, UNKNOWN = 0.02, "I do not know that word."
TALK_SHARE = 0.01
ROW_TOKENS, TURN_TOKENS = 10, 24  # about


class Chat(NamedTuple):
    """A system prompt and pairs of question and answer."""

    system: str
    turns: list[tuple[str, str]]


class Case(NamedTuple):
    """One question of an examination: the text of the prompt, and answers that count as right."""

    prompt: str
    accepted: tuple[str, ...]
    table: Table | None = None  # of a look-up


@dataclass(frozen=True)
class Material:
    """The material for chats."""

    words: Sequence[Word]
    names: Sequence[str]
    values: Sequence[str]
    passage: Callable[[random.Random, int], str]  # prose of about so many tokens


def render(chat: Chat) -> str:
    """The chat as `CHAT_TEMPLATE` writes it."""
    turns = "".join(f"{USER}{question}{ASSISTANT}{answer}{EOS}" for question, answer in chat.turns)
    return f"{BOS}{SYSTEM}{chat.system}{turns}"


def render_prompt(system: str, question: str) -> str:
    """The text that an answer to the question follows."""
    return f"{render(Chat(system, []))}{USER}{question}{ASSISTANT}"


def phrasings(word: str, kind: str, held_out: bool) -> list[str]:
    """Ways to ask about a word: all but the last are for training; the last, which varies by word, is held out."""
    asked = list(QUESTIONS[kind])
    kept = asked.pop(crc32(f"{word}/{kind}".encode()) % len(asked))
    return [kept] if held_out else asked


def one_word_answers(word: Word, kind: str) -> list[str]:
    """Correct one-word answers, first the one to be learnt."""
    return {
        "define": word.synonyms + word.kinds,
        "synonym": word.synonyms,
        "part": [word.part],
        "opposite": word.opposites,
        "kind": word.kinds,
    }[kind]


def long_answer(word: Word, kind: str) -> str:
    """The answer as a sentence."""
    article = "an" if word.part.startswith("a") else "a"
    if kind == "define":
        return f"{word.word} ({word.part}): {word.gloss}."
    first = one_word_answers(word, kind)[0]
    return {
        "synonym": f"A synonym of {word.word} is {first}.",
        "part": f"The word {word.word} is {article} {word.part}.",
        "opposite": f"The opposite of {word.word} is {first}.",
        "kind": f"The word {word.word} names a kind of {first}.",
    }[kind]


def dictionary_turn(rng: random.Random, material: Material, short: bool, told: bool) -> tuple[str, str]:
    """A question about a word and its answer.

    Args:
        short: the answer is one word.
        told: the system prompt already asks for one word; otherwise a short question says so itself.
    """
    suffix = f" {ONE_WORD}" if short and not told else ""
    if not short and rng.random() < TALK_SHARE:
        return rng.choice(list(PHRASES["talk"].items()))
    if not short and rng.random() < UNKNOWN_SHARE:
        made_up = rng.choice(material.names).lower()
        return rng.choice(QUESTIONS["define"]).format(made_up), UNKNOWN
    word = rng.choice(material.words)
    kinds = [kind for kind in QUESTIONS if one_word_answers(word, kind) or (kind == "define" and not short)]
    kind = rng.choices(kinds, [PHRASES["shares"][kind] for kind in kinds])[0]
    question = rng.choice(phrasings(word.word, kind, held_out=False)).format(word.word)
    return question + suffix, one_word_answers(word, kind)[0] if short else long_answer(word, kind)


@dataclass(frozen=True)
class Table:
    """Made-up facts."""

    thing: str
    attribute: str
    row: str
    facts: dict[str, str]

    def lines(self) -> list[str]:
        return [self.row.format(name=name, value=value, **vars(self)) for name, value in self.facts.items()]

    def question(self, rng: random.Random, name: str, first: bool) -> str:
        """Ask for a name's value; the last way to ask needs another question before it."""
        forms = PHRASES["table_questions"]
        return rng.choice(forms[:-1] if first else forms).format(name=name, **vars(self))


def make_table(rng: random.Random, material: Material, rows: int) -> Table:
    """A table of different names; values may repeat."""
    names = rng.sample(material.names, min(rows, len(material.names)))
    facts = {name: rng.choice(material.values) for name in names}
    return Table(*(rng.choice(PHRASES[part]) for part in ("things", "attributes", "rows")), facts)


def system_with_table(rng: random.Random, material: Material, table: Table, prose_tokens: int, short: bool) -> str:
    """Write an instruction, then the table in one to three pieces among passages of prose."""
    lines = table.lines()
    cuts = sorted(rng.randrange(len(lines) + 1) for _ in range(rng.randrange(3) if prose_tokens else 0))
    pieces = pairwise([0, *cuts, len(lines)])
    parts = ["\n".join(lines[begin:end]) for begin, end in pieces if end > begin]
    passages = rng.randint(1, 3) if prose_tokens else 0
    for _ in range(passages):
        parts.insert(rng.randint(0, len(parts)), material.passage(rng, prose_tokens // passages))
    heading = f"The {table.attribute} of each {table.thing} is given below."
    return "\n".join([instruction(rng, short), heading, *parts])


def instruction(rng: random.Random, short: bool) -> str:
    """Begin a system prompt; short: with the request for one word."""
    return rng.choice(PHRASES["instructions"]) + (f" {ONE_WORD}" if short else "")


def lookup_chat(rng: random.Random, material: Material, tokens: int) -> Chat:
    """Many look-ups in one table, some of them repeated, with a few questions about words in between.

    In half of the chats prose takes a part of `tokens`; table and questions share the rest.
    """
    prose = int(tokens * rng.uniform(0.3, 0.85)) if rng.random() < 0.5 else 0
    left = max(tokens - prose - 30, 60)
    rows = max(2, int(left * rng.uniform(0.15, 0.5)) // ROW_TOKENS)
    table = make_table(rng, material, rows)
    told, words = rng.random() < 0.4, rng.random() < 0.3
    turns, asked, names = [], [], list(table.facts)
    for _ in range(max(1, (left - rows * ROW_TOKENS) // TURN_TOKENS)):
        short = told or rng.random() < 0.5
        if words and rng.random() < 0.25:
            turns.append(dictionary_turn(rng, material, short, told))
            continue
        name = rng.choice(asked) if asked and rng.random() < 0.25 else rng.choice(names)
        question = table.question(rng, name, first=not asked) + (f" {ONE_WORD}" if short and not told else "")
        turns.append(
            (question, table.facts[name] if short else f"The {table.attribute} of {name} is {table.facts[name]}.")
        )
        asked.append(name)
    return Chat(system_with_table(rng, material, table, prose, told), turns)


def dictionary_chat(rng: random.Random, material: Material, tokens: int) -> Chat:
    """Questions about words under a short system prompt, or under a long one of prose."""
    told = rng.random() < 0.3
    system = instruction(rng, told)
    prose = int(tokens * rng.uniform(0.3, 0.8)) if rng.random() < 0.25 else 0
    if prose:
        system += "\n" + material.passage(rng, prose)
    count = max(1, (tokens - prose) // TURN_TOKENS)
    return Chat(system, [dictionary_turn(rng, material, told or rng.random() < 0.3, told) for _ in range(count)])


def lookup_cases(material: Material, count: int, tokens: int, length: Callable[[str], int], seed: int) -> list[Case]:
    """Look-ups under prompts as long as `tokens` allows: one quarter table, the rest prose.

    Args:
        length: tokens of a text.
    """
    cases = []
    for index in range(count):
        rng = random.Random(f"{seed}/{tokens}/{index}")
        table = make_table(rng, material, max(4, tokens // 4 // ROW_TOKENS))
        name = rng.choice(list(table.facts))
        question, state, prose = table.question(rng, name, first=True), rng.getstate(), tokens
        while True:
            rng.setstate(state)
            prompt = render_prompt(system_with_table(rng, material, table, prose, short=True), question)
            excess = length(prompt) - tokens
            if excess <= 0 or prose == 0:
                break
            prose = max(0, prose - excess - 4)
        cases.append(Case(prompt, (table.facts[name],), table))
    return cases


def dictionary_cases(words: Sequence[Word], count: int, seed: int) -> dict[str, list[Case]]:
    """One-word questions about words of the training, phrased in ways that it did not use, by kind."""
    cases: dict[str, list[Case]] = {}
    for kind in QUESTIONS:
        rng = random.Random(f"{seed}/{kind}")
        known = [word for word in words if one_word_answers(word, kind)]
        cases[kind] = []
        for word in rng.sample(known, min(count, len(known))):
            question = phrasings(word.word, kind, held_out=True)[0].format(word.word)
            prompt = render_prompt(instruction(rng, short=True), question)
            cases[kind].append(Case(prompt, tuple(one_word_answers(word, kind))))
    return cases
