"""The plots of `sglang-mla plan --plot`: threshold over prompt length, memory over requests, and a roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_mla_ext.predict.memory import memory
from sglang_mla_ext.predict.report import GIB, Asked, from_data_sheet
from sglang_mla_ext.predict.step import Deployment, allowed_modes
from sglang_mla_ext.segment import Mode

PROMPTS = [round(2 ** (power / 2)) for power in range(16, 35)]  # 256 to 131,072 tokens
REQUESTS = [2**power for power in range(11)]
STYLES = {Mode.ABSORB: ("o", "C0"), Mode.GROUPED_ABSORB: ("s", "C2"), Mode.NAIVE: ("D", "C1")}


def draw(of: Deployment, asked: Asked, path: Path) -> None:
    """Write the plots to one file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        ValueError: matplotlib does not write files of this kind.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 4.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _threshold(left, of)
    _memory(middle, of, asked)
    _roofline(right, of, asked)
    heads = f"{asked.model}, {of.cost.local_heads} heads a GPU, tp {of.tp}, dp {of.dp}"
    derived = ", derived from data sheets" if of.gpu.derived else ""
    figure.suptitle(f"{heads}, {of.gpu.rates.name}{derived}")
    figure.savefig(path, dpi=120)


def _threshold(axes: Any, of: Deployment) -> None:
    modes = allowed_modes(of)
    found = {prompt: of.cost.smallest_profitable_group(prompt, modes) for prompt in PROMPTS}
    paying = {prompt: smallest for prompt, smallest in found.items() if smallest}
    axes.plot(list(paying), list(paying.values()), "o-", label="sharing pays, as a server chooses")
    if (sheet := from_data_sheet(of)) is not None:
        axes.axhline(sheet, color="C1", label="equation 1, data sheet")
    axes.axhline(of.cost.threshold_batch(), color="C2", linestyle="--", label="equation 1, rates of the kernels")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set(xlabel="tokens of the prompt", ylabel="requests that share it", title="Threshold")
    _finish(axes)


def _memory(axes: Any, of: Deployment, asked: Asked) -> None:
    axes.set(xlabel="requests", ylabel="GiB of a GPU", title=f"Memory, tails of {asked.tail:,} tokens")
    if of.gpu.sheet is None:
        return
    requests = [of.dp * count for count in REQUESTS]
    for index, prompt in enumerate(asked.prompts):
        taken = [memory(of, count, prompt, asked.tail, asked.fraction) for count in requests]
        whole = [(one.weights + one.latent + one.expanded) / GIB for one in taken]
        plain = [(one.weights + one.latent) / GIB for one in taken]
        axes.plot(requests, whole, f"C{index}-", label=f"{prompt:,} tokens, expanded")
        axes.plot(requests, plain, f"C{index}:", label=f"{prompt:,} tokens, latent rows alone")
    axes.axhline(of.gpu.sheet.memory_bytes * asked.fraction / GIB, color="k", label=f"{asked.fraction:g} of the GPU's")
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    _finish(axes)


def _roofline(axes: Any, of: Deployment, asked: Asked) -> None:
    intensities = [2 ** (power / 2) for power in range(0, 29)]
    for mode in (Mode.ABSORB, Mode.NAIVE):
        rates = of.gpu.rates.modes[mode]
        size = of.expanded_element_bytes if mode is Mode.NAIVE else of.latent_element_bytes
        roof = [min(x * rates.bytes_per_s, 2 * rates.matrix_rate(size)) / 1e12 for x in intensities]
        axes.plot(intensities, roof, "--", color=STYLES[mode][1], label=f"{mode.value}'s rates")
    if (sheet := of.gpu.sheet) is not None:
        roof = [min(x * sheet.bytes_per_s, sheet.flops(of.latent_element_bytes)) / 1e12 for x in intensities]
        axes.plot(intensities, roof, "k-", label="data sheet")
    prompt = max(asked.prompts)
    for mode in allowed_modes(of):
        points = []
        for count in asked.requests:
            mine = of.per_rank(count)
            operations = 2 * of.cost.macs(mode, mine, prompt)
            seconds = of.cost.work_seconds(mode, mine, prompt)
            points.append((operations / of.cost.bytes_read(mode, mine, prompt), operations / seconds / 1e12, mine))
        across, up, _ = zip(*points, strict=True)
        marker, colour = STYLES[mode]
        axes.scatter(across, up, marker=marker, color=colour, label=mode.value.replace("_", " "))
        for x, y, mine in points:
            axes.annotate(str(mine), (x, y), textcoords="offset points", xytext=(3, -10), fontsize="x-small")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    title = f"Work over {prompt:,} tokens; a point's number: requests"
    axes.set(xlabel="useful operations per byte that is read", ylabel="TFLOPS", title=title)
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
