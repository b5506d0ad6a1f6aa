"""The fields of an absorb work list by name: for the host (as NumPy indices), for Triton and for Gluon.

schedule.py describes the whole list. All values are int32.
"""

from __future__ import annotations

from triton.language import constexpr

# ---- the header: positions from the start of the list
N_ITEMS = constexpr(0)  # items of segments and of tails
SEGMENT_ITEMS = constexpr(1)  # items of segments; they come first
PROGRAM_RANGES = constexpr(8)  # three values for each program, array by array: see schedule.py

# ---- an item: positions from its start
ITEM_FIELDS = constexpr(8)  # values of an item
ITEM_STRIP = constexpr(0)  # position in the list of the item's first strip
ITEM_ROWS = constexpr(1)  # query rows, at most those of a tile
ITEM_BEGIN = constexpr(2)  # first key, a multiple of BLOCK_KEYS
ITEM_END = constexpr(3)  # key behind the last one, greater than ITEM_BEGIN
ITEM_PAGE = constexpr(4)  # entry of the page table, read as a flat array, that holds the page of key 0
ITEM_PARTIAL = constexpr(5)  # where the result goes: partial row · heads + head, for the item's first query row
ITEM_LAST = constexpr(6)  # of tails: 1 if these are the last keys of their request; of segments: 0
ITEM_FIRST_ROW = constexpr(7)  # of tails: the item's first query row, counted in its request; of segments: 0

NO_ROW = constexpr(1 << 30)  # a query row that is out of bounds: TMA writes zeros for it
