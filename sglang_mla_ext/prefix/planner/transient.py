"""Ranges of cached tokens that a prefill pass expands for itself alone, beyond what is expanded already.

SGLang expands the cached prefix of every request anew in each pass. What several requests of the pass have in common
needs that once, whether or not there is memory that keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from sglang_mla_ext.prefix.planner.branches import Branches

FEWEST_SAVED = 1 << 18
"""Tokens times heads that requests together need not expand again, at least, for a range that a pass expands for
itself: 2,048 tokens of 128 heads. By arithmetic they take 0.1 ms in a layer, several times what the launches do."""


@dataclass(frozen=True)
class TransientRange:
    """Cached tokens `[start, end)`, counted from the root of the tree, of all these requests.

    Attributes:
        node: the handle of a node whose path has them, which ends at `node_end`; None for tokens of one request alone.
        requests: of the pass, ascending.
    """

    node: Hashable | None
    node_end: int
    start: int
    end: int
    requests: tuple[int, ...]


def transient_ranges(
    branches: Branches, prefix_lens: Sequence[int], covered: Sequence[int], fewest: int
) -> list[TransientRange]:
    """Ranges that follow what each request has expanded, or a range before, without a gap.

    Args:
        branches: what the pass's requests share.
        prefix_lens: `[requests]` tokens that are cached; covered: `[requests]` how many of them are expanded, from the
            first one on.
        fewest: tokens that a range saves, at least.
    """
    reached = list(covered)
    found = []
    for index, branch in enumerate(branches):
        members: dict[int, list[int]] = {}  # by the token from which on they need the branch
        for request in sorted(branches.requests_of(index)):
            if branch.start <= reached[request] < min(branch.end, prefix_lens[request]):
                members.setdefault(reached[request], []).append(request)
        for start, requests in members.items():
            end = min(branch.end, *(prefix_lens[request] for request in requests))
            if (end - start) * (len(requests) - 1) < fewest:
                continue
            found.append(TransientRange(branch.nodes[-1], branch.ends[-1], start, end, tuple(requests)))
            for request in requests:
                reached[request] = end
    return found


def private_ranges(
    prefix_lens: Sequence[int], covered: Sequence[int], rows: Sequence[int], pays: Callable[[int, int], bool]
) -> list[TransientRange]:
    """Cached tokens of single requests that are worth expanding for their own new tokens.

    Args:
        prefix_lens: `[requests]` tokens that are cached; covered: `[requests]` how many of them are expanded otherwise,
            from the first one on.
        rows: `[requests]` new tokens.
        pays: whether so many rows gain by so many expanded tokens.
    """
    return [
        TransientRange(None, end, start, end, (request,))
        for request, (start, end, count) in enumerate(zip(covered, prefix_lens, rows, strict=True))
        if start < end and pays(count, end - start)
    ]
