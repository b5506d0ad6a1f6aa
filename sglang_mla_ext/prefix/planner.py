"""From the tree paths of a batch's requests to a plan: which rows attend together to which shared prefix.

Pure Python; knows neither SGLang nor torch. A path is the chain of tree nodes that hold a request's cached
tokens, from the root down. Two requests share a prefix as far as their paths run through the same nodes, so
requests of different namespaces (LoRA adapter, cache salt) never do: their trees meet only in the root.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_mla_ext.prefix.cost_model import Mode


class PathNode(NamedTuple):
    """A tree node on a request's path.

    Attributes:
        node: what identifies the node (equal and hashable by identity).
        end: tokens from the root to the end of this node.
    """

    node: Hashable
    end: int


Path = tuple[PathNode, ...]


@dataclass(frozen=True)
class Group:
    """Rows that attend together to keys `[start, end)` of their common prefix.

    Attributes:
        rows: batch rows, ascending.
        node: the tree node that the prefix ends in (or within).
        start, end: the key range. `start` is 0 while one level of sharing is planned; nested sharing will give a
            row several groups with adjoining ranges.
        mode: how the range is attended to.
    """

    rows: tuple[int, ...]
    node: Hashable
    start: int
    end: int
    mode: Mode


@dataclass(frozen=True)
class Plan:
    """What one step does. Rows that are in no group attend to all their keys by plain absorb.

    Attributes:
        num_rows: rows of the batch.
        groups: disjoint sets of rows.
    """

    num_rows: int
    groups: tuple[Group, ...] = ()
    prefix_lens: tuple[int, ...] = field(init=False)
    """`[num_rows]` tokens of each row that a group covers."""

    def __post_init__(self) -> None:
        lens = [0] * self.num_rows
        for group in self.groups:
            for row in group.rows:
                assert lens[row] == group.start, "a row's groups must adjoin, from the first token on"
                lens[row] = group.end
        object.__setattr__(self, "prefix_lens", tuple(lens))

    def of_mode(self, mode: Mode) -> tuple[Group, ...]:
        """The groups that attend in this way."""
        return tuple(group for group in self.groups if group.mode is mode)


Gain = Callable[[int, int], float]
"""`gain(group_size, tokens)`: what grouping saves over plain absorb, in seconds a layer; <= 0 where it does not pay."""

UsableLength = Callable[[PathNode], int]
"""How many tokens, at most `node.end`, a group at this node could share now."""


def whole_node(node: PathNode) -> int:
    """The usable length where nothing limits it."""
    return node.end


SPARE_ENTRIES = 8
"""Entries of grouped absorb beyond what one group of all rows fills: for groups whose last entry is not whole."""


@dataclass(frozen=True)
class Stacking:
    """How grouped absorb takes the rows of a group.

    Attributes:
        page_size: it attends to whole pages of this many tokens.
        rows_per_entry: so many rows of one group are stacked and read their keys together, as one *entry* of a step;
            None for any number.
    """

    page_size: int = 1
    rows_per_entry: int | None = None

    def entries(self, group_size: int) -> int:
        """Entries that a group fills, the last one perhaps not whole."""
        return -(-group_size // self.rows_per_entry) if self.rows_per_entry else 1

    def max_entries(self, rows: int) -> int:
        """Entries that a step of this many rows has, whatever its groups: what a captured graph holds."""
        return self.entries(rows) + SPARE_ENTRIES if self.rows_per_entry else rows


def plan_groups(
    paths: Sequence[Path],
    gain: Gain,
    *,
    min_prefix_len: int,
    mode: Mode = Mode.NAIVE,
    usable: UsableLength = whole_node,
    grouped_gain: Gain | None = None,
    page_size: int = 1,
) -> Plan:
    """Choose groups that save the most, each row in at most one.

    Walks the tree of the paths from its leaves up. At a node the rows of its subtree can form one group there,
    or a child's subtree can keep the groups found in it; a child keeps them where that saves more than its rows
    would add to the group at the node. So a row ends in its deepest ancestor that pays.

    Args:
        paths: one for each row of the batch, root first; empty for a request with nothing cached.
        gain: see `Gain`. Must not fall as `tokens` grows.
        min_prefix_len: no group shares fewer tokens than this.
        mode: what `gain` is of; recorded in each group.
        usable: see `UsableLength`; for `gain`.
        grouped_gain: the same of grouped absorb, which needs no expansion and so takes all whole pages of a node. At a
            node the way that saves more counts, and the group says which it was.
        page_size: tokens of a page, for `grouped_gain`.
    Returns:
        the plan; the same paths give the same plan.
    """
    children: dict[Hashable | None, dict[Hashable, None]] = {None: {}}
    rows_at: dict[Hashable, list[int]] = {}
    nodes: dict[Hashable, PathNode] = {}
    for row, path in enumerate(paths):
        parent: Hashable | None = None
        for step in path:
            children[parent].setdefault(step.node)
            children.setdefault(step.node, {})
            nodes[step.node] = step
            rows_at.setdefault(step.node, []).append(row)
            parent = step.node

    def ways_at(here: PathNode) -> list[_Way]:
        ways = [_Way(gain, min(usable(here), here.end), mode)]
        if grouped_gain is not None:
            ways.append(_Way(grouped_gain, here.end // page_size * page_size, Mode.GROUPED_ABSORB))
        return [way for way in ways if way.tokens >= min_prefix_len]

    found: dict[Hashable, tuple[float, tuple[Group, ...]]] = {}
    for node in _leaves_first(children):
        if len(rows_at[node]) < 2:  # most nodes
            found[node] = (0.0, ())
        else:
            found[node] = _best_at(nodes[node], rows_at, found, children[node], ways_at(nodes[node]))

    groups = [group for node in children[None] for group in found[node][1]]
    return Plan(num_rows=len(paths), groups=tuple(sorted(groups, key=lambda group: group.rows)))


def limit_entries(plan: Plan, grouped_gain: Gain, stacking: Stacking) -> Plan:
    """Leave groups of grouped absorb to plain absorb, those that save least, where they need more entries than a step
    of this many rows has."""
    left = stacking.max_entries(plan.num_rows)
    dropped = set()
    grouped = plan.of_mode(Mode.GROUPED_ABSORB)
    for group in sorted(grouped, key=lambda group: (-grouped_gain(len(group.rows), group.end), group.rows)):
        needed = stacking.entries(len(group.rows))
        if needed > left:
            dropped.add(group)
        else:
            left -= needed
    if not dropped:
        return plan
    return Plan(plan.num_rows, tuple(group for group in plan.groups if group not in dropped))


class _Way(NamedTuple):
    """A way for rows to attend together at one node: what it saves, over how many tokens."""

    gain: Gain
    tokens: int
    mode: Mode

    def saves(self, count: int) -> float:
        return self.gain(count, self.tokens)


def _leaves_first(children: dict[Hashable | None, dict[Hashable, None]]) -> list[Hashable]:
    order: list[Hashable] = []
    pending = list(children[None])
    while pending:
        node = pending.pop()
        order.append(node)
        pending.extend(children[node])
    return order[::-1]


def _best_at(
    here: PathNode,
    rows_at: dict[Hashable, list[int]],
    found: dict[Hashable, tuple[float, tuple[Group, ...]]],
    children: dict[Hashable, None],
    ways: Sequence[_Way],
) -> tuple[float, tuple[Group, ...]]:
    """The best groups for the rows below one node, two or more, and what they save."""
    with_groups = [child for child in children if found[child][1]]
    apart = sum(found[child][0] for child in with_groups)
    all_apart = tuple(group for child in with_groups for group in found[child][1])
    if not ways:
        return apart, all_apart

    def together(count: int) -> float:
        return max(way.saves(count) for way in ways) if count >= 2 else 0.0

    # Children with the most to lose leave first; each one that leaves makes the group here smaller.
    joined = set(rows_at[here.node])
    kept: tuple[Group, ...] = ()
    kept_gain = 0.0
    here_gain = together(len(joined))
    for child in sorted(with_groups, key=lambda child: (-found[child][0], rows_at[child])):
        child_gain, child_groups = found[child]
        grouped = {row for group in child_groups for row in group.rows}
        without = together(len(joined - grouped))
        if child_gain >= here_gain - without:
            joined -= grouped
            kept += child_groups
            kept_gain += child_gain
            here_gain = without
    total = kept_gain + here_gain
    if here_gain <= 0 or total < apart:
        return apart, all_apart
    best = max(ways, key=lambda way: way.saves(len(joined)))
    group = Group(rows=tuple(sorted(joined)), node=here.node, start=0, end=best.tokens, mode=best.mode)
    return total, (*kept, group)
