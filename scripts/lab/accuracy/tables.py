"""Rows and cells of the tables of what quantisation costs, beyond what bench/tables.yaml says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bench.records import Record, latest

GOALS = {"perplexity_change_pct": 0.1, "lookup_acc_diff_points": 0.3}
"""Largest difference to BF16, to both sides: percent, and percentage points."""


def with_goals(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add to rows whether each met the goals, and the tokens or questions where they are fewer than the first row's."""
    found = []
    for row in rows:
        more: dict[str, Any] = {"goals": goal_verdict(row["records"], noise=row["key"] == "hybrid_mla")}
        for name, of in row.items():
            if isinstance(of, dict) and "case" in of:
                what = "questions" if "questions" in of["case"] else "tokens"
                few = of["case"].get(what, 0) < rows[0].get(name, of)["case"].get(what, 0)
                more[f"{name}_fewer"] = f"; {of['case'][what]:,} {what}" if few else ""
        found.append(row | more)
    return found


def goal_verdict(records: Iterable[Record], noise: bool = False) -> str | None:
    """Return whether all intervals of differences lie within `GOALS`; "open" where one only overlaps with its goal.

    Args:
        noise: the goal is no difference, and met where all intervals hold 0.
    """
    ends = [
        (record[f"{name}_low"], record[f"{name}_high"], goal)
        for record in records
        for name, goal in GOALS.items()
        if name in record
    ]
    if not ends:
        return None
    if noise:
        return "met" if all(low <= 0 <= high for low, high, _ in ends) else "missed"
    if any(low > goal or high < -goal for low, high, goal in ends):
        return "missed"
    return "met" if all(-goal <= low and high <= goal for low, high, goal in ends) else "open"


def ranges(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield how large the trained model's latent rows are, with and without outliers."""
    newest = latest(records, "study", "part", "layer")
    for study, rows in (("demo_ranges", "as trained"), ("outliers_ranges", "with outliers")):
        for part in ("content", "rotary"):
            found = [record for (_, *of, _), record in newest.items() if of == [study, part]]
            medians = [record["abs_p50"] for record in found]
            largest = max(record["abs_max"] for record in found)
            yield {"rows": rows, "part": part, "least": min(medians), "most": max(medians), "largest": largest,
                   "records": found}  # fmt: skip
