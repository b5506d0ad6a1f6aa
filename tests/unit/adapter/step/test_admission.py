"""Which prefill batches take running requests along. SGLang's scheduler is a double that reads its flag where the real
one does: when tokens are allotted, and behind `prepare_for_extend`."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_mla_ext.adapter.compat import contract
from sglang_mla_ext.adapter.step.admission import FIRST_GUESS, PASSES_IN_A_ROW, Admission
from sglang_mla_ext.adapter.step.passes import Kind, Pass
from sglang_mla_ext.predict.mixed import most_waiting
from sglang_mla_ext.reasons import NotMixed
from sglang_mla_ext.rows import Rows

PAGE, CHUNK = 64, 4096


class Mode(Enum):
    """Stub of SGLang's ForwardMode."""

    EXTEND, DECODE, MIXED = 1, 2, 3

    def is_extend(self) -> bool:
        return self is not Mode.DECODE

    def is_decode(self) -> bool:
        return self is Mode.DECODE

    def is_mixed(self) -> bool:
        return self is Mode.MIXED

    def is_target_verify(self) -> bool:
        return False


class Rule:
    """What Admission asks of it."""

    def __init__(self, tokens: int = 256, most_rows: int = 300) -> None:
        self.tokens, self.most_rows, self.query_tokens = tokens, most_rows, 1
        self.mixed_rows, self.allows = most_rows, lambda batch: True
        self.asked: list[tuple[Any, int]] = []
        self.refused: list[NotMixed] = []
        self.count_refused = self.refused.append
        self.reason: str | None = None

    def begin(self, runner: Any, *, votes: bool) -> None:
        self.votes = votes

    def room(self, running: int) -> int:
        return self.most_rows - running

    def why_not(self, batch: Any, running: int) -> str | None:
        self.asked.append((batch, running))
        return self.reason


class Scheduler:
    """The next batch is `new`. `seen`: the flag and the size of chunks, where SGLang reads them."""

    def __init__(self, rule: Rule, waiting: int = 1, running: int = 5) -> None:
        self.admission, self.rule = Admission(rule, SimpleNamespace(sharded=None, query_tokens=1), self), rule
        self.is_mixed_chunk, self.chunked_prefill_size, self.page_size = True, CHUNK, PAGE
        self.max_prefill_tokens = 2 * CHUNK
        self.waiting_queue, self.chunked_req = [request(10)] * waiting, None
        self.places = 12
        self.free_slots = [10**6, 0]  # and those that the tree would give back
        self.token_to_kv_pool_allocator = SimpleNamespace(available_size=lambda: self.free_slots[0])
        self.tree_cache = SimpleNamespace(evictable_size=lambda: self.free_slots[1])
        self.running = batch_of([request(100, decoded=3) for _ in range(running)])
        self.new = batch_of([request(10)], prefix_lens=[4], extend_lens=[6])
        self.seen: list[tuple[bool, int]] = []
        self.error: Exception | None = None
        self.ended = 0  # running requests that have ended in the step before
        self.refuses = False  # it has a reason of its own

    def get_num_allocatable_reqs(self, running: int) -> int:
        return self.places - running

    def step(self) -> tuple[Any, Any]:
        return self.admission.new_batch(make, self, delayer=None, running_batch=self.running)

    def flags(self) -> list[bool]:
        return [flag for flag, _ in self.seen]


def make(scheduler: Scheduler, *, delayer: Any, running_batch: Any) -> tuple[Any, Any]:
    """As SGLang 0.5.17 does, which takes it that running requests were in the pass before."""
    scheduler.seen = [(scheduler.is_mixed_chunk, scheduler.chunked_prefill_size)]
    count = len(running_batch.reqs) if scheduler.is_mixed_chunk else 0
    adder = SimpleNamespace(can_run_list=[], rem_chunk_tokens=(scheduler.chunked_prefill_size or 0) - count)
    assert scheduler.max_prefill_tokens == 2 * CHUNK + count, "SGLang takes running requests off"
    for req in scheduler.new.reqs if scheduler.new is not None else []:
        if scheduler.admission.waits(adder, req):  # Admission.add_request
            break
        adder.can_run_list.append(req)
    scheduler.adder = adder
    if scheduler.error is not None:
        raise scheduler.error
    new = scheduler.new
    if new is None:
        return None, running_batch
    scheduler.admission.prepared(None, new)
    scheduler.seen.append((scheduler.is_mixed_chunk, scheduler.chunked_prefill_size))
    if not scheduler.is_mixed_chunk:
        return new, running_batch
    reqs = running_batch.reqs[scheduler.ended :]
    if scheduler.refuses:
        return new, running_batch if reqs else SimpleNamespace(reqs=[], batch_is_full=False)
    new.forward_mode, new.decoding_reqs = Mode.MIXED, reqs
    lens = [len(req.origin_input_ids) + len(req.output_ids) for req in reqs]
    new.prefix_lens, new.extend_lens = new.prefix_lens + lens, new.extend_lens + [1] * len(reqs)
    new.seq_lens_cpu = torch.cat([new.seq_lens_cpu, torch.tensor(lens, dtype=torch.int64)])
    return new, SimpleNamespace(reqs=[], batch_is_full=running_batch.batch_is_full)


def request(length: int, decoded: int = 0, **changes: Any) -> Any:
    values = dict(
        origin_input_ids=[0] * length,
        output_ids=[0] * decoded,
        input_embeds=None,
        positional_embed_overrides=None,
        multimodal_inputs=None,
        return_hidden_states=False,
        return_logprob=False,
        is_prefill_only=False,
        skip_radix_cache_insert=False,
        host_hit_length=0,
    )
    return SimpleNamespace(**{**values, **changes})


def batch_of(reqs: list[Any], **values: Any) -> Any:
    counts = values.get("extend_lens", [])
    lens = [prefix + count for prefix, count in zip(values.get("prefix_lens", []), counts, strict=True)]
    return SimpleNamespace(
        reqs=reqs,
        is_empty=lambda: not reqs,
        return_logprob=False,
        return_hidden_states=False,
        check_decode_mem=lambda: True,
        batch_is_full=True,
        forward_mode=Mode.EXTEND,
        decoding_reqs=None,
        seq_lens_cpu=torch.tensor(lens, dtype=torch.int64),
        extend_num_tokens=sum(counts),
        **values,
    )


def test_flag_and_chunks_are_of_one_batch() -> None:
    scheduler = Scheduler(Rule())
    scheduler.step()
    assert scheduler.seen == [(True, 256 + 5)] * 2, "SGLang takes the running ones off"
    assert (scheduler.is_mixed_chunk, scheduler.chunked_prefill_size) == (False, CHUNK)
    assert scheduler.rule.asked == [(scheduler.new, 5)]
    scheduler.error = RuntimeError("SGLang's")
    with pytest.raises(RuntimeError, match="SGLang's"):
        scheduler.step()
    assert scheduler.flags() == [True]
    assert (scheduler.is_mixed_chunk, scheduler.chunked_prefill_size) == (False, CHUNK)
    scheduler.error, scheduler.waiting_queue = None, []
    scheduler.new = batch_of([request(10)], prefix_lens=[4], extend_lens=[6])
    scheduler.step()
    assert scheduler.seen == [(False, CHUNK)] * 2 and len(scheduler.rule.asked) == 1, "it remembers no running ones"
    scheduler.waiting_queue, scheduler.new = [request(10)], None
    assert scheduler.step() == (None, scheduler.running)


@pytest.mark.parametrize(
    ("most_rows", "size", "expected"),
    [(300, CHUNK, 256), (200, CHUNK, 192), (69, CHUNK, 64), (68, CHUNK, 0), (3, CHUNK, 0), (300, 100, 64)],
    ids=str,
)
def test_new_tokens_are_whole_pages_beside_the_running_ones(most_rows: int, size: int, expected: int) -> None:
    scheduler = Scheduler(Rule(most_rows=most_rows))
    scheduler.chunked_prefill_size = size
    assert scheduler.admission.new_tokens(scheduler, scheduler.running) == expected


def change(name: str, value: Any, of: Callable[[Scheduler], Any] = lambda scheduler: scheduler) -> Any:
    return lambda scheduler: setattr(of(scheduler), name, value)


@pytest.mark.parametrize(
    ("changes", "flags", "asked"),
    [
        (change("waiting_queue", []), [False, False], 0),
        (change("chunked_prefill_size", None), [False, False], 0),
        (change("return_logprob", True, lambda scheduler: scheduler.running), [False, False], 0),
        (change("return_hidden_states", True, lambda scheduler: scheduler.running), [False, False], 0),
        (change("is_empty", lambda: True, lambda scheduler: scheduler.running), [False, False], 0),
        (change("places", 5), [False, False], 0),  # nobody is let in
        (change("return_logprob", True, lambda scheduler: scheduler.new.reqs[0]), [True, False], 0),
        (change("reason", "an encoder", lambda scheduler: scheduler.rule), [True, False], 1),
        (change("check_decode_mem", lambda: False, lambda scheduler: scheduler.running), [True, False], 1),
        (lambda scheduler: None, [True, True], 1),
    ],
)
def test_what_is_not_mixed(changes: Callable[[Scheduler], None], flags: list[bool], asked: int) -> None:
    scheduler = Scheduler(Rule())
    changes(scheduler)
    before = scheduler.running.reqs
    new, left = scheduler.step()
    assert scheduler.flags() == flags and len(scheduler.rule.asked) == asked
    if flags != [True, True]:
        assert (new, left) == (scheduler.new, scheduler.running) and left.reqs is before
        assert new.prefix_lens == [4] and left.batch_is_full


def test_after_a_batch_that_had_better_be_a_pass_those_that_follow_are_not_cut() -> None:
    """A mixed step takes a small part of what a pass takes. A reason of one batch is not the next one's."""
    scheduler = Scheduler(Rule())

    def sizes(steps: int) -> list[int]:
        found = []
        for _ in range(steps):
            scheduler.new = batch_of([request(10)], prefix_lens=[4], extend_lens=[6])
            scheduler.step()
            found.append(scheduler.seen[0][1])
        return found

    scheduler.rule.reason = NotMixed.ENCODER
    assert sizes(3) == [256 + 5] * 3
    scheduler.rule.reason = NotMixed.PASS_IS_FASTER
    assert sizes(1 + PASSES_IN_A_ROW) == [256 + 5] + [CHUNK] * PASSES_IN_A_ROW
    scheduler.new = None
    scheduler.step()
    scheduler.rule.reason = None
    assert sizes(3) == [256 + 5] * 3 and scheduler.flags() == [True, True]


APART = {
    "return_logprob": True,
    "return_hidden_states": "last",
    "input_embeds": "given",
    "positional_embed_overrides": "given",
    "multimodal_inputs": "an image",
    "is_prefill_only": True,
    "skip_radix_cache_insert": True,
    "host_hit_length": 64,
}


@pytest.mark.parametrize("room", [None, 4 * PAGE], ids=["not in chunks", "in chunks"])
def test_a_batch_is_charged_for_new_tokens_and_not_for_pages(room: int | None) -> None:
    """Other charges of SGLang's stay, and so do those for no request."""
    admission = Scheduler(Rule()).admission
    adder: Any = SimpleNamespace(can_run_list=[], rem_chunk_tokens=room, rem_input_tokens=10 * PAGE)

    def charge(adder: Any, req: Any, pages: int) -> str:
        """As SGLang does."""
        adder.can_run_list += [req] * (pages > 0)
        adder.rem_input_tokens -= pages * PAGE
        if adder.rem_chunk_tokens is not None:
            adder.rem_chunk_tokens -= pages * PAGE
        return "charged"

    taken = 0
    for new, pages, counts in ((1, 1, True), (PAGE, 1, True), (PAGE - 1, 1, True), (3, 0, False), (5, 2, False)):
        req = request(new, extend_len=new, extend_range=SimpleNamespace(length=new))
        assert admission.add_request(charge, adder, req, pages) == "charged"
        taken += new if counts and room is not None else pages * PAGE
        assert adder.rem_input_tokens == 10 * PAGE - taken
        assert adder.rem_chunk_tokens == (None if room is None else room - taken)


def test_a_batch_with_less_than_a_page_left_is_full() -> None:
    """SGLang would try the next request, and load its rows from the host before it finds that."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    admission = Scheduler(Rule()).admission
    results = AddReqResult.CONTINUE, AddReqResult.OTHER, AddReqResult.NO_TOKEN
    for left, found in ((PAGE, results), (PAGE - 1, (AddReqResult.OTHER, *results[1:])), (None, results)):
        adder: Any = SimpleNamespace(can_run_list=[], rem_chunk_tokens=left, rem_input_tokens=PAGE)
        for result, expected in zip(results, found, strict=True):
            assert admission.add_request(lambda adder, req, result: result, adder, request(9), result) is expected


@pytest.mark.parametrize("changes", [{name: value} for name, value in APART.items()], ids=str)
def test_a_request_that_stays_apart_is_not_cut(changes: dict[str, Any]) -> None:
    """It is the first of a batch that is not mixed, of SGLang's own size, or it waits for one."""
    scheduler, apart = Scheduler(Rule()), request(1500, **changes)
    scheduler.new = batch_of([request(10), apart, request(10)], prefix_lens=[4] * 3, extend_lens=[6] * 3)
    scheduler.step()
    assert scheduler.flags() == [True, True] and scheduler.adder.can_run_list == scheduler.new.reqs[:1]
    assert scheduler.adder.rem_chunk_tokens == 256
    scheduler.new = batch_of([apart, request(10)], prefix_lens=[4] * 2, extend_lens=[1496, 6])
    new, left = scheduler.step()
    assert scheduler.flags() == [True, False] and scheduler.adder.can_run_list == scheduler.new.reqs
    assert scheduler.adder.rem_chunk_tokens == CHUNK and len(scheduler.rule.asked) == 1
    assert (new, left) == (scheduler.new, scheduler.running)
    scheduler.chunked_req = apart  # SGLang has cut it
    scheduler.admission._left = 10
    assert scheduler.admission.new_tokens(scheduler, scheduler.running) == 0
    scheduler.chunked_req = request(1500)
    assert scheduler.admission.new_tokens(scheduler, scheduler.running) == 256


def test_what_sglang_does_not_mix_by_itself_stops_the_cutting() -> None:
    """As it does beside beams. Where all that ran have ended, it has nothing to mix."""
    scheduler = Scheduler(Rule())
    scheduler.refuses = True
    new, left = scheduler.step()
    assert (new, left) == (scheduler.new, scheduler.running)
    assert scheduler.admission.new_tokens(scheduler, scheduler.running) == 0
    scheduler = Scheduler(Rule())
    scheduler.refuses, scheduler.ended = True, len(scheduler.running.reqs)
    scheduler.step()
    assert scheduler.admission.new_tokens(scheduler, scheduler.running) == 256


def test_where_too_much_waits_it_has_a_pass_of_its_own() -> None:
    """By the new tokens that requests had before; and no more than find a place count."""
    enough = most_waiting(256, drafts=False) // int(FIRST_GUESS)
    scheduler = Scheduler(Rule(), waiting=enough)
    scheduler.places = 100
    assert scheduler.admission.new_tokens(scheduler, scheduler.running) == 256
    scheduler.waiting_queue *= 2
    assert scheduler.admission.new_tokens(scheduler, scheduler.running) == 0
    scheduler.places = 5 + enough
    assert scheduler.admission.new_tokens(scheduler, scheduler.running) == 256
    scheduler.places = 100
    for _ in range(30):  # of six tokens each
        scheduler.new = batch_of([request(10)], prefix_lens=[4], extend_lens=[6])
        scheduler.waiting_queue = scheduler.waiting_queue[:1]
        scheduler.step()
    scheduler.waiting_queue *= 4 * enough
    assert scheduler.admission.new_tokens(scheduler, scheduler.running) == 256


def test_a_rank_with_requests_of_its_own_takes_what_comes_in_the_mean() -> None:
    """The mean includes prefill passes, and iterations without a new batch as zero tokens."""
    scheduler = Scheduler(Rule(tokens=1024, most_rows=2048))
    assert scheduler.admission.new_tokens(scheduler, scheduler.running) == 1024
    scheduler.admission.votes = True

    def after(tokens: int, steps: int) -> int:
        for _ in range(steps):
            scheduler.new = batch_of([request(tokens)], prefix_lens=[0], extend_lens=[tokens]) if tokens else None
            scheduler.step()
        scheduler.waiting_queue = [request(10)]
        return scheduler.admission.new_tokens(scheduler, scheduler.running)

    assert after(0, 0) == 256
    assert after(600, 200) == 768
    scheduler.rule.reason = NotMixed.PASS_IS_FASTER
    assert after(900, 200) == 0 and after(0, 1) == 0, "passes come one after the other"
    scheduler.rule.reason, scheduler.admission._passes = None, 0
    assert scheduler.admission.new_tokens(scheduler, scheduler.running) == 1024
    assert after(0, 200) == 256


@pytest.mark.parametrize("evictable", [0, 30])
def test_a_prompt_in_pieces_keeps_the_slots_that_it_needs(evictable: int) -> None:
    """Running requests take a page each in a mixed step; SGLang ends where a piece finds no place."""
    scheduler = Scheduler(Rule(), waiting=0)
    scheduler.chunked_req, scheduler.admission._left = request(2000), 100
    needed = 100 + len(scheduler.running.reqs) * PAGE
    scheduler.free_slots = [needed - evictable, evictable]
    assert scheduler.admission.new_tokens(scheduler, scheduler.running) > 0
    scheduler.free_slots[0] -= 1
    assert scheduler.admission.new_tokens(scheduler, scheduler.running) == 0


def test_what_is_left_of_a_prompt_in_pieces_waits_too() -> None:
    long = request(2000)
    scheduler = Scheduler(Rule(), waiting=0)
    scheduler.chunked_req = long
    assert scheduler.admission.new_tokens(scheduler, scheduler.running) == 0, "nothing is known of it"
    for done, expected in ((0, 0), (300, 256), (1744, 0)):
        scheduler.new = batch_of([request(10), long], prefix_lens=[0, done], extend_lens=[10, 256])
        scheduler.admission.prepared(None, scheduler.new)
        assert scheduler.admission._left == 2000 - done - 256
        assert scheduler.admission.new_tokens(scheduler, scheduler.running) == expected


def test_nobody_waits_for_those_who_are_sorted_in_front() -> None:
    """In each step another request with a longer prefix has come, and behind it is one with log-probabilities."""
    scheduler, apart = Scheduler(Rule()), request(10, return_logprob=True)
    scheduler.new = batch_of([request(10), apart], prefix_lens=[4, 4], extend_lens=[6, 6])
    admitted = []
    for _ in range(9):
        scheduler.step()
        admitted.append(apart in scheduler.adder.can_run_list)
        assert scheduler.max_prefill_tokens == 2 * CHUNK
    assert admitted == [False, False, True] * 3


def test_cached_lengths_are_those_of_the_batch() -> None:
    """Of two running requests one had its last token computed in the pass before, of the other that is still to come:
    SGLang 0.5.17 says the same of both. What a mixed batch left out has left its place."""
    scheduler = Scheduler(Rule(), running=2)
    new, left = scheduler.step()
    assert new.prefix_lens == [4, 102, 102] and new.seq_lens_cpu.tolist() == [10, 103, 103]
    assert left.batch_is_full, "as SGLang found it"
    scheduler.new, scheduler.ended = batch_of([request(10)], prefix_lens=[4], extend_lens=[6]), 1
    new, left = scheduler.step()
    assert new.prefix_lens == [4, 102] and not left.batch_is_full


def test_what_a_mixed_batch_decodes_is_counted_as_sglang_counts_it() -> None:
    shown, finished = [], []

    def report(can_run_graph: bool, running_batch: Any, **counts: int) -> None:
        shown.append((can_run_graph, running_batch.reqs))
        assert counts == ({} if contract.line() == "0.5.17" else {"num_generated_tokens": 3})

    def running(name: str, retracted: bool) -> Any:
        time_stats = SimpleNamespace(set_last_decode_finish_time=lambda: finished.append(name))
        return SimpleNamespace(is_retracted=retracted, time_stats=time_stats)

    reporter = SimpleNamespace(num_generated_tokens=7, forward_ct_decode=3, report_decode_stats=report)
    processor, of_batch = SimpleNamespace(metrics_reporter=reporter), SimpleNamespace(can_run_cuda_graph=True)
    admission = Scheduler(Rule()).admission
    reqs = [running("a", False), running("b", True), running("c", False)]
    batch = SimpleNamespace(reqs=["new", *reqs], decoding_reqs=None)
    admission.count_decoded(None, processor, batch, of_batch)
    assert (reporter.num_generated_tokens, reporter.forward_ct_decode) == (7, 3) and not shown
    batch.decoding_reqs = reqs
    admission.count_decoded(None, processor, batch, of_batch)
    assert (reporter.num_generated_tokens, reporter.forward_ct_decode) == (10, 4)
    assert shown == [(True, reqs)] and finished == ["a", "c"] and batch.reqs == ["new", *reqs]


# ---- ranks with batches of their own


class Voter(Scheduler):
    """One of two ranks, and SGLang's exchange before each pass.

    Attributes:
        said: whether it prefills, whether it can replay a decode graph, and its mode.
    """

    def __init__(self, waiting: int = 1, running: int = 5) -> None:
        super().__init__(Rule(), waiting, running)
        self.admission.begin(None, votes=True)
        self.said: Any = None

    def vote(self, batch: Any, *, other_prefills: bool, graphs: bool = True) -> Pass | None:
        """Return the pass of a batch, after the vote."""
        self.admission.sync(self._exchange, batch, disable_cuda_graph=not graphs, other_prefills=other_prefills)
        return None if batch is None else self.choose(batch)

    def _exchange(self, batch: Any, *, disable_cuda_graph: bool, other_prefills: bool) -> Any:
        extends = batch is not None and batch.forward_mode.is_extend()
        info = SimpleNamespace(is_extend_in_batch=extends, can_run_decode_cuda_graph=not extends)
        info.local_forward_mode = None if batch is None else batch.forward_mode.value
        self.admission.cast(info)
        self.said = info.is_extend_in_batch, info.can_run_decode_cuda_graph, info.local_forward_mode
        if batch is not None:
            batch.is_extend_in_batch = info.is_extend_in_batch or other_prefills
        return batch

    def choose(self, batch: Any) -> Pass:
        new_tokens = batch.extend_lens if batch.forward_mode.is_extend() else None
        of_batch = SimpleNamespace(forward_mode=batch.forward_mode, extend_seq_lens_cpu=new_tokens)
        return self.admission.choose(batch, of_batch)


def test_where_prefill_has_no_graphs_ranks_that_vote_mix_nothing_with_running_requests() -> None:
    """Mixing needs prefill graphs: without, a refused batch would expand each running request's whole history."""
    for rows, mixes in ((300, True), (0, False)):
        rule = Rule()
        rule.mixed_rows = rows
        scheduler = Scheduler(rule)
        scheduler.is_mixed_chunk = False
        scheduler.admission.begin(None, votes=True)
        assert rule.votes and scheduler.admission.mixes is mixes
        new, left = scheduler.step()
        assert (new.forward_mode is Mode.MIXED) is mixes and (left is scheduler.running) is not mixes


@pytest.mark.parametrize("graphs", [True, False])
def test_a_mixed_batch_is_a_decode_step_where_nobody_prefills(graphs: bool) -> None:
    """Its rank reports a decode step. An agreement holds for one pass: the same batch is a prefill afterwards."""
    rank = Voter()
    new, _ = rank.step()
    assert (chosen := rank.vote(new, other_prefills=False, graphs=graphs)) is not None
    assert rank.said == (False, graphs, Mode.DECODE.value)
    assert (chosen.kind, chosen.mixed, chosen.decoding, chosen.absorbs) == (Kind.DECODE, True, 5, False)
    assert chosen.rows == Rows.of([6, 1, 1, 1, 1, 1]) and not rank.rule.refused
    assert rank.vote(None, other_prefills=False) is None and rank.said == (False, True, None), "it is idle"
    assert rank.choose(new).kind is Kind.PREFILL, "an agreement is on one pass"


def test_a_mixed_batch_that_is_refused_is_a_prefill_by_absorb() -> None:
    """It absorbs with or without a graph, which SGLang decides later."""
    rank = Voter()
    new, left = rank.step()
    assert (chosen := rank.vote(new, other_prefills=True)) is not None and not left.reqs
    assert rank.said == (False, True, Mode.DECODE.value), "it hoped that nobody prefills"
    assert (chosen.kind, chosen.mixed, chosen.decoding, chosen.absorbs) == (Kind.PREFILL, False, 5, True)
    assert chosen.rows == Rows.of([6, 1, 1, 1, 1, 1])
    assert rank.rule.refused == [NotMixed.RANK_PREFILLING]
    alone = batch_of([request(10)], prefix_lens=[4], extend_lens=[6])
    assert (chosen := rank.vote(alone, other_prefills=True)) is not None
    assert (chosen.kind, chosen.decoding, chosen.absorbs) == (Kind.PREFILL, 0, False), "prefill as ever"


@pytest.mark.parametrize(
    ("changes", "stops"),
    [
        (change("waiting_queue", []), False),
        (lambda scheduler: None, True),
        (lambda scheduler: vars(scheduler).update(waiting_queue=[], chunked_req=request(2000)), True),
    ],
)
def test_after_a_refused_batch_that_was_cut_those_that_follow_are_not_cut(
    changes: Callable[[Scheduler], None], stops: bool
) -> None:
    """A batch that took all waiting tokens would be no larger in a prefill pass, so mixing goes on."""
    rank = Voter()
    new, _ = rank.step()
    changes(rank)
    rank.vote(new, other_prefills=True)
    rank.waiting_queue, rank.chunked_req = [request(10)], None
    assert (rank.admission.new_tokens(rank, rank.running) == 0) is stops
    for _ in range(PASSES_IN_A_ROW * stops):
        rank.new = batch_of([request(10)], prefix_lens=[4], extend_lens=[6])
        rank.step()
        assert rank.seen == [(False, CHUNK)] * 2
        rank.vote(rank.new, other_prefills=True)
    assert rank.admission.new_tokens(rank, rank.running) == 256


def test_a_decode_step_that_sglang_runs_as_a_prefill_is_by_absorb() -> None:
    """SGLang makes it an extend of one token per request while another rank prefills."""
    rank = Voter()
    rank.running.forward_mode = Mode.DECODE
    assert (chosen := rank.vote(rank.running, other_prefills=True)) is not None
    assert (chosen.kind, chosen.absorbs, chosen.rows) == (Kind.DECODE, False, Rows(5)) and not rank.rule.refused
    rank.running.forward_mode, rank.running.extend_lens = Mode.EXTEND, [1] * 5
    rank.running.decoding_reqs = rank.running.reqs
    chosen = rank.choose(rank.running)
    assert (chosen.kind, chosen.mixed, chosen.decoding, chosen.absorbs) == (Kind.PREFILL, False, 5, True)
    assert chosen.rows == Rows.of([1] * 5)
