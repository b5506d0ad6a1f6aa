"""`sglang-mla`: can it run here, what would it choose, and what does a server do."""

from __future__ import annotations

import json
import platform
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sglang_mla_ext import __version__
from sglang_mla_ext.adapter.compat.contract import compare, installed_version, untested
from sglang_mla_ext.adapter.compat.table import Feature
from sglang_mla_ext.prefix.cost_model import rates_for

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)
console = Console()


@app.command()
def doctor(
    command: Annotated[
        list[str] | None, typer.Argument(help="A launch command, after `--`: would it run with hybrid_mla?")
    ] = None,
) -> None:
    """Check this machine: versions, GPU, and what is used of SGLang; or a launch command, as on a Hopper GPU where this
    machine has none. Exit status 1 if it cannot run, as it is or with the changes that are named."""
    gpu, capability = _gpu()
    found = compare()
    if command is not None:
        needed = [Feature.BASE, Feature.GPU, Feature.EXAMINING]
    else:
        needed = [Feature.BASE, Feature.GPU if gpu else Feature.CPU]
    problems = [line for feature in needed for line in found.pop(feature, [])]
    if command is not None and not problems:
        raise typer.Exit(_examine(command, gpu))
    if capability is not None and capability[0] != 9:
        problems.append(f"{gpu} is not a Hopper GPU, which FlashMLA needs")
    table = Table(show_header=False)
    for name in ("sglang", "torch", "triton"):
        table.add_row(name, installed_version(name) or "not installed")
    table.add_row("sglang-mla-ext", __version__)
    table.add_row("python", platform.python_version())
    table.add_row("device", gpu or "no GPU: python -m sglang_mla_ext.launch_server runs on the CPU")
    table.add_row("rates", rates_for(gpu or "cpu").source)
    console.print(table)
    if (warning := untested()) is not None:
        console.print(f"[yellow]{warning}[/yellow]", highlight=False)
    for feature, lines in found.items():
        for line in lines:
            console.print(f"[yellow]not with {feature.value}: {line}[/yellow]", highlight=False)
    for problem in problems:
        console.print(f"[red]{problem}[/red]", highlight=False)
    console.print("ready" if not problems else "not ready")
    raise typer.Exit(bool(problems))


def _examine(command: list[str], gpu: str | None) -> bool:
    """Print what a launch command would come to; whether it is refused."""
    from sglang_mla_ext.adapter.launch import examine, launch_line

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    try:
        line = launch_line.read(command)
    except launch_line.LaunchLineError as error:
        say(str(error))
        return True
    with examine.examiner() as examined:
        found = examined(line)
    say(f"{found.outcome}{'' if gpu else ' (examined as on a Hopper GPU)'}")
    for finding in found.findings:
        say(f"  {finding}")
    if found.outcome == examine.REFUSED:
        return True
    for change in found.changes:
        say(f"  change: {change}")
    for warning in found.warnings:
        say(f"  warning: {warning}")
    say(f"set by itself: {', '.join(found.settings) or 'nothing'}")
    for path, name in found.models.items():
        if path != name:
            say(f"{path} is taken for {name}")
    if found.line != line:
        say(launch_line.text(found.line))
    return False


def _gpu() -> tuple[str | None, tuple[int, int] | None]:
    """Name and compute capability of the GPU that torch uses; None where there is none.

    torch takes seconds to import, so it is asked only where a driver is installed.
    """
    if shutil.which("nvidia-smi") is None and not Path("/dev/nvidiactl").exists():
        return None, None
    import torch

    if not torch.cuda.is_available():
        return None, None
    return torch.cuda.get_device_name(), torch.cuda.get_device_capability()


@app.command()
def plan(
    model: Annotated[
        str, typer.Option(help="deepseek-r1, kimi-k2, a name on Hugging Face, a folder or a config.json.")
    ] = "deepseek-v3",
    gpu: Annotated[str, typer.Option(help="h100, h200, h20, h800, cpu, or a file of rates.")] = "h200",
    tp: Annotated[int, typer.Option(min=1, help="GPUs that share the model, as SGLang's --tp.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Of them, ranks of DP attention, as SGLang's --dp.")] = 1,
    prefix: Annotated[
        list[int] | None, typer.Option("--prefix", "--prompt", min=1, help="Tokens of the shared prefix; repeatable.")
    ] = None,
    batch: Annotated[
        list[int] | None,
        typer.Option(
            "--batch",
            "--requests",
            min=1,
            help="Requests that share it, of all ranks; repeatable [16, 64, 128 and 256 for each rank of --dp].",
        ),
    ] = None,
    tail: Annotated[int, typer.Option(min=0, help="Tokens of each request after the prefix.")] = 512,
    draft_tokens: Annotated[
        int, typer.Option(min=1, help="Query tokens of a request in a step, as --speculative-num-draft-tokens.")
    ] = 1,
    accept_length: Annotated[
        float, typer.Option(min=1, help="Tokens that a step adds to a request on average, with drafts.")
    ] = 1.0,
    dtype: Annotated[str, typer.Option(help="Weights: auto (as the checkpoint), bf16, fp8_e4m3.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="As SGLang's: auto (BF16) or fp8_e4m3.")] = "auto",
    prefix_dtype: Annotated[
        str, typer.Option(help="As --hybrid-mla-prefix-dtype: auto (as the cache), bf16, fp8_e4m3.")
    ] = "auto",
    mem_fraction: Annotated[
        float | None,
        typer.Option(
            min=0.01, max=1, help="Of a GPU's memory for weights and cache, --mem-fraction-static [as SGLang's]."
        ),
    ] = None,
    prefix_memory_gb: Annotated[
        float | None,
        typer.Option(min=0, help="GiB of it for expanded prefixes, --hybrid-mla-prefix-memory-gb [as the server's]."),
    ] = None,
    step_ms: Annotated[
        float | None, typer.Option(help="A measured step without sharing, of one --prefix and one --batch.")
    ] = None,
    arrivals: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Mean tokens of an answer, where requests end and are replaced at once: tokens/s, time to the first "
            "token and between tokens, with prefill passes in turns and with mixed steps.",
        ),
    ] = None,
    question: Annotated[int, typer.Option(min=1, help="New tokens of each prompt, with --arrivals.")] = 128,
    prefill_pass_ms: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Host time of an eager prefill pass, with --arrivals [in proportion to 76 ms for 24 layers: "
            "DeepSeek-V3 on an H100 of a slow virtual machine, where launches set it and kernels took a third].",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw threshold, memory and roofline to this file; needs matplotlib.")
    ] = None,
) -> None:
    """Show what a server plans for requests that share a prompt, what that saves, the whole step with and without it,
    and a GPU's memory; with --arrivals, what short answers leave of it; last, what to do."""
    from sglang_mla_ext.predict import advice, report, tables, weights
    from sglang_mla_ext.predict.rates import Gpu
    from sglang_mla_ext.predict.step import Deployment

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
        prompts=prefix or [4759, 7069, 26472],
        requests=batch or [dp * requests for requests in (16, 64, 128, 256)],
        tail=tail,
        fraction=mem_fraction,
        for_prefixes=prefix_memory_gb,
        step_ms=step_ms,
        accepted=accept_length,
        answer=arrivals,
        question=question,
        pass_ms=prefill_pass_ms,
    )
    if step_ms is not None and (len(asked.prompts) != 1 or len(asked.requests) != 1):
        raise typer.BadParameter("is of one step: give one --prefix and one --batch", param_hint="--step-ms")
    try:
        config = weights.read_model(model)
        of = Deployment(config, Gpu.named(gpu), tp, dp, draft_tokens, latent, expanded, dtype)
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
    for line in tables.sentences(of, found):
        console.print(line, highlight=False, soft_wrap=True)
    console.print(tables.modes_table(of, asked, found))
    if of.gpu.step is not None:
        console.print(tables.steps_table(of, asked, found))
        console.print(tables.memory_table(of, asked, found))
        if arrivals is not None:
            console.print(tables.arrivals_table(of, asked, found))
    if (last := found["recommendation"]) is not None:
        console.print(f"Recommendation: {last['text']}", highlight=False, markup=False, soft_wrap=True)


@app.command()
def top(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:30000",
    api_key: Annotated[
        str | None, typer.Option(help="The server's --api-key, if it has one.", envvar="SGLANG_MLA_API_KEY")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Look twice, print that with rates, and end; so without a terminal.")
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
