"""Figures of the demo model's study, by layer, from its records."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.tables import latest

from lab.accuracy.served import BASELINE
from lab.accuracy.tables import MODEL_NAMES
from lab.accuracy.trained import PERCENTILES


def draw_ranges(records: Iterable[dict[str, Any]], out: Path) -> None:
    """SnapMLA's figure 3: how large content and rotary parts are, by layer."""
    found = latest((r for r in records if r["case"].get("study") == "demo_ranges"), "part", "layer")
    labels = dict(zip(PERCENTILES, ("median", "90 %", "99 %", "99.9 %", "largest"), strict=True))
    panels = {}
    for part in ("content", "rotary"):
        layers = sorted(layer for _, of, layer in found if of == part)
        values = {label: [found[BASELINE, part, layer][name] for layer in layers] for name, label in labels.items()}
        panels[f"{part} part of latent rows"] = layers, values
    draw(panels, "absolute value", caption_of(found), out, sharey=True)


def draw_layers(records: Iterable[dict[str, Any]], out: Path) -> None:
    """SnapMLA's figure 4: the error of attention over real activations, by layer. The control is left out."""
    found = latest((r for r in records if r["case"].get("study") == "demo_layers"), "layer")
    layers = sorted({layer for _, layer in found})
    panels = {}
    for measure, name in (("rel_err", "relative L2 error"), ("cos_dist", "1 - cosine")):
        values = {
            label: [found[impl, layer][measure] for layer in layers]
            for impl, label in MODEL_NAMES.items()
            if impl != "wrong_lse_base" and (impl, layers[0]) in found
        }
        panels[f"{name} of attention's output"] = layers, values
    draw(panels, "error", caption_of(found), out)


def caption_of(records: dict[tuple[Any, ...], dict[str, Any]]) -> str:
    """Where the figures come from."""
    return ", ".join(sorted({f"{r['gpu']}, torch {r['torch']}, commit {r['commit']}" for r in records.values()}))


Panels = dict[str, tuple[list[int], dict[str, list[float]]]]
"""By title: layers, and by label a value for each of them."""


def draw(panels: Panels, ylabel: str, caption: str, out: Path, sharey: bool = False) -> None:
    """Lines over layers on a log scale, which all panels share if `sharey`.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5 * len(panels), 4.5), layout="constrained")
    lines: dict[str, Any] = {}
    all_axes = figure.subplots(1, len(panels), sharey=sharey)
    for axes, (title, (layers, values)) in zip(all_axes, panels.items(), strict=True):
        for index, (label, of_label) in enumerate(values.items()):
            lines[label] = axes.plot(layers, of_label, "os^Dvxp*h"[index % 9] + "-", color=f"C{index}", label=label)[0]
        axes.set_yscale("log")
        axes.set_xticks(layers)
        axes.set(title=title, xlabel="layer", ylabel=ylabel)
        axes.grid(alpha=0.3)
    figure.legend(handles=lines.values(), loc="outside upper center", ncols=min(5, len(lines)))
    figure.supxlabel(caption, fontsize="small", color="gray")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
