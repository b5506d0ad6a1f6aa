"""Attention to prefixes that ranks hold together, each with its heads, against the reference over all heads. Ranks are
processes with memory in common, so the kernels that store into it wait for each other as on GPUs. And the kernel that
merges what they give back."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_mla_ext.kernels.naive import signals
from sglang_mla_ext.kernels.naive.attention import SharedAttention, TorchSharedAttention
from sglang_mla_ext.kernels.naive.collectives import Collectives
from sglang_mla_ext.kernels.naive.exchange import Exchange, ExchangeSizes
from sglang_mla_ext.kernels.naive.mailbox import Mailbox
from sglang_mla_ext.kernels.naive.merge_ranks import merge_ranks, merge_ranks_torch
from sglang_mla_ext.kernels.naive.merge_to_ranks import merge_to_ranks, result_values, results_of
from sglang_mla_ext.kernels.naive.peers import Peers
from sglang_mla_ext.kernels.naive.push_to_ranks import push_to_ranks
from sglang_mla_ext.kernels.naive.sharded import ShardedAttention
from sglang_mla_ext.kernels.naive.triton_attention import TritonSharedAttention
from sglang_mla_ext.kernels.partials import PartialTable
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.kernels.storage.expanded import FP8, ExpandedBuffers
from sglang_mla_ext.kernels.watch import Watch, Watched
from sglang_mla_ext.segment import Mode, Segment

HEADS, DN, DR, DV, RANK = 6, 16, 16, 16, 32
NAN, INF = float("nan"), float("inf")
FORK = torch.multiprocessing.get_context("fork")


def in_processes(ranks: int, of_rank: Callable[[int], Any]) -> list[Any]:
    """Call a function in a process for each rank, and return what they return."""
    found = FORK.SimpleQueue()

    def run(rank: int) -> None:
        try:
            found.put((rank, of_rank(rank), None))
        except BaseException as error:
            found.put((rank, None, repr(error)))

    processes = [FORK.Process(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 120
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        processes[0].join(0.02)
    waiting = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in waiting:
        processes[rank].kill()
    results = {}
    while not found.empty():
        rank, result, error = found.get()
        assert error is None, f"rank {rank}: {error}"
        results[rank] = result
    assert not waiting, f"ranks {waiting} wait for ever"
    return [results[rank] for rank in range(ranks)]


def mailboxes(ranks: int, values: int, dtype: torch.dtype) -> list[Mailbox]:
    """Memory that processes have in common at the same addresses, of all ranks."""
    received = [torch.full((values,), NAN, dtype=dtype).share_memory_() for _ in range(ranks)]
    counts = [torch.zeros(ranks, dtype=torch.int32).share_memory_() for _ in range(ranks)]
    buffers, signals = (torch.tensor([each.data_ptr() for each in of_all]) for of_all in (received, counts))
    return [Mailbox(received[rank], buffers, counts[rank], signals, rank) for rank in range(ranks)]


def all_to_all_of(ranks: int, values: int, dtype: torch.dtype) -> list[Callable[[Tensor, Tensor], None]]:
    of_all = [torch.zeros(values, dtype=dtype).share_memory_() for _ in range(ranks)]
    barrier = FORK.Barrier(ranks, timeout=60)

    def of_rank(rank: int) -> Callable[[Tensor, Tensor], None]:
        def all_to_all(received: Tensor, sent: Tensor) -> None:
            of_all[rank][: sent.numel()] = sent
            barrier.wait()
            received.copy_(torch.cat([each[: sent.numel()].chunk(ranks)[rank] for each in of_all]))
            barrier.wait()

        return all_to_all

    return [of_rank(rank) for rank in range(ranks)]


def exchanges(stores: bool, sizes: ExchangeSizes) -> list[Exchange]:
    if stores:
        values = sizes.query_values, result_values(sizes.max_rows * sizes.heads, sizes.dv, sizes.dtype)
        boxes = (mailboxes(sizes.ranks, count, sizes.dtype) for count in values)
        return [Peers(queries, results, sizes) for queries, results in zip(*boxes, strict=True)]
    most = sizes.max_rows * sizes.heads * (sizes.nope + sizes.rope + sizes.dv)
    return [Collectives(each, sizes, "cpu") for each in all_to_all_of(sizes.ranks, most, sizes.dtype)]


@pytest.mark.parametrize(
    ("kind", "dtype", "stores", "ranks"),
    [
        (TorchSharedAttention, torch.float32, False, 2),
        (TorchSharedAttention, FP8, False, 2),
        (TritonSharedAttention, torch.float32, False, 2),
        (TritonSharedAttention, torch.float32, True, 2),
        (TritonSharedAttention, torch.float32, True, 3),
    ],
    ids=["torch", "torch-fp8", "kernels", "stores", "three-store"],
)
def test_ranks_attend_for_each_other(
    kind: type[SharedAttention], dtype: torch.dtype, stores: bool, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank has as many rows as were planned for, the others less, and then none; the same prefix is in other
    chunks of each. In turn, each rank is late. A step that shares nothing the first rank runs without the others, where
    ranks store into each other's memory."""
    each, own = 3, HEADS // ranks
    monkeypatch.setattr(signals, "MOST_PROGRAMS", 6 if ranks == 3 else 264)
    torch.manual_seed(0)
    tokens = CHUNK_TOKENS + 40
    sizes = dict(layers=1, chunks=4, qk_nope_head_dim=DN, v_head_dim=DV, qk_rope_head_dim=DR, dtype=dtype, device="cpu")
    k_nope, v, k_rope = torch.randn(tokens, HEADS, DN), torch.randn(tokens, HEADS, DV), torch.randn(tokens, DR)
    exchanged = ExchangeSizes(ranks, HEADS, each, DN, DR, DV, torch.float32)
    of_ranks, sharded, stored = exchanges(stores, exchanged), [], []
    for rank in range(ranks):
        buffers, chunks = ExpandedBuffers.allocate(heads=own, **sizes), (rank, 3)
        heads = slice(rank * own, (rank + 1) * own)
        for chunk, first in zip(chunks, (0, CHUNK_TOKENS), strict=True):
            of = slice(first, first + CHUNK_TOKENS)
            buffers.write(0, chunk, 0, k_nope[of, heads], v[of, heads], k_rope[of])
        stored.append(buffers.read(0, chunks, tokens))
        of_inner = dict(max_rows=ranks * each, heads=own, segments_per_row=2)
        inner = kind(buffers, **of_inner, **({"num_ctas": 3} if kind is TritonSharedAttention else {}))
        found = ShardedAttention(inner, of_ranks[rank], exchanged, "cpu")
        added = type(of_ranks[rank]).workspace_bytes_for(exchanged)
        assert found.workspace_bytes == inner.workspace_bytes + added
        found.try_out(torch.float32)
        sharded.append(found)
    k_nope, v = (torch.cat([part[index] for part in stored], dim=1).float() for index in (0, 1))
    k_rope = stored[0][2].float()

    def layer(rank: int, rows: int, segments: list[Segment], seed: int) -> float:
        """Return the error of one layer; not finite where a result is not."""
        torch.manual_seed(seed)
        query = torch.randn(rows, HEADS, DN + DR + 1)[..., : DN + DR]
        q_nope, q_rope = query.split([DN, DR], dim=-1)
        tail_out, tail_lse = torch.randn(rows, HEADS, DV), torch.randn(rows, HEADS)
        expected = tail_out.clone()
        for row in range(rows):
            lse = tail_lse[row : row + 1]
            for segment in segments:
                if rank * each + row in segment.rows:
                    of = slice(segment.start, segment.end)
                    parts = reference.naive(
                        q_nope[row : row + 1], q_rope[row : row + 1], k_nope[of], k_rope[of], v[of], 0.1
                    )
                    expected[row : row + 1], lse = reference.merge(*parts, expected[row : row + 1], lse)
        sharded[rank].run(0, q_nope, q_rope, 0.1)
        sharded[rank].merge(tail_out, tail_lse, tail_out)
        return reference.errors(tail_out, expected).rel_l2 if rows else 0.0

    def of_rank(rank: int) -> list[float]:
        errors, chunks = [], (rank, 3)
        for step, less in enumerate((1, each)):
            rows = each if rank == 0 else each - less
            others = tuple(other * each for other in range(1, ranks)) if less < each else ()
            shared = [
                Segment((0, 1, *others), 0, CHUNK_TOKENS, Mode.NAIVE),
                Segment((1, *others), CHUNK_TOKENS, tokens, Mode.NAIVE),
            ]
            planned = [Segment(s.rows, s.start, s.end, s.mode, chunks[s.start // CHUNK_TOKENS :]) for s in shared]
            sharded[rank].plan(planned, each)
            for number in range(4):
                time.sleep(0.02 * ((number + rank) % ranks))
                errors.append(layer(rank, rows, shared, 100 * step + 10 * number + rank))
            sharded[rank].plan([], each)
            if rank == 0 or not stores:
                errors.append(layer(rank, rows, [], rank))
        return errors

    for errors in in_processes(ranks, of_rank):
        assert len(errors) >= 8 and all(error < 1e-6 for error in errors), errors


@pytest.mark.parametrize(("watching", "active"), [(False, 1), (True, 1), (True, 0), (False, 0)])
def test_merging_what_ranks_give_back(watching: bool, active: int) -> None:
    """Rows with both parts, with a tail alone, with no tail, and with no key at all; what is not to be read is NaN.
    Where nothing is shared, that is all that ranks have."""
    torch.manual_seed(1)
    rows, ranks, own, heads = 5, 2, 3, 6
    tail_out, tail_lse = torch.randn(rows, heads, DV), torch.randn(rows, heads) * 20
    results = torch.randn(ranks, rows + 2, own, DV + 16)
    out, lse = results[..., :DV], results[..., DV] * 20
    lse[:, 1], lse[:, 3], lse[1, 4] = -INF, -INF, -INF
    out[lse == -INF] = NAN
    if not active:
        results[:] = NAN
    tail_lse[2], tail_lse[3] = -INF, INF
    tail_out[2:4] = NAN
    q, rope = torch.randn(rows, heads, RANK), torch.randn(rows, heads, DR)
    found = []
    for merge in (merge_ranks, merge_ranks_torch):
        watch = Watch(max_rows=2, heads=heads, columns=RANK + DR, dv=DV, dtype=torch.float32, device="cpu")
        watch.set_target(4, 1)
        merged = tail_out.clone()
        flag = torch.tensor([active], dtype=torch.int32)
        merge(merged, tail_lse, out, lse, flag, Watched(watch, 4, q, rope) if watching else None)
        found.append((merged, watch))
    (merged, watch), (expected, expected_watch) = found
    has_key = [0, 1, 2, 4] if active else [0, 1, 4]  # others are not used
    merged, expected = merged[has_key], expected[has_key]
    assert expected.isfinite().all() and torch.allclose(merged, expected, atol=1e-6)
    assert torch.equal(merged[1], tail_out[1])
    assert watch.query.any() == watching
    assert torch.equal(watch.query, expected_watch.query) and torch.allclose(watch.out, expected_watch.out, atol=1e-6)
    with pytest.raises(ValueError, match="do not fit"):
        merge_ranks(tail_out, tail_lse, out[:1], lse[:1], flag)


@pytest.mark.parametrize(("ranks", "each", "heads", "dtype"), [(2, 5, 3, torch.float16), (3, 40, 5, torch.float32)])
def test_queries_and_results_in_the_memory_of_ranks(
    ranks: int, each: int, heads: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has what is for it in its place, and nothing else is written: not the rows behind those that a rank has, not
    the values of a row without keys, and not what is behind. Rows have none, one, or more partials than a table has
    places."""
    monkeypatch.setattr(signals, "MOST_PROGRAMS", 30)  # programs have two blocks, or one, or none
    torch.manual_seed(0)
    behind, size = 8, result_values(ranks * each * heads, DV, dtype)
    boxes = mailboxes(ranks, ranks * each * heads * (DN + DR) + behind, dtype)
    results = mailboxes(ranks, size + behind, dtype)
    on, off = (torch.tensor([flag], dtype=torch.int32) for flag in (1, 0))
    rows = [each - rank for rank in range(ranks)]
    queries = [torch.randn(count, ranks * heads, DN + DR).to(dtype) for count in rows]
    counts = [(row * 7) % 12 for row in range(ranks * each)]
    pairs = [(row, at) for row, count in enumerate(counts) for at in range(count)]
    table = PartialTable.from_pairs(
        [row for row, _ in pairs], range(len(pairs)), max_rows=ranks * each + 3, max_partials=len(pairs)
    ).to("cpu")
    partials = [(torch.randn(len(pairs), heads, DV), torch.randn(len(pairs), heads) * 5) for _ in range(ranks)]
    for out, lse2 in partials:
        lse2[3], out[3] = -INF, 0.0  # a part of a row without keys

    def of_rank(rank: int) -> None:
        for active in (off, on):  # whoever is not active waits for nobody
            push_to_ranks(*queries[rank].split([DN, DR], dim=-1), boxes[rank], each, active)
            merge_to_ranks(*partials[rank], table, results[rank], each, active)

    in_processes(ranks, of_rank)
    for rank in range(ranks):
        received = boxes[rank].received[:-behind].view(ranks, each, heads, DN + DR)
        for sender in range(ranks):
            of = slice(rank * heads, (rank + 1) * heads)
            assert torch.equal(received[sender, : rows[sender]], queries[sender][:, of])
            assert received[sender, rows[sender] :].isnan().all()
        given, given_lse = results_of(results[rank].received, ranks, each, heads, DV)
        for sender, (out, lse2) in enumerate(partials):
            for row in range(each):
                of = [at for at, (of_row, _) in enumerate(pairs) if of_row == rank * each + row]
                if not of:
                    assert given[sender, row].isnan().all() and (given_lse[sender, row] == -INF).all()
                    continue
                weights = torch.softmax(lse2[of] * torch.log(torch.tensor(2.0)), 0)
                expected = (weights[..., None] * out[of]).sum(0)
                lse = torch.logsumexp(lse2[of] * torch.log(torch.tensor(2.0)), 0)
                rel_l2 = reference.errors(given[sender, row], expected).rel_l2
                assert rel_l2 < (1e-3 if dtype.itemsize == 2 else 1e-6)
                assert torch.allclose(given_lse[sender, row], lse, atol=1e-5)
        for box in (boxes[rank], results[rank]):
            assert box.received[-behind:].isnan().all() and not box.counts.any()


def test_what_does_not_fit_a_mailbox() -> None:
    (box,), active = mailboxes(1, 4 * (DN + DR), torch.float32), torch.zeros(1, dtype=torch.int32)
    nope, rope = torch.randn(2, 2, DN), torch.randn(2, 2, DR)
    push_to_ranks(nope, rope, box, 2, active)
    for first, second, each, message in (
        (nope, rope[:1], 2, "2 rows for 1 ranks"),
        (nope, rope, 1, "1 rows for 1 ranks"),
        (nope, rope, 3, "room for"),
        (nope.half(), rope.half(), 2, "the dtype"),
        (nope.mT.contiguous().mT, rope, 2, "2 rows for 1 ranks"),
    ):
        with pytest.raises(ValueError, match=message):
            push_to_ranks(first, second, box, each, active)
    table = PartialTable.empty(4, 4, "cpu")
    partials = torch.zeros(4, 2, DV), torch.zeros(4, 2)
    for each in (4, 5):
        with pytest.raises(ValueError, match="no room"):
            merge_to_ranks(*partials, table, box, each, active)
