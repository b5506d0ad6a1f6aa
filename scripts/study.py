"""Run a study of scripts/lab; without a name, list them.

python scripts/study.py
python scripts/study.py accuracy --help
python scripts/study.py accuracy --out benchmarks/results/accuracy.jsonl
"""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from typing import Annotated

import typer

LAB = Path(__file__).resolve().parent / "lab"
app = typer.Typer(add_completion=False)


def studies() -> dict[str, str]:
    """Names, and the question of each: its package's docstring. None is imported."""
    found = sorted(LAB.glob("*/__init__.py"))
    return {file.parent.name: ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "" for file in found}


@app.command(context_settings={"allow_interspersed_args": False})
def main(
    name: Annotated[str | None, typer.Argument(help="A folder of scripts/lab; left out: all are listed.")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="Arguments of the study; --help lists them.")] = None,
) -> None:
    """Run a study of scripts/lab; without a name, list them."""
    if name is None:
        print("\n".join(f"{study:12} {question}" for study, question in studies().items()))
    elif name in studies():
        importlib.import_module(f"lab.{name}.command").app(args=arguments or [], prog_name=f"study.py {name}")
    else:
        raise typer.BadParameter(f"there is no study {name!r}, only {', '.join(studies())}")


if __name__ == "__main__":
    app()
