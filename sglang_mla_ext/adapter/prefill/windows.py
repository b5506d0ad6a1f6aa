"""Attention of a prefill step's rows to expanded segments, in windows of a limited number of rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from sglang_mla_ext.kernels.naive.attention import SharedAttention
from sglang_mla_ext.rows import Rows
from sglang_mla_ext.segment import Segment

if TYPE_CHECKING:
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA


class Window(NamedTuple):
    """Rows `[start, stop)` of the step, as many as the attention's workspace holds, and their prepared plan."""

    start: int
    stop: int
    plan: Any


def windows(
    attention: SharedAttention, rows: Rows, segments: Sequence[Segment], max_rows: int, plans: dict[Any, Any]
) -> Iterator[Window]:
    """Yield the windows that have rows of these segments.

    Args:
        rows: of the pass, one for each new token of each request.
        segments: of requests.
        max_rows: rows of one call of the attention, at most.
        plans: cache of plans; a long prompt, and many requests with one prefix, fill window after window with the same
            rows.
    """
    for start in range(0, rows.total, max_rows):
        stop = min(start + max_rows, rows.total)
        inside = tuple(rows.window(start, stop).by_row(segments))
        if inside:
            key = inside, stop - start
            if key not in plans:
                plans[key] = attention.make_plan(*key)
            yield Window(start, stop, plans[key])


def attend(
    attention: SharedAttention,
    found: Sequence[Window],
    index: int,
    layer: DeepseekV2AttentionMLA,
    q: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    """Add the attention to what these windows' plans have to that over other keys, in place.

    Args:
        index: of the layer in the attention's buffers.
        q: `[rows, heads, qk_nope_head_dim]` and `[rows, heads, qk_rope_head_dim]`, after rotation.
        out: `[rows, heads, v_head_dim]`; lse: `[rows, heads]` float32, natural log.
    """
    q_nope, q_rope = q
    for window in found:
        rows = slice(window.start, window.stop)
        some_out, some_lse = out[rows], lse[rows]
        attention.run(index, q_nope[rows], q_rope[rows], layer.attn_mha.scaling, window.plan)
        attention.merge(some_out, some_lse, some_out, some_lse, window.plan)
