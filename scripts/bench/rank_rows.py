"""Rows of tables and plots of one rank of a whole model, beside SGLang's own backends."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from statistics import median
from typing import Any, NamedTuple

from demo_model.rank import ALL_LAYERS, K3_MLA, MODELS

from bench import rank_predictions
from bench.rank_predictions import OURS, named, named_memory, transient_tokens
from bench.records import Record

MOST_REQUESTS = 256
"""Largest number of requests in the table that has one row for each load and prompt."""
LOADS = {"decode": "long answers", "short": "short answers"}
ALL_LOADS = LOADS | {f"{load}, DeepGEMM": f"{name}, DeepGEMM" for load, name in LOADS.items()}
DIVIDED_NAMES = {"tp8": "TP 8", "dp8": "DP 8", "tp16": "TP 16"}
MODEL_NAMES = dict(zip(MODELS, ("DeepSeek-V3", "Kimi-K2", "Kimi-K3", "Kimi-K3's MLA layers alone"), strict=True))
OF_64 = ", pages of 64"
STOCK_BACKENDS = ("fa3", f"fa3{OF_64}", "flashinfer", "flashmla")
HELD = {None: "alone", "off": "alone", "peers": "sharded by stores"}
"""Ways to hold a prompt by `--hybrid-mla-prefix-sharding`; `auto` was NCCL's in the records there are."""

Case = tuple[Any, ...]


class Pair(NamedTuple):
    """Our records of a case and those of the fastest of SGLang's own backends, on a rank with the most layers measured.

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
    ours: list[Record]
    theirs: list[Record]

    @property
    def ratio(self) -> float:
        return middle(self.ours) / middle(self.theirs)

    @property
    def predicted(self) -> tuple[float, float] | None:
        """Return what `plan` predicts for both, in tokens per second; None for passes through linear attention."""
        if self.load == "short" and rank_predictions.of_rank(self.ours[0]).has_states:
            return None
        return rank_predictions.tokens_per_s(self.ours[0]), rank_predictions.tokens_per_s(self.theirs[0])


def headline(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield a row for each model, load and prompt, with what `plan` predicts for it."""
    few = [pair for pair in pairs(records, ALL_LOADS) if pair.requests <= MOST_REQUESTS]
    for pair in {pair[:3]: pair for pair in few}.values():
        sides = {"ours": pair.ours, "theirs": pair.theirs}
        figures = {
            name: {"rate": middle(of), **{metric: middle(of, metric) for metric in ("ttft_ms", "itl_p99_ms")}}
            for name, of in sides.items()
        }
        plan = pair.predicted and dict(zip(("ours", "theirs"), pair.predicted, strict=True))
        how = pair.backend.partition(", ")[2] or None
        row = {"how": how, "plan": plan, "load": ALL_LOADS[pair.load], "records": [*pair.ours, *pair.theirs]}
        yield pair._asdict() | figures | row


def every_pair(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield all pairs with their rates and what `plan` predicts, for the README's plot."""
    for pair in pairs(records):
        plan = pair.predicted
        assert plan is not None  # of the models that are drawn
        rates = {"ours": middle(pair.ours), "theirs": middle(pair.theirs), "plan_ours": plan[0], "plan_theirs": plan[1]}
        records = [*pair.ours, *pair.theirs]
        yield pair._asdict() | rates | {"load": LOADS[pair.load], "records": records}


def sharded(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield the newest runs of DP ranks, by how they hold the prompt, beside fa3 on the same ranks."""
    newest = {(r["impl"], r["case"]["prefix"], r["case"]["requests"], r["case"].get("flags")): r for r in records}
    for (_, *case, _), record in sorted(newest.items(), key=lambda item: (item[0][1:3], held(item[1]))):
        stock = newest.get(("sglang_fa3", *case, None))
        if record["bench"] == "decode":
            plan = {"ms": rank_predictions.step(record).seconds * 1e3}
        else:
            plan = {"tokens_per_s": rank_predictions.served(record).tokens_per_s}
        if stock is not None or record["bench"] == "short":
            of_rank = record["case"]["concurrency"] // record["case"]["dp"]
            row = {"how": held(record), "of_rank": of_rank, "plan": plan, "stock": stock}
            yield {**record["case"], **record, **row, "records": [record, stock] if stock else [record]}


def held(record: Record) -> str:
    """Return how the ranks of a DP server hold a prompt, by its flags."""
    if record["impl"] != OURS:
        return str(record["impl"]).removeprefix("sglang_")
    flags = named(record)
    how = f"{HELD.get(flags.hybrid_mla_prefix_sharding, 'sharded by NCCL')}, {named_memory(record) or 0:g} GiB"
    how += ", FP8" if flags.hybrid_mla_prefix_dtype == "fp8_e4m3" else ""
    how += ", prefill expands for itself" if transient_tokens(record) else ""
    mixed = record["bench"] == "short" and record["hybrid_mla"]["counters"].get("prefills_mixed")
    return how + (", mixed steps" if mixed else "")


def pairs(records: Iterable[Record], loads: Collection[str] = LOADS) -> list[Pair]:
    """Return our runs beside SGLang's own on the same case, over BF16 caches, of whole layers of a model.

    Tensor-parallel ranks come first, then by model, load, prompt and requests. Ours is with default settings where that
    was measured, else with the memory that was named, else with an FP8 prefix.
    """
    found = runs(record for record in records if record["case"].get("of") != K3_MLA)
    most_layers: dict[str, int] = {}
    for _, rank, layers, *_ in found:
        most_layers[rank] = max(layers, most_layers.get(rank, 0))
    shown = []
    for case in dict.fromkeys(key[:-1] for key in found):
        load, rank, layers, prompt, requests, _ = case
        ours = [key[-1] for key in found if key[:-1] == case and is_ours(key[-1])]
        stock = fastest_stock(found, case, "")
        if load in loads and layers == most_layers[rank] and ours and stock:
            backend = min(ours, key=lambda name: ("FP8" in name, name))
            of_ours = found[(*case, backend)]
            what = model_and_ranks(of_ours[0]["case"]), load, prompt, requests
            shown.append(Pair(*what, backend, stock[-1], of_ours, found[stock]))
    return sorted(shown, key=lambda pair: (pair.ours[0]["case"]["rank"] == "dp8", pair[:4]))


def model_and_ranks(case: dict[str, Any]) -> str:
    """Return the model of a record's rank, and how ranks divide it."""
    of = case.get("of", MODELS[0])
    some = f", {case['layers']} layers" if case["layers"] != ALL_LAYERS[of] else ""
    return f"{MODEL_NAMES[of]}, {DIVIDED_NAMES[case['rank']]}{some}"


def runs(records: Iterable[Record]) -> dict[Case, list[Record]]:
    """Group records that are not `excluded` by `(load, rank, layers, prompt, requests, GPU, backend)`."""
    found: dict[Case, list[Record]] = {}
    for record in records:
        if record.get("excluded"):
            continue
        case = record["case"]
        of = "" if case.get("of", MODELS[0]) == MODELS[0] else f" of {case['of']}"
        of = " of Kimi-K3's MLA layers alone" if case.get("of") == K3_MLA else of
        load = record["bench"] + rank_predictions.of_products(record)
        model = load, (case.get("rank") or "-") + of, case["layers"]
        found.setdefault((*model, case["prefix"], case["concurrency"], record["gpu"], served_by(record)), []).append(
            record
        )
    return found


def served_by(record: Record) -> str:
    """Return a backend's name, with the memory for prefixes and other settings that were named."""
    case, flags = record["case"], record["case"].get("flags", "")
    of_cache = ", FP8 cache" if case.get("kv_cache_dtype") == "fp8_e4m3" else ""
    name = str(record["impl"]).removeprefix("sglang_")
    if record["impl"] == OURS:  # `version` is of code that was replaced since
        fp8 = "FP8 prefix" if "fp8_e4m3" in flags else None
        name = ", ".join(filter(None, [OURS, fp8, case.get("version")]))
    mixed_tokens, memory = named(record).hybrid_mla_mixed_tokens, named_memory(record)
    name += f", {memory:g} GiB" if memory is not None else ""
    name += OF_64 if "--page-size 64" in flags else ""  # flashmla's and ours have 64 by themselves
    if tokenizers := re.search(r"--tokenizer-worker-num (\d+)", flags):
        name += f", {tokenizers[1]} tokenizers"
    name += f", at most {mixed_tokens} new tokens mixed in" if mixed_tokens else ""
    name += ", prefill in graphs" if "--cuda-graph-backend-prefill breakable" in flags else ""
    return name + (", nothing mixed in" if mixed_tokens == 0 else "") + of_cache


def is_ours(name: str) -> bool:
    """Return whether a name of `served_by` is our backend's over a BF16 cache, with mixed steps by default."""
    return name.startswith(OURS) and not any(other in name for other in ("mixed in", "tokenizers", "FP8 cache"))


def fastest_stock(found: dict[Case, list[Record]], case: Case, backend: str) -> Case | None:
    """Return the key of the fastest of SGLang's own backends over the same cache."""
    of_cache = ", FP8 cache" if backend.endswith(", FP8 cache") else ""
    own = (key for key in found if key[:-1] == case and key[-1] in {name + of_cache for name in STOCK_BACKENDS})
    return max(own, key=lambda key: middle(found[key]), default=None)


def middle(records: Iterable[Record], name: str | None = None) -> float:
    """Return the median of a figure over runs, by default of `measured_rate`."""
    return median(record[name] if name else measured_rate(record) for record in records)


def measured_rate(record: Record) -> float:
    """Return tokens per second of one rank: while others wait or, where all decode, by the median time between tokens.

    The mean rate of that time would include some of the prefill before it. Where the last request begins too late for a
    time in which all decode, the median is over all tokens.
    """
    if record["steady_tok_s"]:
        return float(record["steady_tok_s"])
    return float(record["case"]["concurrency"] * 1e3 / (record["decode_itl_ms"] or record["itl_ms"]))
