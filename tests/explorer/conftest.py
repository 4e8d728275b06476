"""A browser for all tests of this folder, if Chromium is there."""

import pytest

from .browser import INSTALL, find_chromium, open_browser


@pytest.fixture(scope="session")
def visit():
    if find_chromium() is None:
        pytest.skip(INSTALL)
    with open_browser() as visit:
        yield visit
