"""Claims of the papers beside what was measured here: rows of the tables in docs/results.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pandas as pd
from bench.rank_rows import MODEL_NAMES
from bench.records import Record, newest_by

from lab.papers import experiments as kinds
from lab.papers import values
from lab.papers.experiments import EXPERIMENTS, key
from sglang_mla_ext.configs import gpu_config_of

FLASHMLA, FLASHINFER, OURS_FP8 = kinds.FLASHMLA_BF16.label, kinds.FLASHINFER.label, kinds.OURS_FP8.label
WITH_PREFIX = [of.label for of in (kinds.TYPHOON_PARTS, kinds.OURS_BF16, kinds.OURS_FP8_PREFIX)]

Claim = tuple[str, str, str, str]
"""A paper's claim, its place, its number, and what was found here."""


class Measured(NamedTuple):
    """An experiment on one GPU: a row for each case, in the experiment's order."""

    cases: pd.DataFrame  # what names each case
    ms: pd.DataFrame  # by label of the implementation; NaN where it was not measured
    tflops: pd.DataFrame
    records: list[Record]

    def faster(self, of: list[str], over: Sequence[str]) -> pd.DataFrame:
        """Return how many times faster implementations are than the fastest of others, case by case."""
        return self.ms[of].rdiv(self.ms[[*over]].min(axis=1), axis=0)

    @property
    def nominal_tflops(self) -> float | None:
        """The nominal BF16 rate of the GPU."""
        return values.NOMINAL_BF16_TFLOPS.get(gpu_config_of(self.records[0]["gpu"]) or "")


def measured(name: str, records: Iterable[Record]) -> Measured | None:
    """Return what is measured of an experiment, on the GPU of its newest record; None if nothing is."""
    found = [record for record in newest_by(records) if record["case"]["experiment"] == name]
    newest = {key(one["impl"], one["part"], one["case"]): one for one in found if one["gpu"] == found[-1]["gpu"]}
    cells = [
        (number, cell, newest[cell.key])
        for number, of_case in enumerate(EXPERIMENTS[name].cells(name))
        for cell in of_case
        if cell.key in newest
    ]
    if not cells:
        return None
    rows = pd.DataFrame([{"number": at, "of": cell.of.label, **record["case"], **record} for at, cell, record in cells])
    by_label = rows.pivot(index="number", columns="of", values=["ms", "tflops"])
    labels = [of.label for of in EXPERIMENTS[name].implementations]
    ms, tflops = (by_label[metric].reindex(columns=labels) for metric in ("ms", "tflops"))
    return Measured(rows.groupby("number").first(), ms, tflops, [record for *_, record in cells])


def claims(records: Iterable[Record]) -> Iterator[dict[str, Any]]:
    """Yield a row for each claim about the experiments that these records are of."""
    records = list(records)
    for name, of_experiment in CLAIMS.items():
        if (found := measured(name, records)) is not None:
            for says, where, paper, here in of_experiment(found):
                of = EXPERIMENTS[name].title.partition(",")[0]
                yield {"of": of, "says": says, "where": where, "paper": paper, "here": here, "records": found.records}


def snapmla_peak(bf16_tflops: float, content_tiles: int = 16, rotary_tiles: int = 1) -> float:
    """SnapMLA, equation 7: the peak of FP8 attention whose rotary part stays in BF16, for operations of the same work.

    Sixteen content tiles take half as long in FP8, and the rotary tile does not.
    """
    return bf16_tflops * (content_tiles + rotary_tiles) / (content_tiles / 2 + rotary_tiles)


def times(value: float) -> str:
    return "–" if pd.isna(value) else f"{value:.2f}x"


def between(found: pd.Series) -> str:
    """Return the least and the greatest of ratios."""
    return f"{times(found.min())} to {times(found.max())}"


def wins(found: pd.Series) -> str:
    """Return how many ratios are above 1."""
    return f"{(found > 1).sum()} of {found.count()}"


def each(found: pd.Series | pd.DataFrame, text: Callable[[Any], str]) -> str:
    """Return the text of each implementation's value, or column of values."""
    return ", ".join(f"{text(value)} ({label})" for label, value in found.items())


def typhoon_figure_3(of: Measured) -> Iterator[Claim]:
    """Yield speed-ups over the faster of FlashMLA BF16 and FlashInfer, and attention in all layers (table 3)."""
    gains, where = of.faster(WITH_PREFIX, (FLASHMLA, FLASHINFER)), "section 4, on GPUs"

    def most(field: str) -> str:
        by_name = gains[WITH_PREFIX[:2]].groupby(of.cases[field]).max()
        return each(by_name, lambda column: " / ".join(map(times, column)))

    yield "faster than FlashMLA and FlashInfer, at most", where, f"{values.TYPHOON_SPEED_UP}x", each(gains.max(), times)
    yield "faster than both everywhere", where, "all cells", each(gains, wins)
    yield "most with prompt A", where, "A / B / C", most("prompt")
    models = " / ".join(MODEL_NAMES[model] for model in kinds.MODELS)
    yield "more with Kimi-K2", where, models, most("model")
    layers, requests = values.TYPHOON_TABLE_3_LAYERS, values.TYPHOON_TABLE_3_REQUESTS
    table_3 = of.cases.query("model == 'deepseek-v3' and questions == 'mmlu' and batch == @requests")
    for number, prompt in table_3["prompt"].items():
        flashmla, typhoon = values.TYPHOON_TABLE_3[prompt]
        printed = f"{flashmla} (FlashMLA), {typhoon} (TyphoonMLA)"
        here = each(layers * of.ms.loc[number, [FLASHMLA, *WITH_PREFIX]].dropna(), "{:.1f}".format)
        yield f"ms of attention, {layers} layers, MMLU, {requests} requests, {prompt}", "table 3", printed, here


def typhoon_figure_4(of: Measured) -> Iterator[Claim]:
    """Yield the times of stages at the largest batch."""
    if of.cases["batch"].iloc[-1] != kinds.STAGE_REQUESTS[-1]:
        return
    ms = of.ms.iloc[-1]
    stages = ms[[kinds.STAGE_1.label, kinds.STAGE_1_FP8.label]]
    absorb, tail = ms[kinds.ABSORB_ONLY.label], ms[kinds.STAGE_2.label]

    def text(value: float) -> str:
        return "– ms" if pd.isna(value) else f"{value:.3f} ms"

    where = f"section 4, {kinds.STAGE_REQUESTS[-1]:,} requests"
    here = {
        "absorb only": f"{text(absorb)} (FlashMLA BF16)",
        "stage 1": each(stages, text),
        "stage 2": f"{text(tail)} (FlashMLA BF16)",
    }
    for name, value in values.TYPHOON_STAGES_MS.items():
        yield name, where, f"{value} ms", here[name]
    ratios = each((absorb - tail) / stages, times)
    yield "the shared part, absorb / naive", where, f"{values.TYPHOON_STAGES_RATIO}x", ratios


def snapmla(of: Measured, where: str) -> Iterator[Claim]:
    """Yield the claims that figures 5 and 6 have in common."""
    reached, here = of.tflops.loc[of.cases["heads"] >= 64, OURS_FP8].max(), "–"
    if of.nominal_tflops and not pd.isna(reached):  # the nominal rate, as in the paper
        ours = snapmla_peak(of.nominal_tflops)
        here = f"{reached / ours:.0%} of {ours:,.0f} TFLOPS (ours FP8)"
    peak = f"{values.SNAPMLA_SHARE:.0%} of {snapmla_peak(values.SNAPMLA_BF16_TFLOPS):.1f} TFLOPS"
    yield "share of the effective peak with 64 heads and more", "section 4.4", peak, here
    gains = of.faster([OURS_FP8], [FLASHMLA])[OURS_FP8]
    yield "faster than FlashMLA BF16", where, "all cells", f"{wins(gains)}, {between(gains)} (ours FP8)"


def snapmla_figure_6(of: Measured) -> Iterator[Claim]:
    """Yield also what a second query token gains: its TFLOPS over those of one."""
    yield from snapmla(of, "figure 6")
    by_tokens = of.cases.assign(tflops=of.tflops[OURS_FP8]).pivot(
        index=["tail", "heads"], columns="s_q", values="tflops"
    )
    ratios = by_tokens[2] / by_tokens[1]
    yield "TFLOPS with two query tokens over those with one", "figure 6", "slightly more", between(ratios)


def etap_figure_1(of: Measured) -> Iterator[Claim]:
    """Yield TFLOPS and speed-ups of the cells that the paper's text names."""
    ours, where = [kinds.OURS_STACKED.label, OURS_FP8], "section 4.2, figure 1"
    rivals = {"FlashMLA": FLASHMLA, "FlashInfer": FLASHINFER}
    for number, batch, tail in of.cases[["batch", "tail"]].itertuples():
        if printed := values.ETAP_TFLOPS.get((batch, tail)):
            what = f"{batch} requests, {tail:,} tokens"
            here = each(of.tflops.loc[number, [*rivals.values(), *ours]].dropna(), "{:,.0f}".format)
            yield f"TFLOPS, {what}", where, ", ".join(f"{value} ({name})" for name, value in printed.items()), here
            for name in (name for name in rivals if name in printed):
                ratio = f"{printed['FlashMLA-ETAP'] / printed[name]:.2f}x"
                gains = of.faster(ours, [rivals[name]]).loc[number]
                yield f"faster than {name}, {what}", where, ratio, each(gains, times)


def amla_table_5(of: Measured) -> Iterator[Claim]:
    """Yield shares of the GPU's nominal BF16 rate at the shortest and the longest context of the paper."""
    for number, s_q, tail in of.cases[["s_q", "tail"]].itertuples():
        if of.nominal_tflops and (printed := values.AMLA_TABLE_5.get((s_q, tail))):
            npu, gpu = printed
            here = each(of.tflops.loc[number].dropna() / of.nominal_tflops, "{:.1%}".format)
            what = f"share of the BF16 peak, {tail:,} tokens, {('one query token', 'two query tokens')[s_q - 1]}"
            yield what, "table 5", f"{npu}% (AMLA), {gpu}% (GPU)", here


CLAIMS: dict[str, Callable[[Measured], Iterator[Claim]]] = {
    "typhoonmla-figure-3": typhoon_figure_3,
    "typhoonmla-figure-4": typhoon_figure_4,
    "snapmla-figure-5": lambda of: snapmla(of, "figure 5"),
    "snapmla-figure-6": snapmla_figure_6,
    "etap-figure-1": etap_figure_1,
    "amla-table-5": amla_table_5,
}
