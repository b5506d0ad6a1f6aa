"""Rows of tables and plots of one rank of a whole model, beside SGLang's own backends."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from demo_model.rank import ALL_LAYERS, K3_MLA, MODELS

from bench.predictions import (
    FP8,
    FP8_PREFIX,
    OURS,
    named,
    named_memory,
    of_products,
    of_rank,
    served,
    sharding,
    step,
    storage,
    tokens_per_s,
    transient_tokens,
)
from bench.records import Record
from bench.workloads import AGENTS

MOST_REQUESTS = 256
"""Largest number of requests in the table that has one row for each load and prompt."""
LOADS = {"decode": "long answers", "short": "short answers"}
ALL_LOADS = LOADS | {load: f"agents, {histories}" for load, histories in AGENTS.items()}
MODEL_NAMES = dict(zip(MODELS, ("DeepSeek-V3", "Kimi-K2", "Kimi-K3", "Kimi-K3's MLA layers alone"), strict=True))
STOCK_BACKENDS = ("fa3", "fa3, pages of 64", "flashinfer", "flashmla")
TRIED = re.compile("--(hybrid-mla-mixed-tokens|tokenizer-worker-num|cuda-graph-backend-prefill)")
"""Flags of records that show what a setting does, and that no other backend is compared with."""
HELD = {"off": "alone", "nccl": "sharded by NCCL", "peers": "sharded by stores"}
"""Ways to hold a prompt, by `predictions.sharding`."""


class Case(NamedTuple):
    """Conditions that records have in common which are compared."""

    model: str
    rank: str
    load: str
    drafts: float | None
    layers: int
    prompt: int
    requests: int
    gpu: str


class Pair(NamedTuple):
    """Our records of a case and those of the fastest of SGLang's own backends.

    Attributes:
        backend, rival: names of ours and of theirs.
    """

    case: Case
    backend: str
    rival: str
    ours: list[Record]
    theirs: list[Record]

    @property
    def name(self) -> str:
        """Return the model, and how ranks divide it."""
        divided = self.case.rank
        return f"{MODEL_NAMES[self.case.model]}, {divided[:2].upper()} {divided[2:]}"

    @property
    def title(self) -> str:
        """Return the name, and the layers where they are not all."""
        all_of_them = self.case.layers == ALL_LAYERS[self.case.model]
        return self.name if all_of_them else f"{self.name}, {self.case.layers} layers"


def row_of(pair: Pair) -> dict[str, Any]:
    """Return a row of tables and plots, with figures of `ours` and `theirs`, and what `plan` predicts for both, in
    tokens per second; None for passes through linear attention, and for agents."""
    case, plan = pair.case, dict.fromkeys(("ours", "theirs"))
    if case.load not in AGENTS and (case.load != "short" or not of_rank(pair.ours[0]).has_states):
        plan = {name: tokens_per_s(getattr(pair, name)[0]) for name in ("ours", "theirs")}
    figures = {
        name: {"rate": middle(of), **{metric: middle(of, metric) for metric in ("ttft_ms", "itl_p99_ms")}}
        for name, of in (("ours", pair.ours), ("theirs", pair.theirs))
    }
    return case._asdict() | {
        "name": pair.name,
        "model": pair.title,
        "load": ALL_LOADS[case.load],
        "layers": f"{case.layers} of {ALL_LAYERS[case.model]}",
        "gpu": case.gpu.removeprefix("NVIDIA ").split()[0],
        "rival": pair.rival,
        "how": pair.backend.partition(", ")[2] or None,
        "memory": named_memory(pair.ours[0]),
        "drafted": ", drafts" if case.drafts else "",
        "accepted": case.drafts or 1.0,
        "plan": plan,
        **figures,
        "records": [*pair.ours, *pair.theirs],
    }


def newest_release(records: Iterable[Record], *, cases: Sequence[Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Yield ours beside the fastest of SGLang's own backends, each case on the rank of most layers.

    Args:
        cases: model, load, drafts accepted, prompt, requests.
    """
    pairs = all_pairs(records)
    for model, load, drafts, prompt, requests in cases:
        asked = {"model": model, "load": load, "drafts": drafts, "prompt": prompt, "requests": requests}.items()
        pair = max((pair for pair in pairs if asked <= pair.case._asdict().items()), key=lambda pair: pair.case)
        yield row_of(pair)


def headline(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield a row for each model, load and prompt, without DeepGEMM."""
    few = [pair for pair in whole_models(records) if pair.case.requests <= MOST_REQUESTS]
    return map(row_of, {(pair.title, pair.case.load, pair.case.prompt): pair for pair in few}.values())


def sharded(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield the newest runs of DP ranks, by how they hold the prompt, beside fa3 on the same ranks."""
    newest = {(r["impl"], r["sglang"], r["case"]["prefix"], r["case"]["requests"], shared_by(r)): r for r in records}
    for (_, *case, _), record in sorted(newest.items(), key=lambda item: (item[0][1:4], held(item[1]))):
        stock = newest.get(("sglang_fa3", *case, None))
        if record["bench"] == "decode":
            plan = {"ms": step(record).seconds * 1e3}
        else:
            plan = {"tokens_per_s": served(record).tokens_per_s}
        if stock is not None or record["bench"] == "short":
            of_rank = record["case"]["concurrency"] // record["case"]["dp"]
            row = {"how": held(record), "of_rank": of_rank, "plan": plan, "stock": stock}
            yield {**record["case"], **record, **row, "records": [record, stock] if stock else [record]}


def shared_by(record: Record) -> str | None:
    """Return how the ranks of a DP server share a prompt, with any memory; None for SGLang's own backends."""
    if record["impl"] != OURS:
        return None
    precision = ", FP8" if named(record).hybrid_mla_prefix_dtype == "fp8_e4m3" else ""
    return HELD[sharding(record)] + precision


def held(record: Record) -> str:
    """Return how the ranks of a DP server hold a prompt, by its flags."""
    if (shared := shared_by(record)) is None:
        return str(record["impl"]).removeprefix("sglang_")
    how = f"{shared}, {named_memory(record) or 0:g} GiB"
    how += ", prefill expands for itself" if transient_tokens(record) else ""
    mixed = record["bench"] == "short" and record["hybrid_mla"]["counters"].get("prefills_mixed")
    return how + (", mixed steps" if mixed else "")


def whole_models(records: Iterable[Record]) -> list[Pair]:
    """Return pairs without drafts on the rank with the most layers measured, tensor-parallel ranks first, then by
    model, load, prompt and requests."""
    pairs = [pair for pair in all_pairs(records) if pair.case.drafts is None]
    most: dict[tuple[str, str], int] = {}
    for (model, rank, *_), layers in ((pair.case, pair.case.layers) for pair in pairs):
        most[model, rank] = max(layers, most.get((model, rank), 0))
    whole = [pair for pair in pairs if pair.case.load in LOADS and pair.case.layers == most[pair.case[:2]]]
    return sorted(whole, key=lambda pair: (pair.case.rank == "dp8", pair.title, pair.case[2], *pair.case[5:7]))


def all_pairs(records: Iterable[Record]) -> list[Pair]:
    """Return our runs beside the fastest of SGLang's own on the same case, over BF16 caches.

    Ours is with default settings where that was measured, else with the memory that was named, else with an FP8 prefix.
    """
    found: dict[Case, dict[str, list[Record]]] = {}
    for record in records:
        of = record["case"]
        if record.get("excluded") or TRIED.search(of.get("flags", "")) or of.get("of") == K3_MLA:
            continue
        if storage(record) != FP8:
            load = record["bench"] + of_products(record)
            model = of.get("of", MODELS[0]), of.get("rank"), load, of.get("drafts"), of["layers"]
            case = Case(*model, of["prefix"], of["concurrency"], record["gpu"])
            found.setdefault(case, {}).setdefault(served_by(record), []).append(record)
    pairs = []
    for case, backends in found.items():
        backend = min((n for n in backends if n.startswith(OURS)), key=lambda n: ("FP8" in n, n), default=None)
        rival = max((n for n in backends if n in STOCK_BACKENDS), key=lambda n: middle(backends[n]), default=None)
        if backend and rival:
            pairs.append(Pair(case, backend, rival, backends[backend], backends[rival]))
    return pairs


def served_by(record: Record) -> str:
    """Return a backend's name, with the memory for prefixes and other settings that were named."""
    memory, ours = named_memory(record), record["impl"] == OURS
    return ", ".join(
        [
            str(record["impl"]).removeprefix("sglang_"),
            *(["FP8 prefix"] if ours and storage(record) == FP8_PREFIX else []),
            *([f"{memory:g} GiB"] if memory is not None else []),
            # flashmla's and ours have 64 by themselves
            *(["pages of 64"] if "--page-size 64" in record["case"].get("flags", "") else []),
        ]
    )


def middle(records: Iterable[Record], name: str | None = None) -> float:
    """Return the median of a figure over runs, by default of `measured_rate`."""
    return median(record[name] if name else measured_rate(record) for record in records)


def measured_rate(record: Record) -> float:
    """Return tokens per second of one rank: of all output for agents, else while others wait or, where all decode, by
    the median time between tokens.

    The mean rate of that time would include some of the prefill before it. Where the last request begins too late for a
    time in which all decode, the median is over all tokens.
    """
    if record["bench"] in AGENTS:
        return float(record["output_tok_s"])
    if record["steady_tok_s"]:
        return float(record["steady_tok_s"])
    return float(record["case"]["concurrency"] * 1e3 / (record["decode_itl_ms"] or record["itl_ms"]))
