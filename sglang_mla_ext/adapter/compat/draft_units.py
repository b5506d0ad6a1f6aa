"""Arrange new tokens in units, of as many rows as a verify step has query tokens, as a drafting layer takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from sglang_mla_ext.rows import Rows


class Units(NamedTuple):
    """New tokens of a batch as rows of whole units.

    Attributes:
        width: rows of a unit, W. rows: of each request. host_lens: `lens` on the host.
        tokens: `[rows]` ids; positions: `[rows]`, in the request.
        source: `[rows]` which of the batch's new tokens each is, the request's last one for padding.
        beyond: `[rows]` how far behind that token.
        slots: `[rows]` that are written; until they are known, those of the page of padding, -1 for the request's own.
        requests: `[units]` of each unit; lens: `[units]` tokens before it.
        padding: rows that are padding, real: the others, last: `[requests]` the last of these of each request.
    """

    width: int
    rows: Rows
    host_lens: Tensor
    tokens: Tensor
    positions: Tensor
    source: Tensor
    beyond: Tensor
    slots: Tensor
    requests: Tensor
    lens: Tensor
    padding: Tensor
    real: Tensor
    last: Tensor
