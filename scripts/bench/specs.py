"""Tables that need no code of their own; update_tables.py writes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from bench.cases import PAGE_TOKENS
from bench.rank_predictions import as_a_whole, named, named_memory, passing_tokens, served, step
from bench.tables import STORAGE_NAMES, Spec

Record = dict[str, Any]
RESCALE_COLUMNS = {
    "amla_base": "base",
    "amla_mul_by_add": "MUL by ADD",
    "amla_uncompensated": "without compensation",
    "hybrid_mla": "powers of two",
}
LINK_BYTES_PER_S = 450e9
"""Out of an H100 or H200 over NVLink, by the data sheet."""
SOAK_COUNTS = ("wrong", "ties", "lost_first", "leaked_bytes", "deaths")
SPECULATIVE_STORED = {"bf16": "BF16", "fp8": "BF16, prefix FP8", "fp8_cache": "FP8"}


def of_case(record: Record, **more: Any) -> Record:
    """A record with more in its case."""
    return record | {"case": record["case"] | more}


def named_kernel(record: Record) -> Record:
    """With its case in words."""
    case = record["case"]
    if "m" in case:
        what = f"product {case['m']}^3, {STORAGE_NAMES[case['dtype']]}"
    elif case["tail"]:
        what = f"decode {case['batch']} x {case['tail']:,}, {case['heads']} heads"
    else:
        tile = f"tiles of {case['tile']['block_rows']} rows"
        what = f"{case['batch']} on {case['prefix']:,}, {STORAGE_NAMES[case['dtype']]}, {tile}"
    return of_case(record, what=what, limits=", ".join(record["clock_limits"]), mj=1e3 * record["joules"])


def named_cache(record: Record) -> Record:
    """With the backend and its cache in words."""
    cache = STORAGE_NAMES[record["case"]["kv_cache"].removesuffix("_e4m3")]
    return of_case(record, backend=f"{record['impl'].removeprefix('sglang_')}, {cache} cache")


def with_rate(record: Record) -> Record:
    """With tokens per second while requests wait, or of all output, and whether there were drafts."""
    rate = record["steady_tok_s"] or record["output_tok_s"]
    drafts = record["case"].get("drafts")
    return of_case(record, rate=rate, drafts=f"{drafts:g} a step" if drafts else "none")


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


def speculative_stock(key: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """flashmla's with the same draft and cache."""
    impl, dtype, *case = key
    return ("sglang_flashmla", dtype if dtype == "fp8_cache" else "bf16", *case) if impl == "hybrid_mla" else None


def exchanged(record: Record) -> Record | None:
    """With MB out of a rank, and what they take at least."""
    sent = record["case"].get("sent_bytes", 0)
    times = dict(mb=sent / 1e6, floor_us=sent / LINK_BYTES_PER_S * 1e6)
    return of_case(record, **times) if record["bench"] == "exchange" else None


def of_one_rank(record: Record) -> Record | None:
    """With the storage's name, and microseconds."""
    if record["bench"] != "one_of_ranks":
        return None
    return of_case(record, stored=STORAGE_NAMES[record["case"]["dtype"]]) | dict(us=record["ms"] * 1e3)


def step_of_one_rank(record: Record) -> Record | None:
    """The same with GiB of the prefix in 61 layers, and a whole step."""
    found = of_one_rank(record)
    gib = 61 * record["case"].get("prefix_bytes", 0) / (1 << 30)
    return None if found is None else found | dict(gib=gib) | as_a_whole(record)


def spread_or_alone(bench: str, layers: int, *, shares: bool = True) -> Callable[[Record], Record | None]:
    """Leaves the records of one load on so many layers, with how their ranks hold the prompt, and requests of each.

    Args:
        shares: whether the prompt is long enough for a page, or nothing is shared.
    """

    def of(record: Record) -> Record | None:
        case = record["case"]
        if record["bench"] != bench or case["layers"] != layers or (case["prefix"] >= PAGE_TOKENS) != shares:
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


POWER = Spec(  # kernels run back to back: clock, power, and what a call of each takes of them
    by=("what",),
    of=named_kernel,
    headings="kernel | case | ms | MHz | W | clock held by | mJ a call | TFLOPS | matrix units' cycles",
    cells="{impl} | {what} | {ms:.3f} | {mhz:.0f} | {watts:.0f} | {limits} | {mj:.0f} | {tflops:.0f}"
    "| {matrix_share:.0%}",
)
CONTEXT = Spec(  # whole decode steps over long contexts that no two requests share, at equal memory
    by=("kv_cache", "context", "heads", "layers"),
    of=named_cache,
    against=lambda key: ("sglang_flashmla", "bf16", *key[2:]),
    optional=("stock",),
    order=("heads", "layers", "context", "backend"),
    headings="heads | layers | context | backend | tokens in the cache | requests | step ms | tokens/s | gain",
    cells="{heads} | {layers} | {context:,} | {backend} | {cache_tokens:,} | {concurrency} | {step_ms:.2f}"
    "| {decode_tok_s:,.0f} | {decode_tok_s/stock[decode_tok_s]:.2f}x",
)
EXPANSION = Spec(  # the fused one beside torch's, and the share of a matrix product's rate that it reaches
    by=("heads", "dtype", "tokens"),
    of=lambda record: of_case(record, stored=STORAGE_NAMES[record["case"]["dtype"]]),
    beside={"ours": ("hybrid_mla",), "torch": ("torch",)},
    optional=("torch",),
    order=("heads", "dtype", "tokens"),
    headings="heads | prefix in | tokens | fused ms | torch ms | gain | TFLOPS | of the product's rate",
    cells="{heads} | {stored} | {tokens:,} | {ms:.3f} | {torch[ms]:.3f} | {torch[ms]/ms:.2f}x | {tflops:.0f}"
    "| {gemm_share:.0%}",
)
PREFILL = Spec(  # a prefill step's attention to a shared prefix: SGLang's, ours in both storages, and their errors
    by=("heads", "prefix", "batch", "new_tokens", "dtype"),
    beside={"sglang": ("sglang_chunks", "bf16"), "bf16": ("hybrid_mla", "bf16"), "fp8": ("hybrid_mla", "fp8")},
    order=("heads", "prefix", "batch", "new_tokens"),
    headings="heads | prefix | requests x new tokens | SGLang's chunks ms | ours BF16 ms | ours FP8 ms"
    "| expansion ms, BF16 / FP8 | SGLang / ours BF16 | SGLang / ours FP8"
    "| rel. error of SGLang, as shipped / natural log | rel. error of ours, BF16 / FP8",
    cells="{heads} | {prefix:,} | {batch} x {new_tokens} | {ms:.2f} | {bf16[ms]:.2f} | {fp8[ms]:.2f}"
    "| {bf16[expansion_ms]:.2f} / {fp8[expansion_ms]:.2f} | {ms/bf16[ms]:.1f}x | {ms/fp8[ms]:.1f}x"
    "| {rel_err_as_shipped:.2%} / {rel_err:.2%} | {bf16[rel_err]:.2%} / {fp8[rel_err]:.2%}",
)
SPECULATIVE = Spec(  # each case of hybrid_mla beside flashmla's with the same draft
    by=("dtype", "heads", "layers", "prefix", "batch", "draft_tokens"),
    of=lambda record: of_case(record, cache=SPECULATIVE_STORED[record["case"]["dtype"]]),
    against=speculative_stock,
    order=("heads", "layers", "prefix", "batch", "draft_tokens", "dtype"),
    headings="heads x layers | shared tokens | requests | tokens a request | cache | verify ms: hybrid_mla / flashmla"
    "| whole step ms | accepted tok/s",
    cells="{heads} x {layers} | {prefix:,} | {batch} | {draft_tokens} | {cache}"
    "| {verify_ms:.2f} / {stock[verify_ms]:.2f} ({stock[verify_ms]/verify_ms:.2f}x)"
    "| {step_ms:.2f} / {stock[step_ms]:.2f} ({stock[step_ms]/step_ms:.2f}x)"
    "| {accepted_tok_s:,.0f} / {stock[accepted_tok_s]:,.0f}",
)
WATCH = Spec(  # a merge that can be watched beside one that cannot
    by=("heads", "requests"),
    headings="heads | requests | merge us | that can be watched | difference",
    cells="{heads} | {requests} | {merge_us:.2f} | {merge_watched_us:.2f} | {difference_us:+.2f}",
)
PLAN = Spec(  # milliseconds of planning on the host
    by=("tree", "requests", "heads"),
    headings="case | heads | first plan ms | three requests replaced ms | batch unchanged ms | prefill step ms",
    cells="{requests:,} requests, {tree} | {heads} | {first_ms:.2f} | {replan_ms:.2f} | {unchanged_ms:.2f}"
    "| {prefill_ms:.2f}",
)
EXCHANGE = Spec(  # what ranks pay in a layer, and the time of its bytes on the link
    by=("ranks", "heads", "rows"),
    of=exchanged,
    order=("impl", "rows"),
    headings="via | ranks | rows of a rank | MB out of a rank | wire, us | all, us | floor of the wire, us",
    cells="{impl} | {ranks} | {rows} | {mb:.2f} | {wire_us:.1f} | {all_us:.1f} | {floor_us:.1f}",
)
ONE_OF_RANKS = Spec(  # attention of one of several ranks in a layer, against what a rank does alone
    by=("ranks", "heads", "dtype", "prefix", "batch"),
    of=of_one_rank,
    beside={impl: (impl,) for impl in ("spread", "flashmla", "alone")},
    order=("ranks", "stored", "prefix", "batch"),
    headings="ranks | prefix | rows of a rank | flashmla, us | alone, us | spread, us | flashmla / spread",
    cells="{ranks} | {stored} {prefix:,} | {batch} | {flashmla[us]:.0f} | {alone[us]:.0f} | {us:.0f}"
    "| {flashmla[ms]/ms:.2f}x",
)
ONE_OF_RANKS_STEP = replace(  # the same as a step of all layers, whose rest is predicted
    ONE_OF_RANKS,
    of=step_of_one_rank,
    headings="ranks | prefix | rows of a rank | flashmla, ms | alone, ms | spread by NCCL, ms | by stores, ms"
    "| flashmla / spread by NCCL | by stores | GiB of the prefix, alone | spread",
    cells="{ranks} | {stored} {prefix:,} | {batch} | {flashmla[step_ms]:.1f} | {alone[step_ms]:.1f} | {nccl_ms:.1f}"
    "| {stores_ms:.1f} | {flashmla[step_ms]/nccl_ms:.2f}x | {flashmla[step_ms]/stores_ms:.2f}x"
    "| {alone[gib]:.1f} | {gib:.1f}",
)
SPREAD = Spec(  # a DP server whose ranks spread one prompt, those that hold it alone, and flashmla's
    by=("prefix", "requests", "flags"),
    of=spread_or_alone("decode", 8),
    against=lambda key: ("sglang_flashmla", *key[1:3], None),
    order=("prefix", "requests", "how"),
    headings="prompt | requests of a rank | prompt held | between tokens ms | `plan` says | flashmla / this"
    "| first token ms, median / last | tok/s, prefill included | this / flashmla",
    cells="{prefix:,} | {of_rank} | {how} | {decode_itl_ms:.2f} | {plan_ms:.2f}"
    "| {stock[decode_itl_ms]/decode_itl_ms:.2f}x"
    "| {ttft_ms:,.0f} / {ttft_last_ms:,.0f} | {output_tok_s:,.0f} | {output_tok_s/stock[output_tok_s]:.2f}x",
)
SPREAD_WHOLE = replace(  # whole ranks that run together, against fa3
    SPREAD,
    of=spread_or_alone("decode", 61),
    against=lambda key: ("sglang_fa3", *key[1:3], None),
    headings=SPREAD.headings.replace("flashmla", "fa3"),
)
SPREAD_16 = replace(SPREAD_WHOLE, of=spread_or_alone("decode", 16))
SPREAD_NOTHING = replace(  # where a prompt is shorter than a page
    SPREAD,
    of=spread_or_alone("decode", 16, shares=False),
    headings="requests of a rank | prefixes | between tokens ms | flashmla / this | host's plan, ms a step",
    cells="{of_rank} | {how} | {decode_itl_ms:.2f} | {stock[decode_itl_ms]/decode_itl_ms:.2f}x| {plan_ms_per_step:.2f}",
)
SPREAD_SHORT = replace(  # the same with short answers
    SPREAD,
    of=spread_or_alone("short", 8),
    optional=("stock",),
    headings="GPU | prompt | requests of a rank | prompt held | tok/s while others wait | `plan` says | this / flashmla"
    "| first token ms, median / last | between tokens ms, p99",
    cells="{gpu} | {prefix:,} | {of_rank} | {how} | {steady_tok_s:,.0f} | {plan_tok_s:,.0f}"
    "| {steady_tok_s/stock[steady_tok_s]:.2f}x | {ttft_ms:,.0f} / {ttft_last_ms:,.0f} | {itl_p99_ms:,.0f}",
)
SPREAD_SHORT_WHOLE = replace(
    SPREAD_SHORT,
    of=spread_or_alone("short", 61),
    against=SPREAD_WHOLE.against,
    headings=SPREAD_SHORT.headings.replace("flashmla", "fa3"),
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

PREFILL_GRAPHS = Spec(
    by=("gpu", "layers", "drafts", "bench", "prompt"),
    headings="load | drafts accepted | layers | fa3 tok/s | hybrid_mla tok/s | ratio "
    "| first token ms, median: fa3 / ours | last: fa3 / ours | between tokens ms, p99: fa3 / ours",
    cells="{bench}, {prompt} | {drafts} | {layers} | {fa3[case][rate]:,.0f} | {ours[case][rate]:,.0f} "
    "| {ours[case][rate]/fa3[case][rate]:.2f}x | {fa3[ttft_ms]:,.0f} / {ours[ttft_ms]:,.0f} "
    "| {fa3[ttft_last_ms]:,.0f} / {ours[ttft_last_ms]:,.0f} | {fa3[itl_p99_ms]:,.0f} / {ours[itl_p99_ms]:,.0f}",
    beside={"ours": ("hybrid_mla",), "fa3": ("sglang_fa3",)},
    of=with_rate,
    order=("layers", "drafts", "bench", "prompt"),
)
