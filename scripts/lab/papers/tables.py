"""Tables of the papers' experiments: what was measured, and what the papers print beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.cases import Case
from bench.records import read_records
from bench.tables import NOT_MEASURED, provenance, table

from lab.papers import experiments as kinds
from lab.papers.experiments import EXPERIMENTS, Implementation, key
from lab.papers.formulas import snapmla_peak
from lab.papers.values import (
    AMLA_TABLE_5,
    ETAP_TFLOPS,
    NOMINAL_BF16_TFLOPS,
    SNAPMLA_BF16_TFLOPS,
    SNAPMLA_SHARE,
    TYPHOON_SPEED_UP,
    TYPHOON_STAGES_MS,
    TYPHOON_STAGES_RATIO,
    TYPHOON_TABLE_3,
    TYPHOON_TABLE_3_LAYERS,
    TYPHOON_TABLE_3_REQUESTS,
)
from sglang_mla_ext.configs import gpu_config_of, read_config

COLUMNS = {"batch": "requests", "tail": "tokens", "s_q": "query tokens"}
UNITS = {"tok_s": "tokens/s of a layer", "tflops": "TFLOPS", "ms": "ms"}
NAMES = {"mmlu": "MMLU", "gsm8k": "GSM8K", "simpleqa": "SimpleQA"}
NAMES |= {model: read_config("models", model)["name"] for model in kinds.MODELS}
BASELINES = (kinds.FLASHMLA_BF16, kinds.FLASHINFER)  # TyphoonMLA's
WITH_PREFIX = (kinds.TYPHOON_PARTS, kinds.OURS_BF16, kinds.OURS_FP8_PREFIX)
Records = dict[Implementation, dict[str, Any]]


class Row(NamedTuple):
    """A case, what names it beside its numbers, and the newest record of each implementation that has one."""

    case: Case
    names: dict[str, str]
    of: Records

    def value(self, of: Implementation, metric: str) -> float | None:
        """A measurement; `tok_s` is of the requests of the case."""
        if of not in self.of:
            return None
        record = self.of[of]
        found: float = self.case.batch / record["ms"] * 1e3 if metric == "tok_s" else record[metric]
        return found

    def field(self, name: str) -> Any:
        """What names the case, or one of its numbers."""
        return self.names[name] if name in self.names else getattr(self.case, name)

    def layers_ms(self, of: Implementation) -> str:
        """The time of all layers of TyphoonMLA's table 3."""
        ms = self.value(of, "ms")
        return "–" if ms is None else f"{ms * TYPHOON_TABLE_3_LAYERS:.1f}"

    def speed_up(self, of: Implementation, over: Iterable[Implementation]) -> float | None:
        """How many times faster it is than the fastest of others; None without any."""
        times = [ms for other in over if (ms := self.value(other, "ms"))]
        ms = self.value(of, "ms")
        return min(times) / ms if times and ms else None


def rows_of(name: str, path: Path) -> list[Row]:
    """What is measured of an experiment, in its order, on the GPU of its newest record."""
    records = [
        record
        for record in (read_records(path) if path.exists() else [])
        if record["case"]["experiment"] == name and not record.get("excluded")
    ]
    records.sort(key=lambda record: record["date"])
    newest = {key(one["impl"], one["part"], one["case"]): one for one in records if one["gpu"] == records[-1]["gpu"]}
    rows = []
    for cells in EXPERIMENTS[name].cells(name):
        of = {cell.of: newest[cell.key] for cell in cells if cell.key in newest}
        if of:
            rows.append(Row(cells[0].case, dict(cells[0].conditions), of))
    return rows


def reproduced(name: str, path: Path) -> str:
    """The tables of an experiment, its plot, and where the figures come from."""
    rows = rows_of(name, path)
    if not rows:
        return NOT_MEASURED
    by_commit: dict[Any, dict[tuple[Any, ...], dict[str, Any]]] = {}  # a run may go on with another one
    for index, row in enumerate(rows):
        for of, record in row.of.items():
            by_commit.setdefault(record["commit"], {})[index, of] = record
    plot = f"![{EXPERIMENTS[name].title}, repeated](images/reproduced_{name}.png)"
    everything = f"<details><summary>All measurements</summary>\n\n{measurements(name, rows)}\n\n</details>"
    parts = [SUMMARIES[name](rows), plot, everything, *map(provenance, by_commit.values())]
    return "\n\n".join(part for part in parts if part)


def measurements(name: str, rows: Sequence[Row]) -> str:
    """All of them."""
    experiment = EXPERIMENTS[name]
    fields = [*experiment.panel, experiment.x]
    if "heads" not in fields and "model" in fields:
        fields.insert(1, "tail")
    shown = [of for of in experiment.implementations if any(of in row.of for row in rows)]
    cells = [
        (
            *(number(row.field(field)) for field in fields),
            *(number(row.value(of, experiment.metric), experiment.metric) for of in shown),
        )
        for row in rows
    ]
    unit = UNITS[experiment.metric]
    return (
        f"In {unit}.\n\n{table(cells, (*(COLUMNS.get(field, field) for field in fields), *(of.label for of in shown)))}"
    )


def number(value: Any, metric: str = "") -> str:
    """A cell; a dash where there is nothing."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return NAMES.get(value, value)
    return f"{value:.3f}" if metric == "ms" else f"{value:,.0f}"


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def between(values: Iterable[float | None]) -> str:
    """From the least to the greatest."""
    found = [value for value in values if value is not None]
    return f"{min(found):.2f}x to {max(found):.2f}x" if found else "–"


def greatest(values: Iterable[float | None]) -> str:
    return times(max((value for value in values if value is not None), default=None))


def wins(values: Iterable[float | None]) -> str:
    """How many are above 1."""
    found = [value for value in values if value is not None]
    return f"{sum(value > 1 for value in found)} of {len(found)}"


def each(of: Iterable[Implementation], text: Callable[[Implementation], str]) -> str:
    return ", ".join(f"{text(one)} ({one.label})" for one in of)


def claims(rows: list[tuple[str, ...]]) -> str:
    """What a paper says beside what was found."""
    return table(rows, ("the paper says", "where", "the paper's number", "here"))


def typhoon_figure_3(rows: Sequence[Row]) -> str:
    """Speed-ups over the faster of FlashMLA BF16 and FlashInfer, by model and prompt, and the paper's claims."""

    def gains(of: Implementation, **names: str) -> list[float | None]:
        return [row.speed_up(of, BASELINES) for row in rows if names.items() <= row.names.items()]

    def most(of: Implementation, field: str, values: Iterable[str]) -> str:
        return " / ".join(greatest(gains(of, **{field: value})) for value in values)

    by_prompt = [
        (NAMES[model], prompt, *(between(gains(of, model=model, prompt=prompt)) for of in WITH_PREFIX))
        for model in kinds.MODELS
        for prompt in kinds.PROMPTS
    ]
    columns = ("model", "prompt", *(of.label for of in WITH_PREFIX))
    where, bf16 = "section 4, on GPUs", WITH_PREFIX[:2]
    at_most = each(WITH_PREFIX, lambda of: greatest(gains(of)))
    models = " / ".join(NAMES[model] for model in kinds.MODELS)
    said = [
        ("faster than FlashMLA and FlashInfer, at most", where, f"{TYPHOON_SPEED_UP}x", at_most),
        ("faster than both everywhere", where, "all cells", each(WITH_PREFIX, lambda of: wins(gains(of)))),
        ("most with prompt A", where, "A / B / C", each(bf16, lambda of: most(of, "prompt", kinds.PROMPTS))),
        ("more with Kimi-K2", where, models, each(bf16, lambda of: most(of, "model", kinds.MODELS))),
        *typhoon_table_3(rows),
    ]
    baselines = "How much faster than the faster of FlashMLA BF16 and FlashInfer BF16, over questions and requests:"
    return f"{baselines}\n\n{table(by_prompt, columns)}\n\n{claims(said)}"


def typhoon_table_3(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Attention in all layers, from cells of figure 3."""
    said = []
    for prompt, (flashmla, typhoon) in TYPHOON_TABLE_3.items():
        names = {"model": "deepseek-v3", "questions": "mmlu", "prompt": prompt}
        for row in rows:
            if row.names == names and row.case.batch == TYPHOON_TABLE_3_REQUESTS:
                what = f"ms of attention, {TYPHOON_TABLE_3_LAYERS} layers, MMLU, {row.case.batch} requests, {prompt}"
                printed = f"{flashmla.attention_ms} (FlashMLA), {typhoon.attention_ms} (TyphoonMLA)"
                said.append((what, "table 3", printed, each((kinds.FLASHMLA_BF16, *WITH_PREFIX), row.layers_ms)))
    return said


def typhoon_figure_4(rows: Sequence[Row]) -> str:
    """The paper's times at the largest batch."""
    last = rows[-1]

    def ms(of: Implementation) -> str:
        return number(last.value(of, "ms"), "ms")

    def ratio(stage: Implementation) -> str:
        values = [last.value(of, "ms") for of in (kinds.ABSORB_ONLY, kinds.STAGE_2, stage)]
        return times((values[0] - values[1]) / values[2] if None not in values else None)

    where = f"section 4, {kinds.STAGE_REQUESTS[-1]:,} requests"
    stages = (kinds.STAGE_1, kinds.STAGE_1_FP8)
    printed = {text: f"{value} ms" for text, value in TYPHOON_STAGES_MS.items()}
    said = [
        ("absorb only", where, printed["absorb only"], f"{ms(kinds.ABSORB_ONLY)} ms (FlashMLA BF16)"),
        ("stage 1", where, printed["stage 1"], each(stages, lambda of: f"{ms(of)} ms")),
        ("stage 2", where, printed["stage 2"], f"{ms(kinds.STAGE_2)} ms (FlashMLA BF16)"),
        ("the shared part, absorb / naive", where, f"{TYPHOON_STAGES_RATIO}x", each(stages, ratio)),
    ]
    return claims(said) if last.case.batch == kinds.STAGE_REQUESTS[-1] else ""


def share_of_peak(rows: Sequence[Row]) -> str:
    """The most of equation 7's peak that ours reaches with 64 heads and more; the nominal rate, as the paper has it."""
    records = [row.of[kinds.OURS_FP8] for row in rows if kinds.OURS_FP8 in row.of and row.case.heads >= 64]
    nominal = NOMINAL_BF16_TFLOPS.get(gpu_config_of(records[0]["gpu"]) or "") if records else None
    if nominal is None:
        return "–"
    best = max(record["tflops"] for record in records)
    return f"{best / snapmla_peak(nominal):.0%} of {snapmla_peak(nominal):,.0f} TFLOPS (ours FP8)"


def snapmla(rows: Sequence[Row], where: str) -> list[tuple[str, ...]]:
    """What figures 5 and 6 have in common."""
    gains = [row.speed_up(kinds.OURS_FP8, [kinds.FLASHMLA_BF16]) for row in rows]
    peak = f"{SNAPMLA_SHARE:.0%} of {snapmla_peak(SNAPMLA_BF16_TFLOPS):.1f} TFLOPS"
    return [
        ("share of the effective peak with 64 heads and more", "section 4.4", peak, share_of_peak(rows)),
        ("faster than FlashMLA BF16", where, "all cells", f"{wins(gains)}, {between(gains)} (ours FP8)"),
    ]


def snapmla_figure_5(rows: Sequence[Row]) -> str:
    return claims(snapmla(rows, "figure 5"))


def snapmla_figure_6(rows: Sequence[Row]) -> str:
    """Also what a second query token gains: its TFLOPS over those of one."""
    tflops = {(row.case.tail, row.case.heads, row.case.s_q): row.value(kinds.OURS_FP8, "tflops") for row in rows}
    ratios = [
        two / one
        for (tail, heads, s_q), two in tflops.items()
        if s_q == 2 and two and (one := tflops.get((tail, heads, 1)))
    ]
    said = ("TFLOPS with two query tokens over those with one", "figure 6", "slightly more", between(ratios))
    return claims([*snapmla(rows, "figure 6"), said])


def etap_figure_1(rows: Sequence[Row]) -> str:
    """TFLOPS and speed-ups of the cells that the paper's text names."""
    ours = (kinds.OURS_STACKED, kinds.OURS_FP8)
    rivals = {"FlashMLA": kinds.FLASHMLA_BF16, "FlashInfer": kinds.FLASHINFER}
    said = []
    for (requests, tokens), printed in ETAP_TFLOPS.items():
        where = "section 4.2, figure 1"
        row = next((row for row in rows if (row.case.batch, row.case.tail) == (requests, tokens)), None)
        if row is None:
            continue
        what = f"{requests} requests, {tokens:,} tokens"
        all_printed = ", ".join(f"{value} ({name})" for name, value in printed.items())
        measured = each((*rivals.values(), *ours), lambda of, row=row: number(row.value(of, "tflops")))
        said.append((f"TFLOPS, {what}", where, all_printed, measured))
        for name, rival in rivals.items():
            if name in printed:
                ratio = f"{printed['FlashMLA-ETAP'] / printed[name]:.2f}x"
                gains = each(ours, lambda of, row=row, rival=rival: times(row.speed_up(of, [rival])))
                said.append((f"faster than {name}, {what}", where, ratio, gains))
    return claims(said) if said else ""


def amla_table_5(rows: Sequence[Row]) -> str:
    """The paper's table with ours beside it: microseconds, and the share of the GPU's nominal BF16 rate."""
    nominal = NOMINAL_BF16_TFLOPS.get(gpu_config_of(next(iter(rows[0].of.values()))["gpu"]) or "")
    shown = [of for of in kinds.PRIVATE if any(of in row.of for row in rows)]

    def cell(row: Row, of: Implementation) -> str:
        ms, tflops = row.value(of, "ms"), row.value(of, "tflops")
        if ms is None or tflops is None:
            return "–"
        return f"{ms * 1e3:.0f}" + (f", {tflops / nominal:.1%}" if nominal else "")

    lines = []
    for row in rows:
        printed = AMLA_TABLE_5[row.case.s_q, row.case.tail]
        of_paper = f"{printed.npu_us}, {printed.npu}%", f"{printed.gpu_us}, {printed.gpu}%"
        lines.append((row.case.s_q, f"{row.case.tail:,}", *of_paper, *(cell(row, of) for of in shown)))
    columns = ("query tokens", "tokens", "paper: AMLA on an Ascend 910", "paper: GPU", *(of.label for of in shown))
    return f"Microseconds, and the share of the nominal BF16 rate, also for FP8.\n\n{table(lines, columns)}"


SUMMARIES: dict[str, Callable[[Sequence[Row]], str]] = {
    "typhoonmla-figure-3": typhoon_figure_3,
    "typhoonmla-figure-4": typhoon_figure_4,
    "snapmla-figure-5": snapmla_figure_5,
    "snapmla-figure-6": snapmla_figure_6,
    "etap-figure-1": etap_figure_1,
    "amla-table-5": amla_table_5,
}
