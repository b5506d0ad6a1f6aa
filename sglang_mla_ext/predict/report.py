"""What `sglang-mla plan` says of a deployment, as data and as tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from sglang_mla_ext.predict.arrivals import Traffic, compared, host_seconds
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
        answer, question: mean tokens of an answer, where requests are to end and be replaced, and new tokens of a
            prompt.
        pass_ms: host time of an eager prefill pass; None: as measured elsewhere, by layers.
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
    answer: int | None = None
    question: int = 128
    pass_ms: float | None = None


def report(of: Deployment, asked: Asked) -> dict[str, Any]:
    """Everything, as JSON has it: times in ms, memory in GiB.

    Raises:
        CannotPlanError: the measured step is shorter than its attention, or is not that of one case; arrivals are asked
            of drafts, of a measured step, or of a GPU without constants of a step.
    """
    if asked.answer is not None:
        _check_arrivals(of, asked)
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
        "arrivals": None if asked.answer is None else _arrivals(of, asked),
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
        if asked.answer is not None:
            found["arrivals"] = _served(of, asked, prompt, requests, reach)
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


def _check_arrivals(of: Deployment, asked: Asked) -> None:
    if of.queries > 1:
        raise CannotPlanError("arrivals are predicted without drafts: give --arrivals without --draft-tokens")
    if asked.step_ms is not None:
        raise CannotPlanError("arrivals take steps of many sizes: give --arrivals without --step-ms")
    if of.gpu.step is None:
        raise CannotPlanError(f"arrivals take whole steps, and {of.gpu.key} has no constants of one")


def _arrivals(of: Deployment, asked: Asked) -> dict[str, Any]:
    pass_ms = host_seconds(of) * 1e3 if asked.pass_ms is None else asked.pass_ms
    return {"answer": asked.answer, "question": asked.question, "prefill_pass_ms": pass_ms}


def _served(of: Deployment, asked: Asked, prompt: int, requests: int, reach: int) -> dict[str, Any]:
    """A case whose requests end and are replaced."""
    given = _arrivals(of, asked)
    traffic = Traffic(requests, prompt, given["question"], given["answer"], given["prefill_pass_ms"] * 1e-3)
    may_ride, ways = compared(of, traffic, reach)
    found: dict[str, Any] = {"mixed_tokens": may_ride, "new_tokens_a_step": traffic.new_tokens / of.dp}
    for way, served in ways.items():
        found[way] = {
            "tokens_per_s": served.tokens_per_s,
            "first_token_ms": served.first_token_s * 1e3,
            "between_ms": served.between_s * 1e3,
            "between_p99_ms": served.between_p99_s * 1e3,
        }
    return found


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


def arrivals_table(asked: Asked, found: dict[str, Any]) -> Table:
    """What requests that end and are replaced get: absorb and shared with prefill passes in turns, and mixed steps."""
    what = f"answers of {asked.answer:,} tokens, questions of {asked.question:,}"
    table = Table(title=f"Requests replaced as they end, {what}: to the first token and between tokens, ms")
    for column in ("prefix", "requests", "steps", "tokens/s", "ratio", "first", "between", "p99"):
        table.add_column(column, justify="right")
    for case in found["cases"]:
        for way, name in (("absorb", "absorb"), ("chosen", "shared"), ("mixed", "mixed")):
            served = case["arrivals"][way]
            ratio = served["tokens_per_s"] / case["arrivals"]["absorb"]["tokens_per_s"]
            times = (served[time] for time in ("first_token_ms", "between_ms", "between_p99_ms"))
            rate = f"{served['tokens_per_s']:,.0f}", f"{ratio:.2f}x"
            table.add_row(f"{case['prompt']:,}", str(case["requests"]), name, *rate, *(f"{ms:,.0f}" for ms in times))
        table.add_section()
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
    if found["arrivals"] is not None:
        lines += _of_arrivals(of, found)
    return lines


def _of_arrivals(of: Deployment, found: dict[str, Any]) -> list[str]:
    """What stands above the table of arrivals."""
    lines = [
        f"A prefill pass in turns takes the host {found['arrivals']['prefill_pass_ms']:,.0f} ms, or the GPU longer; "
        "measure yours: --prefill-pass-ms."
    ]
    rank = " of a rank" if of.dp > 1 else ""
    for case in found["cases"]:
        arrivals = case["arrivals"]
        new, may_ride = arrivals["new_tokens_a_step"], arrivals["mixed_tokens"]
        said = f"{case['prompt']:,} tokens, {case['requests']} requests: {new:.0f} new tokens a step{rank}, "
        if not may_ride:
            why = "with DP attention" if of.dp > 1 else "steps would take half as long again"
            said += f"and none may ride ({why}): mixed is in turns"
        else:
            said += f"and {may_ride} may ride" + (": requests wait" if new > may_ride else "")
        lines.append(said)
    return lines


def short_of_memory(case: dict[str, Any]) -> bool:
    """Whether a prompt that naive would take does not fit whole."""
    reach, prompt = case["memory"]["expanded_tokens"], case["prompt"]
    return bool(case["chosen"] == Mode.NAIVE.value and reach < prompt)
