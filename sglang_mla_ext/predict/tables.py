"""Output of `sglang-mla plan`: the verdict, notes, and tables, from the data of report.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_mla_ext.kernels.sizes import PAGE_TOKENS  # plain Python
from sglang_mla_ext.predict.linear import STATES_OF_A_REQUEST, layers
from sglang_mla_ext.predict.report import Asked, a_rank
from sglang_mla_ext.predict.step import Deployment, allowed_modes
from sglang_mla_ext.segment import Mode


def show(console: Console, of: Deployment, asked: Asked, found: dict[str, Any], details: bool) -> None:
    """Print the verdict first, then what it rests on.

    Args:
        details: also print each mode's time, the parts of a step and a GPU's memory.
    """
    advice = found["recommendation"]
    texts = sentences(of, found)
    if advice is not None:
        texts = [advice["verdict"], *advice["notes"], *texts]
    shown = []
    if details:
        texts.append(equation_1(found))
        shown.append(modes_table)
    if of.gpu.step is None:
        shown = [modes_table]
    else:
        shown += [steps_table, memory_table] if details else [gains_table] * (len(found["cases"]) > 1)
        shown += [arrivals_table] * (asked.answer is not None)
    for text in texts:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    for table in shown:
        console.print(table(of, asked, found))
    if not details:
        console.print("--details prints each mode's time, whole steps and memory; --json everything.", style="dim")


def make_table(of: Deployment, title: str | None, *columns: str) -> Table:
    """A table of cases, with these columns behind `prefix` and `requests`."""
    table = Table(title=title)
    for column in ("prefix", "requests (a rank)" if of.dp > 1 else "requests", *columns):
        table.add_column(column, justify="right")
    return table


def add_case(table: Table, of: Deployment, case: dict[str, Any], *cells: str) -> None:
    """Add a case's row to a table of `make_table`."""
    table.add_row(f"{case['prompt']:,}", requests(of, case), *cells)


def requests(of: Deployment, case: dict[str, Any]) -> str:
    """Format the number of requests of all ranks, and of one rank where ranks have requests of their own."""
    return f"{case['requests']:,}" + (f" ({case['requests_per_rank']:,})" if of.dp > 1 else "")


def in_words(of: Deployment, case: dict[str, Any]) -> str:
    """Format the same as part of a sentence."""
    return f"{case['requests']:,} requests" + (f", {case['requests_per_rank']:,} a rank" if of.dp > 1 else "")


def planned(case: dict[str, Any]) -> str:
    """A case's plan in words: its modes, with their tokens where there are several."""
    parts = [(each["mode"], each["end"] - each["start"]) for each in case["segments"]]
    if (left := case["prompt"] - sum(tokens for _, tokens in parts)) >= PAGE_TOKENS or not parts:
        parts.append((Mode.ABSORB.value, left))
    words = [(mode.replace("_absorb", ""), tokens) for mode, tokens in parts]
    return words[0][0] if len(words) == 1 else ", ".join(f"{mode} {tokens:,}" for mode, tokens in words)


def modes_table(of: Deployment, asked: Asked, found: dict[str, Any]) -> Table:
    """Tabulate the times that the planner compares, by prompt and number of requests, and its plan."""
    each = f", {of.query_tokens} tokens each" if of.query_tokens > 1 else ""
    stored = "FP8" if of.expanded_element_bytes == 1 else "BF16"
    together = f" ({of.cost.expanded_heads} of a prefix)" if of.prefix_sharding else ""
    heads = f"{asked.model}, {of.cost.local_heads} heads a GPU{together}, {asked.gpu}, {stored}{each}"
    title = f"{heads}: attention to the whole prefix in each mode, ms a layer, and the server's plan"
    modes = allowed_modes(of)
    table = make_table(of, title, *(mode.value.replace("_", " ") for mode in modes), "plan", "saved")
    for index, case in enumerate(found["cases"]):
        if index and index % len(asked.requests) == 0:
            table.add_section()
        times = (f"{case['layer_ms'][mode.value]:.3f}" for mode in modes)
        add_case(table, of, case, *times, planned(case), f"{case['saved']:.0%}")
    return table


def gains_table(of: Deployment, asked: Asked, found: dict[str, Any]) -> Table:
    """Tabulate tokens per second of all GPUs by case, with stock attention and shared."""
    table = make_table(of, None, "plan", "stock tokens/s", "shared tokens/s", "ratio")
    for case in found["cases"]:
        rates = (f"{case['tokens_per_s'][way]:,.0f}" for way in ("absorb", "chosen"))
        add_case(table, of, case, planned(case), *rates, ratio(case))
    return table


def ratio(case: dict[str, Any]) -> str:
    """Format a case's tokens per second against stock attention's; a dash where stock runs no request."""
    return "-" if case["ratio"] is None else f"{case['ratio']:.2f}x"


def steps_table(of: Deployment, asked: Asked, found: dict[str, Any]) -> Table:
    """The whole step of all GPUs, by stock absorb and as the server plans it."""
    source = "--step-ms" if asked.step_ms is not None else "the model's weights"
    title = f"Whole decode step, tails of {asked.tail:,} tokens: attention and the rest (by {source}), ms"
    columns = ("stock attention", "shared attention", "the rest", "stock tokens/s", "shared tokens/s", "ratio")
    table = make_table(of, title, *columns)
    for case in found["cases"]:
        attention, rate = case["attention_ms"], case["tokens_per_s"]
        times = (f"{ms:.2f}" for ms in (attention["absorb"], attention["chosen"], case["rest_ms"]))
        rates = (f"{rate[name]:,.0f}" for name in ("absorb", "chosen"))
        add_case(table, of, case, *times, *rates, ratio(case))
    return table


def arrivals_table(of: Deployment, asked: Asked, found: dict[str, Any]) -> Table:
    """Tabulate rates and latencies of requests that are replaced as they end: absorb and shared with prefill passes in
    turns, and mixed steps."""
    what = f"answers of {asked.answer:,} tokens, questions of {asked.question:,}"
    title = f"Requests replaced as they end, {what}: to the first token and between tokens, ms"
    table = make_table(of, title, "host's pass", "steps", "tokens/s", "ratio", "first", "between", "p99")
    for case in found["cases"]:
        for arrivals in case["arrivals"]:
            for way, name in (("absorb", "absorb"), ("chosen", "shared"), ("mixed", "mixed")):
                served = arrivals[way]
                ratio = served["tokens_per_s"] / arrivals["absorb"]["tokens_per_s"]
                times = (f"{served[time]:,.0f}" for time in ("first_token_ms", "between_ms", "between_p99_ms"))
                row = f"{arrivals['prefill_pass_ms']:,.0f}", name, f"{served['tokens_per_s']:,.0f}", f"{ratio:.2f}x"
                add_case(table, of, case, *row, *times)
            table.add_section()
    return table


def memory_table(of: Deployment, asked: Asked, found: dict[str, Any]) -> Table:
    """Memory of one GPU: what a case takes of the cache, and how many requests fit."""
    whole = found["memory"]
    what = f"weights {whole['weights_gib']:.1f} GiB, KV budget {whole['budget_gib']:.1f} GiB"
    held = f"{whole['taken_gib']:.1f} of it for prefixes and buffers, {whole['expanded_tokens']:,} expanded tokens"
    columns = ("latent GiB", "expanded GiB", "that fit: tokens", "most requests, stock", "most, shared")
    table = make_table(of, f"Memory of a GPU (--mem-fraction {whole['mem_fraction']:g}): {what}, {held}", *columns)
    for case in found["cases"]:
        taken = case["memory"]
        most = (f"{taken['most_requests'][way]:,}" for way in ("absorb", "chosen"))
        row = f"{taken['latent_gib']:.1f}", f"{case['expanded_gib']:.1f}", f"{taken['expanded_tokens']:,}", *most
        add_case(table, of, case, *row)
    return table


def _of_bursts(found: dict[str, Any]) -> Iterator[str]:
    """Describe each prompt's burst, of the largest number of requests asked about, where sharing saves more than 5
    percent with at least one host time."""
    cases = sorted((case for case in found["cases"] if "burst_s" in case), key=lambda case: case["requests"])
    for prompt, bursts in {case["prompt"]: case["burst_s"] for case in cases}.items():
        if any(burst["chosen"] < 0.95 * burst["absorb"] for burst in bursts):
            said: dict[str, list[str]] = {}  # what is the same with several host times is said once
            for burst in bursts:
                seconds = f"{burst['chosen']:.1f} s, {burst['absorb']:.1f} s with stock attention"
                said.setdefault(seconds, []).append(f"{burst['prefill_pass_ms']:,.0f} ms")
            hosts = [f" (a prefill pass takes the host {of[0]})" if len(said) > 1 else "" for of in said.values()]
            after = "; ".join(map("".join, zip(said, hosts, strict=True)))
            requests = f"{bursts[0]['requests']:,} requests"
            yield f"{prompt:,} tokens, {requests} at once: the last first token after about {after}"


def sentences(of: Deployment, found: dict[str, Any]) -> list[str]:
    """Return break-even, what limits sharing, first tokens of a burst, and what the prediction does not know."""
    threshold, lines = found["threshold"], []
    for prompt, smallest in threshold["pays_from"].items():
        said = f"{int(prompt):,} tokens: "
        if smallest is not None:
            lines.append(f"{said}break-even at {smallest} requests{a_rank(of)}")
        elif (least := threshold["pays_from_all_expanded"][prompt]) is not None:
            lines.append(
                f"{said}not shared with this memory; fully expanded, break-even at {least} requests{a_rank(of)}"
            )
        else:
            lines.append(f"{said}sharing does not pay")
    lines += _why_plain(of, found)
    lines += _of_bursts(found)
    if of.gpu.derived:
        lines.append(f"The rates of {of.gpu.rates.name} are derived from data sheets, not measured.")
    elif of.gpu.step is not None and of.gpu.step.derived:
        lines.append("Of a whole step only attention's rates were measured; the rest is derived from data sheets.")
    if of.gpu.step is None:
        lines.append(f"{of.gpu.rates.name}: no constants of a whole step, so attention alone is shown.")
    elif of.head_ranks > 1:
        lines.append("Exchanges between GPUs that share heads are from the data sheet, not measured.")
    if of.has_states:
        lines += _of_linear_layers(of, found)
    if of.prefix_sharding:
        lines.append("Prefixes are sharded over ranks; exchanges were measured on four GPUs.")
    elif of.dp > 1:
        lines.append("DP attention's exchanges were measured on four GPUs.")
    if found["memory"] is not None and not found["memory"]["budget_gib"]:
        lines.append("The weights do not fit in this memory: steps are shown as if they did.")
    for case in found["cases"]:
        running = case.get("running")
        if running is not None and min(running.values()) < case["requests"]:
            lines.append(
                f"{case['prompt']:,} tokens, {in_words(of, case)}: the cache holds {running['absorb']:,} at a time by "
                f"stock attention, {running['chosen']:,} shared; no more run at once"
            )
    if found["arrivals"] is not None:
        lines += _of_arrivals(of, found)
    return lines


def equation_1(found: dict[str, Any]) -> str:
    """Compare the server's break-even with TyphoonMLA, equation 1."""
    threshold = found["threshold"]
    said = f"{threshold['equation_1_measured_rates']:.0f} requests with the rates of attention's kernels"
    if (sheet := threshold["equation_1_data_sheet"]) is not None:
        said = f"{sheet:.0f} requests with the data sheet's rates, {said}"
    return f"TyphoonMLA's equation 1, which counts no overheads: naive pays from {said}"


def _of_linear_layers(of: Deployment, found: dict[str, Any]) -> list[str]:
    lines = [
        f"{of.dims.num_layers} layers have MLA, {layers(of.config)} linear attention, of which products and the bytes "
        "of states are counted. Not known: what its kernels take beyond that, and what experts take beyond reading "
        "their weights (DeepSeek-V3's is taken). Steps of all of Kimi-K3 at TP 16 took an H200 8 ms more than is "
        "counted, with any backend."
    ]
    if (whole := found["memory"]) is not None:
        lines.append(
            f"States take {whole['states_gib']:.1f} GiB of a GPU, for {whole['states_of_requests']:,} "
            f"requests{a_rank(of)} (--mamba-full-memory-ratio 0.9, {STATES_OF_A_REQUEST} states each)."
        )
    return lines


def _why_plain(of: Deployment, found: dict[str, Any]) -> list[str]:
    """List why cases share nothing, one line for each prompt and reason."""
    by_reason: dict[tuple[int, str], list[str]] = {}
    for case in found["cases"]:
        if case["why_plain"] is not None:
            by_reason.setdefault((case["prompt"], case["why_plain"]), []).append(requests(of, case))
    return [
        f"{prompt:,} tokens, {', '.join(counts)} requests: not shared: {reason}"
        for (prompt, reason), counts in by_reason.items()
    ]


def _of_arrivals(of: Deployment, found: dict[str, Any]) -> list[str]:
    """Return the lines above the table of arrivals."""
    passes = found["arrivals"]["prefill_pass_ms"]
    lines = [
        f"A prefill pass in turns takes the host {' or '.join(f'{ms:,.0f}' for ms in passes)} ms, or the GPU longer"
        + (": none, as where prefill runs in CUDA graphs, or that of a slow virtual machine" if len(passes) > 1 else "")
        + "; measure yours: --prefill-pass-ms."
    ]
    rank = " of a rank" if of.dp > 1 else ""
    for case in found["cases"]:
        arrivals = case["arrivals"][0]
        new, mixed_tokens = arrivals["new_tokens_a_step"], arrivals["mixed_tokens"]
        said = f"{case['prompt']:,} tokens, {in_words(of, case)}: {new:.0f} new tokens a step{rank}, "
        others = "; the others take prefill passes" if new > mixed_tokens else ""
        lines.append(f"{said}up to {mixed_tokens} of them in the decode graph{others}")
    return lines
