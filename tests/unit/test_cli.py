"""`sglang-mla plan`: the modes that a server chooses from, and its choices."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from sglang_mla_ext.cli import app


def plan(*options: str) -> str:
    result = CliRunner().invoke(app, ["plan", *options])
    assert result.exit_code == 0, result.output
    return result.output


def chosen(output: str) -> list[list[str]]:
    """The cells of the table's rows."""
    lines = (line[1:-1].split("│") for line in output.splitlines() if line.startswith("│"))
    return [[cell.strip() for cell in cells] for cells in lines]


def test_few_heads_have_three_modes():
    rows = chosen(plan("--tp", "8", "--prefix", "7069", "--batch", "2", "--batch", "16", "--batch", "512"))
    assert [(row[1], row[5]) for row in rows if row[0]] == [("2", "absorb"), ("16", "grouped"), ("512", "naive")]
    assert "26,472 tokens: sharing pays from 2 requests on" in plan("--tp", "8", "--prefix", "26472")


@pytest.mark.parametrize("options", [("--tp", "1"), ("--tp", "8", "--gpu", "h100")], ids=["128 heads", "not measured"])
def test_where_servers_do_not_stack_requests_the_mode_is_not_shown(options):
    output = plan(*options)
    assert "grouped" not in output and "naive" in output
