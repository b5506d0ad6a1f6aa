"""Simulate requests that are replaced as they end, to predict a server's rate and latency with short answers.

So many requests at a time share a prefix that is cached; one that ends is replaced by one with a question of its own,
once its client has heard of the end. The question is prefilled in one of two ways:

- in turns: an eager pass takes all that wait, before the next decode step, and everyone waits for it; another one
  takes those who come meanwhile. Its time is the larger of what the GPU needs and what the host needs for the launches;
- mixed (mixed.py): new tokens join decode steps, in the order of their requests, so many in each as may; where too
  many wait they take a pass. With DP attention and eager passes (SGLang 0.5.17), or drafts, they have mixed passes of
  their own, without running requests, where those are faster than an eager pass.

With drafts a step verifies them, drafting is part of it, and it adds several tokens to a request.

Ranks of DP attention step together: those with requests that wait take a pass while the others decode, and all wait for
the longest. A mixed step has as many new rows on each as on the rank with the most. The steps are gone through one by
one, with lengths of answers drawn from a fixed seed. What is not in it: chunks of long questions in turns, padding to
captured sizes, and whatever hybrid_mla adds to the host's time of a pass.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

from sglang_mla_ext.predict.drafts import drafting
from sglang_mla_ext.predict.mixed import MOST_NEW_ALONE, NEWEST, allowed, evened, mixed_step, most_waiting
from sglang_mla_ext.predict.sharing import PLAIN, Cover
from sglang_mla_ext.predict.step import Arriving, Deployment, predict, product_seconds
from sglang_mla_ext.predict.weights import expert_layers
from sglang_mla_ext.prefix.planner.transient import FEWEST_SAVED

PASS_LAYER_S, PASS_EXPERTS_S = 2.5e-3, 2.5e-3
"""Host time of a layer of an eager prefill pass, and what experts add to it, on the slow host of a virtual machine."""
HEARD_STEPS = 2
"""Decode steps until a request's place is free where passes keep the scheduler from choosing ahead: it hears of an end
one step later, and has chosen the next step by then."""
CLIENT_S = 0.025
"""Seconds from a request's last token until the next request has come to the scheduler, through server and client."""
PAIR_REQUEST_S = 0.54e-3
"""Host time of a running request where an iteration of the scheduler verifies drafts and computes new tokens: short
answers of 128 requests took 69 ms an iteration with two and with six waiting steps mixed in, more than the GPU needs
(rank-graphs.jsonl, 61 layers, an H200)."""
STEPS = 4000
"""Decode steps that are counted, of all ranks together, after two mean answers."""


@dataclass(frozen=True)
class Traffic:
    """Requests that a server is asked, and their lengths.

    Attributes:
        requests: at a time, of all data-parallel ranks; prefix: tokens that all share.
        question: new tokens of each prompt; answer: mean tokens of an answer, where all lengths up to nearly twice as
            many are equally likely.
        host_s: host time of an eager prefill pass.
        accepted: tokens that a step adds to a request in the mean.
    """

    requests: int
    prefix: int
    question: int
    answer: int
    host_s: float
    accepted: float = 1.0

    def __post_init__(self) -> None:
        if self.answer < 2:
            raise ValueError("an answer of one token has no decode step: ask for answers of two and more")

    @property
    def tail(self) -> int:
        """Tokens of a running request's own: its question, and half of its answer."""
        return self.question + self.answer // 2

    @property
    def steps(self) -> int:
        """Steps of an answer in the mean, of which the first is in a prefill pass or mixed."""
        return max(1 + round((self.answer - 1) / self.accepted), 2)

    @property
    def new_tokens(self) -> float:
        """Mean number of new tokens that arrive per step, where no request waits."""
        return self.requests / self.steps * self.question


@dataclass(frozen=True)
class Served:
    """Rate and latencies of the simulated requests.

    Attributes:
        tokens_per_s: of all requests.
        first_token_s: from a client's request to the first token, the median.
        between_s, between_p99_s: from one token of a request to its next, the median, and the 99th percentile, with
            drafts of steps that add one token.
    """

    tokens_per_s: float
    first_token_s: float
    between_s: float
    between_p99_s: float


def host_seconds(of: Deployment) -> float:
    """Return the host time of an eager prefill pass, where nobody measured the user's."""
    return PASS_LAYER_S * of.dims.num_layers + PASS_EXPERTS_S * expert_layers(of.products)


def pass_seconds(of: Deployment, traffic: Traffic, requests: int, expanded: int = 0) -> float:
    """Return the seconds of an eager prefill pass of so many requests of all ranks; arguments are those of
    `pass_kernels_seconds`."""
    mine = of.per_rank(requests)
    return max(pass_kernels_seconds(of, traffic.prefix, mine * traffic.question, mine, expanded), traffic.host_s)


def pass_kernels_seconds(of: Deployment, prefix: int, tokens: int, requests: int, expanded: int = 0) -> float:
    """Return the seconds of the kernels of a prefill pass with so many tokens and requests on each rank.

    They attend with each head's keys and values, which are computed in the pass where they are not kept expanded: for
    each request, or once for all of a rank where the pass may expand for itself and that saves enough.

    Args:
        expanded: first tokens of the prefix whose keys and values are kept.
    """
    of = replace(of, prefix_sharding=False, query_tokens=1)
    arriving = Arriving(of.dp * tokens, of.dp * requests)
    seconds = predict(of, Cover(naive=prefix), 0, prefix, 0, arriving).seconds
    if again := expanded_in_pass(of, prefix, requests, expanded):
        parts = (part for part in of.products if part.name in ("w_kc", "w_vc"))
        seconds += sum(part.layers * product_seconds(of, part, again) for part in parts)
    return seconds


def expanded_in_pass(of: Deployment, prefix: int, requests: int, expanded: int) -> int:
    """Return the tokens whose keys and values a prefill pass computes, see `pass_kernels_seconds`."""
    again = prefix - expanded
    once = of.prefill_expand_tokens and (requests - 1) * again >= FEWEST_SAVED // of.cost.local_heads
    return again if once else requests * again


def mixed_seconds(of: Deployment, traffic: Traffic, requests: int, chunks: int | None) -> float:
    """Return the seconds of the new tokens of so many requests of all ranks, in decode graphs without running
    requests."""
    mine = of.per_rank(requests)
    seconds, left = 0.0, mine * traffic.question
    while left > 0:
        tokens = min(left, MOST_NEW_ALONE)
        arriving = Arriving(of.dp * tokens, of.dp * max(tokens // traffic.question, 1))
        seconds += mixed_step(of, 0, traffic.prefix, traffic.tail, arriving, chunks).seconds
        left -= tokens
    return seconds


def compared(
    of: Deployment, traffic: Traffic, chunks: int | None = None, mixed_tokens: int | None = None
) -> tuple[int, dict[str, Served]]:
    """Compare plain absorb in turns (`absorb`), the server's plan in turns (`chosen`), and mixed steps (`mixed`).

    Args:
        chunks: see `Deployment.cover`.
        mixed_tokens: that may be mixed into a step of a rank; by default as many as a server mixes.
    Returns:
        These tokens, and what comes of each way.
    Raises:
        ValueError: the GPU has no constants of a step.
    """
    prefix, tail, stock = traffic.prefix, traffic.tail, replace(of, prefill_expand_tokens=0)
    mixed_tokens = allowed(of) if mixed_tokens is None else mixed_tokens
    drafts, drafting_seconds = of.query_tokens > 1, drafting(of)

    def absorb(running: int, _: int) -> float:
        return predict(of, PLAIN, running, prefix, tail).seconds + drafting_seconds(running, prefix, tail)

    def chosen(running: int, tokens: int) -> float:
        arriving = Arriving(tokens, max(tokens // traffic.question, 1))
        seconds = mixed_step(of, running, prefix, tail, arriving, chunks).seconds
        seconds += drafting_seconds(running, prefix, tail)
        return max(seconds, PAIR_REQUEST_S * running) if drafts and tokens else seconds

    kept = of.kept_for_prefill(traffic.requests, prefix, chunks)

    def eager_pass(requests: int) -> float:
        return pass_seconds(of, traffic, requests, kept)

    def fastest_pass(requests: int) -> float:
        return min(eager_pass(requests), mixed_seconds(of, traffic, requests, chunks))

    def in_turns(step: Callable[[int, int], float], prefill: Callable[[int], float]) -> Served:
        return serve(traffic, cache(step), prefill=cache(prefill), ranks=of.dp, ahead=not traffic.host_s)

    found = {
        "absorb": in_turns(absorb, lambda requests: pass_seconds(stock, traffic, requests)),
        "chosen": in_turns(chosen, eager_pass),
    }
    if of.dp > 1 and (traffic.host_s or drafts):
        found["mixed"] = in_turns(chosen, fastest_pass)
    else:
        found["mixed"] = serve(
            traffic, cache(chosen), mixed_tokens, cache(eager_pass), of.dp, ahead=True, drafts=drafts
        )
    return mixed_tokens, found


def serve(
    traffic: Traffic,
    step: Callable[[int, int], float],
    mixed_tokens: int = 0,
    prefill: Callable[[int], float] | None = None,
    ranks: int = 1,
    client_s: float = CLIENT_S,
    *,
    ahead: bool = False,
    drafts: bool = False,
) -> Served:
    """Simulate the steps of a server.

    Args:
        step: seconds of one, of running requests and new tokens, of all ranks.
        mixed_tokens: new tokens in a step at most.
        prefill: seconds of a pass of so many requests of all ranks, as many on each; taken where more wait than
            `most_waiting`.
        ranks: of data parallelism.
        client_s: from a request's last token to the next request's arrival.
        ahead: the host chooses a step when the one before begins, as SGLang's overlapping scheduler does where no pass
            keeps it from that: a request waits for the end of that step, too. Otherwise it chooses between them.
        drafts: steps verify drafts.
    """
    draw, warm = random.Random(0), 2 * traffic.steps
    most = most_waiting(mixed_tokens, drafts=drafts)
    dealt = [traffic.requests // ranks + (rank < traffic.requests % ranks) for rank in range(ranks)]
    of = [_Rank(running, Counter(draw.randrange(warm - 2) for _ in range(running))) for running in dealt]
    now, before, began = 0.0, 0.0, 0.0
    first: Counter[float] = Counter()
    between: Counter[float] = Counter()
    while of[0].steps < warm + STEPS // ranks:
        for rank in of:
            rank.hear(before if ahead else now, traffic.question)
        if not any(rank.running or rank.waiting for rank in of):
            now = before = min(rank.sent[0] for rank in of if rank.sent)
            continue
        in_pass = [rank for rank in of if rank.wait > most] if prefill is not None else []
        decoding = [rank for rank in of if rank not in in_pass]
        running, new = sum(rank.running for rank in decoding), 0
        for rank in of:
            mixed = mixed_tokens if ranks == 1 else evened(mixed_tokens, rank.coming, rank.wait)
            rank.begun, tokens = _admit(rank.waiting, math.inf if rank in in_pass else mixed)
            rank.coming += NEWEST * (tokens - rank.coming)
            new = max(new, len(decoding) * tokens) if rank in decoding else new
        decode_s = step(running, new) if running or new else 0.0
        pass_s = prefill(ranks * max(len(rank.begun) for rank in in_pass)) if prefill and in_pass else 0.0
        before, now = now, now + max(decode_s, pass_s)
        for rank in of:
            for came in rank.begun:
                first[now - came] += 1
            # Of an answer's tokens the first is no decode step's.
            next_step = rank.steps if rank in in_pass else rank.steps + 1
            for _ in rank.begun:
                rank.ends[next_step + draw.randint(2, warm - 2) - 2] += 1
            rank.running += len(rank.begun)
            if rank in in_pass:
                rank.told[now] += len(rank.begun)
                continue
            for told, count in rank.told.items():
                between[now - told] += count
            ended = rank.ends.pop(rank.steps, 0)
            rank.running -= ended
            rank.told.clear()
            rank.told[now] = rank.running
            rank.sent.extend([now + (0 if ahead else HEARD_STEPS * decode_s) + client_s] * ended)
            rank.steps += 1
            if rank is of[0] and rank.steps == warm:
                began = now
                first.clear()
                between.clear()
    return Served(
        tokens_per_s=(first.total() + traffic.accepted * between.total()) / (now - began),
        first_token_s=percentile(first, 0.5) + client_s,
        between_s=percentile(between, 0.5) / traffic.accepted,
        between_p99_s=percentile(between, 0.99),
    )


@dataclass(eq=False)
class _Rank:
    """Simulated requests of one rank.

    Attributes:
        ends: number of requests that end, by decode step of the rank.
        told: number of running requests, by the time of their last token; waiting: of each request that waits, when it
            came and how many tokens are left of its question.
        sent: when each request arrives that is on its way; begun: when the requests came whose first token is this
            step's.
        steps: decode steps that it has run.
        coming: new tokens of a step, the mean of the last ones.
    """

    running: int
    ends: Counter[int]
    told: Counter[float] = field(default_factory=Counter)
    waiting: deque[tuple[float, int]] = field(default_factory=deque)
    sent: deque[float] = field(default_factory=deque)
    begun: list[float] = field(default_factory=list)
    steps: int = 0
    coming: float = 0.0

    def __post_init__(self) -> None:
        self.told[0.0] = self.running

    @property
    def wait(self) -> int:
        """Tokens that wait."""
        return sum(left for _, left in self.waiting)

    def hear(self, now: float, question: int) -> None:
        """Add requests that have arrived to those that wait."""
        while self.sent and self.sent[0] <= now:
            self.waiting.append((self.sent.popleft(), question))


def _admit(waiting: deque[tuple[float, int]], room: float) -> tuple[list[float], int]:
    """Take new tokens off those that wait, the first come first.

    Returns:
        When each request came whose question is taken whole, and all tokens that are taken.
    """
    begun: list[float] = []
    taken = 0
    while waiting and taken < room:
        came, left = waiting.popleft()
        now = int(min(left, room - taken))
        taken += now
        if now < left:
            waiting.appendleft((came, left - now))
        else:
            begun.append(came)
    return begun, taken


def percentile(counted: Counter[float], share: float) -> float:
    """Return the smallest value that at least so large a share of all values does not exceed; 0 of nothing."""
    below, whole = 0, counted.total()
    for value, count in sorted(counted.items()):
        below += count
        if below >= share * whole:
            return value
    return 0.0
