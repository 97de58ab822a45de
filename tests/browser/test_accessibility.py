"""Every page, light and dark, wide and narrow: axe-core finds nothing serious, nothing is cut off, controls have
names."""

from pathlib import Path

import pytest

from tests.browser.scenes import Page, address, expect, team
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
WIDTHS = {1280: 900, 390: 844}


@pytest.mark.soak("a dozen pages under axe-core")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_can_be_used_by_everyone(server: Server, page: Page, scheme: str) -> None:
    pages = team(server)
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    for width, height in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": height})
        for name, path in pages.items():
            page.goto(f"{address(server)}/#/{path}")
            page.locator("main h1").first.wait_for()
            page.locator(".skeleton").first.wait_for(state="hidden")
            if name == "playground":
                page.get_by_label("Prompt").fill("How does a prompt skip layers?")
                page.get_by_role("button", name="Generate").click()
                expect(page.locator(".live")).to_contain_text("22 ms")
            if name == "job's checkpoints":
                page.get_by_role("button", name="Deploy ckpt").first.click()
                page.evaluate("scrollTo(0, 0)")
            if name in ("new job", "new job on a file", "clone"):
                expect(page.get_by_label("Plan", exact=True).get_by_role("status")).to_have_text("valid")
            page.evaluate(AXE)
            assert page.evaluate(FOUND) == [], (name, width)
            assert page.evaluate(NAMELESS) == [], (name, width)
            assert page.evaluate(TOO_WIDE) == [], (name, width)
