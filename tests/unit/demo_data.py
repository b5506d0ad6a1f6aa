"""The demo model's data at toy size, for the tests of its training."""

from __future__ import annotations

import random
from pathlib import Path

from lab.training.preparation import write
from lab.training.sources import Document, Word

SENTENCE = "The {} server keeps every {} in one table, and a reader asks it for number {} of them."


def write_toy_data(out: Path) -> None:
    """Data as `prepare` writes them, of a few made-up pages and words."""
    rng = random.Random(0)
    nouns = ["river", "stone", "house", "garden", "letter", "number", "window", "table", "winter", "summer"]
    pages = []
    for index in range(300):
        lines = (SENTENCE.format(rng.choice(nouns), rng.choice(nouns), rng.randrange(99)) for _ in range(8))
        pages.append(Document("toy", str(index), "\n".join(lines)))
    words = [
        Word(noun, "noun", f"a thing that is called {noun}", ["thing"], [nouns[index - 1]], ["matter"])
        for index, noun in enumerate(nouns)
    ]
    write(out, pages, words, vocab=600, names=200, chats=50)
