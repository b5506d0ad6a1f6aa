"""Images of README.md and docs: they are of the records that there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.plots import digest, draw, panels
from bench.records import REPOSITORY
from bench.tables import specs

IMAGES = {page: spec for page, spec in specs().items() if page.endswith(".png")}


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_is_of_the_records(image: str) -> None:
    """If not: python scripts/update_tables.py --images."""
    found = panels(IMAGES[image])
    assert digest(IMAGES[image], found).encode() in (REPOSITORY / image).read_bytes()


def test_an_image_carries_its_digest(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    spec = next(iter(IMAGES.values()))
    draw(spec, tmp_path / "image.png")
    assert digest(spec, panels(spec)).encode() in (tmp_path / "image.png").read_bytes()


def test_ratios_of_the_readme() -> None:
    rows = panels(IMAGES["docs/images/ranks.png"])["DeepSeek-V3, TP 8", "short answers\n26,472 shared tokens"]
    ratios = {row["accepted"]: f"{row['ours']['rate'] / row['theirs']['rate']:.2f}x" for row in rows}
    assert ratios == {1: "2.44x", 2.5: "1.91x"}
