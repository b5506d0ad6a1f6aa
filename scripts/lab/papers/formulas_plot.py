"""Draw TyphoonMLA's figures 5 to 8 from its formulas (formulas.py): none of it is measured.

python scripts/study.py papers formulas
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from bench.tables import REPOSITORY

from lab.papers import formulas
from sglang_mla_ext.predict.weights import products, read_model
from sglang_mla_ext.prefix.planner.model_dims import ModelDims

BATCHES = [2**power for power in range(11)]
MODELS = {"DeepSeek-V3": ModelDims.from_json("deepseek-v3"), "Kimi-K2": ModelDims.from_json("kimi-k2")}
PREFIX = 4096


def main(
    out: Annotated[Path, typer.Option(help="The plot.")] = REPOSITORY / "docs" / "images" / "papers.png",
) -> None:
    """Write the plot."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"needs matplotlib (the extra `plots` of this package): {error}") from None
    figure = Figure(figsize=(18, 4.2), layout="constrained")
    five, six, seven, eight = figure.subplots(1, 4)
    footprint(five)
    roofline(six)
    v3 = MODELS["DeepSeek-V3"]
    times(seven, v3, formulas.ASCEND_ROOFLINE, 0, f"Figure 7: {PREFIX:,} shared tokens, 400 TFLOPS")
    times(eight, v3, formulas.ASCEND, 128, "Figure 8: with 128 unshared, 376 TFLOPS")
    figure.suptitle("TyphoonMLA's figures by its formulas, DeepSeek-V3 where none is named")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    print(f"wrote {out}")


def footprint(axes: Any) -> None:
    """Figure 5: memory of the whole deployment, and the expansion's share of it."""
    weights = sum(product.stored for product in products(read_model("deepseek-v3")))  # FP8: a byte each
    requests = [2**power for power in range(12, 16)]
    for index, longest in enumerate(2**power for power in range(15, 19)):
        found = [formulas.typhoon_footprint(MODELS["DeepSeek-V3"], weights, count, longest) for count in requests]
        plain = [(one.weights + one.latent) / 1e12 for one in found]
        whole = [(one.weights + one.latent + one.expanded) / 1e12 for one in found]
        axes.plot(requests, plain, f"C{index}:")
        axes.plot(requests, whole, f"C{index}o-", label=f"{longest:,} tokens")
        for count, terabytes, one in zip(requests, whole, found, strict=True):
            text = f"+{one.overhead:.1%}"
            axes.annotate(text, (count, terabytes), textcoords="offset points", xytext=(0, 5), fontsize="x-small")
    axes.set(xlabel="requests", ylabel="TB of all devices", title="Figure 5: prompt A expanded (dotted: not)")
    finish(axes, requests)


def roofline(axes: Any) -> None:
    """Figure 6: tokens per second of a layer over a shared prefix."""
    for index, (name, dims) in enumerate(MODELS.items()):
        for mode, style in (("absorb", "--"), ("naive", "-")):
            rates = [
                formulas.typhoon_roofline(dims, formulas.ASCEND_ROOFLINE, batch, PREFIX, mode) for batch in BATCHES
            ]
            axes.plot(BATCHES, rates, f"C{index}{style}", label=f"{name}, {mode}")
    axes.set(xlabel="batch", ylabel="query tokens/s of a layer", title=f"Figure 6: {PREFIX:,} shared tokens")
    finish(axes, BATCHES)


def times(axes: Any, dims: ModelDims, rates: formulas.Rates, other: int, title: str) -> None:
    """Figures 7 and 8: time of a layer."""
    found = [formulas.typhoon_seconds(dims, rates, batch, PREFIX, other) for batch in BATCHES]
    for name, style in (("naive", "C1--"), ("absorb", "C0--"), ("typhoon", "C2-")):
        axes.plot(BATCHES, [of[name] * 1e3 for of in found], style, label=name)
    axes.axvline(formulas.typhoon_threshold(dims, rates), color="gray", linewidth=0.8, label="equation 1")
    axes.set(xlabel="batch", ylabel="ms of a layer", title=title)
    finish(axes, BATCHES)


def finish(axes: Any, ticks: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks[:: max(1, len(ticks) // 5)], [f"{tick:,}" for tick in ticks[:: max(1, len(ticks) // 5)]])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="x-small")
