"""Packed training batches of the demo model: prose, dictionary chats and look-ups, drawn anew for every step.

A batch depends on the seed and its step alone.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from demo_model.checkpoint import ASSISTANT, EOS, SPECIAL_TOKENS
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from lab.training.chats import Material, dictionary_chat, lookup_chat, render
from lab.training.sources import Word

ASSISTANT_ID, EOS_ID = SPECIAL_TOKENS.index(ASSISTANT), SPECIAL_TOKENS.index(EOS)
SHARES = {"prose": 0.4, "dictionary": 0.25, "lookup": 0.35}  # of the tokens
DRAFT_SHARES = {"prose": 0.1, "dictionary": 0.65, "lookup": 0.25}  # for the layer that drafts
ANSWER_WEIGHT = 3.0  # of an answer's token in the loss; prose 1, questions and system prompts 0
SHORTEST = 96  # tokens of a chat
SHORT_CONTEXT, LONG_SHARE = 2048, 0.35  # documents are short at first, and long in this last part of the training


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
    """Documents one after another in one flat batch, `[tokens]` each. A named tuple, so that torch's loader pins it."""

    tokens: Tensor  # int64
    positions: Tensor  # int64, each document from 0
    targets: Tensor
    weights: Tensor  # of each target; 0 at the end of each document


class Batches(Dataset):
    """Batches of a training by step. Documents are short at first, and long in the last part of the training.

    Args:
        tokens: of a batch; context: of the longest document.
        shares: of the tokens, by kind of document.
    """

    def __init__(
        self, data: Data, tokens: int, context: int, steps: int, seed: int, shares: dict[str, float] = SHARES
    ) -> None:
        self.data, self.tokens, self.context, self.steps = data, tokens, context, steps
        self.seed, self.shares, self.material = seed, shares, data.material()

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Batch:
        rng = random.Random(f"{self.seed}/{step}")
        context = self.context if step >= (1 - LONG_SHARE) * self.steps else min(self.context, SHORT_CONTEXT)
        drawn = dict.fromkeys(self.shares, 0)
        documents: list[tuple[np.ndarray, np.ndarray]] = []
        while (left := self.tokens - sum(drawn.values())) > 0:
            # The kind furthest below its share; the last place goes to whatever fills it.
            kind = max(drawn, key=lambda kind: self.shares[kind] * (self.tokens - left + 1) - drawn[kind])
            kind = rng.choice(list(drawn)) if rng.random() < 0.2 else kind
            tokens, weights = self.draw(rng, kind, context)
            documents.append((tokens[:left], weights[:left]))
            drawn[kind] += len(documents[-1][0])
        tokens = np.concatenate([tokens for tokens, _ in documents])
        weights = np.concatenate([np.append(weights[1:], np.float32(0)) for _, weights in documents])
        positions = np.concatenate([np.arange(len(tokens)) for tokens, _ in documents])
        return Batch(*map(torch.from_numpy, (tokens, positions, np.append(tokens[1:], 0), weights)))

    def draw(self, rng: random.Random, kind: str, context: int) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and weights of a document of at most `context` tokens.

        Chat lengths are uniform on a log scale.
        """
        if kind == "prose":
            tokens = np.asarray(self.data.train.draw(rng, context), dtype=np.int64)
            return tokens, np.ones(len(tokens), dtype=np.float32)
        target = int(math.exp(rng.uniform(math.log(SHORTEST), math.log(context))))
        chat = (lookup_chat if kind == "lookup" else dictionary_chat)(rng, self.material, target)
        tokens = np.array(self.data.encode(render(chat))[:context], dtype=np.int64)
        return tokens, answer_weights(tokens)
