"""The demo model's training data: tokenizer, prose, words, names and values, made of what the sources hold."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
from demo_model.checkpoint import BOS, EOS, SPECIAL_TOKENS, train_tokenizer
from rich.progress import track
from tokenizers import Tokenizer

from lab.training import sources
from lab.training.chats import CHAT_TEMPLATE, Material, dictionary_chat, lookup_chat
from lab.training.sources import DOCUMENTATION, Document, Word

HELD_OUT_ONE_IN = 50  # pages; and about HELD_OUT_TOKENS of each package
HELD_OUT_TOKENS = 20_000
SHORTEST_PAGE = 400  # characters
CHARACTERS_PER_TOKEN = 4  # about
LARGEST_SOURCE = 8_000_000  # characters, so that no package outweighs the others
NAMES, NUMBERS, VALUE_WORDS = 20_000, range(10, 100), 1_500
ONSETS = "b br c cl d dr f g gr h j k l m n p pr qu r s st t tr v w z"
VOWELS = "a e i o u ai ou"
CODAS = ["", "", "l", "m", "n", "r", "s", "t", "x", "nd", "rk"]


def documents(folder: Path) -> Iterator[Document]:
    """Yield all prose, package by package; repeated paragraphs are left out."""
    seen: set[bytes] = set()
    yield from sources.novels(folder)
    yield from sources.glosses(folder)
    with Pool() as pool:
        for package in track(DOCUMENTATION, "Reading pages"):
            files = sources.page_files(folder, package)
            size = 0
            random.Random(package).shuffle(files)
            for path, paragraphs in zip(files, pool.imap(sources.page_paragraphs, files, chunksize=16), strict=True):
                kept = []
                for paragraph in paragraphs:
                    mark = hashlib.blake2b(paragraph.encode(), digest_size=8).digest()
                    if mark not in seen:
                        seen.add(mark)
                        kept.append(paragraph)
                text = "\n".join(kept)
                if len(text) >= SHORTEST_PAGE and size < LARGEST_SOURCE:
                    size += len(text)
                    yield Document(package, str(path.relative_to(folder / package)), text)


def is_held_out(document: Document) -> bool:
    """Choose one page in `HELD_OUT_ONE_IN`, by its name; of the few chapters of the novels, one in ten."""
    one_in = 10 if document.source == sources.NOVELS[0] else HELD_OUT_ONE_IN
    if document.source == sources.WORDNET[0]:
        return False  # the dictionary is examined on words that the training has seen
    return int(hashlib.sha256(f"{document.source}/{document.name}".encode()).hexdigest(), 16) % one_in == 0


def made_up_names(count: int, seed: int) -> list[str]:
    """Different names of two or three syllables, capitalised."""
    rng = random.Random(seed)
    onsets, vowels = ONSETS.split(), VOWELS.split()
    names: dict[str, None] = {}
    while len(names) < count:
        syllables = [rng.choice(onsets) + rng.choice(vowels) for _ in range(rng.choice((2, 2, 3)))]
        names.setdefault(("".join(syllables) + rng.choice(CODAS)).capitalize())
    return list(names)


def tokenizer_texts(pages: list[Document], material: Material, chats: int) -> Iterator[str]:
    """Return what the tokenizer learns from: a part of the prose, and chats, so that names and answers have tokens."""
    yield from (page.text for page in pages[::3])
    rng = random.Random(0)
    for _ in range(chats):
        for chat in (lookup_chat(rng, material, 400), dictionary_chat(rng, material, 400)):
            yield chat.system
            yield from (text for turn in chat.turns for text in turn)


def encode(tokenizer: Tokenizer, pages: list[Document]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens `[tokens]` of all pages, each between <s> and </s>, and where each begins `[pages + 1]`."""
    begin, end = SPECIAL_TOKENS.index(BOS), SPECIAL_TOKENS.index(EOS)
    parts, starts = [], [0]
    for at in range(0, len(pages), 1000):
        for encoding in tokenizer.encode_batch([page.text for page in pages[at : at + 1000]]):
            parts.append(np.array([begin, *encoding.ids, end], dtype=np.uint16))
            starts.append(starts[-1] + len(parts[-1]))
    return np.concatenate(parts), np.array(starts, dtype=np.uint32)


def few_tokens(tokenizer: Tokenizer, texts: list[str], spaced: int, bare: int) -> list[str]:
    """The texts of at most so many tokens after a space, and without one."""
    after = tokenizer.encode_batch([f" {text}" for text in texts])
    alone = tokenizer.encode_batch(texts)
    return [text for text, one, two in zip(texts, after, alone, strict=True) if len(one) <= spaced and len(two) <= bare]


def held_out_pages(pages: list[Document]) -> list[Document]:
    """The pages of the examination: not many of one package."""
    found, budget = [], Counter()
    for page in pages:
        if is_held_out(page) and budget[page.source] < HELD_OUT_TOKENS * CHARACTERS_PER_TOKEN:
            found.append(page)
            budget[page.source] += len(page.text)
    return found


def write(
    out: Path, pages: list[Document], words: list[Word], vocab: int, names: int = NAMES, chats: int = 3_000
) -> dict[str, Any]:
    """Write everything.

    Args:
        names: made-up names, of which one in ten is held out.
        chats: of each kind, for the tokenizer to learn from.
    Returns:
        Statistics.
    """
    out.mkdir(parents=True, exist_ok=True)
    train, held_out = [page for page in pages if not is_held_out(page)], held_out_pages(pages)
    drawn = made_up_names(2 * names, seed=0)
    common = [word.word for word in words if word.part in ("noun", "adjective") and len(word.word) <= 8]
    numbers = [str(number) for number in NUMBERS]
    draft = Material(words, drawn, common[:VALUE_WORDS] + numbers, lambda rng, _: rng.choice(train).text[:200])

    fast = train_tokenizer(tokenizer_texts(train, draft, chats), vocab, CHAT_TEMPLATE)
    fast.save_pretrained(out / "tokenizer")
    tokenizer = fast.backend_tokenizer
    drawn = few_tokens(tokenizer, drawn, spaced=3, bare=5)[:names]
    values = few_tokens(tokenizer, common, spaced=1, bare=2)[:VALUE_WORDS] + few_tokens(tokenizer, numbers, 2, 2)
    chosen = {"names": drawn[names // 10 :], "held_out_names": drawn[: names // 10], "values": values}
    (out / "words.json").write_text(json.dumps([asdict(word) for word in words], separators=(",", ":")))
    (out / "lookups.json").write_text(json.dumps(chosen, separators=(",", ":")))

    statistics: dict[str, Any] = {"words": len(words), **{kind: len(of_kind) for kind, of_kind in chosen.items()}}
    for split, of_split in (("train", train), ("held_out", held_out)):
        tokens, starts = encode(tokenizer, of_split)
        np.save(out / f"prose_{split}.npy", tokens)
        np.save(out / f"prose_{split}_starts.npy", starts)
        per_token = round(sum(len(page.text) for page in of_split) / len(tokens), 3)
        statistics[split] = {"pages": len(of_split), "tokens": len(tokens), "characters_per_token": per_token}
    return statistics
