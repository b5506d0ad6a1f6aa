"""`sglang-mla`: check a machine or a launch command, predict the gain, and watch a server."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sglang_mla_ext import __version__

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=__doc__)
console = Console()


def _version(asked: bool) -> None:
    if asked:
        print(f"sglang-mla-ext {__version__}")
        raise typer.Exit


def _finite(value: float | None) -> float | None:
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    pass


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def doctor(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            help="A launch command, or the path of a Kubernetes manifest or compose file: would it run with "
            "hybrid_mla, and what has to change?"
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what is found as JSON; before the launch command.")
    ] = False,
) -> None:
    """Check this machine (versions, GPU, what is used of SGLang) or a launch command, as on an H200 where this machine
    has no GPU.

    Exit status: 0 if it runs, with or without the changes that are named; 1 if not; 3 if that is unknown: the model's
    configuration was not found, values are missing, or an image has a newer SGLang.
    """
    from sglang_mla_ext import doctor

    if command is None:
        raise typer.Exit(doctor.machine(console, as_json))
    raise typer.Exit(doctor.command(command, console, as_json))


@app.command()
def plan(
    model: Annotated[
        str, typer.Option(help="deepseek-r1, kimi-k2, a name on Hugging Face, a folder or a config.json.")
    ] = "deepseek-v3",
    gpu: Annotated[str, typer.Option(help="h100, h200, h20, h20-3e, h800, cpu, or a file of rates.")] = "h200",
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share the model, as SGLang's --tp.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Ranks of DP attention among them, as SGLang's --dp.")] = 1,
    prefix_sharding: Annotated[
        bool | None,
        typer.Option(help="Shard prefixes over the ranks of --dp, as --hybrid-mla-prefix-sharding [as the server]."),
    ] = None,
    prefix: Annotated[
        list[int] | None,
        typer.Option("--prefix", "--prompt", min=1, help="Tokens of the shared prefix; repeatable [7069]."),
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            "--batch",
            "--requests",
            min=1,
            help="Requests that share it, of all ranks; repeatable [128 for each rank of --dp].",
        ),
    ] = None,
    tail: Annotated[int, typer.Option(min=0, help="Tokens of each request after the prefix.")] = 512,
    draft_tokens: Annotated[
        # At most as many as a launch allows, DRAFT_TOKENS in adapter/launch/feature_findings.py.
        int, typer.Option(min=1, max=8, help="As --speculative-num-draft-tokens: query tokens of a request in a step.")
    ] = 1,
    accept_length: Annotated[
        float,
        typer.Option(min=1, callback=_finite, help="Tokens that a step adds to a request on average, with drafts."),
    ] = 1.0,
    dtype: Annotated[str, typer.Option(help="Weights: auto (as the checkpoint), bf16, fp8_e4m3.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="As SGLang's: auto (BF16) or fp8_e4m3.")] = "auto",
    prefix_dtype: Annotated[
        str, typer.Option(help="As --hybrid-mla-prefix-dtype: auto (as the cache), bf16, fp8_e4m3.")
    ] = "auto",
    mem_fraction: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1, help="As --mem-fraction-static: of a GPU's memory for weights and cache [as SGLang's]."
        ),
    ] = None,
    prefix_memory_gb: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=_finite,
            help="As --hybrid-mla-prefix-memory-gb: GiB of it for expanded prefixes [as the server's].",
        ),
    ] = None,
    step_ms: Annotated[
        float | None,
        typer.Option(
            callback=_finite, help="Measured time of a step without sharing, of one --prefix and one --batch."
        ),
    ] = None,
    arrivals: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Mean tokens of an answer: simulates requests that are replaced as they end, with prefill passes and "
            "with mixed steps; shows tokens/s, time to the first token and between tokens.",
        ),
    ] = None,
    prefill_expand_tokens: Annotated[
        int | None, typer.Option(min=0, help="As --hybrid-mla-prefill-expand-tokens [as the server's].")
    ] = None,
    question: Annotated[int, typer.Option(min=1, help="New tokens of each prompt, in prefill.")] = 128,
    chunked_prefill_size: Annotated[
        int, typer.Option(min=1, help="As SGLang's: new tokens of a prefill pass, of all ranks of --dp.")
    ] = 8192,
    prefill_pass_ms: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=_finite,
            help="Host time of an eager prefill pass, with --arrivals [shown for 0 and for a slow virtual machine: "
            "2.5 ms a layer and 2.5 more with experts].",
        ),
    ] = None,
    details: Annotated[
        bool, typer.Option("--details", help="Also print each mode's time, whole steps and a GPU's memory.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw threshold, memory and roofline to this file; needs matplotlib.")
    ] = None,
) -> None:
    """Recommend whether to turn hybrid_mla on for requests that share a prompt: predicted gain, cost in memory, flags.

    Give your prompt and load with --prefix and --batch; --arrivals adds serving with short answers.
    """
    from sglang_mla_ext.predict import advice, report, tables, weights
    from sglang_mla_ext.predict.rates import Gpu
    from sglang_mla_ext.predict.step import Deployment, with_default_sharding

    def of_dtype(option: str, given: str, known: dict[str, int]) -> int:
        if given not in known:
            raise typer.BadParameter(f"{given!r} is not one of {', '.join(known)}", param_hint=option)
        return known[given]

    of_dtype("--dtype", dtype, dict.fromkeys(["auto", *weights.DTYPES], 0))
    latent = of_dtype("--kv-cache-dtype", kv_cache_dtype, {"auto": 2, "bf16": 2, "bfloat16": 2, "fp8_e4m3": 1})
    expanded = of_dtype("--prefix-dtype", prefix_dtype, {"auto": latent, "bf16": 2, "fp8_e4m3": 1})
    asked = report.Asked(
        model=model,
        gpu=gpu,
        prompts=prefix or [7069],
        requests=batch or [128 * dp],
        tail=tail,
        fraction=mem_fraction,
        for_prefixes=prefix_memory_gb,
        step_ms=step_ms,
        accepted=accept_length,
        answer=arrivals,
        question=question,
        pass_ms=prefill_pass_ms,
        prefill_expand_tokens=prefill_expand_tokens,
        chunk_tokens=chunked_prefill_size,
    )
    if accept_length > draft_tokens:
        raise typer.BadParameter(f"a step adds at most {draft_tokens} (--draft-tokens)", param_hint="--accept-length")
    if step_ms is not None and (len(asked.prompts) != 1 or len(asked.requests) != 1):
        raise typer.BadParameter("is of one step: give one --prefix and one --batch", param_hint="--step-ms")
    try:
        config = weights.read_model(model)
        if max(asked.prompts) > (longest := int(config.get("max_position_embeddings") or max(asked.prompts))):
            raise typer.BadParameter(f"the model's context has {longest:,} tokens", param_hint="--prefix")
        sizes = tp, dp, draft_tokens, latent, expanded
        of = Deployment(config, Gpu.named(gpu), *sizes, dtype, prefix_sharding or False)
        if prefix_sharding is None:
            of = with_default_sharding(of)
        of = asked.with_transient_expansion(of)
        found = report.report(of, asked)
        found["recommendation"] = advice.recommend(of, asked)
        if plot is not None:
            from sglang_mla_ext.predict.plots import draw

            draw(of, asked, plot)
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"needs matplotlib: {error}", param_hint="--plot") from None
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    if as_json:
        print(json.dumps(found, indent=2))
        return
    tables.show(console, of, asked, found, details)


@app.command()
def top(
    url: Annotated[
        str, typer.Option(help="Address of the server, with or without http://.")
    ] = "http://127.0.0.1:30000",
    api_key: Annotated[
        str | None, typer.Option(help="The server's --api-key, if it has one.", envvar="SGLANG_MLA_API_KEY")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.5, callback=_finite, help="Seconds between two readings.")] = 1.0,
    once: Annotated[
        bool,
        typer.Option("--once", help="Read twice, print values and rates, and end; the default without a terminal."),
    ] = False,
) -> None:
    """Show what a running server shares, live: its status page in a terminal. Ctrl-C ends it."""
    from sglang_mla_ext.top import NoAnswerError, ask, render, show

    try:
        before = ask(url, api_key)  # an address or a key that is wrong ends it at once
        if once or not console.is_terminal:
            time.sleep(interval)
            console.print(render(ask(url, api_key), before))
        else:
            show(console, url, api_key, interval)
    except NoAnswerError as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    app()
