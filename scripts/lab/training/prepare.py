"""Make the demo model's training data from Debian packages of fixed versions: tokenizer, prose, words, names, values.

    python scripts/study.py training prepare .demo/data [--packages .demo/packages]

Packages that are not in the folder are fetched with apt-get. Chats are not stored: chats.py draws them from what
is written here. See configs/demo_model/README.md for the licences.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lab.training import sources
from lab.training.preparation import documents, write


def main(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    packages: Annotated[Path, typer.Option(help="Folder of the unpacked packages.")] = Path(".demo/packages"),
    vocab: Annotated[int, typer.Option(min=512, max=65536, help="Tokens in the vocabulary.")] = 4096,
    words: Annotated[int, typer.Option(min=100, help="Words of the dictionary.")] = 10_000,
) -> None:
    """Write tokenizer, prose, words, names and values."""
    sources.fetch(packages)
    statistics = write(out, list(documents(packages)), sources.words(packages, words), vocab)
    print(json.dumps(statistics, indent=1))
