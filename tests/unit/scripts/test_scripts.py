"""scripts/: every file is a command that starts; what they share is in packages, and no command imports another.
scripts/lab: every study has a help, and is listed."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest
import study
import typer
from typer.testing import CliRunner

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
COMMANDS = sorted(path.stem for path in SCRIPTS.glob("*.py"))
MOST_LINES = 400


def imported(path: Path) -> set[str]:
    """Top-level names of the modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("path", sorted(SCRIPTS.rglob("*.py")), ids=lambda path: str(path.relative_to(SCRIPTS)))
def test_no_file_imports_a_command(path: Path) -> None:
    assert not imported(path) & set(COMMANDS)
    assert len(path.read_text().splitlines()) <= MOST_LINES


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_a_help(name: str) -> None:
    """In this process: it imports everything that the command needs."""
    command = importlib.import_module(name)
    app = typer.Typer()
    app.command()(command.main)
    found = CliRunner().invoke(app, ["--help"])
    assert found.exit_code == 0, found.output
    assert "Usage:" in found.output


def run_study(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(study.app, [*arguments])
    return found.exit_code, found.output


def test_studies_are_listed_each_with_its_question() -> None:
    code, said = run_study()
    assert code == 0 and len(study.studies()) == len(said.splitlines()) == 3
    assert all(re.match(r"\w+ +[A-Z]", line) for line in said.splitlines())
    assert {file.parent.name for file in study.LAB.glob("*/*.py")} == set(study.studies())
    code, said = run_study("no-such-study")
    assert code == 2 and "papers" in said


@pytest.mark.parametrize("name", study.studies())
def test_every_study_has_a_help(name: str) -> None:
    code, said = run_study(name, "--help")
    assert code == 0 and f"Usage: study.py {name}" in said
