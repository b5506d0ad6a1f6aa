"""Names of chunks of tokens that mean the same on every rank, whose trees and slots differ.

A name alone decides whose keys a row attends to, so nobody outside may find two prompts with the same one. It is a
keyed hash of 128 bits, and the key is drawn anew at each start. Behind the hash are the number of tokens up to the
chunk's end and a tag of the salt, so that wherever names are compared, these are compared as well.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES, LENGTH_BYTES, SALT_BYTES = 16, 8, 8
NAME_BYTES = HASH_BYTES + LENGTH_BYTES + SALT_BYTES
KEY_BYTES = 32

Name = bytes
"""`[NAME_BYTES]` hash, length, salt."""

Names = tuple[Name, ...]
"""Names of consecutive chunks of a prompt."""


def chunk_names(tokens: Sequence[int], salt: str | None, chunk: int, key: bytes) -> Names:
    """`[len(tokens) // chunk]` a name for each whole chunk, of all tokens up to its end. So a name stands for a path,
    and two paths have names in common as far as they have tokens in common.

    Args:
        salt: what keeps equal tokens apart: SGLang's key, which has the LoRA adapter, and the cache salt.
        chunk: tokens of a chunk.
        key: secret of the server, the same on all its ranks.
    """
    # A digest of fixed length, so that no salt and tokens behind it look like another salt and other tokens. Clients
    # may send any characters, also halves of pairs.
    salted = blake2b(b"" if salt is None else b"=" + salt.encode(errors="surrogatepass"), key=key).digest()
    hashed = blake2b(salted, key=key, digest_size=HASH_BYTES)
    names, numbers = [], memoryview(array("q", tokens))
    for end in range(chunk, len(tokens) + 1, chunk):
        hashed.update(numbers[end - chunk : end])
        names.append(hashed.digest() + end.to_bytes(LENGTH_BYTES, "little") + salted[:SALT_BYTES])
    return tuple(names)


def end_of(name: Name) -> int:
    """Return the tokens up to the end of the chunk with this name."""
    return int.from_bytes(name[HASH_BYTES : HASH_BYTES + LENGTH_BYTES], "little")
