"""Packed training batches of the demo model: prose, dictionary chats and look-ups, drawn anew for every step.

A batch depends on the seed and its step alone, so that a resumed run sees what an uninterrupted one would.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from demo_model.checkpoint import ASSISTANT, EOS, SPECIAL_TOKENS
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset

from lab.training.chats import Material, dictionary_chat, lookup_chat, render
from lab.training.network import Packed
from lab.training.sources import Word

ASSISTANT_ID, EOS_ID = SPECIAL_TOKENS.index(ASSISTANT), SPECIAL_TOKENS.index(EOS)
SHARES = {"prose": 0.4, "dictionary": 0.25, "lookup": 0.35}  # of the tokens
ANSWER_WEIGHT = 3.0  # of an answer's token in the loss; prose 1, questions and system prompts 0
SHORTEST = 96  # tokens of a chat
MOST_DOCUMENTS = 1 / 128  # of a batch, for each of its tokens


class Prose:
    """Documents of prose as tokens."""

    def __init__(self, folder: Path, split: str) -> None:
        self.tokens = np.load(folder / f"prose_{split}.npy", mmap_mode="r")
        self.starts = np.load(folder / f"prose_{split}_starts.npy").astype(np.int64)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def document(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def draw(self, rng: random.Random, longest: int) -> np.ndarray:
        """A document, or a part of a long one, in which every token of the text is equally likely to be."""
        at = rng.randrange(len(self.tokens))
        document = self.document(int(np.searchsorted(self.starts, at, side="right")) - 1)
        begin = rng.randrange(len(document) - longest + 1) if len(document) > longest else 0
        return document[begin : begin + longest]


class Data:
    """Training data as `prepare` wrote it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        self.words = [Word(**word) for word in json.loads((folder / "words.json").read_text())]
        self.train, self.held_out = Prose(folder, "train"), Prose(folder, "held_out")
        chosen = json.loads((folder / "lookups.json").read_text())
        self.names, self.held_out_names, self.values = chosen["names"], chosen["held_out_names"], chosen["values"]

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def material(self, held_out: bool = False) -> Material:
        """The material for chats, for training or for an examination."""
        prose = self.held_out if held_out else self.train

        def passage(rng: random.Random, tokens: int) -> str:
            """Return as many pieces of documents as are needed."""
            found: list[int] = []
            while len(found) < tokens:
                found.extend(prose.draw(rng, tokens - len(found)).tolist())
            return self.tokenizer.decode(found, skip_special_tokens=True).strip()

        return Material(self.words, self.held_out_names if held_out else self.names, self.values, passage)


def answer_weights(tokens: np.ndarray) -> np.ndarray:
    """Weight of each token as a target: those of answers, with the </s> that ends them."""
    marks = np.zeros(len(tokens), dtype=np.int8)
    marks[tokens == ASSISTANT_ID] += 1
    marks[1:][tokens[:-1] == EOS_ID] -= 1
    inside = np.cumsum(marks) > 0
    return np.where(inside & (tokens != ASSISTANT_ID), np.float32(ANSWER_WEIGHT), np.float32(0))


class Batch(NamedTuple):
    """Packed documents with targets. A named tuple of such, so that torch's loader pins all of it."""

    packed: Packed
    targets: Tensor  # [tokens]
    weights: Tensor  # [tokens], of each target; 0 at the end of each document

    def to(self, device: torch.device) -> Batch:
        return tree_map_only(Tensor, lambda tensor: tensor.to(device, non_blocking=True), self)


def draw_document(rng: random.Random, data: Data, material: Material, kind: str, context: int) -> list[np.ndarray]:
    """Tokens and weights of one document of at most `context` tokens; chat lengths are uniform on a log scale."""
    if kind == "prose":
        tokens = np.asarray(data.train.draw(rng, context), dtype=np.int64)
        return [tokens, np.ones(len(tokens), dtype=np.float32)]
    target = int(math.exp(rng.uniform(math.log(SHORTEST), math.log(context))))
    chat = (lookup_chat if kind == "lookup" else dictionary_chat)(rng, material, target)
    tokens = np.array(data.encode(render(chat))[:context], dtype=np.int64)
    return [tokens, answer_weights(tokens)]


class Batches(Dataset):
    """Batch number `step` of a training, for documents of at most `context` tokens.

    Args:
        shares: of the tokens, by kind of document.
    """

    def __init__(self, data: Data, tokens: int, seed: int, shares: dict[str, float] = SHARES) -> None:
        self.data, self.tokens, self.seed, self.shares = data, tokens, seed, shares
        self.material = data.material()

    def __getitem__(self, key: tuple[int, int]) -> Batch:
        step, context = key
        rng = random.Random(f"{self.seed}/{step}")
        drawn = dict.fromkeys(self.shares, 0)
        documents: list[list[np.ndarray]] = []
        most = max(8, int(self.tokens * MOST_DOCUMENTS))
        left = self.tokens
        while left > 0:
            # The kind furthest below its share; the last place goes to whatever fills it.
            kind = max(drawn, key=lambda kind: self.shares[kind] * (self.tokens - left + 1) - drawn[kind])
            kind = rng.choice(list(drawn)) if rng.random() < 0.2 else kind
            document = [part[:left] for part in draw_document(rng, self.data, self.material, kind, context)]
            documents.append(document)
            drawn[kind] += len(document[0])
            left -= len(document[0])
            if len(documents) == most and left:
                documents.append([np.full(min(left, context), EOS_ID), np.zeros(min(left, context), np.float32)])
                left -= len(documents[-1][0])
                most += 1
        return self.join(documents, context, most)

    def join(self, documents: list[list[np.ndarray]], context: int, most: int) -> Batch:
        """Make one flat batch; `starts` has the same length in every batch."""
        tokens = np.concatenate([tokens for tokens, _ in documents])
        weights = np.concatenate([np.append(weight[1:], np.float32(0)) for _, weight in documents])
        sizes = [len(tokens) for tokens, _ in documents]
        starts = np.full(max(most, len(sizes)) + 1, len(tokens), dtype=np.int32)
        starts[: len(sizes) + 1] = np.cumsum([0, *sizes])
        positions = np.concatenate([np.arange(size) for size in sizes])
        return Batch(
            Packed(torch.from_numpy(tokens), torch.from_numpy(positions), torch.from_numpy(starts), context),
            torch.from_numpy(np.append(tokens[1:], 0)),
            torch.from_numpy(weights),
        )


def stream(batches: Batches, keys: Iterator[tuple[int, int]], workers: int, pin: bool) -> Iterator[Batch]:
    """Batches of the keys (step, context), in order, made ahead by `workers` processes."""
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=keys,  # type: ignore[arg-type]
        num_workers=workers,
        prefetch_factor=4 if workers else None,
        pin_memory=pin,
    )
    return iter(loader)
