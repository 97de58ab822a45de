"""The landing page tells what runs, waits, serves and failed, and says where something is not known."""

from __future__ import annotations

from tests.browser.scenes import OUT_OF_MEMORY, Page, address, deploy, expect, failed
from tests.browsers import playwright
from tests.unit.api.conftest import Server


def test_an_empty_control_plane_leads_to_a_first_job(server: Server, page: Page) -> None:
    page.goto(address(server))
    expect(page.get_by_text("No job runs or waits")).to_be_visible()
    expect(page.get_by_text("Nothing is served")).to_be_visible()
    expect(page.get_by_text("Nothing failed")).to_be_visible()
    page.get_by_role("link", name="Start one from a recipe").click()
    expect(page.get_by_role("heading", name="New job")).to_be_visible()
    page.goto("about:blank")


def test_the_overview_shows_work_service_and_failures(server: Server, page: Page) -> None:
    failed(server)
    deploy(server, route_prefix="/chat")
    job = server.submit(name="first", resources={"num_workers": 2, "cpus_per_worker": 3})["id"]
    server.submit(name="second")
    server.tick()
    worker = server.worker(job)
    worker.say("status", status="running")
    for step, time in ((1, 2000), (3, 2040)):
        worker.step(step, time=time)
    server.tick()
    page.goto(address(server))

    def panel(title: str) -> playwright.Locator:
        return page.locator("section.panel", has=page.get_by_role("heading", name=title))

    work = panel("Running and waiting")
    expect(work.get_by_role("listitem").filter(has_text="first")).to_contain_text("2 min left")  # 7 steps of 20 s
    expect(work.get_by_role("listitem").filter(has_text="second")).to_contain_text("waits")
    held = server.get("/quota")["held_by_jobs"]["cpus"]
    assert held >= 6, "two workers of three cores"
    expect(panel("Cluster in use")).to_contain_text(f"{held:g} by jobs")
    expect(panel("Cluster in use")).to_contain_text("tenant default")
    served = panel("Deployments")
    expect(served).to_contain_text("/chat")
    expect(served).to_contain_text("TTFT 200 ms")  # once there are two measurements
    expect(panel("Failed lately")).to_contain_text(f"out_of_memory {OUT_OF_MEMORY}")
    page.goto("about:blank")


def test_a_figure_that_nothing_tells_is_unknown(server: Server, page: Page) -> None:
    deploy(server)
    server.client.delete(f"/deployments/{server.get('/deployments')['data'][0]['id']}")
    page.goto(address(server))
    unknown = page.get_by_title("the deployment is deleting").first
    expect(unknown).to_contain_text("unknown")
    page.goto("about:blank")
