"""New tokens that ride in decode graphs on a Hopper GPU, in whole engines, beside running requests.

SGLang gives no log-probabilities of a mixed batch. So answers are made under mixing, and another engine, which computes
whole prompts, says how far each of their tokens is from the likeliest one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from test_engine_gpu import make_model

pytestmark = pytest.mark.gpu

PREFIX, REQUESTS, AT_A_TIME = 7069, 96, 16


def run_engine(
    model: Path, out: Path, backend: str, arguments: dict[str, Any], env: dict[str, str], *scored: Path
) -> dict[str, Any]:
    script = Path(__file__).parent / "engine_arrivals.py"
    sizes = [str(PREFIX), str(REQUESTS), str(AT_A_TIME)]
    command = [sys.executable, script, model, backend, out, *sizes, json.dumps(arguments), *scored]
    subprocess.run(command, check=True, env=os.environ | env)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("heads", [16, 128])
def test_answers_under_mixing_are_likely_ones(heads: int, tmp_path: Path) -> None:
    """As likely as those of SGLang's own backend, which decodes and prefills in turns: in BF16, with prefixes in FP8
    and with the cache in FP8, whose rounding is allowed twice as much; nested prefixes, rows that cross pages."""
    model = make_model(tmp_path / "checkpoint", "--heads", str(heads))
    small = {"mem_fraction_static": 0.2}
    naive = {"SGLANG_HYBRID_MLA_MODE": "naive", "SGLANG_HYBRID_MLA_PREFIX_MEMORY_GB": "3"}
    engines: dict[str, tuple[str, dict[str, Any], dict[str, str]]] = {
        "flashmla": ("flashmla", small, {}),
        "mixed": ("hybrid_mla", small, naive),
        "mixed, auto": ("hybrid_mla", small, {"SGLANG_HYBRID_MLA_PREFIX_MEMORY_GB": "3"}),
        "FP8 prefixes": ("hybrid_mla", small, naive | {"SGLANG_HYBRID_MLA_PREFIX_DTYPE": "fp8_e4m3"}),
        "FP8 cache": ("hybrid_mla", small | {"kv_cache_dtype": "fp8_e4m3"}, naive),
    }
    files = {name: tmp_path / f"{index}.json" for index, name in enumerate(engines)}
    with ThreadPoolExecutor(4) as pool:
        running = {
            name: pool.submit(run_engine, model, files[name], backend, arguments, env)
            for name, (backend, arguments, env) in engines.items()
        }
        found = {name: one.result() for name, one in running.items()}
    truth = {"disable_radix_cache": True, "mem_fraction_static": 0.5, "disable_cuda_graph": True}
    gaps = run_engine(model, tmp_path / "gaps.json", "flashmla", truth, {}, *files.values())
    of = {name: gaps[str(file)] for name, file in files.items()}
    for name, values in of.items():
        counters = (found[name]["info"] or {}).get("counters", {})
        ridden = {key: counters.get(key) for key in ("steps_mixed", "prefills_ridden", "tokens_ridden", "not_ridden")}
        print(f"{heads} heads, {name}: mean {mean(values):.5f}, max {max(values):.4f}, {ridden}")
    for name in engines.keys() - {"flashmla"}:
        counters = found[name]["info"]["counters"]
        assert counters["steps_mixed"] > 20 and counters["tokens_ridden"] > 20 * 64
        assert counters["fallbacks"] == {}
        factor = 4 if "FP8" in name else 2
        assert mean(of[name]) < factor * mean(of["flashmla"]) + 1e-3
