"""The life of a worker process, in small: what SGLang calls of ours from the first request to a flush, with every
answer compared. Built on hooked_worker.py: the hooks are in SGLang's own functions, the parts behind them are real.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from hook_scenarios_mixed import TOKENS, Mixes
from hook_scenarios_sleep import Saver, asked, updater
from hooked_worker import DN, DR, DV, HEADS, PAGE, PROMPT, RANK, Server, batch_of
from release import OLDEST, UpdateRequest, prefill_runs

SHARED = 13 * PAGE  # tokens
PASSES = 12  # within which sharing is back, when nothing fails any more


class WrongAnswer(Exception):
    """Not SGLang's, and none that it would see."""


def shorten_pauses() -> None:
    from sglang_mla_ext.adapter.step import reports, steps

    steps.FIRST_PAUSE, steps.LONGEST_PAUSE = 1, 4
    reports.METRICS_INTERVAL_S = -1.0


@dataclass
class Logged(logging.Handler):
    """Errors that are logged with their traceback, by message."""

    messages: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()

    __hash__ = object.__hash__

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            self.messages[record.getMessage()] += 1


class Life:
    """See the module."""

    def __init__(self, metrics: Any) -> None:
        self.saver = Saver()
        self.server = Server(saver=self.saver, verify_interval=2, mixed_tokens=TOKENS)
        self.server.steps.reports._metrics = metrics
        self.counters = self.server.counters
        self.of_ours = self.server.session.memory.zeros(1, dtype=torch.uint8, device="cpu")
        torch.manual_seed(1)
        for layer in self.server.layers:
            for attention in (layer.attn_mqa, layer.attn_mha):
                vars(attention).update(
                    tp_q_head_num=HEADS,
                    tp_k_head_num=1,
                    qk_head_dim=RANK + DR,
                    head_dim=RANK + DR,
                    v_head_dim=RANK,
                    is_cross_attention=False,
                    sliding_window_size=-1,
                    attn_type=None,
                )
        from sglang.srt.managers.cache_controller import HiCacheController
        from sglang.srt.model_executor import forward_batch_deepseek_mha_mixin as bookkeeping
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.model_executor.runner.eager_runner import EagerRunner

        bookkeeping.get_token_to_kv_pool = lambda: self.server.kv
        self.runner: Any = object.__new__(EagerRunner)
        self.model: Any = object.__new__(ModelRunner)
        self.model.is_draft_worker, self.model.run = False, self.runner.execute
        self.loading: Any = object.__new__(HiCacheController)
        self.loading.load_queue = ["rows"]
        self.loading.load_stream = SimpleNamespace(wait_stream=lambda stream: None)
        self.loading.l2_transfer_engine = SimpleNamespace(host_to_device_stream=self.loading.load_stream)
        self.server.scheduler.forward_stream = "steps"
        self.manager = updater(self.server, self.saver, flush=lambda: False, update=self._update_weights)
        self.mixes = Mixes(self.server)
        reporter = SimpleNamespace(
            num_generated_tokens=0, forward_ct_decode=0, report_decode_stats=lambda can, running_batch, **_: None
        )
        object.__setattr__(self.mixes.results, "metrics_reporter", reporter)
        self.recv_req = UpdateRequest()

    # ---- what happens

    def until_a_flush(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Or until the first event after `is_over` says so."""
        over = False
        for happens in self._events():
            happens()
            if over:
                return
            over = is_over()

    def _events(self) -> Iterator[Callable[[], object]]:
        requests = self.server.run(PROMPT + "-a", "else", PROMPT + "-bcd")
        yield lambda: self.prefill(requests[::2])
        yield lambda: self.decode(requests, 2)
        yield lambda: self.server.scheduler.get_internal_state(None)
        yield self.validate
        yield lambda: self.prefill(requests[::2], mixed=True)
        yield lambda: self.mix(requests[::2])
        yield lambda: self.agree(requests[::2])
        yield self.weights_change
        yield lambda: self.decode(requests, 2)
        yield self.load_from_the_host
        yield lambda: self.decode(requests, 1)
        yield self.sleep
        yield lambda: self.decode(requests, 2)
        self.server.tree.finish(*requests)
        yield self.server.scheduler.on_idle
        yield self.flush
        later = self.server.run(PROMPT + "-x", PROMPT + "-y")
        yield lambda: self.decode(later, 2)

    def until_it_shares(self) -> None:
        """With new requests: in decode steps, and in prefill."""
        requests = self.server.run(PROMPT + "-m", PROMPT + "-n")
        naive, prefills = self.counters.steps_naive, self.counters.prefills_naive
        for _ in range(PASSES):
            self.decode(requests, 1)
            self.prefill(requests)
            if self.counters.steps_naive > naive and self.counters.prefills_naive > prefills:
                return
        raise WrongAnswer(f"sharing does not come back: {dict(self.counters.fallbacks)}")

    @staticmethod
    def validate() -> None:
        """Of a prompt, as SGLang does before it queues a request."""
        from sglang.srt.managers import utils

        assert utils.validate_input_length(SimpleNamespace(origin_input_ids=[1]), 5, False) is None

    def load_from_the_host(self) -> None:
        self.loading.layer_done_counter = SimpleNamespace(update_producer=self._begin)
        with contextlib.suppress(StopIteration):
            self.loading.start_loading()
            raise WrongAnswer("SGLang's own part was not called")

    def weights_change(self) -> None:
        if OLDEST:
            assert self.manager.update_weights_from_disk(self.recv_req).success
            return
        assert self.manager.begin_weight_update(self.recv_req).success
        assert self.manager.update_weights_from_disk(self.recv_req).success
        assert self.manager.end_weight_update(self.recv_req).success

    def sleep(self) -> None:
        self.manager.release_memory_occupation(asked("kv_cache"))
        self.manager.resume_memory_occupation(asked("kv_cache"))

    def flush(self) -> None:
        assert self.server.scheduler.flush_cache() is True
        self.server.tree.free_slots = list(self.server.tree.rows)
        for buffer in self.server.kv.kv_buffer:
            buffer.normal_()

    @staticmethod
    def _begin() -> None:
        raise StopIteration

    def _update_weights(self) -> None:
        for layer in self.server.layers:
            layer.kv_b_proj.weight.mul_(-1.25)

    # ---- forward passes

    def decode(self, requests: list[Any], passes: int) -> None:
        for _ in range(passes):
            self.server.forward("DECODE", requests)
            batch = batch_of(self.server, requests, new_tokens=1)
            batch.forward_metadata_ready = False
            inputs = self._inputs(len(requests))
            outs = self._run(batch, inputs, self._decode_layer)
            slots = [torch.cat([request.slots, batch.out_cache_loc[row, None]]) for row, request in enumerate(requests)]
            self._compare(outs, inputs, slots)

    def mix(self, requests: list[Any]) -> None:
        """The last one is decoding, if SGLang's scheduler is told to mix."""
        (_, (mixed, _)) = self.mixes.make()
        self.prefill(requests, mixed=True, decoding=int(mixed))
        scheduler = self.server.scheduler
        scheduler.body, scheduler.processed = lambda batch: "a result", []
        assert scheduler.run_batch(self.mixes.new) == "a result"
        scheduler.process_batch_result(self.mixes.new, "a result")
        assert scheduler.processed == [(self.mixes.new, "a result")]
        self.mixes.new.decoding_reqs = [SimpleNamespace(is_retracted=True)] * mixed
        self.mixes.results.process_batch_result_prefill(self.mixes.new, SimpleNamespace(can_run_cuda_graph=False))

    def agree(self, requests: list[Any]) -> None:
        """A mixed pass, if another rank is told of it."""
        self.server.session.admission.votes = True
        try:
            self.prefill(requests, mixed=True)
        finally:
            self.server.session.admission.votes = False

    def prefill(self, requests: list[Any], mixed: bool = False, decoding: int = 0) -> None:
        """New tokens of each behind what they share: two and more, or one of the last so many, which are decoding."""
        counts = [*range(2, 2 + len(requests) - decoding), *[1] * decoding]
        lens, rule = dict(prefix_lens=[SHARED] * len(requests), new_tokens=counts), self.server.session.admission.rule
        rule.tokens = TOKENS if mixed else 0
        try:
            batch = self.server.forward("MIXED" if decoding else "EXTEND", requests, decoding=decoding, **lens)
            self._prefill(requests, counts, batch, mixed)
        finally:
            rule.tokens = TOKENS

    def _prefill(self, requests: list[Any], counts: list[int], batch: Any, mixed: bool) -> None:
        table, slots = self.server.runner.req_to_token_pool.req_to_token, []
        for row, (request, count) in enumerate(zip(requests, counts, strict=True)):
            new = 7000 + 8 * row + torch.arange(count)
            slots.append(torch.cat([request.slots[:SHARED], new]))
            table[row, : SHARED + count] = slots[-1].int()
        batch.seq_lens = torch.tensor([SHARED + count for count in counts])
        batch.out_cache_loc = torch.cat([of_one[SHARED:] for of_one in slots])
        inputs = self._inputs(sum(counts))
        seen = [
            of_one[: SHARED + token + 1] for of_one, count in zip(slots, counts, strict=True) for token in range(count)
        ]
        if not mixed:
            self._compare(self._run(batch, inputs, self._prefill_layer), inputs, seen)
            return
        from sglang.srt.layers.logits_processor import LogitsMetadata

        last = torch.tensor(counts).cumsum(0) - 1

        def execute(batch: Any) -> Any:
            """Outputs of all layers are the logits here, of each request's last row where SGLang chooses them."""
            as_decode = batch.forward_mode.is_decode()
            outs = self._layers(batch, inputs, self._decode_layer if as_decode else self._prefill_layer)
            logits = torch.stack(outs, dim=1)
            chosen = LogitsMetadata.from_forward_batch(batch).draft_extend_select_index if as_decode else last
            return SimpleNamespace(
                logits_output=SimpleNamespace(
                    next_token_logits=logits if chosen is None else logits[chosen], customized_info=None
                )
            )

        self.runner.run = execute
        logits = self.model.forward(batch).logits_output.next_token_logits
        of_last = [(q[last], latent[last]) for q, latent in inputs]
        self._compare(list(logits.transpose(0, 1)), of_last, [seen[row] for row in last.tolist()])

    def _inputs(self, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(torch.randn(rows, HEADS, DN + DR), torch.randn(rows, RANK + DR)) for _ in self.server.layers]

    def _run(self, batch: Any, inputs: Any, attend: Any) -> list[torch.Tensor]:
        """As SGLang's runner of passes without a graph, which is hooked."""

        self.runner.run = lambda batch: self._layers(batch, inputs, attend)
        return self.model.forward(batch)

    def _layers(self, batch: Any, inputs: Any, attend: Any) -> list[torch.Tensor]:
        self.server.backend.init_forward_metadata(batch)
        if self.server.coming.way.value == "shared" and self.of_ours.any():
            raise WrongAnswer("memory is used that came back from sleep with any contents")
        return [
            attend(index, layer, batch, *inputs[index]).view(-1, HEADS, DV)
            for index, layer in enumerate(self.server.layers)
        ]

    def _decode_layer(self, index: int, layer: Any, batch: Any, q: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        return self._absorb(index, layer, batch, q, latent, self.server.backend.forward_decode)

    def _prefill_layer(self, index: int, layer: Any, batch: Any, q: torch.Tensor, latent: torch.Tensor) -> torch.Tensor:
        from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
        from sglang.srt.models.deepseek_common.attention_forward_methods import forward_mha

        method = handlers.AttentionBackendRegistry.get_handler("hybrid_mla")(layer, batch)
        if method is handlers.AttnForwardMethod.MLA:
            return self._absorb(index, layer, batch, q, latent, self.server.backend.forward_extend)
        self.server.kv.set_kv_buffer(layer.attn_mha, batch.out_cache_loc, latent[:, None], None)
        expanded = layer.kv_b_proj(latent[:, :RANK])[0].view(len(q), HEADS, DN + DV)
        k = torch.cat([expanded[..., :DN], latent[:, None, RANK:].expand(-1, HEADS, -1)], dim=-1)
        batch.prepare_chunked_prefix_cache_info(torch.device("cpu"))
        out, lse = self.server.backend.forward_extend(q, k, expanded[..., DN:], layer.attn_mha, batch, False)
        prefill_runs(self.server.backend)
        out = forward_mha.DeepseekMHAForwardMixin._chunked_prefix_attn_mha(
            layer, q=q, accum_output=out, accum_lse=lse, forward_batch=batch
        )
        return layer.o_proj(out.reshape(len(q), HEADS * DV))

    def _absorb(self, index: int, layer: Any, batch: Any, q: Any, latent: torch.Tensor, attend: Any) -> torch.Tensor:
        from sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla import DeepseekMLAForwardMixin

        w_k, w_v = layer.kv_b_proj.weight.view(HEADS, DN + DV, RANK).split([DN, DV], dim=1)
        q_nope, q_rope, k_rope = DeepseekMLAForwardMixin._split_q_nope_pe(layer, q, latent)
        q_absorbed = torch.einsum("bhd,hdr->bhr", q_nope, w_k)
        k_nope = latent[:, None, :RANK]
        out = attend(q_absorbed, k_nope, k_nope, layer.attn_mqa, batch, q_rope=q_rope, k_rope=k_rope)
        return layer.o_proj(torch.einsum("bhr,hdr->bhd", out.view(len(q), HEADS, RANK), w_v).reshape(len(q), -1))

    def _compare(self, outs: list[torch.Tensor], inputs: Any, slots: list[torch.Tensor]) -> None:
        """With attention over all keys, in the definition's own words: nothing of the package's is asked."""
        for index, (layer, out, (q, _)) in enumerate(zip(self.server.layers, outs, inputs, strict=True)):
            for row, of_row in enumerate(slots):
                latent = self.server.kv.get_key_buffer(index)[of_row, 0]
                expanded = layer.kv_b_proj(latent[:, :RANK])[0].view(len(latent), HEADS, DN + DV)
                keys = torch.cat([expanded[..., :DN], latent[:, None, RANK:].expand(-1, HEADS, -1)], dim=-1)
                weights = torch.einsum("hd,nhd->hn", q[row], keys).mul(0.2).softmax(dim=-1)
                exact = torch.einsum("hn,nhd->hd", weights, expanded[..., DN:])
                if not torch.allclose(out[row], exact, rtol=1e-3, atol=1e-4):
                    worst = (out[row] - exact).abs().max()
                    raise WrongAnswer(f"layer {index}, row {row}: off by {worst}")
