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


def _totals() -> type[BaseModel]:
    types = {"int": int, "float": float, "Counter[str]": dict[str, int]}
    members: dict[str, Any] = {
        each.name: (types[str(each.type)], Field(description=each.metadata["help"])) for each in fields(Counters)
    }
    return create_model("Totals", __doc__="Totals since the server started.", **members)


Totals = _totals()


class Described(BaseModel):
    """Describes its fields by the strings below them."""

    model_config = ConfigDict(use_attribute_docstrings=True)


class Segment(Described):
    """Tokens that several requests share, or shared."""

    id: int
    """A number of its own among those of its rank, the same as long as the segment stands."""
    parent: int | None
    """The `id` of the segment that it continues; null where it begins at the first token, or that is not known.
    One that is kept may begin before its end, with a chunk of its own that holds the tokens between them once more."""
    start: int
    """Tokens before it."""
    tokens: int
    """Its length."""
    holders: int
    """Running requests that hold it."""
    mode: Literal["naive", "grouped_absorb", "kept"]
    """How the last decode step attended to it: naive, over expanded keys and values; grouped_absorb, over latent rows
    that are read once for all; kept: not at all, it is or is being expanded and may be of use again."""
    expanded_bytes: int
    """Memory that it takes in expanded form, on each GPU of the rank."""
    tokens_saved: int
    """Tokens that a decode step does not read, because all holders read them together: tokens x (holders - 1)."""
    bytes_saved: int
    """The size of these in the KV cache, on each GPU of the rank and in all layers."""


class Rank(Described):
    """A data-parallel rank; of the GPUs that share its requests it is the first one that answers."""

    rank: int
    """Its number."""
    description: str
    """What can be shared, as in the log at the start."""
    requests: int
    """Of the last decode step."""
    pause: int
    """Forward passes until sharing is tried again after a failure; 0 where it is not paused."""
    segments: list[Segment]
    """What the last decode step shared, parents before children; then what is expanded besides."""
    expanded_bytes: int
    """Memory that expanded prefixes take, on each GPU."""
    budget_bytes: int
    """Memory that they and the extension's buffers may take."""
    tokens_without_memory: int
    """Tokens worth expanding for which there is no memory."""
    avg_spec_accept_length: float | None = None
    """With speculative decoding: tokens that a verify step yields for each request."""
    counters: Totals  # type: ignore[valid-type]
    """Totals since the server started."""


class Status(Described):
    """What `hybrid_mla` shares now."""

    version: str
    """Of sglang-mla-ext."""
    time: float
    """Of the answer, in seconds since 1970: counters of two answers, over the difference, are rates."""
    ranks: list[Rank]
    """One without data parallelism."""


def status(states: Sequence[Mapping[str, Any]], now: float) -> Status:
    """
    Args:
        states: `internal_states` of `/server_info`, one for each data-parallel rank.
        now: see `Status.time`.
    """
    entries = (state[BACKEND_NAME] for state in states if BACKEND_NAME in state)
    ranks = [Rank.model_validate({**entry, "rank": rank}) for rank, entry in enumerate(entries)]
    return Status(version=__version__, time=now, ranks=ranks)


def schema() -> str:
    """The JSON schema of an answer."""
    return json.dumps(Status.model_json_schema(mode="serialization"), indent=2)


if __name__ == "__main__":
    print(schema())
