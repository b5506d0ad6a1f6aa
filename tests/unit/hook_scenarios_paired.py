"""What our hooks do where new tokens join a step that verifies drafts; with 0.5.17 they never do.

Each scenario runs in a process of its own, see test_hooks.py.
"""

from __future__ import annotations

from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hooked_worker import PAGE, PROMPT, Server
from release import OLDEST

from sglang_mla_ext.adapter import failure

QUERIES, SHARED = 3, 13 * PAGE
NEW = (2, 4)
"""New tokens of two requests, which are one and two units."""


class Pairs:
    """A server, and SGLang's scheduler and model, as far as they run a pair of batches."""

    def __init__(self) -> None:
        self.server = Server(queries=QUERIES, mixed_tokens=64)
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.model_executor.model_runner import ModelRunner

        self.paired = self.server.session.admission.paired
        self.running = self.server.run(PROMPT + "-a", PROMPT + "-b")
        self.waiting = self.server.run(PROMPT + "-c", PROMPT + "-d")
        table = self.server.runner.req_to_token_pool.req_to_token
        for row, req in enumerate([*self.running, *self.waiting]):
            table[row, : len(req.slots)] = req.slots

        class ScheduleBatch(SimpleNamespace):
            """Has None for whatever a pass here does not need."""

            def __getattr__(self, name: str) -> None:
                return None

        self.new: Any = ScheduleBatch(
            reqs=self.waiting,
            forward_mode=ForwardMode.EXTEND,
            prefix_lens=[SHARED, SHARED],
            extend_lens=list(NEW),
            extend_num_tokens=sum(NEW),
            prefill_input_ids_cpu=torch.arange(sum(NEW)),
            req_pool_indices=torch.tensor([2, 3]),
            out_cache_loc=torch.arange(7000, 7000 + sum(NEW)),
        )
        self.decoding: Any = ScheduleBatch(reqs=self.running, is_empty=bool, check_decode_mem=lambda: True)
        rows = QUERIES * len(self.running)
        self.decoding.out_cache_loc = torch.arange(6000, 6000 + rows)
        self.decoding.spec_info = SimpleNamespace(
            positions=torch.arange(rows), num_tokens_per_req=QUERIES, draft_token_num=QUERIES
        )
        self.decoding.copy = lambda: self.decoding
        for req in (*self.running, *self.waiting):
            req.seqlen = len(req.slots)
        self.scheduler = self.server.scheduler
        self.scheduler.running_batch, self.scheduler.body = self.decoding, self._run_batch
        self.scheduler.update_running_batch = lambda batch: batch
        self.scheduler.processed = []
        self.model: Any = object.__new__(ModelRunner)
        self.model.is_draft_worker, self.model.run = False, self._run
        self.drafting: Any = object.__new__(ModelRunner)
        self.drafting.is_draft_worker, self.drafting.run = True, self._run
        self.plans_of_slots: list[tuple[list[int], list[int]]] = []  # lengths before, slots
        self.drafting.kv_index_translator = SimpleNamespace(own_plan=self._plan_slots)
        self.drafted: list[float] | None = None  # by the drafting layer, of the last token of each new request
        self.ran: list[tuple[str, int, int]] = []  # mode, requests and rows of each pass of the model and its draft
        self.plans: list[Any] = []
        self.results: dict[str, list[float]] = {}

    def iteration(self) -> list[tuple[str, int, int]]:
        self.ran = []
        self.paired.chosen = self.new if self.paired.possible else None
        result = self.scheduler.run_batch(self.new)
        self.scheduler.process_batch_result(self.new, result)
        return self.ran

    def _run_batch(self, batch: Any) -> Any:
        """As SGLang's worker: a batch for the model, and what it returns."""
        if batch is self.decoding:
            of_model = self.server.forward("TARGET_VERIFY", self.running, batch=self.decoding)
        else:
            lens = {"prefix_lens": batch.prefix_lens, "new_tokens": batch.extend_lens}
            of_model = self.server.forward("EXTEND", batch.reqs, batch=batch, **lens)
        self.plans.append(self.server.coming.plan)
        output = self.model.forward(of_model).logits_output
        name = "decoded" if batch is self.decoding else "new"
        if batch is self.new and self.drafted is not None:
            output_of_draft = self.drafting.forward(self.draft_batch()).logits_output
            self.drafted = output_of_draft.next_token_logits.flatten().tolist()
            assert self.drafted == output_of_draft.hidden_states.flatten().tolist()
        self.results[name] = output.next_token_logits.flatten().tolist()
        return SimpleNamespace(of=name)

    def draft_batch(self) -> Any:
        """The new tokens as SGLang extends a draft over them; the hidden state of each is its number."""
        from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
        from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            capture_hidden_mode=CaptureHiddenMode.LAST,
            batch_size=len(NEW),
            input_ids=torch.arange(sum(NEW)) + 100,
            req_pool_indices=self.new.req_pool_indices,
            seq_lens=torch.tensor([SHARED + new for new in NEW]),
            out_cache_loc=self.new.out_cache_loc,
            seq_lens_sum=0,
            extend_num_tokens=sum(NEW),
            spec_info=EagleDraftExtendInput(hidden_states=torch.arange(float(sum(NEW)))[:, None]),
        )

    def _plan_slots(self, batch: Any) -> Any:
        self.plans_of_slots.append((batch.seq_lens.tolist(), batch.out_cache_loc.tolist()))
        return SimpleNamespace(bind=lambda to, translator: None)

    def _run(self, batch: Any) -> Any:
        self.ran.append((batch.forward_mode.name, batch.batch_size, len(batch.input_ids)))
        if batch.forward_mode.is_draft_extend_v2():
            rows = batch.spec_info.hidden_states
        elif batch.forward_mode.is_target_verify():
            rows = torch.arange(float(len(batch.input_ids)))[:, None]
        else:
            rows = torch.tensor([[-1.0], [-2.0]])  # of last rows alone
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=rows, hidden_states=rows))


def scenario_new_tokens_join_a_step_that_verifies_drafts() -> None:
    world = Pairs()
    if OLDEST:
        assert not world.paired.possible
        assert world.iteration() == [("EXTEND", 2, 6)]
        assert [result.of for _, result in world.scheduler.processed] == ["new"]
        return
    assert world.iteration() == [("TARGET_VERIFY", 5, 15)]
    assert world.results == {"decoded": [9.0, 10.0, 11.0, 12.0, 13.0, 14.0], "new": [1.0, 6.0]}
    assert [result.of for _, result in world.scheduler.processed] == ["new", "decoded"]
    (segment,) = world.plans[0].segments
    assert segment.rows == (0, 1, 2, 3) and segment.tokens == SHARED
    assert not world.plans[1].segments, "what is computed already shares nothing"
    counters = world.server.counters
    assert (counters.steps_mixed, counters.steps_verify, counters.steps_naive) == (1, 1, 1)
    assert counters.tokens_mixed == sum(NEW) and counters.prefill_tokens_saved == 2 * SHARED
    assert not counters.fallbacks


def scenario_new_tokens_that_cannot_join_have_a_pass_of_their_own() -> None:
    world = Pairs()
    if OLDEST:
        assert not world.paired.possible
        return
    world.new.prefill_input_ids_cpu = None  # joining fails
    assert world.iteration() == [("TARGET_VERIFY", 2, 6), ("EXTEND", 2, 6)]
    assert world.results == {"decoded": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "new": [-1.0, -2.0]}
    assert dict(world.server.counters.fallbacks) == {"begin_pass": 1} and world.server.counters.steps_mixed == 0


def scenario_results_that_cannot_be_kept_are_computed_again() -> None:
    world = Pairs()
    if OLDEST:
        assert not world.paired.possible
        return

    def fail(output: Any) -> None:
        raise MemoryError("no")

    world.paired.keep = fail
    assert world.iteration() == [("TARGET_VERIFY", 5, 15), ("EXTEND", 2, 6)]
    assert world.results == {"decoded": [9.0, 10.0, 11.0, 12.0, 13.0, 14.0], "new": [-1.0, -2.0]}
    assert dict(world.server.counters.fallbacks) == {"take_last_logits": 1}


def scenario_ranks_end_where_only_one_of_them_fails() -> None:
    """The others go on with the pass of all rows, and with what that computed."""
    if OLDEST:
        return
    failure.several_ranks = lambda: True

    def fail(*_: Any) -> None:
        raise MemoryError("no")

    for part in ("join", "keep", "extend_draft"):
        world = drafting_with(graph_of(2))
        setattr(world.paired, part, fail)
        with pytest.raises(failure.OurPartFailedError, match="MemoryError: no"):
            world.iteration()
        assert not world.server.counters.fallbacks, part


def graph_of(requests: int, fails: bool = False, runs: bool = True) -> Any:
    """SGLang's graph of a drafting layer for so many requests, as far as it is asked."""
    from sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner import EAGLEDraftExtendCudaGraphRunner

    class Graph(EAGLEDraftExtendCudaGraphRunner):
        def __init__(self) -> None:
            self.captured_req_width, self.max_bs, self.parts = QUERIES, requests, []
            self.memory = torch.zeros(requests, 1)  # of results

        def can_run_graph(self, batch: Any) -> bool:
            return runs and batch.spec_info.num_tokens_per_req == self.captured_req_width  # SGLang's own check

        def execute(self, batch: Any, select_index: torch.Tensor) -> Any:
            if fails:
                raise RuntimeError("no")
            assert batch.extend_seq_lens.tolist() == [QUERIES] * batch.batch_size
            self.parts.append((batch.input_ids.tolist(), batch.seq_lens.tolist(), batch.positions.tolist()))
            rows = self.memory[: batch.batch_size]
            rows.copy_(batch.spec_info.hidden_states[select_index])
            return SimpleNamespace(next_token_logits=rows, hidden_states=rows.clone())

    return Graph()


def drafting_with(graph: Any) -> Pairs:
    world = Pairs()
    world.paired._draft_worker, world.drafted = SimpleNamespace(cuda_graph_runner_for_draft_extend=graph), []
    return world


def scenario_a_draft_is_extended_over_new_tokens_in_units() -> None:
    """Two tokens are a padded unit, four a whole and a padded one, as many at a time as the graph has requests."""
    if OLDEST:
        return
    begins = [SHARED, SHARED, SHARED + 3]
    tokens, places = [100, 101, 101, 102, 103, 104, 105, 105, 105], [0, 1, 2, 0, 1, 2, 3, 4, 5]
    for requests in (1, 2, 8):
        world = drafting_with(graph := graph_of(requests))
        assert world.iteration() == [("TARGET_VERIFY", 5, 15)] and world.drafted == [1.0, 5.0]
        parts = range(0, 3, requests)
        assert [len(lens) for _, lens, _ in graph.parts] == [min(requests, 3 - first) for first in parts]
        found_tokens, lens, positions = (list(chain(*each)) for each in zip(*graph.parts, strict=True))
        assert found_tokens == tokens and lens == [begin + QUERIES for begin in begins]
        assert positions == [SHARED + place for place in places]
        before, slots = (list(chain(*each)) for each in zip(*world.plans_of_slots, strict=True))
        assert before == begins and slots[:2] == [7000, 7001] and slots[3:7] == [7002, 7003, 7004, 7005]
        assert world.iteration() == [("TARGET_VERIFY", 5, 15)], "and so in the next one"
    world = drafting_with(None)  # on a CPU, without graphs
    assert world.iteration() == [("TARGET_VERIFY", 5, 15), ("DRAFT_EXTEND_V2", 3, 9)] and world.drafted == [1.0, 5.0]
    assert not world.server.counters.fallbacks


def scenario_sglang_extends_a_draft_where_units_do_not_run() -> None:
    if OLDEST:
        return
    own = [("TARGET_VERIFY", 5, 15), ("EXTEND", 2, 6)]
    world = drafting_with(graph_of(2, runs=False))
    assert world.iteration() == own and world.drafted == [-1.0, -2.0] and not world.server.counters.fallbacks
    graph = graph_of(2)
    graph.captured_req_width = QUERIES + 1
    assert drafting_with(graph).iteration() == own
    world = drafting_with(graph_of(2, fails=True))
    assert world.iteration() == own and world.drafted == [-1.0, -2.0]
    assert dict(world.server.counters.fallbacks) == {"extend_draft": 1}
    world = drafting_with(graph_of(2))
    world.new.prefill_input_ids_cpu = None  # joining fails, so there are no units
    assert world.iteration() == [("TARGET_VERIFY", 2, 6), ("EXTEND", 2, 6), ("EXTEND", 2, 6)]
