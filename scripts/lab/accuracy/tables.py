"""Tables of what quantisation costs, from the study's records."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.records import read_records
from bench.tables import latest, markdown

CACHE_COLUMNS = {  # impl: column
    "bf16": "BF16",
    "hybrid_mla": "ours",
    "snapmla": "SnapMLA",
    "snapmla_config_a": "A",
    "snapmla_config_b": "B",
    "snapmla_config_c": "C",
    "snapmla_config_d": "D",
}
MODEL_NAMES = {
    "sglang_bf16": "BF16",
    "hybrid_mla": "prefix expanded in BF16",
    "hybrid_mla_fp8_prefix": "prefix expanded in FP8",
    "hybrid_mla_fp8_rows": "rows in FP8",
    "snapmla_config_a": "rows in FP8, A",
    "snapmla_config_b": "rows in FP8, B",
    "snapmla_config_c": "rows in FP8, C",
    "snapmla_config_d": "rows in FP8, D",
    "sglang_fp8": "SGLang's FP8",
    "wrong_lse_base": "control: wrong base",
}
SERVED_NAMES = {
    **{
        impl: MODEL_NAMES[impl]
        for impl in ("sglang_bf16", "hybrid_mla", "hybrid_mla_fp8_prefix", "hybrid_mla_fp8_rows")
    },
    "hybrid_mla_fp8_cache": "rows in FP8, prefix expanded in FP8",
    "hybrid_mla_speculative": "prefix expanded in BF16, drafts",
    "sglang_fp8": MODEL_NAMES["sglang_fp8"],
    "wrong_lse_base": MODEL_NAMES["wrong_lse_base"],
    "biased_sums": "control: FP8 sums in place",
}
MODEL_GOALS = {"perplexity_change_pct": 0.1, "lookup_acc_diff_points": 0.3}
"""How far from BF16, to both sides: percent, and percentage points."""
ERROR_NAMES = {"rmse": "RMSE", "cos_dist": "1 - cosine", "rel_err": "relative L2"}


def accuracy(path: Path, study: str, *names: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The newest records of one part of the study, see `latest`."""
    return latest((record for record in read_records(path) if record["case"]["study"] == study), *names)


def accuracy_cache(path: Path) -> str:
    """A table of the errors of attention over a cache rounded in different ways: a row for each measure."""
    records = accuracy(path, "snapmla", "token_sizes", "rotary_logit_std")
    rows = []
    for case in dict.fromkeys(case[1:] for case in records):
        for measure, name in ERROR_NAMES.items():
            sizes, deviation = case
            rows.append(
                (sizes, f"{deviation:.0f}", name, *(f"{records[(impl, *case)][measure]:.2e}" for impl in CACHE_COLUMNS))
            )
    columns = ("sizes of tokens", "deviation of rotary scores", "error", *CACHE_COLUMNS.values())
    return markdown(rows, columns, records)


def accuracy_model(path: Path, study: str = "demo") -> str:
    """A table of what a trained model loses: perplexity and right answers, with the difference to BF16. Of several
    records the one of the most tokens or questions counts, and of those the newest.

    Args:
        study: "demo", or "outliers", with latent rows as large models have them.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in sorted(read_records(path), key=lambda record: (size_of(record), record["date"])):
        case = record["case"]
        if case["study"] == study and record["impl"] in MODEL_NAMES:
            found[record["impl"], case["task"], case.get("length")] = record
    lengths = sorted({length for _, task, length in found if task == "lookup"})
    tasks = (("prose", None), ("dictionary", None), *(("lookup", length) for length in lengths))
    rows = []
    for impl, name in MODEL_NAMES.items():
        of_impl = [found[(impl, *task)] for task in tasks if (impl, *task) in found]
        if len(of_impl) < len(tasks):
            continue
        prose, dictionary, *lookups = of_impl
        fewer = size_of(prose) < size_of(found["sglang_bf16", "prose", None])
        cells = [f"{prose['perplexity']:.3f}" + (f"; {size_of(prose):,} tokens" if fewer else "")]
        cells.append(interval(prose, "perplexity_change_pct", 2))
        for record, metric in ((dictionary, "dictionary_acc"), *((record, "lookup_acc") for record in lookups)):
            cell = answers_cell(record, metric)
            of_all = found["sglang_bf16", record["case"]["task"], record["case"].get("length")]
            cells.append(cell if size_of(record) == size_of(of_all) else f"{cell}; {size_of(record):,} questions")
        rows.append((name, *cells, goal_verdict(of_impl, noise=impl == "hybrid_mla")))
    case = {task: found[("sglang_bf16", *task)]["case"] for task in tasks}
    columns = (
        "",
        f"perplexity, {case[tasks[0]]['tokens']:,} tokens",
        "change %",
        f"dictionary %, {case[tasks[1]]['questions']:,} questions",
        *(f"look-ups in {length:,} tokens %, {case['lookup', length]['questions']:,} questions" for length in lengths),
        "goals",
    )
    return markdown(rows, columns, found)


def accuracy_served(path: Path) -> str:
    """A table of what servers lose, beside what the references lose on as many tokens of prose (`accuracy_model`)."""
    found = accuracy(path, "served", "task", "length")
    references = accuracy(path, "demo", "task", "tokens")
    lengths = sorted({length for _, task, length in found if task == "lookup"})
    tokens = found["sglang_bf16", "prose", None]["case"]["tokens"]
    shown, rows = dict(found), []
    for impl, name in SERVED_NAMES.items():
        prose, reference = found.get((impl, "prose", None)), references.get((impl, "prose", tokens))
        if prose and reference:
            shown["reference", impl] = reference
        cells = [f"{prose['perplexity']:.3f}" if prose else "–"]
        cells += [interval(of, "perplexity_change_pct", 2) if of else "–" for of in (prose, reference)]
        for task, length in (("dictionary", None), *(("lookup", length) for length in lengths)):
            cells.append(answers_cell(found[impl, task, length], f"{task}_acc"))
        rows.append((name, *cells))
    questions = {key[1:]: record["case"]["questions"] for key, record in found.items() if key[1] != "prose"}
    columns = (
        "",
        f"perplexity, {tokens:,} tokens",
        "change %",
        "of the reference %",
        f"dictionary %, {questions['dictionary', None]:,} questions",
        *(f"look-ups in {length:,} tokens %, {questions['lookup', length]:,} questions" for length in lengths),
    )
    return markdown(rows, columns, shown)


def accuracy_ranges(path: Path) -> str:
    """A table of how large the trained model's latent rows are, with and without outliers."""
    names = {"demo_ranges": "as trained", "outliers_ranges": "with outliers"}
    found = {study: accuracy(path, study, "part", "layer") for study in names}
    rows = []
    for study, records in found.items():
        for part in ("content", "rotary"):
            of_part = [record for (_, of, _), record in records.items() if of == part]
            medians, largest = ([record[name] for record in of_part] for name in ("abs_p50", "abs_max"))
            rows.append((names[study], part, f"{min(medians):.2g} to {max(medians):.2g}", f"{max(largest):,.1f}"))
    columns = ("", "part of a latent row", "median, by layer", "largest value")
    return markdown(rows, columns, {key: one for records in found.values() for key, one in records.items()})


def answers_cell(record: dict[str, Any], metric: str) -> str:
    """Right answers in percent, and the difference to BF16 where there is one."""
    difference = interval(record, f"{metric}_diff_points", 2)
    return f"{100 * record[metric]:.1f}" + (f", {difference}" if difference != "–" else "")


def interval(record: dict[str, Any], name: str, digits: int) -> str:
    """A difference and the ends of its interval, with signs; ±0 if all are, and a dash where there is none."""
    if name not in record:
        return "–"
    figures = [round(record[name + end], digits) + 0.0 for end in ("", "_low", "_high")]  # adding turns -0.0 into 0.0
    if not any(figures):
        return "±0"
    value, low, high = (f"{figure:+.{digits}f}" for figure in figures)
    return f"{value} ({low} to {high})"


def size_of(record: dict[str, Any]) -> int:
    """Questions or tokens of a record of the demo model's study."""
    case = record["case"]
    return int(case.get("questions") or case.get("tokens") or 0)


def goal_verdict(records: Iterable[dict[str, Any]], noise: bool = False) -> str:
    """Whether all intervals of differences lie within `MODEL_GOALS`; "open" where one only overlaps with its goal.

    Args:
        noise: the goal is no difference, and met where all intervals hold 0.
    """
    ends = [
        (record[f"{name}_low"], record[f"{name}_high"], goal)
        for record in records
        for name, goal in MODEL_GOALS.items()
        if name in record
    ]
    if not ends:
        return "–"
    if noise:
        return "met" if all(low <= 0 <= high for low, high, _ in ends) else "missed"
    if any(low > goal or high < -goal for low, high, goal in ends):
        return "missed"
    return "met" if all(-goal <= low and high <= goal for low, high, goal in ends) else "open"
