"""A page in Debian's Chromium, driven by playwright."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Error, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome")
PHONE = {"width": 390, "height": 844}


def find() -> str:
    """Return the browser's path; without one the test that asks is skipped, with a reason."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip("no browser found: install one with `apt-get install chromium`")


@contextlib.contextmanager
def opened(*, dark: bool = False, width: int = PHONE["width"]) -> Iterator[tuple[Page, list[Error]]]:
    """Yield a blank page, as wide as a phone by default, and the list of errors that its scripts raise."""
    errors: list[Error] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find(), args=["--no-sandbox", "--disable-gpu"])
        try:
            page = browser.new_page(
                viewport={**PHONE, "width": width}, color_scheme="dark" if dark else "light", is_mobile=width < 600
            )
            page.on("pageerror", lambda error: errors.append(error))
            yield page, errors
        finally:
            browser.close()
