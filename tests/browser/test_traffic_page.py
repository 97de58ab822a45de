"""Captured traffic of a deployment: settings, sizes, requests with their redacted passages, and deletion."""

import pytest

from tests.browser.scenes import Page, address, capture, deploy, expect
from tests.browser.test_files_page import answer_next_question
from tests.support.browsers import playwright
from tests.unit.control_plane.routes.conftest import Server


def requests(page: Page) -> playwright.Locator:
    return page.locator("ul.items > li")


def test_capturing_is_started_seen_and_ended(server: Server, page: Page) -> None:
    deployment = deploy(server, route_prefix="/chat")
    page.goto(f"{address(server)}/#/deployments/{deployment}")
    page.get_by_role("link", name="off", exact=True).click()
    expect(page.get_by_role("heading", name="Captured traffic")).to_be_visible()
    form = page.get_by_role("form", name="Capture settings")
    form.get_by_label("Share, %").fill("50")
    form.get_by_label("Days kept").fill("7")
    form.get_by_label("phone numbers").uncheck()
    form.get_by_role("button", name="Start capturing").click()
    expect(page.get_by_text("50% of requests, kept for 7 days, at most 1 GiB")).to_be_visible()
    expect(page.get_by_text("email addresses, credit cards, IP addresses, keys and passwords")).to_be_visible()
    stored = server.get(f"/deployments/{deployment}")["capture"]
    assert (stored["share"], stored["retention_days"], stored["max_bytes"]) == (0.5, 7, 1 << 30)
    assert stored["redact"] == ["email", "credit_card", "ip_address", "secret"]
    expect(page.get_by_text("No captured requests")).to_be_visible()

    capture(server, deployment)
    page.reload()
    expect(requests(page)).to_have_count(3)
    answer_next_question(page, yes=True)
    form.get_by_role("button", name="Stop and delete all").click()
    expect(form.get_by_role("button", name="Start capturing")).to_be_visible()
    assert server.get(f"/deployments/{deployment}")["capture"] is None
    page.reload()
    expect(page.get_by_text("No captured requests")).to_be_visible()
    page.goto(f"{address(server)}/#/deployments/{deployment}")
    expect(page.get_by_role("region", name="Changes, newest first")).to_contain_text("updated")


def test_requests_are_read_with_their_redacted_passages_and_deleted(server: Server, page: Page) -> None:
    deployment = deploy(server, capture={"share": 1})
    capture(server, deployment, 5)
    page.goto(f"{address(server)}/#/traffic/{deployment}")
    expect(requests(page)).to_have_count(5)
    newest = requests(page).first
    expect(newest).to_contain_text("user bob")
    expect(newest).to_contain_text("1,200 + 34 tokens")
    expect(newest).to_contain_text("3 redacted")
    newest.locator("summary").first.click()
    expect(newest.locator("mark")).to_have_text(["[email]", "[secret]", "[email]"])
    expect(newest).to_contain_text("calls send")

    answer_next_question(page, yes=False)
    newest.get_by_role("button", name="Delete request r5").click()
    asked = answer_next_question(page, yes=True)
    newest.get_by_role("button", name="Delete request r5").click()
    expect(requests(page)).to_have_count(4)
    assert asked[0].startswith("Delete request r5")

    page.get_by_label("End user").fill("bob")
    page.get_by_role("button", name="Show").click()
    expect(requests(page)).to_have_count(2)
    answer_next_question(page, yes=True)
    page.get_by_role("button", name="Delete all of this user").click()
    expect(page.get_by_text("No captured requests")).to_be_visible()
    expect(page.locator("dl")).to_contain_text("pending deletions2")
    rows = server.get(f"/deployments/{deployment}/traffic/rows")["data"]
    assert [row["user"] for row in rows] == ["ann", "ann"]
    page.goto(f"{address(server)}/#/deployments/{deployment}")
    expect(page.get_by_role("region", name="Changes, newest first")).to_contain_text("deleted captured requests")


@pytest.mark.soak("a long scene")
def test_older_requests_are_on_later_pages(server: Server, page: Page) -> None:
    deployment = deploy(server, capture={"share": 1})
    capture(server, deployment, 50)
    page.goto(f"{address(server)}/#/traffic/{deployment}")
    for button, first, count in ((None, 50, 20), ("Older", 30, 20), ("Older", 10, 10), ("Newer", 30, 20)):
        if button is not None:
            page.get_by_role("button", name=button).click()
        expect(requests(page).first).to_contain_text(f"r{first}")
        expect(requests(page)).to_have_count(count)
