"""scripts/: every file is a command that starts; what they share is in packages, and no command imports another."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
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
def test_every_command_has_a_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process: it imports everything that the command needs."""
    command = importlib.import_module(name)
    if name == "bench_client":  # passes what it does not know on to SGLang's own parser
        monkeypatch.setattr(sys, "argv", [name, "--help"])
        with pytest.raises(SystemExit, match="0"):
            command.main()
        assert "usage:" in capsys.readouterr().out
        return
    app = typer.Typer()
    app.command()(command.main)
    found = CliRunner().invoke(app, ["--help"])
    assert found.exit_code == 0, found.output
    assert "Usage:" in found.output
