"""Prediction against measurement: whole decode steps of the serving grid beside what `predict` says of them.

The constants (`step` in configs/gpus) were fitted to other records, see step_rates.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.records import read_records
from bench.serving_tables import BF16, FP8, FP8_PREFIX, storage
from bench.step_rates import WIDTHS, benchmark_model
from bench.tables import latest, provenance, table
from sglang_mla_ext.configs import gpu_config_of, read_config
from sglang_mla_ext.predict.rates import Gpu
from sglang_mla_ext.predict.step import Deployment, Step, best_mode, predict
from sglang_mla_ext.prefix.cost_model import Mode

ELEMENT_BYTES = {BF16: (2, 2), FP8_PREFIX: (2, 1), FP8: (1, 1)}
"""Bytes of an element of the cache and of an expanded prefix."""
ENGINE_TAIL = 128  # tokens of a question in bench_engine.py
ENGINE_STEPS = 256


class Cell(NamedTuple):
    """A measured step and the predicted one."""

    record: dict[str, Any]
    storage: str
    measured_s: float
    step: Step

    @property
    def off(self) -> float:
        """How much longer the prediction is than the step; below 0 if shorter."""
        return self.step.seconds / self.measured_s - 1


def cells(path: Path) -> list[Cell]:
    """The newest record of every case of a file of decode throughput, of a GPU and a model that are known."""
    found = [record | {"case": record["case"] | {"storage": storage(record)}} for record in read_records(path)]
    measured = (record for record in found if record["decode_tok_s"] is not None)
    names = ("heads", "layers", "prompt", "concurrency", "storage", "output", "tp")
    compared = []
    for record in latest(measured, *names).values():
        case = record["case"]
        if case["heads"] in WIDTHS and gpu_config_of(record["gpu"]) is not None and case["tp"] == 1:
            measured_s = case["concurrency"] / record["decode_tok_s"]
            compared.append(Cell(record, case["storage"], measured_s, predicted(record)))
    return compared


def predicted(record: Mapping[str, Any]) -> Step:
    """The step of a record, which is that of the middle of its answers."""
    case = record["case"]
    name = gpu_config_of(record["gpu"])
    assert name is not None
    latent, expanded = ELEMENT_BYTES[storage(dict(record))]
    model = benchmark_model(case["layers"], case["heads"], WIDTHS[case["heads"]])
    of = Deployment(model, Gpu.from_json(name), latent_element_bytes=latent, expanded_element_bytes=expanded)
    prompt, requests = case.get("prefix") or case["prompt"], case["concurrency"]
    mode = best_mode(of, requests, prompt) if record["impl"] == "hybrid_mla" else Mode.ABSORB
    return predict(of, mode, requests, prompt, tail(case))


def tail(case: Mapping[str, Any]) -> int:
    """Tokens of a request after the prompt, in the middle of its answer and of mean length."""
    if "output" not in case:
        return ENGINE_TAIL + ENGINE_STEPS // 2
    question = read_config("workloads", case["questions"])["models"]["deepseek-v3"]["prompt_tokens"]["mean"]
    return round(question + case["output"] / 2)


def predictions(*paths: Path) -> str:
    """How far off the predictions are, and, folded, all cells."""
    found = {path: cells(path) for path in paths}
    return f"{summary(found)}\n\n<details><summary>All cells</summary>\n\n{all_cells(found)}\n\n</details>"


def all_cells(found: Mapping[Path, Sequence[Cell]]) -> str:
    """The table of all cells, the engine's after the servers'."""
    rows, shown = [], {}
    for cell in [cell for of_path in found.values() for cell in sorted(of_path, key=order)]:
        case, step = cell.record["case"], cell.step
        shown[(case["client"], *order(cell))] = cell.record
        rows.append(
            (
                case["client"],
                case["heads"],
                case["layers"],
                case["prompt"],
                case["concurrency"],
                cell.storage,
                cell.record["impl"].removeprefix("sglang_"),
                step.mode.value.replace("_", " "),
                *(f"{seconds * 1e3:.2f}" for seconds in (step.attention, step.rest, step.seconds, cell.measured_s)),
                f"{cell.off:+.1%}",
            )
        )
    columns = (
        *("client", "heads", "layers", "prompt", "requests", "cache", "backend", "mode"),
        *("attention ms", "rest ms", "predicted ms", "measured ms", "off by"),
    )
    return f"{table(rows, columns)}\n\n{lines(provenance(shown))}"


def lines(text: str) -> str:
    """Where figures come from, not folded once more."""
    return "\n".join(line for line in text.splitlines() if "details>" not in line).strip()


def summary(found: Mapping[Path, Sequence[Cell]]) -> str:
    """How far off the predictions are, by backend."""
    rows = []
    for path, of_path in found.items():
        for impl in sorted({cell.record["impl"] for cell in of_path}):
            of_impl = [cell for cell in of_path if cell.record["impl"] == impl]
            worst = max(of_impl, key=lambda cell: abs(cell.off))
            case = worst.record["case"]
            mean = sum(abs(cell.off) for cell in of_impl) / len(of_impl)
            where = f"{case['heads']} heads, prompt {case['prompt']}, {case['concurrency']} requests, {worst.storage}"
            within = sum(abs(cell.off) <= 0.15 for cell in of_impl)
            backend = impl.removeprefix("sglang_")
            rows.append((path.stem, backend, len(of_impl), within, f"{mean:.1%}", f"{worst.off:+.1%}", where))
    columns = ("records", "backend", "cells", "within 15%", "mean", "worst", "where")
    return table(rows, columns)


def order(cell: Cell) -> tuple[Any, ...]:
    """What tells cells apart, in the order of the table."""
    case = cell.record["case"]
    return (case["heads"], case["layers"], str(case["prompt"]), case["concurrency"], cell.storage, cell.record["impl"])
