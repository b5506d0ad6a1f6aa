"""Predictions beside measurements: whole decode steps of servers and engines, and what `predict` says of them.

The constants (`step` in configs/gpus) were fitted to other records, see step_rates.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from bench import rank_predictions
from bench.rank_predictions import BF16, ELEMENT_BYTES, FP8, storage
from bench.records import RESULTS, Record, latest, read_records
from bench.step_rates import WIDTHS, benchmark_model
from sglang_mla_ext.configs import gpu_config_of, read_config
from sglang_mla_ext.predict.rates import Gpu
from sglang_mla_ext.predict.sharing import PLAIN
from sglang_mla_ext.predict.step import Deployment, Step, predict

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


def measured(record: Record) -> Measured | None:
    """Return the decode step of a record of bench_serving.py, bench_rank.py or an engine; None where it has none."""
    case, stored = record["case"], storage(record)
    if record["bench"] == "decode" and "rank" in case:
        of_prompt = f"{case['prefix']:,}", case["prefix"], rank_predictions.tail(case), stored
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
    tail = 128 + 128  # a question, and the middle of 256 steps
    if "output" in case:
        question = read_config("workloads", case["questions"])["models"]["deepseek-v3"]["prompt_tokens"]["mean"]
        tail = round(question + case["output"] / case.get("requests", 1) / 2)
    seconds, tokens = case["concurrency"] / record["decode_tok_s"], case.get("prefix") or case["prompt"]
    return Measured(seconds, case["concurrency"], case["prompt"], tokens, tail, stored)


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
        return rank_predictions.step(record)
    case, name = record["case"], gpu_config_of(record["gpu"])
    assert name is not None
    model = benchmark_model(case["layers"], case["heads"], WIDTHS[case["heads"]])
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
            kind = file + rank_predictions.of_products(cell.record)  # the constants are of servers without DeepGEMM
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
