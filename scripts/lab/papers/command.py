"""Measure the papers' experiments again."""

from __future__ import annotations

import typer

from lab.papers import reproduce

app = typer.Typer(add_completion=False, help=__doc__)
app.command("reproduce")(reproduce.main)


@app.callback()
def group() -> None:
    """Keep `reproduce` a command of its own."""
