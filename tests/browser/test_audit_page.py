"""The audit trail's page: entries are filtered and paged, and only users who may read them find the page."""

import time
from pathlib import Path

import httpx
import pytest

from swiftkv_platform.control_plane.access.audit import AuditEntry, AuditTrail
from swiftkv_platform.security.keys import Scope, create_key
from swiftkv_platform.settings import Settings
from tests.browser.scenes import Page, address, expect
from tests.support.browsers import playwright
from tests.unit.control_plane.routes.conftest import SPEC, Server, make_parts, served_control_plane


def rows(page: Page) -> playwright.Locator:
    return page.get_by_role("region", name="Audit trail, newest first").locator("tbody tr")


@pytest.mark.soak("a long scene")
def test_entries_are_selected_by_actor_route_outcome_and_time(server: Server, page: Page) -> None:
    page.goto(f"{address(server)}/#/audit")
    expect(page.get_by_text("No entries yet")).to_be_visible()
    job_id = server.submit()["id"]
    server.client.post(f"/jobs/{job_id}/cancel").raise_for_status()
    assert server.client.post("/jobs/job_x/cancel").status_code == 404
    page.get_by_role("button", name="Show").click()
    expect(rows(page)).to_have_count(3)
    expect(rows(page).nth(2)).to_contain_text("POST /jobs")
    expect(rows(page).nth(2).get_by_role("link", name=job_id)).to_have_attribute("href", f"#/jobs/{job_id}")

    def select(label: str, value: str, count: int) -> None:
        """Show `count` entries by one field, then clear the filter."""
        field = page.get_by_label(label)
        if label == "Outcome":
            field.select_option(value)
        else:
            field.fill(value)
        page.get_by_role("button", name="Show").click()
        if count:
            expect(rows(page)).to_have_count(count)
        else:
            expect(page.get_by_text("No matching entries")).to_be_visible()
        page.get_by_role("button", name="Clear").click()
        expect(field).to_have_value("")
        expect(rows(page)).to_have_count(3)

    select("Outcome", "404", 1)
    select("Route", "/jobs/{job_id}/cancel", 2)
    select("Actor", "ann", 0)
    select("From", "2001-01-01T00:00", 3)
    select("Until", "2001-01-01T00:00", 0)
    assert page.locator("datalist option[value='/jobs/{job_id}/cancel']").count() == 1


@pytest.mark.soak("a long scene")
def test_a_long_trail_is_read_page_by_page(server: Server, page: Page) -> None:
    trail, now = AuditTrail(server.parts.database), time.time()  # retention removes entries after a year
    for number in range(120):
        caller = ("ann", "key_1", "acme", "::1")
        trail.store_entry(
            AuditEntry(f"aud_{number:04d}", now - 120 + number, "req", *caller, "POST", "/x", f"x-{number}", 200)
        )
    page.goto(f"{address(server)}/#/audit?actor=ann")
    for button, first, count in ((None, 119, 50), ("Older", 69, 50), ("Older", 19, 20), ("Newer", 69, 50)):
        if button is not None:
            page.get_by_role("button", name=button).click()
        expect(rows(page).first).to_contain_text(f"x-{first}")
        expect(rows(page)).to_have_count(count)
    page.get_by_role("button", name="Show").click()
    expect(rows(page).first).to_contain_text("x-119")
    expect(page.get_by_role("button", name="Newer")).to_be_disabled()


@pytest.mark.parametrize(
    ("name", "operator", "scope"), [("root", True, Scope.ADMIN), ("reader", False, Scope.JOBS_READ)]
)
@pytest.mark.soak("a long scene")
def test_the_way_to_the_trail_is_shown_to_who_may_read_it(
    page: Page, tmp_path: Path, empty_database: Path, name: str, operator: bool, scope: Scope
) -> None:
    path = tmp_path / "keys.json"
    ann = create_key(path, name="ann", tenant="acme", scopes=frozenset({Scope.ADMIN}))
    token = create_key(path, name=name, tenant="operators", scopes=frozenset({scope}), operator=operator)
    settings = Settings(home=tmp_path, api_keys_file=path, _env_file=None)
    with served_control_plane(make_parts(tmp_path, empty_database), settings) as url:
        httpx.post(f"{url}/jobs", json=SPEC, headers={"authorization": f"Bearer {ann}"}).raise_for_status()
        page.goto(url)
        expect(page.get_by_label("API key")).to_be_visible()
        link = page.get_by_role("navigation").get_by_role("link", name="Audit")
        expect(link).to_have_count(0)
        page.get_by_label("API key").fill(token)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("button", name=f"Sign out {name}")).to_be_visible()
        expect(page.get_by_role("heading", name="Overview", exact=True)).to_be_visible()
        if operator:
            link.click()
            expect(rows(page).filter(has_text="acme")).to_contain_text("POST /jobs")
        else:
            expect(link).to_have_count(0)
            page.goto(f"{url}/#/audit")
            expect(page.get_by_text("No access with this key")).to_be_visible()
        page.goto("about:blank")
