"""Prefill over expanded prefixes: the plan's rows, the sum of its parts, and what SGLang's own loop is left with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_mla_ext.adapter.prefill.prefill import PrefillPlan
from sglang_mla_ext.adapter.step.layer import around_chunk_info, around_prefix_attention
from sglang_mla_ext.adapter.step.passes import Kind, Pass, passes
from sglang_mla_ext.kernels.naive.attention import TorchSharedAttention
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.storage.expanded import CHUNK_TOKENS, ExpandedBuffers
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Mode, Segment

HEADS, DN, DR, DV, SCALE = 3, 16, 8, 16, 0.2


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Callable[[PrefillPlan | None], None]:
    """`planned(plan)`: the pass that runs is a prefill step with this plan."""

    def set_plan(plan: PrefillPlan | None) -> None:
        monkeypatch.setattr(passes, "now", Pass(Kind.PREFILL, prefill=plan))

    return set_plan


class Setting:
    """Two prefixes, expanded, and keys and values of what follows them."""

    def __init__(self, max_rows: int) -> None:
        torch.manual_seed(0)
        sizes = {"heads": HEADS, "qk_nope_head_dim": DN, "v_head_dim": DV, "qk_rope_head_dim": DR}
        self.buffers = ExpandedBuffers.allocate(layers=2, chunks=4, dtype=torch.float32, device="cpu", **sizes)
        self.attention = TorchSharedAttention(self.buffers, max_rows=max_rows, heads=HEADS)
        self.max_rows = max_rows
        self.counters = Counters()
        self.layer = SimpleNamespace(
            attn_mha=SimpleNamespace(layer_id=7, scaling=SCALE), qk_nope_head_dim=DN, qk_rope_head_dim=DR
        )

    def keys(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.randn(tokens, HEADS, DN), torch.randn(tokens, DR), torch.randn(tokens, HEADS, DV)

    def expanded(self, tokens: int, chunks: tuple[int, ...]) -> tuple[Any, tuple[int, tuple[int, ...]]]:
        k_nope, k_rope, v = keys = self.keys(tokens)
        for index, chunk in enumerate(chunks):
            part = slice(index * CHUNK_TOKENS, (index + 1) * CHUNK_TOKENS)
            self.buffers.write(1, chunk, 0, k_nope[part], v[part], k_rope[part])
        return keys, (tokens, chunks)

    def plan(self, parts: Sequence[Any], new_tokens: Sequence[int], layers: dict[int, int] | None = None) -> Any:
        """Of requests of which these parts are expanded, None for nothing."""
        members: dict[Any, list[int]] = {}
        for request, part in enumerate(parts):
            if part is not None:
                members.setdefault(part, []).append(request)
        plan = Plan(
            len(parts),
            tuple(Segment(tuple(rows), 0, part[0], Mode.NAIVE, part[1]) for part, rows in members.items()),
        )
        rows, layers = Rows.of(new_tokens), layers or {7: 1}
        of_server = dict(attention=self.attention, layer_index=layers, max_rows=self.max_rows, counters=self.counters)
        return PrefillPlan.make(plan, rows, **of_server)


@pytest.mark.parametrize("max_rows", [64, 5, 1])
def test_expanded_part_and_new_tokens_are_attention_over_both(max_rows: int, planned: Any) -> None:
    """Four requests: two on one prefix, one on another, one on none; the last has no new tokens beside it."""
    setting = Setting(max_rows)
    (keys_a, part_a), (keys_b, part_b) = setting.expanded(300, (2, 0)), setting.expanded(17, (3,))
    own = [part_a, part_b, part_a, None]
    cached = [keys_a, keys_b, keys_a, None]
    new_tokens = [4, 3, 2, 1]
    plan = setting.plan(own, new_tokens)
    assert plan.covered == (300, 17, 300, 0)

    query, out, lse, expected, expected_lse = [], [], [], [], []
    for count, before in zip(new_tokens, cached, strict=True):
        q = torch.randn(count, HEADS, DN + DR)
        k_nope, k_rope, v = setting.keys(count)
        k = torch.cat([k_nope, k_rope[:, None].expand(-1, HEADS, -1)], dim=-1)
        part_out, part_lse = reference.causal(q, k, v, SCALE)
        query.append(q), out.append(part_out), lse.append(part_lse)
        if before is not None:
            prefix = reference.naive(q[..., :DN], q[..., DN:], *before[:2], before[2], SCALE)
            part_out, part_lse = reference.merge(*prefix, part_out, part_lse)
        expected.append(part_out), expected_lse.append(part_lse)
    out, lse = torch.cat(out), torch.cat(lse)
    forward_batch = SimpleNamespace(extend_prefix_lens_cpu=[300, 17, 300, 0])
    planned(plan)
    seen = []
    around_prefix_attention(
        lambda layer, **left: seen.append(left), setting.layer, torch.cat(query), out, lse, forward_batch
    )
    torch.testing.assert_close(out, torch.cat(expected))
    torch.testing.assert_close(lse, torch.cat(expected_lse))
    assert seen[0]["accum_output"] is out and seen[0]["accum_lse"] is lse


def test_what_is_counted_has_happened(planned: Any) -> None:
    """Once a step, in its first layer, and not for a pass that has no plan."""
    setting = Setting(8)
    _, part = setting.expanded(300, (0, 1))
    plan = setting.plan([part, None], [2, 1], {7: 0})
    out, lse = torch.zeros(3, HEADS, DV), torch.zeros(3, HEADS)
    batch = SimpleNamespace(extend_prefix_lens_cpu=[300, 0])
    for of_pass, counted in ((None, 0), (plan, 300)):
        planned(of_pass)
        query = torch.randn(3, HEADS, DN + DR)
        around_prefix_attention(lambda layer, **left: None, setting.layer, query, out, lse, batch)
        assert setting.counters.prefill_tokens_saved == counted
    assert setting.counters.prefills_naive == 1


def test_nothing_expanded_or_no_request_is_no_plan(planned: Any) -> None:
    setting = Setting(8)
    assert setting.plan([None] * 2, [5, 9]) is None
    assert setting.plan([], []) is None
    batch = SimpleNamespace(extend_prefix_lens_cpu=[5, 9])
    planned(None)
    out = torch.zeros(1)
    result = around_prefix_attention(lambda layer, accum_output, **left: accum_output, None, None, out, None, batch)
    assert result is out


def test_rows_without_an_expanded_prefix_are_in_no_window() -> None:
    setting = Setting(4)
    _, part = setting.expanded(17, (1,))
    plan = setting.plan([None, part, None], [8, 2, 9])
    assert [(window.start, window.stop) for window in plan.windows] == [(8, 12)]


class ForwardBatch:
    """SGLang's own bookkeeping of chunks; only the gathering of slots, a GPU kernel, is done in torch."""

    @staticmethod
    def make(prefix_lens: list[int], covered: tuple[int, ...]) -> tuple[Any, PrefillPlan]:
        from sglang.srt.model_executor.forward_batch_deepseek_mha_mixin import ForwardBatchDeepSeekMHAMixin

        class Batch(ForwardBatchDeepSeekMHAMixin):
            batch_size = len(prefix_lens)
            extend_prefix_lens_cpu = prefix_lens
            extend_prefix_lens = torch.tensor(prefix_lens, dtype=torch.int32)

            def get_max_chunk_capacity(self) -> int:
                return 256 * len(prefix_lens)

            def prepare_chunked_kv_indices(self, device: torch.device, *newer: Any) -> None:
                self.prefix_chunk_kv_indices = [
                    [(request, start + token) for request in range(self.batch_size)
                     for start, count in [(starts[request].item(), lens[request].item())] for token in range(count)]
                    for starts, lens in zip(self.prefix_chunk_starts, self.prefix_chunk_seq_lens, strict=True)
                ]  # fmt: skip

        return Batch(), PrefillPlan(covered, (), None, {}, Counters())

    @staticmethod
    def prepare(batch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
        from sglang.srt.model_executor import forward_batch_deepseek_mha_mixin as module

        pool = MLATokenToKVPool.__new__(MLATokenToKVPool)
        monkeypatch.setattr(module, "get_token_to_kv_pool", lambda: pool)
        original = module.ForwardBatchDeepSeekMHAMixin.prepare_chunked_prefix_cache_info
        around_chunk_info(original, batch, torch.device("cpu"))


@pytest.mark.parametrize(
    ("prefix_lens", "covered"),
    [
        ([1000, 700, 3], (600, 700, 0)),
        ([1000, 0, 513], (999, 0, 512)),
        ([300, 600], (0, 0)),
    ],
)
def test_chunks_cover_the_rest_once(
    prefix_lens: list[int], covered: tuple[int, ...], planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, plan = ForwardBatch.make(prefix_lens, covered)
    planned(plan)
    lens = batch.extend_prefix_lens
    ForwardBatch.prepare(batch, monkeypatch)
    found = sorted(pair for chunk in batch.prefix_chunk_kv_indices for pair in chunk)
    rest = [(i, t) for i, (end, start) in enumerate(zip(prefix_lens, covered, strict=True)) for t in range(start, end)]
    assert found == rest
    assert [len(chunk) for chunk in batch.prefix_chunk_kv_indices] == batch.prefix_chunk_num_tokens
    assert batch.extend_prefix_lens is lens and batch.extend_prefix_lens_cpu == prefix_lens
    assert torch.equal(batch.prefix_chunk_starts, batch.prefix_chunk_starts_cpu)


def test_nothing_left_is_no_chunk(planned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, plan = ForwardBatch.make([256, 0, 90], (256, 0, 90))
    batch.extend_prefix_lens = None  # nothing on the device is looked at
    planned(plan)
    ForwardBatch.prepare(batch, monkeypatch)
    assert batch.num_prefix_chunks == 0


@pytest.mark.parametrize("on_gpu", [False, True])
def test_drafts_are_verified_by_absorb(monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    """SGLang counts a verify step as prefill, too."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    from sglang_mla_ext.adapter.step.layer import forward_method

    monkeypatch.setattr(torch.cuda, "is_available", lambda: on_gpu)
    monkeypatch.setattr(handlers, "mla_use_prefill_cp", lambda forward_batch: False, raising=False)
    layer = SimpleNamespace(
        flashinfer_mla_disable_ragged=False,
        chunked_prefix_cache_threshold=0,
        disable_chunked_prefix_cache=False,
        qk_rope_head_dim=64,
    )
    monkeypatch.setattr(passes, "now", Pass(Kind.of(ForwardMode.TARGET_VERIFY)))
    batch = SimpleNamespace(forward_mode=ForwardMode.TARGET_VERIFY, extend_prefix_lens_cpu=None, seq_lens_cpu=None)
    assert batch.forward_mode.is_extend()
    assert forward_method(layer, batch) is handlers.AttnForwardMethod.MLA


def test_windows_of_the_same_rows_have_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt fills window after window; only the last one, and one that begins another request, are others."""
    setting = Setting(max_rows=5)
    (_, part_a), (_, part_b) = setting.expanded(300, (2, 0)), setting.expanded(17, (3,))
    made, make_plan = [], setting.attention.make_plan
    monkeypatch.setattr(setting.attention, "make_plan", lambda *args: made.append(args) or make_plan(*args))
    plan = setting.plan([part_a, part_b], [17, 5])
    assert [(window.start, window.stop) for window in plan.windows] == [(0, 5), (5, 10), (10, 15), (15, 20), (20, 22)]
    assert len(made) == 3 and plan.windows[0].plan is plan.windows[2].plan is not plan.windows[3].plan
