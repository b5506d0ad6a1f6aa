"""Rows of tables that combine several cases of records, or that follow from the package and its configurations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any

from bench.rank_rows import MODEL_NAMES, middle
from bench.recipes import OUTCOMES, Row, recipes, rows
from bench.records import Record, latest
from sglang_mla_ext.adapter.launch.tested_configurations import MOST_RANKS, SERVER
from sglang_mla_ext.options import OPTIONS
from sglang_mla_ext.prefix.planner.model_dims import ModelDims

OURS = "hybrid_mla"
RANKS = {"TP 8": 8, "TP 16": 16, "DP attention": 1}
MEMORY_OF = {
    **{name: MODEL_NAMES[name] for name in ("deepseek-v3", "kimi-k2", "kimi-k3")},
    **{"longcat-flash": "LongCat-Flash", "glm-4.7-flash": "GLM-4.7-Flash"},
}

USUAL_INTERVAL = 1000
"""Steps from one shadow check to the next."""

Key = tuple[Any, ...]


def workloads(records: Iterable[Record]) -> Iterator[Row]:
    """Yield the output rates of workloads beside FlashMLA's, both over BF16; medians over runs."""
    found: dict[Key, dict[str, list[Record]]] = {}
    for record in records:
        case = record["case"]
        if "fp8" not in case.get("flags", "") and "version" not in case and not record.get("excluded"):
            key = record["bench"], case["prefix"], case["concurrency"], case["heads"], case["layers"]
            found.setdefault(key, {}).setdefault(record["impl"], []).append(record)
    for (name, prefix, requests, heads, layers), of in found.items():
        ours, stock = of[OURS], of["sglang_flashmla"]
        rates = {"ours": middle(ours, "output_tok_s"), "stock": middle(stock, "output_tok_s")}
        model = {"heads": heads, "layers": layers, "requests": requests}
        yield {"workload": name, "prefix": prefix, **model, **rates, "records": [*ours, *stock]}


def prefix_memory(records: object) -> Iterator[Row]:
    """Yield the memory of an expanded token on one GPU, in GiB, by model and ranks."""
    for name, title in MEMORY_OF.items():
        model = ModelDims.of(name)
        for ranks, of in RANKS.items():
            if of > 8 and name != "kimi-k3":
                continue
            if model.num_heads % of:
                ranks, of = "TP 4", 4
            heads = model.num_heads // of
            values = heads * (model.qk_nope_head_dim + model.v_head_dim)
            bf16, fp8 = (model.num_layers * (values * size + 2 * model.qk_rope_head_dim) / 2**30 for size in (2, 1))
            sizes = {f"{dtype}_{n}": n * each for dtype, each in (("bf16", bf16), ("fp8", fp8)) for n in (7069, 26472)}
            of_model = {"model": title, "ranks": ranks, "heads": heads}
            yield of_model | sizes | {"kib": bf16 * 2**20, "records": []}


def flags(records: object) -> Iterator[Row]:
    """Yield the extension's flags, their defaults and their help."""
    for option in OPTIONS.values():
        default = "automatic" if option.default is None else option.default
        yield {"flag": option.flag, "default": default, "meaning": option.help, "records": []}


def tested(records: object) -> Iterator[Row]:
    """Yield how many ranks each part of a deployment was run with, by release and place."""
    names = dict.fromkeys(name for of in MOST_RANKS.values() for place in of.values() for name in place)
    for name in names:
        if name != SERVER:
            ranks = {release: {place: of[place].get(name) for place in of} for release, of in MOST_RANKS.items()}
            yield {"part": name, **{release.replace(".", "_"): of for release, of in ranks.items()}, "records": []}


def recipes_by_outcome(records: object) -> Iterator[Row]:
    """Yield recipes; those with the same answer share a row."""
    found: dict[Key, list[Row]] = {}
    for row in rows(sorted(recipes(), key=lambda recipe: OUTCOMES.index(recipe["expected"]))):
        found.setdefault((row["expected"], row["run"], row["notes"]), []).append(row)
    for (expected, run, notes), of in found.items():
        links = ", ".join(f"[{one['name']}]({one['source']})" for one in of)
        yield {"links": links, "expected": expected, "run": run or "–", "notes": notes or "–", "records": []}


def shadow_cost(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield a decode step with and without checks, medians over the rounds of the newest run, and the cost that follows
    for the usual interval from what the number that every merge reads costs (records of `watch`)."""
    records = list(records)
    steps = [record for record in records if record["file"] == "shadow"]
    merges = latest((record for record in records if record["file"] == "watch"), "heads", "requests")

    def step_ms(case: dict[str, Any], of: Record) -> float:
        return median(one["step_ms"] for one in steps if one["case"] == case and one["commit"] == of["commit"])

    for (*_, interval), record in latest(steps, "heads", "layers", "prompt", "concurrency", "verify_interval").items():
        if not interval:
            continue
        case = record["case"]
        plain = step_ms({name: value for name, value in case.items() if name != "verify_interval"}, record)
        checked, usual = step_ms(case, record), None
        if merge := merges.get((record["impl"], case["heads"], case["concurrency"])):
            of_reading = merge["difference_us"] * case["layers"] / (plain * 1e3)  # in every step, checked or not
            usual = (checked / plain - 1 - of_reading) * interval / USUAL_INTERVAL + of_reading
        yield {
            **case,
            "plain": plain,
            "checked": checked,
            "cost": checked / plain - 1,
            "usual": usual,
            "records": [record],
        }


def with_server(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record of a soak with its server in words."""
    server = "two ranks, sharded prefixes" if "--enable-dp-attention" in record["command"] else "one rank"
    return record | {"server": server + (", penalties" if record["case"].get("penalties") else "")}
