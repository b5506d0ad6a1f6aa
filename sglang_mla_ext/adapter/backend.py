"""HybridMLABackend: what SGLang calls. It plans, keeps the static buffers, and hands the computing to `kernels`.

It is mixed into one of SGLang's own backends, which does prefill and plain absorb: FlashMLA's on a Hopper GPU
(backend_flashmla.py), torch's on a CPU (cpu/backend.py).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_mla_ext import BACKEND_NAME
from sglang_mla_ext.adapter import layer as mla_layer
from sglang_mla_ext.adapter.expander import Expander
from sglang_mla_ext.adapter.prefill import PrefillPlan
from sglang_mla_ext.kernels.dispatch import make_shared_attention, workspace_bytes
from sglang_mla_ext.kernels.naive.attention import SharedAttention
from sglang_mla_ext.kernels.naive.schedule import ExpandedSegment
from sglang_mla_ext.kernels.storage.expanded import CHUNK_TOKENS, FP8, ExpandedBuffers
from sglang_mla_ext.observe import Counters, report
from sglang_mla_ext.prefix.cost_model import CostModel, Mode, ModelDims, rates_for
from sglang_mla_ext.prefix.expanded_pool import ExpandedPool
from sglang_mla_ext.prefix.planner import Plan, Stacking
from sglang_mla_ext.prefix.shared_prefixes import SharedPrefixes

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_mla_ext.options import HybridMLAOptions

logger = logging.getLogger(__name__)

STORAGE_DTYPES = {"bf16": torch.bfloat16, "fp8_e4m3": FP8}

NO_GROUPS: tuple[Plan, tuple[ExpandedSegment, ...]] = (Plan(0), ())

MAX_ROWS = 1024
"""Rows of one run of the attention: fills the GPU, and bounds the partial results' memory. Batches with more decode by
plain absorb; prefill takes as many runs as it needs."""

FIRST_PAUSE, LONGEST_PAUSE = 64, 1 << 16
"""Forward passes without sharing after a failure; twice as many after every further one that comes before a decode step
with groups."""


class HybridMLABackend:
    """Shared-prefix decode on top of a stock backend. Comes before that backend in the order of base classes."""

    def __init__(self, runner: ModelRunner, options: HybridMLAOptions, budget_bytes: int) -> None:
        """
        Args:
            runner: with its model loaded and its pools allocated.
            budget_bytes: device memory for expanded prefixes and for this backend's own buffers.
        """
        super().__init__(runner)
        self.options = options
        self.budget_bytes = budget_bytes
        self.counters = Counters()
        self.max_rows = min(runner.req_to_token_pool.size, MAX_ROWS)
        self._layers = mla_layer.attention_layers(runner)
        self._layer_index = {layer.attn_mqa.layer_id: index for index, layer in enumerate(self._layers)}
        first = self._layers[0]
        self._heads = first.num_local_heads

        dims = ModelDims(
            num_layers=len(self._layers),
            num_heads=first.num_heads,
            kv_lora_rank=first.kv_lora_rank,
            qk_nope_head_dim=first.qk_nope_head_dim,
            qk_rope_head_dim=first.qk_rope_head_dim,
            v_head_dim=first.v_head_dim,
            hidden_size=runner.model_config.hidden_size,
        )
        on_gpu = torch.device(runner.device).type == "cuda"
        rates = rates_for(torch.cuda.get_device_name() if on_gpu else "cpu")
        latent_dtype = FP8 if runner.kv_cache_dtype == FP8 else runner.dtype
        prefix_dtype = STORAGE_DTYPES.get(options.prefix_dtype, latent_dtype)
        self.cost = CostModel(dims, self._heads, rates, prefix_dtype.itemsize, latent_dtype.itemsize)
        self._decode_bytes = self._prepare_decode(runner)
        self._grouped_bytes = 0
        grouped = options.mode == "grouped_absorb" or (options.may_group and rates.modes[Mode.GROUPED_ABSORB].measured)
        self._stacking = self._try_grouped(runner) if grouped else None
        self._buffers = self._allocate(dims, runner, prefix_dtype)
        self._expander = Expander(self._layers, runner.token_to_kv_pool, self._buffers)
        self._attention = self._make_attention(runner.dtype) if self._buffers else None
        self._bytes_per_chunk = self._buffers.bytes // self._buffers.chunks if self._buffers else 0
        pool = ExpandedPool(self._buffers.chunks if self._buffers else 0, CHUNK_TOKENS)
        self.prefixes = SharedPrefixes(
            options,
            self.cost,
            pool,
            self._expander,
            self.counters,
            naive=self._attention is not None,
            stacking=self._stacking,
        )
        self.min_rows = self._smallest_group(runner.model_config.context_len)
        if self._attention is not None:
            mla_layer.merge_before_o_proj(self._layers, self)

        self._prefix_lens = torch.zeros(self.max_rows, dtype=torch.int32, device=runner.device)
        # With --prefill-attention-backend another one does prefill, whose lse may be in another base.
        self._prefills = runner.server_args.get_attention_backends()[0] == BACKEND_NAME
        self._pause = 0  # forward passes to go until the next attempt
        self._next_pause = FIRST_PAUSE
        self._next = NO_GROUPS
        self._written = NO_GROUPS[0]
        self._written_rows = 0
        self._hybrid = False
        self._q_nope: torch.Tensor | None = None
        self._tail_lse: torch.Tensor | None = None
        self.prefill: PrefillPlan | None = None
        """Of the prefill step that comes next, if it attends to expanded prefixes."""

    # ---- what SGLang's scheduler tells us, through hooks.py

    def before_forward(
        self,
        mode: ForwardMode,
        reqs: Sequence[Req],
        running: Sequence[Req],
        prefix_lens: Sequence[int] = (),
        new_tokens: Sequence[int] = (),
    ) -> None:
        """Plan a forward pass: expand what is worth it, and say which rows share what.

        Args:
            reqs: requests of the pass, by row in decode and in the order of the tokens in prefill.
            running: requests that are decoding, whether or not they take part in this pass.
            prefix_lens: `[requests]` tokens that are cached; new_tokens: `[requests]` tokens to compute; in prefill.
        """
        self._next, self._tail_lse, self.prefill = NO_GROUPS, None, None
        if self._pause:
            self._pause -= 1
        elif not mode.is_idle():
            try:
                if mode.is_decode() and (self._attention is not None or self._stacking is not None):
                    self._next = self._plan_decode(reqs)
                elif mode.is_extend() and self._attention is not None:
                    running = [req for req in running if not req.finished()]
                    self.prefill = self._plan_prefill(reqs, running, prefix_lens, new_tokens)
            except Exception as error:
                self._fail("planning", error)
        if mode.is_decode():
            self.counters.count_step(self._next[0])

    def _fail(self, what: str, error: Exception) -> None:
        """Forget what is expanded, and plan nothing for a while."""
        self.counters.fall_back(f"{what} failed: {type(error).__name__}", error)
        self.prefixes.forget()
        self._pause, self._next_pause = self._next_pause, min(2 * self._next_pause, LONGEST_PAUSE)
        logger.warning("hybrid_mla: %s failed, plain absorb for the next %d forward passes", what, self._pause)

    def _plan_decode(self, reqs: Sequence[Req]) -> tuple[Plan, tuple[ExpandedSegment, ...]]:
        if len(reqs) > self.max_rows:
            self.counters.fall_back(f"more than {self.max_rows} requests in a batch")
            return NO_GROUPS
        return self.prefixes.before_decode(reqs)

    def _plan_prefill(
        self, reqs: Sequence[Req], running: Sequence[Req], prefix_lens: Sequence[int], new_tokens: Sequence[int]
    ) -> PrefillPlan | None:
        if not self._prefills:
            self.prefixes.before_prefill(reqs, running)
            return None
        affordable = self._expanded_by_sglang(prefix_lens)
        self.prefixes.before_prefill(reqs, running, affordable)
        parts = self.prefixes.expanded_parts(reqs, prefix_lens, new_tokens, always=affordable > 0)
        if not self._can_prefill(prefix_lens, [part.tokens for part in parts]):
            return None
        return PrefillPlan.make(
            prefix_lens, parts, new_tokens, self._attention, self._layer_index, MAX_ROWS, self.counters
        )

    def _expanded_by_sglang(self, prefix_lens: Sequence[int]) -> int:
        """Cached tokens that SGLang itself would expand in a prefill step."""
        return 0

    def _can_prefill(self, prefix_lens: Sequence[int], covered: Sequence[int]) -> bool:
        """Whether the stock backend can attend to what the expanded parts leave, and give its lse."""
        return False

    def weights_change(self) -> None:
        """The model's weights are about to change."""
        self.prefixes.forget()
        self._expander.weights_changed()

    def report(self) -> dict[str, Any]:
        """The `hybrid_mla` entry of `/server_info`."""
        expanded_bytes = self.prefixes.pool.used_chunks * self._bytes_per_chunk
        return report(self.counters, self.prefixes.plan, expanded_bytes, self.budget_bytes)

    def describe(self) -> str:
        """One line for the log."""
        if self._attention is None and self._stacking is None:
            return f"nothing is expanded, no grouped absorb, mode {self.options.mode}: every step is plain absorb"
        groups = f"groups of {self.min_rows} requests and more" if self.min_rows else "no group that pays"
        if self._attention is None:
            return f"nothing is expanded, mode {self.options.mode}, grouped absorb, {groups}"
        tokens = self.prefixes.pool.num_chunks * CHUNK_TOKENS
        dtype = str(self._buffers.dtype).removeprefix("torch.")
        return (
            f"{self.budget_bytes / (1 << 30):.2f} GiB for expanded prefixes ({tokens} tokens in {dtype}), mode "
            f"{self.options.mode}, {groups}"
        )

    # ---- the layer's hooks, through mla_layer.py

    def see_query(self, q_nope: torch.Tensor) -> None:
        """Keep the un-absorbed query `[rows, heads, qk_nope_head_dim]` for the attention call that follows."""
        if self._hybrid and self._attention is not None:
            self._q_nope = q_nope

    @property
    def merge_pending(self) -> bool:
        return self._tail_lse is not None

    def merge(self, tail_out: torch.Tensor) -> torch.Tensor:
        """Merge the shared part into the tail's, in place.

        Args:
            tail_out: `[rows, heads * v_head_dim]`.
        """
        per_head = tail_out.view(tail_out.shape[0], self._heads, -1)
        tail_lse, self._tail_lse = self._tail_lse, None
        self._attention.merge(per_head, tail_lse, per_head)
        return tail_out

    # ---- for the two backends

    def write_plan(self, rows: int, *, empty: bool = False) -> bool:
        """Bring the planned step to the device.

        Args:
            rows: of the step, padding included.
            empty: ignore the plan; for the capture of a graph.
        Returns:
            whether the step's graph has the launches of shared attention in it. That depends on `rows` alone, so that
            a captured graph and its replays agree. Where it does not, no group can pay, and every row's tail is all
            of its keys.
        """
        if self.min_rows is None or not self.min_rows <= rows <= self.max_rows:
            return False
        planned = NO_GROUPS if empty else self._next
        # A change of rows alone can change the kernel's tile.
        if planned[0] is not self._written or rows != self._written_rows:
            try:
                self._bring(*planned, rows)
                if planned[0].groups:
                    self._next_pause = FIRST_PAUSE
            except Exception as error:
                self._fail("writing a plan", error)
                planned = self._next = NO_GROUPS
                self._bring(*planned, rows)
        self._written, self._written_rows = planned[0], rows
        return True

    def _bring(self, plan: Plan, groups: Sequence[ExpandedSegment], rows: int) -> None:
        if self._attention is not None:
            self._attention.plan(groups, rows)
        self._write_grouped(plan, rows)
        if plan is not self._written and (plan.groups or self._written.groups):
            lens = torch.zeros(self.max_rows, dtype=torch.int32, pin_memory=self._prefix_lens.is_cuda)
            lens[: plan.num_rows] = torch.tensor(plan.prefix_lens, dtype=torch.int32)
            self._prefix_lens.copy_(lens, non_blocking=True)  # the last step: before it, the lengths are as written

    def store(
        self,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        k_rope: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
    ) -> None:
        """Write the latent rows of the step's new tokens to the cache, if there are any.

        Args:
            k: `[rows, 1, kv_lora_rank]` beside `k_rope [rows, 1, qk_rope_head_dim]`, or whole rows; v is a part of it.
        """
        if k is None:
            return
        slots = forward_batch.out_cache_loc
        if k_rope is None:
            self.token_to_kv_pool.set_kv_buffer(layer, slots, k, v)
        else:
            self.token_to_kv_pool.set_mla_kv_buffer(layer, slots, k, k_rope)

    def attend_shared(self, q_rope: torch.Tensor, tail_lse: torch.Tensor, layer: RadixAttention) -> None:
        """Attend to the expanded prefixes, if there are any; the merge follows when the layer calls its output
        projection.

        Args:
            q_rope: `[rows, heads, qk_rope_head_dim]`, the query's rotary part.
            tail_lse: `[rows, heads]` float32, natural log, of all other keys: the private tails, or for rows in a group
                of grouped absorb everything.
        """
        if self._attention is None:
            return
        if self.merge_pending:
            raise RuntimeError("the layer before did not call its output projection: its shared part is lost")
        self._attention.run(self._layer_index[layer.layer_id], self._q_nope, q_rope, layer.scaling)
        self._q_nope = None
        self._tail_lse = tail_lse

    def _smallest_group(self, context_len: int) -> int | None:
        """Rows from which a step can have a group that pays; None where none ever does."""
        ways = {Mode.NAIVE: self._attention, Mode.GROUPED_ABSORB: self._stacking}
        allowed = [mode for mode, way in ways.items() if way is not None]
        if not allowed:
            return None
        if self.options.mode != "auto":
            return 2
        return self.cost.smallest_profitable_group(context_len, [Mode.ABSORB, *allowed], limit=self.max_rows)

    def _prepare_decode(self, runner: ModelRunner) -> int:
        """Make ready for plain absorb, where that is not SGLang's.

        Returns:
            bytes of device memory that it takes.
        """
        return 0

    def _make_grouped(self, runner: ModelRunner) -> Stacking | None:
        """Make ready for grouped absorb, and set `_grouped_bytes` to the memory that it takes.

        Returns:
            how it takes rows; None where it has no use.
        """
        return None

    def _write_grouped(self, plan: Plan, rows: int) -> None:
        """Bring the plan's groups of grouped absorb to the device."""

    def _try_grouped(self, runner: ModelRunner) -> Stacking | None:
        try:
            return self._make_grouped(runner)
        except Exception as error:
            self.counters.fall_back(f"grouped absorb does not run here: {type(error).__name__}", error)
            return None

    def _make_attention(self, query_dtype: torch.dtype) -> SharedAttention | None:
        """Attention over the buffers. Every kernel runs once here: it compiles, and shows that it can."""
        buffers, tiles = self._buffers, self.cost.rates.naive_tiles
        try:
            attention = make_shared_attention(
                buffers,
                max_rows=MAX_ROWS,
                heads=self._heads,
                device=buffers.device,
                tiles=next((tiles[name] for name in tiles if STORAGE_DTYPES[name] == buffers.dtype), ()),
            )
            attention.try_out(query_dtype)
            if buffers.device.type == "cuda":
                self._expander.expand(torch.zeros(1, dtype=torch.int64, device=buffers.device), [0], 0)
        except Exception as error:
            self.counters.fall_back(f"the kernels do not run here: {type(error).__name__}", error)
            self._buffers = None
            return None
        return attention

    def _allocate(self, dims: ModelDims, runner: ModelRunner, prefix_dtype: torch.dtype) -> ExpandedBuffers | None:
        sizes = {
            "layers": dims.num_layers,
            "heads": self._heads,
            "qk_nope_head_dim": dims.qk_nope_head_dim,
            "v_head_dim": dims.v_head_dim,
            "qk_rope_head_dim": dims.qk_rope_head_dim,
            "dtype": prefix_dtype,
        }
        if not self.options.may_expand:
            return None
        budget = self.budget_bytes - self._decode_bytes - self._grouped_bytes
        per_chunk = ExpandedBuffers.bytes_per_chunk(**sizes)
        workspace = workspace_bytes(
            max_rows=MAX_ROWS,
            heads=self._heads,
            v_head_dim=dims.v_head_dim,
            chunks=max(budget, 0) // per_chunk,
            device=runner.device,
        )
        chunks = (budget - workspace) // per_chunk
        if chunks <= 0:
            self.counters.fall_back("the memory for expanded prefixes holds none: raise --hybrid-mla-prefix-memory-gb")
            return None
        return ExpandedBuffers.allocate(chunks=chunks, device=runner.device, **sizes)
