"""The pool of expanded prefixes, against a simulated prefix tree and simulated memory.

The tree is SGLang's in what matters here: splits keep the old node object at the end, requests hold a node and its
ancestors, leaves that nobody holds are evicted at any time and their slots are written again. The memory remembers
what was expanded into it, so that a wrong chunk, a stale slot or a wrong length shows as wrong contents.
"""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sglang_mla_ext.prefix.expanded_pool import ExpandedPool, Expansion
from sglang_mla_ext.prefix.planner import Path, PathNode

CHUNK_TOKENS = 4


class Node:
    """A tree node: the slots of its tokens, and how many requests hold it."""

    def __init__(self, parent: Node | None, slots: list[int]) -> None:
        self.parent = parent
        self.slots = slots
        self.holds = 0
        self.children: set[Node] = set()


def lineage(node: Node) -> list[Node]:
    """From the root's child to the node."""
    return [] if node.parent is None else [*lineage(node.parent), node]


def path_of(node: Node) -> Path:
    steps, end = [], 0
    for step in lineage(node):
        end += len(step.slots)
        steps.append(PathNode(step, end))
    return tuple(steps)


def slots_of(node: Node) -> list[int]:
    return [slot for step in lineage(node) for slot in step.slots]


def is_held(node: Node) -> bool:
    return node.holds > 0


ANY = st.integers(0, 1 << 16)  # picks one of however many there are


class PoolMachine(RuleBasedStateMachine):
    @initialize(chunks=st.integers(0, 30))
    def start(self, chunks: int) -> None:
        self.pool = ExpandedPool(chunks, CHUNK_TOKENS)
        self.root = Node(None, [])
        self.nodes: list[Node] = []  # all that are in the tree, the root left out
        self.requests: list[Node] = []  # the node that each running request holds
        self.rows = count()  # what a latent row contains: no two the same
        self.slots = count()
        self.latent: dict[int, int] = {}  # slot -> row
        self.free_slots: list[int] = []
        self.memory: dict[int, list[int | None]] = {chunk: [None] * CHUNK_TOKENS for chunk in range(chunks)}

    def claims(self) -> dict[Node, tuple[int, Expansion]]:
        """What plans made now could rely on."""
        return self.pool.lookup(path_of)

    # ---- the tree

    @rule(which=ANY, length=st.integers(1, 12))
    def arrive(self, which: int, length: int) -> None:
        """A request with a prompt of its own below a node of the tree."""
        parent = [self.root, *self.nodes][which % (len(self.nodes) + 1)]
        while len(self.free_slots) < length:
            self.free_slots.append(next(self.slots))
        node = Node(parent, [self.free_slots.pop() for _ in range(length)])
        self.latent.update((slot, next(self.rows)) for slot in node.slots)
        parent.children.add(node)
        self.nodes.append(node)
        self.hold(node)

    def hold(self, node: Node) -> None:
        self.requests.append(node)
        for step in lineage(node):
            step.holds += 1

    @precondition(lambda self: self.nodes)
    @rule(which=ANY)
    def arrive_again(self, which: int) -> None:
        """A request whose whole prompt is in the tree."""
        self.hold(self.nodes[which % len(self.nodes)])

    @precondition(lambda self: self.requests)
    @rule(which=ANY, release=st.booleans())
    def finish(self, which: int, release: bool) -> None:
        for step in lineage(self.requests.pop(which % len(self.requests))):
            step.holds -= 1
        if release:
            self.release_unheld()

    @precondition(lambda self: any(len(node.slots) > 1 for node in self.nodes))
    @rule(which=ANY, where=ANY)
    def split(self, which: int, where: int) -> None:
        long = [node for node in self.nodes if len(node.slots) > 1]
        node = long[which % len(long)]
        at = 1 + where % (len(node.slots) - 1)
        before = self.claims()
        front = Node(node.parent, node.slots[:at])
        front.holds, front.children = node.holds, {node}
        front.parent.children ^= {node, front}
        node.parent, node.slots = front, node.slots[at:]
        self.nodes.append(front)
        after = self.claims()
        assert {key: after[key] for key in before} == before, "a split changed what was covered"

    @precondition(lambda self: any(not node.holds for node in self.nodes))
    @rule(which=ANY)
    def evict(self, which: int) -> None:
        leaves = [node for node in self.nodes if not node.holds and not node.children]
        node = leaves[which % len(leaves)]
        node.parent.children.remove(node)
        self.nodes.remove(node)
        self.free_slots += node.slots

    # ---- the pool

    @precondition(lambda self: self.requests)
    @rule(
        which=ANY, level=ANY, short_of=st.sampled_from([0, 0, 0, 1, 5]), minimum=st.integers(1, 12), now=st.booleans()
    )
    def reserve(self, which: int, level: int, short_of: int, minimum: int, now: bool) -> None:
        path = path_of(self.requests[which % len(self.requests)])
        path = path[: 1 + level % len(path)]
        tokens = max(1, path[-1].end - short_of)
        before = self.claims()
        free = self.pool.free_tokens
        expansion = self.pool.reserve(path, tokens, path_of, minimum=min(minimum, tokens))
        if before:  # growth reaches further nodes, but nothing is usable before it is expanded
            after = self.claims()
            assert all(after[node][0] >= before[node][0] for node in before)
            assert max(tokens for tokens, _ in after.values()) == max(tokens for tokens, _ in before.values())
        if expansion is None:
            assert free < minimum, "there was room"
            return
        assert expansion in self.pool.expansions
        common = max((step.end for step in path_of(expansion.anchor) if step in path), default=0)
        covers = min(common, expansion.target)
        assert covers >= min(minimum, tokens)
        if covers < tokens:  # neither growing it nor another one could cover more
            assert min(tokens, self.pool.free_tokens) <= covers, "shortened although there was room"
            assert self.pool.free_tokens == 0 or expansion.anchor not in {step.node for step in path}
        if now:
            self.expand(expansion, expansion.target)

    @precondition(lambda self: any(not expansion.complete for expansion in self.pool.expansions))
    @rule(which=ANY, most=st.integers(1, 40))
    def advance(self, which: int, most: int) -> None:
        unfinished = [expansion for expansion in self.pool.expansions if not expansion.complete]
        self.expand(unfinished[which % len(unfinished)], most)

    def expand(self, expansion: Expansion, most: int) -> None:
        first, last = expansion.done, min(expansion.done + most, expansion.target)
        version, usable = self.pool.version, expansion.usable
        for token, slot in enumerate(slots_of(expansion.anchor)[first:last], first):
            chunk, offset = divmod(token, CHUNK_TOKENS)
            self.memory[expansion.chunks[chunk]][offset] = self.latent[slot]
        self.pool.advance(expansion, last - first)
        if expansion.complete:
            assert expansion.usable == expansion.target and self.pool.version > version
        else:
            assert expansion.usable == usable

    @precondition(lambda self: self.pool.expansions)
    @rule()
    def release_unheld(self) -> None:
        before = {}
        for expansion in self.pool.expansions:
            held = [step.end for step in path_of(expansion.anchor) if is_held(step.node)]
            before[expansion] = min(expansion.usable, max(held, default=0))
        free = self.pool.free_tokens
        version = self.pool.version
        dropped = self.pool.release_unheld(path_of, is_held)
        assert dropped == len(before) - len(self.pool.expansions)
        assert all(is_held(expansion.anchor) for expansion in self.pool.expansions)
        for expansion in self.pool.expansions:
            assert expansion.usable >= before[expansion], "lost what is held"
        if self.pool.free_tokens != free:
            assert self.pool.version > version

    @precondition(lambda self: len(self.pool.expansions) > 1)
    @rule(which=ANY)
    def drop(self, which: int) -> None:
        self.pool.drop(self.pool.expansions[which % len(self.pool.expansions)])

    @precondition(lambda self: len(self.pool.expansions) > 2)
    @rule()
    def drop_all(self) -> None:
        assert self.pool.drop_all() > 2
        assert self.pool.expansions == [] and self.pool.used_chunks == 0 and self.pool.lookup(path_of) == {}

    # ---- what always holds

    @invariant()
    def every_chunk_is_free_or_owned_once(self) -> None:
        owned = [chunk for expansion in self.pool.expansions for chunk in expansion.chunks]
        assert sorted([*owned, *self.pool._free]) == list(range(self.pool.num_chunks))
        assert self.pool.used_chunks == len(owned)
        assert self.pool.free_tokens == len(self.pool._free) * CHUNK_TOKENS

    @invariant()
    def lengths_are_in_order(self) -> None:
        for expansion in self.pool.expansions:
            assert 0 <= expansion.usable <= expansion.done <= expansion.target
            assert expansion.target <= path_of(expansion.anchor)[-1].end
            assert len(expansion.chunks) == -(-expansion.target // CHUNK_TOKENS), "a chunk too many or too few"

    @invariant()
    def what_a_plan_would_use_is_right(self) -> None:
        covered = self.pool.lookup(path_of)
        for node, (tokens, expansion) in covered.items():
            assert 0 < tokens <= min(path_of(node)[-1].end, expansion.usable)
            if is_held(node):
                contents = [row for chunk in expansion.chunks for row in self.memory[chunk]]
                assert contents[:tokens] == [self.latent[slot] for slot in slots_of(node)[:tokens]]


PoolMachine.TestCase.settings = settings(max_examples=400, stateful_step_count=50, deadline=None)
TestPool = PoolMachine.TestCase


# -- one case of each kind ---------------------------------------------------------------------------------------------


def chain(*lengths: int) -> list[Node]:
    """Held nodes, each the child of the one before."""
    nodes = [Node(None, [])]
    for length in lengths:
        nodes.append(Node(nodes[-1], list(range(length))))
        nodes[-1].holds = 1
    return nodes[1:]


def expand(pool: ExpandedPool, node: Node, tokens: int, minimum: int = 1) -> Expansion | None:
    expansion = pool.reserve(path_of(node), tokens, path_of, minimum=minimum)
    if expansion:
        pool.advance(expansion, expansion.target - expansion.done)
    return expansion


def test_takes_what_covers_the_prefix_already() -> None:
    pool = ExpandedPool(10, CHUNK_TOKENS)
    short, long = chain(8, 8)
    expansion = expand(pool, long, 16)
    assert expand(pool, short, 8) is expansion
    assert pool.used_chunks == 4
    assert pool.lookup(path_of) == {short: (8, expansion), long: (16, expansion)}


def test_grows_along_the_path_and_keeps_the_finished_part_usable() -> None:
    pool = ExpandedPool(10, CHUNK_TOKENS)
    short, long = chain(8, 8)
    expansion = expand(pool, short, 8)
    assert pool.reserve(path_of(long), 16, path_of, minimum=1) is expansion
    pool.advance(expansion, 3)
    assert (expansion.done, expansion.usable, expansion.target) == (11, 8, 16)
    assert pool.lookup(path_of) == {short: (8, expansion), long: (8, expansion)}
    pool.advance(expansion, 5)
    assert pool.lookup(path_of)[long] == (16, expansion)


def test_the_longest_on_the_path_grows() -> None:
    pool = ExpandedPool(20, CHUNK_TOKENS)
    first, second, third, deep = chain(4, 8, 8, 8)
    beside_second, beside_third = Node(first, list(range(8))), Node(second, list(range(8)))
    short, long = expand(pool, beside_second, 12), expand(pool, beside_third, 20)
    pool.release_unheld(path_of, is_held)
    assert (short.anchor, long.anchor) == (first, second)
    assert expand(pool, deep, 28) is long
    assert pool.lookup(path_of)[third] == (20, long)


def test_is_shortened_where_memory_ends() -> None:
    pool = ExpandedPool(3, CHUNK_TOKENS)
    (node,) = chain(20)
    expansion = expand(pool, node, 20, minimum=12)
    assert expansion.usable == 12 and pool.free_tokens == 0


def test_none_where_memory_is_less_than_the_minimum() -> None:
    pool = ExpandedPool(3, CHUNK_TOKENS)
    (node,) = chain(20)
    assert pool.reserve(path_of(node), 20, path_of, minimum=13) is None
    assert pool.expansions == [] and pool.free_tokens == 12


def test_is_cut_back_to_what_is_held_then_dropped() -> None:
    pool = ExpandedPool(10, CHUNK_TOKENS)
    front, back = chain(6, 10)
    expansion = expand(pool, back, 16)
    back.holds = 0
    assert pool.release_unheld(path_of, is_held) == 0
    assert (expansion.anchor, expansion.usable, len(expansion.chunks)) == (front, 6, 2)
    front.holds = 0
    assert pool.release_unheld(path_of, is_held) == 1
    assert pool.expansions == [] and pool.used_chunks == 0


def test_cannot_be_filled_beyond_its_target() -> None:
    pool = ExpandedPool(10, CHUNK_TOKENS)
    expansion = pool.reserve(path_of(chain(8)[0]), 8, path_of, minimum=1)
    with pytest.raises(AssertionError):
        pool.advance(expansion, 9)
