"""Tables that need no code of their own; update_tables.py writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.rank_predictions import named, named_memory, passing_tokens, served, step
from bench.tables import Spec

Record = dict[str, Any]
RESCALE_COLUMNS = {
    "amla_base": "base",
    "amla_mul_by_add": "MUL by ADD",
    "amla_uncompensated": "without compensation",
    "hybrid_mla": "powers of two",
}
SOAK_COUNTS = ("wrong", "ties", "lost_first", "leaked_bytes", "deaths")


def of_case(record: Record, **more: Any) -> Record:
    """A record with more in its case."""
    return record | {"case": record["case"] | more}


def with_rate(bench: str) -> Callable[[Record], Record | None]:
    """Keep the records of one load, with tokens per second while requests wait, or of all output, and the drafts."""

    def of(record: Record) -> Record | None:
        rate = record["steady_tok_s"] or record["output_tok_s"]
        drafts = record["case"].get("drafts")
        found = of_case(record, rate=rate, drafts=f"{drafts:g} a step" if drafts else "none")
        return found if record["bench"] == bench else None

    return of


def soaked(record: Record) -> Record:
    """With what server it was, and of which release of SGLang."""
    ranks = "--enable-dp-attention" in record["command"]
    server = "two ranks, prefixes spread" if ranks else "one rank"
    if record["case"].get("penalties"):
        server += ", penalties"
    return of_case(record, server=server, release=record["sglang"])


def counted_attack(record: Record) -> Record:
    """With how many traces there are; times that were not taken are None."""
    return (
        record
        | {"traces": len(record["traces"])}
        | {name: record[name] or None for name in ("seconds", "stock_seconds")}
    )


def spread_or_alone(bench: str, layers: int) -> Callable[[Record], Record | None]:
    """Keep the records of one load on so many layers, with how their ranks hold the prompt and the requests of each."""

    def of(record: Record) -> Record | None:
        case = record["case"]
        if record["bench"] != bench or case["layers"] != layers:
            return None
        how = held(record) if record["impl"] == "hybrid_mla" else record["impl"].removeprefix("sglang_")
        if bench == "decode":
            said = dict(plan_ms=step(record).seconds * 1e3)
        else:
            said = dict(plan_tok_s=served(record).tokens_per_s)
        return of_case(record, how=how, of_rank=case["concurrency"] // case["dp"]) | said

    return of


def held(record: Record) -> str:
    """How the ranks of a DP server hold a prompt, by its flags."""
    flags = named(record)
    words = {None: "alone", "off": "alone", "peers": "spread by stores"}  # `auto` was NCCL's in the records there are
    how = f"{words.get(flags.hybrid_mla_spread, 'spread by NCCL')}, {named_memory(record) or 0:g} GiB"
    how += ", FP8" if flags.hybrid_mla_prefix_dtype == "fp8_e4m3" else ""
    how += ", passes expand for themselves" if passing_tokens(record) else ""
    rode = record["bench"] == "short" and record["hybrid_mla"]["counters"].get("prefills_ridden")
    return how + (", new tokens ride" if rode else "")


def of_study(study: str) -> Any:
    """Leaves the records of one part of the accuracy study, with the deviation or range of what was drawn in words."""

    def of(record: Record) -> Record | None:
        case = record["case"]
        size = f"{'' if case.get('distribution') == 'normal' else '±'}{case.get('size', 0):.0f}"
        return of_case(record, spread=size) if case["study"] == study else None

    return of


PLAN = Spec(  # milliseconds of planning on the host
    by=("tree", "requests", "heads"),
    headings="case | heads | first plan ms | three requests replaced ms | batch unchanged ms | prefill step ms",
    cells="{requests:,} requests, {tree} | {heads} | {first_ms:.2f} | {replan_ms:.2f} | {unchanged_ms:.2f}"
    "| {prefill_ms:.2f}",
)
SPREAD_WHOLE = Spec(  # decode of whole DP ranks with a sharded prompt, beside those that hold it alone and fa3
    by=("prefix", "requests", "flags"),
    of=spread_or_alone("decode", 61),
    against=lambda key: ("sglang_fa3", *key[1:3], None),
    order=("prefix", "requests", "how"),
    headings="prompt | requests of a rank | prompt held | between tokens ms | `plan` says | fa3 / this"
    "| first token ms, median / last | tok/s, prefill included | this / fa3",
    cells="{prefix:,} | {of_rank} | {how} | {decode_itl_ms:.2f} | {plan_ms:.2f}"
    "| {stock[decode_itl_ms]/decode_itl_ms:.2f}x"
    "| {ttft_ms:,.0f} / {ttft_last_ms:,.0f} | {output_tok_s:,.0f} | {output_tok_s/stock[output_tok_s]:.2f}x",
)
SPREAD_SHORT_WHOLE = replace(  # the same with short answers
    SPREAD_WHOLE,
    of=spread_or_alone("short", 61),
    optional=("stock",),
    headings="prompt | requests of a rank | prompt held | tok/s while others wait | `plan` says | this / fa3"
    "| first token ms, median / last | between tokens ms, p99",
    cells="{prefix:,} | {of_rank} | {how} | {steady_tok_s:,.0f} | {plan_tok_s:,.0f}"
    "| {steady_tok_s/stock[steady_tok_s]:.2f}x | {ttft_ms:,.0f} / {ttft_last_ms:,.0f} | {itl_p99_ms:,.0f}",
)
SOAK = Spec(  # what came of the last soak of each backend, on each device with each release
    by=("gpu", "server", "poison", "release"),
    of=soaked,
    headings="device | SGLang | backend | server | requests | answers | taken back | "
    + " | ".join(name.replace("_", " ") for name in SOAK_COUNTS),
    cells="{gpu} | {release} | {impl} | {server} | {requests:,} | {judged:,} | {taken_back:,} | "
    + " | ".join(f"{{{name}:,}}" for name in SOAK_COUNTS),
)
HOSTILE = Spec(  # what came of the last time of each attack
    by=("attack", "against"),
    of=counted_attack,
    headings="attack | requests | s | stock s | slowdown | wrong | refused otherwise | shared across salts | traces"
    "| deaths",
    cells="{attack} | {requests:,} | {seconds:.1f} | {stock_seconds:.1f} | {slowdown:+.0%} | {wrong}"
    "| {refused_otherwise} | {shared_across_salts} | {traces} | {deaths}",
)
SANITIZE = Spec(  # what NVIDIA's compute-sanitizer found
    by=("tool", "cases"), headings="tool | cases | found | s", cells="{tool} | {cases} | {found} | {seconds}"
)
RESCALE = Spec(  # errors of the ways to rescale an accumulator
    by=("distribution", "size"),
    of=of_study("amla"),
    beside={impl: (impl,) for impl in RESCALE_COLUMNS},
    headings=" | ".join(["distribution", "deviation or range", *RESCALE_COLUMNS.values()]),
    cells=" | ".join(["{distribution}", "{spread}", *(f"{{{impl}[rel_err]:.2e}}" for impl in RESCALE_COLUMNS)]),
)
FP16 = Spec(  # errors of attention in FP16, and the size of what they are errors of
    by=("distribution", "tokens"),
    of=of_study("etap"),
    headings="distribution | tokens | RMS of the output | RMSE | relative L2",
    cells="{distribution} | {tokens:,} | {rms:.2e} | {rmse:.2e} | {rel_err:.2e}",
)
PREFILL_GRAPHS = Spec(  # short answers beside fa3 where prefill runs in CUDA graphs
    by=("gpu", "layers", "drafts", "bench", "prompt"),
    headings="load | drafts accepted | layers | fa3 tok/s | hybrid_mla tok/s | ratio "
    "| first token ms, median: fa3 / ours | last: fa3 / ours | between tokens ms, p99: fa3 / ours",
    cells="{bench}, {prompt} | {drafts} | {layers} | {fa3[case][rate]:,.0f} | {ours[case][rate]:,.0f} "
    "| {ours[case][rate]/fa3[case][rate]:.2f}x | {fa3[ttft_ms]:,.0f} / {ours[ttft_ms]:,.0f} "
    "| {fa3[ttft_last_ms]:,.0f} / {ours[ttft_last_ms]:,.0f} | {fa3[itl_p99_ms]:,.0f} / {ours[itl_p99_ms]:,.0f}",
    beside={"ours": ("hybrid_mla",), "fa3": ("sglang_fa3",)},
    of=with_rate("short"),
    order=("layers", "drafts", "bench", "prompt"),
)
AGENTS = replace(PREFILL_GRAPHS, of=with_rate("agents"))
