"""Default sizes of the memory for expanded prefixes, where the user names none, and of what prefill expands for itself:
one rule, for the server and for `plan`."""

from __future__ import annotations

SHARE = 0.25
"""Share of the memory for the KV cache that expanded prefixes and our buffers take by default."""

FEWEST_TOKENS = 8192
"""Expanded tokens that this share must hold. Fewer gain little, and the cache misses them: with all heads on a rank, or
where the weights leave little."""

TRANSIENT_TOKENS = 8192
"""Tokens that a prefill pass with many heads expands at a time for itself, where it does by default."""

TRANSIENT_SHARE, TRANSIENT_SHARE_OF_NAMED = 1 / 20, 1 / 3
"""Largest shares that the memory for these tokens may take: of that for the KV cache, or of what the user named for
prefixes."""


def tokens_held(available: int, buffers: int, token_bytes: int) -> int:
    """Return the expanded tokens that the share holds, beside our own buffers."""
    return max(int(available * SHARE) - buffers, 0) // token_bytes


def default_bytes(available: int, buffers: int, token_bytes: int, beside: int = 0, *, always: bool = False) -> int:
    """Return a quarter of the memory for the KV cache, and what comes beside it, where the quarter holds 8,192 expanded
    tokens, otherwise 0.

    Args:
        available: bytes for the KV cache; buffers: of our own, out of the same; token_bytes: of a token of expanded
            prefixes, in all layers.
        beside: of what prefill expands for itself, which is not among `buffers`.
        always: however few tokens it holds, for who asks for naive attention alone.
    """
    enough = always or tokens_held(available, buffers, token_bytes) >= FEWEST_TOKENS
    return int(available * SHARE) + beside if enough else 0


def transient_tokens(heads: int) -> int:
    """Return how many tokens a prefill pass expands at a time by default with so many heads on a GPU. With few heads
    more, in no more memory: a long history then takes fewer launches."""
    return TRANSIENT_TOKENS * max(1, min(4, 64 // heads))


def default_transient_tokens(tokens: int, available: int, taken: int, named: int | None) -> int:
    """
    Args:
        tokens: that a pass would expand at a time.
        available: bytes for the KV cache; taken: for these tokens, out of the same; named: by the user for prefixes
            and buffers together.
    Returns:
        the tokens, or 0 where they take too much.
    """
    most = available * TRANSIENT_SHARE if named is None else named * TRANSIENT_SHARE_OF_NAMED
    return tokens if taken <= most else 0
