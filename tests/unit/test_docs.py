"""README and docs: commands name scripts and flags that exist, relative links and anchors resolve."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import study

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    REPOSITORY / "README.md",
    *(page for folder in ("configs", "docs", "scripts") for page in sorted((REPOSITORY / folder).rglob("*.md"))),
]
COMMAND = re.compile(r"scripts/[\w/.-]*\.(?:py|sh)(?![\w.])")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def source(script: str) -> str:
    """Text of a script and of what its flags may be declared in."""
    path = REPOSITORY / script
    files = [path, *(path.parent / "lab").rglob("*.py")] if path.name == "study.py" else [path]
    return "".join(file.read_text(encoding="utf-8") for file in files)


def flags(command: str) -> list[str]:
    """Flags of the script itself: those inside quotes belong to what it starts."""
    words = re.sub(r"'[^']*'|\"[^\"]*\"", "", command.split("#")[0].split("&&")[0].split("|")[0])
    return re.findall(r"(?<![\w-])--[a-z][\w-]*", words)


def declared(flag: str, text: str) -> bool:
    """Return whether a script has a flag: named in its source, or a parameter that typer makes one of."""
    return flag in text or re.search(rf"^\s+{flag[2:].replace('-', '_')}: ", text, re.MULTILINE) is not None


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_name_scripts_and_flags_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    wrong = []
    for line in text.splitlines():
        named = list(COMMAND.finditer(line))
        wrong += [found[0] for found in named if not (REPOSITORY / found[0]).is_file()]
        for found, ends in zip(named, [*(one.start() for one in named), len(line)][1:], strict=True):
            after = line[found.end() : ends].partition("`")[0]
            if found[0].endswith(".py") and found[0] not in wrong:
                wrong += [f"{found[0]} {flag}" for flag in flags(after) if not declared(flag, source(found[0]))]
            if found[0] == "scripts/study.py" and (name := re.match(r" ([a-z_]+)", after)):
                wrong += [] if name[1] in study.studies() else [f"study {name[1]}"]
    assert wrong == []


def test_commands_are_found() -> None:
    assert len({found for page in PAGES for found in COMMAND.findall(page.read_text(encoding="utf-8"))}) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_and_anchors_resolve(page: Path) -> None:
    wrong = []
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", page.read_text(encoding="utf-8"))):
        name, _, anchor = link.partition("#")
        if "://" in link or link.startswith("mailto:"):
            continue
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []
