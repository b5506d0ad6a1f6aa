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

    def tail_lens(self, seq_lens: Sequence[int]) -> tuple[int, ...]:
        """Tokens of each row after its shared prefix."""
        return tuple(total - shared for total, shared in zip(seq_lens, self.prefix_lens, strict=True))

    @property
    def shared_rows(self) -> int:
        return sum(len(group.rows) for group in self.groups)


Gain = Callable[[int, int], float]
"""`gain(group_size, tokens)`: what grouping saves over plain absorb, in seconds a layer; <= 0 where it does not pay."""

UsableLength = Callable[[PathNode], int]
"""How many tokens, at most `node.end`, a group at this node could share now."""


def whole_node(node: PathNode) -> int:
    """The usable length where nothing limits it."""
    return node.end


def plan_groups(
    paths: Sequence[Path],
    gain: Gain,
    *,
    min_prefix_len: int,
    mode: Mode = Mode.NAIVE,
    usable: UsableLength = whole_node,
) -> Plan:
    """Choose groups that save the most, each row in at most one.

    Walks the tree of the paths from its leaves up. At a node the rows of its subtree can form one group there,
    or a child's subtree can keep the groups found in it; a child keeps them where that saves more than its rows
    would add to the group at the node. So a row ends in its deepest ancestor that pays.

    Args:
        paths: one for each row of the batch, root first; empty for a request with nothing cached.
        gain: see `Gain`. Must not fall as `tokens` grows.
        min_prefix_len: no group shares fewer tokens than this.
        mode: recorded in each group.
        usable: see `UsableLength`.
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

    found: dict[Hashable, tuple[float, tuple[Group, ...]]] = {}
    for node in _leaves_first(children):
        found[node] = _best_at(nodes[node], rows_at, found, children[node], gain, min_prefix_len, mode, usable)

    groups = [group for node in children[None] for group in found[node][1]]
    return Plan(num_rows=len(paths), groups=tuple(sorted(groups, key=lambda group: group.rows)))


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
    gain: Gain,
    min_prefix_len: int,
    mode: Mode,
    usable: UsableLength,
) -> tuple[float, tuple[Group, ...]]:
    """The best groups for the rows below one node, and what they save."""
    apart = sum(found[child][0] for child in children)
    all_apart = tuple(group for child in children for group in found[child][1])
    tokens = min(usable(here), here.end)
    rows = rows_at[here.node]
    if len(rows) < 2 or tokens < min_prefix_len:
        return apart, all_apart

    def together(count: int) -> float:
        return gain(count, tokens) if count >= 2 else 0.0

    # Children with the most to lose leave first; each one that leaves makes the group here smaller.
    joined = set(rows)
    kept: tuple[Group, ...] = ()
    kept_gain = 0.0
    for child in sorted(children, key=lambda child: (-found[child][0], rows_at[child])):
        child_gain, child_groups = found[child]
        grouped = {row for group in child_groups for row in group.rows}
        if child_groups and child_gain >= together(len(joined)) - together(len(joined - grouped)):
            joined -= grouped
            kept += child_groups
            kept_gain += child_gain
    total = kept_gain + together(len(joined))
    if together(len(joined)) <= 0 or total < apart:
        return apart, all_apart
    group = Group(rows=tuple(sorted(joined)), node=here.node, start=0, end=tokens, mode=mode)
    return total, (*kept, group)
