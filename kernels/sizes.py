"""How tokens, rows and segments are cut, for kernels and planner alike. Plain Python, so that a command line can ask
without loading the kernels."""

from __future__ import annotations

PAGE_TOKENS = 64
"""Tokens of a page of the latent pool: consecutive slots."""

CHUNK_TOKENS = 256
"""Tokens of a chunk of an expanded prefix: a multiple of every key tile, so that no tile crosses a chunk."""

MAX_ROWS = 1024
"""Rows, which are query tokens, of one call of the attention: fills the GPU, and bounds the partial results' memory.
Batches with more decode by plain absorb; prefill takes as many calls as it needs. A mixed step has as many new tokens
beside them, at most."""

SEGMENTS_PER_ROW = 2
"""Segments that a row of a decode step is in on average, at most: what the partials' memory is sized for."""

MAX_SEGMENTS = 256
"""Segments of grouped absorb in a decode step, at most."""
