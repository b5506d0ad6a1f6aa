"""Texts with free licences that Debian packages carry: documentation, novels, and WordNet's glosses.

`fetch` unpacks the packages with apt-get and dpkg-deb; `documents` and `words` read what they hold. The licences are
listed in configs/demo_model/README.md.
"""

from __future__ import annotations

import csv
import re
import subprocess
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import yaml

WORDNET, DICTIONARY = ("wordnet-base", "1:3.0-37"), "usr/share/wordnet"
NOVELS = ("r-cran-janeaustenr", "1.0.0-1")
DOCUMENTATION: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("packages.yaml").read_text("utf-8"))
"""Version and files of each package of documentation."""

BLOCK_TAGS = "p li ul ol dl dd dt h1 h2 h3 h4 h5 h6 div section table thead tbody tr td th blockquote article aside"
HIDDEN_TAGS = "script style pre head nav svg select button"
BLOCKS, HIDDEN = (frozenset(tags.split()) for tags in (BLOCK_TAGS, HIDDEN_TAGS))
SHORTEST = 60  # characters of a paragraph
GLOSSES_PER_PAGE = 50
PARTS_OF_SPEECH = {"noun": "noun", "verb": "verb", "adj": "adjective", "adv": "adverb"}


class Document(NamedTuple):
    """A page or a chapter."""

    source: str  # package
    name: str
    text: str


def fetch(folder: Path) -> None:
    """Download the packages that are missing from `folder` and unpack each into a folder of its name."""
    folder.mkdir(parents=True, exist_ok=True)
    packages = {WORDNET[0]: WORDNET[1], NOVELS[0]: NOVELS[1]} | {name: of[0] for name, of in DOCUMENTATION.items()}
    for name, version in packages.items():
        if (folder / name / "usr").is_dir():
            continue
        if not list(folder.glob(f"{name}_*.deb")):
            subprocess.run(["apt-get", "-qq", "download", f"{name}={version}"], cwd=folder, check=True)
        (folder / name).mkdir(exist_ok=True)
        subprocess.run(["dpkg-deb", "-x", str(next(folder.glob(f"{name}_*.deb"))), str(folder / name)], check=True)


def is_prose(paragraph: str) -> bool:
    """Return whether a paragraph is one or more sentences, and not a menu, a table or code."""
    letters = sum(letter.isascii() and (letter.isalpha() or letter == " ") for letter in paragraph)
    return len(paragraph) >= SHORTEST and paragraph[-1] in ".!?:)" and letters >= 0.85 * len(paragraph)


class Page(HTMLParser):
    """Collects the paragraphs of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self._parts: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden += tag in HIDDEN
        if tag in BLOCKS or tag in HIDDEN:
            self.flush()

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in HIDDEN and self._hidden > 0
        if tag in BLOCKS or tag in HIDDEN:
            self.flush()

    def handle_data(self, data: str) -> None:
        if not self._hidden:
            self._parts.append(data)

    def flush(self) -> None:
        paragraph = " ".join("".join(self._parts).replace("¶", "").split())
        self._parts.clear()
        if paragraph and is_prose(paragraph):
            self.paragraphs.append(paragraph)


def page_paragraphs(path: Path) -> list[str]:
    """Prose of an HTML page or a POD file."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".pod":
        return pod_paragraphs(text)
    page = Page()
    page.feed(text)
    page.close()
    page.flush()
    return page.paragraphs


def pod_paragraphs(text: str) -> list[str]:
    """Prose of Perl's documentation format: paragraphs that are not indented, without its markup."""
    text = text.replace("E<gt>", "›").replace("E<lt>", "‹")
    while True:
        plain = re.sub(r"\b[A-Z](?:<<\s|<)([^<>]*?)(?:\s>>|>)", r"\1", text)
        if plain == text:
            break
        text = plain
    text = text.replace("›", ">").replace("‹", "<")
    found = (" ".join(block.split()) for block in re.split(r"\n\s*\n", text) if block[:1] not in ("=", " ", "\t", ""))
    return [paragraph for paragraph in found if is_prose(paragraph)]


def page_files(folder: Path, package: str) -> list[Path]:
    """The pages of one package of documentation."""
    return sorted(path for path in (folder / package).glob(DOCUMENTATION[package][1]) if path.is_file())


def novel_lines(path: Path) -> Iterator[list[str]]:
    """Yield each vector of strings in an R data file (`.rdb`): a length, then a compressed object, repeated."""
    rest = path.read_bytes()
    while rest:
        inflater = zlib.decompressobj()
        data = inflater.decompress(rest[4:])
        rest = inflater.unused_data
        lines, at = [], data.find(b"\x00\x04\x00\x09", data.find(b"\x00\x00\x00\x10"))
        while data[at : at + 4] in (b"\x00\x04\x00\x09", b"\x00\x00\x80\x09"):
            size = int.from_bytes(data[at + 4 : at + 8], "big")
            lines.append(data[at + 8 : at + 8 + size].decode())
            at += 8 + size
        yield lines


def novels(folder: Path) -> Iterator[Document]:
    """The chapters of Jane Austen's novels."""
    path = next((folder / NOVELS[0]).glob("**/data/Rdata.rdb"))
    for number, lines in enumerate(novel_lines(path)):
        chapters = re.split(r"\n(?=chapter\b[^\n]{0,12}\n)", "\n".join(lines), flags=re.IGNORECASE)
        for index, chapter in enumerate(chapters):
            blocks = (" ".join(block.split()).replace("_", "") for block in re.split(r"\n\s*\n", chapter))
            text = "\n".join(block for block in blocks if len(block) > 20)
            if text:
                yield Document(NOVELS[0], f"{number}/{index}", text)


def glosses(folder: Path) -> Iterator[Document]:
    """Yield all of WordNet as a printed dictionary has it, with examples, in pages."""
    for part in PARTS_OF_SPEECH:
        found = synsets(folder, part).values()
        lines = [f"{', '.join(one.names).replace('_', ' ')}: {one.gloss}" for one in found]
        for at in range(0, len(lines), GLOSSES_PER_PAGE):
            yield Document(WORDNET[0], f"{part}/{at}", "\n".join(lines[at : at + GLOSSES_PER_PAGE]))


@dataclass
class Word:
    """A word of the dictionary, in its most common sense."""

    word: str
    part: str
    gloss: str
    synonyms: list[str] = field(default_factory=list)
    opposites: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # of what it is a kind


def clean_gloss(gloss: str) -> str:
    """A gloss without examples, remarks in brackets and second halves."""
    gloss = re.sub(r"\s*\([^()]*\)\s*", " ", gloss.split('"')[0]).split(";")[0]
    return " ".join(gloss.split()).strip(" ,:;.")


def words(folder: Path, count: int) -> list[Word]:
    """The `count` words that WordNet's tagged texts use most, most frequent first."""
    base = folder / WORDNET[0] / DICTIONARY
    uses = pd.read_csv(base / "cntlist.rev", sep=" ", names=["key", "sense", "times"], quoting=csv.QUOTE_NONE)
    uses[["lemma", "part"]] = uses["key"].str.split("%", n=1, expand=True)
    uses = uses[uses["lemma"].str.fullmatch("[a-z]{3,}")]
    uses["part"] = uses["part"].str[0].map(dict(zip("12345", (*PARTS_OF_SPEECH, "adj"), strict=True)))
    best = uses.sort_values(["times", "part", "sense"], ascending=[False, False, True]).drop_duplicates("lemma")
    totals = uses.groupby("lemma")["times"].sum().sort_values(ascending=False, kind="stable")
    senses = {part: _index(base / f"index.{part}") for part in PARTS_OF_SPEECH}
    known = {part: synsets(folder, part) for part in PARTS_OF_SPEECH}

    def plain(names: Iterable[str]) -> list[str]:
        return [name for name in names if name.isalpha() and name.islower()]

    found = []
    for lemma, part, sense in best.set_index("lemma").loc[totals.index, ["part", "sense"]].itertuples():
        offsets = senses[part].get(lemma, ())
        if not 1 <= sense <= len(offsets):
            continue  # a few counts are of an older numbering
        own = known[part][offsets[sense - 1]]
        gloss = clean_gloss(own.gloss)
        if 10 <= len(gloss) <= 120 and gloss.isascii():
            opposites = [
                known[of][target].names[max(number, 1) - 1]
                for owner, of, target, number in own.opposites
                if owner in ("", lemma)
            ]
            kinds = known[part][own.kinds[0]].names if own.kinds and part == "noun" else []
            others = [name for name in own.names if name != lemma]
            found.append(Word(lemma, PARTS_OF_SPEECH[part], gloss, plain(others), plain(opposites), plain(kinds)))
        if len(found) == count:
            break
    return found


class Synset(NamedTuple):
    """Words for one thing."""

    names: list[str]
    gloss: str
    opposites: list[tuple[str, str, str, int]]  # word it belongs to, "" for all; part, synset, number of the opposite
    kinds: list[str]  # offsets of what it is a kind of


def _index(path: Path) -> dict[str, list[str]]:
    """Offsets of each lemma's synsets, commonest first."""
    found = {}
    for line in path.read_text().splitlines():
        if not line.startswith(" "):
            lemma, _, count, *rest = line.split()
            found[lemma] = rest[-int(count) :]
    return found


def synsets(folder: Path, part: str) -> dict[str, Synset]:
    """Synsets by offset, in the order of the file."""
    letters = {"n": "noun", "v": "verb", "a": "adj", "s": "adj", "r": "adv"}
    found = {}
    for line in (folder / WORDNET[0] / DICTIONARY / f"data.{part}").read_text().splitlines():
        if line.startswith(" "):
            continue
        head, _, gloss = line.partition(" | ")
        offset, _, _, size, *rest = head.split()
        names = [re.sub(r"\(.*\)", "", name) for name in rest[: 2 * int(size, 16) : 2]]
        pointers, opposites, kinds = rest[2 * int(size, 16) + 1 :], [], []
        for at in range(0, 4 * int(rest[2 * int(size, 16)]), 4):
            sign, target, letter, link = pointers[at : at + 4]
            if sign == "!":
                owner = int(link[:2], 16)
                opposites.append((names[owner - 1] if owner else "", letters[letter], target, int(link[2:], 16)))
            elif sign == "@":
                kinds.append(target)
        found[offset] = Synset(names, " ".join(gloss.split()), opposites, kinds)
    return found
