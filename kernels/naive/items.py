"""The fields of a naive work list by name: for the host, for Triton and for Gluon. schedule.py describes the list.

On the host the number is `ITEM_HEAD.value`.
"""

from __future__ import annotations

from triton.language import constexpr

N_ITEMS = constexpr(0)
"""Position of the number of items for the first of the kernel's tiles, from the start of the list. Those for its other
tiles follow; a list has items for one of them."""

GROUP_ROWS = constexpr(8)
"""Position of the first entry of group_rows, from the start of the list."""

ITEM_FIELDS = constexpr(8)
"""int32 values of an item; the last one is unused."""

# Positions from the start of an item.
ITEM_HEAD = constexpr(0)  # head of queries, keys and values
ITEM_FIRST_ROW = constexpr(1)  # entry of group_rows that names the first row
ITEM_ROWS = constexpr(2)  # number of rows, at most those of a tile
ITEM_BEGIN = constexpr(3)  # first key, a multiple of the key tile
ITEM_END = constexpr(4)  # key behind the last one, greater than ITEM_BEGIN
ITEM_CHUNKS = constexpr(5)  # position in the list of the chunk that holds the segment's first token
ITEM_PARTIAL = constexpr(6)  # partial row of the first row; those of the other rows follow
