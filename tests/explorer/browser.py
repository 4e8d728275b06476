"""A headless Chromium that may load nothing but the one file that it is told to open."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

INSTALL = "no Chromium: install it (Debian: apt-get install chromium), or name one in the variable CHROMIUM"


def find_chromium() -> str | None:
    """The path of Chromium, None if there is none."""
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome")
    return next((path for path in (shutil.which(name) for name in names if name) if path), None)


class Visit:
    """A page, what it complained about, and what it asked for beside itself."""

    def __init__(self, page: Page):
        self.page, self.errors, self.requests = page, [], []
        page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def open(self, path: Path) -> "Visit":
        self.page.goto(path.resolve().as_uri())
        self.settle()
        # The pictures in the page are addresses that hold their own bytes.
        self.requests = [url for url in self.requests if not url.startswith("data:")][1:]
        return self

    def settle(self) -> None:
        """Waits until all figures are drawn."""
        self.page.wait_for_function("document.documentElement.dataset.settled", timeout=60_000)

    def set(self, **changes) -> None:
        """Chooses something, and waits until all figures show it."""
        self.page.evaluate(
            "changes => { delete document.documentElement.dataset.settled; explorer.set(changes); }", changes
        )
        self.settle()

    def values(self, **chosen) -> list[float | None]:
        """The chosen quantity for all keys, None for those that are not seen."""
        script = """chosen => Array.from(explorer.evaluate({...explorer.state, ...chosen}).values,
            value => Number.isNaN(value) ? null : value)"""
        return self.page.evaluate(script, chosen)


@contextmanager
def open_browser() -> Iterator:
    """visit(width, height, scheme) -> Visit, in one browser."""
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=find_chromium(), args=["--no-sandbox", "--disable-gpu"])

        def visit(width: int = 1200, height: int = 900, scheme: str = "light", **options) -> Visit:
            size = {"width": width, "height": height}
            return Visit(browser.new_page(viewport=size, color_scheme=scheme, offline=False, **options))

        try:
            yield visit
        finally:
            browser.close()
