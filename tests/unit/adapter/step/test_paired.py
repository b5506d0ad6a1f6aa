"""New tokens in a step that verifies drafts: where they lie in it, and what SGLang gets back."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_mla_ext.adapter.step.paired import PairedSteps, lay_out

WIDTH, PAGE = 4, 64


@dataclass(frozen=True)
class Case:
    """Cached and new tokens of each request."""

    prefixes: tuple[int, ...]
    new: tuple[int, ...]


CASES = [
    Case((128,), (1,)),
    Case((128,), (4,)),
    Case((0,), (5,)),
    Case((64, 128, 0), (3, 64, 9)),
    Case((60, 61, 62, 63), (1, 1, 1, 1)),  # the padding reaches the next page, or ends with its own
    Case((64,), (62,)),
    Case((7, 1000), (57, 130)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("page", [1, PAGE])
def test_units_are_requests_whose_lengths_grow(case: Case, page: int) -> None:
    """Each row sees what is cached, the new tokens before it and itself, by its unit's length and its place in it."""
    total = sum(case.new)
    layout = lay_out(torch.arange(100, 100 + total), list(case.prefixes), list(case.new), WIDTH, page)
    assert layout.rows.lens == tuple(-(-new // WIDTH) * WIDTH for new in case.new)
    assert layout.rows.total == len(layout.tokens) == WIDTH * len(layout.lens)
    token = 0
    for request, (prefix, new) in enumerate(zip(case.prefixes, case.new, strict=True)):
        for place, row in enumerate(layout.rows.of_request(request)):
            unit, inside = divmod(row, WIDTH)
            assert layout.requests[unit] == request
            assert layout.lens[unit] + inside == layout.positions[row] == prefix + place
            real = place < new
            assert layout.source[row] == token + min(place, new - 1) and layout.tokens[row] == 100 + layout.source[row]
            assert layout.beyond[row] == max(place - new + 1, 0)
            assert (row in layout.real) == real and (row in layout.padding) == (not real)
            own = real or (prefix + place) // page == (prefix + new - 1) // page
            assert layout.slots[row] == (-1 if own else (prefix + place) % page)
        assert layout.last[request] == layout.rows.of_request(request)[new - 1]
        token += new
    assert token == total


class Worker:
    """A verify step of two requests, and new tokens of two others, on SGLang's tables."""

    def __init__(self, prefixes: tuple[int, ...] = (62, 128), new: tuple[int, ...] = (1, 6)) -> None:
        self.paired = PairedSteps(WIDTH, possible=True)
        self.table = torch.full((8, 256), -1, dtype=torch.int32)
        pages = iter(range(1, 100))
        for row in (2, 3, 4, 5):
            for start in range(0, 192, PAGE):
                first = next(pages) * PAGE
                self.table[row, start : start + PAGE] = torch.arange(first, first + PAGE, dtype=torch.int32)
        rows = torch.tensor([4, 5])
        slots = [self.table[row, at : at + n] for row, at, n in zip(rows.tolist(), prefixes, new, strict=True)]
        self.before = self.table.clone()
        self.new: Any = SimpleNamespace(
            prefill_input_ids_cpu=torch.arange(500, 500 + sum(new)),
            prefix_lens=list(prefixes),
            extend_lens=list(new),
            req_pool_indices=rows,
            out_cache_loc=torch.cat(slots).long(),
            reqs=[SimpleNamespace(rid="c", lora_id=None), SimpleNamespace(rid="d", lora_id=None)],
        )
        self.batch: Any = SimpleNamespace(
            input_ids=torch.arange(8),
            positions=torch.arange(8) + 20,
            out_cache_loc=torch.arange(8) + 1000,
            req_pool_indices=torch.tensor([2, 3]),
            seq_lens=torch.tensor([20, 24]),
            seq_lens_cpu=torch.tensor([20, 24]),
            orig_seq_lens=torch.tensor([20, 24], dtype=torch.int32),
            seq_lens_sum=44,
            batch_size=2,
            lora_ids=[None, None],
            rids=["a", "b"],
            _init_num_token_non_padded=lambda **kwargs: None,
        )
        self.paired.begin(self.table, PAGE, None)
        self.paired._new, self.paired._joins = self.new, True  # as while an iteration runs

    def join(self) -> Any:
        return self.paired.join(self.batch, self.new)


def test_new_tokens_lie_in_front() -> None:
    worker = Worker()
    rows = worker.join()
    batch, old = worker.batch, Worker().batch
    assert rows.lens == (4, 8) and batch.batch_size == 5 and batch.rids == ["c", "d", "d", "a", "b"]
    assert batch.input_ids.tolist() == [500] * 4 + [501, 502, 503, 504, 505, 506, 506, 506] + list(range(8))
    assert batch.seq_lens.tolist() == batch.seq_lens_cpu.tolist() == [62, 128, 132, 20, 24]
    assert batch.seq_lens_sum == 62 + 128 + 132 + 20 + 24
    assert batch.req_pool_indices.tolist() == [4, 5, 5, 2, 3]
    for name in ("input_ids", "positions", "out_cache_loc"):
        assert torch.equal(getattr(batch, name)[12:], getattr(old, name)), name
    # The token at 62, and padding at 63 in the same page; at 64 and 65 in the page of padding.
    own = worker.before[4, 62:64].tolist()
    assert batch.out_cache_loc[:4].tolist() == [*own, 0, 1]
    assert batch.out_cache_loc[4:12].tolist() == worker.before[5, 128:136].tolist()


def test_padding_has_slots_in_the_table_and_nothing_else_changes() -> None:
    worker = Worker()
    worker.join()
    changed = worker.table != worker.before
    assert changed.nonzero().tolist() == [[4, 64], [4, 65]] and worker.table[4, 64:66].tolist() == [0, 1]


def test_what_fails_changes_nothing() -> None:
    worker = Worker()
    before = dict(vars(worker.batch))

    def fail(**kwargs: Any) -> None:
        raise MemoryError("no")

    worker.batch._init_num_token_non_padded = before["_init_num_token_non_padded"] = fail
    with pytest.raises(MemoryError):
        worker.join()
    assert all(vars(worker.batch)[name] is value for name, value in before.items())
    assert worker.paired.layout is None and worker.paired.joining() is None


def test_results_are_handed_out_once() -> None:
    worker = Worker()
    worker.join()
    logits = torch.arange(20.0)[:, None].repeat(1, 3)
    answer = SimpleNamespace(next_token_logits=logits, hidden_states=logits + 0.5, customized_info=None)
    output = SimpleNamespace(logits_output=answer, can_run_graph=True)
    worker.paired.keep(output)
    assert worker.paired.layout is not None
    of_step = worker.paired.of_step(output)
    assert worker.paired.layout is None
    assert of_step.logits_output.next_token_logits[:, 0].tolist() == list(range(12, 20))
    assert of_step.logits_output.hidden_states[:, 0].tolist() == [row + 0.5 for row in range(12, 20)]
    assert worker.paired.result(worker.batch) is None
    found = worker.paired.result(worker.new)
    assert found.can_run_graph and found.logits_output.next_token_logits[:, 0].tolist() == [0, 9]
    assert found.logits_output.hidden_states[:, 0].tolist() == [0.5, 4.5, 5.5, 6.5, 7.5, 8.5, 9.5]
    logits += 100  # SGLang's next graph
    assert found.logits_output.next_token_logits[:, 0].tolist() == [0, 9]
    assert worker.paired.result(worker.new) is None


class Scheduler:
    """Runs batches in turn, and processes results one iteration later, as SGLang's overlap does."""

    def __init__(self, running: int = 2, memory: bool = True, overlap: bool = True) -> None:
        self.paired = PairedSteps(WIDTH, possible=True)
        self.running_batch: Any = self.batch_of("running", running, memory)
        self.enable_overlap, self.batch_record_buf = overlap, [["a"], ["b"]]
        self.ran: list[str] = []
        self.processed: list[tuple[str, str]] = []
        self.result_queue: list[tuple[Any, Any]] = []
        self.barriers = 0
        self.ends = False

    @staticmethod
    def batch_of(name: str, requests: int, memory: bool = True) -> Any:
        batch = SimpleNamespace(name=name, is_empty=lambda: not requests, check_decode_mem=lambda: memory)
        batch.copy = lambda: batch
        return batch

    def update_running_batch(self, batch: Any) -> Any:
        return None if self.ends else batch

    def _apply_war_barrier(self) -> None:
        self.barriers += 1

    def run(self, batch: Any) -> Any:
        def original(scheduler: Any, one: Any) -> Any:
            self.ran.append(one.name)
            if one is self.running_batch:
                assert self.paired.joining() is not None
            return SimpleNamespace(of=one.name, number=len(self.ran))

        return self.paired.run(original, self, batch)

    def process_batch_result(self, batch: Any, result: Any) -> None:
        def original(scheduler: Any, one: Any, of: Any) -> None:
            self.processed.append((one.name, of.of))

        self.paired.process(original, self, batch, result)


@pytest.mark.parametrize("overlap", [True, False])
def test_running_requests_run_first_and_new_ones_are_processed_first(overlap: bool) -> None:
    """Results are processed once: with overlap, after the next iteration's running requests are launched."""
    scheduler = Scheduler(overlap=overlap)
    batches = [Scheduler.batch_of(name, 1) for name in ("first", "second", "third")]
    of_first = [("first", "first"), ("running", "running")]
    for number, batch in enumerate(batches[:2]):
        scheduler.paired.chosen = batch
        result = scheduler.run(batch)
        assert scheduler.processed == (of_first if overlap and number else [])
        scheduler.result_queue.append((batch, result))
    assert scheduler.ran == ["running", "first", "running", "second"] and scheduler.barriers == 2 * overlap
    assert result.of == "second" and scheduler.paired.joining() is None
    scheduler.process_batch_result(*scheduler.result_queue.pop(0))
    assert scheduler.processed == of_first
    result = scheduler.run(batches[2])  # no pair
    assert scheduler.processed == of_first
    scheduler.process_batch_result(*scheduler.result_queue.pop(0))
    assert scheduler.processed == [*of_first, ("second", "second"), ("running", "running")]
    scheduler.process_batch_result(batches[2], result)
    assert scheduler.processed[4:] == [("third", "third")]


@pytest.mark.parametrize("alone", ["not chosen", "nobody runs", "no memory", "all end"])
def test_new_tokens_alone(alone: str) -> None:
    scheduler = Scheduler(running=0 if alone == "nobody runs" else 2, memory=alone != "no memory")
    scheduler.ends = alone == "all end"
    batch = Scheduler.batch_of("new", 1)
    scheduler.paired.chosen = Scheduler.batch_of("another", 1) if alone == "not chosen" else batch
    scheduler.process_batch_result(batch, scheduler.run(batch))
    assert scheduler.ran == ["new"] and scheduler.processed == [("new", "new")]


def test_an_error_leaves_nothing_behind() -> None:
    scheduler, batch = Scheduler(), Scheduler.batch_of("new", 1)
    scheduler.paired.chosen = batch

    def failing(of: Any, one: Any) -> Any:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        scheduler.paired.run(failing, scheduler, batch)
    assert scheduler.paired.joining() is None and scheduler.paired.result(batch) is None


def test_without_drafts_there_are_no_pairs() -> None:
    assert not PairedSteps(1, possible=True).possible and not PairedSteps(4, possible=False).possible
