"""Answer of `GET /hybrid_mla/status`. `python -m sglang_mla_ext.status` prints its schema: docs/status.schema.json.

Nothing here comes from a prompt: no text, no token, no salt, only how many tokens there are and who shares them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from sglang_mla_ext import BACKEND_NAME, __version__
from sglang_mla_ext.observe import Counters

_TYPES = {"int": int, "float": float, "Counter[str]": dict[str, int]}
_TOTALS: dict[str, Any] = {
    each.name: (_TYPES[str(each.type)], Field(description=each.metadata["help"])) for each in fields(Counters)
}
Totals = create_model("Totals", __doc__="Totals since the server started.", **_TOTALS)


class Described(BaseModel):
    """Describes its fields by the strings below them."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Segment(Described):
    """Tokens that several requests share, or shared."""

    id: int
    """Number of the segment, unique among those of its rank, and the same as long as the segment exists."""
    parent: int | None
    """The `id` of the segment that it continues; null where it begins at the first token, or that is not known. A kept
    segment may begin before the end of that one, with a chunk of its own that holds the tokens between them once
    more."""
    start: int
    """Tokens before the segment."""
    tokens: int
    """Tokens of the segment."""
    holders: int
    """Running requests that hold it."""
    mode: Literal["naive", "grouped_absorb", "kept"]
    """Mode of the last decode step's attention to it: naive, over expanded keys and values; grouped_absorb, over latent
    rows that are read once for all requests; kept: no attention, it is expanded or being expanded, and may be used
    again."""
    expanded_bytes: int
    """Memory that it takes in expanded form, on each GPU of the rank."""
    tokens_saved: int
    """Tokens that a decode step does not read, because all holders read them together: tokens x (holders - 1)."""
    bytes_saved: int
    """Bytes of these tokens in the KV cache, on each GPU of the rank and in all layers."""


class Rank(Described):
    """State of a data-parallel rank, as reported by the first one that answers of the GPUs that share its requests."""

    rank: int
    """Number of the rank."""
    description: str
    """Description of what can be shared, as in the log at the start."""
    requests: int
    """Requests of the last decode step."""
    pause: int
    """Forward passes until sharing is tried again after a failure; 0 where it is not paused."""
    segments: list[Segment]
    """Segments that the last decode step shared, parents before children; then what is expanded besides."""
    expanded_bytes: int
    """Memory that expanded prefixes take, on each GPU."""
    budget_bytes: int
    """Memory that they and the extension's buffers may take."""
    tokens_without_memory: int
    """Tokens worth expanding for which there is no memory."""
    avg_spec_accept_length: float | None = None
    """Tokens that a verify step yields for each request, with speculative decoding."""
    counters: Totals  # type: ignore[valid-type]
    """Totals since the server started."""


class Status(Described):
    """State of sharing in a server with `hybrid_mla`."""

    version: str
    """Version of sglang-mla-ext."""
    time: float
    """Time of the answer, in seconds since 1970: the difference of a counter between two answers, divided by that of
    their times, is a rate."""
    ranks: list[Rank]
    """States of the data-parallel ranks; one entry without data parallelism."""


def status(states: Sequence[Mapping[str, Any]], now: float) -> Status:
    """
    Args:
        states: `internal_states` of `/server_info`, one for each data-parallel rank, in the order of their answers.
        now: see `Status.time`.
    """
    ranks = [Rank.model_validate(state[BACKEND_NAME]) for state in states if BACKEND_NAME in state]
    return Status(version=__version__, time=now, ranks=sorted(ranks, key=lambda each: each.rank))


def schema() -> str:
    """The JSON schema of an answer."""
    return json.dumps(Status.model_json_schema(mode="serialization"), indent=2)


if __name__ == "__main__":
    print(schema())
