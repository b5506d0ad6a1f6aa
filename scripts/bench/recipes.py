"""Command lines of real deployments, configs/recipes/*.yaml, and the tables made from them."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import yaml

from bench.tables import REPOSITORY

FOLDER = REPOSITORY / "configs" / "recipes"
OUTCOMES = ("works", "works with a change", "refused")


def families() -> dict[str, list[dict[str, Any]]]:
    """The recipes of each file; their fields are explained in configs/recipes/README.md."""
    return {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.yaml"))}


def recipes() -> list[dict[str, Any]]:
    """All of them."""
    return [recipe for family in families().values() for recipe in family]


def words(recipe: dict[str, Any]) -> list[str]:
    """A recipe as a launch command, in words."""
    environment = [f"{name}={value}" for name, value in recipe.get("environment", {}).items()]
    return [*environment, "python", "-m", "sglang.launch_server", *shlex.split(recipe["command"])]


def recipe_tables() -> dict[str, str]:
    """The tables of docs/recipes.md, by their marks."""
    tables = {family: recipe_table(of) for family, of in families().items()}
    return {"counts": counts(recipes()), "reasons": reasons(recipes()), **tables}


def recipe_table(of: Sequence[dict[str, Any]]) -> str:
    """One row for each recipe."""
    rows = [
        (
            f"[{recipe['name']}]({recipe['source']})",
            recipe["gpus"],
            str(recipe["date"]),
            recipe["expected"],
            recipe.get("run", ""),
            "; ".join(_code(text) for text in recipe.get("change" if _starts(recipe) else "because", ())),
        )
        for recipe in of
    ]
    return _table(("recipe", "GPUs", "date", "with hybrid_mla", "how far it was run", "changed, or why not"), rows)


def counts(of: Iterable[dict[str, Any]]) -> str:
    """How many start, by where they come from."""
    by = Counter((recipe["from"], recipe["expected"]) for recipe in of)
    rows = []
    for kind in ("public", "adapted"):
        number = [by[kind, outcome] for outcome in OUTCOMES]
        rows.append((kind, *map(str, number), f"{sum(number[:2])} of {sum(number)}"))
    total = [sum(by[kind, outcome] for kind in ("public", "adapted")) for outcome in OUTCOMES]
    rows.append(("all", *map(str, total), f"{sum(total[:2])} of {sum(total)}"))
    return _table(("recipes", *OUTCOMES, "start"), rows)


def reasons(of: Iterable[dict[str, Any]]) -> str:
    """What keeps recipes from starting, and how many each reason keeps alone."""
    refused = [[_short(text) for text in recipe["because"]] for recipe in of if not _starts(recipe)]
    each = Counter(reason for found in refused for reason in found)
    alone = Counter(found[0] for found in refused if len(found) == 1)
    rows = [(_code(reason), str(count), str(alone[reason])) for reason, count in each.most_common()]
    return _table(("reason", "recipes", "alone"), rows)


def _starts(recipe: dict[str, Any]) -> bool:
    return bool(recipe["expected"] != "refused")


def _short(finding: str) -> str:
    """A finding without its advice."""
    return finding.partition(" is not supported")[0]


def _code(text: str) -> str:
    """Flags and variables in Markdown's code."""
    return re.sub(r"(--[\w-]+(?: (?!in place)[\w.]*\d[\w.]*)?|SGLANG_\w+)", r"`\1`", text)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
