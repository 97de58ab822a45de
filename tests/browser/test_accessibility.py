"""Every page, light and dark, wide and narrow: axe-core finds nothing serious, nothing is cut off, names are there.

With `SWIFTKV_SCREENSHOTS` the pages of the documentation are written to that directory.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.browser.scenes import Page, address, expect, team
from tests.browsers import playwright
from tests.unit.control_plane.routes.conftest import Server

AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text(encoding="utf-8")
FOUND = """async () => (await axe.run(document, {resultTypes: ["violations"]})).violations
  .filter(({impact}) => ["serious", "critical"].includes(impact))
  .map(({id, nodes}) => `${id}: ${nodes.map(({html, failureSummary}) => `${html} ${failureSummary}`).join("; ")}`)"""
NAMELESS = """() => [...document.querySelectorAll("input, select, textarea, button, a[href]")]
  .filter((element) => !(element.labels?.length || element.ariaLabel || element.textContent.trim()))
  .map((element) => element.outerHTML)"""
TOO_WIDE = """() => document.documentElement.scrollWidth <= innerWidth ? []
  : [...document.querySelectorAll("main *, header *")]
    .filter((element) => element.getBoundingClientRect().right > innerWidth)
    .map((element) => `${element.tagName}.${element.className}`)"""
SHOWN = {"overview", "job", "new job", "playground", "sweep", "audit", "checkpoints"}
"""Pages and parts of them whose pictures the documentation has; the overview also as on a phone in the dark."""
WIDTHS = {1280: 900, 390: 844}
FOLDER = os.environ.get("SWIFTKV_SCREENSHOTS")


@pytest.mark.slow("a dozen pages under axe-core")
@pytest.mark.parametrize(
    ("scheme", "widths"),
    [("light", (1280,)), *(pytest.param(each, WIDTHS, marks=pytest.mark.soak("twice")) for each in ("light", "dark"))],
    ids=["light and wide", "light", "dark"],
)
def test_every_page_can_be_used_by_everyone(server: Server, page: Page, scheme: str, widths: Iterable[int]) -> None:
    pages = team(server)
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    for width in widths:
        page.set_viewport_size({"width": width, "height": WIDTHS[width]})
        for name, path in pages.items():
            page.goto(f"{address(server)}/#/{path}")
            page.locator("main h1").first.wait_for()
            page.locator(".skeleton").first.wait_for(state="hidden")
            if name == "playground":
                page.get_by_label("Prompt").fill("How does a prompt skip layers?")
                page.get_by_role("button", name="Generate").click()
                expect(page.locator(".live")).to_contain_text("22 ms")
            if name == "job":
                page.get_by_role("button", name="Deploy ckpt").first.click()
                page.evaluate("scrollTo(0, 0)")
            if name == "overview" and FOLDER:
                expect(page.get_by_text("TTFT 200 ms")).to_have_count(2)
            if name in ("new job", "new job on a file", "clone"):
                expect(page.get_by_label("Plan", exact=True).get_by_role("status")).to_have_text("accepted")
            page.evaluate(AXE)
            assert page.evaluate(FOUND) == [], (name, width)
            assert page.evaluate(NAMELESS) == [], (name, width)
            assert page.evaluate(TOO_WIDE) == [], (name, width)
            picture(page, name, width, scheme)
            if name == "job":
                picture(page.get_by_role("region", name="Checkpoints"), "checkpoints", width, scheme)


def picture(shown: Page | playwright.Locator, name: str, width: int, scheme: str) -> None:
    """Write a picture of the page or a part of it, where the documentation shows it."""
    on_a_phone = (name, width, scheme) == ("overview", min(WIDTHS), "dark")
    if not FOLDER or not (on_a_phone or (name in SHOWN and width == max(WIDTHS) and scheme == "light")):
        return
    suffix = "" if scheme == "light" else "-phone-dark"
    file = Path(FOLDER) / f"dashboard-{name.replace(' ', '-')}{suffix}.png"
    shown.screenshot(path=file)
    assert file.stat().st_size < 200_000, f"{file} is too large for the repository"
