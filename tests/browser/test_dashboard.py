"""The dashboard in a real Chromium: a job from its spec to its report, and the door that keys close."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from swiftkv_platform.api.app import create_app
from swiftkv_platform.orchestration.ports import DeploymentStatus, SubmissionStatus
from swiftkv_platform.security.keys import Scope, create_key
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.artifacts import write_manifest
from tests.browsers import playwright
from tests.fakes.scripted_server import Answer, Script, serve
from tests.servers import serving
from tests.unit.api.conftest import SPEC, Server, make_parts

expect = playwright.expect
Page = playwright.Page

REPORT = {
    "teacher": {"perplexity": 13.46},
    "rewired": {"perplexity": 35.16, "kl": 0.974, "top1_agreement": 0.49},
    "distilled": {"perplexity": 15.62, "kl": 0.173, "top1_agreement": 0.777},
    "kl_recovered": 0.82,
    "prefill_flops_ratio": 0.508,
    "kv_bytes_ratio": 0.75,
    "ttft_ms": {"dense": 376.0, "swiftkv": 196.0},
    "tokens_trained": 817334,
}


@pytest.fixture
def server(tmp_path: Path, empty_database: Path) -> Iterator[Server]:
    parts = make_parts(tmp_path, empty_database)
    settings = Settings(home=tmp_path, reconcile_interval_s=1e6, _env_file=None)
    with serving(create_app(settings, components=parts)) as url, httpx.Client(base_url=url) as client:
        yield Server(client, parts, settings)


def address(server: Server) -> str:
    return str(server.client.base_url)


def test_a_job_that_cannot_be_read_is_named(server: Server, page: Page) -> None:
    ids = [server.client.post("/jobs", json=SPEC).json()["id"] for _ in range(2)]
    with server.parts.database.writing() as session:
        session.execute(text("UPDATE jobs SET status = 'dancing' WHERE id = :id"), {"id": ids[0]})
    page.goto(address(server))
    expect(page.get_by_role("row")).to_have_count(2)
    expect(page.get_by_text(f"cannot read them: {ids[0]}")).to_be_visible()


def test_a_job_from_its_spec_to_its_report(server: Server, page: Page) -> None:
    page.goto(address(server))
    expect(page.get_by_text("No jobs.")).to_be_visible()

    page.get_by_role("link", name="New job").click()
    spec = page.get_by_label("Spec, YAML or JSON")
    spec.fill(json.dumps({**SPEC, "training": {"batch_sise": 4}}))
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_role("alert")).to_contain_text("training.batch_sise")
    spec.fill("name: from-the-dashboard\nmodel: {name_or_path: org/teacher}\n")
    page.get_by_role("button", name="Check").click()
    expect(page.get_by_role("heading", name="Accepted")).to_be_visible()
    page.get_by_role("button", name="Submit").click()

    expect(page.get_by_role("heading", name="from-the-dashboard")).to_be_visible()
    (job,) = server.get("/jobs")["data"]
    expect(page.locator("main .status")).to_have_text("queued")
    server.tick()
    worker = server.worker(job["id"])
    worker.say("status", status="running")
    worker.step(1, 2, time=1001)
    server.tick()
    expect(page.locator("main .status")).to_have_text("running")
    expect(page.get_by_role("img", name="Loss by step")).to_be_visible()
    worker.step(3, time=1002)
    server.tick()
    expect(page.get_by_role("img", name="Loss by step; last: loss 0.3333")).to_be_visible()

    write_artifact(server, job["id"])
    server.cluster.submissions[f"{job['id']}-1"].log = "trained\n"
    server.cluster.finish(f"{job['id']}-1", SubmissionStatus.SUCCEEDED)
    server.tick()
    expect(page.locator("main .status")).to_have_text("succeeded")
    expect(page.get_by_role("row", name="distilled 15.62 0.173 77.7%")).to_be_visible()
    expect(page.get_by_role("link", name="evaluation.json")).to_be_visible()
    page.get_by_text("Log", exact=True).click()
    expect(page.get_by_label("Log")).to_contain_text("trained")

    page.get_by_role("link", name="Its model").click()
    page.get_by_role("button", name="Deploy").click()
    expect(page.get_by_role("heading", name="Deployments")).to_be_visible()
    for _ in range(2):  # handed to the cluster, then seen there
        server.tick()
    expect(page.locator("main .status")).not_to_have_text("pending")


def write_artifact(server: Server, job_id: str) -> None:
    objects, prefix = server.parts.objects, f"jobs/{job_id}/attempts/1/artifact"
    objects.put_bytes(f"{prefix}/evaluation.json", json.dumps(REPORT).encode())
    size = objects.head(f"{prefix}/evaluation.json").size
    files = {"evaluation.json": {"size": size, "sha256": "0" * 64}}
    write_manifest(objects, prefix, files, kind="artifact", lineage={"teacher": "org/teacher"}, metrics=REPORT)


def test_a_job_is_paused_resumed_and_cancelled(server: Server, page: Page) -> None:
    job = server.submit()
    page.goto(f"{address(server)}/#/jobs/{job['id']}")
    status = page.locator("main .status")
    for button, outcome in (("Pause", "paused"), ("Resume", "queued"), ("Cancel", "cancelled")):
        page.get_by_role("button", name=button).click()
        expect(status).to_have_text(outcome)
    expect(page.get_by_role("button")).to_have_count(0)


TRIALS = [
    {"trial": "l9-g1", "error": None, "prefill_flops_ratio": 0.758, "kv_bytes_ratio": 1.0, "kl": 0.01},
    {"trial": "l6-g1", "error": None, "prefill_flops_ratio": 0.516, "kv_bytes_ratio": 1.0, "kl": 0.104},
    {"trial": "l6-g2", "error": None, "prefill_flops_ratio": 0.508, "kv_bytes_ratio": 0.75, "kl": 0.269},
    {"trial": "l7-g4", "error": None, "prefill_flops_ratio": 0.6, "kv_bytes_ratio": 0.7, "kl": 0.4},
    {"trial": "l9-g4", "error": "three layers are left: g is at most 3"},
]


def sweep(server: Server) -> str:
    """A job that has told what its trials came to; returns its id."""
    job_id: str = server.submit()["id"]
    server.tick()
    measured = [{**row, "perplexity_ratio": 1.1, "within_budget": "kl" in row and row["kl"] < 0.2} for row in TRIALS]
    server.worker(job_id).say("status", status="running")
    server.worker(job_id).say("message", "5 trials have ended", time=1003, sweep=measured, recommended="l6-g1")
    server.tick()
    return job_id


def test_a_sweep_shows_its_frontier_and_its_choice(server: Server, page: Page) -> None:
    page.goto(f"{address(server)}/#/jobs/{sweep(server)}")
    plot = page.get_by_role("img", name="KL over prefill compute")
    expect(plot).to_be_visible()
    name = plot.get_attribute("aria-label")
    assert [trial in name for trial in ("l9-g1", "l6-g1", "l6-g2", "l7-g4")] == [True, True, True, False]
    expect(page.get_by_role("row", name="l6-g1 51.6% 100% 0.104 1.1 yes taken")).to_be_visible()
    expect(page.get_by_role("row", name="l6-g2 50.8% 75% 0.269 1.1 no on the frontier")).to_be_visible()
    expect(page.get_by_role("row", name="l9-g4")).to_contain_text("g is at most 3")


def replica_page(name: str, *, tokens: int, exited: int, answers: int, seconds: float, waiting: int) -> bytes:
    """A replica's metrics in Prometheus' format."""
    values = {
        f'swiftkv:replica_info{{replica="{name}"}}': 1,
        "swiftkv:generation_tokens_total": tokens,
        "swiftkv:tokens_exited_total": exited,
        "swiftkv:time_to_first_token_seconds_count": answers,
        "swiftkv:time_to_first_token_seconds_sum": seconds,
        "swiftkv:num_requests_waiting": waiting,
        "swiftkv:kv_cache_usage_perc": 0.25,
    }
    return "".join(f"{name} {value}\n" for name, value in values.items()).encode()


def test_a_deployment_shows_what_its_replicas_measure(page: Page, tmp_path: Path, empty_database: Path) -> None:
    script = Script()
    first = replica_page("one", tokens=1000, exited=0, answers=10, seconds=5.0, waiting=0)
    later = replica_page("one", tokens=1300, exited=75, answers=13, seconds=5.6, waiting=4)
    script.on("GET", "/metrics", Answer(200, first), Answer(200, later))  # the last one again and again
    parts = make_parts(tmp_path, empty_database)
    with serve(script) as serve_url:
        settings = Settings(home=tmp_path, serve_url=serve_url, reconcile_interval_s=1e6, _env_file=None)
        with serving(create_app(settings, components=parts)) as url, httpx.Client(base_url=url) as client:
            server = Server(client, parts, settings)
            deployment = deploy(server)
            page.goto(f"{url}/#/deployments")
            page.get_by_role("link", name=deployment).click()
            page.get_by_role("heading", name="Now").wait_for()
            tile = page.locator(".tiles .panel")
            expect(tile.filter(has_text="waiting")).to_contain_text("4")
            expect(tile.filter(has_text="time to first token")).to_contain_text("200")
            expect(tile.filter(has_text="exited early")).to_contain_text("25")
            expect(tile.filter(has_text="KV cache")).to_contain_text("25")
            expect(
                page.get_by_role("img", name="Time to first token by second; last: time to first token")
            ).to_be_visible()
            page.goto("about:blank")


def deploy(server: Server) -> str:
    """A deployment with one replica; returns its id."""
    answer = server.client.post("/deployments", json={"model": server.succeed()["distilled_model"]})
    deployment: str = answer.json()["id"]
    server.tick()
    server.serving.become(deployment, DeploymentStatus.RUNNING, replicas=1)
    server.tick()
    return deployment


LOW_CONTRAST = """() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const luminance = (color) => {
    const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = channels(color).map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = getComputedStyle(at).backgroundColor;
      if ((channels(color)[3] ?? 1) > 0.5) return color;
    }
    return "rgb(255, 255, 255)";
  };
  const hasText = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const shown = [...document.querySelectorAll("body *")].filter(
    (element) => element.checkVisibility() && !element.disabled && hasText(element));
  return shown.flatMap((element) => {
    const style = getComputedStyle(element);
    const ink = element instanceof SVGElement ? style.fill : style.color;
    const [light, dark] = [luminance(ink), luminance(background(element))].sort((a, b) => b - a);
    const ratio = (light + 0.05) / (dark + 0.05);
    return ratio < 4.5 ? [`${element.tagName} ${element.textContent.trim().slice(0, 30)}: ${ratio.toFixed(2)}`] : [];
  });
}"""
"""Texts whose contrast is below 4.5 to 1 (WCAG 2.2, criterion 1.4.3)."""
NAMELESS = """() => [...document.querySelectorAll("input, select, textarea, button, a[href]")]
  .filter((element) => !(element.labels?.length || element.ariaLabel || element.textContent.trim()))
  .map((element) => element.outerHTML)"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_can_be_read_and_every_control_has_a_name(server: Server, page: Page, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    deployment = deploy(server)
    done = next(job["id"] for job in server.get("/jobs")["data"])
    pages = {
        "jobs": "Jobs",
        f"jobs/{done}": "test",
        f"jobs/{sweep(server)}": "Sweep",
        "submit": "New job",
        "models": "Models",
        "deployments": "Deployments",
        f"deployments/{deployment}": "Now",
        "playground": "Playground",
    }
    for path, heading in pages.items():
        page.goto(f"{address(server)}/#/{path}")
        page.get_by_role("heading", name=heading, exact=True).wait_for()
        page.get_by_text("Loading…").wait_for(state="hidden")
        assert page.evaluate(LOW_CONTRAST) == [], path
        assert page.evaluate(NAMELESS) == [], path
    page.goto("about:blank")


ANSWER = """data: {"choices": [{"text": " pass", "num_exited_tokens": 1}],
data:  "usage": {"prompt_tokens": 5, "completion_tokens": 1, "prefill_layers_skipped_tokens": 4,
data:  "early_exit_tokens": 1}, "timings": {"ttft_ms": 22, "tpot_ms": null}}

data: [DONE]

"""


def test_the_playground_asks_for_what_was_chosen_and_marks_exits(server: Server, page: Page) -> None:
    deploy(server)
    asked: list[dict[str, object]] = []

    def answer(route: playwright.Route) -> None:
        asked.append(json.loads(route.request.post_data or ""))
        route.fulfill(headers={"content-type": "text/event-stream"}, body=ANSWER)

    page.route("**/generate", answer)
    page.goto(f"{address(server)}/#/playground")
    page.get_by_label("Prompt").fill("def f():")
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_text("22 ms")).to_be_visible()
    expect(page.locator(".exited")).to_have_text(" pass")
    for mode in ("threshold", "lossless"):
        page.get_by_label("Early exit").select_option(mode)
        with page.expect_response("**/generate"):
            page.get_by_role("button", name="Generate").click()
        expect(page.get_by_text("22 ms")).to_be_visible()
    page.get_by_label("as a chat").check()
    with page.expect_response("**/generate"):
        page.get_by_role("button", name="Generate").click()
    expect(page.get_by_text("22 ms")).to_be_visible()
    chosen = {"max_tokens": 64, "temperature": 0, "stream": True, "stream_interval_s": 0}
    plain, chat = {"prompt": "def f():", **chosen}, {"messages": [{"role": "user", "content": "def f():"}], **chosen}
    exits = [{"mode": "threshold", "threshold": 0.95}, {"mode": "lossless"}]
    assert asked == [
        plain,
        *({**plain, "early_exit": early_exit} for early_exit in exits),
        {**chat, "early_exit": exits[1]},
    ]
    page.goto("about:blank")


def test_the_pages_are_reached_by_keyboard_and_named(server: Server, page: Page) -> None:
    page.goto(address(server))
    page.get_by_role("heading", name="Jobs").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    page.get_by_role("link", name="Skip to the content").focus()
    for name, title in (("Jobs", "Jobs"), ("New job", "New job"), ("Models", "Models")):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == name
        page.keyboard.press("Enter")
        expect(page).to_have_title(f"{title} · SwiftKV")
        assert page.evaluate("document.activeElement.id") == "main"
        page.get_by_role("link", name=name).focus()


def test_a_server_with_keys_asks_for_one_and_remembers_it(page: Page, tmp_path: Path, empty_database: Path) -> None:
    path = tmp_path / "keys.json"
    token = create_key(path, name="ann", tenant="acme", scopes=frozenset({Scope.ADMIN}))
    settings = Settings(home=tmp_path, reconcile_interval_s=1e6, api_keys_file=path, _env_file=None)
    with serving(create_app(settings, components=make_parts(tmp_path, empty_database))) as url:
        page.goto(url)
        field = page.get_by_label("API key")
        field.fill("skv_wrong")
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("unknown, or was revoked")
        field.fill(token)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_text("No jobs.")).to_be_visible()
        assert page.evaluate("document.cookie") == "", "no script can read the key"
        page.reload()
        expect(page.get_by_text("No jobs.")).to_be_visible()
        page.get_by_role("button", name="Sign out ann").click()
        expect(page.get_by_label("API key")).to_be_visible()
        page.reload()
        expect(page.get_by_label("API key")).to_be_visible()
        page.goto("about:blank")


def test_the_api_reference_needs_no_other_host(server: Server, page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("console", lambda message: asked.append(message.text) if message.type == "error" else None)
    page.goto(f"{address(server)}/docs")
    page.get_by_text("/jobs/validate", exact=True).click()
    expect(page.get_by_role("button", name="Try it out")).to_be_visible()
    assert [entry for entry in asked if not entry.startswith((address(server), "data:"))] == []


def test_a_stranger_page_can_neither_frame_nor_script(server: Server) -> None:
    for path in ("/", "/dashboard/app.js"):
        headers = server.client.get(path).headers
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    outside = (
        Path("swiftkv_platform/api/dashboard").rglob("*.js"),
        Path("swiftkv_platform/api/dashboard").glob("*.html"),
    )
    for file in (file for files in outside for file in files if "vendor" not in file.parts):
        assert "https://" not in file.read_text(), file
