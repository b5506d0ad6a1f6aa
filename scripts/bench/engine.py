"""What the benchmarks of SGLang's engine share: a model without weights, and a process for each engine."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from sglang_mla_ext.configs import read_config

PAGE_SIZE = {"flashmla": 64}


def write_model(
    folder: Path, layers: int, heads: int, intermediate: int, max_positions: int = 65536, nextn: bool = False
) -> None:
    """A `config.json` of DeepSeek-V3's dimensions with dense layers, for `--load-format dummy`.

    Args:
        nextn: with one layer more, which drafts.
    """
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
        "num_nextn_predict_layers": int(nextn),
        "ep_size": 1,
    }
    names = ("hidden_size", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    config |= {name: dims[name] for name in names}
    (folder / "config.json").write_text(json.dumps(config))


def engine_arguments(backend: str, model: str, batches: list[int], mem_fraction: float) -> dict[str, Any]:
    """What every engine of these benchmarks is started with: dummy weights, CUDA graphs for the largest batch."""
    return dict(
        model_path=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        attention_backend=backend,
        page_size=PAGE_SIZE.get(backend),
        mem_fraction_static=mem_fraction,
        cuda_graph_max_bs_decode=max(batches),
        log_level="warning",
    )


def set_prefixes(memory_gb: float | None, dtype: str) -> None:
    """hybrid_mla's memory for expanded prefixes (None: its default) and their storage, for engines started later."""
    if memory_gb is not None:
        os.environ["SGLANG_HYBRID_MLA_PREFIX_MEMORY_GB"] = str(memory_gb)
    os.environ["SGLANG_HYBRID_MLA_PREFIX_DTYPE"] = dtype


def impl_of(backend: str) -> str:
    """The `impl` of a backend's records."""
    return backend if backend == "hybrid_mla" else f"sglang_{backend}"


class Results:
    """Results of a function that runs in its own process and puts them into a queue, its last argument; None ends those
    of one round, and an iteration over them."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._queue = spawn.Queue()
        self._process = spawn.Process(target=function, args=(*arguments, self._queue))
        self._process.start()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (result := self._receive()) is not None:
            yield result

    @property
    def exit_code(self) -> int | None:
        """Of the process, when it has ended: to be asked for once all results are taken."""
        self._process.join()
        return self._process.exitcode

    def _receive(self) -> dict[str, Any] | None:
        while True:
            try:
                return self._queue.get(timeout=1)
            except queue.Empty:
                if not self._process.is_alive():
                    return None


class Engine:
    """An engine in a process of its own, which has started and runs when it is asked to.

    Args:
        measure: starts an engine, and puts results into a queue in `rounds_of`, which takes its last two arguments.
    """

    def __init__(self, measure: Callable[..., None], *arguments: Any) -> None:
        self._turn = multiprocessing.get_context("spawn").Semaphore(0)
        self.results = Results(measure, *arguments, self._turn)
        list(self.results)  # until it has started: the next one looks at the memory that is left

    def round(self) -> Iterator[dict[str, Any]]:
        """Results of one round."""
        self._turn.release()
        return iter(self.results)


def rounds_of(rounds: int, turn: Any, out: Any) -> Iterator[None]:
    """The rounds of an engine that has started, in its process.

    Args:
        turn: a semaphore that is taken before each round.
        out: a queue, which gets an empty round before the first one.
    """
    out.put(None)
    for _ in range(rounds):
        turn.acquire()
        yield
        out.put(None)


def results_of(
    starts: Mapping[str, Callable[[], Engine]], rounds: int, console: Console
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each result with the name of its engine. One engine after the other; with several rounds all are there, having
    started one after the other, and take turns."""
    for names in [list(starts)] if rounds > 1 else [[name] for name in starts]:
        engines = {name: starts[name]() for name in names}
        for _ in range(rounds):
            for name, engine in engines.items():
                for result in engine.round():
                    yield name, result
        for name, engine in engines.items():
            if code := engine.results.exit_code:
                console.print(f"[red]{name} stopped with exit code {code}[/red]")
