"""Predictions beside measurements: what `sglang-mla plan` says of decode steps and rates of servers and engines.

The constants (`step` in configs/gpus) were fitted to other records, see step_rates.py.
"""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from statistics import mean
from typing import Any, NamedTuple, cast

from demo_model.rank import MODELS, Rank, rank_config

from bench.records import RESULTS, Record, latest, read_records
from bench.workloads import OWN_TOKENS, lengths_of
from sglang_mla_ext.configs import gpu_config_of, read_config
from sglang_mla_ext.options import add_flags
from sglang_mla_ext.predict.arrivals import Served, Traffic, compared, host_seconds
from sglang_mla_ext.predict.burst import CHUNK_TOKENS, burst_seconds
from sglang_mla_ext.predict.memory import default_fraction, memory, prefill_graph_bytes
from sglang_mla_ext.predict.mixed import allowed
from sglang_mla_ext.predict.rates import Gpu
from sglang_mla_ext.predict.sharing import PLAIN
from sglang_mla_ext.predict.step import Deployment, Step, predict
from sglang_mla_ext.predict.weights import read_model
from sglang_mla_ext.prefix.memory.default import TRANSIENT_TOKENS
from sglang_mla_ext.prefix.planner.gpu_rates import ExchangeRates

OURS = "hybrid_mla"
BF16, FP8_PREFIX, FP8 = "BF16", "BF16, prefix FP8", "FP8"  # what `storage` returns
ELEMENT_BYTES = {BF16: (2, 2), FP8_PREFIX: (2, 1), FP8: (1, 1)}
"""Bytes of an element of the cache and of an expanded prefix."""
LARGER_STEPS_SINCE, SMALLER_STEPS = "2026-11-28T07:30", (1.5, 512)
"""Date from which servers allow larger mixed steps, and the limits before: a mixed step took at most so many times as
long as without new tokens, and had at most so many."""
FEWER_LAUNCHES_SINCE, EARLIER_STORES = "2026-11-28T19:30", ExchangeRates(1.74e-05, 1.4e11)
"""Date from which an exchange by stores has fewer launches, and its rates before, with nine launches a layer
(exchange.jsonl, two H100s)."""
SHARDS_SINCE = "2026-11-28T21"
"""Date from which servers with DP attention shard prefixes by default."""
PREFILL_IN_GRAPHS = ("0.5.23",)
"""Releases of SGLang whose host does not launch a prefill pass kernel by kernel."""
DRAFT_TOKENS = 4
"""Query tokens of a request in a step of records with drafts."""
_CHUNK = re.compile(r"--chunked-prefill-size (\d+)")


def of_rank(record: Mapping[str, Any], gpu: Gpu | None = None) -> Deployment:
    """A record's rank, as a model of one GPU, or of as many as it has ranks.

    Args:
        gpu: with other constants than the record's GPU has.
    """
    case, name = record["case"], gpu_config_of(record["gpu"])
    assert name is not None
    gpu, how = gpu or Gpu.from_json(name), sharding(record)
    if not case.get("deep_gemm"):
        gpu = without_deep_gemm(gpu)
    if how != "peers":
        gpu = replace(gpu, rates=replace(gpu.rates, exchange_by_stores=None))
    elif record["date"] < FEWER_LAUNCHES_SINCE:
        gpu = replace(gpu, rates=replace(gpu.rates, exchange_by_stores=EARLIER_STORES))
    latent, expanded = ELEMENT_BYTES[storage(record)]
    rank = Rank(case["rank"], case["layers"], case.get("of", MODELS[0]), case.get("running", 1))
    return Deployment(
        rank_config(rank),
        gpu,
        case.get("tp", 1),
        case.get("dp", 1),
        DRAFT_TOKENS if case.get("drafts") else 1,
        latent_element_bytes=latent,
        expanded_element_bytes=expanded,
        prefix_sharding=how != "off",
        prefill_expand_tokens=transient_tokens(record),
    )


def without_deep_gemm(gpu: Gpu) -> Gpu:
    """Return a GPU whose FP8 products are as slow as BF16's: they run in SGLang's Triton kernels without DeepGEMM. At
    FP8's rate, short answers over 7,069 tokens on DP 8's rank were predicted 23 % too fast, with drafts 53 %."""
    return gpu if gpu.sheet is None else replace(gpu, sheet=replace(gpu.sheet, fp8_flops=gpu.sheet.bf16_flops))


def sharding(record: Mapping[str, Any]) -> str:
    """Return how ranks sharded prefixes: off, nccl or peers. Off was the default before `SHARDS_SINCE`, auto NCCL."""
    how = named(record).hybrid_mla_prefix_sharding
    if record["date"] < SHARDS_SINCE:
        return {None: "off", "auto": "nccl"}.get(how, how)
    by_itself = "peers" if record["case"].get("dp", 1) > 1 else "off"
    return {None: by_itself, "auto": by_itself}.get(how, how)


def storage(record: Mapping[str, Any]) -> str:
    """Return how a server stored its latent cache, and expanded prefixes where they differ from it."""
    case = record["case"]
    if case.get("kv_cache_dtype") == "fp8_e4m3":
        return FP8
    return FP8_PREFIX if case.get("dtype") == "fp8" or "fp8_e4m3" in case.get("flags", "") else BF16


def of_products(record: Mapping[str, Any]) -> str:
    """Return what names of records of servers with DeepGEMM, SGLang's default, end in."""
    return ", DeepGEMM" if record["case"].get("deep_gemm") else ""


def named(record: Mapping[str, Any]) -> argparse.Namespace:
    """The extension's flags in a record's command, by their names of today; not to be changed."""
    return _parsed(re.sub(r"--hybrid-mla-spread\b", "--hybrid-mla-prefix-sharding", record["case"].get("flags", "")))


@functools.cache
def _parsed(flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return parser.parse_known_args(shlex.split(flags))[0]


def transient_tokens(record: Mapping[str, Any]) -> int:
    """Return the tokens that prefill passes expanded at a time for themselves: what its command names, or the
    server's default."""
    given: int | None = named(record).hybrid_mla_prefill_expand_tokens
    expanded = ((record.get("hybrid_mla") or {}).get("counters") or {}).get("prefill_tokens_expanded")
    return (TRANSIENT_TOKENS if expanded else 0) if given is None else given


def named_memory(record: Mapping[str, Any]) -> float | None:
    """GiB that a record's command names for expanded prefixes."""
    return cast("float | None", named(record).hybrid_mla_prefix_memory_gb)


def chunks(record: Mapping[str, Any], of: Deployment) -> int:
    """Chunks of expanded tokens that the server had memory for. SGLang 0.5.17 has no prefill graphs, and so no buffers
    for them."""
    gib = named_memory(record)
    without = prefill_graph_bytes(of) if record["sglang"] == "0.5.17" else 0
    return memory(of, default_fraction(of), None if gib is None else gib * 2**30 + without).chunks


def tail(case: Mapping[str, Any]) -> int:
    """Tokens of a request of `decode` after the prompt, in the middle of its answer."""
    return round(mean(OWN_TOKENS) + case["output"] / case["requests"] / 2)


def step(record: Mapping[str, Any], gpu: Gpu | None = None) -> Step:
    """Predict the step of a record of `decode`; `gpu` as of `of_rank`."""
    case, of = record["case"], of_rank(record, gpu)
    ours, mine = record["impl"] == OURS, of.per_rank(case["concurrency"])
    cover = of.cover(mine, case["prefix"], chunks(record, of)) if ours else PLAIN
    return predict(of, cover, case["concurrency"], case["prefix"], tail(case))


def served(record: Mapping[str, Any]) -> Served:
    """Predict a record of `short`: ours with mixed steps, prefill passes of stock backends in turns."""
    case, of, drawn = record["case"], of_rank(record), lengths_of("short", 0)
    question, answer = (round(mean(drawn[name])) for name in ("own_tokens", "output_tokens"))
    host_s = 0.0 if record["sglang"] in PREFILL_IN_GRAPHS else host_seconds(of)
    traffic = Traffic(case["concurrency"], case["prefix"], question, answer, host_s, case.get("drafts", 1.0))
    mixed_tokens = allowed(of)
    if record["date"] < LARGER_STEPS_SINCE:
        mixed_tokens = min(allowed(of, slower=SMALLER_STEPS[0]), SMALLER_STEPS[1])
    _, ways = compared(of, traffic, chunks(record, of), mixed_tokens)
    if record["impl"] != OURS:
        return ways["absorb"]
    return ways["chosen" if named(record).hybrid_mla_mixed_tokens == 0 else "mixed"]


def last_first_token(record: Mapping[str, Any]) -> float:
    """Seconds until the last request of a record of `decode` has its first token: all come at once."""
    case, of = record["case"], of_rank(record)
    chunk = _CHUNK.search(record["command"])
    requests, prefix = case["concurrency"], case["prefix"]
    kept = of.kept_for_prefill(requests, prefix, chunks(record, of)) if record["impl"] == OURS else 0
    given = dict(host_s=host_seconds(of), expanded=kept, chunk_tokens=int(chunk[1]) if chunk else CHUNK_TOKENS)
    return burst_seconds(of, requests, prefix, round(mean(OWN_TOKENS)), **given)


def tokens_per_s(record: Mapping[str, Any]) -> float:
    """Predict the tokens per second of a record of `decode` or `short`."""
    if record["bench"] == "decode":
        return float(record["case"]["concurrency"] / step(record).seconds)
    return served(record).tokens_per_s


WIDTHS = {128: 18432, 16: 2304}
"""Width of the dense MLP by heads: of the models of the serving benchmarks."""
WITHIN = 0.15


class Measured(NamedTuple):
    """A measured decode step.

    Attributes:
        prompt: its name, or its tokens as `tokens` has them.
        tail: tokens of each request after it, of mean length and in the middle of its answer.
        query_tokens: of a request in a step; stored: see `storage`.
    """

    seconds: float
    requests: int
    prompt: Any
    tokens: int
    tail: int
    stored: str
    query_tokens: int = 1


class Cell(NamedTuple):
    """A measured step and the predicted one."""

    record: Record
    measured: Measured
    step: Step

    @property
    def off(self) -> float:
        """Return how much longer the prediction is than the step; below 0 if shorter."""
        return self.step.seconds / self.measured.seconds - 1


def benchmark_model(case: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of a model of the benchmarks: DeepSeek-V3's dimensions, dense MLPs, BF16."""
    known = read_model("deepseek-v3")
    kept = ("hidden_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
    sizes = {"num_attention_heads": case["heads"], "intermediate_size": WIDTHS[case["heads"]], "vocab_size": 32000}
    sizes |= {"num_hidden_layers": case["layers"]}
    return {name: known[name] for name in kept} | sizes | {"tie_word_embeddings": False}


def measured(record: Record) -> Measured | None:
    """Return the decode step of a record of bench_serving.py, bench_rank.py or an engine; None where it has none."""
    case, stored = record["case"], storage(record)
    if record["bench"] == "decode" and "rank" in case:
        of_prompt = f"{case['prefix']:,}", case["prefix"], tail(case), stored
        return Measured(record["decode_itl_ms"] * 1e-3, case["concurrency"], *of_prompt)
    if record["bench"] == "context":
        stored = FP8 if case["kv_cache"] == "fp8_e4m3" else BF16
        of_steps = 0, 0, case["context"] + 64, stored  # 128 steps
        return Measured(record["step_ms"] * 1e-3, case["concurrency"], *of_steps)
    if record["bench"] == "speculative":  # a question, and the middle of what the default of 64 steps yields
        of = case["batch"], case["prefix"], case["prefix"], 128 + 80, stored
        return Measured(record["verify_ms"] * 1e-3, *of, query_tokens=case["draft_tokens"])
    if record["decode_tok_s"] is None:
        return None
    after = 128 + 128  # a question, and the middle of 256 steps
    if "output" in case:
        question = read_config("workloads", case["questions"])["models"]["deepseek-v3"]["prompt_tokens"]["mean"]
        after = round(question + case["output"] / case.get("requests", 1) / 2)
    seconds, tokens = case["concurrency"] / record["decode_tok_s"], case.get("prefix") or case["prompt"]
    return Measured(seconds, case["concurrency"], case["prompt"], tokens, after, stored)


def cells(records: Iterable[Record]) -> list[Cell]:
    """Return the newest record of every case, of a GPU and a model that are known."""
    known = []
    for record in records:
        found, case = measured(record), record["case"]
        of_model = case["heads"] in WIDTHS or "rank" in case
        if found and of_model and case.get("tp", 1) == 1 and gpu_config_of(record["gpu"]) is not None:
            which = (record["gpu"], *found[1:])  # all but the time tells cases apart
            known.append(record | {"case": {**case, "which": which, "measured": found}})
    newest = latest(known, "heads", "layers", "deep_gemm", "which").values()
    return [Cell(one, one["case"]["measured"], predicted(one, one["case"]["measured"])) for one in newest]


def predicted(record: Record, of: Measured) -> Step:
    """Return the predicted step of a record."""
    if "rank" in record["case"]:
        return step(record)
    case, name = record["case"], gpu_config_of(record["gpu"])
    assert name is not None
    model = benchmark_model(case)
    latent, expanded = ELEMENT_BYTES[of.stored]
    sizes = dict(query_tokens=of.query_tokens, latent_element_bytes=latent, expanded_element_bytes=expanded)
    deployment = Deployment(model, Gpu.from_json(name), **sizes)
    cover = deployment.cover(of.requests, of.tokens) if record["impl"] == "hybrid_mla" else PLAIN
    return predict(deployment, cover, of.requests, of.tokens, of.tail)


def summary(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield how far off the predictions are, by file and backend."""
    files: dict[str, list[Record]] = {}
    for record in records:
        files.setdefault(record["file"], []).append(record)
    groups: dict[tuple[str, str], list[Cell]] = {}
    for file, of_file in files.items():
        for cell in cells(of_file):
            kind = file + of_products(cell.record)  # the constants are of servers without DeepGEMM
            groups.setdefault((kind, cell.record["impl"]), []).append(cell)
    for (kind, impl), found in groups.items():
        worst = max(found, key=lambda cell: abs(cell.off))
        of, heads = worst.measured, worst.record["case"]["heads"]
        prompt = f"prompt {of.prompt}" if of.tokens else f"{of.tail:,} tokens each"
        yield {
            "kind": kind,
            "backend": impl.removeprefix("sglang_"),
            "cells": found,
            "within": sum(abs(cell.off) <= WITHIN for cell in found),
            "mean": sum(abs(cell.off) for cell in found) / len(found),
            "worst": worst.off,
            "where": f"{heads} heads, {prompt}, {of.requests} requests, {of.stored}",
            "records": [cell.record for cell in found],
        }


def of_file(name: str) -> list[Cell]:
    """Return the cells of a file in benchmarks/results."""
    return cells(read_records(RESULTS / f"{name}.jsonl"))
