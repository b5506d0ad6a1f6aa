"""Command lines of real deployments, configs/recipes/*.yaml, and the tables made from them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any

import yaml

from bench.records import REPOSITORY

FOLDER = REPOSITORY / "configs" / "recipes"
Row = dict[str, Any]
OUTCOMES = ("works", "works with a change", "refused")


def recipes() -> list[dict[str, Any]]:
    """The recipes of all files; their fields are explained in configs/recipes/README.md."""
    files = sorted(FOLDER.glob("*.yaml"))
    return [recipe for path in files for recipe in yaml.safe_load(path.read_text(encoding="utf-8"))]


def words(recipe: dict[str, Any]) -> list[str]:
    """A recipe as a launch command, in words."""
    environment = [f"{name}={value}" for name, value in recipe.get("environment", {}).items()]
    return [*environment, "python", "-m", "sglang.launch_server", *shlex.split(recipe["command"])]


def rows(of: Iterable[dict[str, Any]]) -> Iterator[Row]:
    """Yield recipes with what was changed, or why they are refused."""
    for recipe in of:
        notes = recipe.get("because" if recipe["expected"] == "refused" else "change", ())
        yield {**recipe, "run": recipe.get("run", ""), "notes": "; ".join(map(_code, notes)), "records": []}


def _code(text: str) -> str:
    """Flags and variables in Markdown's code."""
    return re.sub(r"(--[\w-]+(?: (?!in place)[\w.]*\d[\w.]*)?|SGLANG_\w+)", r"`\1`", text)
