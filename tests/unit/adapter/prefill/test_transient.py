"""What a prefill pass expands for itself: which ranges, and that attention over them is attention over the prefix."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_mla_ext.adapter.prefill.prefill import PrefillPlan
from sglang_mla_ext.adapter.prefill.transient import TransientExpansion
from sglang_mla_ext.kernels.memory import Memory
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.observe import Counters
from sglang_mla_ext.prefix.planner.branches import Branches
from sglang_mla_ext.prefix.planner.plan import Plan
from sglang_mla_ext.prefix.planner.transient import transient_ranges
from sglang_mla_ext.prefix.tree import SharedTree
from sglang_mla_ext.rows import Rows

# Below `a`, 700 tokens, are `b` with 300 more and `d` with 100 more; below `b` is `c` with 200 more.
NODES, PARENTS, ENDS = ("a", "b", "c", "d"), (-1, 0, 1, 0), (700, 1000, 1200, 800)
NAMED = {"": -1, **{name: index for index, name in enumerate(NODES)}}

CACHED = [1300, 1200, 1000, 800]


def tree(deepest: str) -> SharedTree:
    """Of requests that end in these nodes, `.` for none."""
    return SharedTree(NODES, PARENTS, ENDS, [NAMED[name.strip(".")] for name in deepest])


@pytest.mark.parametrize(
    ("deepest", "cached", "covered", "expected"),
    [
        ("aa.", [705, 700, 3], [0, 0, 0], [("a", 0, 700, (0, 1))]),
        (
            "ccbd",
            CACHED,
            [0] * 4,
            [("a", 0, 700, (0, 1, 2, 3)), ("b", 700, 1000, (0, 1, 2)), ("c", 1000, 1200, (0, 1))],
        ),
        ("ccbd", CACHED, [900, 900, 900, 700], [("b", 900, 1000, (0, 1, 2)), ("c", 1000, 1200, (0, 1))]),
        ("ccbd", CACHED, [1200, 1200, 1000, 800], []),
        ("aab", [700, 640, 1000], [0] * 3, [("a", 0, 640, (0, 1, 2))]),
        ("bba", [1000, 1000, 0], [0] * 3, [("a", 0, 700, (0, 1)), ("b", 700, 1000, (0, 1))]),
        ("bbb", [1000] * 3, [0, 256, 256], [("b", 256, 1000, (1, 2))]),
        ("abcd", [700, 1000, 1200, 800], [700, 0, 0, 0], [("a", 0, 700, (1, 2, 3)), ("b", 700, 1000, (1, 2))]),
        ("...", [5, 6, 7], [0] * 3, []),
    ],
    ids=[
        *("one", "nested", "partly expanded", "expanded", "a prefix not all cached", "nothing cached"),
        *("expanded for some", "expanded for one", "nothing shared"),
    ],
)
def test_ranges_follow_what_is_expanded_without_a_gap(
    deepest: str, cached: list[int], covered: list[int], expected: list[Any]
) -> None:
    found = transient_ranges(Branches(tree(deepest)), cached, covered, fewest=1)
    assert [(one.node, one.start, one.end, one.requests) for one in found] == expected
    assert all(one.node_end == ENDS[NAMED[one.node]] for one in found)


def test_a_range_that_saves_little_is_left_and_all_that_follows_it() -> None:
    branches = Branches(tree("cccd"))
    assert [one.end for one in transient_ranges(branches, [1200] * 3 + [800], [0] * 4, fewest=1001)] == [700]
    assert [one.end for one in transient_ranges(branches, [1200] * 3 + [800], [0] * 4, fewest=1000)] == [700, 1200]
    assert transient_ranges(branches, [1200] * 3 + [800], [0] * 4, fewest=2101) == []


HEADS, DN, DR, DV, RANK, SLOTS, SCALE = 2, 16, 8, 16, 32, 2000, 0.2


class View:
    """A tree whose nodes' tokens lie anywhere in the pool."""

    def __init__(self, shared: SharedTree) -> None:
        self._shared, self.forgotten = shared, 0
        self.slots_of = torch.randperm(SLOTS)

    def shared(self, reqs: Any) -> SharedTree:
        return self._shared

    def slots(self, node: str, node_end: int, start: int, end: int) -> torch.Tensor:
        """`d` is not behind `b`."""
        assert start < end <= node_end == ENDS[NAMED[node]]
        first = 1200 if node == "d" else 0
        return self.slots_of[first + start - 700 : first + end - 700] if first else self.slots_of[start:end]

    def forget(self) -> None:
        self.forgotten += 1


def make_layer(layer_id: int) -> Any:
    weight = torch.randn(HEADS * (DN + DV), RANK)
    project = SimpleNamespace(weight=weight)
    return SimpleNamespace(
        attn_mqa=SimpleNamespace(layer_id=layer_id),
        attn_mha=SimpleNamespace(layer_id=layer_id, scaling=SCALE),
        kv_b_proj=type("Projection", (), {"weight": weight, "__call__": lambda self, x: (x @ weight.t(), None)})(),
        kv_a_layernorm=SimpleNamespace(weight=torch.ones(RANK)),
        num_local_heads=HEADS,
        kv_lora_rank=RANK,
        qk_nope_head_dim=DN,
        qk_rope_head_dim=DR,
        v_head_dim=DV,
        project=project,
    )


@pytest.mark.parametrize("tokens", [CHUNK_TOKENS, 4 * CHUNK_TOKENS])
@pytest.mark.parametrize(("max_rows", "fetches"), [(3, False), (64, False), (64, True)])
def test_attention_over_what_a_pass_expands(tokens: int, max_rows: int, fetches: bool) -> None:
    """In two layers, of nested prefixes in uneven pieces, rows in windows; one request shares nothing. From SGLang's
    pool, or one whose rows are fetched first, as those in FP8 are."""
    torch.manual_seed(0)
    layers = [make_layer(7), make_layer(9)]
    latent_rows = {layer.attn_mqa.layer_id: torch.randn(SLOTS, 1, RANK + DR) for layer in layers}
    pool = SimpleNamespace(get_key_buffer=latent_rows.__getitem__)
    if fetches:
        pool = SimpleNamespace(fetch=lambda layer_id, slots, out: out.copy_(latent_rows[layer_id][slots, 0]))
    transient = TransientExpansion(
        *(layers[0], pool, torch.zeros(0), tokens, Memory()),
        **dict(dtype=torch.float32, device="cpu", tiles=(), rows=max_rows),
    )
    view = View(tree("cd.cb"))
    cached, new_tokens = [1200, 800, 17, 1150, 1000], [2, 3, 1, 0, 4]
    rows = Rows.of(new_tokens)
    assert transient.plan(range(5), cached, [0] * 5, rows, always=True) is None, "no tree yet"
    transient.attach(view)
    assert transient.plan(range(1), [1200], [0], Rows.of([2]), always=True) is None, "one request alone"
    assert transient.plan(range(5), [9] * 5, [0] * 5, rows) is None, "it saves too little"
    plan = transient.plan(range(5), cached, [0] * 5, rows, always=True)
    # Of `d` there is one request. Those that end in `c` have 1,150 tokens of it in common.
    assert plan.ends == (1150, 700, 0, 1150, 1000) and plan.expanded_tokens == 1150
    counters = Counters()
    of_server = dict(attention=None, layer_index={7: 0, 9: 1}, max_rows=max_rows, counters=counters)
    step = PrefillPlan.make(Plan(5), rows, plan, **of_server)
    assert step.covered == plan.ends
    for layer in layers:
        q = torch.randn(rows.total, HEADS, DN + DR)
        out, lse = torch.randn(rows.total, HEADS, DV), torch.randn(rows.total, HEADS)
        expected, expected_lse = [], []
        for request, end in enumerate(plan.ends):
            mine = slice(rows.of_request(request).start, rows.of_request(request).stop)
            found = latent_rows[layer.attn_mqa.layer_id][view.slots_of[:end], 0]
            keys = (found[:, :RANK] @ layer.kv_b_proj.weight.t()).view(end, HEADS, DN + DV)
            prefix = reference.naive(
                q[mine, :, :DN], q[mine, :, DN:], keys[..., :DN], found[:, RANK:], keys[..., DN:], SCALE
            )
            merged = reference.merge(*prefix, out[mine], lse[mine]) if end else (out[mine], lse[mine])
            expected.append(merged[0]), expected_lse.append(merged[1])
        step.attend(layer, q.split([DN, DR], dim=-1), out, lse)
        torch.testing.assert_close(out, torch.cat(expected), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse, torch.cat(expected_lse), rtol=1e-4, atol=1e-5)
    assert counters.prefills_naive == 1 and counters.prefill_tokens_expanded == 1150
    assert counters.prefill_tokens_saved == sum(plan.ends) - 1150
    transient.forget()
    assert view.forgotten == 1


def test_memory_is_that_of_one_layer() -> None:
    """As much as was said before."""
    memory, layer, tokens = Memory(), make_layer(1), 2 * CHUNK_TOKENS
    sizes = dict(dtype=torch.float32, device="cpu", tiles=(), rows=64)
    transient = TransientExpansion(layer, SimpleNamespace(), torch.zeros(0), tokens, memory, **sizes)
    expanded = tokens * (HEADS * (DN + DV) + DR) * 4
    assert (
        expanded
        < memory.bytes
        <= transient.taken_bytes
        == TransientExpansion.bytes_for(layer, tokens, **sizes, fetches=False)
    )
