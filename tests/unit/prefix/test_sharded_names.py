"""Names of chunks: who can tell them, and what they tell apart."""

from __future__ import annotations

import json
from hashlib import blake2b
from pathlib import Path

import pytest

from sglang_mla_ext.prefix.planner.branches import Branches
from sglang_mla_ext.prefix.sharded.agreement import Agreement
from sglang_mla_ext.prefix.sharded.names import HASH_BYTES, LENGTH_BYTES, NAME_BYTES, chunk_names
from sglang_mla_ext.prefix.sharded.report import Report

CHUNK = 4
PROMPT = tuple(range(4 * CHUNK))
KEY, OTHER_KEY = bytes(32), bytes(31) + b"1"
COLLIDING = json.loads(Path(__file__).parents[1].joinpath("colliding_chunks.json").read_text())
"""Two chunks of 256 tokens with the same unkeyed 64-bit blake2b, which were found in minutes."""


def test_names_tell_salts_and_beginnings_apart() -> None:
    names = chunk_names(PROMPT, None, CHUNK, KEY)
    assert len(names) == 4 and chunk_names((*PROMPT[:-1], 99), None, CHUNK, KEY)[:3] == names[:3]
    assert all(len(name) == NAME_BYTES for name in names) and HASH_BYTES == 16
    salted = [chunk_names(PROMPT, salt, CHUNK, KEY) for salt in (None, "", "a", "b", "\ud800")]
    assert len({name for path in salted for name in path}) == 20


def test_prompts_made_for_one_name_have_two() -> None:
    a, b = COLLIDING["a"], COLLIDING["b"]
    assert len(a) == len(b) == 256 and a != b
    unkeyed = [blake2b(b"".join(token.to_bytes(8, "little") for token in each), digest_size=8) for each in (a, b)]
    assert unkeyed[0].digest() == unkeyed[1].digest()
    assert chunk_names(a, None, 256, KEY) != chunk_names(b, None, 256, KEY)


def test_two_servers_name_a_chunk_differently() -> None:
    for salt in (None, "salt"):
        ours, theirs = (chunk_names(PROMPT, salt, CHUNK, key) for key in (KEY, OTHER_KEY))
        assert not {name[:HASH_BYTES] for name in ours} & {name[:HASH_BYTES] for name in theirs}
    tags = [chunk_names(PROMPT, "salt", CHUNK, key)[0][HASH_BYTES + LENGTH_BYTES :] for key in (KEY, OTHER_KEY)]
    assert tags[0] != tags[1], "nor does a tag tell what the salt is"


@pytest.mark.parametrize("part", ["length", "salt"])
def test_equal_hashes_of_other_lengths_or_salts_are_not_the_same_chunk(part: str) -> None:
    (name,) = chunk_names(PROMPT[:CHUNK], None, CHUNK, KEY)
    at = HASH_BYTES if part == "length" else HASH_BYTES + LENGTH_BYTES
    forged = name[:at] + bytes([name[at] ^ 1]) + name[at + 1 :]
    for other, shared in ((forged, 0), (name, 1)):
        reports = [Report.of([(each,)], [1], [each]) for each in (name, other)]
        travelled = [Report.from_words(report.words()) for report in reports]
        agreement = Agreement.of(travelled, CHUNK)
        assert len(Branches(agreement.tree)) == len(agreement.everywhere) == shared
