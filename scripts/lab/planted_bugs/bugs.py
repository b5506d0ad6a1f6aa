"""The planted bugs: data in the YAML files beside this one, and how one is put into a tree."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

FOLDER = Path(__file__).parent
REPOSITORY = FOLDER.parents[2]


@dataclass(frozen=True)
class Bug:
    """One wrong edit of one file.

    Attributes:
        name: what is wrong, in a few words; unique.
        file: of the repository; text: occurs in it exactly once; becomes: what stands there instead.
        tests: files or node ids that should fail, of tests/kernels or of others, not both.
        user: what somebody who runs the server would notice.
    """

    name: str
    file: str
    text: str
    becomes: str
    tests: tuple[str, ...]
    user: str

    @property
    def of_kernels(self) -> bool:
        """Whether its tests run in Triton's interpreter."""
        return self.tests[0].startswith("tests/kernels")

    def edited(self, tree: Path) -> str:
        """The file with the bug in it.

        Raises:
            ValueError: the text does not occur exactly once.
        """
        content = (tree / self.file).read_text(encoding="utf-8")
        if (count := content.count(self.text)) != 1:
            raise ValueError(f"{self.name}: its text occurs {count} times in {self.file}, not once: {self.text!r}")
        return content.replace(self.text, self.becomes)

    @contextmanager
    def planted(self, tree: Path) -> Iterator[None]:
        """Meanwhile it is in a tree. Raises what `edited` does."""
        file, edited = tree / self.file, self.edited(tree)
        before = file.read_text(encoding="utf-8")
        file.write_text(edited, encoding="utf-8")
        try:
            yield
        finally:
            file.write_text(before, encoding="utf-8")


def read_bugs() -> list[Bug]:
    """All of them, file by file."""
    found = []
    for file in sorted(FOLDER.glob("*.yaml")):
        for each in yaml.safe_load(file.read_text(encoding="utf-8")):
            found.append(Bug(**each | {"tests": tuple(each["tests"])}))
    return found
