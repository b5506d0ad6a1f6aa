"""Predictions of `sglang-mla plan` for a deployment, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS, MAX_ROWS  # plain Python
from sglang_mla_ext.predict import burst, sharing
from sglang_mla_ext.predict.arrivals import Traffic, compared, host_seconds
from sglang_mla_ext.predict.drafts import drafting
from sglang_mla_ext.predict.memory import (
    Memory,
    default_fraction,
    default_transient_tokens_of,
    fraction_that_fits,
    memory,
)
from sglang_mla_ext.predict.sharing import PLAIN
from sglang_mla_ext.predict.step import Deployment, allowed_modes, predict
from sglang_mla_ext.prefix.planner import break_even
from sglang_mla_ext.prefix.planner.gpu_rates import ModeRates
from sglang_mla_ext.segment import Mode

GIB = 1 << 30


class CannotPlanError(ValueError):
    """Failure to predict what was asked for; the message explains why."""


@dataclass(frozen=True)
class Asked:
    """Cases to predict: prompts and requests, on a model and a GPU, and settings of their server.

    Attributes:
        model, gpu: as the user named them; prompts, requests: every prompt with every number of requests, which are
            those of all data-parallel ranks.
        tail: tokens of a request after the prompt, question and what is generated so far.
        fraction: SGLang's `--mem-fraction-static`; None: as SGLang chooses it.
        for_prefixes: GiB of it for expanded prefixes; None: as the server chooses.
        step_ms: of the user's server without sharing, for one prompt and one number of requests.
        accepted: tokens of a request that a step ends with.
        answer, question: mean tokens of an answer, where requests are to end and be replaced, and new tokens of a
            prompt.
        pass_ms: host time of an eager prefill pass; None: as measured elsewhere, by layers.
        prefill_expand_tokens: tokens that a prefill pass expands at a time for itself; None: as the server chooses.
        chunk_tokens: new tokens of a prefill pass (`--chunked-prefill-size`).
        most_running: requests that the server with the extension runs at a time (`--max-running-requests`); None: as
            many as its cache holds.
    """

    model: str
    gpu: str
    prompts: Sequence[int]
    requests: Sequence[int]
    tail: int
    fraction: float | None = None
    for_prefixes: float | None = None
    step_ms: float | None = None
    accepted: float = 1.0
    answer: int | None = None
    question: int = 128
    pass_ms: float | None = None
    prefill_expand_tokens: int | None = None
    chunk_tokens: int = burst.CHUNK_TOKENS
    most_running: int | None = None

    def memory(self, of: Deployment) -> Memory | None:
        """Memory of one GPU; None where its size is not known."""
        if of.gpu.sheet is None:
            return None
        return memory(of, *self._divided_by(of))

    def with_transient_expansion(self, of: Deployment) -> Deployment:
        """Return the deployment with the tokens that its prefill passes expand for themselves."""
        if (tokens := self.prefill_expand_tokens) is not None:
            if 0 < tokens < CHUNK_TOKENS:
                raise CannotPlanError(f"--prefill-expand-tokens is 0, or at least {CHUNK_TOKENS}")
            return dataclasses.replace(of, prefill_expand_tokens=tokens // CHUNK_TOKENS * CHUNK_TOKENS)
        tokens = 0 if of.gpu.sheet is None else default_transient_tokens_of(of, *self._divided_by(of))
        return dataclasses.replace(of, prefill_expand_tokens=tokens)

    def fraction_of(self, of: Deployment) -> float:
        """Return the deployment's `--mem-fraction-static`."""
        return default_fraction(of) if self.fraction is None else self.fraction

    def hosts(self, of: Deployment) -> tuple[float, ...]:
        """Host times of an eager prefill pass to predict with: the user's, or none, as where prefill runs in CUDA
        graphs, and that of a slow virtual machine."""
        return (0.0, host_seconds(of)) if self.pass_ms is None else (self.pass_ms * 1e-3,)

    def may_run(self, requests: int) -> int:
        """Return how many of these requests the server with the extension runs at a time."""
        return requests if self.most_running is None else min(requests, self.most_running)

    def _divided_by(self, of: Deployment) -> tuple[float, float | None]:
        return self.fraction_of(of), None if self.for_prefixes is None else self.for_prefixes * GIB


def report(of: Deployment, asked: Asked) -> dict[str, Any]:
    """Return all predictions, as JSON has them: times in ms, memory in GiB.

    Raises:
        CannotPlanError: the measured step is shorter than its attention, or is not that of one case; arrivals are asked
            of a measured step, or of a GPU without constants of a step.
    """
    arrivals = None
    if asked.answer is not None:
        _check_arrivals(of, asked)
        passes = [host_s * 1e3 for host_s in asked.hosts(of)]
        arrivals = {"answer": asked.answer, "question": asked.question, "prefill_pass_ms": passes}
    divided = asked.memory(of)
    cases = [_case(of, asked, divided, prompt, requests) for prompt in asked.prompts for requests in asked.requests]
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
        "prefix_sharding": of.prefix_sharding,
        "prefill_expand_tokens": of.prefill_expand_tokens,
        "heads_per_gpu": of.cost.local_heads,
        "query_tokens": of.query_tokens,
        "tail": asked.tail,
        "memory": None if divided is None else _memory(of, asked, divided),
        "arrivals": arrivals,
        "threshold": thresholds(of, asked.prompts, divided),
        "cases": cases,
    }


def chunks_for(prompt: int, divided: Memory | None) -> int:
    """Chunks of expanded tokens that a server has for a prompt. Where not even the weights fit, steps are shown as if
    all did."""
    return divided.chunks if divided is not None and divided.budget else -(-prompt // CHUNK_TOKENS)


def a_rank(of: Deployment) -> str:
    """Words that tell a rank's requests from all requests; empty where they are the same."""
    return " a rank" if of.dp > 1 else ""


def thresholds(of: Deployment, prompts: Sequence[int], divided: Memory | None = None) -> dict[str, Any]:
    """Return the numbers of requests of a rank from which sharing pays: TyphoonMLA's equation 1 from the data sheet and
    from measured rates, and by prompt what a server does, with its memory and with memory for the whole prompt."""

    def pays(prompt: int, chunks: int) -> int | None:
        return sharing.pays_from(of.cost, prompt, chunks)

    return {
        "equation_1_data_sheet": from_data_sheet(of),
        "equation_1_measured_rates": break_even.threshold_batch(of.cost),
        "pays_from": {str(prompt): pays(prompt, chunks_for(prompt, divided)) for prompt in prompts},
        "pays_from_all_expanded": {str(prompt): pays(prompt, chunks_for(prompt, None)) for prompt in prompts},
    }


def from_data_sheet(of: Deployment) -> float | None:
    """Equation 1 with the data sheet's rates; None without one."""
    if (sheet := of.gpu.sheet) is None:
        return None
    matrix = sheet.flops(of.latent_element_bytes) / 2
    rates = ModeRates(sheet.bytes_per_s, matrix, matrix, overhead_s=0, row_tile=1)
    gpu = dataclasses.replace(of.gpu.rates, modes=dict.fromkeys(Mode, rates))
    return break_even.threshold_batch(dataclasses.replace(of.cost, rates=gpu))


def _case(of: Deployment, asked: Asked, divided: Memory | None, prompt: int, requests: int) -> dict[str, Any]:
    """Predict one prompt and number of requests."""
    mine, chunks = of.per_rank(requests), chunks_for(prompt, divided)
    planned, everyone = of.plan(mine, prompt, chunks), mine * of.cost.ranks
    layer_ms = {mode.value: of.cost.seconds(mode, everyone, prompt) * 1e3 for mode in allowed_modes(of)}
    saved_ms = sharing.saved_seconds(of.cost, planned) * 1e3
    found: dict[str, Any] = {
        "prompt": prompt,
        "requests": requests,
        "requests_per_rank": mine,
        "layer_ms": layer_ms,
        "chosen": sharing.cover(planned).mode.value,
        "segments": [{"mode": each.mode.value, "start": each.start, "end": each.end} for each in planned.segments],
        "saved": saved_ms / layer_ms[Mode.ABSORB.value] if planned.segments else 0.0,
        "expanded_gib": prompt * of.cost.expanded_token_bytes * of.dims.num_layers / GIB,
        "why_plain": None if planned.segments else _why_plain(of, prompt, mine, chunks),
    }
    if of.gpu.step is not None and divided is not None:
        found |= whole_step(of, asked, divided, prompt, requests)
        latent = (prompt + mine * asked.tail) * divided.latent_token / GIB
        most = {
            way: divided.most_requests(prompt, asked.tail, shared=way == "chosen") * of.dp for way in found["running"]
        }
        found["memory"] = {
            "latent_gib": latent,
            "most_requests": most,
            "expanded_tokens": min(divided.chunks * CHUNK_TOKENS, prompt),
        }
        if asked.answer is not None:
            found["arrivals"] = replaced(of, asked, divided, prompt, requests)
        if (together := min(found["running"].values())) and divided.budget and not of.has_states:
            found["burst_s"] = _bursts(of, asked, prompt, together, chunks)
    return found


def _bursts(of: Deployment, asked: Asked, prompt: int, requests: int, chunks: int) -> list[dict[str, Any]]:
    """Predict the time from the arrival of so many requests at once until the last one has its first token. One entry
    for each host time, what gains least first."""
    kept = of.kept_for_prefill(requests, prompt, chunks)
    stock = dataclasses.replace(of, prefill_expand_tokens=0)
    found = []
    for host_s in asked.hosts(of):
        given: dict[str, Any] = {"host_s": host_s, "chunk_tokens": asked.chunk_tokens}
        absorb = burst.burst_seconds(stock, requests, prompt, asked.question, **given)
        chosen = burst.burst_seconds(of, requests, prompt, asked.question, **given, expanded=kept)
        found.append({"prefill_pass_ms": host_s * 1e3, "requests": requests, "absorb": absorb, "chosen": chosen})
    return sorted(found, key=lambda each: each["absorb"] / each["chosen"])


def _why_plain(of: Deployment, prompt: int, mine: int, chunks: int) -> str:
    """Return the reason why `mine` requests of a rank share nothing."""
    if mine * of.cost.ranks < 2:
        return "a single request has nothing to share"
    if mine * of.query_tokens > MAX_ROWS:
        most = f"--max-running-requests {most_that_share(of)}"
        return f"a step of more than {MAX_ROWS:,} rows{a_rank(of)} is plain absorb; {most} keeps steps below"
    least = sharing.pays_from(of.cost, prompt, chunks_for(prompt, None))
    if least is None:
        return "sharing never pays"
    if mine < least:
        return f"too few requests; fully expanded, break-even at {least} requests{a_rank(of)}"
    if not chunks:
        return "no memory for expanded tokens"
    return f"memory for {chunks * CHUNK_TOKENS:,} expanded tokens only, which saves less than it costs"


def most_that_share(of: Deployment) -> int:
    """Requests of all ranks with which a step still shares."""
    return MAX_ROWS // of.query_tokens * of.dp


def whole_step(of: Deployment, asked: Asked, divided: Memory, prompt: int, requests: int) -> dict[str, Any]:
    """The whole step, plain and as a server plans it, of as many requests as the KV cache holds with each."""
    running = {}
    for way in ("absorb", "chosen"):
        most = divided.most_requests(prompt, asked.tail, shared=way == "chosen") * of.dp
        wanted = asked.may_run(requests) if way == "chosen" else requests
        running[way] = min(wanted, most) if divided.budget else wanted
    chunks = chunks_for(prompt, divided)
    cover = of.cover(of.per_rank(running["chosen"]), prompt, chunks)
    plain = predict(of, PLAIN, running["absorb"], prompt, asked.tail)
    shared = predict(of, cover, running["chosen"], prompt, asked.tail)
    drafting_seconds = drafting(of)
    drafts = {way: drafting_seconds(running[way], prompt, asked.tail) for way in running}
    rest = {"absorb": plain.rest + drafts["absorb"], "chosen": shared.rest + drafts["chosen"]}
    if asked.step_ms is not None:
        measured = asked.step_ms * 1e-3 - plain.attention
        rest = dict.fromkeys(rest, measured)
        if measured <= 0:
            raise CannotPlanError(
                f"--step-ms {asked.step_ms:g} is less than attention alone is predicted to take, "
                f"{plain.attention * 1e3:.2f} ms: check that it is a step without sharing, of this --prefix and --batch"
            )
    parts = {kind: seconds * 1e3 for kind, seconds in plain.products.items()}
    parts |= {"drafts": drafts["absorb"] * 1e3} if drafts["absorb"] else {}
    parts |= {"exchanges": plain.exchanges * 1e3, "overhead": plain.overhead * 1e3}
    parts |= {"states": plain.states * 1e3} if of.has_states else {}
    steps = {"absorb": plain.attention + rest["absorb"], "chosen": shared.attention + rest["chosen"]}
    rates = {name: running[name] * asked.accepted / seconds for name, seconds in steps.items()}
    return {
        "running": running,
        "attention_ms": {"absorb": plain.attention * 1e3, "chosen": shared.attention * 1e3},
        "rest_ms": rest["absorb"] * 1e3,
        "rest_parts_ms": parts if asked.step_ms is None else None,
        "step_ms": {name: seconds * 1e3 for name, seconds in steps.items()},
        "tokens_per_s": rates,
        "ratio": rates["chosen"] / rates["absorb"] if rates["absorb"] else None,
    }


def _check_arrivals(of: Deployment, asked: Asked) -> None:
    if asked.step_ms is not None:
        raise CannotPlanError("arrivals take steps of many sizes: give --arrivals without --step-ms")
    if of.has_states:
        raise CannotPlanError(
            "arrivals take prefill passes, and what linear attention takes in one is not known: leave out --arrivals"
        )
    if of.gpu.step is None:
        raise CannotPlanError(f"arrivals take whole steps, and {of.gpu.key} has no constants of one")


def replaced(of: Deployment, asked: Asked, divided: Memory, prompt: int, requests: int) -> list[dict[str, Any]]:
    """A case whose requests end and are replaced, by each way of `compared`, with no more of them at a time than the
    cache holds. One entry for each host time of a prefill pass, what gains least first."""
    assert asked.answer is not None
    chunks = chunks_for(prompt, divided)
    private = asked.question + asked.answer // 2  # tokens of a request in the middle of its answer
    stock, fewer = (
        max(min(most, divided.most_requests(prompt, private, shared=shared) * of.dp), 1)
        for shared, most in ((False, requests), (True, asked.may_run(requests)))
    )
    found = []
    for host_s in asked.hosts(of):
        traffic = Traffic(stock, prompt, asked.question, asked.answer, host_s, asked.accepted)
        mixed_tokens, ways = compared(of, traffic, chunks)
        if fewer < stock:
            ways |= {**compared(of, dataclasses.replace(traffic, requests=fewer), chunks)[1], "absorb": ways["absorb"]}
        entry: dict[str, Any] = {
            "prefill_pass_ms": host_s * 1e3,
            "mixed_tokens": mixed_tokens,
            "new_tokens_a_step": traffic.new_tokens / of.dp,
        }
        for way, served in ways.items():
            entry[way] = {
                "tokens_per_s": served.tokens_per_s,
                "first_token_ms": served.first_token_s * 1e3,
                "between_ms": served.between_s * 1e3,
                "between_p99_ms": served.between_p99_s * 1e3,
            }
        entry["ratio"] = ways["mixed"].tokens_per_s / ways["absorb"].tokens_per_s
        found.append(entry)
    return sorted(found, key=lambda each: each["ratio"])


def _memory(of: Deployment, asked: Asked, divided: Memory) -> dict[str, Any]:
    gib = {f"{name}_gib": getattr(divided, name) / GIB for name in ("weights", "budget", "taken")}
    tokens = {"absorb": divided.tokens(shared=False), "chosen": divided.tokens(shared=True)}
    least = max(asked.prompts) + of.per_rank(max(asked.requests)) * asked.tail
    states = {"states_gib": divided.states / GIB, "states_of_requests": divided.of_requests} if of.has_states else {}
    return {
        **gib,
        **states,
        "mem_fraction": asked.fraction_of(of),
        "mem_fraction_that_fits": fraction_that_fits(of, least),
        "cache_tokens": tokens,
        "expanded_tokens": divided.chunks * CHUNK_TOKENS,
    }
