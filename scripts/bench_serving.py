"""Serving benchmark: decode throughput at full concurrency and time to first token, on prompts that share a prefix.

For each backend a server is started, one after the other; for each prompt and concurrency SGLang's own benchmark
client sends that many requests at once. They share a system prompt, which is in the server's prefix cache, and each
goes on with a question of its own. Prompts are sent as token ids; outputs are long, so that the full batch decodes for
many steps.

    python scripts/bench_serving.py --model MODEL --backend hybrid_mla --backend flashmla --concurrency 128

`--model` may be a folder without weights (`make_demo_model.py --config-only`) if there is `--server-arg "--load-format
dummy"`. A backend may carry flags: `--backend "hybrid_mla --hybrid-mla-mode absorb"`.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import requests
import typer
from bench.records import write_record
from bench.server import ON_GPU, ServerFailedError, free_port, running_server, server_info, work_folder
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from sglang_mla_ext.prefix.cost_model import ModelDims, read_config

SCRIPTS = Path(__file__).resolve().parent
HYBRID = "hybrid_mla"
# Tokens of an answer sent in one piece, so that HTTP and the client do not set the pace. The first is sent alone.
STREAM_INTERVAL = 16
# The full batch must last for this share of the longest request's decoding, or its throughput does not count.
SMALLEST_FULL_SHARE = 0.25


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
    server_arg: Annotated[list[str] | None, typer.Option(help="Flags for every server; repeatable.")] = None,
    base_url: Annotated[str | None, typer.Option(help="Measure this running server; name its one --backend.")] = None,
    out: Annotated[Path | None, typer.Option(help="JSONL file to append records to.")] = None,
    log_folder: Annotated[Path | None, typer.Option(help="For the output of servers and client [.demo/logs].")] = None,
    seed: int = 0,
) -> None:
    """Compare attention backends of SGLang's server on prompts that share a prefix."""
    console = Console() if sys.stdout.isatty() else Console(width=120)
    backends = backend or [HYBRID, "flashmla"]
    if base_url and len(backends) != 1:
        raise typer.BadParameter("--base-url measures one server: give one --backend, its name in the table")
    concurrencies = concurrency or [128]
    rng = np.random.default_rng(seed)
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=True)
    vocabulary = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)

    def random_ids(count: int) -> list[int]:
        ids: list[int] = rng.choice(vocabulary, count).tolist()
        return ids

    known = read_config("workloads", "system_prompts")["tokens"]
    prompts = [Prompt(path.name, tokenizer.encode(path.read_text())) for path in system_prompt_file or []]
    names = prompt or ([] if prompts else list(known))
    prompts += [Prompt(name, random_ids(known[name] if name in known else int(name))) for name in names]
    lengths = question_lengths(questions, max(concurrencies), rng)
    question_ids = [random_ids(length) for length in lengths]

    dims = ModelDims.from_json(model) if Path(model).exists() else None
    common = shlex.split(" ".join(server_arg or []))
    # Twice the requests: at exactly their number SGLang sometimes holds one back, and the batch is never full.
    common += ["--model-path", model, "--max-running-requests", str(2 * max(concurrencies))]
    if ON_GPU:
        common += ["--cuda-graph-max-bs-decode", str(max(concurrencies))]
    logs = log_folder or work_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)

    results: list[Result] = []
    failed = False
    for number, name in enumerate(backends):
        attention, *flags = shlex.split(name)
        log = logs / f"server-{number}-{attention}.log"
        server: contextlib.AbstractContextManager[str] = (
            contextlib.nullcontext(base_url)
            if base_url
            else running_server(["--attention-backend", attention, *flags, *common], free_port(), log, console)
        )
        console.rule(name)
        try:
            with server as url:
                for shared in prompts:
                    for size in concurrencies:
                        asked = [shared.ids + ids for ids in question_ids[:size]]
                        result = measure(url, name, shared, asked, output_tokens, seed, logs / "client.log")
                        results.append(result)
                        console.print(describe(result))
                        if out:
                            record(out, result, server_info(url), dims, questions, output_tokens)
        except (ServerFailedError, ClientFailedError) as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            failed = True
    console.print(results_table(results, backends))
    if failed:
        raise typer.Exit(1)


def question_lengths(workload: str, count: int, rng: np.random.Generator) -> list[int]:
    """Lengths in tokens, drawn from a workload's quantiles."""
    quantiles = read_config("workloads", workload)["models"]["deepseek-v3"]["prompt_tokens"]["quantiles"]
    percents = [float(percent) for percent in quantiles]
    drawn = np.interp(rng.uniform(0, 100, count), percents, list(quantiles.values()))
    lengths: list[int] = np.maximum(drawn.round().astype(int), 1).tolist()
    return lengths


class ClientFailedError(RuntimeError):
    """The benchmark client failed, or not all of its requests were answered."""


def measure(
    url: str, backend: str, prompt: Prompt, asked: list[list[int]], output_tokens: int, seed: int, log: Path
) -> Result:
    """Send the requests at once and time their tokens.

    Args:
        asked: `[requests]` token ids, all beginning with the prompt's.
        log: file that takes the client's output.
    """
    sampling = {
        "temperature": 0,
        "max_new_tokens": output_tokens,
        "ignore_eos": True,
        "stream_interval": STREAM_INTERVAL,
    }
    requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    with tempfile.TemporaryDirectory() as folder:
        data, output = Path(folder) / "requests.jsonl", Path(folder) / "result.jsonl"
        lines = (json.dumps({"input_ids": ids, "sampling_params": sampling}) + "\n" for ids in asked)
        data.write_text("".join(lines))
        flags = {
            "base-url": url,
            "num-prompts": len(asked),
            "max-concurrency": len(asked),
            "warmup-requests": 1,  # caches the shared prefix
            "output-file": output,
            "seed": seed,
        }
        command = [sys.executable, SCRIPTS / "bench_client.py", data, "--output-details", "--disable-tqdm"]
        command += [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]
        before = server_info(url)
        with log.open("a") as file:
            status = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        if status or not output.exists():
            raise ClientFailedError(f"{backend}: the client ended with status {status}; see {log}")
        details = json.loads(output.read_text())
    if details["completed"] != len(asked):
        raise ClientFailedError(f"{backend}: {details['completed']} of {len(asked)} requests answered; see {log}")
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


def full_batch_rate(first_s: np.ndarray, gaps_s: list[np.ndarray]) -> float | None:
    """Tokens per second over the time in which every request is between its first and its last token.

    Args:
        first_s: `[requests]` time to the first token; all were sent at the same time.
        gaps_s: for each request the times between its tokens.
    Returns:
        None if that time is too small a share of the decoding.
    """
    times = [first + np.cumsum(gaps) for first, gaps in zip(first_s, gaps_s, strict=True)]
    begin, end = first_s.max(), min(t[-1] if len(t) else 0.0 for t in times)
    longest = max((t[-1] - first for t, first in zip(times, first_s, strict=True) if len(t)), default=0.0)
    if end - begin < SMALLEST_FULL_SHARE * longest or end <= begin:
        return None
    tokens = sum(int(np.count_nonzero((t > begin) & (t <= end))) for t in times)
    return tokens / float(end - begin)


def sharing_between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any] | None:
    """What hybrid_mla did between two readings of `/server_info`; None for a stock backend.

    Returns:
        `mode` of most decode steps, `steps` by mode, `group_size` as the mean over groups and steps (0 without any).
    """
    if HYBRID not in after:
        return None
    earlier, later = before[HYBRID]["counters"], after[HYBRID]["counters"]
    gained = {name: value - earlier[name] for name, value in later.items() if isinstance(value, int)}
    steps = {name.removeprefix("steps_"): count for name, count in gained.items() if name.startswith("steps_")}
    read, saved = gained["shared_tokens_read"], gained["shared_tokens_saved"]
    return {
        "mode": max(steps, key=lambda mode: steps[mode]),
        "steps": steps,
        "group_size": round((read + saved) / read, 1) if read else 0,
    }


def record(
    out: Path, result: Result, info: dict[str, Any], dims: ModelDims | None, questions: str, output_tokens: int
) -> None:
    """Append one result to a file of records."""
    attention, *flags = shlex.split(result.backend)
    case: dict[str, Any] = {
        "prompt": result.prompt.name,
        "prefix": len(result.prompt.ids),
        "concurrency": result.concurrency,
        "questions": questions,
        "output": output_tokens,
        "dtype": info.get("dtype"),
        "kv_cache_dtype": info.get("kv_cache_dtype"),
        "tp": info.get("tp_size"),
        "client": "http",
    }
    if dims:
        case |= {"layers": dims.num_layers, "heads": dims.num_heads}
    if flags:
        case["flags"] = shlex.join(flags)
    write_record(
        out,
        bench="serving",
        impl=attention if attention == HYBRID else f"sglang_{attention}",
        case=case,
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
    return (
        f"prompt {result.prompt.name}, {result.concurrency} requests: {rate}, "
        f"first token {result.ttft_ms:,.0f} ms, mode {result.mode}"
    )


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
