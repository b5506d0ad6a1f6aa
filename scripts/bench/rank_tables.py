"""Tables of one rank of a whole model, beside SGLang's own backends; update_tables.py writes them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from demo_model.rank import ALL_LAYERS, K3_MLA, MODELS

from bench import rank_predictions
from bench.records import read_records
from bench.tables import NOTHING, made_with, markdown, table

ONE_RANK_COLUMNS = (
    *("load", "rank", "layers", "GPU", "prompt", "requests", "backend", "runs", "tok/s", "ratio"),
    *("first token ms, median / p99", "between tokens ms, p99"),
)
HEADLINE_COLUMNS = (
    *("model, ranks", "load", "prompt", "requests", "hybrid_mla tok/s", "fastest of SGLang's", "ratio"),
    *("`plan` says", "first token ms, median: ours / theirs", "between tokens ms, p99: ours / theirs"),
)
MOST_REQUESTS = 256
"""In the README's table, which has one row for each load and prompt; its plot has all."""
LOADS = {"decode": "all decode", "short": "short answers"}
DIVIDED_NAMES = {"tp8": "TP 8", "dp8": "DP 8", "tp16": "TP 16"}
MODEL_NAMES = dict(zip(MODELS, ("DeepSeek-V3", "Kimi-K2", "Kimi-K3", "Kimi-K3's MLA layers alone"), strict=True))
OF_64 = ", pages of 64"
STOCK_BACKENDS = ("fa3", f"fa3{OF_64}", "flashinfer", "flashmla")

Case = tuple[Any, ...]


def backend_name(record: dict[str, Any]) -> str:
    """Return a backend's name in tables; `version` in a case is of code that was replaced since."""
    if record["impl"] != "hybrid_mla":
        return str(record["impl"]).removeprefix("sglang_")
    case = record["case"]
    parts = ["hybrid_mla", *(["FP8 prefix"] if "fp8_e4m3" in case.get("flags", "") else []), case.get("version")]
    return ", ".join(filter(None, parts))


class Pair(NamedTuple):
    """Our records and those of the fastest of SGLang's own backends of one case, which ran on a rank with the most
    layers that were measured of it.

    Attributes:
        model: and how ranks divide it, in words; load: of `LOADS`.
        backend, rival: names of ours and of theirs.
    """

    model: str
    load: str
    prompt: int
    requests: int
    backend: str
    rival: str
    ours: list[dict[str, Any]]
    theirs: list[dict[str, Any]]

    @property
    def ratio(self) -> float:
        return middle(self.ours) / middle(self.theirs)

    @property
    def predicted(self) -> tuple[float, float] | None:
        """What `plan` says of both, in tokens per second; it says nothing of passes through linear attention."""
        if self.load == "short" and rank_predictions.of_rank(self.ours[0]).has_states:
            return None
        return rank_predictions.tokens_per_s(self.ours[0]), rank_predictions.tokens_per_s(self.theirs[0])


def gpu_name(gpu: str) -> str:
    """`H100` of `NVIDIA H100 80GB HBM3`."""
    return gpu.removeprefix("NVIDIA ").split()[0]


def one_rank(*paths: Path) -> str:
    """Return a table of our runs by load, the medians over runs, and the fastest of SGLang's own beside each."""
    found = runs(itertools.chain.from_iterable(map(read_records, paths)))
    rows, shown = [], {}
    for (*case, backend), of_case in sorted(found.items()):
        stock = fastest_stock(found, tuple(case), backend)
        if stock is None or not (backend.startswith(rank_predictions.OURS) or (*case, backend) == stock):
            continue
        shown[(*case, backend)] = of_case
        ratio = f"{middle(of_case) / middle(found[stock]):.2f}x"
        load, rank, layers, prompt, requests, gpu = case
        first = f"{middle(of_case, 'ttft_ms'):,.0f} / {middle(of_case, 'ttft_p99_ms'):,.0f}"
        between = f"{middle(of_case, 'itl_p99_ms'):,.0f}"
        measured = (len(of_case), f"{middle(of_case):,.0f}", ratio, first, between)
        rows.append((load, rank, layers, gpu_name(gpu), f"{prompt:,}", requests, backend, *measured))
    return markdown(rows, ONE_RANK_COLUMNS, numbered(shown))


def one_rank_headline(*paths: Path) -> str:
    """The rows of the README, and what `plan` predicts of them."""
    rows, shown = [], []
    records = itertools.chain.from_iterable(map(read_records, paths))
    few = [pair for pair in pairs(records) if pair.requests <= MOST_REQUESTS]
    for pair in {pair[:3]: pair for pair in few}.values():
        both = pair.ours, pair.theirs
        _, _, named = pair.backend.partition(", ")
        ours = f"{middle(pair.ours):,.0f}" + (f" ({named})" if named else "")
        rates = ours, f"{middle(pair.theirs):,.0f} ({pair.rival})", f"{pair.ratio:.2f}x"
        predicted, said = pair.predicted, NOTHING
        if predicted is not None:
            said = "{:,.0f} / {:,.0f}, {:.2f}x".format(*predicted, predicted[0] / predicted[1])
        times = (" / ".join(f"{middle(each, name):,.0f}" for each in both) for name in ("ttft_ms", "itl_p99_ms"))
        case = pair.model, LOADS[pair.load], f"{pair.prompt:,}", pair.requests
        rows.append((*case, *rates, said, *times))
        shown += [*pair.ours, *pair.theirs]
    return f"{table(rows, HEADLINE_COLUMNS)}\n\n{made_with(shown)}"


def pairs(records: Iterable[dict[str, Any]]) -> list[Pair]:
    """What was measured of ours and of SGLang's own on the same case, over BF16 caches, of whole layers of a model:
    tensor-parallel ranks first, then by model, load, prompt and requests. Ours is as it comes where that was measured,
    else with the memory that was named, else with an FP8 prefix."""
    found = runs(record for record in records if record["case"].get("of") != K3_MLA)
    most_layers: dict[str, int] = {}
    for _, rank, layers, *_ in found:
        most_layers[rank] = max(layers, most_layers.get(rank, 0))
    shown = []
    for case in dict.fromkeys(key[:-1] for key in found):
        load, rank, layers, prompt, requests, _ = case
        ours = [key[-1] for key in found if key[:-1] == case and is_ours(key[-1])]
        stock = fastest_stock(found, case, "")
        if load in LOADS and layers == most_layers[rank] and ours and stock:
            backend = min(ours, key=lambda name: ("FP8" in name, name))
            records = found[(*case, backend)]
            what = model_and_ranks(records[0]["case"]), load, prompt, requests
            shown.append(Pair(*what, backend, stock[-1], records, found[stock]))
    return sorted(shown, key=lambda pair: (pair.ours[0]["case"]["rank"] == "dp8", pair[:4]))


def model_and_ranks(case: dict[str, Any]) -> str:
    """The model of a record's rank, and how ranks divide it."""
    of = case.get("of", MODELS[0])
    some = f", {case['layers']} layers" if case["layers"] != ALL_LAYERS[of] else ""
    return f"{MODEL_NAMES[of]}, {DIVIDED_NAMES[case['rank']]}{some}"


def runs(records: Iterable[dict[str, Any]]) -> dict[Case, list[dict[str, Any]]]:
    """`(load, rank, layers, prompt, requests, GPU, backend)` -> its records, without those that are `excluded`. Their
    commands name no folder of the machine that they ran on."""
    found: dict[Case, list[dict[str, Any]]] = {}
    for record in records:
        if record.get("excluded"):
            continue
        case = record["case"]
        load = record["bench"] + rank_predictions.of_products(record)
        of = "" if case.get("of", MODELS[0]) == MODELS[0] else f" of {case['of']}"
        of = " of Kimi-K3's MLA layers alone" if case.get("of") == K3_MLA else of
        of_model = load, (case.get("rank") or "-") + of, case["layers"]
        key = (*of_model, case["prefix"], case["concurrency"], record["gpu"], served_by(record))
        command = re.sub(r"--out \S*/", "--out benchmarks/results/", record["command"])
        command = re.sub(r" --log-folder \S+", "", command)
        found.setdefault(key, []).append(record | {"command": command})
    return found


def served_by(record: dict[str, Any]) -> str:
    """A backend's name in tables of one rank, with the memory for prefixes if that was named."""
    case = record["case"]
    flags = case.get("flags", "")
    may_ride = rank_predictions.named(record).hybrid_mla_mixed_tokens
    of_cache = ", FP8 cache" if case.get("kv_cache_dtype") == "fp8_e4m3" else ""
    named = rank_predictions.named_memory(record)
    name = backend_name(record) + (f", {named:g} GiB" if named is not None else "")
    # Pages are of a token where nothing is said, and flashmla's and ours of 64.
    name += OF_64 if "--page-size 64" in flags else ""
    if tokenizers := re.search(r"--tokenizer-worker-num (\d+)", flags):
        name += f", {tokenizers[1]} tokenizers"
    name += f", at most {may_ride} new tokens ride" if may_ride else ""
    name += ", prefill in graphs" if "--cuda-graph-backend-prefill breakable" in flags else ""
    return name + (", nothing rides" if may_ride == 0 else "") + of_cache


def is_ours(name: str) -> bool:
    """Whether a name of `served_by` is our backend's over a BF16 cache, with mixed steps as they come."""
    others = ("ride", "tokenizers", "FP8 cache")
    return name.startswith(rank_predictions.OURS) and not any(other in name for other in others)


def fastest_stock(found: dict[Case, list[dict[str, Any]]], case: Case, backend: str) -> Case | None:
    """Key of what a backend of these tables is compared with: the fastest of SGLang's own over the same cache."""
    of_cache = ", FP8 cache" if backend.endswith(", FP8 cache") else ""
    own = (key for key in found if key[:-1] == case and key[-1] in {name + of_cache for name in STOCK_BACKENDS})
    return max(own, key=lambda key: middle(found[key]), default=None)


def middle(records: Iterable[dict[str, Any]], name: str | None = None) -> float:
    """The median of a figure, by default of tokens per second: while others wait or, where all decode, by the median
    time between two tokens of an answer. The mean rate of that time holds some of the prefill before it: answers come
    in pieces, whose tokens are taken to be evenly spread."""
    return median(record[name] if name else measured_rate(record) for record in records)


def measured_rate(record: dict[str, Any]) -> float:
    """Tokens per second of one rank's record, see `middle`. Where the last request begins too late for a time in which
    all decode, by the median over all of them."""
    if record["steady_tok_s"]:
        return float(record["steady_tok_s"])
    return float(record["case"]["concurrency"] * 1e3 / (record["decode_itl_ms"] or record["itl_ms"]))


def numbered(found: dict[Case, list[dict[str, Any]]]) -> dict[Case, dict[str, Any]]:
    """All records behind a table, the earliest of each command first."""
    every = sorted((each for of_case in found.values() for each in of_case), key=lambda record: record["date"])
    return {(number,): record for number, record in enumerate(every)}
