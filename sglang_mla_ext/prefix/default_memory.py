"""How much memory expanded prefixes get where the user names no size: one rule, for the server and for `plan`."""

from __future__ import annotations

SHARE = 0.25
"""Of the memory for the KV cache."""

FEWEST_TOKENS = 8192
"""Expanded tokens that this must hold. Fewer gain little, and the cache misses them: with all heads on a rank, or where
the weights leave little."""


def tokens_held(available: int, buffers: int, token_bytes: int) -> int:
    """Expanded tokens that the share holds, beside our own buffers."""
    return max(int(available * SHARE) - buffers, 0) // token_bytes


def default_bytes(available: int, buffers: int, token_bytes: int, *, always: bool = False) -> int:
    """A quarter of the memory for the KV cache where that holds 8,192 expanded tokens, otherwise nothing.

    Args:
        available: bytes for the KV cache; buffers: of our own, out of the same; token_bytes: of a token of expanded
            prefixes, in all layers.
        always: however few tokens it holds, for who asks for naive attention alone.
    """
    enough = always or tokens_held(available, buffers, token_bytes) >= FEWEST_TOKENS
    return int(available * SHARE) if enough else 0
