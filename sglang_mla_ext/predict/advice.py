"""Recommendation of `sglang-mla plan`: on or off, with which flags, the expected gain and its cost in memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import geometric_mean
from typing import Any, NamedTuple

from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS, MAX_ROWS  # plain Python
from sglang_mla_ext.predict import sharing
from sglang_mla_ext.predict.memory import buffer_bytes, fraction_that_fits
from sglang_mla_ext.predict.report import GIB, Asked, a_rank, chunks_for, most_that_share, replaced, whole_step
from sglang_mla_ext.predict.step import Deployment, shards_by_default, with_default_sharding

WORTH = 1.03
"""Gains below this are not worth a flag: predictions are not that good."""
CLEARLY = 1.05
"""Factor by which another dtype or deployment must be better to be named."""
SHARD_BY_NCCL = "--hybrid-mla-prefix-sharding nccl"
"""Flag that shards prefixes where a server does not by itself, because ranks are on several hosts."""
LATER = "with later first tokens where many requests come at once"
"""Cost of sharded prefixes where prefill passes expand nothing for themselves."""
PREFILL = "Prefill gains in addition: a pass expands a prompt once for all of its requests."
NEARLY = 0.98
"""Share of the best gain from which less memory is preferred."""
LARGEST_FRACTION = 0.95
"""Largest share of a GPU's memory for weights and cache: a larger one leaves no room for graphs and activations."""


class Outcome(NamedTuple):
    """Outcome of all cases: tokens per second relative to those of stock attention, by case, and their geometric mean
    of tokens per second."""

    ratios: list[float]
    tokens_per_s: float

    @property
    def range(self) -> list[float]:
        return [min(self.ratios), max(self.ratios)]

    @property
    def mean(self) -> float:
        return geometric_mean(self.ratios)

    def __str__(self) -> str:
        least, most = (f"{each:.2f}x" for each in self.range)
        return least if least == most else f"{least} to {most}"


@dataclass(frozen=True)
class Choice:
    """Choice of a deployment and of the size for prefixes in GiB (None: the server's default), and its outcome."""

    of: Deployment
    asked: Asked
    outcome: Outcome


def recommend(of: Deployment, asked: Asked) -> dict[str, Any] | None:
    """Return the verdict, its flags and notes, as data and as text; None for a GPU without rates of a whole step.

    The ratios are those of the asked cases, against stock attention with all of its KV cache.
    """
    divided = asked.memory(of)
    if of.gpu.step is None or divided is None:
        return None
    fraction = _larger_fraction(of, asked)
    best = _best(of, asked) if divided.budget else None
    if best is None:
        what = (
            "the KV cache does not hold a single one of these requests" if divided.budget else "the weights do not fit"
        )
        verdict = _too_little(of, asked, what, fraction)
        return {"turn_on": None, "mem_fraction": fraction, "verdict": verdict, "notes": []}
    answers = _replaced(best)
    turn_on = max(best.outcome.mean, answers[0].mean if answers else 0) >= WORTH
    memory, flags = best.asked.memory(of), ["--attention-backend hybrid_mla"]
    assert memory is not None
    if best.asked.for_prefixes is not None:
        flags.append(f"--hybrid-mla-prefix-memory-gb {best.asked.for_prefixes:g}")
    if of.expanded_element_bytes != of.latent_element_bytes:
        flags.append(f"--hybrid-mla-prefix-dtype {'fp8_e4m3' if of.expanded_element_bytes == 1 else 'bf16'}")
    if of.prefix_sharding and not shards_by_default(of):
        flags.append(SHARD_BY_NCCL)
    if of.dp > 1 and not of.prefix_sharding:
        flags.append("--hybrid-mla-dp-routing prefix")  # with which a server does not shard
    flags += _prefill_expand_tokens(best) + _most_running(best)
    tokens = {"stock": memory.tokens(shared=False), "shared": memory.tokens(shared=True)}
    pays = {prompt: sharing.pays_from(of.cost, prompt, chunks_for(prompt, memory)) for prompt in asked.prompts}
    alternatives = list(_alternatives(best))
    verdict = _turn_on(flags, best, answers, tokens) if turn_on else _leave_off(best, pays, bool(alternatives))
    notes = []
    if turn_on and best.asked.for_prefixes != asked.for_prefixes and (usual := _outcome(of, asked)) is not None:
        notes.append(f"With the default memory for prefixes ({divided.taken / GIB:.1f} GiB) expect {usual}.")
    if turn_on and _most_running(best):
        notes.append("Requests beyond --max-running-requests wait.")
    if turn_on and of.dp > 1 and not of.prefix_sharding:
        notes.append("Routing by prefix keeps requests of one prompt on one rank; the ratio assumes it.")
    if of.dp > 1 and of.prefill_expand_tokens:
        notes.append(PREFILL)
    better = _with_fraction(of, asked, fraction) if fraction is not None else None
    if better is not None and better[1].mean > CLEARLY * best.outcome.mean:
        notes.append(f"The KV cache is small: {better[0]}.")
    notes += alternatives
    return {
        "turn_on": turn_on,
        "flags": flags if turn_on else [],
        "ratio": best.outcome.range,
        "ratio_replaced": answers[0].range if answers else None,
        "ratio_replaced_slow_host": answers[-1].range if len(answers) > 1 else None,
        "pays_from": {str(prompt): least for prompt, least in pays.items()},
        "cache_tokens": tokens,
        "mem_fraction": fraction,
        "verdict": verdict,
        "notes": notes,
    }


def _turn_on(flags: list[str], best: Choice, answers: list[Outcome], tokens: dict[str, int]) -> str:
    gain = f"{best.outcome} the tokens per second of stock attention {_cases(best.asked)}"
    if answers:
        gain += f"; {answers[0]} where requests are replaced as they end"
    if len(answers) > 1:
        slow = max(best.asked.hosts(best.of)) * 1e3
        gain += f" ({answers[-1]} with a host that takes {slow:,.0f} ms for a prefill pass)"
    share = 1 - tokens["shared"] / tokens["stock"]
    cost = f"{share:.0%} of the KV cache ({tokens['shared']:,} tokens in place of {tokens['stock']:,})"
    return f"ON: {gain}; costs {cost}; flags: {' '.join(flags)}"


def _cases(asked: Asked) -> str:
    """Name the case if there is one, or count them."""
    if (number := len(asked.prompts) * len(asked.requests)) > 1:
        return f"in {number} cases"
    return f"at {asked.prompts[0]:,} tokens and {asked.requests[0]:,} requests"


def _leave_off(best: Choice, pays: dict[int, int | None], otherwise: bool) -> str:
    """
    Args:
        otherwise: whether something else is clearly better.
    """
    rate = f"{best.outcome} the tokens per second of stock attention {_cases(best.asked)}"
    found = f"OFF{' without the changes below' * otherwise}: {rate}"
    if any(least is not None for least in pays.values()):
        known = {prompt: least for prompt, least in pays.items() if least is not None}
        least = (f"{least} requests{a_rank(best.of)} at {prompt:,} tokens" for prompt, least in known.items())
        found += f"; break-even: {', '.join(least)}"
        if _too_many(best.of, best.asked):
            most = most_that_share(best.of)
            limited = _outcome(best.of, replace(best.asked, most_running=most))
            found += (
                f"; a step shares up to {MAX_ROWS:,} rows{a_rank(best.of)}: --max-running-requests {most}, while "
                f"others wait, gives {limited}"
            )
        return found
    if any(sharing.pays_from(best.of.cost, prompt, chunks_for(prompt, None)) is not None for prompt in pays):
        return f"{found}; sharing would pay if the memory held an expanded prompt"
    return f"{found}; sharing prompts as short as these never pays"


def _too_many(of: Deployment, asked: Asked) -> bool:
    """Return whether the largest number of requests asked about exceeds what a step shares with."""
    return max(asked.requests) > most_that_share(of)


def _alternatives(best: Choice) -> Iterator[str]:
    """Yield what else is clearly better: FP8 prefixes, prefixes sharded over ranks, another division of heads."""
    of, asked = best.of, replace(best.asked, for_prefixes=None)
    fp8 = "--hybrid-mla-prefix-dtype fp8_e4m3", "at FP8's precision"
    way = "--hybrid-mla-prefix-sharding auto" if shards_by_default(of) else SHARD_BY_NCCL
    sharding = way, "" if of.prefill_expand_tokens else LATER
    reached = most = best.outcome.mean
    named = best.asked.for_prefixes is not None
    tried: list[tuple[tuple[str, str], ...]] = [(), (fp8,)] if named else [(fp8,)]
    if of.dp > 1:
        tried += [(sharding,), (fp8, sharding)]
    for ways in tried:
        flags, prices = [flag for flag, _ in ways], [price for _, price in ways]
        with contextlib.suppress(ValueError):  # ranks that cannot shard
            fewer = 1 if fp8 in ways else of.expanded_element_bytes
            changed = replace(of, expanded_element_bytes=fewer, prefix_sharding=of.prefix_sharding or sharding in ways)
            other = _best(changed, asked)
            if other is not None and other.outcome.mean > CLEARLY * (reached if len(ways) < 2 else most):
                most = max(most, other.outcome.mean)
                price = " and ".join(filter(None, prices))
                if named and other.asked.for_prefixes is None:
                    flags.append("the default memory for prefixes")
                yield f"With {_flags(other, *flags)} expect {other.outcome}{price and f', {price}'}."
    if of.tp > 1 and asked.step_ms is None:
        dp = 1 if of.dp > 1 else of.tp
        try:
            divided = with_default_sharding(replace(of, dp=dp, prefix_sharding=False))
            other = _best(asked.with_transient_expansion(divided), asked)
        except ValueError:  # heads do not divide so
            return
        if other is not None and other.outcome.tokens_per_s > CLEARLY * best.outcome.tokens_per_s:
            name = "Without DP attention" if dp == 1 else f"With --dp {dp} --enable-dp-attention"
            sized = " and ".join(word for word in (name, _flags(other)) if word)
            more = other.outcome.tokens_per_s / best.outcome.tokens_per_s
            yield f"{sized} expect {more:.2f}x as many tokens per second as that, on average."


def _flags(choice: Choice, *flags: str) -> str:
    """Join these flags and those that the choice needs, in words."""
    size = choice.asked.for_prefixes
    named = [] if size is None else [f"--hybrid-mla-prefix-memory-gb {size:g}"]
    *first, last = [*flags, *named, *_prefill_expand_tokens(choice), *_most_running(choice)] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def _prefill_expand_tokens(choice: Choice) -> list[str]:
    """Return the flag for what prefill passes expand for themselves, where that is not the server's default."""
    tokens = choice.of.prefill_expand_tokens
    by_itself = (
        replace(choice.asked, prefill_expand_tokens=None).with_transient_expansion(choice.of).prefill_expand_tokens
    )
    return [] if tokens == by_itself else [f"--hybrid-mla-prefill-expand-tokens {tokens}"]


def _most_running(choice: Choice) -> list[str]:
    """Return the flag that keeps steps as small as sharing supports, where that gains more than the waiting requests
    cost."""
    most = choice.asked.most_running
    return [] if most is None else [f"--max-running-requests {most}"]


def _best(of: Deployment, asked: Asked) -> Choice | None:
    """Choose the size for prefixes: what was asked for or is the default, unless another one gives clearly more. None
    where the cache holds no request. Requests wait only where no case loses by it."""
    found = [Choice(of, one, outcome) for one in _sizes(of, asked) if (outcome := _outcome(of, one)) is not None]
    found = [choice for choice in found if choice.asked.most_running is None or min(choice.outcome.ratios) >= 1]
    if not found:
        return None
    most = max(choice.outcome.mean for choice in found)
    return next(choice for choice in found if choice.outcome.mean >= NEARLY * most)


def _sizes(of: Deployment, asked: Asked) -> Iterator[Asked]:
    """Yield the settings to try: as asked, then with memory for each whole prompt, the smallest first, up to half of
    the budget, unless the user chose the memory. Each is also tried with no more requests at a time than a step shares
    with, where more are asked about."""
    limits = (None, most_that_share(of)) if _too_many(of, asked) else (None,)
    yield from (replace(asked, most_running=most) for most in limits)
    divided = asked.memory(of)
    assert divided is not None
    if asked.for_prefixes is not None:
        return
    for prompt in sorted(asked.prompts):
        taken = buffer_bytes(of, expands=True) + chunks_for(prompt, None) * CHUNK_TOKENS * divided.expanded_token
        if taken <= divided.budget / 2:
            size = math.ceil(10 * taken / GIB) / 10
            yield from (replace(asked, for_prefixes=size, most_running=most) for most in limits)


def _outcome(of: Deployment, asked: Asked) -> Outcome | None:
    divided = asked.memory(of)
    if divided is None or not divided.budget:
        return None
    ratios, rates = [], []
    for prompt in asked.prompts:
        for requests in asked.requests:
            step = whole_step(of, asked, divided, prompt, requests)
            if step["ratio"]:
                ratios.append(step["ratio"])
                rates.append(step["tokens_per_s"]["chosen"])
    return Outcome(ratios, geometric_mean(rates)) if ratios else None


def _replaced(best: Choice) -> list[Outcome]:
    """Predict outcomes of requests that are replaced as they end, with mixed steps: one for each host time of a prefill
    pass, the smallest gain first; none where nobody asked."""
    asked, divided = best.asked, best.asked.memory(best.of)
    if asked.answer is None or divided is None:
        return []
    cases = [
        replaced(best.of, asked, divided, prompt, requests) for prompt in asked.prompts for requests in asked.requests
    ]
    return [
        Outcome([each["ratio"] for each in of_host], geometric_mean(each["mixed"]["tokens_per_s"] for each in of_host))
        for of_host in zip(*cases, strict=True)
    ]


def _larger_fraction(of: Deployment, asked: Asked) -> float | None:
    """Return the `--mem-fraction-static` that holds the most requests asked about, or else the fewest, where SGLang's
    own or the user's does not; None where it does, and where none does that leaves room for graphs and activations."""
    divided, prompt = asked.memory(of), max(asked.prompts)
    assert divided is not None
    for requests in (max(asked.requests), min(asked.requests)):
        mine = of.per_rank(requests)
        if divided.budget and divided.most_requests(prompt, asked.tail, shared=False) >= mine:
            return None
        fraction = fraction_that_fits(of, prompt + mine * asked.tail)
        if asked.fraction_of(of) < fraction <= LARGEST_FRACTION:
            return fraction
    return None


def _with_fraction(of: Deployment, asked: Asked, fraction: float) -> tuple[str, Outcome] | None:
    """Predict the outcome of a larger `--mem-fraction-static`, in words and as data; None where there is none."""
    better = _best(of, replace(asked, fraction=fraction))
    if better is None:
        return None
    flags = _flags(better, f"--mem-fraction-static {fraction:.2f}")
    return f"with {flags}, if activations and graphs fit in what is left, expect {better.outcome}", better.outcome


def _too_little(of: Deployment, asked: Asked, what: str, fraction: float | None) -> str:
    """Explain why a server cannot run these requests at all, and what to change."""
    better = _with_fraction(of, asked, fraction) if fraction is not None else None
    if better is None:
        remedies = "use more of them (--tp), or weights of fewer bits"
        if (divided := asked.memory(of)) is not None and divided.budget:
            less = "less memory for prefixes (--prefix-memory-gb)" if asked.for_prefixes else "fewer tokens"
            remedies = f"use {less}, more of them (--tp), or weights of fewer bits"
        return f"CANNOT RUN: {what} in {of.tp} of these GPUs: {remedies}"
    return f"CANNOT RUN: {what}; {better[0]} the tokens per second of stock attention"
