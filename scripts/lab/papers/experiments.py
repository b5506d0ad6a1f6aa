"""The papers' experiments that need kernels only: their cases, and what is timed on each.

Data alone; bench/measured.py measures it, claims.py compares it. What a paper does not print (a batch, a length) is
chosen here and said beside the choice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from bench.cases import Case

from sglang_mla_ext.configs import read_config
from sglang_mla_ext.kernels.absorb.stacking import STACKED_HEADS
from sglang_mla_ext.prefix.planner.model_dims import ModelDims

REQUESTS = (64, 128, 256, 512, 1024)  # TyphoonMLA, section 4
MODELS = ("deepseek-v3", "kimi-k2")
PROMPTS = ("A", "B", "C")
QUESTIONS = ("mmlu", "gsm8k", "simpleqa")
STAGES = Case(4096, 512, 64, ())  # TyphoonMLA, figure 4: Kimi-K2's heads
STAGE_REQUESTS = (128, 256, 512, 1024)  # "batch sizes smaller than 128 are omitted"
RANKS = {"DP1/TP8": 16, "DP4/TP2": 64, "DP8/TP1": 128}
"""SnapMLA, figure 5: DeepSeek's heads on one of eight ranks, by deployment."""
RANK_CONTEXTS = tuple(1024 * k for k in (16, 32, 64, 128))
SNAPMLA_REQUESTS = 32
"""Number of requests in its figure 6. Figure 5 has the batch that its servers reached, which is not printed."""
SNAPMLA_HEADS = (16, 32, 64, 128)
SNAPMLA_CONTEXTS = (8192, 32768)  # of figure 6, which prints none
ETAP_CONTEXTS = tuple(2**power for power in range(9, 17))
ETAP_REQUESTS = (16, 32)
AMLA_CONTEXTS = (1024, 2048, 3072, 4096, 6144, 16384)
AMLA_REQUESTS = 96


class Implementation(NamedTuple):
    """Kernel or part that is timed.

    Attributes:
        impl, part, dtype: of its records.
        label: in tables and plots.
    """

    impl: str
    part: str
    dtype: str
    label: str

    def supports(self, case: Case) -> bool:
        """Return whether there is such a kernel for a case: only few heads of several requests share a tile."""
        return self.impl != "hybrid_mla_bf16" or case.heads in STACKED_HEADS


FLASHMLA_BF16 = Implementation("flashmla_bf16", "all", "bf16", "FlashMLA BF16")
FLASHMLA_FP8 = Implementation("flashmla_fp8", "all", "fp8", "FlashMLA FP8")
FLASHINFER = Implementation("flashinfer_mla", "all", "bf16", "FlashInfer BF16")
TYPHOON_PARTS = Implementation("typhoon_parts", "all", "bf16", "TyphoonMLA's parts BF16, no merge")
OURS_BF16 = Implementation("hybrid_mla", "all", "bf16", "ours BF16")
OURS_FP8_PREFIX = Implementation("hybrid_mla", "all", "fp8", "ours, FP8 prefix")
OURS_STACKED = Implementation("hybrid_mla_bf16", "all", "bf16", "ours BF16, stacked")
OURS_FP8 = Implementation("hybrid_mla", "all", "fp8", "ours FP8")

STAGE_1 = Implementation("hybrid_mla", "naive", "bf16", "stage 1")
STAGE_1_FP8 = Implementation("hybrid_mla", "naive", "fp8", "stage 1, FP8 prefix")
STAGE_2 = Implementation("flashmla_bf16", "tail", "bf16", "stage 2")
ABSORB_ONLY = FLASHMLA_BF16._replace(label="absorb only")

SHARED = (FLASHMLA_BF16, FLASHMLA_FP8, FLASHINFER, TYPHOON_PARTS, OURS_BF16, OURS_FP8_PREFIX)
PRIVATE = (FLASHMLA_BF16, FLASHMLA_FP8, FLASHINFER, OURS_STACKED, OURS_FP8)
STAGED = (STAGE_1, STAGE_1_FP8, STAGE_2, ABSORB_ONLY)

Key = tuple[str, str, str]
NamedCase = tuple[Case, Mapping[str, str]]


def key(impl: str, part: str, case: Mapping[str, Any]) -> Key:
    """Return what tells measurements apart; case: as a record has it."""
    return impl, part, json.dumps(dict(case), sort_keys=True)


class Cell(NamedTuple):
    """One measurement of an experiment.

    Attributes:
        conditions: what names the case beside its numbers: model, prompt, questions, ranks.
    """

    experiment: str
    of: Implementation
    case: Case
    conditions: Mapping[str, str]

    def fields(self) -> dict[str, Any]:
        """The `case` of its record."""
        return {"experiment": self.experiment, **self.conditions, **self.case.fields(self.of.dtype)}

    @property
    def key(self) -> Key:
        return key(self.of.impl, self.of.part, self.fields())


class Experiment(NamedTuple):
    """One figure or table of a paper.

    Attributes:
        cases: with what names them, see `Cell`.
    """

    title: str
    cases: Sequence[NamedCase]
    implementations: tuple[Implementation, ...]

    def cells(self, name: str) -> Iterator[list[Cell]]:
        """The measurements of each case."""
        for case, conditions in self.cases:
            yield [Cell(name, of, case, conditions) for of in self.implementations if of.supports(case)]


def tail_tokens(questions: str, model: str) -> int:
    """Private tokens of a request in the middle of its answer, by the means of a dataset: the question and half of the
    answer."""
    of_model = read_config("workloads", questions)["models"][model]
    return round(of_model["prompt_tokens"]["mean"] + of_model["generated_tokens"]["mean"] / 2)


def _figure_3() -> Iterator[NamedCase]:
    prompts = read_config("workloads", "system_prompts")["tokens"]
    for model, questions, prompt, requests in product(MODELS, QUESTIONS, PROMPTS, REQUESTS):
        heads, tail = ModelDims.of(model).num_heads, tail_tokens(questions, model)
        names = {"model": model, "questions": questions, "prompt": prompt}
        yield Case(prompts[prompt], tail, heads, (requests,)), names


def _private(
    tokens: Iterable[int], heads: Iterable[int], requests: Iterable[int], query_tokens: Iterable[int] = (1,)
) -> list[NamedCase]:
    """Requests that share nothing."""
    cases = product(query_tokens, requests, tokens, heads)
    return [(Case(0, length, count, (), batch, s_q=s_q), {}) for s_q, batch, length, count in cases]


EXPERIMENTS = {
    "typhoonmla-figure-3": Experiment("TyphoonMLA, figure 3", list(_figure_3()), SHARED),
    "typhoonmla-figure-4": Experiment(
        "TyphoonMLA, figure 4", [(replace(STAGES, sizes=(requests,)), {}) for requests in STAGE_REQUESTS], STAGED
    ),
    "snapmla-figure-5": Experiment(
        "SnapMLA, figure 5",
        [
            (case, {"ranks": ranks})
            for ranks, heads in RANKS.items()
            for case, _ in _private(RANK_CONTEXTS, [heads], [SNAPMLA_REQUESTS])
        ],
        PRIVATE,
    ),
    "snapmla-figure-6": Experiment(
        "SnapMLA, figure 6", _private(SNAPMLA_CONTEXTS, SNAPMLA_HEADS, [SNAPMLA_REQUESTS], (1, 2)), PRIVATE
    ),
    "etap-figure-1": Experiment("FlashMLA-ETAP, figure 1", _private(ETAP_CONTEXTS, [16], ETAP_REQUESTS), PRIVATE),
    "amla-table-5": Experiment("AMLA, table 5", _private(AMLA_CONTEXTS, [128], [AMLA_REQUESTS], (1, 2)), PRIVATE),
}
