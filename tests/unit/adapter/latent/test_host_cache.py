"""What waits for rows that come back from the host: with copies that are not made before somebody waits for them, a
reader that does not reads other rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from host_trees import HostTree
from test_tree_on_host import host_tree  # noqa: F401  a fixture

from sglang_mla_ext.adapter.cpu.latent_torch import TorchLatent
from sglang_mla_ext.adapter.latent.fp8 import FP8Latent
from sglang_mla_ext.adapter.latent.host_cache import wait_for_layer
from sglang_mla_ext.adapter.prefill.expander import Expander
from sglang_mla_ext.adapter.prefill.prefill import PrefillPlan
from sglang_mla_ext.observe import Counters

PROMPT = "the system prompt"
HEADS = 2


class Late:
    """SGLang's tree, whose copies to the device are made when they are waited for.

    Attributes:
        slots: those of the prompt's rows on the device, where other rows still are.
        waited: the layers, in order.
    """

    def __init__(self, tree: HostTree) -> None:
        self.tree, self.pool, self.waited = tree, tree.pool, []
        self._copies: dict[int, Callable[[], None]] = {}
        request = tree.run(PROMPT)
        tree.finish(request)
        tree.finish(tree.run("A" * 60))
        assert tree.is_on_host_alone(tree.handle(request))
        host = tree.host
        copy = host.load_to_device_per_layer

        def later(*arguments: Any, **given: Any) -> None:
            self._copies[arguments[3]] = partial(copy, *arguments, **given)

        host.load_to_device_per_layer = later
        self.slots = tree.run(PROMPT + "; one").slots[: len(PROMPT)]
        assert list(self._copies) == [0, 1], "each layer is copied"
        self.pool.layer_transfer_counter = SimpleNamespace(wait_until=self._wait)

    def _wait(self, layer: int) -> None:
        self.waited.append(layer)
        self._copies[layer]()

    def expected(self, layer: int) -> torch.Tensor:
        """`[tokens, elements or bytes]`"""
        return self.tree.rows(PROMPT, layer)[:, 0]


@pytest.fixture
def late(host_tree: HostTree) -> Late:  # noqa: F811
    return Late(host_tree)


def numbers(late: Late, layer: int) -> torch.Tensor:
    """What the rows mean, `[tokens, 576]` float32."""
    from sglang_mla_ext.kernels.storage.latent_rows import dequantize

    rows = late.expected(layer)
    return rows.float() if rows.dtype == torch.bfloat16 else torch.cat(dequantize(rows), dim=-1)


def in_stored_form(late: Late, layer: int) -> torch.Tensor:
    if not hasattr(late.pool, "rows"):
        return late.pool.get_key_buffer(layer)[late.slots][:, 0]
    return late.pool.rows(layer)[late.slots]


def of_decode_in_fp8(late: Late, layer: int) -> torch.Tensor:
    """What FP8Latent hands to its kernels."""
    if not hasattr(late.pool, "rows"):
        pytest.skip("not over this pool")
    latent = object.__new__(FP8Latent)
    latent._pool = late.pool
    latent._stacks = SimpleNamespace(run=lambda q, q_rope, pool, *_: pool[late.slots].clone())
    return latent.run(layer, None, None, 1.0)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("read", [in_stored_form, of_decode_in_fp8])
def test_rows_are_waited_for(late: Late, read: Callable[[Late, int], torch.Tensor], layer: int) -> None:
    """For those of the one layer."""
    assert not torch.equal(late.pool.kv_buffer[layer][late.slots][:, 0], late.expected(layer))
    assert torch.equal(read(late, layer), late.expected(layer))
    assert late.waited == [layer]


def by_slots(late: Late, layer: int) -> torch.Tensor:
    out = torch.empty(len(PROMPT), 576)
    late.pool.fetch(layer, late.slots, out)
    return out


def by_sglang(late: Late, layer: int) -> torch.Tensor:
    parts = late.pool.get_mla_kv_buffer(SimpleNamespace(layer_id=layer), late.slots, torch.float32)
    return torch.cat(parts, dim=-1)[:, 0]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("read", [by_slots, by_sglang])
def test_numbers_are_waited_for(late: Late, read: Callable[[Late, int], torch.Tensor], layer: int) -> None:
    if not hasattr(late.pool, "fetch"):
        pytest.skip("SGLang's")
    torch.testing.assert_close(read(late, layer), numbers(late, layer), equal_nan=True, rtol=0, atol=0)
    assert late.waited == [layer]


def test_decode_without_a_gpu_waits(late: Late) -> None:
    table = late.slots[None].int()
    latent = TorchLatent(late.pool, table, grouped=False)
    batch = SimpleNamespace(seq_lens=torch.tensor([len(PROMPT)]), req_pool_indices=torch.tensor([0]))
    latent.begin_step(batch, sharing=False)
    torch.manual_seed(0)
    q, q_rope = torch.randn(1, HEADS, 512), torch.randn(1, HEADS, 64)
    found = latent.run(1, q, q_rope, 1e-4)
    assert late.waited == [1]
    for actual, again in zip(found, latent.run(1, q, q_rope, 1e-4), strict=True):
        torch.testing.assert_close(actual, again, equal_nan=True, rtol=0, atol=0)


def test_an_expansion_waits_for_each_layer(late: Late) -> None:
    seen = []
    layers = [
        SimpleNamespace(
            attn_mqa=SimpleNamespace(layer_id=layer),
            kv_a_layernorm=SimpleNamespace(weight=torch.ones(512)),
            kv_lora_rank=512,
        )
        for layer in range(2)
    ]
    buffers = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, qk_rope_head_dim=64, heads=2)
    expander = Expander(layers, late.pool, buffers)  # type: ignore[arg-type]
    expander._expand_unfused = lambda attention, index, rows, chunks, start: seen.append(rows.float())
    expander.expand_slots(late.slots, [0])
    for layer in range(2):
        torch.testing.assert_close(seen[layer], numbers(late, layer), equal_nan=True, rtol=0, atol=0)
    assert sorted(set(late.waited)) == [0, 1]


def test_prefill_over_what_is_expanded_waits_all_the_same(late: Late) -> None:
    """It reads no row, and steps after it take them for granted."""
    plan = PrefillPlan((17,), (), None, {1: 1}, Counters(), lambda layer: wait_for_layer(late.pool, layer))  # type: ignore[arg-type]
    layer = SimpleNamespace(attn_mha=SimpleNamespace(layer_id=1), qk_nope_head_dim=8, qk_rope_head_dim=8)
    plan.attend(layer, torch.zeros(1, 1, 16), torch.zeros(1, 1, 8), torch.zeros(1, 1))
    assert late.waited == [1]


def test_writing_does_not_wait(late: Late) -> None:
    if not hasattr(late.pool, "fetch"):
        pytest.skip("SGLang's")
    late.pool.set_kv_buffer(SimpleNamespace(layer_id=1), torch.tensor([3]), torch.zeros(1, 1, 576))
    assert late.waited == []


def test_without_a_cache_on_the_host_there_is_nothing_to_wait_for() -> None:
    wait_for_layer(SimpleNamespace(layer_transfer_counter=None), 3)  # type: ignore[arg-type]
