"""Measure what quantisation costs the demo model: perplexity, dictionary questions and look-ups for each way to serve
it.

In all three, a prefix is prefilled in BF16 and stored as the implementation stores it; scored tokens are decode rows:

- prose: windows of held-out documents (examination.windows). The prefix is the part before the predicted tokens. The
  first window of a document has nothing before them, so its first half is the prefix, and is not scored.
- dictionary questions and look-ups: the prefix is the system prompt; question and answer follow as decode rows. (A
  server would prefill the question in BF16, so this is the harder test.)

Intervals hold 95 % and are bootstrapped over documents or prompts; what is compared with sglang_bf16 is resampled
together with it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from demo_model.checkpoint import ASSISTANT, USER
from rich.progress import track
from scipy.stats import bootstrap

from lab.accuracy.served import BASELINE, IMPLS, Impl, Query, Rows, Served, ServedLayer, attend
from lab.training.batches import EOS_ID, Data
from lab.training.chats import dictionary_cases, lookup_cases
from lab.training.examination import LOOKUP_TOKENS, STRIDE, WINDOW, windows
from sglang_mla_ext.kernels.reference.attention import errors

RESAMPLES = 2000
PERCENTILES = {"abs_p50": 50, "abs_p90": 90, "abs_p99": 99, "abs_p999": 99.9, "abs_max": 100}
LAST_ROWS = 64
"""Query rows whose attention is compared layer by layer."""

Record = tuple[str, dict[str, Any], dict[str, float]]
"""Impl, case and metrics."""


@dataclass(frozen=True)
class Plan:
    """Amount that is examined."""

    impls: tuple[str, ...] = tuple(IMPLS)
    prose_tokens: int = 30_000  # scored ones, about
    cases: int = 100  # dictionary questions of each kind
    lengths: dict[int, int] = field(default_factory=lambda: dict.fromkeys(LOOKUP_TOKENS, 50))
    """Prompts by nominal length of look-ups."""
    questions: int = 4  # for each prompt of look-ups
    activation_prompts: int = 2  # whose activations are looked at layer by layer, of the longest length
    seed: int = 1

    def __post_init__(self) -> None:
        if unknown := {*self.impls, *self.lengths} - {*IMPLS, *LOOKUP_TOKENS}:
            raise ValueError(f"unknown: {unknown}; there are {', '.join(IMPLS)}, and lengths {list(LOOKUP_TOKENS)}")

    @property
    def chosen(self) -> dict[str, Impl]:
        """The chosen implementations, and the baseline."""
        return {name: impl for name, impl in IMPLS.items() if name == BASELINE or name in self.impls}


class Window(NamedTuple):
    """A part of a document."""

    document: int
    prefix: list[int]
    tokens: list[int]  # the first is the last one before those that are predicted


class Question(NamedTuple):
    tokens: list[int]
    answers: list[list[int]]  # accepted ones, with their </s>


class Prompt(NamedTuple):
    prefix: list[int]  # the system prompt
    questions: list[Question]


def prose_windows(data: Data, most: int, seed: int) -> list[Window]:
    """Windows of about `most` scored tokens: all documents' first ones, in random order, then their second ones, ..

    So a small sample covers many documents, and no long document outweighs the others.
    """
    order = list(range(len(data.held_out)))
    random.Random(f"{seed}/prose").shuffle(order)
    cuts = (cut(index, data.held_out.document(index).tolist()) for index in order)
    found: list[Window] = []
    scored = 0
    for window in filter(None, chain.from_iterable(zip_longest(*cuts))):
        if scored >= most:
            break
        found.append(window)
        scored += len(window.tokens) - 1
    return found


def cut(index: int, document: list[int]) -> Iterator[Window]:
    """The windows of a document, see the module."""
    for begin, first, end in windows(len(document)):
        first = max(first, end // 2) if first == 1 else first
        if first - 1 > begin and end > first:
            yield Window(index, document[begin : first - 1], document[first - 1 : end])


def lookup_prompts(data: Data, length: int, plan: Plan) -> list[Prompt]:
    """The examination's prompts (see examination.py), each with several questions about its table."""
    tokens, material, found = LOOKUP_TOKENS[length], data.material(held_out=True), []
    cases = lookup_cases(material, plan.lengths[length], tokens, lambda text: len(data.encode(text)), plan.seed)
    for index, case in enumerate(cases):
        table = case.table
        assert table is not None
        rng = random.Random(f"{plan.seed}/{tokens}/{index}/questions")
        names = rng.sample(list(table.facts), min(plan.questions, len(table.facts)))
        asked = {name: f"{USER}{table.question(rng, name, first=True)}{ASSISTANT}" for name in names}
        questions = [question_of(data, text, [table.facts[name]]) for name, text in asked.items()]
        found.append(Prompt(data.encode(case.prompt.rpartition(USER)[0]), questions))
    return found


def dictionary_prompts(data: Data, plan: Plan) -> list[Prompt]:
    """Return prompts with one question each."""
    found = []
    for case in chain(*dictionary_cases(data.words, plan.cases, plan.seed).values()):
        system, mark, question = case.prompt.rpartition(USER)
        found.append(Prompt(data.encode(system), [question_of(data, mark + question, case.accepted)]))
    return found


def question_of(data: Data, text: str, answers: Sequence[str]) -> Question:
    """Return a question and its accepted answers as tokens."""
    return Question(data.encode(text), [[*data.encode(answer), EOS_ID] for answer in answers])


def score(served: Served, impl: Impl, rows: list[Rows], asked: Window | Prompt) -> float:
    """Return the sum of losses of a window's tokens, or the questions of a prompt that greedy decoding answers right.

    Args:
        rows: of the prefix, from `Served.prefill`.
    """
    kept, start = served.keep(impl, rows), len(asked.prefix)
    if isinstance(asked, Window):
        logits = served.decode(impl, kept, start, asked.tokens[:-1])
        targets = torch.tensor(asked.tokens[1:], device=logits.device)
        return float(F.cross_entropy(logits.double(), targets, reduction="sum"))

    def is_right(question: Question, answer: list[int]) -> bool:
        logits = served.decode(impl, kept, start, question.tokens + answer[:-1])
        return logits[len(question.tokens) - 1 :].argmax(-1).tolist() == answer

    return sum(any(is_right(question, answer) for answer in question.answers) for question in asked.questions)


def compared(
    sums: dict[str, np.ndarray], counts: np.ndarray, plan: Plan, case: dict[str, Any], metric: str
) -> Iterator[Record]:
    """A record for each implementation, with the difference to sglang_bf16: in percent of a perplexity, and in
    percentage points of an accuracy.

    Args:
        sums: of losses or right answers, for each document or prompt; counts: tokens or questions.
        metric: perplexity, or the name of an accuracy.
    """
    prose = metric == "perplexity"
    difference_name = "perplexity_change_pct" if prose else f"{metric}_diff_points"

    def own(of: np.ndarray, counts: np.ndarray, axis: int = -1) -> np.ndarray:
        mean = of.sum(axis) / counts.sum(axis)
        return np.exp(mean) if prose else mean

    def difference(of: np.ndarray, base: np.ndarray, counts: np.ndarray, axis: int = -1) -> np.ndarray:
        mean = (of - base).sum(axis) / counts.sum(axis)
        return 100 * (np.exp(mean) - 1 if prose else mean)

    def estimate(name: str, statistic: Callable[..., np.ndarray], *data: np.ndarray) -> dict[str, float]:
        """A statistic and the ends of its interval; the elements of the arrays are drawn together."""
        options = dict(paired=True, vectorized=True, n_resamples=RESAMPLES, method="percentile")
        ends = bootstrap(data, statistic, **options, rng=np.random.default_rng(plan.seed)).confidence_interval
        return {name: float(statistic(*data)), f"{name}_low": float(ends.low), f"{name}_high": float(ends.high)}

    for name, of_impl in sums.items():
        metrics = estimate(metric, own, of_impl, counts)
        if name != BASELINE:
            metrics |= estimate(difference_name, difference, of_impl, sums[BASELINE], counts)
        yield name, dict(study="demo", **case), metrics


@dataclass(frozen=True)
class Task:
    """Windows that are scored, or prompts whose questions are asked.

    Attributes:
        metric: perplexity, or the name of an accuracy.
        asked: windows or prompts, each with its place in `counts`.
        counts: tokens or questions of each document or prompt.
    """

    case: dict[str, Any]
    metric: str
    asked: list[tuple[int, Any]]
    counts: np.ndarray


def tasks_of(data: Data, plan: Plan) -> Iterator[Task]:
    """Yield everything that a plan asks."""
    if plan.prose_tokens:
        found = prose_windows(data, plan.prose_tokens, plan.seed)
        places, documents = pd.factorize(np.array([window.document for window in found]))
        counts = np.bincount(places, weights=[len(window.tokens) - 1 for window in found])
        case = dict(task="prose", tokens=int(counts.sum()), documents=len(documents), window=WINDOW, stride=STRIDE)
        yield Task(case, "perplexity", list(zip(places, found, strict=True)), counts)
    questions: list[tuple[dict[str, Any], list[Prompt]]] = []
    if plan.cases:
        questions.append((dict(task="dictionary"), dictionary_prompts(data, plan)))
    questions += [(dict(task="lookup", length=length), lookup_prompts(data, length, plan)) for length in plan.lengths]
    for case, prompts in questions:
        counts = np.array([float(len(prompt.questions)) for prompt in prompts])
        case = case | dict(prompts=len(prompts), questions=int(counts.sum()))
        yield Task(case, f"{case['task']}_acc", list(enumerate(prompts)), counts)


def attention_in_float64(layer: ServedLayer, query: Query, rows: Rows, visible: torch.Tensor) -> torch.Tensor:
    """The truth for a layer's inputs, `[T, H, dv]`."""
    absorbed = torch.einsum("thd,hdr->thr", query.nope.double(), layer.w_kc.double())
    q, keys = torch.cat([absorbed, query.rope.double()], dim=-1), torch.cat(rows, dim=-1).double()[:, None]
    out, _ = attend(q, keys, keys[..., : absorbed.shape[-1]], visible, layer.softmax_scale, None)
    return torch.einsum("thr,hrd->thd", out, layer.w_vc.double())


def layer_study(served: Served, data: Data, plan: Plan) -> Iterator[Record]:
    """Real activations, layer by layer: their range, and the error of attention over them (SnapMLA, figures 3 and 4).

    The last rows of long prompts over all their rows; every implementation gets the same BF16 inputs.
    """
    prompts = lookup_prompts(data, max(plan.lengths), plan)[: plan.activation_prompts]
    parts: dict[tuple[int, str], list[np.ndarray]] = {}
    outs: dict[tuple[int, str], list[torch.Tensor]] = {}
    for prompt in track(prompts, "activations"):
        n, last = len(prompt.prefix), min(LAST_ROWS, len(prompt.prefix) // 2)
        visible = torch.arange(n - last + 1, n + 1, device=served.network.device)
        for index, (layer, query, rows) in enumerate(served.walk(prompt.prefix)):
            for part, values in rows._asdict().items():
                parts.setdefault((index, part), []).append(values.abs().float().cpu().numpy())
            query = Query(*(part[-last:] for part in query))
            prefix, own = Rows(*(part[:-last] for part in rows)), Rows(*(part[-last:] for part in rows))
            outs.setdefault((index, "truth"), []).append(attention_in_float64(layer, query, rows, visible))
            for name, impl in plan.chosen.items():
                out = impl.attend(layer, query, impl.keep(layer, prefix), own, visible)
                outs.setdefault((index, name), []).append(out)
    sizes = dict(tokens=len(prompts[0].prefix), prompts=len(prompts))
    for (index, part), values in parts.items():
        found = np.percentile(np.concatenate(values), list(PERCENTILES.values()))
        case = dict(study="demo_ranges", layer=index, part={"latent": "content", "rope": "rotary"}[part], **sizes)
        yield BASELINE, case, dict(zip(PERCENTILES, map(float, found), strict=True))
    for (index, name), of_layer in outs.items():
        if name != "truth":
            found = errors(torch.cat(of_layer), torch.cat(outs[index, "truth"]))
            case = dict(study="demo_layers", layer=index, rows=LAST_ROWS, **sizes)
            yield name, case, dict(rel_err=found.rel_l2, cos_dist=found.cos_dist)


def demo(served: Served, data: Data, plan: Plan) -> Iterator[Record]:
    """The whole study, without the parts of which nothing is asked."""
    for task in tasks_of(data, plan):
        sums = {name: np.zeros(len(task.counts)) for name in plan.chosen}
        for place, asked in track(task.asked, " ".join(map(str, task.case.values()))):
            rows = served.prefill(asked.prefix)
            for name, impl in plan.chosen.items():
                sums[name][place] += score(served, impl, rows, asked)
        yield from compared(sums, task.counts, plan, task.case, task.metric)
    if plan.lengths and plan.activation_prompts:
        yield from layer_study(served, data, plan)
