"""Names of chunks of tokens that mean the same on every rank, whose trees and slots differ."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

NAME_BYTES = 8


def chunk_names(tokens: Sequence[int], key: str | None, chunk: int) -> tuple[int, ...]:
    """`[len(tokens) // chunk]` a signed 64-bit name for each whole chunk, of all tokens up to its end. So a name stands
    for a path, and two paths have names in common as far as they have tokens in common.

    Args:
        key: what keeps equal tokens apart, SGLang's `extra_key`: the cache salt and the LoRA adapter.
        chunk: tokens of a chunk.
    """
    # A digest, so that no key and tokens behind it look like another key and other tokens.
    hashed = blake2b(b"" if key is None else blake2b(key.encode()).digest(), digest_size=NAME_BYTES)
    names, numbers = [], memoryview(array("q", tokens))
    for end in range(chunk, len(tokens) + 1, chunk):
        hashed.update(numbers[end - chunk : end])
        names.append(int.from_bytes(hashed.digest(), "little", signed=True))
    return tuple(names)
