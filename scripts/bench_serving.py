"""Serving benchmark: decode throughput at full concurrency and time to first token, on prompts that share a prefix.

For each backend a server is started, one after the other; for each prompt and concurrency SGLang's own benchmark
client sends that many requests at once. They share a system prompt, which is in the server's prefix cache, and each
goes on with a question of its own. Prompts are sent as token ids; outputs are long, so that the full batch decodes for
many steps.

    python scripts/bench_serving.py --model MODEL --backend hybrid_mla --backend flashmla --concurrency 128

With `--workload` the servers are given one that `configs/workloads` describes instead: trees of prompts, users that
come and go, sessions of many turns, bursts. `bench/workloads.py` says how; a path to a file of your own does as well.

    python scripts/bench_serving.py --model MODEL --workload mixed --workload agents --runs 3

`--model` may be a folder without weights (`make_demo_model.py --config-only`) if there is `--server-arg "--load-format
dummy"`. A backend may carry flags: `--backend "hybrid_mla --hybrid-mla-mode absorb"`.

With `--together` all servers start at once and share the GPU's memory (`--server-arg "--max-total-tokens 600000"`);
each is measured while the others are idle.
"""

from __future__ import annotations

import shlex
from itertools import product
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from bench.beside import Comparison
from bench.client import HYBRID
from bench.server import console_of, load_arguments, work_folder
from bench.workloads import Turn, Workload, ordinary_tokens, published_lengths, read_workloads
from transformers import AutoTokenizer

from sglang_mla_ext.configs import read_config
from sglang_mla_ext.prefix.planner.model_dims import ModelDims

QUESTIONS = "mmlu"
"""Workload whose lengths the requests' own texts have."""
# Tokens of an answer sent in one piece, so that HTTP and the client do not set the pace. The first is sent alone.
STREAM_INTERVAL = 16


def main(
    model: Annotated[str, typer.Option(help="Model path, as for SGLang's --model-path.")],
    backend: Annotated[list[str] | None, typer.Option(help="Attention backend, and its flags; repeatable.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A, B, C or a number of tokens; repeatable.")] = None,
    system_prompt_file: Annotated[list[Path] | None, typer.Option(exists=True, help="Your own; repeatable.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="Requests at once; repeatable.")] = None,
    output_tokens: Annotated[int, typer.Option(min=16, help="Tokens of each answer.")] = 1024,
    workload: Annotated[
        list[str] | None, typer.Option(help="mixed, churn, agents, burst or a JSON file; repeatable.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="How often each case is measured on each server.")] = 1,
    profile: Annotated[
        bool, typer.Option("--profile", help="After each workload, run it once more under torch's profiler.")
    ] = False,
    server_arg: Annotated[list[str] | None, typer.Option(help="Flags for every server; repeatable.")] = None,
    together: Annotated[bool, typer.Option("--together", help="Start all servers at once.")] = False,
    base_url: Annotated[str | None, typer.Option(help="Measure this running server; name its one --backend.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSONL file to append records to.")] = None,
    log_folder: Annotated[Path | None, typer.Option(help="For the output of servers and client [.demo/logs].")] = None,
    seed: int = 0,
) -> None:
    """Compare attention backends of SGLang's server on prompts that share a prefix."""
    backends = backend or [HYBRID, "flashmla"]
    if profile and not workload:
        raise typer.BadParameter("--profile is for --workload")
    if base_url and len(backends) != 1:
        raise typer.BadParameter("--base-url measures one server: give one --backend, its name in the table")
    if workload and (prompt or system_prompt_file or concurrency):
        raise typer.BadParameter("--workload has its own prompts and concurrency: give no others")
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=True)
    vocabulary = ordinary_tokens(tokenizer)
    logs = log_folder or work_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if workload:
        try:
            asked = [one for name in workload for one in read_workloads(name, vocabulary, seed)]
        except (ValueError, OSError) as error:
            raise typer.BadParameter(str(error)) from None
    else:
        own = {path.name: tokenizer.encode(path.read_text()) for path in system_prompt_file or []}
        rng = np.random.default_rng(seed)
        asked = shared_prompts(own, prompt, concurrency or [128], output_tokens, vocabulary, rng)
    comparison = Comparison(
        backends,
        asked,
        ModelDims.of(model) if Path(model).exists() else None,
        {} if workload else {"questions": QUESTIONS},
        out,
        logs,
        console_of(width=120),
        rounds=runs,
        traces=logs / "traces" if profile else None,
    )
    if base_url:
        comparison.measure_running(base_url)
    else:
        common = [*shlex.split(" ".join(server_arg or [])), *load_arguments(model, max(w.concurrency for w in asked))]
        comparison.run(common, {}, together=together)


def shared_prompts(
    own: dict[str, list[int]],
    named: list[str] | None,
    sizes: list[int],
    output_tokens: int,
    vocabulary: np.ndarray,
    rng: np.random.Generator,
) -> list[Workload]:
    """Draw requests that are sent at once, for each system prompt and number of requests.

    Args:
        own: token ids of the user's prompts; named: A, B, C or numbers of tokens; all known ones without either.
    """

    def random_ids(count: int) -> list[int]:
        ids: list[int] = rng.choice(vocabulary, count).tolist()
        return ids

    known = read_config("workloads", "system_prompts")["tokens"]
    names = named or ([] if own else list(known))
    prompts = own | {name: random_ids(known[name] if name in known else int(name)) for name in names}
    questions = [random_ids(length) for length in published_lengths(QUESTIONS, "prompt_tokens", max(sizes), rng)]
    return [
        Workload(
            name="serving",
            case=name,
            cached=[ids],
            sessions=[[Turn(ids + question, output_tokens)] for question in questions[:size]],
            at_a_time=None,
            stream_interval=STREAM_INTERVAL,
        )
        for (name, ids), size in product(prompts.items(), sizes)
    ]


if __name__ == "__main__":
    typer.run(main)
