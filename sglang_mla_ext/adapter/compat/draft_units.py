"""New tokens in the shape in which a drafting layer takes verified ones: W rows a unit, as a verify step has W query
tokens of each request."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Units(NamedTuple):
    """New tokens in units of W rows.

    Attributes:
        width: W. ends: `[requests]` units up to each request's last one.
        lens: `[units]` tokens before each; host_lens: the same on the host.
        source: `[rows]` which of the batch's new tokens each row is; padding is the request's last one.
        positions: `[rows]` in the request; slots: `[rows]` that are written.
        table_rows: `[units]` places in the table of slots.
        last: `[requests]` row of each request's last token.
    """

    width: int
    ends: tuple[int, ...]
    lens: Tensor
    host_lens: Tensor
    source: Tensor
    positions: Tensor
    slots: Tensor
    table_rows: Tensor
    last: Tensor
