"""Prediction against measurement: whole decode steps beside what `predict` says of them.

The constants (`step` in configs/gpus) were fitted to other records, see step_rates.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench import rank_predictions
from bench.records import read_records
from bench.serving_tables import BF16, ELEMENT_BYTES, FP8, storage
from bench.step_rates import WIDTHS, benchmark_model
from bench.tables import latest, table
from sglang_mla_ext.configs import gpu_config_of, read_config
from sglang_mla_ext.predict.rates import Gpu
from sglang_mla_ext.predict.sharing import PLAIN
from sglang_mla_ext.predict.step import Deployment, Step, predict

WITHIN = 0.15


class Measured(NamedTuple):
    """What a record measured.

    Attributes:
        prompt: its name, or its tokens as `tokens` has them.
        tail: tokens of each request after it, of mean length and in the middle of its answer.
        query_tokens: of a request in a step.
        stored: the cache and expanded prefixes, see `serving_tables.storage`.
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

    record: dict[str, Any]
    measured: Measured
    step: Step

    @property
    def off(self) -> float:
        """How much longer the prediction is than the step; below 0 if shorter."""
        return self.step.seconds / self.measured.seconds - 1

    @property
    def order(self) -> tuple[Any, ...]:
        """What tells cells apart, in the order of the table."""
        case, of = self.record["case"], self.measured
        of_case = (case["heads"], case["layers"], str(of.prompt), of.tail, of.requests, of.stored, self.record["impl"])
        return (rank_predictions.of_products(self.record), *of_case)

    def of(self, path: Path) -> str:
        """Which records it is one of, in words. The constants are of servers without DeepGEMM."""
        return path.stem + rank_predictions.of_products(self.record)


def measured(record: Mapping[str, Any]) -> Measured | None:
    """Return the decode step of a record of bench_serving.py, bench_rank.py or an engine; None where it has none."""
    case = record["case"]
    if record["bench"] == "decode" and "rank" in case:
        seconds, tail = record["decode_itl_ms"] * 1e-3, rank_predictions.tail(case)
        of_prompt = f"{case['prefix']:,}", case["prefix"], tail, storage(dict(record))
        return Measured(seconds, case["concurrency"], *of_prompt)
    if record["bench"] == "context":
        stored = FP8 if case["kv_cache"] == "fp8_e4m3" else BF16
        tail = case["context"] + 64  # of 128 steps
        return Measured(record["step_ms"] * 1e-3, case["concurrency"], 0, 0, tail, stored)
    if record["bench"] == "speculative":
        # A question and the middle of what the default of 64 steps yields.
        of = case["batch"], case["prefix"], case["prefix"], 128 + 80, storage(dict(record))
        return Measured(record["verify_ms"] * 1e-3, *of, query_tokens=case["draft_tokens"])
    if record["decode_tok_s"] is None:
        return None
    requests, tokens = case["concurrency"], case.get("prefix") or case["prompt"]
    tail = 128 + 128  # a question, and the middle of 256 steps
    if "output" in case:
        question = read_config("workloads", case["questions"])["models"]["deepseek-v3"]["prompt_tokens"]["mean"]
        tail = round(question + case["output"] / 2)
    return Measured(requests / record["decode_tok_s"], requests, case["prompt"], tokens, tail, storage(dict(record)))


def cells(path: Path) -> list[Cell]:
    """The newest record of every case of a file, of a GPU and a model that are known."""
    found = [record | {"case": {**record["case"], "measured": measured(record)}} for record in read_records(path)]
    # All but the time tells cases apart, and the GPU.
    known = [
        {**record, "case": {**record["case"], "which": (record["gpu"], *record["case"]["measured"][1:])}}
        for record in found
        if record["case"]["measured"] is not None
        and (record["case"]["heads"] in WIDTHS or "rank" in record["case"])
        and record["case"].get("tp", 1) == 1
        and gpu_config_of(record["gpu"]) is not None
    ]
    newest = latest(known, "heads", "layers", "deep_gemm", "which").values()
    return [
        Cell(record, record["case"]["measured"], predicted(record, record["case"]["measured"])) for record in newest
    ]


def predicted(record: Mapping[str, Any], of: Measured) -> Step:
    """The step of a record."""
    if "rank" in record["case"]:
        return rank_predictions.step(record)
    case, name = record["case"], gpu_config_of(record["gpu"])
    assert name is not None
    latent, expanded = ELEMENT_BYTES[of.stored]
    model = Deployment(
        benchmark_model(case["layers"], case["heads"], WIDTHS[case["heads"]]),
        Gpu.from_json(name),
        query_tokens=of.query_tokens,
        latent_element_bytes=latent,
        expanded_element_bytes=expanded,
    )
    cover = model.cover(of.requests, of.tokens) if record["impl"] == "hybrid_mla" else PLAIN
    return predict(model, cover, of.requests, of.tokens, of.tail)


def predictions(*paths: Path) -> str:
    """Return a table of how far off the predictions are."""
    return summary({path: sorted(cells(path), key=lambda cell: cell.order) for path in paths})


def summary(found: Mapping[Path, Sequence[Cell]]) -> str:
    """How far off the predictions are, by backend."""
    rows = []
    for path, of_path in found.items():
        groups: dict[tuple[str, str], list[Cell]] = {}
        for cell in of_path:
            groups.setdefault((cell.of(path), cell.record["impl"]), []).append(cell)
        for (kind, impl), of_impl in sorted(groups.items()):
            worst = max(of_impl, key=lambda cell: abs(cell.off))
            of, heads = worst.measured, worst.record["case"]["heads"]
            mean = sum(abs(cell.off) for cell in of_impl) / len(of_impl)
            prompt = f"prompt {of.prompt}" if of.tokens else f"{of.tail:,} tokens each"
            where = f"{heads} heads, {prompt}, {of.requests} requests, {of.stored}"
            within = sum(abs(cell.off) <= WITHIN for cell in of_impl)
            backend = impl.removeprefix("sglang_")
            rows.append((kind, backend, len(of_impl), within, f"{mean:.1%}", f"{worst.off:+.1%}", where))
    columns = ("records", "backend", "cells", f"within {WITHIN:.0%}", "mean", "worst", "where")
    return table(rows, columns)
