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

import contextlib
import shlex
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import requests
import typer
from bench.client import (
    HYBRID,
    ClientFailedError,
    describe_sharing,
    full_batch_rate,
    run_client,
    sampling,
    sharing_between,
)
from bench.profile import NoTraceError
from bench.records import write_record
from bench.server import (
    ServerFailedError,
    Started,
    console_of,
    free_port,
    load_arguments,
    server_info,
    started_server,
    work_folder,
)
from bench.workload_runs import (
    Run,
    describe_run,
    profile_workload,
    record_profile,
    record_run,
    run_workload,
    runs_tables,
    server_case,
)
from bench.workloads import published_lengths, read_workloads
from rich.table import Table
from transformers import AutoTokenizer

from sglang_mla_ext.configs import read_config
from sglang_mla_ext.prefix.planner.model_dims import ModelDims

# Tokens of an answer sent in one piece, so that HTTP and the client do not set the pace. The first is sent alone.
STREAM_INTERVAL = 16


@dataclass(frozen=True)
class Prompt:
    """A shared system prompt: its name in tables and its token ids."""

    name: str
    ids: list[int]


@dataclass(frozen=True)
class Result:
    """One case on one backend.

    Attributes:
        decode_tok_s: tokens of all requests per second while every request decodes; None if that never lasted.
        ttft_ms: median time to first token; `ttft_last_ms` that of the last request.
        sharing: of `sharing_between`.
    """

    backend: str
    prompt: Prompt
    concurrency: int
    decode_tok_s: float | None
    ttft_ms: float
    ttft_last_ms: float
    sharing: dict[str, Any] | None

    @property
    def mode(self) -> str:
        """Mode and group size for the table; `-` for a stock backend."""
        if self.sharing is None:
            return "-"
        size = self.sharing["group_size"]
        return f"{self.sharing['mode']} x {size:g}" if size else str(self.sharing["mode"])


def main(
    model: Annotated[str, typer.Option(help="Model path, as for SGLang's --model-path.")],
    backend: Annotated[list[str] | None, typer.Option(help="Attention backend, and its flags; repeatable.")] = None,
    prompt: Annotated[list[str] | None, typer.Option(help="A, B, C or a number of tokens; repeatable.")] = None,
    system_prompt_file: Annotated[list[Path] | None, typer.Option(exists=True, help="Your own; repeatable.")] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="Requests at once; repeatable.")] = None,
    questions: Annotated[str, typer.Option(help="Question lengths: mmlu, gsm8k or simpleqa.")] = "mmlu",
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
    console = console_of(width=120)
    backends = backend or [HYBRID, "flashmla"]
    if profile and not workload:
        raise typer.BadParameter("--profile is for --workload")
    if base_url and len(backends) != 1:
        raise typer.BadParameter("--base-url measures one server: give one --backend, its name in the table")
    if workload and (prompt or system_prompt_file or concurrency):
        raise typer.BadParameter("--workload has its own prompts and concurrency: give no others")
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=True)
    vocabulary = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
    dims = ModelDims.from_json(model) if Path(model).exists() else None
    logs = log_folder or work_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    client_log = logs / "client.log"

    if workload:
        try:
            asked = [one for name in workload for one in read_workloads(name, vocabulary, seed)]
        except (ValueError, OSError) as error:
            raise typer.BadParameter(str(error)) from None
        most_requests = max(one.concurrency for one in asked)
        found: list[Run] = []

        def measure_all(url: str, name: str) -> None:
            for one in asked:
                for number in range(1, runs + 1):
                    run = Run(name, one, number, run_workload(url, one, seed, client_log))
                    found.append(run)
                    console.print(describe_run(run))
                    if out:
                        record_run(out, run, server_case(url, dims))
                if profile and one.profile:
                    of_steps = profile_workload(url, one, seed, client_log, logs / "traces")
                    busy = f"{of_steps.busy_ms:.1f} of {of_steps.span_ms:.1f} ms"
                    console.print(f"{one.title}: the GPU was busy for {busy}")
                    if out:
                        record_profile(out, name, one, of_steps, server_case(url, dims))

    else:
        concurrencies = concurrency or [128]
        most_requests = max(concurrencies)
        rng = np.random.default_rng(seed)

        def random_ids(count: int) -> list[int]:
            ids: list[int] = rng.choice(vocabulary, count).tolist()
            return ids

        known = read_config("workloads", "system_prompts")["tokens"]
        prompts = [Prompt(path.name, tokenizer.encode(path.read_text())) for path in system_prompt_file or []]
        names = prompt or ([] if prompts else list(known))
        prompts += [Prompt(name, random_ids(known[name] if name in known else int(name))) for name in names]
        lengths = published_lengths(questions, "prompt_tokens", most_requests, rng)
        question_ids = [random_ids(length) for length in lengths]
        results: list[Result] = []

        def measure_all(url: str, name: str) -> None:
            for shared, size, number in product(prompts, concurrencies, range(1, runs + 1)):
                requested = [shared.ids + ids for ids in question_ids[:size]]
                result = measure(url, name, shared, requested, output_tokens, seed, client_log)
                results.append(result)
                console.print(describe(result))
                if out:
                    record(out, result, number, server_case(url, dims), questions, output_tokens)

    common = [*shlex.split(" ".join(server_arg or [])), *load_arguments(model, most_requests)]

    def start(number: int, servers: contextlib.ExitStack) -> Started:
        """Start a backend's server, which ends with `servers`."""
        attention, *flags = shlex.split(backends[number])
        log = logs / f"server-{number}-{attention}.log"
        arguments = ["--attention-backend", attention, *flags, *common]
        return servers.enter_context(started_server(arguments, free_port(), log, console))

    failed = False
    with contextlib.ExitStack() as servers:
        started = [start(number, servers) for number in range(len(backends))] if together and not base_url else []
        for server in started:
            with contextlib.suppress(ServerFailedError):  # said below
                server.url()
        for number, name in enumerate(backends):
            console.rule(name)
            try:
                with contextlib.ExitStack() as alone:
                    measure_all(base_url or (started[number] if started else start(number, alone)).url(), name)
            except (ServerFailedError, ClientFailedError, NoTraceError, requests.RequestException) as error:
                console.print(f"{name}: {error}", style="red", markup=False, highlight=False)
                failed = True
    for table in runs_tables(found, backends) if workload else [results_table(results, backends)]:
        console.print(table)
    if failed:
        raise typer.Exit(1)


def measure(
    url: str, backend: str, prompt: Prompt, asked: list[list[int]], output_tokens: int, seed: int, log: Path
) -> Result:
    """Send the requests at once and time their tokens.

    Args:
        asked: `[requests]` token ids, all beginning with the prompt's.
        log: file that takes the client's output.
    """
    requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    before = server_info(url)
    details = run_client(
        url,
        [{"input_ids": ids, "sampling_params": sampling(output_tokens, STREAM_INTERVAL)} for ids in asked],
        requests=len(asked),
        output_tokens=len(asked) * output_tokens,
        log=log,
        at_a_time=None,
        warm_up=1,  # caches the shared prefix
        seed=seed,
    )
    first_s = np.array(details["ttfts"])
    return Result(
        backend=backend,
        prompt=prompt,
        concurrency=len(asked),
        decode_tok_s=full_batch_rate(first_s, [np.array(gaps) for gaps in details["itls"]]),
        ttft_ms=float(np.median(first_s)) * 1e3,
        ttft_last_ms=float(first_s.max()) * 1e3,
        sharing=sharing_between(before, server_info(url)),
    )


def record(out: Path, result: Result, run: int, server: dict[str, Any], questions: str, output_tokens: int) -> None:
    """Append one result to a file of records; `server` as of `server_case`."""
    attention, *flags = shlex.split(result.backend)
    case: dict[str, Any] = {
        "prompt": result.prompt.name,
        "prefix": len(result.prompt.ids),
        "concurrency": result.concurrency,
        "questions": questions,
        "output": output_tokens,
        **server,
    }
    if flags:
        case["flags"] = shlex.join(flags)
    write_record(
        out,
        bench="serving",
        impl=attention if attention == HYBRID else f"sglang_{attention}",
        case=case,
        run=run,
        decode_tok_s=None if result.decode_tok_s is None else round(result.decode_tok_s, 1),
        ttft_ms=round(result.ttft_ms, 1),
        ttft_last_ms=round(result.ttft_last_ms, 1),
        hybrid_mla=result.sharing,
    )


def describe(result: Result) -> str:
    rate = (
        "full batch too short, more --output-tokens would help"
        if result.decode_tok_s is None
        else f"{result.decode_tok_s:,.0f} tok/s"
    )
    said = [
        f"prompt {result.prompt.name}, {result.concurrency} requests: {rate}",
        f"first token {result.ttft_ms:,.0f} ms",
    ]
    return ", ".join(said + describe_sharing(result.sharing))


def results_table(results: list[Result], backends: list[str]) -> Table:
    """All results, each with its ratio to the first stock backend's."""
    stock = next((name for name in backends if shlex.split(name)[0] != HYBRID), None)
    base = {(r.prompt.name, r.concurrency): r.decode_tok_s for r in results if r.backend == stock}
    table = Table(title="Decoding at full concurrency, shared prefix cached", title_justify="left")
    for name in ("backend", "prompt", "mode"):
        table.add_column(name)
    for name in ("prefix\ntokens", "requests", "decode\ntok/s", "step\nms", "median\nTTFT ms", "last\nTTFT ms"):
        table.add_column(name, justify="right")
    table.add_column(f"decode vs\n{stock}" if stock else "ratio", justify="right")
    for result in sorted(results, key=lambda r: (-len(r.prompt.ids), r.prompt.name, r.concurrency)):
        rate = result.decode_tok_s
        reference = base.get((result.prompt.name, result.concurrency))
        table.add_row(
            result.backend,
            result.prompt.name,
            result.mode,
            f"{len(result.prompt.ids):,}",
            str(result.concurrency),
            f"{rate:,.0f}" if rate else "-",
            f"{result.concurrency / rate * 1e3:,.2f}" if rate else "-",
            f"{result.ttft_ms:,.0f}",
            f"{result.ttft_last_ms:,.0f}",
            f"{rate / reference:.2f}x" if rate and reference else "-",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
