"""A job's page: phases on a line of time, a log that is searched, checkpoints, and the worst measure first."""

from __future__ import annotations

from tests.browser.scenes import Page, address, expect, trained
from tests.unit.api.conftest import Server


def test_a_trained_job_leads_with_its_worst_measure(server: Server, page: Page) -> None:
    job = trained(server)
    page.goto(f"{address(server)}/#/jobs/{job['id']}")
    expect(page.locator(".worst")).to_contain_text("Worst measure of 2KL to the teacher: 0.173 limit 0.2passed")
    phases = page.locator(".timeline li")
    expect(phases).to_have_count(4)
    for phase, status in zip(phases.all(), ("queued", "starting", "running", "evaluating"), strict=True):
        expect(phase).to_contain_text(status)
    expect(phases.nth(2)).to_contain_text("2 checkpoints")
    checkpoints = page.get_by_role("region", name="Checkpoints")
    expect(checkpoints.get_by_role("row")).to_have_count(3)
    expect(checkpoints.get_by_role("row").filter(has_text="ckpt_00000030")).to_contain_text("lowest")


def test_the_log_and_the_events_are_searched(server: Server, page: Page) -> None:
    job = trained(server)
    page.goto(f"{address(server)}/#/jobs/{job['id']}")
    page.get_by_text("Log", exact=True).click()
    log = page.get_by_role("region", name="Log")
    expect(log).to_contain_text("worker ready")
    page.get_by_label("Search the log").fill("STORE")
    expect(log.locator("mark")).to_have_text("store")
    expect(log).not_to_contain_text("worker ready")
    expect(page.get_by_text("1 of 3 lines")).to_be_visible()
    page.get_by_label("Search the log").fill("")
    page.get_by_label("errors and warnings").check()
    expect(log).to_have_text("WARNING the store is slow")
    page.get_by_label("Search events").fill("step 15")
    expect(page.get_by_role("region", name="Events, newest first").get_by_role("row")).to_have_count(2)


def test_runs_are_laid_over_each_other(server: Server, page: Page) -> None:
    trained(server, "first")
    trained(server, "second")
    page.goto(f"{address(server)}/#/jobs")
    page.get_by_label("Overlay first").check()
    page.get_by_label("Overlay second").check()
    page.get_by_role("link", name="Overlay 2 runs").click()
    expect(page.get_by_role("img", name="Loss by step; last: first 0.4615, second 0.4615")).to_be_visible()


def test_jobs_are_searched_and_sorted(server: Server, page: Page) -> None:
    for name in ("beta", "alpha", "gamma"):
        server.submit(name=name)
    page.goto(f"{address(server)}/#/jobs")
    rows = page.get_by_role("region", name="Jobs").locator("tbody tr")
    expect(rows).to_have_count(3)
    page.get_by_role("button", name="Job", exact=True).click()
    expect(page.get_by_role("columnheader", name="Job", exact=True)).to_have_attribute("aria-sort", "ascending")
    assert [text.split()[0] for text in rows.locator("a").all_inner_texts()] == ["alpha", "beta", "gamma"]
    page.keyboard.press("Control+k")
    page.keyboard.type("amm")
    expect(rows).to_have_count(1)
    page.get_by_label("Search jobs").fill("nothing like it")
    expect(page.get_by_text("Nothing matches")).to_be_visible()
