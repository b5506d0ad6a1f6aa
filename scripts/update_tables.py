"""Write the tables of README.md and docs, measured figures from benchmarks/results and launch recipes from
configs/recipes; none is ever typed.

python scripts/update_tables.py            # --check: only say whether they are up to date
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from bench import specs
from bench.kernel_tables import attention, decode, planner
from bench.operating_tables import shadow
from bench.prediction_tables import predictions
from bench.rank_tables import one_rank, one_rank_headline
from bench.recipes import recipe_tables
from bench.serving_tables import headline
from bench.tables import REPOSITORY, RESULTS, table_of
from lab.accuracy.tables import accuracy_cache, accuracy_model, accuracy_ranges, accuracy_served
from lab.papers.experiments import EXPERIMENTS
from lab.papers.tables import reproduced


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with status 1 if out of date.")] = False,
):
    """Write the tables of README.md and docs from records and recipes, between their marks."""
    tables = {
        "README.md": {"one-rank-headline": one_rank_headline(RESULTS / "rank.jsonl", RESULTS / "rank-0.5.23.jsonl")},
        "docs/performance.md": {
            "one-rank": one_rank(RESULTS / "rank.jsonl", RESULTS / "rank-0.5.23.jsonl"),
            "headline": headline(RESULTS / "serving.jsonl"),
            "agents": table_of(specs.AGENTS, RESULTS / "rank-graphs.jsonl"),
            "spread-whole": table_of(specs.SPREAD_WHOLE, RESULTS / "spread.jsonl"),
            "spread-short-whole": table_of(specs.SPREAD_SHORT_WHOLE, RESULTS / "spread.jsonl"),
            "prefill-graphs": table_of(specs.PREFILL_GRAPHS, RESULTS / "rank-graphs.jsonl"),
            "attention": attention(RESULTS / "attention.jsonl"),
            "attention-h100": attention(RESULTS / "h100" / "attention.jsonl"),
            "decode": decode(RESULTS / "decode.jsonl"),
            "predictions": predictions(
                *(RESULTS / f"{name}.jsonl" for name in ("rank", "serving", "engine", "speculative", "context"))
            ),
            "planner": planner(RESULTS / "planner.jsonl"),
            "planner-h100": planner(RESULTS / "h100" / "planner.jsonl"),
            "plan": table_of(specs.PLAN, RESULTS / "plan.jsonl"),
        },
        "docs/accuracy.md": {
            "model": accuracy_model(RESULTS / "accuracy.jsonl"),
            "served": accuracy_served(RESULTS / "accuracy.jsonl"),
            "ranges": accuracy_ranges(RESULTS / "accuracy.jsonl"),
            "outliers": accuracy_model(RESULTS / "accuracy.jsonl", "outliers"),
            "cache": accuracy_cache(RESULTS / "accuracy.jsonl"),
            "rescale": table_of(specs.RESCALE, RESULTS / "accuracy.jsonl"),
            "fp16": table_of(specs.FP16, RESULTS / "accuracy.jsonl"),
        },
        "docs/operating.md": {
            "shadow": shadow(RESULTS / "shadow.jsonl", RESULTS / "watch.jsonl"),
            "soak": table_of(specs.SOAK, RESULTS / "soak.jsonl"),
            "hostile": table_of(specs.HOSTILE, RESULTS / "hostile.jsonl"),
        },
        "docs/kernels.md": {
            "sanitize": table_of(specs.SANITIZE, RESULTS / "sanitize.jsonl"),
        },
        "docs/recipes.md": recipe_tables(),
        "docs/results.md": {name: reproduced(name, RESULTS / "papers.jsonl") for name in EXPERIMENTS},
    }
    stale = [name for name, of_file in tables.items() if not fill(REPOSITORY / name, of_file, write=not check)]
    if check and stale:
        print("out of date:", *stale)
        raise typer.Exit(1)


def fill(path: Path, tables: dict[str, str], *, write: bool) -> bool:
    """Put tables between their marks, `<!-- NAME -->` and `<!-- end NAME -->`.

    Returns:
        whether the file had them already.
    """
    text = before = path.read_text(encoding="utf-8")
    for name, table in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)"
        text, count = re.subn(
            pattern, lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text, flags=re.DOTALL
        )
        if count != 1:
            raise typer.BadParameter(f"{path} has {count} places for the table {name!r}")
    if write:
        path.write_text(text, encoding="utf-8")
    return text == before


if __name__ == "__main__":
    typer.run(main)
