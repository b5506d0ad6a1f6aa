"""Makes the training data, trains the model and the layer that drafts, and examines a checkpoint."""

from __future__ import annotations

import typer

from lab.training import examine, prepare, train, train_draft

app = typer.Typer(add_completion=False, help=__doc__)
app.command("prepare")(prepare.main)
app.command("train")(train.main)
app.command("draft")(train_draft.main)
app.command("examine")(examine.main)
