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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from demo_model.checkpoint import ASSISTANT, USER
from rich.progress import track
from scipy.stats import bootstrap

from lab.accuracy.served import BASELINE, IMPLS, Impl, Query, Rows, Served, ServedLayer, attend
from lab.training.batches import EOS_ID, Data
from lab.training.chats import dictionary_cases, lookup_cases
from lab.training.examination import LOOKUP_TOKENS, windows
from sglang_mla_ext.kernels.reference.attention import errors

WINDOW, STRIDE = 4096, 2048
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
        unknown = [name for name in self.impls if name not in IMPLS] + [
            n for n in self.lengths if n not in LOOKUP_TOKENS
        ]
        if unknown:
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
    system: list[int]
    questions: list[Question]


def prose_windows(data: Data, most: int, seed: int) -> list[Window]:
    """Windows of about `most` scored tokens: all documents' first ones, in random order, then their second ones, ..

    So a small sample covers many documents, and no long document outweighs the others.
    """
    rng, prose = random.Random(f"{seed}/prose"), data.held_out
    order = list(range(len(prose)))
    rng.shuffle(order)
    cuts = (cut(index, prose.document(index).tolist()) for index in order)
    found: list[Window] = []
    scored = 0
    for window in filter(None, chain.from_iterable(zip_longest(*cuts))):
        if scored >= most:
            break
        found.append(window)
        scored += len(window.tokens) - 1
    return found


def places_of(found: Sequence[Window]) -> tuple[dict[int, int], np.ndarray]:
    """The documents of windows, each with its place in arrays; and `[documents]` tokens of each that are scored."""
    counts: Counter[int] = Counter()
    for window in found:
        counts[window.document] += len(window.tokens) - 1
    return {document: place for place, document in enumerate(counts)}, np.array([*counts.values()], dtype=float)


def cut(index: int, document: list[int]) -> Iterator[Window]:
    """The windows of a document, see the module."""
    for begin, first, end in windows(len(document), WINDOW, STRIDE):
        first = max(first, end // 2) if first == 1 else first
        if first - 1 > begin and end > first:
            yield Window(index, document[begin : first - 1], document[first - 1 : end])


def lookup_prompts(data: Data, length: int, plan: Plan) -> list[Prompt]:
    """The examination's prompts (see examination.py), each with several questions about its table."""
    tokens, material, found = LOOKUP_TOKENS[length], data.material(held_out=True), []
    cases = lookup_cases(material, plan.lengths[length], tokens, lambda text: len(data.encode(text)), plan.seed)
    for index, case in enumerate(cases):
        system = case.prompt.rpartition(USER)[0]
        table = case.table
        assert table is not None
        rng = random.Random(f"{plan.seed}/{tokens}/{index}/questions")
        questions = [
            Question(
                data.encode(f"{USER}{table.question(rng, name, first=True)}{ASSISTANT}"),
                [[*data.encode(table.facts[name]), EOS_ID]],
            )
            for name in rng.sample(list(table.facts), min(plan.questions, len(table.facts)))
        ]
        found.append(Prompt(data.encode(system), questions))
    return found


def dictionary_prompts(data: Data, plan: Plan) -> list[Prompt]:
    """Return prompts with one question each."""
    found = []
    for case in (case for cases in dictionary_cases(data.words, plan.cases, plan.seed).values() for case in cases):
        system, mark, question = case.prompt.rpartition(USER)
        answers = [[*data.encode(answer), EOS_ID] for answer in case.accepted]
        found.append(Prompt(data.encode(system), [Question(data.encode(mark + question), answers)]))
    return found


def losses(served: Served, impl: Impl, rows: list[Rows], window: Window) -> float:
    """Sum over the predicted tokens of a window."""
    logits = served.decode(impl, served.keep(impl, rows), len(window.prefix), window.tokens[:-1])
    targets = torch.tensor(window.tokens[1:], device=logits.device)
    return float(F.cross_entropy(logits.double(), targets, reduction="sum"))


def right(served: Served, impl: Impl, rows: list[Rows], prompt: Prompt) -> int:
    """Questions that greedy decoding answers with one of the accepted answers."""
    kept, start = served.keep(impl, rows), len(prompt.system)

    def is_right(question: Question) -> bool:
        begin = len(question.tokens) - 1
        found = (served.decode(impl, kept, start, question.tokens + answer[:-1])[begin:] for answer in question.answers)
        return any(logits.argmax(-1).tolist() == answer for logits, answer in zip(found, question.answers, strict=True))

    return sum(is_right(question) for question in prompt.questions)


def mean_of(sums: np.ndarray, counts: np.ndarray, axis: int = -1) -> np.ndarray:
    return sums.sum(axis) / counts.sum(axis)


def perplexity_of(sums: np.ndarray, counts: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.exp(mean_of(sums, counts, axis))


def change_of(sums: np.ndarray, base: np.ndarray, counts: np.ndarray, axis: int = -1) -> np.ndarray:
    """Return the change of perplexity in percent."""
    return 100 * (np.exp(mean_of(sums - base, counts, axis)) - 1)


def points_of(sums: np.ndarray, base: np.ndarray, counts: np.ndarray, axis: int = -1) -> np.ndarray:
    """Difference of accuracies in percentage points."""
    return 100 * mean_of(sums - base, counts, axis)


def estimate(name: str, statistic: Callable[..., np.ndarray], seed: int, *data: np.ndarray) -> dict[str, float]:
    """A statistic and the ends of its interval; the elements of the arrays are drawn together."""
    drawn = bootstrap(
        data,
        statistic,
        paired=True,
        vectorized=True,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    return {name: float(statistic(*data)), f"{name}_low": float(drawn.low), f"{name}_high": float(drawn.high)}


def compared(
    sums: dict[str, np.ndarray], counts: np.ndarray, plan: Plan, case: dict[str, Any], metric: str
) -> Iterator[Record]:
    """A record for each implementation, with the difference to sglang_bf16.

    Args:
        sums: of losses or right answers, for each document or prompt; counts: tokens or questions.
        metric: perplexity, or the name of an accuracy.
    """
    prose = metric == "perplexity"
    own, difference = (perplexity_of, change_of) if prose else (mean_of, points_of)
    difference_name = "perplexity_change_pct" if prose else f"{metric}_diff_points"
    for name, of_impl in sums.items():
        metrics = estimate(metric, own, plan.seed, of_impl, counts)
        if name != BASELINE:
            metrics |= estimate(difference_name, difference, plan.seed, of_impl, sums[BASELINE], counts)
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
        places, counts = places_of(found)
        case = dict(task="prose", tokens=int(counts.sum()), documents=len(places), window=WINDOW, stride=STRIDE)
        yield Task(case, "perplexity", [(places[window.document], window) for window in found], counts)
    questions: list[tuple[dict[str, Any], list[Prompt]]] = []
    if plan.cases:
        questions.append((dict(task="dictionary"), dictionary_prompts(data, plan)))
    questions += [(dict(task="lookup", length=length), lookup_prompts(data, length, plan)) for length in plan.lengths]
    for case, prompts in questions:
        counts = np.array([float(len(prompt.questions)) for prompt in prompts])
        case = case | dict(prompts=len(prompts), questions=int(counts.sum()))
        yield Task(case, f"{case['task']}_acc", list(enumerate(prompts)), counts)


def study(served: Served, plan: Plan, task: Task) -> Iterator[Record]:
    """Score the windows, or ask the questions, of one task."""
    sums = {name: np.zeros(len(task.counts)) for name in plan.chosen}
    score: Callable[..., float] = losses if task.metric == "perplexity" else right
    for place, asked in track(task.asked, " ".join(map(str, task.case.values()))):
        rows = served.prefill(asked.prefix if isinstance(asked, Window) else asked.system)
        for name, impl in plan.chosen.items():
            sums[name][place] += score(served, impl, rows, asked)
    yield from compared(sums, task.counts, plan, task.case, task.metric)


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
        n, last = len(prompt.system), min(LAST_ROWS, len(prompt.system) // 2)
        visible = torch.arange(n - last + 1, n + 1, device=served.network.frequencies.device)
        for index, (layer, query, rows) in enumerate(served.walk(prompt.system)):
            for part, values in rows._asdict().items():
                parts.setdefault((index, part), []).append(values.abs().float().cpu().numpy())
            query = Query(*(part[-last:] for part in query))
            prefix, own = Rows(*(part[:-last] for part in rows)), Rows(*(part[-last:] for part in rows))
            outs.setdefault((index, "truth"), []).append(attention_in_float64(layer, query, rows, visible))
            for name, impl in plan.chosen.items():
                out = impl.attend(layer, query, impl.keep(layer, prefix), own, visible)
                outs.setdefault((index, name), []).append(out)
    sizes = dict(tokens=len(prompts[0].system), prompts=len(prompts))
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
        yield from study(served, plan, task)
    if plan.lengths and plan.activation_prompts:
        yield from layer_study(served, data, plan)
