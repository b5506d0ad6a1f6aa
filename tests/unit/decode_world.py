"""A model of two MLA layers with a pool, a radix tree and running requests, and the composed backend over them.

What has no CPU version is stood in for by doubles.py. Everything else is the real thing: the tree, the pools, planning,
the adapter, the hooks inside the layer, attention over expanded prefixes.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from doubles import (
    DR,
    HEADS,
    MIB,
    PAGE,
    RANK,
    PlainBackend,
    StockBackend,
    TorchAbsorbFP8,
    TorchGrouped,
    flash_mla_with_kvcache,
    get_mla_metadata,
    server_args,
)
from graph_in_torch import TorchGraph, opaque
from torch import Tensor

from sglang_mla_ext.adapter.step.admission import Admission
from sglang_mla_ext.adapter.step.layer import after_split_q
from sglang_mla_ext.adapter.step.passes import passes
from sglang_mla_ext.kernels.constants import FP8
from sglang_mla_ext.kernels.naive.attention import TorchSharedAttention
from sglang_mla_ext.kernels.reference import attention as reference
from sglang_mla_ext.options import HybridMLAOptions

DN, DV, SCALE = 16, 16, 0.2
LAYER_IDS = (3, 5)
MAX_REQUESTS, MAX_TOKENS, TREE_PAGES, PAGES = 12, 16 * PAGE, 60, 100


def plan_pass(
    steps: Any,
    mode: Any,
    reqs: Sequence[Any],
    running: Sequence[Any],
    prefix_lens: Sequence[int] = (),
    new_tokens: Sequence[int] = (),
    *,
    mixed: bool = False,
    decoding: int = 0,
) -> None:
    """What the session does before a forward pass: the pass is chosen, and planned.

    Args:
        mixed: new tokens are rows of the decode graph; the last `decoding` of the requests are decoding.
    """
    admission = Admission(SimpleNamespace(tokens=int(mixed), query_tokens=1), steps, None)
    admission._in_decode_graph = lambda batch, votes: mixed
    batch = SimpleNamespace(reqs=reqs, decoding_reqs=reqs[len(reqs) - decoding :])
    forward_batch = SimpleNamespace(forward_mode=mode, extend_seq_lens_cpu=new_tokens)
    chosen = passes.begin(admission.choose(batch, forward_batch))
    steps.plan_pass(chosen, reqs, running, prefix_lens, new_tokens)


class Mode:
    """SGLang's ForwardMode, as far as it is read."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_decode(self) -> bool:
        return self.name == "decode"

    def is_extend(self) -> bool:
        return self.name in ("extend", "verify")

    def is_target_verify(self) -> bool:
        return self.name == "verify"

    def is_idle(self) -> bool:
        return self.name == "idle"


DECODE, EXTEND, IDLE, VERIFY = Mode("decode"), Mode("extend"), Mode("idle"), Mode("verify")


class World:
    """See the module. A request's prompt is in the tree, a page for each letter; behind it are tokens of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, new_tree: Any, *, fp8: bool = False, queries: int = 1) -> None:
        """
        Args:
            fp8: the pool is ours, in FP8.
            queries: query tokens of a request in a step: more than one where steps verify drafts.
        """
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        from sglang_mla_ext.adapter.build import assemble, model
        from sglang_mla_ext.adapter.compat import installed
        from sglang_mla_ext.adapter.latent.pool import LatentPool

        self.generator = torch.Generator().manual_seed(0)
        self.fp8, self.queries = fp8, queries
        self.mode = VERIFY if queries > 1 else DECODE  # of the steps
        sizes = dict(kv_lora_rank=RANK, qk_rope_head_dim=DR, layer_num=LAYER_IDS[-1] + 1, page_size=PAGE)
        kind, dtype = (LatentPool, FP8) if fp8 else (MLATokenToKVPool, torch.float32)
        self.pool = kind((PAGES - 1) * PAGE, dtype=dtype, device="cpu", enable_memory_saver=False, **sizes)
        for layer_id in LAYER_IDS:
            rows = self.random(PAGES * PAGE, 1, RANK + DR)
            self.pool.set_kv_buffer(SimpleNamespace(layer_id=layer_id), torch.arange(PAGES * PAGE), rows, None)
        self.layers = [self._layer(layer_id) for layer_id in LAYER_IDS]
        self.tree = new_tree(PAGE)
        self.tree.free_slots = list(range(PAGE, TREE_PAGES * PAGE))[::-1]  # whole pages of consecutive slots
        self.tree.rows = dict.fromkeys(self.tree.free_slots, 0)
        self.req_to_token = torch.zeros(MAX_REQUESTS, MAX_TOKENS, dtype=torch.int32)
        self.lens = torch.ones(MAX_REQUESTS, dtype=torch.int64)
        self._own_pages = list(range(TREE_PAGES, PAGES))
        self._taken = {0}  # requests; padded rows are request 0
        self.runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(size=MAX_REQUESTS, req_to_token=self.req_to_token),
            token_to_kv_pool=self.pool,
            model_config=SimpleNamespace(hidden_size=64, context_len=MAX_TOKENS),
            kv_cache_dtype=dtype,
            device="cpu",
            dtype=torch.float32,
            server_args=server_args(
                speculative_algorithm="EAGLE" if queries > 1 else None,
                speculative_num_draft_tokens=queries if queries > 1 else None,
            ),
        )
        monkeypatch.setattr(model, "attention_layers", lambda runner: self.layers)
        monkeypatch.setattr(assemble, "all_ranks_agree", lambda: bool)
        monkeypatch.setattr(installed, "prefill_graph_rows", lambda args: 0, raising=False)
        for name in ("run", "merge"):
            monkeypatch.setattr(TorchSharedAttention, name, opaque(getattr(TorchSharedAttention, name)))
        self._monkeypatch, self._build = monkeypatch, assemble

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def _layer(self, layer_id: int) -> Any:
        """A layer with real weights; what goes through its output projection is what the tests look at."""
        w_kc, w_vc = self.random(HEADS, DN, RANK) / 4, self.random(HEADS, RANK, DV) / 4
        weight = torch.cat([w_kc, w_vc.transpose(1, 2)], dim=1).flatten(0, 1)  # [HEADS * (DN + DV), RANK]

        class Projection(torch.nn.Linear):
            def forward(self, x: Tensor) -> tuple[Tensor, None]:
                return super().forward(x), None

        kv_b_proj = Projection(RANK, len(weight), bias=False)
        kv_b_proj.weight = torch.nn.Parameter(weight, requires_grad=False)
        attention = SimpleNamespace(
            layer_id=layer_id,
            scaling=SCALE,
            tp_q_head_num=HEADS,
            tp_k_head_num=1,
            head_dim=RANK + DR,
            qk_head_dim=RANK + DR,
            v_head_dim=RANK,
            is_cross_attention=False,
            sliding_window_size=-1,
            attn_type=None,
        )
        return SimpleNamespace(
            attn_mqa=attention,
            attn_mha=attention,
            num_local_heads=HEADS,
            num_heads=HEADS,
            kv_lora_rank=RANK,
            qk_nope_head_dim=DN,
            qk_rope_head_dim=DR,
            v_head_dim=DV,
            chunked_prefix_cache_threshold=8192,
            kv_a_layernorm=SimpleNamespace(weight=torch.ones(RANK)),
            kv_b_proj=kv_b_proj,
            w_kc=w_kc,
            w_vc=w_vc,
            o_proj=torch.nn.Identity(),
        )

    # ---- the backend

    def make(
        self, kind: str, *, grouped: bool = False, runs: bool = True, budget_bytes: int = 16 * MIB, **options: Any
    ) -> Any:
        """Build backend and steps.

        Args:
            kind: "gpu", with doubles, or "cpu".
            grouped: try grouped absorb on a GPU; runs: whether its kernels run there.
        """
        if kind == "gpu":
            self._as_on_a_gpu(grouped, runs)
        options = HybridMLAOptions(**{"mode": "naive", "min_prefix_len": PAGE, **options})
        self.backend, self.steps, _ = self._build.build(self.runner, options, budget_bytes)
        self.steps.attach(self.tree.view)
        return self.backend

    def _as_on_a_gpu(self, grouped: bool, runs: bool) -> None:
        flash_mla: Any = ModuleType("sgl_kernel.flash_mla")
        flash_mla.flash_mla_with_kvcache, flash_mla.get_mla_metadata = flash_mla_with_kvcache, get_mla_metadata
        for name in ("sgl_kernel.flash_mla", "sglang.kernels.ops.attention.flash_mla_interface"):
            self._monkeypatch.setitem(sys.modules, name, flash_mla)
        name = "sglang_mla_ext.adapter." + ("latent.fp8" if self.fp8 else "latent.flashmla")
        self._monkeypatch.delitem(sys.modules, name, raising=False)
        module: Any = importlib.import_module(name)
        layout = self.pool.layout if self.fp8 else None
        for made in ("make_grouped_absorb", "make_grouped_absorb_fp8"):
            if hasattr(module, made):
                make = lambda *_, query_tokens=1, **__: TorchGrouped(layout, query_tokens) if runs else None  # noqa: E731
                self._monkeypatch.setattr(module, made, make)
        if self.fp8:
            self._monkeypatch.setattr(module, "make_absorb_fp8", TorchAbsorbFP8)
        self.stock = StockBackend(self.pool, self.req_to_token, self.queries)
        self.plain = PlainBackend(self.pool, self.req_to_token, self.queries)
        self._owner = stock = SimpleNamespace(
            backend=self.stock,
            decodes=not self.fp8,
            plain=None,
            make_plain=self._make_plain,
            extend=lambda *args: args,
            affordable=lambda prefix_lens: 0,
            can_finish=lambda prefix_lens, covered: True,
        )
        kind = module.FP8Latent if self.fp8 else module.FlashMLALatent

        def stock_and_latent(runner: Any, layers: Any, sizes: Any, counters: Any) -> tuple[Any, Any]:
            common = dict(layer_id=LAYER_IDS[0], on_failure=counters.fall_back)
            self.latent = kind(self.pool, self.req_to_token, replace(sizes, grouped=grouped), **common)
            return stock, self.latent

        self._monkeypatch.setattr(self._build, "stock_and_latent", stock_and_latent)

    def _make_plain(self, runner: Any) -> bool:
        self._owner.plain = None if self.fp8 else self.plain
        return not self.fp8

    # ---- requests

    def start(self, text: str, own: int, extra_key: str | None = None) -> Any:
        """A request whose prompt is in the tree, with `own` tokens behind it, and slots for more."""
        request = self.tree.run(text, extra_key)
        request.index = next(index for index in range(MAX_REQUESTS) if index not in self._taken)
        request.finished = lambda: False
        self._taken.add(request.index)
        slots = torch.cat([request.slots, self._own_slots(own)])[:MAX_TOKENS]
        self.req_to_token[request.index, : len(slots)] = slots.int()
        self.lens[request.index] = request.seqlen = len(request.slots) + own
        return request

    def accept(self, requests: Sequence[Any], counts: Sequence[int]) -> None:
        """As many of the drafts of the last step become tokens of each request."""
        for request, count in zip(requests, counts, strict=True):
            self.lens[request.index] += count

    def finish(self, *requests: Any) -> None:
        self.tree.finish(*requests)
        self._taken -= {request.index for request in requests}

    def _own_slots(self, count: int) -> Tensor:
        pages = [self._own_pages.pop(0) for _ in range(-(-(count + PAGE) // PAGE))]  # and room to grow
        return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])

    # ---- steps

    def batch(self, requests: Sequence[Any], mode: Mode | None = None, padded: int = 0) -> Any:
        """SGLang's ForwardBatch of a step. In a decode step the new tokens are the last ones of their requests; in one
        that verifies drafts they follow those."""
        mode = mode or self.mode
        indices = torch.tensor([request.index for request in requests] + [0] * (padded - len(requests)))
        lens = self.lens[indices]
        lens[len(requests) :] = 1
        new = lens[:, None] + (torch.arange(self.queries) if mode is VERIFY else -1)
        return SimpleNamespace(
            batch_size=len(indices),
            forward_mode=mode,
            req_pool_indices=indices,
            seq_lens=lens,
            out_cache_loc=self.req_to_token[indices[:, None], new].flatten().long(),
            encoder_lens=None,
            extend_prefix_lens_cpu=None,
            _original_forward_mode=None,
        )

    def inputs(self, requests: int, queries: int = 0) -> list[tuple[Tensor, ...]]:
        """By layer: q_nope, q_rope and the latent rows of the new tokens, in two parts."""
        rows = requests * (queries or self.queries)
        sizes = ((HEADS, DN), (HEADS, DR), (1, RANK), (1, DR))
        return [tuple(self.random(rows, *size) for size in sizes) for _ in self.layers]

    def forward(self, batch: Any, inputs: Sequence[tuple[Tensor, ...]], whole: bool = False) -> list[Tensor]:
        """The attention of all layers, as SGLang runs it: what each output projection gets, `[rows, heads * DV]`."""
        outs = []
        verifies = batch.forward_mode is VERIFY
        attend = self.backend.forward_extend if verifies else self.backend.forward_decode
        for layer, (q_nope, q_rope, k_nope, k_rope) in zip(self.layers, inputs, strict=True):
            after_split_q((q_nope, q_rope, None), layer)
            q_absorbed = torch.einsum("bhd,hdr->bhr", q_nope, layer.w_kc)
            if whole:
                query, key = torch.cat([q_absorbed, q_rope], dim=-1).flatten(1), torch.cat([k_nope, k_rope], dim=-1)
                out = attend(query, key, k_nope, layer.attn_mqa, batch)
            else:
                parts = dict(q_rope=q_rope, k_rope=k_rope)
                out = attend(q_absorbed, k_nope, k_nope, layer.attn_mqa, batch, **parts)
            out = out.view(-1, HEADS, RANK)
            outs.append(layer.o_proj(torch.einsum("bhr,hrv->bhv", out, layer.w_vc).flatten(1)))
        return outs

    def eager_step(self, requests: Sequence[Any], whole: bool = False, mode: Mode | None = None) -> float:
        """A step without a graph; the largest relative error of its layers' outputs."""
        mode = mode or self.mode
        batch, inputs = self.batch(requests, mode), self.inputs(len(requests), 1 if mode is DECODE else 0)
        plan_pass(self.steps, mode, requests, requests)
        self.backend.init_forward_metadata(batch)
        outs = self.forward(batch, inputs, whole)
        self.backend.preparation.end_step(batch)
        return self.error(outs, batch, inputs)

    def mixed_step(self, requests: Sequence[Any], counts: Sequence[int]) -> float:
        """A step in which the last tokens of each request are rows of their own, as in a mixed step; the largest
        relative error of its layers' outputs."""
        lens = [int(self.lens[request.index]) for request in requests]
        cached = [length - count for length, count in zip(lens, counts, strict=True)]
        plan_pass(self.steps, EXTEND, requests, requests, cached, counts, mixed=True)
        batch = self.batch([request for request, count in zip(requests, counts, strict=True) for _ in range(count)])
        batch.seq_lens = batch.seq_lens - torch.tensor([left for count in counts for left in reversed(range(count))])
        batch.out_cache_loc = self.req_to_token[batch.req_pool_indices, batch.seq_lens - 1].long()
        inputs = self.inputs(batch.batch_size)
        self.backend.init_forward_metadata(batch)
        outs = self.forward(batch, inputs)
        self.backend.preparation.end_step(batch)
        return self.error(outs, batch, inputs)

    def error(
        self, outs: Sequence[Tensor], batch: Any, inputs: Sequence[tuple[Tensor, ...]], requests: int | None = None
    ) -> float:
        """Against attention over all of each request's keys, in float64; a draft sees those before it and itself."""
        worst, verifies = 0.0, batch.forward_mode is VERIFY
        queries = self.queries if verifies else 1
        for layer, out, (q_nope, q_rope, *_) in zip(self.layers, outs, inputs, strict=True):
            for row in range(len(out) if requests is None else requests * queries):
                request, token = divmod(row, queries)
                length = batch.seq_lens[request] + (token + 1 if verifies else 0)
                slots = self.req_to_token[batch.req_pool_indices[request], :length].long()
                latent, rope = self.latent_rows(layer.attn_mqa.layer_id, slots).double().split([RANK, DR], dim=-1)
                k_nope, v = reference.expand(latent, layer.w_kc.double(), layer.w_vc.double())
                query = q_nope[row, None].double(), q_rope[row, None].double()
                expected, _ = reference.naive(*query, k_nope, rope, v, SCALE)
                difference = (out[row].view(HEADS, DV).double() - expected[0]).norm() / expected.norm()
                worst = max(worst, float(difference)) if not difference.isnan() else float("inf")
        return worst

    def latent_rows(self, layer_id: int, slots: Tensor) -> Tensor:
        """`[n, RANK + DR]` of the pool."""
        if not self.fp8:
            return self.pool.get_key_buffer(layer_id)[slots, 0]
        rows = torch.empty(len(slots), RANK + DR)
        self.pool.fetch(layer_id, slots, rows)
        return rows


class Graph:
    """A step for one number of requests, captured once and replayed with other batches."""

    def __init__(self, world: World, requests: int) -> None:
        self.world, self.requests = world, requests
        self.batch = world.batch([], padded=requests)
        self.batch.out_cache_loc = torch.zeros(requests * world.queries, dtype=torch.int64)
        self.inputs = world.inputs(requests)
        plan_pass(world.steps, world.mode, [], [])
        world.backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        self._label = passes.now.graph  # of one of several of this size
        self._graph = TorchGraph()
        with self._graph.capture():
            world.backend.init_forward_metadata_in_graph(self.batch)
            self.outs = world.forward(self.batch, self.inputs)

    def step(self, requests: Sequence[Any]) -> float:
        """Replay with these requests; the largest relative error of their rows."""
        world, now = self.world, self.world.batch(requests, padded=self.requests)
        for name in ("req_pool_indices", "seq_lens", "out_cache_loc"):
            getattr(self.batch, name).copy_(getattr(now, name))
        for static, fresh in zip(self.inputs, world.inputs(self.requests), strict=True):
            for old, new in zip(static, fresh, strict=True):
                old.copy_(new)
        plan_pass(world.steps, world.mode, requests, requests)
        passes.now.graph = self._label
        world.backend.init_forward_metadata_out_graph(self.batch)
        self._graph.replay()
        world.backend.preparation.end_step(now)
        return world.error(self.outs, self.batch, self.inputs, len(requests))


KINDS = [
    ("gpu", False, "naive"),
    ("gpu", True, "grouped_absorb"),
    ("gpu", True, "naive"),
    ("cpu", False, "naive"),
    ("cpu", True, "grouped_absorb"),
]
"""Parts of which device, whether grouped absorb is among them, and the mode that is asked for."""


def groups_of(world: World) -> list[tuple[int, int, str]]:
    """Requests, tokens and mode of each group of the last step's plan."""
    groups = [
        (group["requests"], group["prefix_len"], group["mode"]) for group in world.steps.reports.report()["groups"]
    ]
    return sorted(groups, reverse=True)
