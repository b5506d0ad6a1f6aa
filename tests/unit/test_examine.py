"""Launch commands (examined.py), and what is found in them.

test_recipes.py has many more, and what it expects is what SGLang 0.5.17 says; here it is what all releases say.
"""

from __future__ import annotations

import pytest
from examined import EXPECTED, examined_once


@pytest.mark.parametrize("more", EXPECTED, ids=lambda more: more.strip() or "as it is")
def test_a_launch_command(more: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = examined_once(tmp_path_factory)["found"][more]
    assert (found["outcome"], found["findings"], found["settings"]) == EXPECTED[more]
