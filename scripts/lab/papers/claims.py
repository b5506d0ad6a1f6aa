"""Claims of the papers beside what was measured here: rows of the tables in docs/results.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bench.cases import Case
from bench.records import Record, newest_by

from lab.papers import experiments as kinds
from lab.papers import values
from lab.papers.experiments import EXPERIMENTS, Implementation, key
from sglang_mla_ext.configs import gpu_config_of, read_config

NAMES = {model: read_config("models", model)["name"] for model in kinds.MODELS}
BASELINES = (kinds.FLASHMLA_BF16, kinds.FLASHINFER)  # TyphoonMLA's
WITH_PREFIX = (kinds.TYPHOON_PARTS, kinds.OURS_BF16, kinds.OURS_FP8_PREFIX)

Claim = tuple[str, str, str, str]
"""A paper's claim, its place, its number, and what was found here."""


class Row(NamedTuple):
    """A case, what names it beside its numbers, and the newest record of each implementation that has one."""

    case: Case
    names: dict[str, str]
    of: dict[Implementation, Record]

    def value(self, of: Implementation, metric: str) -> float | None:
        """A measurement; None where there is none."""
        return self.of[of][metric] if of in self.of else None

    def speed_up(self, of: Implementation, over: Iterable[Implementation]) -> float | None:
        """Return how many times faster it is than the fastest of others; None without any."""
        times = [ms for other in over if (ms := self.value(other, "ms"))]
        ms = self.value(of, "ms")
        return min(times) / ms if times and ms else None


def measured(name: str, records: Iterable[Record]) -> list[Row]:
    """Return what is measured of an experiment, in its order, on the GPU of its newest record."""
    found = [record for record in newest_by(records) if record["case"]["experiment"] == name]
    newest = {key(one["impl"], one["part"], one["case"]): one for one in found if one["gpu"] == found[-1]["gpu"]}
    rows = []
    for cells in EXPERIMENTS[name].cells(name):
        of = {cell.of: newest[cell.key] for cell in cells if cell.key in newest}
        if of:
            rows.append(Row(cells[0].case, dict(cells[0].conditions), of))
    return rows


def claims(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield a row for each claim about the experiments that these records are of."""
    records = list(records)
    for name, of_experiment in CLAIMS.items():
        rows = measured(name, records)
        shown = [record for row in rows for record in row.of.values()]
        for says, where, paper, here in of_experiment(rows) if rows else ():
            of = EXPERIMENTS[name].title.partition(",")[0]
            yield {"of": of, "says": says, "where": where, "paper": paper, "here": here, "records": shown}


def nominal_tflops(rows: Sequence[Row]) -> float | None:
    """Return the nominal BF16 rate of the GPU of some measurements."""
    return values.NOMINAL_BF16_TFLOPS.get(gpu_config_of(gpu_of(rows)) or "")


def gpu_of(rows: Sequence[Row]) -> str:
    """Return the GPU of measurements."""
    return str(next(iter(rows[0].of.values()))["gpu"])


def snapmla_peak(bf16_tflops: float, content_tiles: int = 16, rotary_tiles: int = 1) -> float:
    """SnapMLA, equation 7: the peak of FP8 attention whose rotary part stays in BF16, for operations of the same work.

    Sixteen content tiles take half as long in FP8, and the rotary tile does not.
    """
    return bf16_tflops * (content_tiles + rotary_tiles) / (content_tiles / 2 + rotary_tiles)


def times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}x"


def between(found: Iterable[float | None]) -> str:
    """Return the least and the greatest of ratios."""
    known = [value for value in found if value is not None]
    return f"{min(known):.2f}x to {max(known):.2f}x" if known else "–"


def wins(found: Iterable[float | None]) -> str:
    """Return how many ratios are above 1."""
    known = [value for value in found if value is not None]
    return f"{sum(value > 1 for value in known)} of {len(known)}"


def each(of: Iterable[Implementation], text: Callable[[Implementation], str]) -> str:
    return ", ".join(f"{text(one)} ({one.label})" for one in of)


def typhoon_figure_3(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yield speed-ups over the faster of FlashMLA BF16 and FlashInfer, and attention in all layers (table 3)."""

    def gains(of: Implementation, **names: str) -> list[float]:
        found = (row.speed_up(of, BASELINES) for row in rows if names.items() <= row.names.items())
        return [gain for gain in found if gain is not None]

    def most(of: Implementation, field: str, names: Iterable[str]) -> str:
        return " / ".join(times(max(gains(of, **{field: name}), default=None)) for name in names)

    where, bf16, models = "section 4, on GPUs", WITH_PREFIX[:2], " / ".join(NAMES.values())
    at_most = each(WITH_PREFIX, lambda of: times(max(gains(of), default=None)))
    yield "faster than FlashMLA and FlashInfer, at most", where, f"{values.TYPHOON_SPEED_UP}x", at_most
    yield "faster than both everywhere", where, "all cells", each(WITH_PREFIX, lambda of: wins(gains(of)))
    yield "most with prompt A", where, "A / B / C", each(bf16, lambda of: most(of, "prompt", kinds.PROMPTS))
    yield "more with Kimi-K2", where, models, each(bf16, lambda of: most(of, "model", kinds.MODELS))
    layers, requests = values.TYPHOON_TABLE_3_LAYERS, values.TYPHOON_TABLE_3_REQUESTS
    for prompt, (flashmla, typhoon) in values.TYPHOON_TABLE_3.items():
        names = {"model": "deepseek-v3", "questions": "mmlu", "prompt": prompt}
        for row in (row for row in rows if row.names == names and row.case.batch == requests):
            printed = f"{flashmla.attention_ms} (FlashMLA), {typhoon.attention_ms} (TyphoonMLA)"
            shown = [of for of in (kinds.FLASHMLA_BF16, *WITH_PREFIX) if of in row.of]
            here = each(shown, lambda of, row=row: f"{row.of[of]['ms'] * layers:.1f}")
            yield f"ms of attention, {layers} layers, MMLU, {requests} requests, {prompt}", "table 3", printed, here


def typhoon_figure_4(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yield the times of stages at the largest batch."""
    last = rows[-1]
    if last.case.batch != kinds.STAGE_REQUESTS[-1]:
        return

    def ms(of: Implementation) -> str:
        value = last.value(of, "ms")
        return "–" if value is None else f"{value:.3f}"

    def ratio(stage: Implementation) -> str:
        found = [last.value(of, "ms") for of in (kinds.ABSORB_ONLY, kinds.STAGE_2, stage)]
        return times((found[0] - found[1]) / found[2] if None not in found else None)

    where = f"section 4, {kinds.STAGE_REQUESTS[-1]:,} requests"
    stages = (kinds.STAGE_1, kinds.STAGE_1_FP8)
    here = {
        "absorb only": f"{ms(kinds.ABSORB_ONLY)} ms (FlashMLA BF16)",
        "stage 1": each(stages, lambda of: f"{ms(of)} ms"),
        "stage 2": f"{ms(kinds.STAGE_2)} ms (FlashMLA BF16)",
    }
    for text, value in values.TYPHOON_STAGES_MS.items():
        yield text, where, f"{value} ms", here[text]
    yield "the shared part, absorb / naive", where, f"{values.TYPHOON_STAGES_RATIO}x", each(stages, ratio)


def snapmla(rows: Sequence[Row], where: str) -> Iterator[Claim]:
    """Yield the claims that figures 5 and 6 have in common."""
    reached = [row.of[kinds.OURS_FP8]["tflops"] for row in rows if kinds.OURS_FP8 in row.of and row.case.heads >= 64]
    nominal, here = nominal_tflops(rows), "–"
    if nominal and reached:  # the nominal rate, as in the paper
        here = f"{max(reached) / snapmla_peak(nominal):.0%} of {snapmla_peak(nominal):,.0f} TFLOPS (ours FP8)"
    peak = f"{values.SNAPMLA_SHARE:.0%} of {snapmla_peak(values.SNAPMLA_BF16_TFLOPS):.1f} TFLOPS"
    yield "share of the effective peak with 64 heads and more", "section 4.4", peak, here
    gains = [row.speed_up(kinds.OURS_FP8, [kinds.FLASHMLA_BF16]) for row in rows]
    yield "faster than FlashMLA BF16", where, "all cells", f"{wins(gains)}, {between(gains)} (ours FP8)"


def snapmla_figure_6(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yield also what a second query token gains: its TFLOPS over those of one."""
    yield from snapmla(rows, "figure 6")
    tflops = {(row.case.tail, row.case.heads, row.case.s_q): row.value(kinds.OURS_FP8, "tflops") for row in rows}
    ratios = [
        two / one
        for (tail, heads, s_q), two in tflops.items()
        if s_q == 2 and two and (one := tflops.get((tail, heads, 1)))
    ]
    yield "TFLOPS with two query tokens over those with one", "figure 6", "slightly more", between(ratios)


def etap_figure_1(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yield TFLOPS and speed-ups of the cells that the paper's text names."""
    ours, where = (kinds.OURS_STACKED, kinds.OURS_FP8), "section 4.2, figure 1"
    rivals = {"FlashMLA": kinds.FLASHMLA_BF16, "FlashInfer": kinds.FLASHINFER}
    for row in rows:
        printed = values.ETAP_TFLOPS.get((row.case.batch, row.case.tail))
        if printed is None:
            continue
        what = f"{row.case.batch} requests, {row.case.tail:,} tokens"
        shown = [of for of in (*rivals.values(), *ours) if of in row.of]
        here = each(shown, lambda of, row=row: f"{row.of[of]['tflops']:,.0f}")
        yield f"TFLOPS, {what}", where, ", ".join(f"{value} ({name})" for name, value in printed.items()), here
        for name in (name for name in rivals if name in printed):
            ratio = f"{printed['FlashMLA-ETAP'] / printed[name]:.2f}x"
            gains = each(ours, lambda of, row=row, rival=rivals[name]: times(row.speed_up(of, [rival])))
            yield f"faster than {name}, {what}", where, ratio, gains


def amla_table_5(rows: Sequence[Row]) -> Iterator[Claim]:
    """Yield shares of the GPU's nominal BF16 rate at the shortest and the longest context of the paper."""
    nominal, ends = nominal_tflops(rows), {min(kinds.AMLA_CONTEXTS), max(kinds.AMLA_CONTEXTS)}
    for row in (row for row in rows if nominal and row.case.tail in ends):
        printed = values.AMLA_TABLE_5[row.case.s_q, row.case.tail]
        here = each(row.of, lambda of, row=row: f"{row.of[of]['tflops'] / nominal:.1%}")
        queries = ("one query token", "two query tokens")[row.case.s_q - 1]
        what = f"share of the BF16 peak, {row.case.tail:,} tokens, {queries}"
        yield what, "table 5", f"{printed.npu}% (AMLA), {printed.gpu}% (GPU)", here


CLAIMS: dict[str, Callable[[Sequence[Row]], Iterator[Claim]]] = {
    "typhoonmla-figure-3": typhoon_figure_3,
    "typhoonmla-figure-4": typhoon_figure_4,
    "snapmla-figure-5": lambda rows: snapmla(rows, "figure 5"),
    "snapmla-figure-6": snapmla_figure_6,
    "etap-figure-1": etap_figure_1,
    "amla-table-5": amla_table_5,
}
