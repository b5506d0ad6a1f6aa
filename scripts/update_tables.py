"""Write the tables of measured figures into README.md and docs from benchmarks/results, so that none is ever typed.

python scripts/update_tables.py            # --check: only say whether they are up to date
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby, pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from planner_verdicts import LARGEST_LOSS, verdicts
from tabulate import tabulate

from sglang_mla_ext.prefix.cost_model import rates_for
from sglang_mla_ext.results import read_records

REPOSITORY = Path(__file__).resolve().parents[1]
RESULTS = REPOSITORY / "benchmarks" / "results"
RIVAL = "sglang_flashmla"
ATTENTION_CASE = {"heads": "heads", "batch": "requests", "prefix": "prefix", "tail": "tail", "spec": "groups"}
ATTENTION_TIMES = {  # column: impl, part, dtype
    "FlashMLA BF16 ms": ("flashmla_bf16", "all", "bf16"),
    "FlashMLA FP8 ms": ("flashmla_fp8", "all", "fp8"),
    "TyphoonMLA parts ms": ("typhoon_parts", "all", "bf16"),
    "ours BF16 ms": ("hybrid_mla", "all", "bf16"),
    "ours FP8 ms": ("hybrid_mla", "all", "fp8"),
    "BF16 shared part ms": ("hybrid_mla", "naive", "bf16"),
    "FP8 shared part ms": ("hybrid_mla", "naive", "fp8"),
}
ABLATION_STEPS = {  # of bench_ablation.py: column
    "triton": "Triton BF16 ms",
    "gluon": "Gluon ms",
    "fp8": "FP8 ms",
    "schedule": "schedule ms",
}
ATTENTION_FLOORS = {"FP8 shared part ms": "of its floor"}
STORAGE_NAMES = {"bf16": "BF16", "fp8": "FP8"}
CACHE_COLUMNS = {  # impl: column
    "bf16": "BF16",
    "hybrid_mla": "ours",
    "snapmla": "SnapMLA",
    "snapmla_config_a": "A",
    "snapmla_config_b": "B",
    "snapmla_config_c": "C",
    "snapmla_config_d": "D",
}
RESCALE_COLUMNS = {
    "amla_base": "base",
    "amla_mul_by_add": "MUL by ADD",
    "amla_uncompensated": "without compensation",
    "hybrid_mla": "powers of two",
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
MODEL_GOALS = {"perplexity_change_pct": 0.1, "lookup_acc_diff_points": 0.3}
"""How far from BF16, to both sides: percent, and percentage points."""
ERROR_NAMES = {"rmse": "RMSE", "cos_dist": "1 - cosine", "rel_err": "relative L2"}


def latest(records: Iterable[dict[str, Any]], *names: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The newest record for each `(impl, case[name], ...)`."""
    return {
        (record["impl"], *(record["case"].get(name) for name in names)): record
        for record in sorted(records, key=lambda record: record["date"])
    }


def compared(path: Path, names: tuple[str, ...], headers: tuple[str, ...]) -> str:
    """A table of hybrid_mla beside SGLang's own backend: decode throughput and time to first token."""
    found = read_records(path)
    for record in found:
        record["case"]["storage"] = prefix_storage(record)
    records = latest(found, *names, "storage")
    rows = []
    for (impl, *case), ours in records.items():
        stock = records.get((RIVAL, *case[:-1], None))
        if impl != "hybrid_mla" or stock is None or ours["decode_tok_s"] is None:
            continue
        rate, stock_rate = ours["decode_tok_s"], stock["decode_tok_s"]
        times = f"{ours['ttft_ms']:,.0f} / {stock['ttft_ms']:,.0f}"
        rows.append((*case, f"{rate:,.0f}", f"{stock_rate:,.0f}", f"{rate / stock_rate:.2f}x", times))
    columns = (*headers, "prefix in", "hybrid_mla tok/s", "flashmla tok/s", "ratio", "first token ms, ours / stock")
    return markdown(sorted(rows, key=lambda row: row[: len(headers) + 1]), columns, records)


def prefix_storage(record: dict[str, Any]) -> str | None:
    """How a run of hybrid_mla stored expanded prefixes."""
    if record["impl"] != "hybrid_mla":
        return None
    case = record["case"]
    return "FP8" if case.get("dtype") == "fp8" or "fp8_e4m3" in case.get("flags", "") else "BF16"


def attention(path: Path) -> str:
    """A table of the kernels' times over shared prefixes, rivals first. Columns without any figure are left out."""
    records = read_records(path)
    records = [record for record in records if "tail" in record["case"]] or records  # the older ones lack the tails
    found = {
        column: latest(
            (record for record in records if (record["impl"], record["part"], record["case"]["dtype"]) == what),
            *ATTENTION_CASE,
        )
        for column, what in ATTENTION_TIMES.items()
    }
    shown = {(column, *case): record for column, of in found.items() for (_, *case), record in of.items()}
    rows = []
    for case in sorted({tuple(case) for _, *case in shown}, key=lambda case: [(v is not None, v) for v in case]):
        times = [shown.get((column, *case)) for column in ATTENTION_TIMES]
        floors = [shown.get((column, *case), {}).get("floor_share") for column in ATTENTION_FLOORS]
        rows.append((*case, *(r and f"{r['ms']:.3f}" for r in times), *(share and f"{share:.0%}" for share in floors)))
    columns = (*ATTENTION_CASE.values(), *ATTENTION_TIMES, *ATTENTION_FLOORS.values())
    kept = [index for index in range(len(columns)) if any(row[index] is not None for row in rows)]
    cells = [tuple("–" if row[index] is None else row[index] for index in kept) for row in rows]
    return markdown(cells, tuple(columns[index] for index in kept), shown)


def steps(path: Path) -> str:
    """A table of the shared part alone, from the portable kernel to the fastest one."""
    records = [record for record in read_records(path) if record.get("part") == "naive"]
    columns = {
        "Triton BF16 ms": [record for record in records if "tail" not in record["case"]],
        "Gluon BF16 ms": [r for r in records if "tail" in r["case"] and r["case"]["dtype"] == "bf16"],
        "Gluon FP8 ms": [r for r in records if r["case"]["dtype"] == "fp8"],
    }
    found = [latest(of_column, "heads", "prefix", "batch") for of_column in columns.values()]
    both = sorted(set.intersection(*(set(of_column) for of_column in found)))
    rows = []
    for case in both:
        times = [of_column[case]["ms"] for of_column in found]
        cells = [f"{times[0]:.3f}"]
        for before, after in pairwise(times):
            cells += [f"{after:.3f}", f"{before / after:.2f}x"]
        rows.append((*case[1:], *cells))
    headers = ("heads", "prefix", "requests", "Triton BF16 ms", "Gluon BF16 ms", "gain", "Gluon FP8 ms", "gain")
    return markdown(rows, headers, {(i, case): found[i][case] for i in range(len(found)) for case in both})


def ablation(path: Path) -> str:
    """A table of the shared part and its merge with one more step in each column, and what each step gains."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for record in sorted(read_records(path), key=lambda record: record["date"]):
        case = record["case"]
        repeated = ((group, len(list(same))) for group, same in groupby(case["groups"]))
        groups = ", ".join(f"{count} x ({group})" if count > 1 else group for group, count in repeated)
        found[case["heads"], groups, record["step"]] = record
    rows = []
    for case in dict.fromkeys(key[:2] for key in found):
        times = [found[(*case, step)]["ms"] for step in ABLATION_STEPS]
        gains = (f"{ms:.3f}, {before / ms:.2f}x" for before, ms in pairwise(times))
        apart = (times[-1] + found[(*case, "quantize")]["ms"]) / times[-1]
        rows.append((*case, f"{times[0]:.3f}", *gains, f"{apart:.2f}x"))
    columns = ("heads", "requests on a prefix of", *ABLATION_STEPS.values(), "query rounded in the kernel")
    return markdown(rows, columns, found)


def expansion(path: Path) -> str:
    """A table of the fused expansion beside torch's, and of the share of a matrix product's rate that it reaches."""
    records = latest(read_records(path), "heads", "dtype", "tokens")
    rows = []
    for impl, heads, dtype, tokens in sorted(records):
        if impl == "hybrid_mla":
            fused, plain = records[impl, heads, dtype, tokens], records.get(("torch", heads, dtype, tokens))
            against = (f"{plain['ms']:.3f}", f"{plain['ms'] / fused['ms']:.2f}x") if plain else ("–", "–")
            rates = (f"{fused['tflops']:.0f}", f"{fused['gemm_share']:.0%}")
            rows.append((heads, STORAGE_NAMES[dtype], f"{tokens:,}", f"{fused['ms']:.3f}", *against, *rates))
    columns = ("heads", "prefix in", "tokens", "fused ms", "torch ms", "gain", "TFLOPS", "of the product's rate")
    return markdown(rows, columns, records)


def prefill(path: Path) -> str:
    """A table of a prefill step's attention to a shared prefix: SGLang's, ours in both storages, and their errors."""
    records = latest(read_records(path), "heads", "prefix", "batch", "new_tokens", "dtype")
    rows = []
    for case in sorted({case[1:-1] for case in records}):
        implementations = (("sglang_chunks", "bf16"), ("hybrid_mla", "bf16"), ("hybrid_mla", "fp8"))
        found = [records.get((impl, *case, dtype)) for impl, dtype in implementations]
        if None in found:
            continue
        sglang, bf16, fp8 = found
        heads, prefix, requests, new_tokens = case
        rows.append(
            (
                heads,
                f"{prefix:,}",
                f"{requests} x {new_tokens}",
                *(f"{record['ms']:.2f}" for record in found),
                f"{bf16['expansion_ms']:.2f} / {fp8['expansion_ms']:.2f}",
                *(f"{sglang['ms'] / ours['ms']:.1f}x" for ours in (bf16, fp8)),
                f"{sglang['rel_err_as_shipped']:.2%} / {sglang['rel_err']:.2%}",
                f"{bf16['rel_err']:.2%} / {fp8['rel_err']:.2%}",
            )
        )
    columns = (
        *("heads", "prefix", "requests x new tokens", "SGLang's chunks ms", "ours BF16 ms", "ours FP8 ms"),
        *("expansion ms, BF16 / FP8", "SGLang / ours BF16", "SGLang / ours FP8"),
        *("rel. error of SGLang, as shipped / natural log", "rel. error of ours, BF16 / FP8"),
    )
    return markdown(rows, columns, records)


def planner(path: Path) -> str:
    """A table of how often the choice with the shipped rates is the fastest mode or nearly, and of the worst choice."""
    records = latest(read_records(path), "heads", "dtype", "prefix", "tail", "batch")
    found = []
    for gpu in dict.fromkeys(record["gpu"] for record in records.values()):
        found += verdicts((record for record in records.values() if record["gpu"] == gpu), rates_for(gpu))
    rows = []
    for heads, dtype in sorted({(verdict.heads, verdict.dtype) for verdict in found}):
        of_row = [verdict for verdict in found if (verdict.heads, verdict.dtype) == (heads, dtype)]
        within = sum(verdict.loss <= LARGEST_LOSS for verdict in of_row)
        worst = max(of_row, key=lambda verdict: verdict.loss)
        where = f"{worst.prefix:,} tokens, {worst.batch} requests" if worst.loss else "–"
        rows.append((heads, STORAGE_NAMES[dtype], len(of_row), within, f"{worst.loss:.1%}", where))
    columns = ("heads", "prefix in", "cases", f"within {LARGEST_LOSS:.0%}", "worst loss", "where")
    return markdown(rows, columns, records)


def accuracy(path: Path, study: str, *names: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The newest records of one study of scripts/accuracy.py, see `latest`."""
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


def accuracy_rescale(path: Path) -> str:
    """A table of the errors of the ways to rescale an accumulator."""
    records = accuracy(path, "amla", "distribution", "size")
    rows = []
    for case in dict.fromkeys(case[1:] for case in records):
        distribution, size = case
        errors = (f"{records[(impl, *case)]['rel_err']:.2e}" for impl in RESCALE_COLUMNS)
        rows.append((distribution, f"{size:.0f}" if distribution == "normal" else f"±{size:.0f}", *errors))
    return markdown(rows, ("distribution", "deviation or range", *RESCALE_COLUMNS.values()), records)


def accuracy_fp16(path: Path) -> str:
    """A table of the errors of attention in FP16, and of the size of what they are errors of."""
    records = accuracy(path, "etap", "distribution", "tokens")
    rows = [
        (distribution, f"{tokens:,}", f"{r['rms']:.2e}", f"{r['rmse']:.2e}", f"{r['rel_err']:.2e}")
        for (_, distribution, tokens), r in records.items()
    ]
    return markdown(rows, ("distribution", "tokens", "RMS of the output", "RMSE", "relative L2"), records)


def accuracy_model(path: Path) -> str:
    """A table of what a trained model loses: perplexity and right answers, with the difference to BF16."""
    records = accuracy(path, "demo", "task", "length")
    found = {(impl, task, length): record for (impl, task, length), record in records.items() if impl in MODEL_NAMES}
    lengths = sorted({length for _, task, length in found if task == "lookup"})
    tasks = (("prose", None), ("dictionary", None), *(("lookup", length) for length in lengths))
    rows = []
    for impl, name in MODEL_NAMES.items():
        of_impl = [found[(impl, *task)] for task in tasks if (impl, *task) in found]
        if len(of_impl) < len(tasks):
            continue
        prose, dictionary, *lookups = of_impl
        cells = [f"{prose['perplexity']:.3f}", interval(prose, "perplexity_change_pct", 2)]
        for record, metric in ((dictionary, "dictionary_acc"), *((record, "lookup_acc") for record in lookups)):
            difference = interval(record, f"{metric}_diff_points", 1)
            cells.append(f"{100 * record[metric]:.1f}" + (f", {difference}" if difference != "–" else ""))
        rows.append((name, *cells, goal_verdict(of_impl)))
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


def interval(record: dict[str, Any], name: str, digits: int) -> str:
    """A difference and the ends of its interval, with signs; ±0 if all are, and a dash where there is none."""
    if name not in record:
        return "–"
    figures = [round(record[name + end], digits) + 0.0 for end in ("", "_low", "_high")]  # adding turns -0.0 into 0.0
    if not any(figures):
        return "±0"
    value, low, high = (f"{figure:+.{digits}f}" for figure in figures)
    return f"{value} ({low} to {high})"


def goal_verdict(records: Iterable[dict[str, Any]]) -> str:
    """Whether all intervals of differences lie within `MODEL_GOALS`; "open" where one only overlaps with its goal."""
    ends = [
        (record[f"{name}_low"], record[f"{name}_high"], goal)
        for record in records
        for name, goal in MODEL_GOALS.items()
        if name in record
    ]
    if not ends:
        return "–"
    if any(low > goal or high < -goal for low, high, goal in ends):
        return "missed"
    return "met" if all(-goal <= low and high <= goal for low, high, goal in ends) else "open"


def markdown(rows: list[tuple[Any, ...]], columns: tuple[str, ...], records: dict[tuple[Any, ...], Any]) -> str:
    """A table, and below it where its figures come from."""
    align = ("right",) * len(columns)
    table = tabulate(rows, columns, tablefmt="github", colalign=align, disable_numparse=True)
    return f"{table}\n\n{provenance(records)}"


def provenance(records: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    """Where the figures come from: GPU, versions, commits, dates, commands."""
    lines = []
    for command in dict.fromkeys(record["command"] for record in records.values()):
        first = next(record for record in records.values() if record["command"] == command)
        versions = [f"{name} {first[name]}" for name in ("torch", "sglang") if first[name]]
        where = ", ".join([first["gpu"], *versions])
        lines.append(f"{where}, commit {first['commit']}, {first['date'][:10]}: `{command}`")
    return "\n\n".join(lines)


def main(check: Annotated[bool, typer.Option("--check", help="Write nothing; exit status 1 if out of date.")] = False):
    """Fill the marked places."""
    engine = ("heads", "layers", "prompt", "concurrency"), ("heads", "layers", "prefix", "requests")
    serving = ("heads", "layers", "prompt", "concurrency"), ("heads", "layers", "prompt", "requests")
    tables = {
        "README.md": {
            "engine": compared(RESULTS / "engine.jsonl", *engine),
            "serving": compared(RESULTS / "serving.jsonl", *serving),
        },
        "docs/performance.md": {
            "attention": attention(RESULTS / "attention.jsonl"),
            "steps": steps(RESULTS / "attention.jsonl"),
            "ablation": ablation(RESULTS / "ablation.jsonl"),
            "expansion": expansion(RESULTS / "expansion.jsonl"),
            "prefill": prefill(RESULTS / "prefill.jsonl"),
            "planner": planner(RESULTS / "planner.jsonl"),
        },
        "docs/accuracy.md": {
            "model": accuracy_model(RESULTS / "accuracy.jsonl"),
            "cache": accuracy_cache(RESULTS / "accuracy.jsonl"),
            "rescale": accuracy_rescale(RESULTS / "accuracy.jsonl"),
            "fp16": accuracy_fp16(RESULTS / "accuracy.jsonl"),
        },
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
