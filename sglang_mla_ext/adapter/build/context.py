"""Context that every part of the backend is made from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from sglang_mla_ext.adapter.build.budget import max_rows, step_rows
from sglang_mla_ext.adapter.build.model import Model
from sglang_mla_ext.adapter.server import Server
from sglang_mla_ext.kernels.memory import Memory
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.options import HybridMLAOptions

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True)
class Context:
    """See the module.

    Attributes:
        runner: SGLang's, with its pools.
        memory: where what is large is allocated.
        budget_bytes: device memory for expanded prefixes and for our own buffers, see budget.reserve.
    """

    server: Server
    model: Model
    runner: ModelRunner
    counters: Counters
    memory: Memory
    budget_bytes: int

    @classmethod
    def of(cls, runner: ModelRunner, options: HybridMLAOptions, budget_bytes: int, memory: Memory | None) -> Context:
        """Describe what is there, before anything is made."""
        model = Model.of(runner, runner.dtype)
        server = Server.of(runner.server_args, options)
        return cls(server, model, runner, Counters(), memory or Memory(), budget_bytes)

    @property
    def requests(self) -> int:
        """Requests of SGLang's pool."""
        return int(self.runner.req_to_token_pool.size)

    @cached_property
    def step_rows(self) -> int:
        """Rows of a step that shares."""
        return step_rows(self.requests, self.server)

    @cached_property
    def step_requests(self) -> int:
        """Requests of a step that shares, without new tokens."""
        return max_rows(self.requests, self.server.query_tokens) // self.server.query_tokens
