"""Sharded prefixes in the steps of one scheduler.

Ranks of DP attention agree on each pass before it (voting.py), and in the same place on what it shares
(prefix/sharded/): what one rank attends to for another must be what that takes out of its own part. A pass is sharded
where all of them decode or have new tokens as rows, and run the same CUDA graph, in which the exchange is; without a
GPU, where all have rows, because SGLang does not enter a layer without any. Everything else is plain absorb on all.

What fails before that is agreed on keeps it from being sharded, on all ranks. What has been agreed on stands: a failure
behind it turns sharding off from the next pass on.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_mla_ext.adapter.ranks.prompts import PromptNames
from sglang_mla_ext.adapter.ranks.ranks import check_alike
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.sharded.member import Member
from sglang_mla_ext.prefix.sharded.names import Name, Names
from sglang_mla_ext.prefix.sharded.plan import ShardedPlan
from sglang_mla_ext.prefix.sharded.reports import Reports
from sglang_mla_ext.prefix.sharded.vote import Gather, Vote
from sglang_mla_ext.reasons import Fallback, NotSharded

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


STEPS_OF_NOTHING = 4
"""Steps without a vote after a vote that found nothing worth sharing: with a vote in each, ranks that share nothing
would wait for the others twice in each step."""

MOST_STEPS_OF_NOTHING = 64
"""Most steps without a vote after votes in which plans differed."""

UNUSED_S = 600
"""Seconds with requests after which the log says that no step has shared a prefix."""

logger = logging.getLogger(__name__)


class SlotsOfPass:
    """Slots of chunks' tokens, by a request of the pass that has them; the expander's, in place of a tree."""

    def __init__(self, reports: Reports, req_to_token: torch.Tensor) -> None:
        """
        Args:
            req_to_token: `[places, context]` slots of requests' tokens.
        """
        self._reports, self._req_to_token = reports, req_to_token
        self._places: torch.Tensor | None = None

    def begin(self, places: torch.Tensor) -> None:
        """
        Args:
            places: `[requests]` of the pass, in `req_to_token`.
        """
        self._places = places

    def slots(self, name: Name, name_end: int, start: int, end: int) -> torch.Tensor:
        """Return the slots of tokens `[start, end)` of the prompt that a name stands for."""
        request = self._reports.holder(name)
        assert self._places is not None and request is not None, "a request of the pass holds what it expands"
        place = self._places[request : request + 1]  # a tensor: the host waits for nothing
        return self._req_to_token[place, start:end].flatten().long()


class ShardedSteps:
    """Votes of one scheduler's rank on what each pass shares, and the plans that they result in.

    Attributes:
        agreed: whether ranks share something in the pass that comes, or runs; the same on all of them.
    """

    def __init__(
        self,
        member: Member,
        names: PromptNames,
        slots: SlotsOfPass,
        counters: Counters,
        *,
        chunk_tokens: int,
        gather: Gather,
        requests: range,
        query_tokens: int,
        can_share: Callable[[], bool],
        fail: Callable[[Fallback, Exception], None],
    ) -> None:
        """
        Args:
            slots: which the expander reads.
            requests: numbers of requests of a rank with which a step has shared attention in it; query_tokens: of
                each, which are its rows. New tokens are rows only where it is one, each as a request.
            can_share: whether this rank can share anything now. fail: is told what has failed here.
        """
        self._member, self._names, self._slots, self._chunk_tokens = member, names, slots, chunk_tokens
        self._counters, self._requests, self._query_tokens = counters, requests, query_tokens
        self._can_share, self._fail = can_share, fail
        self._gather, self._waited_s = gather, 0.0
        self._vote = Vote(member)
        self._batch: ScheduleBatch | None = None
        self._plan: ShardedPlan | None = None
        self.agreed = False
        self._without_vote = 0  # steps that are to come
        self._differed = 0  # votes one after the other in which plans did
        self._graphs: Sequence[int] | None = None
        self._first_pass_s: float | None = None
        self._watches_use = True  # until something was shared, or the log says that nothing was

    def begin(self, runner: ModelRunner) -> None:
        """Read the sizes of the decode graphs, once SGLang has captured them, and check that all ranks have the
        same."""
        graphs = runner.decode_cuda_graph_runner
        self._graphs = sorted(graphs.capture_bs) if graphs is not None else None
        # Who has them votes on a step, and who does not would not come.
        check_alike({"rows of decode graphs": self._graphs, "requests of a rank that share": self._requests})

    def comes(self, batch: ScheduleBatch | None) -> None:
        """Set the batch that this rank would run next."""
        self._batch, self._plan, self.agreed = batch, None, False

    def agree(self, info: Any) -> None:
        """Agree with all ranks on what their batches share, after SGLang has asked for these.

        Args:
            info: SGLang's MLPSyncBatchInfo, the same on all ranks but for what is this rank's.
        """
        self._plan = None
        requests = info.global_num_tokens
        if not any(requests):
            return
        if info.is_extend_in_batch:
            self._counters.not_sharded[NotSharded.RANK_PREFILLING.code] += 1
            return
        each, reason = self._requests_of_each(requests, info.can_run_decode_cuda_graph)
        if reason is None and self._without_vote:
            self._without_vote -= 1
            reason = NotSharded.PLANS_DIFFER if self._differed else None
        elif reason is None:
            began, self._waited_s = time.perf_counter(), 0.0
            rows = [count * self._query_tokens for count in requests]
            given = self._given if self._can_share() else None
            each *= self._query_tokens
            decided = self._vote.hold(given, rows, each, self._wait_for_all, self._fail)
            self._counters.plan_seconds += time.perf_counter() - began - self._waited_s
            if isinstance(decided, NotSharded):
                reason = decided
                if reason is NotSharded.PLANS_DIFFER:
                    self._plans_differ()
            else:
                self._plan, self._differed, self.agreed = decided, 0, bool(decided.segments)
                if not decided.segments and self._member.asks_for_nothing:
                    self._without_vote = STEPS_OF_NOTHING
        if reason is not None:
            self._counters.not_sharded[reason.code] += 1
        self._member.begin(self._plan)
        if self._watches_use:
            self._watch_use()

    def _watch_use(self) -> None:
        """Log once how to have the memory back, if no step has shared anything for long."""
        now = time.monotonic()
        self._first_pass_s = self._first_pass_s or now
        was_used, is_late = self.shared_plan() is not None, now - self._first_pass_s > UNUSED_S
        self._watches_use = not (was_used or is_late)
        if is_late and not was_used and self._member.rank == 0:
            logger.info(
                "hybrid_mla: no step has shared a prefix in the first %d minutes with requests. If that is how this "
                "server is used, --hybrid-mla-prefix-memory-gb 0 gives the memory for expanded prefixes back to the "
                "KV cache.",
                UNUSED_S // 60,
            )

    def shared_plan(self) -> ShardedPlan | None:
        """Return the plan of the pass that begins; None if it shares nothing."""
        return self._plan if self._plan is not None and self._plan.segments else None

    def expand(self, pool_indices: torch.Tensor) -> None:
        """Expand what all ranks asked for, on the current stream, before the pass. Raises nothing: it is for later
        passes.

        Args:
            pool_indices: `[requests]` of the pass, in `req_to_token`.
        """
        if self._plan is None:
            return
        self._plan = None
        try:
            self._slots.begin(pool_indices)
            self._member.expand()
        except Exception as error:
            self._fail(Fallback.EXPAND, error)

    def _wait_for_all(self, mine: Sequence[int]) -> Sequence[Sequence[int]]:
        began = time.perf_counter()
        found = self._gather(mine)
        self._waited_s += time.perf_counter() - began
        return found

    def _plans_differ(self) -> None:
        """Handle plans that differ between ranks: vote again in the next step, and where plans differ again and again,
        less and less often, because such a vote costs more than one in which nothing has changed."""
        if not self._counters.not_sharded[NotSharded.PLANS_DIFFER.code]:
            logger.warning(
                "hybrid_mla: ranks made different plans of the same reports and share nothing in this step. Please "
                "report it, with the launch commands of all nodes."
            )
        self._without_vote = min(STEPS_OF_NOTHING * self._differed, MOST_STEPS_OF_NOTHING)
        self._differed += 1

    def _requests_of_each(self, requests: Sequence[int], graphs: bool) -> tuple[int, NotSharded | None]:
        """Return the requests, or new tokens that are rows, that every rank has in a pass, some of them padding, or the
        reason why it is not sharded; both follow from what all ranks know."""
        most = max(requests)
        if self._graphs is not None:
            most = next((size for size in self._graphs if size >= most), 0) if graphs else 0
        elif not all(requests):
            return 0, NotSharded.RANK_WITHOUT_ROWS
        return most, None if most in self._requests else NotSharded.MORE_ROWS

    def _given(self) -> tuple[list[Names], list[int]]:
        """Names and rows of the batch's requests: of all of a prompt's tokens where it is decoded, and of what is
        cached of it where new tokens are rows. In a mixed batch all of a running request's prompt is cached, and its
        token is one row."""
        batch, size = self._batch, self._chunk_tokens
        if batch is None or batch.forward_mode.is_idle():
            return [], []
        names = [self._names(req) for req in batch.reqs]
        if batch.forward_mode.is_decode():
            return names, [self._query_tokens] * len(names)
        cached = zip(names, batch.prefix_lens, strict=True)
        return [of_req[: tokens // size] for of_req, tokens in cached], list(batch.extend_lens)


def gather_over(group: GroupCoordinator) -> Gather:
    """Return a function that exchanges integers on the host."""

    def gather(mine: Sequence[int]) -> Sequence[Sequence[int]]:
        sent = torch.frombuffer(array("q", mine), dtype=torch.int64)
        found = torch.empty(group.world_size * len(mine), dtype=torch.int64)
        torch.distributed.all_gather_into_tensor(found, sent, group=group.cpu_group)
        return [array("q", of_rank.tobytes()) for of_rank in found.view(group.world_size, -1).numpy()]

    return gather
