"""Groups in which prefill fetches the rows of an FP8 cache, with FlashInfer's wrapper in plain torch."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

RANK, ROPE, HEADS, SCALE = 6, 2, 3, 0.3


class Wrapper:
    """Attention of each request's new rows to its keys, causal at their end."""

    def __init__(self, workspace: Any, backend: str) -> None: ...

    def plan(self, qo: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, lens: torch.Tensor, *sizes: Any) -> None:
        assert (kv.diff() == lens).all() and len(indices) == kv[-1]
        self.qo, self.kv, self.indices = qo.tolist(), kv.tolist(), indices

    def run(
        self,
        q: torch.Tensor,
        q_rope: torch.Tensor,
        content: torch.Tensor,
        rope: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor,
        **others: bool,
    ) -> None:
        for first, last, start, end in zip(self.qo, self.qo[1:], self.kv, self.kv[1:], strict=False):
            at = self.indices[start:end].long()
            scores = torch.einsum("rhd,kd->rhk", q[first:last], content[at, 0])
            scores = (scores + torch.einsum("rhd,kd->rhk", q_rope[first:last], rope[at, 0])) * SCALE
            later = (
                torch.arange(end - start)[None, :] > torch.arange(last - first)[:, None] + end - start - last + first
            )
            scores = scores.masked_fill(later[:, None], -torch.inf)
            out[first:last] = torch.einsum("rhk,kd->rhd", scores.softmax(-1), content[at, 0])
            lse[first:last] = scores.logsumexp(-1)


@pytest.fixture
def tails(monkeypatch: pytest.MonkeyPatch) -> Any:
    import sglang_mla_ext.adapter.latent.pool  # SGLang first: it looks for FlashInfer

    assert sglang_mla_ext.adapter.latent.pool
    flashinfer = ModuleType("flashinfer")
    flashinfer.BatchMLAPagedAttentionWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.delitem(sys.modules, "sglang_mla_ext.adapter.stock.flashinfer_tails", raising=False)
    from sglang_mla_ext.adapter.stock import flashinfer_tails

    return flashinfer_tails


def test_groups_are_of_neighbours_and_have_all_rows(tails: Any) -> None:
    found = list(tails.groups([3, 4, 9, 1, 1], [1, 2, 1, 1, 4], most=8))
    assert [(one.requests.start, one.requests.stop) for one in found] == [(0, 2), (2, 3), (3, 5)]
    assert [(one.slots.start, one.slots.stop) for one in found] == [(0, 7), (7, 16), (16, 18)]
    assert [(one.rows.start, one.rows.stop) for one in found] == [(0, 3), (3, 4), (4, 9)]
    assert len(list(tails.groups([3, 4], [1, 1], most=8))) == 1 and not list(tails.groups([], [], most=8))


@pytest.mark.parametrize("most", [8, 1 << 19])
def test_few_rows_at_a_time(tails: Any, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Requests that share their first tokens, whose rows are fetched for each of them."""
    rows = torch.randn(40, RANK + ROPE, generator=torch.Generator().manual_seed(1))
    fetched: list[int] = []

    def fetch(layer_id: int, slots: torch.Tensor, out: torch.Tensor) -> None:
        fetched.append(len(slots))
        out.copy_(rows[slots.long()])

    of_request = [[0, 1, 2, 3, 10, 11], [0, 1, 2, 3, 12], [0, 1, 2, 3, 13, 14, 15], [20]]
    new, starts = [2, 1, 3, 1], [0, 2, 0, 0]
    lens = [len(slots) - start for slots, start in zip(of_request, starts, strict=True)]

    def write_slots(batch: Any, translator: Any, slots: torch.Tensor, **ranges: torch.Tensor) -> None:
        slots.copy_(torch.cat([torch.tensor(of[start:]) for of, start in zip(of_request, starts, strict=True)]))

    monkeypatch.setattr(tails, "FETCHED_AT_ONCE", most)
    monkeypatch.setattr(tails, "fp8_rows", lambda pool: SimpleNamespace(fetch=fetch))
    monkeypatch.setattr(tails.installed, "write_slots", write_slots)
    backend = SimpleNamespace(workspace_buffer=None, token_to_kv_pool=None, kv_index_translator=None)
    layer = SimpleNamespace(
        attn_mqa=SimpleNamespace(scaling=SCALE), kv_lora_rank=RANK, qk_rope_head_dim=ROPE, num_local_heads=HEADS
    )
    cached = [len(slots) - more for slots, more in zip(of_request, new, strict=True)]
    batch = SimpleNamespace(extend_seq_lens_cpu=new, extend_prefix_lens_cpu=cached, seq_lens=torch.zeros(4))
    attention = tails.FlashInferTails(backend, layer, torch.float32)
    query = torch.randn(sum(new), HEADS, RANK + ROPE, generator=torch.Generator().manual_seed(2))
    for _ in range(3):  # sets of wrappers take turns
        out, lse = torch.empty(sum(new), HEADS, RANK), torch.empty(sum(new), HEADS)
        attention.plan(batch, starts)
        attention.run(SimpleNamespace(layer_id=0), *query.split([RANK, ROPE], dim=-1), out, lse)
    assert sum(fetched) == 3 * sum(lens) and max(fetched) <= max(most, *lens)
    assert len(fetched) == 3 * (1 if most > 100 else 3)
    first = 0
    for slots, start, more in zip(of_request, starts, new, strict=True):
        keys = rows[slots[start:]]
        for row in range(more):
            seen = keys[: len(keys) - more + row + 1]
            scores = query[first + row] @ seen.T * SCALE
            assert torch.allclose(lse[first + row], scores.logsumexp(-1), atol=1e-5)
            assert torch.allclose(out[first + row], scores.softmax(-1) @ seen[:, :RANK], atol=1e-5)
        first += more
