"""A real Chromium, as fixtures that test modules import."""

import shutil
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.requirements import missing, required_module

playwright = required_module("playwright.sync_api")

_PATIENCE_MS = 60_000
"""Generous, since a busy machine is slow; assertions that hold do not wait."""
playwright.expect.set_options(timeout=_PATIENCE_MS)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = [
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
]


@pytest.fixture(scope="module")  # its event loop would disturb other modules' loops
def browser() -> Iterator[playwright.Browser]:
    """Debian's Chromium, or one on the path."""
    if CHROMIUM is None:
        missing("no Chromium on this machine (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=False, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: playwright.Browser) -> Iterator[playwright.Page]:
    """A fresh page, to be requested after its server; a script error or a failed request fails the test."""
    complaints: list[str] = []
    with closing(browser.new_context(viewport={"width": 1280, "height": 900})) as context:
        page = context.new_page()
        page.set_default_timeout(_PATIENCE_MS)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(f"{request.url}: {request.failure}"))
        yield page
        page.goto("about:blank")  # ends its requests, or the server would wait for them
    aborted = [text for text in complaints if "ERR_ABORTED" not in text]  # leaving a page aborts its requests
    assert aborted == []
