"""`sglang-mla doctor`: report what this machine has, or whether a launch command runs; in words, or as JSON."""

from __future__ import annotations

import gc
import json
import platform
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from sglang_mla_ext import __version__
from sglang_mla_ext.adapter.compat.contract import ContractError, check, compare, installed_version, untested
from sglang_mla_ext.adapter.compat.table import Feature
from sglang_mla_ext.prefix.planner.gpu_rates import rates_for

if TYPE_CHECKING:
    from sglang_mla_ext.adapter.launch.examine import Examination
    from sglang_mla_ext.adapter.launch.launch_line import LaunchLine

IN_IMAGE = "the image has to contain sglang-mla-ext: docs/operating.md, *In a container*"

PRICES = {
    "--page-size": " (a prompt is shared in whole pages; up to 63 tokens at its end are not)",
    "--disable-prefill-cuda-graph": " (prefill passes cost the host about 2.5 ms a layer, 5 with experts)",
}
"""Costs of settings that are made automatically."""

STARTS, DOES_NOT, NOT_TOLD = 0, 1, 3
"""Exit statuses; 2 is the command line's own, for options of `doctor` that it does not know."""


def machine(console: Console, as_json: bool) -> int:
    """Say whether a server can run here; an exit status."""
    gpu, capability = gpu_here()
    found = compare()
    needed = [Feature.BASE, Feature.GPU if gpu else Feature.CPU]
    problems = [line for feature in needed for line in found.pop(feature, [])]
    if capability is not None and capability[0] != 9:
        problems.append(f"{gpu} is not a Hopper GPU, which FlashMLA needs")
    warnings = [] if (warning := untested()) is None else [warning]
    warnings += [f"not with {feature.value}: {line}" for feature, lines in found.items() for line in lines]
    _say_machine(console, gpu, problems, warnings, as_json)
    return DOES_NOT if problems else STARTS


def command(words: Sequence[str], console: Console, as_json: bool) -> int:
    """Say what a launch command would come to; an exit status."""
    from sglang_mla_ext.adapter.launch.import_stubs import stub_imports
    from sglang_mla_ext.adapter.launch.launch_line import LaunchLineError, read

    gpu, _ = gpu_here()
    try:
        line = read(words)
    except LaunchLineError as error:
        found = {"outcome": "refused", "findings": [{"code": "launch", "text": str(error)}]}
        _say(console, found, [str(error)], as_json)
        return DOES_NOT
    try:
        check([Feature.BASE, Feature.GPU, Feature.EXAMINING])
    except ContractError as error:
        _say_machine(console, gpu, list(error.differences), [], as_json)
        return DOES_NOT
    waiting = console.status("SGLang reads the command ...") if console.is_terminal and not as_json else nullcontext()
    # With a GPU SGLang imports more, which may need it.
    with waiting, nullcontext() if gpu else stub_imports():
        from sglang_mla_ext.adapter.launch import examine

        with examine.examiner() as examined:
            examination = examined(line)
            gc.freeze()  # what SGLang has imported ends with the process, which would look at all of it for a second
    _say(console, _as_json(examination, gpu), _as_text(examination, line, gpu), as_json)
    return {examine.REFUSED: DOES_NOT, examine.CANNOT_TELL: NOT_TOLD}.get(examination.outcome, STARTS)


def gpu_here() -> tuple[str | None, tuple[int, int] | None]:
    """Name and compute capability of the GPU that torch uses; None where there is none.

    torch takes seconds to import, so it is asked only where a driver is installed.
    """
    if shutil.which("nvidia-smi") is None and not Path("/dev/nvidiactl").exists():
        return None, None
    import torch

    if not torch.cuda.is_available():
        return None, None
    return torch.cuda.get_device_name(), torch.cuda.get_device_capability()


def _as_text(found: Examination, line: LaunchLine, gpu: str | None) -> list[str]:
    from sglang_mla_ext.adapter.launch import launch_line
    from sglang_mla_ext.adapter.launch.examine import CANNOT_TELL

    where = "" if gpu or found.outcome == CANNOT_TELL else " (examined as on an H200)"
    but = f", but {found.caveat}" if found.caveat else ""
    said = [f"{found.outcome.upper()}{where}{but}", *(f"  {finding.text}" for finding in found.findings)]
    said += [found.elsewhere] if found.elsewhere else []
    said += [IN_IMAGE] if line.image or line.container else []
    if found.tested is None:
        return said
    said += [f"  change: {change}" for change in found.changes]
    said += [f"  warning: {warning}" for warning in found.warnings]
    said.append(f"SGLang {found.tested.version}: {found.tested}")
    said += [found.memory_report] if found.memory_report else []
    said += [f"automatic setting: {setting}{PRICES.get(setting.partition(' ')[0], '')}" for setting in found.settings]
    said += [f"treating {path} as {name}" for path, name in found.models.items() if path != name]
    if (found.line.environment, found.line.arguments) != (line.environment, line.arguments):
        said.append(launch_line.text(found.line))
    return said


def _as_json(found: Examination, gpu: str | None) -> dict[str, Any]:
    from sglang_mla_ext.adapter.launch import launch_line

    run = found.tested
    return {
        "outcome": found.outcome,
        "sglang": installed_version(),
        "device": gpu,
        "findings": [{"code": finding.code, "text": finding.text} for finding in found.findings],
        "changes": list(found.changes),
        "warnings": list(found.warnings),
        "run": run and {"place": run.place, "sglang": run.version, "parts": [part._asdict() for part in run.parts]},
        "memory_report": found.memory_report,
        "elsewhere": found.elsewhere,
        "in_image": IN_IMAGE if found.line.image or found.line.container else None,
        "caveat": found.caveat,
        "settings": list(found.settings),
        "models": found.models,
        "command": launch_line.text(found.line) if run else None,
    }


def _say_machine(console: Console, gpu: str | None, problems: list[str], warnings: list[str], as_json: bool) -> None:
    outcome = "not ready" if problems else "ready"
    versions = {name: installed_version(name) for name in ("sglang", "torch", "triton")}
    versions |= {"sglang-mla-ext": __version__, "python": platform.python_version()}
    if as_json:
        found = {"outcome": outcome, **versions, "device": gpu, "problems": problems, "warnings": warnings}
        _say(console, found, [], as_json)
        return
    table = Table(show_header=False)
    for name, version in versions.items():
        table.add_row(name, version or "not installed")
    table.add_row("device", gpu or "no GPU: python -m sglang_mla_ext.launch_server runs on the CPU")
    table.add_row("rates", rates_for(gpu or "cpu").source)
    console.print(table)
    for style, lines in (("yellow", warnings), ("red", problems)):
        for text in lines:
            console.print(text, style=style, highlight=False, markup=False)
    console.print(outcome)


def _say(console: Console, found: dict[str, Any], text: list[str], as_json: bool) -> None:
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for line in text:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
