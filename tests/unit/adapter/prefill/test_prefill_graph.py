"""Prefill by absorb that shares: latent tails and expanded prefixes, merged, are attention over all keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_transient import DN, DR, DV, HEADS, RANK, SCALE, SLOTS, View, make_layer, tree

from sglang_mla_ext.adapter.prefill.prefill import PrefillPlan
from sglang_mla_ext.adapter.prefill.prefill_graph import PrefillGraph
from sglang_mla_ext.adapter.prefill.transient import TransientExpansion
from sglang_mla_ext.adapter.step.backend import HybridMLABackend
from sglang_mla_ext.kernels.dispatch import make_kept_part
from sglang_mla_ext.kernels.memory import Memory
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.rows import Rows

MAX_ROWS, PADDED = 16, 12
"""Rows of the largest graph, and of the one that runs: more than the pass has."""


class Tails:
    """adapter.stock.protocol.PrefillTails over a pool in which each request's tokens lie in the order of `View`."""

    def __init__(self, rows_of_layer: dict[int, torch.Tensor], slots: list[torch.Tensor]) -> None:
        self._rows, self._slots = rows_of_layer, slots

    def plan(self, batch: Any, starts: Any) -> None:
        self.starts, self.new = list(starts), list(batch.extend_seq_lens_cpu)

    def run(self, layer: Any, q_absorbed: Any, q_rope: Any, out: Any, lse: Any) -> None:
        first = 0
        for start, new, slots in zip(self.starts, self.new, self._slots, strict=True):
            keys = self._rows[layer.layer_id][slots[start:], 0]
            for row in range(new):
                seen = len(keys) - (new - 1 - row)
                query = q_absorbed[first + row, None], q_rope[first + row, None]
                part, part_lse = reference.absorb(*query, keys[None, :seen], torch.tensor([seen]), SCALE)
                out[first + row], lse[first + row] = part[0], part_lse[0]
            first += new


@pytest.mark.parametrize("pays", [lambda rows, tokens: False, lambda rows, tokens: True], ids=["shared", "and alone"])
def test_a_pass_attends_to_all_keys(pays: Any) -> None:
    """In two layers, over shared prefixes and histories of single requests that the pass expands for itself; one
    request has nothing cached, another no new tokens. Rows of padding keep what they are."""
    torch.manual_seed(0)
    layers = [make_layer(7), make_layer(9)]
    for layer in layers:
        layer.kv_b_proj.weight[:] = torch.randn_like(layer.kv_b_proj.weight)
    latent = {layer.attn_mqa.layer_id: torch.randn(SLOTS, 1, RANK + DR) for layer in layers}
    pool = SimpleNamespace(get_key_buffer=latent.__getitem__)
    view = View(tree("cd.cb"))
    cached, new_tokens = [1200, 800, 0, 1150, 1010], [2, 3, 1, 0, 4]
    order = view.slots_of
    slots = [order[:1200], torch.cat([order[:700], order[1200:1300]]), order[:0], order[:1150], order[:1010]]
    own = torch.randperm(SLOTS - 1300) + 1300  # new tokens
    for request, new in enumerate(new_tokens):
        slots[request] = torch.cat([slots[request], order[own[10 * request : 10 * request + new]]])
    req_to_token = torch.zeros(5, 2000, dtype=torch.int32)
    for request, of_request in enumerate(slots):
        req_to_token[request, : len(of_request)] = of_request

    transient = TransientExpansion(
        *(layers[0], pool, req_to_token, 1024, Memory()),
        **dict(dtype=torch.float32, device="cpu", tiles=(), rows=MAX_ROWS),
    )
    transient.attach(view)
    reqs = [SimpleNamespace(req_pool_idx=row, kv=SimpleNamespace(req_pool_idx=row)) for row in range(5)]
    rows = Rows.of(new_tokens)
    made = transient.plan(reqs, cached, [0] * 5, rows, always=True, pays=pays)
    assert made.ends == ((1200, 800, 0, 1150, 1010) if pays(1, 1) else (1150, 700, 0, 1150, 1000))
    of_server = dict(attention=None, layer_index={7: 0, 9: 1}, max_rows=MAX_ROWS, counters=Counters())
    plan = PrefillPlan.make(Plan(5), rows, made, **of_server)

    kept = make_kept_part(MAX_ROWS, HEADS, DV, dtype=torch.float32, device="cpu")
    graph = PrefillGraph(layers, Tails(latent, slots), kept)
    batch = SimpleNamespace(extend_seq_lens_cpu=new_tokens, extend_prefix_lens_cpu=cached)
    for sharing in (plan, None, plan):
        graph.begin(batch, sharing)
        for layer in layers:
            weights = layer.kv_b_proj.weight.view(HEADS, DN + DV, RANK)
            w_k, w_v = weights[:, :DN], weights[:, DN:]
            q_nope, q_rope = torch.randn(PADDED, HEADS, DN), torch.randn(PADDED, HEADS, DR)
            total = sum(new_tokens)
            q_absorbed = torch.einsum("thd,hdr->thr", q_nope, w_k)
            out = torch.full((PADDED, HEADS, RANK), torch.nan)
            graph.attend(layer.attn_mqa, q_nope, q_absorbed[:total], q_rope[:total], out[:total])
            result = torch.einsum("thr,hvr->thv", out, w_v)
            result[total:] = 5.0
            merged = graph.merge(result.flatten(1)).view(PADDED, HEADS, DV)
            expected, first = [], 0
            for new, of_request in zip(new_tokens, slots, strict=True):
                keys = latent[layer.attn_mqa.layer_id][of_request, 0]
                k_nope, v = torch.einsum("tr,hdr->htd", keys[:, :RANK], weights).split([DN, DV], dim=-1)
                for row in range(new):
                    seen = len(keys) - (new - 1 - row)
                    query = q_nope[first + row, None], q_rope[first + row, None]
                    parts = k_nope.transpose(0, 1)[:seen], keys[:seen, RANK:], v.transpose(0, 1)[:seen]
                    expected.append(reference.naive(*query, *parts, SCALE)[0])
                first += new
            torch.testing.assert_close(merged[:total], torch.cat(expected), rtol=1e-4, atol=1e-4)
            assert (merged[total:] == 5.0).all()


def test_an_idle_rank_merges_nothing() -> None:
    """It replays a graph with rows of padding alone, after a pass that shared."""
    kept = make_kept_part(MAX_ROWS, HEADS, DV, dtype=torch.float32, device="cpu")
    graph = PrefillGraph([make_layer(7)], None, kept)
    kept.select(4)
    kept.lse[:4], kept.out[:4] = 0.0, torch.nan
    graph.begin(SimpleNamespace(extend_seq_lens_cpu=None), None)
    before = torch.randn(PADDED, HEADS * DV)
    assert torch.equal(graph.merge(before.clone()), before)


def test_where_nothing_is_expanded_there_is_no_query_before_absorption() -> None:
    """With an FP8 cache, whose rows SGLang's own attention does not read."""
    seen: list[torch.Tensor] = []
    tails = SimpleNamespace(run=lambda layer, q, q_rope, out, lse: (seen.append(q), out.copy_(q)))
    kept = make_kept_part(MAX_ROWS, HEADS, DV, dtype=torch.float32, device="cpu")
    backend = object.__new__(HybridMLABackend)
    backend._prefill_graph, backend._heads = PrefillGraph([make_layer(7)], tails, kept), HEADS
    query, rope = torch.randn(PADDED, HEADS, RANK), torch.randn(PADDED, HEADS, DR)
    layer = SimpleNamespace(layer_id=7, v_head_dim=RANK)
    out = backend._absorb_prefill(query, rope, None, layer, SimpleNamespace())
    assert torch.equal(out.view(query.shape), query) and len(seen) == 1
