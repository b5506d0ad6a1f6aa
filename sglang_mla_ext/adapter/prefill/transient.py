"""Transient expansion: cached tokens that a prefill pass expands for itself, in one layer after the other, some tokens
at a time. They are prefixes that its requests share, and histories of single requests.

Nothing of it outlives the layer: the memory is that of so many tokens in one layer, however many there are of either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_mla_ext.adapter.compat import installed
from sglang_mla_ext.adapter.prefill.expander import Expander, buffer_sizes, temporary_bytes
from sglang_mla_ext.adapter.prefill.windows import Window, attend, windows
from sglang_mla_ext.kernels.dispatch import make_shared_attention, workspace_bytes
from sglang_mla_ext.kernels.memory import Memory
from sglang_mla_ext.kernels.naive.attention import SharedAttention
from sglang_mla_ext.kernels.sizes import CHUNK_TOKENS
from sglang_mla_ext.kernels.storage.expanded import ExpandedBuffers
from sglang_mla_ext.prefix.planner.branches import Branches
from sglang_mla_ext.prefix.planner.transient import FEWEST_SAVED, TransientRange, private_ranges, transient_ranges
from sglang_mla_ext.prefix.tree import SharedTree
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Mode, Segment

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    from sglang_mla_ext.adapter.compat.tree_view import TreeView


@dataclass(frozen=True)
class Piece:
    """Tokens that are expanded at once.

    Attributes:
        slots: `[tokens]` of SGLang's pool; each range is padded to whole chunks.
        chunks: ids of the chunks that they are expanded to, from the first one on, and `table` the same on the device.
        windows: of the rows that attend to them.
    """

    slots: torch.Tensor
    chunks: Sequence[int]
    table: torch.Tensor
    windows: tuple[Window, ...]


@dataclass(frozen=True)
class TransientPlan:
    """Plan of the tokens that a prefill step expands for itself.

    Attributes:
        ends: `[requests]` tokens from the first one on that are attended to in expanded form.
        expanded_tokens: of all pieces.
        expander, attention: see TransientExpansion.
    """

    ends: tuple[int, ...]
    expanded_tokens: int
    pieces: tuple[Piece, ...]
    expander: Expander
    attention: SharedAttention

    def attend(
        self,
        layer: DeepseekV2AttentionMLA,
        q: tuple[torch.Tensor, torch.Tensor],
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """Add the attention to all pieces to that over other keys, in place; arguments are those of windows.attend."""
        for piece in self.pieces:
            self.expander.expand_layer(layer, 0, piece.slots, piece.chunks, piece.table)
            attend(self.attention, piece.windows, 0, layer, q, out, lse)


class TransientExpansion:
    """See the module.

    Attributes:
        taken_bytes: of device memory, at most.
    """

    def __init__(
        self,
        layer: DeepseekV2AttentionMLA,
        pool: MLATokenToKVPool,
        req_to_token: torch.Tensor,
        tokens: int,
        memory: Memory,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        tiles: Sequence[Mapping[str, int]],
        rows: int,
    ) -> None:
        """
        Args:
            layer: any of the model's attention layers on this rank.
            pool: of latent rows; req_to_token: `[requests, tokens]`, SGLang's table of slots.
            tokens: whole chunks, that are expanded at once.
            dtype: of the model; tiles: see dispatch.make_shared_attention; rows: of one call of the attention.
        """
        sizes = buffer_sizes(layer, dtype, layers=1, heads=layer.num_local_heads)
        buffers = ExpandedBuffers.allocate(**sizes, chunks=tokens // CHUNK_TOKENS, device=device, memory=memory)
        self._chunks, self._heads, self._rows = buffers.chunks, buffers.heads, rows
        self._expander = Expander([layer], pool, buffers)
        self._attention = make_shared_attention(
            buffers, max_rows=rows, heads=buffers.heads, device=buffers.device, tiles=tiles, memory=memory
        )
        of_device: dict[str, Any] = dict(dtype=dtype, device=device, tiles=tiles, rows=rows)
        self.taken_bytes = self.bytes_for(layer, tokens, **of_device, fetches=hasattr(pool, "fetch"))
        self._req_to_token = req_to_token
        self._tree: TreeView | None = None

    @staticmethod
    def bytes_for(
        layer: DeepseekV2AttentionMLA,
        tokens: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        tiles: Sequence[Mapping[str, int]],
        rows: int,
        fetches: bool,
    ) -> int:
        """The most device memory that an object takes, and what expands with it.

        Args:
            fetches: rows of the pool are FP8.
        """
        heads, chunks = layer.num_local_heads, tokens // CHUNK_TOKENS
        sizes = buffer_sizes(layer, dtype, layers=1, heads=heads)
        of_attention = dict(max_rows=rows, heads=heads, v_head_dim=layer.v_head_dim, chunks=chunks)
        return (
            ExpandedBuffers.bytes_per_chunk(**sizes) * chunks
            + ExpandedBuffers.scale_bytes(layers=1, heads=heads)
            + workspace_bytes(**of_attention, device=device, tiles=tiles)
            + temporary_bytes(layer, dtype, fetches=fetches, to_fp8=False)
        )

    def try_out(self, dtype: torch.dtype) -> None:
        """Run every kernel once, for a model of this dtype. Raises whatever a kernel raises."""
        self._attention.try_out(dtype)
        self._expander.try_out()

    def attach(self, tree: TreeView) -> None:
        """Give it a view of the tree."""
        self._tree = tree

    def plan(
        self,
        reqs: Sequence[Req],
        prefix_lens: Sequence[int],
        covered: Sequence[int],
        rows: Rows,
        *,
        always: bool = False,
        pays: Callable[[int, int], bool] | None = None,
        shared: SharedTree | None = None,
    ) -> TransientPlan | None:
        """
        Args:
            prefix_lens: `[requests]` tokens of each request that are cached; covered: `[requests]` how many of them
                are expanded in any case, from the first one on.
            rows: of each request, one for each of its new tokens.
            always: however little it saves.
            pays: whether so many new tokens of one request gain by so many expanded tokens of its own; None where
                such tokens are left to the rest of the pass.
            shared: what the requests share, where the pass knows that already.
        Returns:
            None where nothing is worth it.
        """
        if self._tree is None:
            return None
        ranges: list[TransientRange] = []
        if len(reqs) > 1:
            branches = Branches(self._tree.shared(reqs) if shared is None else shared)
            fewest = 1 if always else FEWEST_SAVED // self._heads
            ranges = transient_ranges(branches, prefix_lens, covered, fewest)
        ends = list(covered)
        for one in ranges:
            for request in one.requests:
                ends[request] = one.end
        if pays is not None:
            alone = private_ranges(prefix_lens, ends, rows.lens, pays)
            for one in alone:
                ends[one.requests[0]] = one.end
            ranges += alone
        if not ranges:
            return None
        expanded = sum(one.end - one.start for one in ranges)
        pieces = tuple(self._pieces(reqs, ranges, rows))
        return TransientPlan(tuple(ends), expanded, pieces, self._expander, self._attention)

    def _slots(self, reqs: Sequence[Req], one: TransientRange) -> torch.Tensor:
        if one.node is not None:
            assert self._tree is not None, "it has named the node"
            return self._tree.slots(one.node, one.node_end, one.start, one.end)
        row = installed.row_of_request(reqs[one.requests[0]])
        return self._req_to_token[row, one.start : one.end].long()

    def _pieces(self, reqs: Sequence[Req], ranges: Sequence[TransientRange], rows: Rows) -> Iterator[Piece]:
        """Yield as few pieces as possible: several ranges in one, but no request twice."""
        plans: dict[Any, Any] = {}
        slots: list[torch.Tensor] = []
        segments: list[Segment] = []
        requests: set[int] = set()  # of these segments
        used = 0

        def piece() -> Piece:
            chunks = range(used)
            found = tuple(windows(self._attention, rows, segments, self._rows, plans))
            return Piece(torch.cat(slots), chunks, self._expander.table(chunks), found)

        for one in ranges:
            left = self._slots(reqs, one)
            while len(left):
                if used == self._chunks or not requests.isdisjoint(one.requests):
                    yield piece()
                    slots, segments, requests, used = [], [], set(), 0
                some = left[: (self._chunks - used) * CHUNK_TOKENS]
                left = left[len(some) :]
                count = -(-len(some) // CHUNK_TOKENS)
                slots.append(torch.nn.functional.pad(some, (0, count * CHUNK_TOKENS - len(some))))
                segments.append(Segment(one.requests, 0, len(some), Mode.NAIVE, tuple(range(used, used + count))))
                requests.update(one.requests)
                used += count
        if segments:
            yield piece()

    def forget(self) -> None:
        """Let go of the tree's nodes: no request is left, or the tree was flushed."""
        if self._tree is not None:
            self._tree.forget()
