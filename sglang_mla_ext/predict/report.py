"""What `sglang-mla plan` says of a deployment, as data and as tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from sglang_mla_ext.predict.memory import Memory, memory
from sglang_mla_ext.predict.step import Deployment, allowed_modes, best_mode, predict
from sglang_mla_ext.prefix.cost_model import ModeRates
from sglang_mla_ext.segment import Mode

GIB = 1 << 30


class CannotPlanError(ValueError):
    """What was asked for cannot be predicted; the message says why."""


@dataclass(frozen=True)
class Asked:
    """What to predict.

    Attributes:
        model, gpu: as the user named them; prompts, requests: every prompt with every number of requests.
        tail: tokens of a request after the prompt, question and what is generated so far.
        fraction: SGLang's `--mem-fraction-static`.
        for_prefixes: GiB of it for expanded prefixes; None: as much as the rest leaves.
        step_ms: of the user's server without sharing, for one prompt and one number of requests.
        accepted: tokens of a request that a step ends with.
    """

    model: str
    gpu: str
    prompts: Sequence[int]
    requests: Sequence[int]
    tail: int
    fraction: float
    for_prefixes: float | None = None
    step_ms: float | None = None
    accepted: float = 1.0


def report(of: Deployment, asked: Asked) -> dict[str, Any]:
    """Everything, as JSON has it: times in ms, memory in GiB.

    Raises:
        CannotPlanError: the measured step is shorter than its attention, or is not that of one case.
    """
    cases = [_case(of, asked, prompt, requests) for prompt in asked.prompts for requests in asked.requests]
    return {
        "model": asked.model,
        "gpu": {
            "name": of.gpu.rates.name,
            "derived": of.gpu.derived,
            "source": of.gpu.rates.source,
            "step_source": of.gpu.step.source if of.gpu.step else None,
        },
        "tp": of.tp,
        "dp": of.dp,
        "heads_per_gpu": of.cost.local_heads,
        "query_tokens": of.queries,
        "tail": asked.tail,
        "threshold": thresholds(of, asked.prompts),
        "cases": cases,
    }


def thresholds(of: Deployment, prompts: Sequence[int]) -> dict[str, Any]:
    """From how many requests of a rank on naive pays: TyphoonMLA's equation 1 from the data sheet and from measured
    rates, and by prompt what a server's choice comes to."""
    modes = allowed_modes(of)
    return {
        "equation_1_data_sheet": from_data_sheet(of),
        "equation_1_measured_rates": of.cost.threshold_batch(),
        "pays_from": {str(prompt): of.cost.smallest_profitable_group(prompt, modes) for prompt in prompts},
    }


def from_data_sheet(of: Deployment) -> float | None:
    """Equation 1 with the data sheet's rates; None without one."""
    if (sheet := of.gpu.sheet) is None:
        return None
    matrix = sheet.flops(of.latent_element_bytes) / 2
    rates = ModeRates(sheet.bytes_per_s, matrix, matrix, overhead_s=0, row_tile=1)
    gpu = dataclasses.replace(of.gpu.rates, modes=dict.fromkeys(Mode, rates))
    return dataclasses.replace(of.cost, rates=gpu).threshold_batch()


def _case(of: Deployment, asked: Asked, prompt: int, requests: int) -> dict[str, Any]:
    """One prompt and number of requests."""
    mine = of.per_rank(requests)
    chosen = best_mode(of, mine, prompt)
    found: dict[str, Any] = {
        "prompt": prompt,
        "requests": requests,
        "requests_per_rank": mine,
        "layer_ms": {mode.value: of.cost.seconds(mode, mine, prompt) * 1e3 for mode in allowed_modes(of)},
        "chosen": chosen.value,
        "expanded_gib": prompt * of.cost.expanded_token_bytes * of.dims.num_layers / GIB,
    }
    if of.gpu.step is not None and of.gpu.sheet is not None:
        room = math.inf if asked.for_prefixes is None else asked.for_prefixes * GIB
        taken = memory(of, requests, prompt, asked.tail, asked.fraction, room)
        # Where not even the weights fit, steps are shown as if they did.
        reach = taken.reach if taken.budget else prompt
        found |= _step(of, asked, prompt, requests, chosen, reach)
        found["memory"] = _memory(taken)
    return found


def _step(of: Deployment, asked: Asked, prompt: int, requests: int, chosen: Mode, reach: int) -> dict[str, Any]:
    """The whole step, plain and as chosen, with the first `reach` tokens of the prompt expanded."""
    plain, shared = (predict(of, mode, requests, prompt, asked.tail, reach) for mode in (Mode.ABSORB, chosen))
    rest = plain.rest
    if asked.step_ms is not None:
        rest = asked.step_ms * 1e-3 - plain.attention
        if rest <= 0:
            raise CannotPlanError(
                f"--step-ms {asked.step_ms:g} is less than what attention takes alone, {plain.attention * 1e3:.2f} ms: "
                "is it a step without sharing, of so many requests that share so long a prompt?"
            )
    parts = {kind: seconds * 1e3 for kind, seconds in plain.products.items()}
    parts |= {"exchanges": plain.exchanges * 1e3, "overhead": plain.overhead * 1e3}
    steps = {"absorb": plain.attention + rest, "chosen": shared.attention + rest}
    return {
        "attention_ms": {"absorb": plain.attention * 1e3, "chosen": shared.attention * 1e3},
        "rest_ms": rest * 1e3,
        "rest_parts_ms": parts if asked.step_ms is None else None,
        "step_ms": {name: seconds * 1e3 for name, seconds in steps.items()},
        "tokens_per_s": {name: requests * asked.accepted / seconds for name, seconds in steps.items()},
    }


def _memory(found: Memory) -> dict[str, Any]:
    gib = {f"{name}_gib": getattr(found, name) / GIB for name in ("weights", "budget", "latent", "expanded")}
    return {**gib, "fits": found.fits, "most_requests": found.most_requests, "expanded_tokens": found.reach}


def mode_names(of: Deployment) -> dict[Mode, str]:
    """In words, so that they wrap."""
    return {mode: mode.value.replace("_", " ") for mode in allowed_modes(of)}


def modes_table(of: Deployment, asked: Asked, found: dict[str, Any]) -> Table:
    """What the planner compares, by prompt and number of requests."""
    each = f", {of.queries} tokens each" if of.queries > 1 else ""
    stored = "FP8" if of.expanded_element_bytes == 1 else "BF16"
    heads = f"{asked.model}, {of.cost.local_heads} heads a GPU, {asked.gpu}, {stored}{each}"
    table = Table(title=f"{heads}: attention to the prefix, ms a layer, as the planner compares it")
    names = mode_names(of)
    for column in ("prefix", "requests", *names.values(), "chosen", "saved", "expanded"):
        table.add_column(column, justify="right")
    for index, case in enumerate(found["cases"]):
        if index and index % len(asked.requests) == 0:
            table.add_section()
        ms, chosen = case["layer_ms"], case["chosen"]
        saved = f"{1 - ms[chosen] / ms['absorb']:.0%}" if ms["absorb"] else "-"
        times = (f"{ms[mode.value]:.3f}" for mode in names)
        where = f"{case['prompt']:,}", str(case["requests"])
        table.add_row(*where, *times, chosen.replace("_", " "), saved, f"{case['expanded_gib']:.1f} GiB")
    return table


def steps_table(of: Deployment, asked: Asked, found: dict[str, Any]) -> Table:
    """The whole step of all GPUs, without sharing and with it."""
    source = "--step-ms" if asked.step_ms is not None else "the model's weights"
    title = (
        f"Whole decode step, {asked.tail:,} tokens of each request's own: attention by absorb and shared, ms; the rest"
    )
    table = Table(title=f"{title} by {source}")
    columns = ("prefix", "requests", "absorb", "shared", "the rest", "tokens/s", "shared", "ratio")
    for column in columns:
        table.add_column(column, justify="right")
    for case in found["cases"]:
        attention, rate = case["attention_ms"], case["tokens_per_s"]
        times = (attention["absorb"], attention["chosen"], case["rest_ms"])
        table.add_row(
            f"{case['prompt']:,}",
            str(case["requests"]),
            *(f"{ms:.2f}" for ms in times),
            *(f"{rate[name]:,.0f}" for name in ("absorb", "chosen")),
            f"{rate['chosen'] / rate['absorb']:.2f}x",
        )
    return table


def memory_table(of: Deployment, asked: Asked, found: dict[str, Any]) -> Table:
    """Memory of one GPU against the KV budget."""
    first = found["cases"][0]["memory"]
    what = f"weights {first['weights_gib']:.1f} GiB, KV budget {first['budget_gib']:.1f} GiB"
    table = Table(title=f"Memory of a GPU, tails of {asked.tail:,} tokens: {what}")
    for column in ("prefix", "requests", "latent GiB", "expanded GiB", "of budget", "most requests"):
        table.add_column(column, justify="right")
    for case in found["cases"]:
        taken = case["memory"]
        whole = taken["latent_gib"] + taken["expanded_gib"]
        share = f"{whole / taken['budget_gib']:.0%}" if taken["budget_gib"] else "none"
        row = f"{taken['latent_gib']:.1f}", f"{taken['expanded_gib']:.1f}", share, f"{taken['most_requests']:,}"
        table.add_row(f"{case['prompt']:,}", str(case["requests"]), *row)
    return table


def sentences(of: Deployment, found: dict[str, Any]) -> list[str]:
    """What stands above the tables."""
    threshold = found["threshold"]
    sheet = threshold["equation_1_data_sheet"]
    said = f"{threshold['equation_1_measured_rates']:.0f} requests with the rates of attention's kernels"
    if sheet is not None:
        said = f"{sheet:.0f} requests with the data sheet's rates, {said}"
    lines = [f"TyphoonMLA's equation 1: naive pays from {said}"]
    each = " a rank" if of.dp > 1 else ""
    for prompt, smallest in threshold["pays_from"].items():
        lines.append(f"{int(prompt):,} tokens: sharing pays from {smallest or 'no'} requests{each} on")
    if of.gpu.derived:
        lines.append(f"The rates of {of.gpu.rates.name} are derived from data sheets, not measured.")
    elif of.gpu.step is not None and of.gpu.step.derived:
        lines.append("Of a whole step only attention's rates were measured; the rest is derived from data sheets.")
    if of.gpu.step is None:
        lines.append(f"{of.gpu.rates.name}: no constants of a whole step, so attention alone is shown.")
    elif of.tp > 1:
        lines.append("Exchanges between GPUs are from the data sheet, not measured.")
    if any("memory" in case and not case["memory"]["budget_gib"] for case in found["cases"]):
        lines.append("The weights do not fit in this memory: steps are shown as if they did.")
    elif any("memory" in case and short_of_memory(case) for case in found["cases"]):
        lines.append("Not every expansion fits: what does not is attended to by absorb, which the steps count.")
    return lines


def short_of_memory(case: dict[str, Any]) -> bool:
    """Whether a prompt that naive would take does not fit whole."""
    reach, prompt = case["memory"]["expanded_tokens"], case["prompt"]
    return bool(case["chosen"] == Mode.NAIVE.value and reach < prompt)
