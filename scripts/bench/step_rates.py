"""The constants of a decode step (`step` in configs/gpus), from records that are there: kernels of the workload `mixed`
under the profiler, times of attention in every mode on a grid, and steps of one rank of a whole model. The serving grid
is not among them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from demo_model.rank import MODELS
from scipy.optimize import nnls

from bench.planner_checks import TAIL
from bench.planner_verdicts import DIMS, significant
from bench.predictions import BF16, OURS, benchmark_model, storage
from bench.predictions import step as predicted_step
from bench.records import latest, read_records
from sglang_mla_ext.configs import gpu_config_of
from sglang_mla_ext.predict.rates import Gpu, StepRates
from sglang_mla_ext.predict.sharing import PLAIN
from sglang_mla_ext.predict.step import Deployment, activation_bytes, latent_seconds, predict
from sglang_mla_ext.predict.weights import read_model
from sglang_mla_ext.prefix.planner.cost_model import CostModel
from sglang_mla_ext.segment import Mode

MACS = np.arange(2.4e14, 4.6e14, 5e12)
PRODUCT_S = np.arange(0, 1.01e-5, 2.5e-7)
PADDING = np.arange(0.5, 1.01, 0.02)
FILLING_REQUESTS = 64  # requests from which the GPU is full: padding is fitted to those cases
RANK_REQUESTS = (128, 256)  # of the ranks that `experts_s` is fitted to
FEWEST_REQUESTS = 16  # of the cases that attention's launches are fitted to; fewer leave most of the GPU idle
ATTENTION = re.compile(
    "naive_prefix|splitkv_mla|mla_combine|absorb|BatchMLA|fill_page_table|^merge_kernel|merge_attn_states|"
    "PrefillWithKVCache|concat_mla_k|expand_prefix"
)
BESIDE_ATTENTION = re.compile("join_parts|mla_metadata|schedule_tails")
"""Kernels that count as other launches: joins, and the schedules of a step's attention."""
DENSE = re.compile("nvjet|gemm|cublas|splitKreduce")


def fitted(gpu: Gpu, profiles: Path, grid: Path, ranks: Path) -> dict[str, Any]:
    """The entry `step` of a GPU's file.

    Args:
        profiles: records of `bench_serving.py --profile`; grid: those of `calibrate.py --check`; ranks: those of
            `bench_rank.py`.
    Raises:
        ValueError: there are none of this GPU, or too few to tell a product's constants apart.
    """
    watched = [record for record in records_of(gpu, profiles) if record["workload"] == "mixed"]
    watched = list(latest(watched, "heads", "layers", "flags").values())
    checked = list(latest(records_of(gpu, grid), "heads", "dtype", "prefix", "batch").values())
    whole = [record for record in records_of(gpu, ranks) if is_fitted(record)]
    if len({record["case"]["heads"] for record in watched}) < 2 or not checked or not whole:
        raise ValueError(
            f"{profiles}, {grid} and {ranks} have no records of {gpu.rates.name}, or of one number of heads alone"
        )
    found = {
        "bytes_per_s": gpu.rates.modes[Mode.NAIVE].bytes_per_s,
        **of_products(gpu, watched),
        **of_launches(gpu, watched),
    }
    attention = of_attention(gpu, checked)
    known = StepRates.from_config({**found, "experts_s": 0, "attention": attention, "source": ""})
    found |= {"experts_s": of_experts(replace(gpu, step=known), whole), "attention": attention}
    commits = sorted({record["commit"] for record in watched + checked + whole})
    source = (
        f"Fitted by scripts/calibrate_step.py to records of {gpu.rates.name} (commits {', '.join(commits)}): product "
        f"and macs to the time of dense kernels, layer and step to all other launches and the GPU's waits, in "
        f"{profiles.name}, workload mixed, 180 requests; attention to all modes in {grid.name}, "
        f"{FEWEST_REQUESTS} requests and more; experts to what decode steps of hybrid_mla on DeepSeek-V3's tp8 rank "
        f"take beyond all that in {ranks.name}, BF16, {' and '.join(map(str, RANK_REQUESTS))} requests, the median; "
        f"bytes_per_s: the naive kernel's."
    )
    return {**found, "source": source}


def records_of(gpu: Gpu, path: Path) -> list[dict[str, Any]]:
    """A file's records of this GPU."""
    return [record for record in read_records(path) if gpu_config_of(record["gpu"]) == gpu.key]


def of_products(gpu: Gpu, watched: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Fit `macs_per_s` and `product_s` to the products of a step, on models of two widths."""
    measured = np.array([seconds_of(record, is_dense) / record["steps"] for record in watched])
    models = [(benchmark_model(record["case"]), record["case"]["requests"]) for record in watched]
    nothing = {"launches_s": 0, "row_s": 0}
    attention = {"padding": 1, **{mode.value: nothing for mode in Mode}}
    others = {"layer_s": 0, "experts_s": 0, "step_s": 0, "attention": attention, "source": ""}
    # Bandwidth is known: the naive kernel only reads. With 180 rows it decides for no product of these models.
    others["bytes_per_s"] = gpu.rates.modes[Mode.NAIVE].bytes_per_s

    def off(macs_per_s: float, product_s: float) -> float:
        step = StepRates.from_config(others | {"macs_per_s": macs_per_s, "product_s": product_s})
        of_gpu = replace(gpu, step=step)
        steps = (predict(Deployment(model, of_gpu), PLAIN, requests, 0, 0) for model, requests in models)
        times = [sum(step.products.values()) for step in steps]
        return float(np.square(np.array(times) / measured - 1).sum())

    _, macs_per_s, product_s = min((off(macs, each), macs, each) for macs in MACS for each in PRODUCT_S)
    return {"macs_per_s": significant(macs_per_s), "product_s": significant(product_s)}


def of_launches(gpu: Gpu, watched: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Fit `layer_s` and `step_s`: medians over the records of our backend; SGLang's copies the query twice a layer.

    Kernels that run at least once a layer are the layers', others the step's.
    """
    of_layers, of_steps = [], []
    bandwidth = gpu.rates.modes[Mode.NAIVE].bytes_per_s
    for record in (record for record in watched if record["impl"] == "hybrid_mla"):
        case, often = record["case"], record["steps"] * record["case"]["layers"]
        layer_s = seconds_of(record, lambda name, count, often=often: is_other(name) and count >= often) / often
        moved = case["requests"] * activation_bytes(Deployment(benchmark_model(case), gpu))
        of_layers.append(max(layer_s - moved / bandwidth, 0.0))
        once_s = seconds_of(record, lambda name, count, often=often: is_other(name) and count < often)
        of_steps.append((once_s + (record["span_ms"] - record["busy_ms"]) * 1e-3) / record["steps"])
    return {"layer_s": significant(np.median(of_layers)), "step_s": significant(np.median(of_steps))}


def seconds_of(record: Mapping[str, Any], counts: Callable[[str, int], bool]) -> float:
    """Seconds of the kernels that count, by name and number of launches, in all profiled steps."""
    return sum(ms for name, (ms, count) in record["kernels"].items() if counts(name, count)) * 1e-3


def is_dense(kernel: str, launches: int = 0) -> bool:
    """Return whether a kernel is a product."""
    return bool(DENSE.search(kernel)) and not (ATTENTION.search(kernel) or BESIDE_ATTENTION.search(kernel))


def is_other(kernel: str) -> bool:
    """Return whether a kernel is neither a product nor attention; the schedules of a step's attention count."""
    return bool(BESIDE_ATTENTION.search(kernel)) or not (ATTENTION.search(kernel) or DENSE.search(kernel))


def is_fitted(record: Mapping[str, Any]) -> bool:
    """Return whether `of_experts` looks at a record: other models, divisions, backends and numbers of requests show
    how well it serves them, and servers with DeepGEMM how much that changes."""
    case = record["case"]
    of_rank = case.get("of", MODELS[0]), case.get("rank"), storage(record), record["bench"], record["impl"]
    fitted = of_rank == (MODELS[0], "tp8", BF16, "decode", OURS)
    counted = not case.get("deep_gemm") and not record.get("excluded")
    return fitted and counted and case["concurrency"] in RANK_REQUESTS


def of_experts(gpu: Gpu, whole: Iterable[Mapping[str, Any]]) -> float:
    """Fit `experts_s`: what steps take longer than predicted, for each layer with experts, the median.

    Args:
        gpu: with all other constants, and none of experts.
    """
    beyond = []
    for record in whole:
        expert_layers = record["case"]["layers"] - read_model(MODELS[0])["first_k_dense_replace"]
        missed = record["decode_itl_ms"] * 1e-3 - predicted_step(record, gpu).seconds
        beyond.append(missed / expert_layers)
    return significant(np.median(beyond), 2)  # they differ by more than that


def of_attention(gpu: Gpu, checked: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Fit `padding`, and `launches_s` and `row_s` of each mode, neither below 0, by the least square of the relative
    errors: absorb's for the padding, then each mode's."""
    some = [record for record in checked if record["case"]["batch"] >= FEWEST_REQUESTS]
    full = [record for record in some if record["case"]["batch"] >= FILLING_REQUESTS]
    _, padding = min((of_mode(gpu, full, Mode.ABSORB, float(share))[0], float(share)) for share in PADDING)
    found: dict[str, Any] = {"padding": significant(padding)}
    for mode in Mode:
        _, launches_s, row_s = of_mode(gpu, some, mode, padding)
        found[mode.value] = {"launches_s": significant(launches_s), "row_s": significant(row_s)}
    return found


def of_mode(gpu: Gpu, checked: Iterable[Mapping[str, Any]], mode: Mode, padding: float) -> tuple[float, float, float]:
    """The mean square of the relative errors of one mode, `launches_s` and `row_s`."""
    cases = []
    for record in checked:
        case, ms = record["case"], record["ms"].get(mode.value)
        if ms is None or (mode is not Mode.NAIVE and case["dtype"] == "fp8"):  # the same launches again
            continue
        cost = CostModel(DIMS, case["heads"], gpu.rates, 1 if case["dtype"] == "fp8" else 2)
        work = latent_seconds(cost, case["batch"], TAIL, padding)
        if mode is Mode.ABSORB:
            work += latent_seconds(cost, case["batch"], case["prefix"], padding, shared=True)
        else:
            work += cost.work_seconds(mode, case["batch"], case["prefix"])
        cases.append((ms * 1e-3, work, case["batch"] * case["heads"]))
    measured, work, rows = np.array(cases).T
    columns, left = np.stack([np.ones_like(rows), rows], axis=1) / measured[:, None], 1 - work / measured
    (launches_s, row_s), off = nnls(columns, left)
    return float(off**2 / len(left)), float(launches_s), float(row_s)


def derived(gpu: Gpu, origin: Gpu) -> dict[str, Any]:
    """The entry of a GPU that was not measured, from one that was, in proportion to their data sheets.

    Raises:
        ValueError: one of them has no data sheet, or `origin` no constants.
    """
    if gpu.sheet is None or origin.sheet is None or origin.step is None:
        raise ValueError(f"{gpu.key} and {origin.key} need data sheets, and {origin.key} its constants")
    step = origin.step
    return {
        "bytes_per_s": significant(step.bytes_per_s * gpu.sheet.bytes_per_s / origin.sheet.bytes_per_s),
        "macs_per_s": significant(step.macs_per_s * gpu.sheet.bf16_flops / origin.sheet.bf16_flops),
        **{name: getattr(step, name) for name in ("product_s", "layer_s", "experts_s", "step_s")},
        "attention": {
            "padding": step.padding,
            **{
                mode.value: {"launches_s": step.attention_s[mode], "row_s": step.attention_row_s[mode]} for mode in Mode
            },
        },
        "source": f"DERIVED, not measured: the {origin.rates.name}'s, scaled by the data sheets' bandwidth and BF16 "
        "rate.",
    }
