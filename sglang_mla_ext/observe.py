"""Metrics that a user can see: counters, the entry in `/server_info`, and the same as Prometheus metrics.

One name for one thing: a key of `/server_info`'s `hybrid_mla` entry is the metric `sglang:hybrid_mla_<key>`, with
`_total` behind it where it counts.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.reasons import Fallback
from sglang_mla_ext.segment import Mode

if TYPE_CHECKING:
    from sglang_mla_ext.prefix.segments import ShownSegment

logger = logging.getLogger(__name__)

SHADOW_ERRORS = (1e-5, 1e-4, 1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 3e-2, 5e-2, 0.1, 0.15, 0.3, 1.0)
"""Bounds of the histogram's buckets; those of the shadow check are among them."""


def _total(help: str) -> int:
    """Return a field that counts from 0."""
    return field(default=0, metadata={"help": help})


@dataclass
class Counters:
    """Totals since the server started; a field's `help` describes it, as a metric and in the status schema."""

    steps_naive: int = _total("decode steps in which at least one group attended to an expanded prefix.")
    steps_grouped: int = _total("decode steps in which at least one group attended by grouped absorb.")
    steps_absorb: int = _total("decode steps of plain absorb only.")
    steps_verify: int = _total(
        "of steps_naive, steps_grouped and steps_absorb, those that verify drafts (speculative decoding)."
    )
    steps_mixed: int = _total("of steps_naive, steps_grouped and steps_absorb, those with new tokens mixed in.")
    prefills_mixed: int = _total("passes of new tokens alone that ran as rows of a decode step.")
    tokens_mixed: int = _total("new tokens of steps_mixed and prefills_mixed.")
    not_mixed: Counter[str] = field(
        default_factory=Counter, metadata={"help": "by reason, prefill passes that were not mixed."}
    )
    steps_sharded: int = _total(
        "steps in which this rank and the others attended to expanded prefixes for each other's requests; it may have "
        "had none itself."
    )
    not_sharded: Counter[str] = field(
        default_factory=Counter,
        metadata={
            "help": "by reason, steps of running requests in which they did not, with `--hybrid-mla-prefix-sharding`."
        },
    )
    rows_as_prefill: int = _total(
        "rows of decode or verify steps that SGLang computed as prefill, because another data-parallel rank "
        "prefilled: they shared nothing, whatever was planned."
    )
    prefills_naive: int = _total("prefill steps in which at least one request attended to an expanded prefix.")
    prefill_tokens_saved: int = _total(
        "cached tokens whose keys per head were not computed again for a request's new tokens, because they are "
        "expanded: in prefill and mixed steps, summed over requests."
    )
    prefill_tokens_expanded: int = _total(
        "cached tokens that prefill steps expanded for their requests together, and did not keep "
        "(`--hybrid-mla-prefill-expand-tokens`)."
    )
    expansions: int = _total("shared ranges of tokens whose expansion was completed.")
    expanded_tokens: int = _total("tokens expanded.")
    evictions: int = _total("chunks of expanded tokens dropped, for whatever reason.")
    fallbacks: Counter[str] = field(
        default_factory=Counter,
        metadata={"help": "by reason, how often an operation of the extension failed or could not run."},
    )
    max_group_size: int = _total("the largest group so far.")
    max_depth: int = _total("the most groups that a request was in so far, one below the other.")
    shared_tokens_read: int = _total("prefix tokens that groups read, once for each group and step.")
    shared_tokens_saved: int = _total("prefix tokens that the groups' other requests did not have to read again.")
    shadow_checks: int = _total("steps that the shadow check computed again (`--hybrid-mla-verify-interval`).")
    shadow_failures: int = _total("of shadow_checks, steps that were not what plain absorb gives.")
    forward_passes: int = _total("of any kind, whether or not there was anything to plan.")
    plan_seconds: float = field(
        default=0.0,
        metadata={"help": "the host's time for planning forward passes, without waiting for other ranks."},
    )

    def __post_init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def count_step(self, plan: Plan, *, verifies: bool = False) -> None:
        """Count one decode step; one with groups of both kinds counts for both.

        Args:
            verifies: it verifies drafts.
        """
        self.steps_verify += verifies
        self.steps_naive += bool(plan.of_mode(Mode.NAIVE))
        self.steps_grouped += bool(plan.of_mode(Mode.GROUPED_ABSORB))
        self.steps_absorb += not plan.segments
        self.max_depth = max(self.max_depth, plan.depth)
        for segment in plan.segments:
            self.max_group_size = max(self.max_group_size, len(segment.rows))
            self.shared_tokens_read += segment.tokens
            self.shared_tokens_saved += segment.tokens * (len(segment.rows) - 1)

    def count_pass(self, plan_seconds: float) -> None:
        """Count one forward pass, and how long the host took to plan it."""
        self.forward_passes += 1
        self.plan_seconds += plan_seconds

    def count_mixed(self, plan: Plan, requests: int, decoding: int, new_tokens: int, *, verifies: bool = False) -> None:
        """Count one mixed pass; without requests that decode it is no decode step.

        Args:
            requests: of the pass; decoding: of these, the last so many decode.
            new_tokens: of the others; verifies: the step verifies drafts.
        """
        if decoding:
            self.count_step(plan, verifies=verifies)
        self.steps_mixed += decoding > 0
        self.prefills_mixed += not decoding
        self.tokens_mixed += new_tokens
        for segment in plan.of_mode(Mode.NAIVE):
            self.prefill_tokens_saved += segment.tokens * sum(row < requests - decoding for row in segment.rows)

    def count_prefill(self, covered: Sequence[int], transient: int = 0) -> None:
        """Count one prefill step with expanded parts.

        Args:
            covered: `[requests]` tokens of each request.
            transient: tokens that were expanded for this step alone.
        """
        self.prefills_naive += 1
        self.prefill_tokens_saved += sum(covered) - transient
        self.prefill_tokens_expanded += transient

    def fall_back(self, reason: Fallback, error: BaseException | None = None, **of_text: float) -> bool:
        """Count a fall-back.

        Args:
            of_text: what the reason's text has in braces.
        Returns:
            whether it was logged: the first of each reason and type of error is.
        """
        self.fallbacks[reason.code] += 1
        kind = type(error).__name__ if error is not None else ""
        if (reason.code, kind) in self._logged:
            return False
        self._logged.add((reason.code, kind))
        text = reason.value.format(**of_text) + (f": {kind}" if kind else "")
        logger.warning("hybrid_mla: falling back (%s): %s", reason.code, text, exc_info=error)
        return True


def report(
    counters: Counters, plan: Plan, expanded_bytes: int, budget_bytes: int, tokens_without_memory: int
) -> dict[str, Any]:
    """The `hybrid_mla` entry of `/server_info`.

    Args:
        plan: of the last decode step.
        expanded_bytes: GPU memory that expanded prefixes take now.
        budget_bytes: what they and our own buffers may take, all of it taken out of SGLang's memory.
        tokens_without_memory: tokens worth expanding for which there is no memory.
    """
    return {
        "groups": [
            {"start": each.start, "prefix_len": each.end, "requests": len(each.rows), "mode": each.mode.value}
            for each in plan.segments
        ],
        "expanded_bytes": expanded_bytes,
        "budget_bytes": budget_bytes,
        "tokens_without_memory": tokens_without_memory,
        "counters": {
            each.name: dict(value) if isinstance(value := getattr(counters, each.name), Counter) else value
            for each in fields(counters)
        },
    }


def segment_entry(segment: ShownSegment, chunk_bytes: int, latent_bytes: int) -> dict[str, Any]:
    """A segment in `segments` of the entry; see status.Segment.

    Args:
        chunk_bytes: of a chunk of expanded tokens; latent_bytes: of a token in all layers, as plain absorb reads it.
    """
    return {
        "id": segment.id,
        "parent": segment.parent,
        "start": segment.start,
        "tokens": segment.tokens,
        "holders": segment.holders,
        "mode": segment.mode,
        "expanded_bytes": segment.chunks * chunk_bytes,
        "tokens_saved": segment.tokens_saved,
        "bytes_saved": segment.tokens_saved * latent_bytes,
    }


MAXIMA = ("max_group_size", "max_depth")
"""Fields of Counters that are maxima, not totals."""

STATES = {
    "groups": "Groups of running requests that share a prefix.",
    "shared_requests": "Running requests in such a group.",
    "expanded_bytes": "Memory that expanded prefixes take.",
    "budget_bytes": "Memory that expanded prefixes and buffers may take.",
    "tokens_without_memory": "Tokens worth expanding that found no memory.",
}
"""Gauges of the current state, with their descriptions; other metrics are fields of Counters, or errors of the shadow
check."""


class Metrics:
    """The report as Prometheus metrics, in SGLang's own registry and with its labels."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        # Imported here because SGLang sets prometheus_client's multi-process folder before this, not at import.
        import prometheus_client

        self._labels = dict(labels)
        said = {each.name: each.metadata["help"] for each in fields(Counters)}
        self._gauges = {
            name: prometheus_client.Gauge(
                f"sglang:hybrid_mla_{name}", help, list(labels), multiprocess_mode="mostrecent"
            ).labels(**labels)
            for name, help in (STATES | {name: said[name] for name in MAXIMA}).items()
        }
        self._totals = {
            each.name: prometheus_client.Counter(
                f"sglang:hybrid_mla_{each.name}",
                said[each.name],
                [*labels, *["reason"] * (each.default_factory is Counter)],
            )
            for each in fields(Counters)
            if each.name not in MAXIMA
        }
        self._counted: dict[prometheus_client.Counter, float] = {}
        self._shadow_error = prometheus_client.Histogram(
            "sglang:hybrid_mla_shadow_error",
            "Relative errors of checked rows, against plain absorb.",
            list(labels),
            buckets=SHADOW_ERRORS,
        ).labels(**labels)

    def publish(self, info: Mapping[str, Any], shadow_errors: Iterable[float] = ()) -> None:
        """Set the metrics from a report, and add errors of the shadow check."""
        for error in shadow_errors:
            self._shadow_error.observe(math.inf if math.isnan(error) else error)  # nan would be in no bucket
        requests = sum(group["requests"] for group in info["groups"] if group["start"] == 0)
        states = {**info, **info["counters"], "groups": len(info["groups"]), "shared_requests": requests}
        for name, gauge in self._gauges.items():
            gauge.set(states[name])
        for name, metric in self._totals.items():
            found = info["counters"][name]
            for reason, total in found.items() if isinstance(found, Mapping) else [(None, found)]:
                counter = metric.labels(**self._labels, **({} if reason is None else {"reason": reason}))
                counter.inc(total - self._counted.get(counter, 0))  # it grows by what is new
                self._counted[counter] = total
