"""The pool of chunks: every chunk has one owner, memory goes to what is worth most, and splits lose nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_mla_ext.prefix.memory import coverage
from sglang_mla_ext.prefix.memory.chunks import AllocationRequest
from sglang_mla_ext.prefix.memory.pool import GRACE, ExpandedPool

CHUNK = 256


@dataclass(eq=False)
class Node:
    """A tree node: its tokens, and how many requests hold it."""

    above: Node | None
    length: int
    holders: int = 2
    attached: bool = True
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.end = self.start + self.length

    @property
    def start(self) -> int:
        return self.above.end if self.above else 0

    def path(self) -> list[Node]:
        return [*(self.above.path() if self.above else []), self]

    def split(self, at: int) -> Node:
        """Cut in two at this token of the path, as SGLang does: the front part is a new node."""
        assert self.start < at < self.end
        front = Node(self.above, at - self.start, self.holders)
        self.above, self.length = front, self.end - at
        return front


class Tree:
    """What the pool asks of a tree."""

    def is_attached(self, node: Node) -> bool:
        return node.attached

    def length(self, node: Node) -> int:
        return node.length

    def parent(self, node: Node) -> Node | None:
        return node.above

    def holders(self, node: Node) -> int:
        return node.holders


TREE: Any = Tree()


def want(node: Node, worth: float = 1.0, start: int = 0, end: int | None = None, above: int = -1) -> AllocationRequest:
    """The range from `start` to the node's end, along its path."""
    path = [step for step in node.path() if step.end > start]
    return AllocationRequest(path, [step.end for step in path], start, node.end if end is None else end, worth, above)


def fill(pool: ExpandedPool, *wants: AllocationRequest) -> None:
    for each in wants:
        for chunk in coverage.missing(pool, each):
            pool.fill(chunk, min((chunk.index + 1) * CHUNK, each.end))


def give(pool: ExpandedPool, *wants: AllocationRequest) -> list[int]:
    """One round in which all that is given is also filled; how far each range reaches."""
    reached, _ = pool.allot(wants, TREE)
    fill(pool, *(each._replace(end=reach) for each, reach in zip(wants, reached, strict=True) if reach > each.start))
    return reached


def covered(pool: ExpandedPool, node: Node) -> tuple[int, list[int]]:
    path = node.path()
    return coverage.covered(pool, path, [step.end for step in path], 0)


def ids_of(pool: ExpandedPool) -> list[int]:
    return [chunk.id for owned in pool._owned.values() for chunk in owned.chunks.values()]


def test_a_range_gets_chunks_and_is_covered_once_they_are_filled() -> None:
    pool, node = ExpandedPool(8, CHUNK), Node(None, 3 * CHUNK + 64)
    reached, evicted = pool.allot([want(node)], TREE)
    assert reached == [node.end] and evicted == 0 and pool.used_chunks == 4
    assert covered(pool, node) == (0, [])
    missing = list(coverage.missing(pool, want(node)))
    assert [chunk.index for chunk in missing] == [0, 1, 2, 3]
    before = pool.version
    pool.fill(missing[0], CHUNK)
    assert covered(pool, node) == (CHUNK, [missing[0].id]) and pool.version > before
    fill(pool, want(node))
    assert covered(pool, node) == (node.end, [chunk.id for chunk in missing])
    assert list(coverage.missing(pool, want(node))) == []
    assert give(pool, want(node)) == [node.end] and pool.used_chunks == 4, "it is there already"


def test_groups_below_one_prompt_hold_one_copy_of_it() -> None:
    """Case (C): three groups nested below a prompt of 20 chunks, of which one goes into each of their first chunks."""
    pool, prompt = ExpandedPool(120, CHUNK), Node(None, 20 * CHUNK + 64)
    groups = [Node(prompt, 2 * CHUNK) for _ in range(3)]
    shared = want(prompt, 3.0, end=20 * CHUNK)
    wants = [shared, *(want(group, 1.0, 20 * CHUNK, above=0) for group in groups)]
    give(pool, *wants)
    assert pool.used_chunks == 20 + 3 * 3
    assert [covered(pool, group)[0] for group in groups] == [group.end for group in groups]
    for group in groups:
        group.attached = False  # its requests left, and SGLang took its slots back
    assert pool.follow(TREE) == 9 and pool.used_chunks == 20


def test_a_split_hands_over_whole_chunks() -> None:
    pool, node = ExpandedPool(8, CHUNK), Node(None, 5 * CHUNK)
    give(pool, want(node))
    ids = covered(pool, node)[1]
    middle = node.split(3 * CHUNK + 64)
    front = middle.split(CHUNK)
    assert pool.follow(TREE) == 0 and pool.used_chunks == 5
    assert covered(pool, node) == (5 * CHUNK, ids)
    assert covered(pool, middle) == (3 * CHUNK, ids[:3])
    assert covered(pool, front) == (CHUNK, ids[:1])
    other = Node(middle, CHUNK)
    assert covered(pool, other) == (3 * CHUNK, ids[:3])
    node.attached = False
    assert pool.follow(TREE) == 2 and covered(pool, middle) == (3 * CHUNK, ids[:3])


def test_a_split_that_is_seen_late_frees_what_is_there_twice() -> None:
    """Both nodes of a split got chunks for the same tokens before the one below was seen to be below."""
    pool, node = ExpandedPool(8, CHUNK), Node(None, 3 * CHUNK)
    give(pool, want(node))
    front = Node(None, 2 * CHUNK)
    give(pool, want(front))
    assert pool.used_chunks == 5
    node.above, node.length = front, CHUNK
    assert pool.follow(TREE) == 0 and pool.used_chunks == 3
    assert covered(pool, node)[0] == 3 * CHUNK and covered(pool, front)[0] == 2 * CHUNK


def test_many_splits_between_two_looks() -> None:
    pool, node = ExpandedPool(3000, CHUNK), Node(None, 3000 * CHUNK)
    give(pool, want(node))
    ids = covered(pool, node)[1]
    at, fronts = node, []
    for index in range(2999, 0, -1):
        at = at.split(index * CHUNK)
        fronts.append(at)
    pool.follow(TREE)
    assert len(pool.nodes) == 3000
    path = [*fronts[::-1], node]
    assert coverage.covered(pool, path, [step.end for step in path], 0) == (node.end, ids)


def test_a_remainder_before_a_branch_is_kept_beside_the_chunks_of_the_branches() -> None:
    pool, front = ExpandedPool(8, CHUNK), Node(None, CHUNK + 64)
    give(pool, want(front))
    assert covered(pool, front)[0] == CHUNK + 64 and pool.used_chunks == 2
    branch = Node(front, CHUNK)
    assert covered(pool, branch)[0] == CHUNK + 64, "its second chunk, which holds more, is not there yet"
    give(pool, want(front, end=CHUNK), want(branch, start=CHUNK, above=0))
    assert covered(pool, branch)[0] == branch.end and covered(pool, front)[0] == front.end and pool.used_chunks == 4


# -- little memory -----------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_cut_short_and_nothing_follows_a_gap() -> None:
    pool, node = ExpandedPool(3, CHUNK), Node(None, 4 * CHUNK)
    below = Node(node, CHUNK)
    assert give(pool, want(node), want(below, start=4 * CHUNK, above=0)) == [3 * CHUNK, 4 * CHUNK]
    assert covered(pool, below)[0] == 3 * CHUNK


def test_what_is_there_already_does_not_follow_a_gap_either() -> None:
    """Nothing would attend to it, so nothing more of it is expanded."""
    pool, node = ExpandedPool(2, CHUNK), Node(None, 3 * CHUNK)
    below = Node(node, CHUNK)
    assert pool.allot([want(below, start=3 * CHUNK)], TREE)[0] == [4 * CHUNK]
    assert pool.allot([want(node), want(below, start=3 * CHUNK, above=0)], TREE)[0] == [CHUNK, 3 * CHUNK]
    assert ExpandedPool(4, CHUNK).allot([want(node), want(below, start=3 * CHUNK, above=0)], TREE)[0] == [
        3 * CHUNK,
        4 * CHUNK,
    ]


def test_what_pays_more_takes_the_place_of_what_pays_less() -> None:
    """Case (A): two requests share 118 of 120 chunks below a page that everybody begins with; then 200 come."""
    pool, page = ExpandedPool(120, CHUNK), Node(None, 64)
    document, product = Node(page, 118 * CHUNK - 64), Node(page, 50 * CHUNK - 64, holders=200)
    assert give(pool, want(document, 1.0)) == [118 * CHUNK]
    assert give(pool, want(product, 90.0), want(document, 1.0)) == [50 * CHUNK, 70 * CHUNK]
    assert covered(pool, product)[0] == 50 * CHUNK and covered(pool, document)[0] == 70 * CHUNK
    assert len(set(ids_of(pool))) == pool.used_chunks == 120


@pytest.mark.parametrize("left", [0, 1])
def test_what_one_request_holds_alone_keeps_nothing(left: int) -> None:
    """Case (B): 40 requests on a prompt, 39 end, 200 come on another one. Even if those save less than the 40 did."""
    pool = ExpandedPool(120, CHUNK)
    first, second = Node(None, 118 * CHUNK, holders=40), Node(None, 100 * CHUNK, holders=200)
    give(pool, want(first, 10.0))
    first.holders = left
    for _ in range(GRACE):
        assert give(pool, want(second, 5.0)) == [2 * CHUNK] and pool.waiting, "it may come back"
    assert give(pool, want(second, 5.0)) == [100 * CHUNK] and not pool.waiting


@pytest.mark.parametrize("holders", [0, 1, 40])
def test_two_of_equal_worth_in_turn_do_not_evict_each_other(holders: int) -> None:
    pool = ExpandedPool(10, CHUNK)
    groups = [Node(None, 8 * CHUNK, holders=40) for _ in range(2)]
    evicted = 0
    for step in range(1000):
        now, other = groups[step % 2], groups[1 - step % 2]
        now.holders, other.holders = 40, holders
        evicted += pool.allot([want(now, 1.0 + 0.1 * (step % 2))], TREE)[1]
    assert evicted <= 2


def test_both_wanted_the_one_that_is_there_stays_unless_the_other_is_clearly_better() -> None:
    pool = ExpandedPool(8, CHUNK)
    one, other = Node(None, 8 * CHUNK), Node(None, 8 * CHUNK)
    give(pool, want(one, 1.0))
    assert give(pool, want(other, 1.2), want(one, 1.0)) == [0, 8 * CHUNK]
    assert give(pool, want(other, 1.3), want(one, 1.0)) == [8 * CHUNK, 0]


def test_what_those_who_share_it_do_not_want_any_more_makes_room_at_once() -> None:
    """While prompts are prefilled in pieces, their common part ends in one node after another: a remainder of each."""
    pool = ExpandedPool(2, CHUNK)
    first = Node(None, CHUNK + 64)
    assert give(pool, want(first, 2.0)) == [first.end]
    longer = Node(first, 64)
    whole = want(longer, 2.0)
    assert pool.allot([whole], TREE)[0] == [CHUNK], "it may be wanted by others"
    assert pool.allot([whole], TREE, [[first, longer]]) == ([longer.end], 1)


def test_chunks_leave_from_the_end() -> None:
    pool = ExpandedPool(8, CHUNK)
    one, other = Node(None, 8 * CHUNK), Node(None, 3 * CHUNK)
    give(pool, want(one, 1.0))
    ids = covered(pool, one)[1]
    give(pool, want(other, 9.0))
    assert covered(pool, one) == (5 * CHUNK, ids[:5]) and sorted(covered(pool, other)[1]) == sorted(ids[5:])


def test_what_is_optional_takes_free_memory_only() -> None:
    pool = ExpandedPool(4, CHUNK)
    one, other = Node(None, 3 * CHUNK), Node(None, 3 * CHUNK)
    give(pool, want(one, 0.1))
    assert pool.allot([want(other, 99.0)], TREE, evict=False) == ([CHUNK], 0)
    assert covered(pool, one)[0] == 3 * CHUNK


def test_drop_all_forgets_everything() -> None:
    pool, node = ExpandedPool(4, CHUNK), Node(None, 3 * CHUNK)
    give(pool, want(node))
    before = pool.version
    assert pool.drop(pool.nodes) == 3 and pool.used_chunks == 0 and not pool.nodes and pool.version > before
    assert covered(pool, node) == (0, [])


# -- anything ----------------------------------------------------------------------------------------------------------


class History:
    """Random trees and wishes, with what each chunk holds written beside: the tokens of one path."""

    def __init__(self, chunks: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.pool = ExpandedPool(chunks, CHUNK)
        self.nodes: list[Node] = []
        self.memory: dict[int, tuple[object, ...]] = {}  # what each chunk holds, page by page
        self.names: dict[tuple[Node, int], object] = {}  # of a node's page at a token: splits do not change it

    def page(self, node: Node, at: int) -> object:
        owner = next(step for step in node.path() if at < step.end)
        return self.names[owner, at]

    def step(self, action: int) -> None:
        rng = self.random
        if action == 0 or not self.nodes:
            above = rng.choice([None, *(node for node in self.nodes if node.attached)])
            node = Node(above, 64 * rng.choice([1, 2, 4, 10, 40]), rng.randrange(4))
            self.nodes.append(node)
            self.names.update({(node, at): object() for at in range(node.start, node.end, 64)})
        elif action == 1:
            node = rng.choice(self.nodes)
            if node.attached and node.length > 64:
                front = node.split(node.start + 64 * rng.randrange(1, node.length // 64))
                for at in range(front.start, front.end, 64):
                    self.names[front, at] = self.names.pop((node, at))
                self.nodes.append(front)
        elif action == 2:
            leaves = [
                n for n in self.nodes if n.attached and all(o.above is not n or not o.attached for o in self.nodes)
            ]
            if leaves:
                rng.choice(leaves).attached = False
        elif action == 3:
            rng.choice(self.nodes).holders = rng.randrange(4)
        self.pool.follow(TREE)
        attached = [node for node in self.nodes if node.attached]
        wants = [want(node, rng.random()) for node in rng.sample(attached, min(len(attached), rng.randrange(4)))]
        wants.sort(key=lambda each: -each.worth)
        reached, _ = self.pool.allot(wants, TREE)
        for each, reach in zip(wants, reached, strict=True):
            if reach:
                each = each._replace(end=reach)
                for chunk in list(coverage.missing(self.pool, each))[: rng.randrange(9)]:
                    end = min((chunk.index + 1) * CHUNK, reach)
                    pages = range(chunk.index * CHUNK, end, 64)
                    self.memory[chunk.id] = tuple(self.page(each.nodes[-1], at) for at in pages)
                    self.pool.fill(chunk, end)

    def check(self) -> None:
        ids = ids_of(self.pool)
        assert len(ids) == len(set(ids)) == self.pool.used_chunks <= self.pool.num_chunks
        assert not set(ids) & set(self.pool._free)
        for node in self.nodes:
            if not node.attached:
                continue
            tokens, chunks = covered(self.pool, node)
            held = [page for chunk in chunks for page in self.memory[chunk]][: tokens // 64]
            assert held == [self.page(node, at) for at in range(0, tokens, 64)], "chunks hold another prefix"


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([0, 1, 3, 8, 40]), st.integers(0, 1 << 30), st.lists(st.integers(0, 4), max_size=40))
def test_any_history(chunks: int, seed: int, actions: Sequence[int]) -> None:
    history = History(chunks, seed)
    for action in actions:
        history.step(action)
        history.check()
    for node in history.nodes:
        node.attached = False
    history.pool.follow(TREE)
    assert history.pool.used_chunks == 0
