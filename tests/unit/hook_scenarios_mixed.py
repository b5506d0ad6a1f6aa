"""What our hooks do in mixed steps: graphs, the scheduler's batches, and the passes themselves.

Each scenario runs in a process of its own, see test_hooks.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from hooked_worker import PAGE, PROMPT, Server, options, refused

SHARED = 13 * PAGE  # tokens
TOKENS = 64


def scenario_graphs_and_buffers_have_room_for_what_is_mixed() -> None:
    server = Server(mixed_tokens=TOKENS)
    from sglang.srt.model_executor import cuda_graph_buffer_registry
    from sglang.srt.model_executor.runner import base_cuda_graph_runner

    from sglang_mla_ext.adapter.launch import mixed_steps

    mixed_steps._predicted = lambda args: 256
    args = copy.copy(server.runner.server_args)
    args.device = "cuda"
    runner = SimpleNamespace(is_draft_worker=False, device="cuda", server_args=args)
    for given, sizes in (
        ({}, [1, 2, 12, 76, 140, 204, 268]),
        ({"mixed_tokens": 100}, [1, 2, 12, 76]),
        ({"mixed_tokens": 0}, [1, 2, 12]),
    ):
        with options(**given):
            assert base_cuda_graph_runner.get_batch_sizes_to_capture(runner) == (sizes, [1])
    runner.is_draft_worker = True
    assert base_cuda_graph_runner.get_batch_sizes_to_capture(runner, 1) == ([1, 2, 12], [1])
    assert cuda_graph_buffer_registry.build_eager_registry(max_bs=12) == 12 + TOKENS
    server.session.admission.rule.tokens = 0
    assert cuda_graph_buffer_registry.build_eager_registry(max_bs=12) == 12


class MixedPasses:
    """A server in which what is shared is expanded, and passes of new tokens, as SGLang's runner gives them to us."""

    def __init__(self, syncs: bool = False) -> None:
        self.server = Server(mixed_tokens=TOKENS, syncs=syncs)
        from sglang.srt.model_executor.model_runner import ModelRunner

        self.requests = self.server.run(PROMPT + "-a", PROMPT + "-b", PROMPT + "-c")
        self.server.forward("DECODE", self.requests)
        assert self.server.shares()
        self.model: Any = object.__new__(ModelRunner)
        self.model.is_draft_worker, self.model.run = False, self._run
        self.seen: list[tuple[str, int, bool]] = []  # what ran: mode, batch size, whether something is shared
        self.ended: list[Any] = []
        self.server.backend.preparation.end_step = self.ended.append
        self.logits: Callable[[Any], Any] = lambda given: given

    def forward(self, mode: str = "EXTEND", decoding: int = 0) -> Any:
        """Three and two new tokens, and one; the tokens whose logits come back."""
        lens = {"prefix_lens": [SHARED] * 3, "new_tokens": [3, 2, 1]}
        self.batch = self.server.forward(mode, self.requests, decoding=decoding, **lens)
        output = self.model.forward(self.batch)
        self.seen, seen = [], self.seen
        return seen, output.logits_output.next_token_logits.flatten().tolist()

    def _run(self, batch: Any) -> Any:
        self.seen.append((batch.forward_mode.name, batch.batch_size, self.server.shares()))
        rows = torch.arange(6.0)[:, None]
        logits = rows if batch.forward_mode.name == "DECODE" else rows[[2, 4, 5]]
        output = SimpleNamespace(next_token_logits=self.logits(logits), customized_info=None)
        return SimpleNamespace(logits_output=output)


LAST = [2.0, 4.0, 5.0]


def scenario_new_tokens_are_rows_of_a_decode_step() -> None:
    world = MixedPasses()
    counters = world.server.counters
    steps = counters.steps_naive
    assert world.forward() == ([("DECODE", 6, True)], LAST)
    assert world.batch.forward_mode.name == "EXTEND" and world.batch.batch_size == 3, "SGLang samples with it"
    (checked,) = world.ended
    assert checked.batch_size == 6, "the shadow check sees rows"
    assert (counters.prefills_mixed, counters.steps_mixed, counters.tokens_mixed) == (1, 0, 6)
    assert world.forward("MIXED", decoding=1) == ([("DECODE", 6, True)], LAST)
    assert (counters.prefills_mixed, counters.steps_mixed, counters.tokens_mixed) == (1, 1, 11)
    assert counters.steps_naive == steps + 1, "without one that decodes it is no decode step"
    assert counters.prefill_tokens_saved == (3 + 2) * SHARED, "but of the one that decodes"
    world.server.session.admission.rule.most_rows = 5
    assert world.forward() == ([("EXTEND", 3, False)], LAST)
    assert dict(counters.not_mixed) == {"more_rows": 1} and not counters.fallbacks
    assert world.ended[-1] is world.batch


def scenario_a_mixed_pass_in_which_our_part_fails_is_the_pass_that_was_asked_for() -> None:
    """But not where other ranks compute rows, and wait for this one in the pass."""
    from sglang_mla_ext.adapter.step import mixed

    class Logits:
        def __getitem__(self, index: Any) -> None:
            raise MemoryError("no")

    for mode, decoding in (("EXTEND", 0), ("MIXED", 1)):
        world = MixedPasses()
        as_rows = mixed.as_rows

        def fail(*args: Any) -> None:
            raise MemoryError("no")

        mixed.as_rows = fail
        assert world.forward(mode, decoding) == ([(mode, 3, False)], LAST)
        assert world.ended == [world.batch] and world.server.steps.pause > 0
        assert dict(world.server.counters.fallbacks) == {"make_rows": 1}
        mixed.as_rows = as_rows
        world.logits = lambda given: Logits() if len(given) == 6 else given
        assert world.forward(mode, decoding) == ([("DECODE", 6, False), (mode, 3, False)], LAST)
        counters = world.server.counters
        assert counters.fallbacks["take_last_logits"] == 1
        assert (counters.prefills_mixed, counters.steps_mixed, counters.tokens_mixed) == (0, 0, 0)
        torch.distributed.is_initialized, torch.distributed.get_world_size = lambda: True, lambda: 2
        kind, message = refused(lambda world=world, mode=mode, decoding=decoding: world.forward(mode, decoding))
        assert kind == "OurPartFailedError" and "taking the logits of last rows failed" in message
        torch.distributed.is_initialized = bool


def scenario_a_draft_or_a_server_without_mixed_steps_takes_what_sglang_gives() -> None:
    world = MixedPasses()
    world.model.is_draft_worker = True
    assert world.forward() == ([("EXTEND", 3, True)], LAST)
    world.model.is_draft_worker, world.server.session.admission.rule.tokens = False, 0
    assert world.forward()[0] == [("EXTEND", 3, False)]


def scenario_a_rank_whose_new_tokens_are_rows_votes_as_one_that_decodes() -> None:
    """The pass is a decode step if no rank prefills, and otherwise SGLang's extend, also with running requests in the
    batch. Without prefill graphs running requests are not mixed."""
    from sglang.srt.managers.scheduler_components import dp_attn
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    world = MixedPasses(syncs=True)
    server = world.server
    assert server.session.admission.mixes is (server.session.admission.rule._prefill_rows > 0)
    cases = (False, True, "DECODE"), (True, True, "EXTEND"), (False, False, "DECODE")
    for others_prefill, graphs, mode in cases:
        server.of_sync = {"others_prefill": others_prefill, "disable_cuda_graph": not graphs}
        ((ran, _, _),), logits = world.forward()
        assert ran == mode and logits == LAST
        assert server.said == (False, graphs, ForwardMode.DECODE.value)
    assert dict(world.server.counters.not_mixed) == {"rank_prefilling": 1}
    for others_prefill, ran in (False, ("DECODE", 6, True)), (True, ("MIXED", 3, False)):
        server.of_sync = {"others_prefill": others_prefill, "disable_cuda_graph": False}
        assert world.forward("MIXED", decoding=1) == ([ran], LAST)
        assert server.said == (False, True, ForwardMode.DECODE.value)
    counters = world.server.counters
    assert (counters.steps_mixed, counters.not_mixed["rank_prefilling"]) == (1, 2) and not counters.fallbacks
    assert dp_attn.prepare_mlp_sync_batch_raw(None, others_prefill=True, disable_cuda_graph=False) is None
    server.session.admission.votes = False
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    found = dp_attn.prepare_mlp_sync_batch_raw(batch, others_prefill=False, disable_cuda_graph=False)
    assert found is batch and batch.said == (True, False, None)


def scenario_without_a_graph_the_head_has_last_rows_alone() -> None:
    from sglang.srt.layers.logits_processor import LogitsMetadata

    world, found = MixedPasses(), []
    run = world._run

    def forward(batch: Any) -> Any:
        found.append(LogitsMetadata.from_forward_batch(batch).draft_extend_select_index)
        output = run(batch)
        if batch.forward_mode.name == "DECODE":
            output.logits_output.next_token_logits = output.logits_output.next_token_logits[found[-1]]
        return output

    world.model.run = forward
    assert world.forward() == ([("DECODE", 6, True)], LAST)
    world.server.session.admission.rule.most_rows = 5
    assert world.forward() == ([("EXTEND", 3, False)], LAST)
    assert [each if each is None else each.tolist() for each in found] == [[2, 4, 5], None]


class Mixes:
    """SGLang's scheduler, as far as it makes prefill batches: it mixes where its flag says so."""

    def __init__(self, server: Server | None = None) -> None:
        self.server = server or Server(mixed_tokens=TOKENS)
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.managers.schedule_policy import PrefillAdder
        from sglang.srt.managers.scheduler_components import batch_result_processor

        self.adder: Any = object.__new__(PrefillAdder)
        self.scheduler = self.server.scheduler
        self.scheduler.make, self.scheduler.waiting_queue = self._make, ["a request"]
        self.running = SimpleNamespace(
            reqs=["running"],
            is_empty=bool,
            return_logprob=False,
            return_hidden_states=False,
            check_decode_mem=lambda: True,
            batch_is_full=True,
        )
        self.nobody = SimpleNamespace(reqs=[])  # who is left of them in a mixed batch
        self.new: Any = object.__new__(ScheduleBatch)
        self.new.encoder_lens, self.new.decoding_reqs, self.new.return_logprob = None, None, False
        self.new.hicache_consumer_index, self.new.forward_mode = -1, SimpleNamespace(is_mixed=bool)
        self.new.reqs, self.new.prefix_lens, self.new.extend_lens = self.server.run("new"), [0], [5]
        self.new.extend_logprob_start_lens, self.new.extend_num_tokens = [5], 5
        self.results: Any = object.__new__(batch_result_processor.SchedulerBatchResultProcessor)
        self.seen: list[tuple[bool, int]] = []

    def _make(self, running: Any) -> tuple[Any, Any]:
        self.seen.append((self.scheduler.is_mixed_chunk, self.scheduler.chunked_prefill_size))
        self.adder.can_run_list, self.adder.rem_chunk_tokens = [], self.scheduler.chunked_prefill_size - 1
        self.let_in = [self.adder.add_one_req(req, False, truncation_align_size=None) for req in self.new.reqs]
        self.new.reqs = self.adder.can_run_list
        self.new.prepare_for_extend()
        self.seen.append((self.scheduler.is_mixed_chunk, self.scheduler.chunked_prefill_size))
        return self.new, self.nobody if self.scheduler.is_mixed_chunk else running

    def make(self) -> list[tuple[bool, int]]:
        """Flag and size of chunks, when tokens are allotted and when SGLang mixes."""
        self.seen = []
        found = self.scheduler._get_new_batch_prefill_raw(running_batch=self.running)
        assert found == (self.new, self.nobody if self.seen[-1][0] else self.running)
        assert (self.scheduler.is_mixed_chunk, self.scheduler.chunked_prefill_size) == (False, 256)
        return self.seen


def scenario_running_requests_are_mixed_batch_by_batch() -> None:
    mixes = Mixes()
    assert mixes.make() == [(True, TOKENS + 1)] * 2
    mixes.running.check_decode_mem = bool
    assert mixes.make() == [(True, TOKENS + 1), (False, TOKENS + 1)]
    mixes.scheduler.waiting_queue = []
    assert mixes.make() == [(False, 256)] * 2
    mixes.scheduler.waiting_queue, mixes.running.is_empty = ["a request"], None
    assert mixes.make() == [(False, 256)] * 2
    assert dict(mixes.server.counters.fallbacks) == {"size_mixed": 1}
    mixes.running.is_empty, mixes.running.check_decode_mem = bool, None
    assert mixes.make() == [(True, TOKENS + 1), (False, TOKENS + 1)]
    assert mixes.server.counters.fallbacks["choose_mixed"] == 1
    mixes.server.session.admission.mixes = False
    assert mixes.make() == [(False, 256)] * 2


def scenario_a_request_that_is_not_mixed_waits_for_a_batch_of_its_own() -> None:
    from sglang.srt.managers.schedule_policy import AddReqResult

    mixes, (let_in, waits) = Mixes(), (AddReqResult.CONTINUE, AddReqResult.OTHER)
    mixes.new.prefix_lens, mixes.new.extend_lens, mixes.new.extend_logprob_start_lens = [0, 0], [5, 5], [5, 5]
    first, second, third = mixes.server.run("first", "second", "third")
    second.return_hidden_states = True
    mixes.new.reqs = [first, second, third]
    assert mixes.make() == [(True, TOKENS + 1)] * 2
    assert mixes.let_in == [let_in, waits, let_in] and mixes.new.reqs == [first, third]
    assert mixes.adder.rem_chunk_tokens == TOKENS
    mixes.new.reqs = [second, third]
    assert mixes.make() == [(True, TOKENS + 1), (False, TOKENS + 1)]
    assert mixes.let_in == [let_in] * 2 and mixes.adder.rem_chunk_tokens == 256
    del second.return_hidden_states
    mixes.new.reqs = [first, second]
    assert mixes.make()[0] == (True, TOKENS + 1)
    assert mixes.server.counters.fallbacks["admit_mixed"] == 1
    assert mixes.let_in == [let_in] * 2, "as without us"
    mixes.server.session.admission.mixes = False
    second.return_hidden_states, mixes.new.reqs = True, [second, third]
    assert mixes.make() == [(False, 256)] * 2 and mixes.let_in == [let_in] * 2


def scenario_what_mixed_batches_decode_is_counted() -> None:
    mixes = Mixes()
    shown: list[tuple[bool, int]] = []
    reporter = SimpleNamespace(
        num_generated_tokens=10,
        forward_ct_decode=0,
        report_decode_stats=lambda can, running_batch, **_: shown.append((can, len(running_batch.reqs))),
    )
    object.__setattr__(mixes.results, "metrics_reporter", reporter)
    result = SimpleNamespace(can_run_cuda_graph=True)
    mixes.results.process_batch_result_prefill(mixes.new, result)
    mixes.new.decoding_reqs = [SimpleNamespace(is_retracted=True)] * 2
    mixes.results.process_batch_result_prefill(mixes.new, result)
    assert (reporter.num_generated_tokens, reporter.forward_ct_decode, shown) == (12, 1, [(True, 2)])
