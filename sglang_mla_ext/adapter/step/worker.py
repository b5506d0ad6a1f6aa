"""What one scheduler process knows of what was built in it, and how hooks of a running server are guarded."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.mem_cache.memory_pool import KVCache

    from sglang_mla_ext.adapter.step.backend import HybridMLABackend
    from sglang_mla_ext.adapter.step.mixing import Mixing
    from sglang_mla_ext.adapter.step.riding import Riding
    from sglang_mla_ext.adapter.step.steps import Steps
    from sglang_mla_ext.adapter.step.voting import Voting
    from sglang_mla_ext.kernels.memory import Memory
    from sglang_mla_ext.observe import Metrics
    from sglang_mla_ext.options import HybridMLAOptions

Hook = Callable[..., Any]


class Worker:
    """Filled in as SGLang builds its parts."""

    budget_bytes: int | None = None
    options: HybridMLAOptions | None = None
    pool: KVCache | None = None
    memory: Memory | None = None
    backend: HybridMLABackend | None = None
    steps: Steps | None = None
    repeats = True  # a pass in which something of ours fails
    riding: Riding | None = None
    mixing: Mixing | None = None
    voting: Voting | None = None
    scheduler: Scheduler | None = None
    metrics: Metrics | None = None
    metrics_time = 0.0


worker = Worker()


def guarded(what: str, *, only_shows: bool = False, loses_memory: bool = False) -> Callable[[Hook], Hook]:
    """A hook of a running server: what it raises does not reach SGLang.

    Args:
        what: it does.
        only_shows: what is shared stays so; otherwise it is forgotten, and nothing is shared for a while.
        loses_memory: what is in our memory is anything, unless it returns.
    """

    def guard(hook: Hook) -> Hook:
        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception as error:
                if worker.steps is None:  # still the start
                    raise
                if only_shows:
                    worker.steps.counters.fall_back(f"{what} failed: {type(error).__name__}", error)
                else:
                    clear = worker.memory.clear if loses_memory and worker.memory is not None else None
                    worker.steps.fail(what, error, clear)

        return call

    return guard
