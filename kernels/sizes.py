"""Sizes of pages, chunks, rows and segments, for kernels and planner alike. Plain Python, so that a command line can
ask without loading the kernels."""

from __future__ import annotations

PAGE_TOKENS = 64
"""Tokens of a page of the latent pool: consecutive slots."""

LATENT_DIMS = (512, 64)
"""Content and rotary part of a latent row, as the kernels for Hopper take them."""

CHUNK_TOKENS = 256
"""Tokens of a chunk of an expanded prefix: a multiple of every key tile, so that no tile crosses a chunk."""

MAX_ROWS = 1024
"""Rows, which are query tokens, of one call of the attention in a decode step: fills the GPU, and bounds the partial
results' memory. Batches with more decode by plain absorb. A mixed step has as many new tokens beside them, at most."""

PREFILL_PARTIAL_BYTES = 128 << 20
"""Memory for the partial results of one call of the attention in a prefill pass, at least that for `MAX_ROWS` rows."""


def prefill_rows(heads: int, v_head_dim: int, new_tokens: int, partial_bytes: int) -> int:
    """Return the rows of one call of the attention in a prefill pass, which takes as many calls as it needs.

    Each call costs the host a launch and a merge in every layer. With 1,024 rows a call, the host took up to 550 ms for
    a pass of 7,235 tokens whose kernels take 260 ms (61 layers of DeepSeek-V3, TP 8, H200, SGLang 0.5.23).

    Args:
        heads: of this rank; new_tokens: of a full pass.
        partial_bytes: for partial results, of which `PREFILL_PARTIAL_BYTES` are used at most.
    """
    return max(MAX_ROWS, min(new_tokens, min(partial_bytes, PREFILL_PARTIAL_BYTES) // (4 * heads * (v_head_dim + 1))))


SEGMENTS_PER_ROW = 2
"""Segments that a row of a decode step is in on average, at most: what the partials' memory is sized for."""

MAX_SEGMENTS = 256
"""Segments of grouped absorb in a decode step, at most."""
