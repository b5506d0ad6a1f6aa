"""Reports of a scheduler process: the `hybrid_mla` entry of `/server_info`, and the same with the tree."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from sglang_mla_ext.adapter.step.shadow import ShadowCheck
from sglang_mla_ext.observe import Counters, Metrics, report, segment_entry
from sglang_mla_ext.prefix.sharing import Sharing
from sglang_mla_ext.reasons import Fallback

METRICS_INTERVAL_S = 1.0


class Reports:
    """Reports of one process; asking for one changes nothing."""

    def __init__(
        self, prefixes: Sharing, counters: Counters, *, budget_bytes: int, chunk_bytes: int, description: str
    ) -> None:
        """
        Args:
            budget_bytes: device memory for expanded prefixes and our own buffers; chunk_bytes: of one chunk.
            description: what can be shared here, in one line.
        """
        self._prefixes, self._counters = prefixes, counters
        self._budget_bytes, self._chunk_bytes = budget_bytes, chunk_bytes
        self.description = description
        self._metrics: Metrics | None = None  # where SGLang publishes none
        self._published = 0.0

    def report(self) -> dict[str, Any]:
        """Return the `hybrid_mla` entry; see observe.report."""
        expanded_bytes = self._prefixes.pool.used_chunks * self._chunk_bytes
        without = self._prefixes.expansion.tokens_without_memory
        return report(self._counters, self._prefixes.plan, expanded_bytes, self._budget_bytes, without)

    def status(self, pause: int) -> dict[str, Any]:
        """Return the entry with the tree of shared segments; see status.Rank.

        Args:
            pause: forward passes until something is shared again.
        """
        found = self.report()
        found |= {"requests": self._prefixes.plan.requests, "pause": pause, "description": self.description}
        try:
            found["segments"] = [
                segment_entry(each, self._chunk_bytes, self._prefixes.planner.latent_bytes)
                for each in self._prefixes.shown_segments()
            ]
        except Exception as error:  # what is shared stays so
            self._counters.fall_back(Fallback.SHOW_SEGMENTS, error)
            found["segments"] = []
        return found

    def publish_as(self, labels: Mapping[str, str]) -> None:
        """Publish metrics from now on, with SGLang's labels."""
        self._metrics = Metrics(labels)

    def publish(self, shadow: ShadowCheck | None) -> None:
        """Publish metrics, where the last time is long enough ago. Raises nothing."""
        now = time.monotonic()
        if self._metrics is None or now - self._published <= METRICS_INTERVAL_S:
            return
        self._published = now
        try:
            self._metrics.publish(self.report(), shadow.pop_errors() if shadow is not None else ())
        except Exception as error:  # what is shared stays so
            self._counters.fall_back(Fallback.PUBLISH_METRICS, error)
