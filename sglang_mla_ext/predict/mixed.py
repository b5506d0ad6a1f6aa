"""Mixed steps: new tokens of short prompts are rows of the decode step; how many may be.

A new row costs what a decode row costs: products for one row more, attention to the shared prefix, which is read once
for all where it is expanded, and attention to what its own request has before it. The weights are read once for all
rows. A server asks `allowed` as it starts: it is arithmetic alone, and comes to the same on all ranks.
"""

from __future__ import annotations

import math

from sglang_mla_ext.kernels.sizes import MAX_ROWS  # plain Python
from sglang_mla_ext.predict.sharing import PLAIN
from sglang_mla_ext.predict.step import NOBODY, Arriving, Deployment, Step, predict

GRAPH_STEP = 64
"""Rows from one size of decode graph to the next, beyond SGLang's own."""
ROWS_STEP = 32
"""The bound is a multiple of it."""
LEAST_NEW, MOST_NEW = 256, 1024
"""New tokens of a step that a server allows where the user names no number, the least and the most. With few running
requests the least make a step more than twice as long, but a pass of their own would be longer still: first tokens come
sooner so."""
MOST_NEW_ALONE = 512
"""New tokens of a step that a server with DP attention allows. Such a step has no running requests with SGLang 0.5.17
or without prefill graphs. Where it has, they would wait for a step of so many new tokens in any case, and then for
their own."""
SPARE, SHARE_OF_WAITING = 1.25, 4
"""With DP attention, the factor by which a rank takes more new tokens in a step than come to it in the mean, and the
divisor of those that wait, of which it takes at least that part."""
NEWEST = 0.03
"""Weight of the newest step in the mean of new tokens that come in a step."""
MOST_STEPS, MOST_WAITING = 6, 3072
"""Mixed steps that the waiting tokens may take, and waiting tokens, at most. More would come sooner in an eager pass,
which takes as long as about so many, and serves all who wait at its end."""
MOST_STEPS_WITH_DRAFTS = 1
"""Mixed steps that the waiting tokens may take at most where steps verify drafts, on SGLang 0.5.23. A prefill pass is
in a CUDA graph there, and all first tokens come at its end. Short answers over 7,069 tokens on an H200, fa3 3,045
tokens a second and a median of 217 ms to the first one: 4,106 and 201 with 1, 4,609 and 262 with 2, 4,633 and 404 with
6."""
FEW = 128
"""New tokens of a small prefill pass, which has the weights of nearly all experts read."""
REQUESTS, PROMPT, TAIL = 128, 7069, 512
"""Running requests, tokens of their prompt and tokens of each one's tail that are assumed where a server's bound is
predicted."""
SLOWER = 2.0
"""Factor by which new tokens may lengthen a step, which is how long running requests wait for a token. A pass of its
own for as many tokens would have them wait longer."""


def mixed_step(
    of: Deployment, running: int, prefix: int, tail: int, arriving: Arriving, chunks: int | None = None
) -> Step:
    """Predict a step of running requests and new tokens, which share a prefix.

    The plan is that of so many requests, newcomers included: it does not count their rows. All rows pass the head,
    though logits are wanted of each newcomer's last alone.

    Args:
        running: of all data-parallel ranks; tail: tokens of each after the prefix.
        chunks: see `Deployment.cover`.
    Raises:
        ValueError: the GPU has no constants of a step.
    """
    newcomers = arriving.requests if arriving.tokens else 0
    cover = of.cover(of.per_rank(running + newcomers), prefix, chunks)
    return predict(of, cover, running, prefix, tail, arriving)


def pass_layer_seconds(of: Deployment) -> float:
    """Return the seconds that a prefill pass of few tokens in a CUDA graph takes per attention layer beside attention:
    nearly all of it reads weights, as no step that decodes anyway has to.

    Raises:
        ValueError: the GPU has no constants of a step.
    """
    return predict(of, PLAIN, 0, 0, 0, Arriving(FEW * of.dp, of.dp)).rest / of.dims.num_layers


def allowed(of: Deployment, *, slower: float = SLOWER) -> int:
    """Return the new tokens that a server mixes into a step unless it is told. With DP attention the most that a step
    without running requests has."""
    return MOST_NEW_ALONE if of.dp > 1 else max(LEAST_NEW, bound(of, REQUESTS, PROMPT, TAIL, slower=slower))


def evened(most: int, coming: float, waiting: float) -> int:
    """Return how many new tokens a rank of DP attention mixes into its next step; a multiple of `GRAPH_STEP`, or `most`
    itself.

    The step has as many rows on every rank as the rank with the most has, and costs as much on all of them. So a rank
    takes hardly more than what comes to it in a step in the mean. 512 short answers over 7,069 tokens on eight H200s:
    5,417 tokens a second by this rule, 4,756 where each rank takes up to 512 tokens, both predicted.

    Args:
        most: that it may mix.
        coming: that come to it in a step, in the mean of the last ones; waiting: that wait.
    """
    wanted = max(LEAST_NEW, SPARE * coming, waiting / SHARE_OF_WAITING)
    return min(most, math.ceil(wanted / GRAPH_STEP) * GRAPH_STEP)


def most_waiting(tokens: int, *, drafts: bool) -> int:
    """Return how many new tokens may wait for mixed steps; where more do, they have a pass of their own.

    Args:
        tokens: of a step; drafts: whether it verifies drafts.
    """
    return MOST_STEPS_WITH_DRAFTS * tokens if drafts else min(MOST_STEPS * tokens, MOST_WAITING)


def bound(
    of: Deployment, running: int, prefix: int, tail: int, chunks: int | None = None, *, slower: float = SLOWER
) -> int:
    """Return the new tokens that may be mixed into a rank's step: the most with which it is predicted to take at most
    `slower` times as long as without them; a multiple of `ROWS_STEP`.

    They are taken for one newcomer's, whose rows attend to more than those of several.

    Args:
        running: requests of all data-parallel ranks, as in `mixed_step`.
    Returns:
        At most `MOST_NEW`; 0 where not even `ROWS_STEP` may, running requests have more than `MAX_ROWS` rows, or the
        GPU has no constants of a step.
    """
    if of.gpu.step is None or of.gpu.sheet is None or of.per_rank(running) * of.query_tokens > MAX_ROWS:
        return 0
    longest = slower * mixed_step(of, running, prefix, tail, NOBODY, chunks).seconds
    for tokens in range(MOST_NEW, 0, -ROWS_STEP):
        arriving = Arriving(tokens * of.dp, of.dp)
        if mixed_step(of, running, prefix, tail, arriving, chunks).seconds <= longest:
            return tokens
    return 0
