"""Attacks of hostile clients: each attack is made of waves, and all requests of a wave are sent at once.

An attack's requests are drawn from a seed, for a server with so many tokens of cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.generate import body

SALTS = 100
# Words that are nowhere but in the prompts of `words`: their traces are looked for.
MARKERS = ("Xylograph", "Quizzaciously", "Zymurgical")
SALT_MARKER = "tenant-of-salt"


@dataclass(frozen=True)
class Attack:
    """Requests of a hostile client.

    Attributes:
        waves: bodies of `/generate`; a wave begins when the one before is answered.
        timed: whether it takes long enough to be timed.
    """

    name: str
    waves: list[list[Mapping[str, Any]]]
    timed: bool = True

    @property
    def requests(self) -> int:
        return sum(map(len, self.waves))


class Attacks:
    """Draw the attacks.

    Args:
        vocabulary: `[tokens]` the ids that prompts are drawn from.
        cache_tokens: of the server; longest: prompt and answer together, in tokens.
        scale: how much of each: 1 is all of it.
    """

    def __init__(
        self, vocabulary: np.ndarray, *, cache_tokens: int, longest: int, seed: int = 0, scale: float = 1
    ) -> None:
        self._vocabulary, self._rng = vocabulary, np.random.default_rng(seed)
        self._cache_tokens, self._longest, self._scale = cache_tokens, longest, scale

    def all(self) -> list[Attack]:
        return [
            *(self.flood(), self.deep_trees(), self.steps_of_one(), self.thrash(), self.full_pool()),
            *(self.invalid(), self.maximal(), self.salts(), self.words()),
        ]

    def flood(self) -> Attack:
        """Send short requests at once."""
        wave = [body(self._text(int(length)), 4) for length in self._rng.integers(4, 13, self._count(5000))]
        return Attack("flood", [wave])

    def deep_trees(self) -> Attack:
        """Let every request go on where another one ends: as many nested prefixes as there are requests."""
        texts = [self._text(640) for _ in range(self._count(4))]
        wave = [body(text[:end] + self._text(1), 12) for end in range(16, 641, 16) for text in texts]
        return Attack("deep_trees", [wave])

    def steps_of_one(self) -> Attack:
        """Do the same with one token from one to the next: the most nodes for the fewest tokens."""
        text = self._text(100 + self._count(300))
        return Attack("steps_of_one", [[body(text[:end], 8) for end in range(100, len(text))]])

    def thrash(self) -> Attack:
        """Send two groups whose prefixes are worth the same, in turn: memory for expanded ones could go to and fro."""
        first, second = self._text(480), self._text(480)
        waves = []
        for turn in range(self._count(20)):
            mine, other = (first, second)[:: 1 if turn % 2 else -1]
            waves.append([body(text + self._text(3), 12) for text in (mine, mine, other, other, mine, other)])
        return Attack("thrash", waves)

    def full_pool(self) -> Attack:
        """Send prompts that share nothing and need twice the cache, with answers that make it overflow."""
        length = self._cache_tokens // 24
        wave = [body(self._text(length), 32) for _ in range(self._count(48))]
        return Attack("full_pool", [wave])

    def invalid(self) -> Attack:
        """Send what is no prompt.

        Not among them: an integer that is no token's id, and an empty prompt in a list of prompts. SGLang 0.5.17 does
        not look at either, and its scheduler ends, whatever the backend.
        """
        asked: list[Any] = [["five"], [None], 7, "7", {"a": 1}, [5.5], [True, "5"], [[[5]]]]
        wave = [{"input_ids": ids, "sampling_params": {"max_new_tokens": 2}} for ids in asked]
        more = [{"max_new_tokens": -1}, {"temperature": -1}, {"top_p": 7}, {"max_new_tokens": "many"}]
        wave += [{"input_ids": [5], "sampling_params": parameters} for parameters in more]
        return Attack("invalid", [wave], timed=False)

    def maximal(self) -> Attack:
        """Send empty prompts, one token, and all sizes around the largest."""
        sizes = (0, 0, 1, 1, self._longest - 1, self._longest, self._longest + 1, 2 * self._longest)
        wave = [body(self._text(size), 2) for size in sizes] + [{"text": ""}, {"text": None}, {}]
        return Attack("maximal", [wave], timed=False)

    def salts(self) -> Attack:
        """Send one text under many salts, twice: who shares with another salt would have it cached the first time."""
        text = self._text(192)
        wave = [body(text, 12, extra_key=f"{SALT_MARKER}-{salt}") for salt in range(max(2, self._count(SALTS)))]
        return Attack("salts", [wave, wave])

    def words(self) -> Attack:
        """Send text with words that nobody else uses, shared, so that it is expanded and shown."""
        text = " ".join(MARKERS) * 8
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        wave = [{"text": f"{text} {MARKERS[0]}{number}", "sampling_params": sampling} for number in range(8)]
        waves = [[{**one, "extra_key": salt} if salt else one for one in wave] for salt in (None, SALT_MARKER)]
        return Attack("words", waves, timed=False)

    def _count(self, whole: int) -> int:
        return max(1, round(whole * self._scale))

    def _text(self, length: int) -> list[int]:
        ids: list[int] = self._rng.choice(self._vocabulary, length).tolist()
        return ids


def traces(shown: str, secrets: Sequence[str]) -> list[str]:
    """Return those secrets that stand in what a server shows."""
    lower = shown.lower()
    return [secret for secret in secrets if secret.lower() in lower]
