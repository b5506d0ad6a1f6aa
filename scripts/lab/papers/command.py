"""Measures the experiments again, draws them in the papers' form, and draws TyphoonMLA's figures from its formulas."""

from __future__ import annotations

import typer

from lab.papers import formulas_plot, plot, reproduce

app = typer.Typer(add_completion=False, help=__doc__)
app.command("reproduce")(reproduce.main)
app.command("plot")(plot.main)
app.command("formulas")(formulas_plot.main)
