"""Decode throughput of SGLang's engine on long contexts that no two requests share, as many as memory holds.

    python scripts/study.py context --backend hybrid_mla:fp8_e4m3 --backend flashmla:fp8_e4m3 --backend flashmla

A backend is a name and, behind a colon, a --kv-cache-dtype. All get the same share of the GPU's memory, and as many
requests run as their caches hold. A first run caches the prompts, so that the time of many tokens less that of one is
decoding alone. Every backend runs in a process of its own, on the same model with dummy weights.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from bench.engine import PAGE_SIZE, Results, impl_of, write_model
from bench.records import write_record
from rich.console import Console
from rich.table import Table

app = typer.Typer(add_completion=False)

SPARE = 0.02  # of the cache, left free: SGLang holds requests back before the last page is taken


def requests_that_fit(capacity: int, tokens: int, most: int, page_size: int = 64) -> int:
    """Requests of so many tokens each that a cache of `capacity` tokens holds, in whole pages; at most `most`."""
    pages = -(-tokens // page_size) + 1
    return min(most, int(capacity * (1 - SPARE)) // (pages * page_size))


def split_backend(spec: str) -> tuple[str, str]:
    """Name and cache dtype of `name` or `name:dtype`."""
    name, _, dtype = spec.partition(":")
    return name, dtype or "auto"


def measure(spec: str, model: str, contexts: list[int], options: dict[str, Any], out: Any) -> None:
    """Run one engine and put one result for each context into the queue `out`."""
    import sglang

    backend, dtype = split_backend(spec)
    engine = sglang.Engine(
        model_path=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend=backend,
        kv_cache_dtype=dtype,
        page_size=PAGE_SIZE.get(backend),
        mem_fraction_static=options["mem_fraction"],
        cuda_graph_max_bs_decode=options["most"],
        max_running_requests=options["most"],
        log_level="warning",
    )
    rng = random.Random(0)
    capacity, steps = engine.get_server_info()["max_total_num_tokens"], options["steps"]
    for context in contexts:
        batch = requests_that_fit(capacity, context + steps + 1, options["most"])
        if not batch:
            print(f"{spec}: a cache of {capacity:,} tokens holds no request of {context:,}", flush=True)
            continue
        warm_up, *prompts = ([rng.randrange(10, 31000) for _ in range(context)] for _ in range(batch + 1))

        def seconds(new_tokens: int, prompts: list[list[int]] = prompts) -> float:
            sampling = {"max_new_tokens": new_tokens, "ignore_eos": True, "temperature": 0}
            start = time.perf_counter()
            engine.generate(input_ids=prompts, sampling_params=sampling)
            return time.perf_counter() - start

        seconds(1, [warm_up])  # some kernels are compiled at their first use
        engine.flush_cache()
        prefill = seconds(1)
        first = min(seconds(1) for _ in range(2))
        step_ms = (seconds(1 + steps) - first) / steps * 1e3
        info = engine.get_server_info()["internal_states"][0].get("hybrid_mla")
        result = dict(context=context, batch=batch, capacity=capacity, step_ms=step_ms, prefill_s=prefill, info=info)
        out.put(result)
        engine.flush_cache()
    engine.shutdown()
    out.put(None)


@app.command()
def main(
    backend: Annotated[list[str], typer.Option(help="NAME or NAME:KV_CACHE_DTYPE; give it several times.")],
    context: Annotated[list[int], typer.Option(help="Tokens of each request's prompt.")] = [16384, 65536],  # noqa: B006
    layers: int = 4,
    heads: int = 128,
    intermediate: Annotated[int, typer.Option(help="Width of the dense MLP.")] = 18432,
    mem_fraction: Annotated[float, typer.Option(help="SGLang's --mem-fraction-static.")] = 0.1,
    most: Annotated[int, typer.Option(help="Requests at once, at most.")] = 256,
    steps: Annotated[int, typer.Option(help="Decode steps that are timed.")] = 128,
    out: Annotated[Path | None, typer.Option(help="JSON lines file to append records to.")] = None,
) -> None:
    """Time decoding with each backend; print a table; append records."""
    if not torch.cuda.is_available():
        raise typer.BadParameter("needs a GPU")
    os.environ["SGLANG_HYBRID_MLA_MODE"] = "absorb"  # nothing is shared here, so no memory is set aside for it
    options = {"mem_fraction": mem_fraction, "most": most, "steps": steps}
    table = Table(title="decode at full batch, nothing shared")
    for column in ("backend", "context", "tokens in cache", "requests", "step ms", "tokens/s"):
        table.add_column(column, justify="right")
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), layers, heads, intermediate, max_positions=max(context) + steps + 2)
        for spec in backend:
            running = Results(measure, spec, folder, context, options)
            for result in running:
                name, dtype = split_backend(spec)
                speed = result["batch"] / result["step_ms"] * 1e3
                table.add_row(
                    spec,
                    str(result["context"]),
                    f"{result['capacity']:,}",
                    str(result["batch"]),
                    f"{result['step_ms']:.3f}",
                    f"{speed:.0f}",
                )
                if out is not None:
                    case = {"prefix": 0, "context": result["context"], "concurrency": result["batch"], "heads": heads}
                    write_record(
                        out,
                        bench="context",
                        impl=impl_of(name),
                        case=case | {"layers": layers, "kv_cache": "bf16" if dtype == "auto" else dtype},
                        step_ms=round(result["step_ms"], 4),
                        decode_tok_s=round(speed, 1),
                        prefill_s=round(result["prefill_s"], 2),
                        cache_tokens=result["capacity"],
                        hybrid_mla=result["info"],
                    )
            failed |= bool(running.exit_code)
    Console().print(table)
    if failed:
        raise typer.Exit(1)
