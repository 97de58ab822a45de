"""The dashboard in a real Chromium: a job from spec to report, the landing page, the theme, and signing in with
keys."""

import re
from pathlib import Path

import pytest
from sqlalchemy import text

from swiftkv_platform.control_plane.ray.placement import Node
from swiftkv_platform.local import formats as units
from swiftkv_platform.security.keys import Scope, create_key
from swiftkv_platform.settings import Settings
from tests.browser.scenes import (
    OUT_OF_MEMORY,
    Page,
    address,
    deploy,
    expect,
    failed,
    sweep,
    trained,
)
from tests.support.browsers import playwright
from tests.unit.control_plane.routes.conftest import SPEC, Server, make_parts, served_control_plane


@pytest.mark.soak("a long scene")
def test_a_job_that_cannot_be_read_is_named(server: Server, page: Page) -> None:
    ids = [server.client.post("/jobs", json=SPEC).json()["id"] for _ in range(2)]
    with server.parts.database.writing() as session:
        session.execute(text("UPDATE jobs SET status = 'dancing' WHERE id = :id"), {"id": ids[0]})
    page.goto(f"{address(server)}/#/jobs")
    expect(page.get_by_role("row")).to_have_count(2)
    expect(page.get_by_text(f"cannot read them: {ids[0]}")).to_be_visible()


def test_a_job_is_paused_resumed_and_cancelled(server: Server, page: Page) -> None:
    job = server.submit()
    page.goto(f"{address(server)}/#/jobs/{job['id']}")
    status = page.locator("main .head .status")
    for button, outcome in (("Pause", "paused"), ("Resume", "queued"), ("Cancel", "cancelled")):
        page.get_by_role("button", name=button).click()
        expect(status).to_have_text(outcome)
    expect(page.locator("main .head").get_by_role("button")).to_have_count(0)


def test_a_sweep_shows_its_frontier_and_its_choice(server: Server, page: Page) -> None:
    page.goto(f"{address(server)}/#/jobs/{sweep(server)}")
    plot = page.get_by_role("img", name="KL over prefill compute")
    expect(plot).to_be_visible()
    name = plot.get_attribute("aria-label") or ""
    assert "The quality gate is at KL 0.2." in name
    assert [trial in name for trial in ("l9-g1", "l6-g1", "l6-g2", "l7-g4")] == [True, True, True, False]
    expect(page.get_by_role("row", name="l6-g1 51.6% 100% 0.104 1.1 yes published")).to_be_visible()
    expect(page.get_by_role("row", name="l6-g2 50.8% 75% 0.269 1.1 no on the frontier")).to_be_visible()
    expect(page.get_by_role("row", name="l9-g4")).to_contain_text("g is at most 3")


@pytest.mark.soak("a long scene")
def test_the_pages_are_reached_by_keyboard_and_named(server: Server, page: Page) -> None:
    page.goto(address(server))
    page.get_by_role("heading", name="Overview", exact=True).wait_for()
    skip, main = page.get_by_role("link", name="Skip to content"), page.locator("#main")
    page.keyboard.press("Tab")
    expect(skip).to_be_focused()
    page.keyboard.press("Enter")
    expect(main).to_be_focused()
    expect(page.get_by_role("heading", name="Overview", exact=True)).to_be_visible()
    skip.focus()
    for name, title in (("Overview", "Overview"), ("Jobs", "Jobs"), ("New job", "New job"), ("Files", "Files")):
        link = page.get_by_role("navigation").get_by_role("link", name=name)
        page.keyboard.press("Tab")
        expect(link).to_be_focused()
        page.keyboard.press("Enter")
        expect(page).to_have_title(f"{title} · SwiftKV")
        expect(main).to_be_focused()  # follows the change of address, after the key
        link.focus()


@pytest.mark.soak("a long scene")
def test_a_server_with_keys_asks_for_one_and_remembers_it(page: Page, tmp_path: Path, empty_database: Path) -> None:
    path = tmp_path / "keys.json"
    token = create_key(path, name="ann", tenant="acme", scopes=frozenset({Scope.ADMIN}))
    settings = Settings(home=tmp_path, api_keys_file=path, _env_file=None)
    with served_control_plane(make_parts(tmp_path, empty_database), settings) as url:
        page.goto(url)
        field = page.get_by_label("API key")
        field.fill("skv_wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("unknown, or was revoked")
        field.fill(token)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_text("No running or queued jobs")).to_be_visible()
        assert page.evaluate("document.cookie") == "", "a script can read the key"
        page.reload()
        expect(page.get_by_text("No running or queued jobs")).to_be_visible()
        page.get_by_role("button", name="Sign out ann").click()
        expect(page.get_by_label("API key")).to_be_visible()
        page.reload()
        expect(page.get_by_label("API key")).to_be_visible()
        page.goto("about:blank")


@pytest.mark.soak("a long scene")
def test_an_empty_control_plane_leads_to_a_first_job(server: Server, page: Page) -> None:
    page.goto(address(server))
    expect(page.get_by_text("No running or queued jobs")).to_be_visible()
    expect(page.get_by_text("No deployments")).to_be_visible()
    expect(page.get_by_text("No failed jobs")).to_be_visible()
    page.get_by_role("link", name="Start one from a recipe").click()
    expect(page.get_by_role("heading", name="New job")).to_be_visible()


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
    server.cluster.nodes = [Node({"CPU": 8.0, "GPU": 4.0}, {"CPU": 1.5, "GPU": 4.0})]
    page.goto(address(server))

    def panel(title: str) -> playwright.Locator:
        return page.locator("section.panel", has=page.get_by_role("heading", name=title))

    work = panel("Running and queued jobs")
    left = server.get(f"/jobs/{job}")["progress"]["seconds_remaining"]
    assert left == 140, "7 steps of 20 s remain"
    shown = f"{units.format_duration(left)} left"  # `watch` prints the same
    expect(work.get_by_role("listitem").filter(has_text="first")).to_contain_text(shown)
    expect(work.get_by_role("listitem").filter(has_text="second")).to_contain_text(re.compile("wait", re.IGNORECASE))
    held = server.get("/quota")["held_by_jobs"]["cpus"]
    assert held >= 6, "two workers with three cores each"
    expect(panel("Cluster usage")).to_contain_text(f"{held:g} by jobs")
    expect(panel("Cluster usage")).to_contain_text("tenant default")
    for kind, share in (("GPUs", "0 of 4"), ("CPUs", "6.5 of 8")):
        expect(panel("Cluster usage").locator(".meter", has_text=f"{kind} in use")).to_contain_text(share)
    server.cluster.away = True
    expect(panel("Cluster usage")).to_contain_text("GPUs and CPUs are unknown: Ray is unavailable")
    served = panel("Deployments")
    expect(served).to_contain_text("/chat")
    expect(served).to_contain_text("TTFT 200 ms")  # after two measurements
    expect(panel("Recent failures")).to_contain_text(f"out_of_memory {OUT_OF_MEMORY}")


@pytest.mark.soak("a long scene")
def test_a_figure_that_nothing_tells_is_unknown(server: Server, page: Page) -> None:
    deploy(server)
    server.client.delete(f"/deployments/{server.get('/deployments')['data'][0]['id']}")
    page.goto(address(server))
    unknown = page.get_by_title("the deployment is deleting").first
    expect(unknown).to_contain_text("unknown")


LIGHT, DARK = "rgb(246, 247, 249)", "rgb(17, 20, 26)"


def theme(page: Page, name: str) -> playwright.Locator:
    return page.get_by_role("group", name="Theme").get_by_role("radio", name=name)


def expect_paper(page: Page, color: str) -> None:
    expect(page.locator("body")).to_have_css("background-color", color)


@pytest.mark.soak("a long scene")
def test_a_theme_is_chosen_by_keyboard_and_kept(server: Server, page: Page) -> None:
    page.emulate_media(color_scheme="light")
    page.goto(address(server))
    expect(theme(page, "System theme")).to_be_checked()
    expect_paper(page, LIGHT)
    theme(page, "System theme").focus()
    page.keyboard.press("ArrowRight")
    expect(theme(page, "Light")).to_be_checked()
    page.keyboard.press("ArrowRight")
    expect(theme(page, "Dark")).to_be_checked()
    expect_paper(page, DARK)
    page.reload()
    expect(theme(page, "Dark")).to_be_checked()
    expect_paper(page, DARK)
    theme(page, "System theme").focus()
    page.keyboard.press("Space")
    expect_paper(page, LIGHT)
    page.emulate_media(color_scheme="dark")
    expect_paper(page, DARK)


@pytest.mark.soak("a long scene")
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


@pytest.mark.soak("a long scene")
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
