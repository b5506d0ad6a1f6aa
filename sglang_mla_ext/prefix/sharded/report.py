"""Report of a rank to the others before a step: names of its requests' prompts, chunk by chunk, and what it holds."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from struct import Struct

from sglang_mla_ext.prefix.sharded.names import NAME_BYTES, Name, Names

MOST_NAMES = 4096
"""Most names in a report. Prompts that do not fit are reported as far as they do."""

_NAME_WORDS, _NAME = NAME_BYTES // 8, Struct(f"{NAME_BYTES}s")


def fingerprint(words: Sequence[int]) -> int:
    """Return a 64-bit hash of 64-bit integers. Clients cannot search for two that are alike: the prompts in them are
    keyed names."""
    return int.from_bytes(blake2b(array("q", words).tobytes(), digest_size=8).digest(), "little", signed=True)


@dataclass(frozen=True)
class Report:
    """A rank's batch as a tree of chunks, each of which stands for the path that ends in it.

    Attributes:
        names: of chunks, see names.py, parents before children.
        parents: `[names]` index of the chunk before, -1 for the first of a prompt.
        deepest: `[requests]` index of the last one of each request's prompt, -1 for none.
        rows: `[requests]` of each in the step.
        held: names of what the rank has expanded, whether or not a request has it.
    """

    names: Names = ()
    parents: tuple[int, ...] = ()
    deepest: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    held: Names = ()

    @classmethod
    def of(cls, paths: Sequence[Names], rows: Sequence[int], held: Iterable[Name]) -> Report:
        """
        Args:
            paths: `[requests]` names of each prompt's chunks, as far as its latent rows are there.
            rows: `[requests]` of each.
        """
        places: dict[Name, int] = {}
        names: list[Name] = []
        parents: list[int] = []
        deepest = []
        for path in paths:
            known = len(path)
            while known and path[known - 1] not in places:
                known -= 1
            at = places[path[known - 1]] if known else -1
            for name in path[known : known + MOST_NAMES - len(names)]:
                places[name] = len(names)
                names.append(name)
                parents.append(at)
                at = places[name]
            deepest.append(at)
        return cls(tuple(names), tuple(parents), tuple(deepest), tuple(rows), tuple(sorted(held)))

    def words(self) -> array[int]:
        """Return the report as 64-bit integers."""
        words = array("q", (len(self.names), len(self.deepest), len(self.held)))
        words.extend((*self.parents, *self.deepest, *self.rows))
        words.frombytes(b"".join((*self.names, *self.held)))
        return words

    @cached_property
    def said(self) -> tuple[array[int], int]:
        """Words of the report, and their fingerprint."""
        words = self.words()
        return words, fingerprint(words)

    @classmethod
    def from_words(cls, words: Sequence[int]) -> Report:
        """Return the report that these words begin with, whatever is behind it."""
        names, requests, held = words[:3]
        parents, at = tuple(words[3 : 3 + names]), 3 + names
        deepest, at = tuple(words[at : at + requests]), at + requests
        rows, at = tuple(words[at : at + requests]), at + requests
        packed = array("q", words[at : at + (names + held) * _NAME_WORDS])
        found = tuple(name for (name,) in _NAME.iter_unpack(packed))
        return cls(found[:names], parents, deepest, rows, found[names:])
