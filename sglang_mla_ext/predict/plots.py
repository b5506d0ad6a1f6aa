"""The plots of `sglang-mla plan --plot`: threshold over prompt length, memory over requests, and a roofline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_mla_ext.predict.report import GIB, Asked, a_rank, chunks_for, from_data_sheet
from sglang_mla_ext.predict.sharing import pays_from
from sglang_mla_ext.predict.step import Deployment, allowed_modes
from sglang_mla_ext.prefix.planner import break_even
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

    figure = Figure(figsize=(16, 6), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    _threshold(left, of, asked)
    _memory(middle, of, asked)
    _roofline(right, of, asked)
    heads = f"{asked.model}, {of.cost.local_heads} heads a GPU, tp {of.tp}, dp {of.dp}"
    derived = ", derived from data sheets" if of.gpu.derived else ""
    figure.suptitle(f"{heads}, {of.gpu.rates.name}{derived}")
    figure.savefig(path, dpi=120)


def _threshold(axes: Any, of: Deployment, asked: Asked) -> None:
    divided = asked.memory(of)
    for memory, style, label in ((divided, "o-", "with the server's memory"), (None, ".:", "with all of it expanded")):
        found = {prompt: pays_from(of.cost, prompt, chunks_for(prompt, memory)) for prompt in PROMPTS}
        paying = {prompt: smallest for prompt, smallest in found.items() if smallest}
        axes.plot(list(paying), list(paying.values()), style, color="C0", label=f"sharing pays, {label}")
    if (sheet := from_data_sheet(of)) is not None:
        axes.axhline(sheet, color="C1", label="equation 1, data sheet")
    axes.axhline(
        break_even.threshold_batch(of.cost), color="C2", linestyle="--", label="equation 1, rates of the kernels"
    )
    axes.set_yscale("log", base=2)
    axes.set(xlabel="tokens of the prompt", ylabel=f"requests{a_rank(of)} that share it", title="Threshold")
    _finish(axes)


def _memory(axes: Any, of: Deployment, asked: Asked) -> None:
    """Plot what the KV cache has to hold, against its size; the title contains the weights' size."""
    axes.set(xlabel=f"requests{a_rank(of)}", ylabel="GiB of a GPU", title="Memory")
    if (divided := asked.memory(of)) is None:
        return
    for index, prompt in enumerate(asked.prompts):
        latent = [(prompt + count * asked.tail) * divided.latent_token / GIB for count in REQUESTS]
        whole = prompt * divided.expanded_token / GIB
        axes.plot(REQUESTS, latent, f"C{index}-", label=f"{prompt:,} tokens and tails of {asked.tail:,}")
        axes.plot(REQUESTS, [whole] * len(REQUESTS), f"C{index}:", label=f"{prompt:,} tokens, expanded")
    for size, style, what in (
        (divided.budget, "k-", "KV budget"),
        (divided.budget - divided.taken, "k--", "KV budget less memory for prefixes"),
        (divided.taken, "k:", "memory for prefixes"),
    ):
        axes.axhline(size / GIB, color=style[0], linestyle=style[1:], label=what)
    axes.set_title(f"Memory beside {divided.weights / GIB:.1f} GiB of weights")
    axes.set_ylim(0, 1.5 * max(divided.budget / GIB, 1))
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
            group = mine * of.cost.ranks
            operations = 2 * break_even.macs(of.cost, mode, group, prompt)
            seconds = of.cost.work_seconds(mode, group, prompt)
            points.append(
                (operations / break_even.bytes_read(of.cost, mode, group, prompt), operations / seconds / 1e12, mine)
            )
        across, up, _ = zip(*points, strict=True)
        marker, colour = STYLES[mode]
        axes.scatter(across, up, marker=marker, color=colour, label=mode.value.replace("_", " "))
        # What is bound by reading for each request lies on one spot, however many they are.
        for x, y, mine in {point[:2]: point for point in points}.values():
            axes.annotate(str(mine), (x, y), textcoords="offset points", xytext=(3, -10), fontsize="x-small")
    axes.set_yscale("log", base=2)
    title = f"Work over {prompt:,} tokens; numbers: requests{a_rank(of)}"
    axes.set(xlabel="useful operations per byte that is read", ylabel="TFLOPS", title=title)
    _finish(axes)


def _finish(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.tick_params(axis="x", labelsize="x-small")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small", loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)  # below the axes
