"""Decode step and time to first token of SGLang's whole engine on a cached shared prefix, without HTTP or a tokenizer.

For each backend, prompt length and batch size: the prefix is cached first; then a batch of requests that share it is
run to one token (its time is the burst to the first token) and to many (the difference gives the decode step at full
batch). Every backend runs in a process of its own, one after the other, on the same model with dummy weights. With
`--rounds` above 1 all engines run side by side, share the GPU's memory (--mem-fraction), and are timed in turn, and the
table has medians.

    python scripts/study.py engine --backend hybrid_mla --backend flashmla --prompt 7069 --prompt 26472 --batch 128
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

import torch
import typer
from bench.client import HYBRID
from bench.engine import Engine, engine_arguments, impl_of, results_of, rounds_of, set_prefixes, write_model
from bench.records import write_record
from rich.console import Console
from rich.table import Table

app = typer.Typer(add_completion=False)

QUESTION_TOKENS = 128

Key = tuple[str, int, int]
"""Engine, prompt and batch."""


def measure(
    backend: str, model: str, prompts: list[int], batches: list[int], options: dict[str, Any], turn: Any, out: Any
) -> None:
    """Run one engine and put one result for each prompt and batch into the queue `out`, as often as there are rounds.

    Args:
        turn: see `bench.engine.rounds_of`.
    """
    import sglang

    arguments = engine_arguments(backend, model, batches, options["mem_fraction"])
    engine = sglang.Engine(**arguments, tp_size=options["tp"])
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(10, 31000) for _ in range(count)]

    def seconds(prefix: list[int], batch: int, new_tokens: int) -> float:
        requests = [prefix + tokens(QUESTION_TOKENS) for _ in range(batch)]
        sampling = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0}
        start = time.perf_counter()
        engine.generate(input_ids=requests, sampling_params=sampling)
        return time.perf_counter() - start

    steps = options["steps"]
    for _ in rounds_of(options["rounds"], turn, out):
        for prompt in prompts:
            prefix = tokens(prompt)
            seconds(prefix, 1, 2)
            for batch in batches:
                seconds(prefix, batch, 8)
                first = min(seconds(prefix, batch, 1) for _ in range(options["repeat"]))
                whole = min(seconds(prefix, batch, 1 + steps) for _ in range(options["repeat"]))
                step_ms = (whole - first) / steps * 1e3
                info = engine.get_server_info()["internal_states"][0].get("hybrid_mla")
                out.put(
                    {
                        "prompt": prompt,
                        "batch": batch,
                        "step_ms": step_ms,
                        "decode_tok_s": batch / step_ms * 1e3,
                        "ttft_ms": first * 1e3,
                        "info": info,
                    }
                )
    engine.shutdown()


@app.command()
def main(
    backend: Annotated[list[str], typer.Option(help="Attention backend; give it several times.")] = ["hybrid_mla"],  # noqa: B006
    prompt: Annotated[list[int], typer.Option(help="Tokens of the shared prefix.")] = [7069, 26472],  # noqa: B006
    batch: Annotated[list[int], typer.Option(help="Requests that share it.")] = [128],  # noqa: B006
    layers: int = 4,
    heads: int = 128,
    intermediate: Annotated[int, typer.Option(help="Width of the dense MLP.")] = 18432,
    mem_fraction: Annotated[float, typer.Option(help="SGLang's --mem-fraction-static.")] = 0.5,
    prefix_memory_gb: Annotated[float | None, typer.Option(help="hybrid_mla's memory for expanded prefixes.")] = None,
    prefix_dtype: Annotated[str, typer.Option(help="hybrid_mla's storage of expanded prefixes.")] = "auto",
    verify_interval: Annotated[
        list[int], typer.Option(help="hybrid_mla's steps between shadow checks, 0 for none; give it several times.")
    ] = [0],  # noqa: B006
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    steps: Annotated[int, typer.Option(help="Decode steps that are timed.")] = 256,
    repeat: Annotated[int, typer.Option(help="Runs of each; the fastest counts.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Times that every engine is timed.")] = 1,
    out: Annotated[Path | None, typer.Option(help="JSON lines file to append records to.")] = None,
) -> None:
    """Time the engine with each backend; print a table; append records."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU")
    set_prefixes(prefix_memory_gb, prefix_dtype)
    options = {"mem_fraction": mem_fraction, "tp": tp, "steps": steps, "repeat": repeat, "rounds": rounds}
    results: dict[Key, list[dict[str, Any]]] = defaultdict(list)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), layers, heads, intermediate)

        def start(name: str, every: int) -> Engine:
            os.environ["SGLANG_HYBRID_MLA_VERIFY_INTERVAL"] = str(every)
            return Engine(measure, name, folder, prompt, batch, options)

        kinds = [(name, every) for name in backend for every in (verify_interval if name == HYBRID else [0])]
        shown = {f"{name}, checked every {every} steps" if every else name: (name, every) for name, every in kinds}
        starts = {text: partial(start, *kind) for text, kind in shown.items()}
        for text, result in results_of(starts, rounds, console):
            name, every = shown[text]
            results[text, result["prompt"], result["batch"]].append(result)
            console.print(f"{text} prompt {result['prompt']} batch {result['batch']}: {result['step_ms']:.4f} ms")
            if out is not None:
                case = {"prompt": result["prompt"], "concurrency": result["batch"], "heads": heads}
                if name == "hybrid_mla":
                    case["dtype"] = "fp8" if prefix_dtype == "fp8_e4m3" else "bf16"
                if every:
                    case["verify_interval"] = every
                write_record(
                    out,
                    bench="serving",
                    impl=impl_of(name),
                    case=case | {"layers": layers, "tp": tp, "client": "engine"},
                    step_ms=round(result["step_ms"], 4),
                    decode_tok_s=round(result["decode_tok_s"], 1),
                    ttft_ms=round(result["ttft_ms"], 1),
                    hybrid_mla=result["info"],
                )
    _print(console, results, backend)


def _print(console: Console, results: dict[Key, list[dict[str, Any]]], backends: list[str]) -> None:
    """Medians, each beside the last backend's."""
    table = Table(title="decode at full batch, shared prefix cached")
    for column in ("prompt", "batch", "backend", "step ms", "tokens/s", "first token ms", "vs " + backends[-1]):
        table.add_column(column, justify="right")
    middle = {
        key: {metric: median(run[metric] for run in runs) for metric in ("step_ms", "decode_tok_s", "ttft_ms")}
        for key, runs in results.items()
    }
    for (name, prompt, batch), result in sorted(middle.items(), key=lambda item: item[0][1:]):
        base = middle.get((backends[-1], prompt, batch))
        ratio = f"{base['step_ms'] / result['step_ms']:.3f}x" if base else "-"
        table.add_row(
            str(prompt),
            str(batch),
            name,
            f"{result['step_ms']:.4f}",
            f"{result['decode_tok_s']:.0f}",
            f"{result['ttft_ms']:.0f}",
            ratio,
        )
    console.print(table)
