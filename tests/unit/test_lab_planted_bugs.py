"""The planted bugs fit the tree as it is, and the study tells a bug that tests see from one that they do not."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from lab.planted_bugs import command
from lab.planted_bugs.bugs import REPOSITORY, Bug, read_bugs
from typer.testing import CliRunner


@pytest.mark.parametrize("bug", read_bugs(), ids=lambda bug: bug.name)
def test_a_bug_fits_the_tree(bug: Bug) -> None:
    """Where this fails, its code has changed: say the same wrong thing of the code as it is now."""
    assert bug.text != bug.becomes
    ast.parse(bug.edited(REPOSITORY))
    assert len({test.startswith("tests/kernels") for test in bug.tests}) == 1
    for test in bug.tests:
        file, _, name = test.partition("::")
        assert f"def {name}" in (REPOSITORY / file).read_text()


def test_names_are_unique() -> None:
    names = [bug.name for bug in read_bugs()]
    assert len(set(names)) == len(names) >= 60


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one module and its test, and two bugs of which the test sees one."""
    repository = tmp_path / "small"
    repository.mkdir()
    (repository / "module.py").write_text("def least(a, b):\n    return a if a < b else b\n\n\nSEEN_BY_NOBODY = 1\n")
    (repository / "test_module.py").write_text(
        "import module\n\n\ndef test_least():\n    assert module.least(1, 2) == 1\n"
    )
    (repository / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    of_module = dict(file="module.py", tests=("test_module.py",), user="wrong numbers")
    bugs = [
        Bug(name="the larger one", text="a < b", becomes="a > b", **of_module),
        Bug(name="another number", text="NOBODY = 1", becomes="NOBODY = 2", **of_module),
    ]
    monkeypatch.setattr(command, "REPOSITORY", repository)
    monkeypatch.setattr(command, "read_bugs", lambda: bugs)
    return repository


def test_what_is_seen_and_what_is_not(small: Path) -> None:
    found = CliRunner().invoke(command.app, [])
    assert found.exit_code == 1
    seen, not_seen, both = found.output.splitlines()
    assert seen.startswith("seen ") and seen.endswith("the larger one: test_module.py::test_least")
    assert not_seen.startswith("NOT SEEN ") and not_seen.endswith("another number: wrong numbers")
    assert both == "1 of 2 seen" and "a < b" in (small / "module.py").read_text()


def test_a_text_that_is_there_twice_is_refused(small: Path) -> None:
    (small / "module.py").write_text("a < b\na < b\n")
    with pytest.raises(ValueError, match="occurs 2 times"):
        CliRunner().invoke(command.app, ["--only", "larger"], catch_exceptions=False)


def test_tests_that_fail_anyway_see_nothing(small: Path) -> None:
    (small / "module.py").write_text("def least(a, b):\n    return b if a < b else a\n\n\nSEEN_BY_NOBODY = 1\n")
    with pytest.raises(RuntimeError, match="tests fail without a bug"):
        CliRunner().invoke(command.app, ["--only", "larger"], catch_exceptions=False)
