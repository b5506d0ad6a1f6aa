"""Attention to prefixes that ranks hold together, each with its heads, against the reference over all heads: ranks are
threads, which meet in an exchange as of torch's all-to-all. And the kernel that merges what they give back."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from sglang_mla_ext.kernels.naive.attention import SharedAttention, TorchSharedAttention
from sglang_mla_ext.kernels.naive.merge_ranks import merge_ranks, merge_ranks_torch
from sglang_mla_ext.kernels.naive.push_to_ranks import push_to_ranks, push_to_ranks_torch
from sglang_mla_ext.kernels.naive.sharded import ShardedAttention
from sglang_mla_ext.kernels.naive.triton_attention import TritonSharedAttention
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.kernels.storage.expanded import FP8, ExpandedBuffers
from sglang_mla_ext.kernels.watch import Watch, Watched
from sglang_mla_ext.segment import Mode, Segment

HEADS, DN, DR, DV, RANK = 4, 16, 16, 16, 32
NAN, INF = float("nan"), float("inf")


class Meeting:
    def __init__(self, ranks: int) -> None:
        self._ranks, self._barrier = ranks, threading.Barrier(ranks, timeout=60)
        self._sent: list[Tensor] = [torch.empty(0)] * ranks

    def exchange(self, rank: int):
        def all_to_all(received: Tensor, sent: Tensor) -> None:
            self._sent[rank] = sent
            self._barrier.wait()
            received.copy_(torch.cat([each.chunk(self._ranks)[rank] for each in self._sent]))
            self._barrier.wait()

        return all_to_all


ONE_AT_A_TIME = threading.Lock()
"""For Triton's interpreter."""


class StoringPeer:
    """As naive/peers.py, of a rank that is a thread: a rank may store again while others still read, but for what the
    exchange itself waits for."""

    def __init__(self, rank: int, meeting: StoringMeeting) -> None:
        self._rank, self._meeting = rank, meeting

    def zeros(self, count: int, *, dtype: torch.dtype, device: str) -> Tensor:
        buffer = torch.zeros(count, dtype=dtype, device=device)
        self._meeting.buffers[self._rank].append(buffer)
        return buffer

    def exchange(self, received: Tensor, sent: Tensor) -> None:
        mine = [buffer.data_ptr() for buffer in self._meeting.buffers[self._rank]]
        number = mine.index(received.data_ptr())
        addresses = torch.tensor([buffers[number].data_ptr() for buffers in self._meeting.buffers])
        with ONE_AT_A_TIME:
            push_to_ranks(sent, addresses, self._rank)
        self._meeting.barrier.wait()


class StoringMeeting:
    def __init__(self, ranks: int) -> None:
        self.buffers: list[list[Tensor]] = [[] for _ in range(ranks)]
        self.barrier = threading.Barrier(ranks, timeout=60)


def make_attention(kind: type[SharedAttention], buffers: ExpandedBuffers, rows: int) -> SharedAttention:
    sizes = dict(max_rows=rows, heads=buffers.heads, segments_per_row=2)
    if kind is TorchSharedAttention:
        return kind(buffers, **sizes)

    class OneAtATime(TritonSharedAttention):
        def run(self, *args, **kwargs):
            with ONE_AT_A_TIME:
                super().run(*args, **kwargs)

        def merge(self, *args, **kwargs):
            with ONE_AT_A_TIME:
                return super().merge(*args, **kwargs)

    return OneAtATime(buffers, num_ctas=3, **sizes)


@pytest.mark.parametrize(
    ("kind", "dtype", "stores"),
    [
        (TorchSharedAttention, torch.float32, False),
        (TorchSharedAttention, torch.float32, True),
        (TorchSharedAttention, FP8, False),
        (TritonSharedAttention, torch.float32, False),
    ],
    ids=["torch", "torch-stores", "torch-fp8", "kernels"],
)
def test_ranks_attend_for_each_other(kind: type[SharedAttention], dtype: torch.dtype, stores: bool) -> None:
    """Two ranks, of which one has less rows than were planned for, and then none; the same prefix in other chunks."""
    ranks, each, own = 2, 3, HEADS // 2
    torch.manual_seed(0)
    tokens = CHUNK_TOKENS + 40
    sizes = dict(layers=1, chunks=3, qk_nope_head_dim=DN, v_head_dim=DV, qk_rope_head_dim=DR, dtype=dtype, device="cpu")
    k_nope, v, k_rope = torch.randn(tokens, HEADS, DN), torch.randn(tokens, HEADS, DV), torch.randn(tokens, DR)
    meeting, sharded, stored = Meeting(ranks), [], []
    storing = StoringMeeting(ranks)
    for rank in range(ranks):
        buffers, chunks = ExpandedBuffers.allocate(heads=own, **sizes), (rank, 2)
        heads = slice(rank * own, (rank + 1) * own)
        for chunk, first in zip(chunks, (0, CHUNK_TOKENS), strict=True):
            of = slice(first, first + CHUNK_TOKENS)
            buffers.write(0, chunk, 0, k_nope[of, heads], v[of, heads], k_rope[of])
        stored.append(buffers.read(0, chunks, tokens))
        of_attention = dict(heads=HEADS, max_rows=each, qk_nope_head_dim=DN, qk_rope_head_dim=DR, v_head_dim=DV)
        of_attention |= dict(dtype=torch.float32)
        inner = make_attention(kind, buffers, ranks * each)
        peers = StoringPeer(rank, storing) if stores else None
        exchange, receiving = (peers.exchange, peers.zeros) if peers else (meeting.exchange(rank), None)
        found = ShardedAttention(inner, exchange, ranks=ranks, device="cpu", receiving=receiving, **of_attention)
        added = ShardedAttention.workspace_bytes_for(**of_attention)
        assert found.workspace_bytes == inner.workspace_bytes + added
        found.try_out(torch.float32)
        sharded.append(found)
    k_nope, v = (torch.cat([part[index] for part in stored], dim=1).float() for index in (0, 1))
    k_rope = stored[0][2].float()

    def of_rank(rank: int, rows: int, segments: list[Segment], scale: float = 0.1) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(rank)
        q_nope = torch.randn(rows, HEADS, DN, generator=generator)
        q_rope = torch.randn(rows, HEADS, DR, generator=generator)
        tail_out = torch.randn(rows, HEADS, DV, generator=generator)
        tail_lse = torch.randn(rows, HEADS, generator=generator)
        expected = tail_out.clone()
        for row in range(rows):
            lse = tail_lse[row : row + 1]
            for segment in segments:
                if rank * each + row in segment.rows:
                    of = slice(segment.start, segment.end)
                    parts = reference.naive(
                        q_nope[row : row + 1], q_rope[row : row + 1], k_nope[of], k_rope[of], v[of], scale
                    )
                    expected[row : row + 1], lse = reference.merge(*parts, expected[row : row + 1], lse)
        attention = sharded[rank]
        chunks = (rank, 2)
        attention.plan(
            [Segment(s.rows, s.start, s.end, s.mode, chunks[s.start // CHUNK_TOKENS :]) for s in segments],
            each,
        )
        attention.run(0, q_nope, q_rope, scale)
        attention.merge(tail_out, tail_lse, tail_out)
        return tail_out, expected

    for rows in ((3, 2), (2, 0)):
        others = (each,) if rows[1] else ()
        shared = [
            Segment((0, 1, *others), 0, CHUNK_TOKENS, Mode.NAIVE),
            Segment((1, *others), CHUNK_TOKENS, tokens, Mode.NAIVE),
        ]
        with ThreadPoolExecutor(ranks) as threads:
            answers = list(threads.map(of_rank, range(ranks), rows, [shared] * ranks))
        for actual, expected in answers:
            assert actual.isfinite().all()
            if len(actual):
                assert reference.errors(actual, expected).rel_l2 < 1e-6


@pytest.mark.parametrize("watching", [False, True])
def test_merging_what_ranks_give_back(watching: bool) -> None:
    """Rows with both parts, with a tail alone, with no tail, and with no key at all; what is not to be read is NaN."""
    torch.manual_seed(1)
    rows, ranks, own, heads = 5, 2, 3, 6
    tail_out, tail_lse = torch.randn(rows, heads, DV), torch.randn(rows, heads) * 20
    results = torch.randn(ranks, rows + 2, own, DV + 16)
    out, lse = results[..., :DV], results[..., DV] * 20
    lse[:, 1], lse[:, 3], lse[1, 4] = -INF, -INF, -INF
    out[lse == -INF] = NAN
    tail_lse[2], tail_lse[3] = -INF, INF
    tail_out[2:4] = NAN
    q, rope = torch.randn(rows, heads, RANK), torch.randn(rows, heads, DR)
    found = []
    for merge in (merge_ranks, merge_ranks_torch):
        watch = Watch(max_rows=2, heads=heads, columns=RANK + DR, dv=DV, dtype=torch.float32, device="cpu")
        watch.set_target(4, 1)
        merged = tail_out.clone()
        merge(merged, tail_lse, out, lse, Watched(watch, 4, q, rope) if watching else None)
        found.append((merged, watch))
    (merged, watch), (expected, expected_watch) = found
    merged, expected = (torch.cat([each[:3], each[4:]]) for each in (merged, expected))  # without any key: not used
    assert expected.isfinite().all() and torch.allclose(merged, expected, atol=1e-6)
    assert torch.equal(merged[1], tail_out[1])
    assert watch.query.any() == watching
    assert torch.equal(watch.query, expected_watch.query) and torch.allclose(watch.out, expected_watch.out, atol=1e-6)
    with pytest.raises(ValueError, match="do not fit"):
        merge_ranks(tail_out, tail_lse, out[:1], lse[:1])


@pytest.mark.parametrize(("ranks", "part"), [(2, 4), (3, 1028), (4, 12000)])
def test_stores_into_the_memory_of_ranks(ranks: int, part: int) -> None:
    """Each gets what is for it in its place, and nothing else is written: not the other ranks' places, and not what
    is behind."""
    sent = torch.randn(ranks * part)
    found, expected = ([torch.full((ranks * part + 8,), NAN) for _ in range(ranks)] for _ in range(2))
    for me in (0, ranks - 1):
        push_to_ranks(sent, torch.tensor([buffer.data_ptr() for buffer in found]), me)
        push_to_ranks_torch(sent, [buffer[: ranks * part] for buffer in expected], me)
    for actual, wanted in zip(found, expected, strict=True):
        assert torch.equal(actual.nan_to_num(7.0), wanted.nan_to_num(7.0)) and actual[-8:].isnan().all()
    addresses = torch.tensor([buffer.data_ptr() for buffer in found])
    with pytest.raises(ValueError, match="whole words"):
        push_to_ranks(torch.randn(ranks), addresses, 0)
    with pytest.raises(ValueError, match="parts of whole words"):
        push_to_ranks(torch.randn(4 * ranks, ranks).T, addresses, 0)
    with pytest.raises(ValueError, match=f"rank {ranks} of"):
        push_to_ranks(sent, addresses, ranks)


def test_ranks_that_store_wait_for_each_other() -> None:
    """Layers one after the other, ranks that are late in turn: no rank stores over what another still reads."""
    ranks, rows, layers = 3, 2, 12
    storing = StoringMeeting(ranks)
    sizes = dict(heads=3, max_rows=rows, qk_nope_head_dim=DN, qk_rope_head_dim=DR, v_head_dim=DV)

    class Late:
        """Attention that answers each head's first value plus the layer, after a while."""

        def __init__(self, rank: int) -> None:
            self.rank = rank

        def plan(self, segments: object, rows: int) -> None: ...

        def run(self, layer: int, q_nope: Tensor, q_rope: Tensor, scale: float) -> None:
            time.sleep(0.01 * ((layer + self.rank) % ranks))
            self._answer = q_nope[..., :1] + layer

        def merge(self, tail_out: Tensor, tail_lse: Tensor, out: Tensor, lse: Tensor) -> None:
            out.copy_(self._answer.expand_as(out))
            lse.zero_()

    def of_rank(rank: int) -> None:
        peer = StoringPeer(rank, storing)
        attention = ShardedAttention(
            Late(rank), peer.exchange, ranks=ranks, dtype=torch.float32, device="cpu", receiving=peer.zeros, **sizes
        )
        storing.barrier.wait()
        attention.plan([], rows)
        for layer in range(layers):
            q_nope = torch.full((rows, 3, DN), 100.0 * rank) + torch.arange(3)[None, :, None] * 10
            out, lse = torch.zeros(rows, 3, DV), torch.full((rows, 3), -INF)
            attention.run(layer, q_nope, torch.zeros(rows, 3, DR), 1.0)
            time.sleep(0.01 * ((layer + 2 * rank) % ranks))
            attention.merge(out, lse, out)
            assert torch.equal(out, (q_nope[..., :1] + layer).expand_as(out)), (rank, layer)

    with ThreadPoolExecutor(ranks) as threads:
        list(threads.map(of_rank, range(ranks)))
