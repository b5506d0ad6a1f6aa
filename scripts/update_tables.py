"""Write the tables of README.md and docs from records (benchmarks/results), recipes and the specs in bench/tables.yaml.

python scripts/update_tables.py            # --check: only say whether they are up to date
python scripts/update_tables.py --images   # draw docs/images as well; needs matplotlib
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from bench.plots import draw
from bench.records import REPOSITORY
from bench.tables import block, specs


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with status 1 if out of date.")] = False,
    images: Annotated[bool, typer.Option("--images", help="Draw the images, too.")] = False,
) -> None:
    """Write the tables of README.md and docs from records and recipes, between their marks."""
    pages = {page: blocks for page, blocks in specs().items() if page.endswith(".md")}
    tables = {page: {name: block(spec) for name, spec in blocks.items()} for page, blocks in pages.items()}
    for image in specs().keys() - pages.keys() if images else ():
        draw(specs()[image], REPOSITORY / image)
    stale = [name for name, of_file in tables.items() if not fill(REPOSITORY / name, of_file, write=not check)]
    if check and stale:
        print("out of date:", *stale)
        raise typer.Exit(1)


def fill(path: Path, tables: dict[str, str], *, write: bool) -> bool:
    """Put tables between their marks, `<!-- NAME -->` and `<!-- end NAME -->`.

    Returns:
        whether the file had them already.
    """
    text = before = path.read_text(encoding="utf-8")
    for name, table in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- end {name} -->)"
        text, count = re.subn(
            pattern, lambda match, table=table: f"{match[1]}{table}\n{match[2]}", text, flags=re.DOTALL
        )
        if count != 1:
            raise typer.BadParameter(f"{path} has {count} places for the table {name!r}")
    if write:
        path.write_text(text, encoding="utf-8")
    return text == before


if __name__ == "__main__":
    typer.run(main)
