"""Decode step and time to first token of SGLang's whole engine on a cached shared prefix, without HTTP or a tokenizer.

For each backend, prompt length and batch size: the prefix is cached first; then a batch of requests that share it is
run to one token (its time is the burst to the first token) and to many (the difference gives the decode step at full
batch). Every backend runs in a process of its own, one after the other, on the same model with dummy weights.

    python scripts/bench_engine.py --backend hybrid_mla --backend flashmla --prompt 7069 --prompt 26472 --batch 128
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sglang_mla_ext.configs import read_config
from sglang_mla_ext.results import write_record

QUESTION_TOKENS = 128
PAGE_SIZE = {"flashmla": 64}


def write_model(folder: Path, layers: int, heads: int, intermediate: int, max_positions: int = 65536) -> None:
    """A `config.json` of DeepSeek-V3's dimensions with dense layers, for `--load-format dummy`."""
    dims = read_config("models", "deepseek-v3")
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": layers,
        "first_k_dense_replace": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": intermediate,
        "q_lora_rank": 1536,
        "vocab_size": 32000,
        "max_position_embeddings": max_positions,
        "rope_theta": 10000,
        "rope_scaling": None,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "num_nextn_predict_layers": 0,
        "ep_size": 1,
    }
    names = ("hidden_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    config |= {name: dims[name] for name in names}
    (folder / "config.json").write_text(json.dumps(config))


def measure(
    backend: str, model: str, prompts: list[int], batches: list[int], options: dict[str, Any], out: Any
) -> None:
    """Run one engine and put one result for each prompt and batch into the queue `out`."""
    import sglang

    arguments = dict(
        model_path=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend=backend,
        page_size=PAGE_SIZE.get(backend),
        mem_fraction_static=options["mem_fraction"],
        cuda_graph_max_bs_decode=max(batches),
        tp_size=options["tp"],
        log_level="warning",
    )
    engine = sglang.Engine(**arguments)
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
    out.put(None)


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
    tp: Annotated[int, typer.Option(help="Tensor-parallel ranks.")] = 1,
    steps: Annotated[int, typer.Option(help="Decode steps that are timed.")] = 256,
    repeat: Annotated[int, typer.Option(help="Runs of each; the fastest counts.")] = 2,
    out: Annotated[Path | None, typer.Option(help="JSON lines file to append records to.")] = None,
) -> None:
    """Time the engine with each backend; print a table; append records."""
    if prefix_memory_gb is not None:
        os.environ["SGLANG_HYBRID_MLA_PREFIX_MEMORY_GB"] = str(prefix_memory_gb)
    os.environ["SGLANG_HYBRID_MLA_PREFIX_DTYPE"] = prefix_dtype
    options = {"mem_fraction": mem_fraction, "tp": tp, "steps": steps, "repeat": repeat}
    results: dict[tuple[str, int, int], dict[str, Any]] = {}
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), layers, heads, intermediate)
        for name in backend:
            running = Results(measure, name, folder, prompt, batch, options)
            for result in running:
                results[name, result["prompt"], result["batch"]] = result
                console.print(f"{name} prompt {result['prompt']} batch {result['batch']}: {result['step_ms']:.3f} ms")
                if out is not None:
                    case = {"prompt": result["prompt"], "concurrency": result["batch"], "heads": heads}
                    if name == "hybrid_mla":
                        case["dtype"] = "fp8" if prefix_dtype == "fp8_e4m3" else "bf16"
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
            if running.exit_code:
                console.print(f"[red]{name} stopped with exit code {running.exit_code}[/red]")
    _print(console, results, backend)


def impl_of(backend: str) -> str:
    """The `impl` of a backend's records."""
    return backend if backend == "hybrid_mla" else f"sglang_{backend}"


class Results:
    """What a function puts into the queue that it gets as its last argument, running in a process of its own; None in
    the queue ends it.

    Attributes:
        exit_code: of the process, once all results are taken.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._queue = spawn.Queue()
        self._process = spawn.Process(target=function, args=(*arguments, self._queue))
        self._process.start()
        self.exit_code: int | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (result := self._next()) is not None:
            yield result
        self._process.join()
        self.exit_code = self._process.exitcode

    def _next(self) -> dict[str, Any] | None:
        while True:
            try:
                return self._queue.get(timeout=1)
            except queue.Empty:
                if not self._process.is_alive():
                    return None


def _print(console: Console, results: dict[tuple[str, int, int], dict[str, Any]], backends: list[str]) -> None:
    table = Table(title="decode at full batch, shared prefix cached")
    for column in ("prompt", "batch", "backend", "step ms", "tokens/s", "first token ms", "vs " + backends[-1]):
        table.add_column(column, justify="right")
    for (name, prompt, batch), result in sorted(results.items(), key=lambda item: item[0][1:]):
        base = results.get((backends[-1], prompt, batch))
        ratio = f"{base['step_ms'] / result['step_ms']:.2f}x" if base else "-"
        table.add_row(
            str(prompt),
            str(batch),
            name,
            f"{result['step_ms']:.3f}",
            f"{result['decode_tok_s']:.0f}",
            f"{result['ttft_ms']:.0f}",
            ratio,
        )
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
