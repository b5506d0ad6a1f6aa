"""`sglang-mla`: can it run here, what would it choose, and what does a server do."""

from __future__ import annotations

import platform
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from sglang_mla_ext import __version__
from sglang_mla_ext.adapter.contract import installed_version, mismatches, untested
from sglang_mla_ext.configs import config_names
from sglang_mla_ext.prefix.cost_model import CostModel, GpuRates, Mode, ModelDims, rates_for

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
    problems = mismatches()
    gpu, capability = _gpu()
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
    for problem in problems:
        console.print(f"[red]{problem}[/red]", highlight=False)
    console.print("ready" if not problems else "not ready")
    raise typer.Exit(bool(problems))


def _examine(command: list[str], gpu: str | None) -> bool:
    """Print what a launch command would come to; whether it is refused."""
    from sglang_mla_ext.adapter import examine, launch_line

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
    model: Annotated[str, typer.Option(help="A shipped model, or a Hugging Face config.json.")] = "deepseek-v3",
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(config_names('gpus'))}.")] = "h200",
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel ranks; 1 with DP attention.")] = 1,
    prefix: Annotated[list[int] | None, typer.Option(help="Tokens of the shared prefix; repeatable.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Requests that share it; repeatable.")] = None,
    draft_tokens: Annotated[
        int, typer.Option(min=1, help="Query tokens of a request in a step, as --speculative-num-draft-tokens.")
    ] = 1,
) -> None:
    """Show which mode the cost model chooses, what it saves, and the memory of the expanded prefix in all layers."""
    from sglang_mla_ext.kernels.absorb.stacking import rows_per_tile  # plain Python

    dims = ModelDims.from_json(model)
    cost = CostModel(dims, dims.num_heads // tp, GpuRates.from_json(gpu), queries=draft_tokens)
    grouped = cost.rates.modes[Mode.GROUPED_ABSORB].measured and rows_per_tile(cost.local_heads) is not None
    allowed = [mode for mode in Mode if grouped or mode is not Mode.GROUPED_ABSORB]  # as a server's `auto`
    names = {mode: mode.value.replace("_", " ") for mode in allowed}  # in words, so that they wrap
    each = f", {draft_tokens} tokens each" if draft_tokens > 1 else ""
    title = f"{model}, {cost.local_heads} heads a GPU, {gpu}, BF16{each}: attention to the prefix, ms a layer"
    table = Table(title=title)
    for column in ("prefix", "requests", *names.values(), "chosen", "saved", "expanded"):
        table.add_column(column, justify="right")
    for tokens in prefix or [4759, 7069, 26472]:
        memory = tokens * cost.expanded_token_bytes * dims.num_layers / (1 << 30)
        for requests in batch or [16, 64, 128, 256]:
            ms = {mode: cost.seconds(mode, requests, tokens) * 1e3 for mode in allowed}
            chosen = cost.best_mode(requests, tokens, allowed)
            saved = f"{1 - ms[chosen] / ms[Mode.ABSORB]:.0%}"
            times = (f"{of_mode:.3f}" for of_mode in ms.values())
            table.add_row(f"{tokens:,}", str(requests), *times, names[chosen], saved, f"{memory:.1f} GiB")
        smallest = cost.smallest_profitable_group(tokens, allowed)
        table.add_section()
        console.print(f"{tokens:,} tokens: sharing pays from {smallest or 'no'} requests on")
    console.print(table)


@app.command()
def top(
    url: Annotated[str, typer.Option(help="Address of the server.")] = "http://127.0.0.1:30000",
    api_key: Annotated[
        str | None, typer.Option(help="The server's --api-key, if it has one.", envvar="SGLANG_MLA_API_KEY")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look twice, print that with rates, and end.")] = False,
) -> None:
    """Show what a running server shares, live: its status page in a terminal. Ctrl-C ends it."""
    from sglang_mla_ext.top import NoAnswerError, ask, render, show

    try:
        before = ask(url, api_key)  # an address or a key that is wrong ends it at once
        if once:
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
