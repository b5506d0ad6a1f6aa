"""What our hooks do for a pass in which our part of a layer fails (failure.py).

Each scenario runs in a process of its own, see test_hooks.py; test_faults.py has all that can fail.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hooked_worker import PROMPT, Server, refused


def scenario_a_pass_in_which_our_part_fails_is_run_again() -> None:
    server = Server()
    from sglang.srt.model_executor.runner.eager_runner import EagerRunner

    _run_again(server, EagerRunner)


def scenario_a_pass_in_a_prefill_graph_is_run_again() -> None:
    server = Server()
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    _run_again(server, PrefillCudaGraphRunner)


def _run_again(server: Server, kind_of_runner: type) -> None:
    """Once, and where nobody else computes with this rank; an error of SGLang's is nothing of ours."""
    from sglang_mla_ext.adapter.failure import our_part
    from sglang_mla_ext.reasons import Fallback

    requests = server.run(PROMPT + "-a", PROMPT + "-b")
    server.forward("DECODE", requests)
    batch, seen = SimpleNamespace(forward_metadata_ready=True), []
    ours, errors = [True], [MemoryError("no")]

    def run(forward_batch: Any) -> str:
        seen.append((forward_batch.forward_metadata_ready, server.shares()))
        if errors and ours[0]:
            with our_part(Fallback.ATTENTION):
                raise errors.pop()
        if errors:
            raise errors.pop()
        return "SGLang's output"

    runner: Any = object.__new__(kind_of_runner)
    runner.run = run
    assert runner.execute(batch) == "SGLang's output"
    assert seen == [(True, True), (False, False)], "prepared anew, with nothing shared"
    assert batch.forward_metadata_ready, "SGLang's own is as it was"
    assert dict(server.counters.fallbacks) == {"attention": 1}

    errors += [MemoryError("again"), MemoryError("no")]
    kind, message = refused(lambda: runner.execute(batch))
    assert kind == "OurPartFailedError" and message.endswith("attention failed: MemoryError: again")
    ours[0], errors[:] = False, [KeyError("SGLang's")]
    assert refused(lambda: runner.execute(batch))[0] == "KeyError"
    assert server.counters.fallbacks.total() == 2
    ours[0], errors[:] = True, [MemoryError("no")]
    torch.distributed.is_initialized, torch.distributed.get_world_size = lambda: True, lambda: 2
    assert refused(lambda: runner.execute(batch))[0] == "OurPartFailedError"
    assert server.counters.fallbacks.total() == 2 and not errors
