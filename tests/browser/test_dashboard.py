"""The dashboard in a real Chromium: a job from spec to report, the landing page, the theme, and signing in with
keys."""

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from sqlalchemy import text

from swiftkv_platform.control_plane.ray import Node
from swiftkv_platform.errors import ClusterUnavailableError
from swiftkv_platform.local import formats as units
from swiftkv_platform.security.keys import Scope, create_key
from swiftkv_platform.settings import Settings
from tests.browser.scenes import (
    OUT_OF_MEMORY,
    Page,
    address,
    control_plane,
    deploy,
    expect,
    failed,
    forward,
    replica_page,
    sweep,
    trained,
)
from tests.support.browsers import playwright
from tests.support.fakes.scripted_server import Answer, Script
from tests.unit.control_plane.routes.conftest import SPEC, Server, make_parts, served_control_plane


@pytest.mark.soak("a long scene")
def test_a_job_that_cannot_be_read_is_named(server: Server, page: Page) -> None:
    ids = [server.client.post("/jobs", json=SPEC).json()["id"] for _ in range(2)]
    with server.parts.database.begin_write() as session:
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
        expect(page.locator(".toasts")).to_contain_text(f"{button} requested.")
    expect(page.locator("main .head").get_by_role("button")).to_have_count(0)
    page.get_by_role("navigation", name="Breadcrumb").get_by_role("link", name="Jobs").click()
    expect(page.get_by_role("heading", name="Jobs", exact=True)).to_be_visible()


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


def test_every_page_of_the_menu_is_in_view_on_a_phone(server: Server, page: Page) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(address(server))
    links = page.get_by_role("navigation", name="Pages").get_by_role("link")
    expect(links).to_have_count(8)
    for link in links.all():
        expect(link).to_be_in_viewport(ratio=1)


@pytest.mark.parametrize("kind", ["job", "model", "deployment"])
def test_an_unknown_object_is_asked_for_once(server: Server, page: Page, kind: str) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "_nope" in request.url else None)
    page.goto(f"{address(server)}/#/{kind}s/{kind}_nope?tab=log")
    expect(page.get_by_role("heading", name=f"No such {kind}")).to_be_visible()
    page.wait_for_timeout(2500)  # longer than pages wait until they ask again
    assert [urlsplit(url).path for url in asked] == [f"/{kind}s/{kind}_nope"]
    page.get_by_role("link", name=f"Show all {kind}s").click()
    expect(page.get_by_role("heading", name=f"{kind}s")).to_be_visible()


def test_an_object_that_is_deleted_meanwhile_is_gone(server: Server, page: Page) -> None:
    deployment = deploy(server)
    page.goto(f"{address(server)}/#/deployments/{deployment}")
    expect(page.get_by_role("heading", name="Current load")).to_be_visible()
    server.parts.deployments.remove_deployment(deployment)
    expect(page.get_by_role("heading", name="No such deployment")).to_be_visible()


@pytest.mark.parametrize("has_clipboard", [True, False])
def test_ids_are_copied(server: Server, page: Page, has_clipboard: bool) -> None:
    """Browsers have no `navigator.clipboard` on pages of other machines without HTTPS."""
    job = server.submit()["id"]
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    if not has_clipboard:
        page.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.goto(f"{address(server)}/#/jobs")
    page.get_by_role("button", name=f"Copy {job}").click()
    expect(page.locator(".toasts")).to_have_text(f"Copied {job}.")
    search = page.get_by_label("Search jobs")
    search.focus()
    page.keyboard.press("Control+V")
    expect(search).to_have_value(job)


def test_a_deployment_says_why_it_has_no_rates(page: Page, tmp_path: Path, empty_database: Path) -> None:
    idle = Script()
    idle.on(
        "GET", "/chat/metrics", Answer(200, replica_page("one", tokens=0, exited=0, answers=0, seconds=0, waiting=0))
    )
    idle.on("GET", "/lost/metrics", Answer(404, b""))
    with control_plane(tmp_path, empty_database, replicas=idle) as server:
        deploy(server, route_prefix="/lost")
        page.goto(f"{address(server)}/#/overview")
        lost = page.get_by_text("unknown: the replicas report no metrics")
        expect(lost).to_have_attribute("title", re.compile("/lost/metrics answers 404 Not Found$"))
        deployment = deploy(server, route_prefix="/chat")
        for path in ("overview", "deployments", f"deployments/{deployment}"):
            page.goto(f"{address(server)}/#/{path}")
            expect(page.locator("main")).to_contain_text("no requests yet")
        page.goto(f"{address(server)}/#/overview")
        server.client.delete(f"/deployments/{deployment}")
        expect(page.locator("main")).to_contain_text("not serving: deleting")
        page.goto("about:blank")


def test_a_state_that_is_no_longer_reported_is_unknown(server: Server, page: Page) -> None:
    model = trained(server)["distilled_model"]
    deployment = deploy(server, model, route_prefix="/chat")
    server.serving.away = True
    for seconds in (0, 20):
        forward(server, seconds)
        with pytest.raises(ClusterUnavailableError):
            server.tick()
    assert server.get(f"/deployments/{deployment}")["unknown_since"] is not None
    for path in ("overview", "deployments", f"deployments/{deployment}", f"models/{model}"):
        page.goto(f"{address(server)}/#/{path}")
        expect(page.locator("main .status", has_text="unknown since")).to_be_visible()
        expect(page.locator("main .status.running")).to_have_count(0)
        if not path.startswith("models"):
            expect(page.locator("main")).to_contain_text("last known: 1 running")
    page.goto(f"{address(server)}/#/overview")
    expect(page.locator(".tile", has_text="Running deployments")).to_contain_text("0")
    server.serving.away = False
    server.tick()
    expect(page.locator("main .status.running")).to_be_visible()


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
    page.goto(f"{address(server)}/#/jobs/{job['id']}?tab=metrics")
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
