"""The theme: chosen by keyboard, kept, followed by other tabs and charts, and set before anything is drawn."""

from __future__ import annotations

from tests.browser.scenes import Page, address, expect, trained
from tests.browsers import playwright
from tests.unit.api.conftest import Server

LIGHT, DARK = "rgb(246, 247, 249)", "rgb(17, 20, 26)"


def theme(page: Page, name: str) -> playwright.Locator:
    return page.get_by_role("group", name="Theme").get_by_role("radio", name=name)


def expect_paper(page: Page, color: str) -> None:
    expect(page.locator("body")).to_have_css("background-color", color)


def test_a_theme_is_chosen_by_keyboard_and_kept(server: Server, page: Page) -> None:
    page.emulate_media(color_scheme="light")
    page.goto(address(server))
    expect(theme(page, "As the system")).to_be_checked()
    expect_paper(page, LIGHT)
    theme(page, "As the system").focus()
    page.keyboard.press("ArrowRight")
    expect(theme(page, "Light")).to_be_checked()
    page.keyboard.press("ArrowRight")
    expect(theme(page, "Dark")).to_be_checked()
    expect_paper(page, DARK)
    page.reload()
    expect(theme(page, "Dark")).to_be_checked()
    expect_paper(page, DARK)
    theme(page, "As the system").focus()
    page.keyboard.press("Space")
    expect_paper(page, LIGHT)
    page.emulate_media(color_scheme="dark")
    expect_paper(page, DARK)
    page.goto("about:blank")


def test_the_theme_is_there_before_the_first_paint(server: Server, page: Page) -> None:
    page.emulate_media(color_scheme="light")
    page.goto(address(server))
    theme(page, "Dark").check(force=True)
    expect_paper(page, DARK)
    page.route("**/dashboard/app.js", lambda route: route.fulfill(body="", content_type="text/javascript"))
    page.reload()
    expect_paper(page, DARK)
    blocking = page.evaluate("""() => performance.getEntriesByType("resource")
      .filter((entry) => entry.renderBlockingStatus === "blocking").map((entry) => new URL(entry.name).pathname)""")
    assert {"/dashboard/theme-at-start.js", "/dashboard/style.css"} <= set(blocking)


def test_other_tabs_and_charts_follow(server: Server, page: Page) -> None:
    job = trained(server)
    page.emulate_media(color_scheme="light")
    page.goto(f"{address(server)}/#/jobs/{job['id']}")
    chart = page.get_by_role("img", name="Loss by step").locator("canvas")
    chart.wait_for()
    other = page.context.new_page()
    other.goto(address(server))
    drawn = chart.evaluate("canvas => canvas.toDataURL()")
    theme(other, "Dark").check(force=True)
    expect(theme(page, "Dark")).to_be_checked()
    expect_paper(page, DARK)
    page.wait_for_function("([canvas, drawn]) => canvas.toDataURL() !== drawn", arg=[chart.element_handle(), drawn])
    other.close()
    page.goto("about:blank")
