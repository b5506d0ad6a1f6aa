"""What happens to a radix tree under traffic, for tests of what looks at it (hypothesis' state machines)."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule


class TreeTraffic(RuleBasedStateMachine):
    """Requests come, go on, leave and are evicted in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.tree = self.new_tree()
        self.running: list[Any] = []
        self.kept: dict[Any, int] = {}  # handles that are kept, and their ends

    def new_tree(self) -> Any:
        raise NotImplementedError

    @rule(text=st.text("ab", min_size=1, max_size=9), key=st.sampled_from([None, None, "tenant"]))
    def start(self, text: str, key: str | None) -> None:
        self.running.append(self.tree.run(text, key))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: Any) -> None:
        self.tree.finish(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @precondition(lambda self: self.running)
    @rule(data=st.data(), text=st.text("ab", min_size=1, max_size=4))
    def go_on(self, data: Any, text: str) -> None:
        request = data.draw(st.sampled_from(self.running))
        longer = self.tree.run(request.rid + text, request.extra_key)
        self.tree.finish(request)
        self.running[self.running.index(request)] = longer

    @rule(pages=st.integers(1, 9))
    def evict(self, pages: int) -> None:
        self.tree.evict(pages * self.tree.page_size)
