"""Speculative decoding in SGLang's whole engine over a cached shared prefix: the verify step alone, and the whole one.

Each backend drafts with the same layer of the same model with dummy weights (NEXTN), by SGLang's own FlashMLA. What
such a layer drafts is never right, so the tokens that a step yields are simulated (SGLANG_SIMULATE_ACC_LEN). The verify
step is the GPU's time of the model's own pass, measured by SGLang with CUDA events; the whole step has the drafts and
the host in it. Every engine has a process of its own. They run one after the other; with several rounds they are there
side by side, share the GPU's memory (--mem-fraction), and are timed in turn, and the table has medians.

    python scripts/study.py speculative --backend hybrid_mla --backend flashmla --prompt 7069 --batch 48 --batch 128
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
import typer
from bench.engine import Engine, engine_arguments, impl_of, results_of, rounds_of, set_prefixes, write_model
from bench.records import write_record
from rich.console import Console
from rich.table import Table

app = typer.Typer(add_completion=False)

QUESTION_TOKENS = 128
PROFILED_STEPS = 20
VERIFY = "target_verify"
"""SGLang's name of a verify step in `sglang:forward_execution_seconds_total`."""

Key = tuple[str, int, int]
"""Backend, prompt and batch."""


def verify_seconds() -> float:
    """The GPU's time in verify steps since the engine of this process started."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry)
    return sum(
        sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "sglang:forward_execution_seconds_total" and sample.labels.get("category") == VERIFY
    )


def measure(
    backend: str, model: str, prompts: list[int], batches: list[int], options: dict[str, Any], turn: Any, out: Any
) -> None:
    """Run one engine and put one result for each prompt and batch into the queue `out`, as often as there are rounds.

    Args:
        turn: see `bench.engine.rounds_of`.
    """
    os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(options["accept_length"])
    os.environ["SGLANG_ENABLE_METRICS_DEVICE_TIMER"] = "1"
    import sglang

    engine = sglang.Engine(
        **engine_arguments(backend, model, batches, options["mem_fraction"]),
        max_running_requests=2 * max(batches),  # SGLang frees the slots of requests that have ended a step later
        speculative_algorithm="NEXTN",
        speculative_num_steps=options["draft_tokens"] - 1,
        speculative_eagle_topk=1,
        speculative_num_draft_tokens=options["draft_tokens"],
        speculative_draft_attention_backend="flashmla",
        kv_cache_dtype=options["kv_cache_dtype"],
        enable_metrics=True,
    )
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, 31000) for _ in range(count)]

    def run(prefix: list[int], batch: int, new_tokens: int) -> tuple[float, int, int]:
        """Seconds, verify steps of a request, and tokens of all requests."""
        requests = [prefix + tokens(QUESTION_TOKENS) for _ in range(batch)]
        sampling = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0}
        start = time.perf_counter()
        answers = engine.generate(input_ids=requests, sampling_params=sampling)
        seconds = time.perf_counter() - start
        of = [answer["meta_info"] for answer in answers]
        return seconds, max(each.get("spec_verify_ct", 0) for each in of), sum(each["completion_tokens"] for each in of)

    def spent(prefix: list[int], batch: int, steps: float) -> np.ndarray:
        """Seconds, verify steps, tokens, and seconds of the GPU in verify steps, of about so many steps."""
        before = verify_seconds()
        found = run(prefix, batch, 1 + round(steps * options["accept_length"]))
        time.sleep(0.1)  # the events of the last step are read with the next report
        run(prefix, 1, 1)
        return np.array([*found, verify_seconds() - before])

    for _ in rounds_of(options["rounds"], turn, out):
        for prompt in prompts:
            prefix = tokens(prompt)
            run(prefix, 1, 2)
            for batch in batches:
                run(prefix, batch, 8)
                # The same prefill, and the same steps while the last requests arrive, are in both and cancel.
                few = spent(prefix, batch, options["steps"] / 4)
                seconds, steps, count, verify = spent(prefix, batch, options["steps"] * 5 / 4) - few
                info = engine.get_server_info()["internal_states"][0]
                if options["profile"]:
                    engine.start_profile(output_dir=options["profile"], activities=["GPU"])
                    run(prefix, batch, 1 + round(PROFILED_STEPS * options["accept_length"]))
                    engine.stop_profile()
                out.put(
                    {
                        "prompt": prompt,
                        "batch": batch,
                        "verify_ms": verify / steps * 1e3,
                        "step_ms": seconds / steps * 1e3,
                        "accepted_tok_s": count / seconds,
                        "accept_length": count / batch / steps,
                        "info": info.get("hybrid_mla"),
                    }
                )
    engine.shutdown()


@app.command()
def main(
    backend: Annotated[list[str], typer.Option(help="Attention backend; give it several times.")] = [  # noqa: B006
        "hybrid_mla",
        "flashmla",
    ],
    prompt: Annotated[list[int], typer.Option(help="Tokens of the shared prefix; 0 for none.")] = [7069, 26472],  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="Requests that share it.")] = [48],  # noqa: B006
    layers: int = 4,
    heads: int = 128,
    intermediate: Annotated[int, typer.Option(help="Width of the dense MLP.")] = 18432,
    draft_tokens: Annotated[int, typer.Option(min=2, max=8, help="Query tokens of a verify step.")] = 4,
    accept_length: Annotated[float, typer.Option(help="Tokens that a step yields on average.")] = 2.5,
    mem_fraction: Annotated[float, typer.Option(help="SGLang's --mem-fraction-static.")] = 0.5,
    prefix_memory_gb: Annotated[float | None, typer.Option(help="hybrid_mla's memory for expanded prefixes.")] = None,
    prefix_dtype: Annotated[str, typer.Option(help="hybrid_mla's storage of expanded prefixes.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="SGLang's --kv-cache-dtype, for all backends.")] = "auto",
    steps: Annotated[int, typer.Option(help="Steps that are timed.")] = 300,
    rounds: Annotated[int, typer.Option(min=1, help="Times that every engine is timed.")] = 1,
    profile: Annotated[Path | None, typer.Option(help="Folder for a trace of torch's profiler of each case.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSON lines file to append records to.")] = None,
) -> None:
    """Time speculative decoding with each backend; print a table; append records."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU")
    set_prefixes(prefix_memory_gb, prefix_dtype)
    options = {
        "mem_fraction": mem_fraction,
        "draft_tokens": draft_tokens,
        "accept_length": accept_length,
        "kv_cache_dtype": kv_cache_dtype,
        "steps": steps,
        "rounds": rounds,
        "profile": str(profile.resolve()) if profile else None,
    }
    results: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), layers, heads, intermediate, nextn=True)
        starts = {name: partial(Engine, measure, name, folder, prompt, batch, options) for name in backend}
        for name, result in results_of(starts, rounds, console):
            results[name, result["prompt"], result["batch"]].append(result)
            times = f"{result['verify_ms']:.3f} ms to verify, {result['step_ms']:.3f} ms a step"
            console.print(f"{name} prompt {result['prompt']} batch {result['batch']}: {times}")
            if out is not None:
                case = {"heads": heads, "layers": layers, "batch": result["batch"], "prefix": result["prompt"]}
                case |= {"draft_tokens": draft_tokens, "dtype": dtype_of(name, prefix_dtype, kv_cache_dtype)}
                write_record(
                    out,
                    bench="speculative",
                    impl=impl_of(name),
                    case=case,
                    verify_ms=round(result["verify_ms"], 4),
                    step_ms=round(result["step_ms"], 4),
                    accepted_tok_s=round(result["accepted_tok_s"], 1),
                    accept_length=round(result["accept_length"], 3),
                    hybrid_mla=result["info"],
                )
    console.print(table_of(results, backend))


def dtype_of(backend: str, prefix_dtype: str, kv_cache_dtype: str) -> str:
    """How a record names what is stored: the cache where that is FP8, or else the prefix."""
    if kv_cache_dtype == "fp8_e4m3":
        return "fp8_cache"
    return "fp8" if backend == "hybrid_mla" and prefix_dtype == "fp8_e4m3" else "bf16"


def table_of(results: dict[Key, list[dict[str, Any]]], backends: list[str]) -> Table:
    """Medians, each beside the last backend's."""
    table = Table(title="speculative decoding at full batch, shared prefix cached")
    last = backends[-1]
    for column in ("prompt", "batch", "backend", "verify ms", f"vs {last}", "step ms", f"vs {last}", "tokens/s"):
        table.add_column(column, justify="right")
    for (name, prompt, batch), runs in sorted(results.items(), key=lambda item: item[0][1:]):
        cells = [str(prompt), str(batch), name]
        for metric in ("verify_ms", "step_ms"):
            value = median(run[metric] for run in runs)
            base = results.get((last, prompt, batch))
            ratio = f"{median(run[metric] for run in base) / value:.2f}x" if base else "-"
            cells += [f"{value:.3f}", ratio]
        table.add_row(*cells, f"{median(run['accepted_tok_s'] for run in runs):.0f}")
    return table
