"""One rank of a whole model behind SGLang's real server: whole layers with their experts, one GPU, dummy weights.

What one of eight GPUs computes, without what they say to each other: a slice of everything (`--rank tp8`; `tp16`: of
sixteen), or all heads and whole experts (`--rank dp8`). 61 layers of DeepSeek-V3's tp8 want an H200, 36 fit an H100; of
Kimi-K2's (`--of kimi-k2`) 48 fit an H200. Tokens are dealt out over experts at random, or dummy weights would send all
to the same eight.

With `--running 4` four of the ranks run behind one server, on a GPU each: the communication among these four is then
there. `--rank tp8 --running 8` and `--rank dp8 --running 8` are the whole model on eight GPUs, `--rank tp4 --running 4
--layers 28` fits four H200s. Requests are of all that run.

Of Kimi-K3 there are two, by `tp8` or `tp16`. `--of kimi-k3` is its language model, with layers of both kinds, for
SGLang 0.5.23 with `--server-arg '--moe-runner-backend marlin'`: by its weights all 93 layers of a tp16 fit an
H200 and 60 an H100, 56 of a tp8 an H200. Linear layers keep five states a request: for 98 requests
`--max-running-requests 104 --max-mamba-cache-size 520`. `--of kimi-k3-mla` is its layers with MLA alone, in
DeepSeek-V3's class, for any SGLang: what is saved there is saved in the whole model, whose steps take longer.

    python scripts/bench_rank.py --rank tp8 --layers 36 --case short:7069:128 \\
        --backend 'hybrid_mla --hybrid-mla-prefix-memory-gb 10' --backend flashmla --out rank.jsonl

A case is a workload, the tokens of the prompt that its requests share, and their number. Workloads:

- `decode`: all are sent at once, with some 400 tokens of their own and long answers: the time of a decode step, as the
  median time between two tokens of an answer while all requests decode;
- `short`: so many at a time, `--answers` times as many in all; answers have 16 to 208 tokens, so that a request ends at
  nearly every step and the next is prefilled: tokens per second while others wait;
- `mmlu`, `gsm8k`, `simpleqa`: as `short`, as long as DeepSeek-V3's answers to these;
- `agents`, `long_agents`: so many sessions at once, with histories of their own and several turns.

`--drafts 2.5` has the model's own layer draft, and a verify step yield so many tokens in the mean, whatever they are.

Before each run the cache is emptied, the prompt cached, and a warm-up sent whose requests share it too. With several
`--gpus` as many servers run beside each other. `--together` starts all at once on the same GPUs and measures one at a
time, which saves their starts; `--server-arg "--max-total-tokens N"` bounds what each takes. Records are written as
they come; at `--limit-s` all servers stop.
"""

from __future__ import annotations

import math
import shlex
import time
from pathlib import Path
from typing import Annotated

import typer
from bench.beside import Comparison
from bench.client import HYBRID
from bench.server import STOCK, console_of, load_arguments, work_folder
from bench.workloads import KINDS, make_load, ordinary_tokens
from demo_model.checkpoint import DRAFTING
from demo_model.rank import ALL_LAYERS, DIVIDED, MODELS, Rank, make_rank
from transformers import AutoTokenizer

from sglang_mla_ext.prefix.planner.model_dims import ModelDims

NO_DEEP_GEMM = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
# K and V of 128 heads for the 131,072 tokens of prefix that SGLang makes at a time want 14 GiB beside the cache, which
# the whole model leaves no room for; and SGLang's FP8 product in Triton counts the elements of a result in 32 bits.
FEWER_AT_A_TIME = {"SGLANG_MAX_KV_CHUNK_CAPACITY": "32768"}


def main(
    rank: Annotated[str, typer.Option(help=f"How ranks divide the model: {' or '.join(DIVIDED)}.")],
    of: Annotated[str, typer.Option(help=f"The model: {' or '.join(MODELS)}.")] = MODELS[0],
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the rank (all).")] = None,
    running: Annotated[int, typer.Option(min=1, help="How many of these ranks run together, each on a GPU.")] = 1,
    backend: Annotated[list[str] | None, typer.Option(help="Attention backend, and its flags; repeatable.")] = None,
    case: Annotated[
        list[str], typer.Option(help=f"Workload ({', '.join(KINDS)}):prompt tokens:requests; repeatable.")
    ] = ["short:7069:128", "short:26472:128"],  # noqa: B006
    answers: Annotated[int, typer.Option(min=2, help="Answers of all but decode, as a multiple of its requests.")] = 6,
    output_tokens: Annotated[int, typer.Option(min=16, help="Tokens of each answer of decode.")] = 256,
    gpus: Annotated[str | None, typer.Option(help="GPUs, such as 0,1: one server at a time on each (one GPU).")] = None,
    together: Annotated[
        bool, typer.Option("--together", help="Start all servers at once on the same GPUs; measure one at a time.")
    ] = False,
    drafts: Annotated[
        float | None,
        typer.Option(min=1, max=4, help="Draft with the model's NextN layer; tokens accepted a step, simulated (off)."),
    ] = None,
    deep_gemm: Annotated[bool, typer.Option("--deep-gemm", help="Leave DeepGEMM on; it compiles for minutes.")] = False,
    server_arg: Annotated[list[str] | None, typer.Option(help="Flags for every server; repeatable.")] = None,
    limit_s: Annotated[float, typer.Option(min=1, help="Stop all after so many seconds.")] = math.inf,
    out: Annotated[Path | None, typer.Option(help="JSONL file to append records to.")] = None,
    log_folder: Annotated[Path | None, typer.Option(help="For the output of servers and clients [.demo/logs].")] = None,
    seed: int = 0,
) -> None:
    """Compare attention backends on one rank of a whole model."""
    end = time.monotonic() + limit_s
    cases = [parse_case(one) for one in case]
    if unknown := {kind for kind, _, _ in cases} - {*KINDS}:
        raise typer.BadParameter(f"no workload {', '.join(unknown)}: there are {', '.join(KINDS)}")
    if rank not in DIVIDED:
        raise typer.BadParameter(f"--rank is one of {', '.join(DIVIDED)}")
    if of not in MODELS:
        raise typer.BadParameter(f"--of is one of {', '.join(MODELS)}")
    layers = layers or ALL_LAYERS[of]
    name = f"{of}-{rank}-{layers}" + (f"x{running}" if running > 1 else "") + ("-drafts" if drafts else "")
    model = work_folder() / name
    try:
        make_rank(model, Rank(rank, layers, of, running, drafts is not None))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    logs = log_folder or work_folder() / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    vocabulary = ordinary_tokens(AutoTokenizer.from_pretrained(model))
    sizes = {"answers": answers, "output_tokens": output_tokens}
    dp_attention = rank.startswith("dp")
    common = [*load_arguments(str(model), max(requests for _, _, requests in cases)), "--load-format", "dummy"]
    if running > 1:
        common += ["--tp-size", str(running)]
        if dp_attention:
            common += ["--dp-size", str(running), "--enable-dp-attention"]
    common += shlex.split(" ".join(server_arg or []))
    environment = {"SGLANG_SIMULATE_UNIFORM_EXPERTS": "1"}
    if drafts is not None:
        common += DRAFTING  # as in SGLang's recipes for DeepSeek-V3
        environment["SGLANG_SIMULATE_ACC_LEN"] = f"{drafts:g}"
    if not deep_gemm:
        environment |= NO_DEEP_GEMM
    if dp_attention:
        environment |= FEWER_AT_A_TIME
    described = {"rank": rank, "deep_gemm": deep_gemm, "of": of, "running": running}
    described |= {"drafts": drafts} if drafts else {}
    comparison = Comparison(
        backend or [HYBRID, STOCK],
        [make_load(*one, vocabulary, seed, **sizes) for one in cases],
        ModelDims.of(model),
        described,
        out,
        logs,
        console_of(width=140),
    )
    comparison.run(common, environment, gpus=gpus, together=together, end=end)


def parse_case(text: str) -> tuple[str, int, int]:
    """Read `decode:7069:128` as workload, prompt tokens and requests; raises typer.BadParameter."""
    try:
        kind, prompt_tokens, requests = text.split(":")
        return kind, int(prompt_tokens), int(requests)
    except ValueError:
        raise typer.BadParameter(f"--case is workload:prompt tokens:requests, not {text}") from None


if __name__ == "__main__":
    typer.run(main)
