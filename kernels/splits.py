"""Division of a work list's keys: how often those of each group are split, and in which order the items are taken.

Both are pure functions of sizes, on the host, for kernels that run a fixed number of programs over a list of items:
program p takes p, p + programs, p + 2·programs and so on.
"""

from __future__ import annotations

import numpy as np

ITEM_OVERHEAD_KEYS = 128
"""Cost of starting and finishing an item (read q, write the partial), in keys of a full tile."""

PARTIALS_PER_KEY = 90
"""Partials (one row and head, written and read again by the merge) that take as long as one key of a full tile."""

MAX_LENGTHS_TRIED = 8
"""Groups, the longest ones, whose even divisions are tried as the length of a split."""


def choose_splits(
    sizes: np.ndarray,
    items: np.ndarray,
    blocks: np.ndarray,
    heads: int,
    block_keys: int,
    max_partial_rows: int,
    programs: int,
    keys_behind: int = 0,
) -> np.ndarray:
    """Splits of each group: all groups are cut into ranges of at most T key blocks, T the same for all.

    T is the one with the shortest estimated time: rounds of `programs` items, largest items first, each round as long
    as its largest item, plus the merge of the partials. So keys are not split when the row tiles already fill the grid,
    or when a split gains less than what it writes costs. Of equally good ones, the largest T.

    Args:
        sizes, items, blocks: `[groups]`: rows, items of one split (heads x row tiles) and key blocks of each group.
        keys_behind: keys of other items, which programs take after these so that all end together. With many of them,
            only a few programs get items of these groups, and these items are long.
    Returns:
        `[groups]`, each between 1 and the group's key blocks; the partial rows are at most `max_partial_rows`.
    """
    most = min(int(blocks.max()), -(-2 * programs // int(items.min())), max_partial_rows)
    longest = np.unique(blocks)[-MAX_LENGTHS_TRIED:]
    limits = np.unique(-(-longest[:, None] // np.arange(1, most + 1)))[::-1]  # [T] descending, the first splits nothing
    limits = limits[(limits * 4 * programs >= items @ blocks) | (limits == limits[0])]  # four rounds balance any list
    splits = -(-blocks // limits[:, None])  # [T, groups]
    partial_rows = splits @ sizes  # [T]
    fits = partial_rows <= max_partial_rows
    if not fits[0]:
        raise ValueError(f"{partial_rows[0]} rows need as many partial rows; there is room for {max_partial_rows}")
    splits, partial_rows = splits[fits], partial_rows[fits]
    cost = -(-blocks // splits) * block_keys + ITEM_OVERHEAD_KEYS  # [T, groups], of one item
    order = np.argsort(-cost, axis=1, kind="stable")
    cost = np.take_along_axis(cost, order, 1)
    ended = np.cumsum(np.take_along_axis(items * splits, order, 1), axis=1)  # [T, groups], items up to a group's last
    rounds = -(-ended // programs)  # [T, groups], rounds begun
    time = (cost * np.diff(rounds, axis=1, prepend=0)).sum(axis=1)
    all_keys = (cost * np.diff(ended, axis=1, prepend=0)).sum(axis=1) + keys_behind
    time = np.maximum(time, all_keys / programs) + partial_rows * heads / PARTIALS_PER_KEY
    return splits[np.argmin(time)]


def balanced_order(keys: np.ndarray, programs: int) -> np.ndarray:
    """Order of the items so that programs that take every `programs`-th item finish at about the same time.

    Largest first, round by round; within a round the largest item goes to the program with the least work so far, and a
    last round that does not reach all programs goes to those with the least. Equal items keep their order.

    Args:
        keys: `[n_items]`, keys of each item.
    Returns:
        `[n_items]`, a permutation.
    """
    n = len(keys)
    cost = keys + ITEM_OVERHEAD_KEYS
    by_size = np.argsort(-cost, kind="stable")
    if n <= programs or cost[by_size[0]] == cost[by_size[-1]]:
        return by_size
    rounds = -(-n // programs)
    load = np.zeros(programs, np.int64)
    plan = np.full((rounds, programs), -1)  # item of each round and program
    for r in range(rounds):
        taken = by_size[r * programs : (r + 1) * programs]
        least = np.argsort(load, kind="stable")[: len(taken)]
        plan[r, least] = taken
        load[least] += cost[taken]
    last_first = np.argsort(plan[-1] < 0, kind="stable")  # programs that a short last round reaches come first
    return plan[:, last_first].reshape(-1)[:n]


def entries_of_partials(sizes: np.ndarray, splits: np.ndarray) -> np.ndarray:
    """Return for each partial row of groups that are split its row, counted over all groups: `[sum of sizes · splits]`.

    The partials of a group stand together, split by split, each with one partial for every row of the group.
    """
    size_of = np.repeat(sizes, splits)  # of the group of every split
    first = np.repeat(np.cumsum(sizes) - sizes, splits)  # its group's first row
    in_split = np.arange(size_of.sum()) - np.repeat(np.cumsum(size_of) - size_of, size_of)
    return np.repeat(first, size_of) + in_split
