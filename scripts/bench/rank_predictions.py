"""Predict, as `sglang-mla plan` does, a rank of a whole model, for records of bench_rank.py."""

from __future__ import annotations

import argparse
import functools
import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from statistics import mean
from typing import Any, cast

from demo_model.rank import MODELS, Rank, rank_config

from bench.rank_loads import OWN_TOKENS, lengths
from sglang_mla_ext.configs import gpu_config_of
from sglang_mla_ext.options import add_flags
from sglang_mla_ext.predict.arrivals import Served, Traffic, compared, host_seconds
from sglang_mla_ext.predict.burst import CHUNK_TOKENS, burst_seconds
from sglang_mla_ext.predict.memory import default_fraction, memory
from sglang_mla_ext.predict.mixed import allowed
from sglang_mla_ext.predict.rates import Gpu
from sglang_mla_ext.predict.sharing import PLAIN
from sglang_mla_ext.predict.step import Deployment, Step, predict
from sglang_mla_ext.prefix.memory.default import TRANSIENT_TOKENS

OURS = "hybrid_mla"
BF16, FP8_PREFIX, FP8 = "BF16", "BF16, prefix FP8", "FP8"  # what `storage` returns
ELEMENT_BYTES = {BF16: (2, 2), FP8_PREFIX: (2, 1), FP8: (1, 1)}
"""Bytes of an element of the cache and of an expanded prefix."""
LARGER_STEPS_SINCE, SMALLER_STEPS = "2026-11-28T07:30", (1.5, 512)
"""Before, a mixed step took at most so many times as long as without new tokens, and had at most so many."""
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
    gpu, flags = gpu or Gpu.from_json(name), named(record)
    if flags.hybrid_mla_prefix_sharding != "peers":  # records of `auto` are older than its choice of stores
        gpu = replace(gpu, rates=replace(gpu.rates, exchange_by_stores=None))
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
        prefix_sharding=flags.hybrid_mla_prefix_sharding not in (None, "off"),
        prefill_expand_tokens=transient_tokens(record),
    )


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
    """Chunks of expanded tokens that the server had memory for."""
    gib = named_memory(record)
    return memory(of, default_fraction(of), None if gib is None else gib * 2**30).chunks


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
    case, of, drawn = record["case"], of_rank(record), lengths("short", 0)
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
