"""The mirror of a tree whose nodes are numbers, over paths that are written down: also where the installed SGLang has
no such tree. The real ones are in test_tree_of_numbers.py."""

from __future__ import annotations

from typing import NamedTuple

from sglang_mla_ext.adapter.compat.mirror import Mirror


class Step(NamedTuple):
    node_id: int
    path_end: int
    num_children: int


def test_a_node_that_comes_between_two_changes_no_count_above() -> None:
    paths = {1: [Step(9, 2, 1), Step(1, 6, 0)]}
    mirror = Mirror(lambda numbers: [paths[number] for number in numbers])
    (first,), complete = mirror.follow([1], count=True)
    top = first.parent
    assert complete and (top.id, top.lock_ref, first.lock_ref) == (9, 1, 1)

    front = [Step(9, 2, 1), Step(3, 4, 2)]
    paths |= {1: [*front, Step(1, 6, 0)], 2: [*front, Step(2, 6, 0)]}
    (found, second), complete = mirror.follow([1, 2], count=True)
    assert complete and found is first and first.parent is second.parent and first.parent.parent is top
    assert [node.lock_ref for node in (top, first.parent, first, second)] == [2, 2, 1, 1]

    mirror.follow([2], count=True)
    assert [node.lock_ref for node in (top, first.parent, first, second)] == [1, 1, 0, 1]
    mirror.forget()
    assert [node.lock_ref for node in (top, first.parent, first, second)] == [0, 0, 0, 0]
