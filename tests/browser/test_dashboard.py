"""The dashboard in a real Chromium: a job from its spec to its report, and the door that keys close."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from swiftkv_platform.api.app import create_app
from swiftkv_platform.keys import Scope, create_key
from swiftkv_platform.orchestration.ports import SubmissionStatus
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.artifacts import write_manifest
from tests.browsers import playwright
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


def test_the_pages_are_reached_by_keyboard_and_named(server: Server, page: Page) -> None:
    page.goto(address(server))
    page.get_by_role("heading", name="Jobs").wait_for()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    for name, title in (("Jobs", "Jobs"), ("New job", "New job"), ("Models", "Models")):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == name
        page.keyboard.press("Enter")
        expect(page).to_have_title(f"{title} · SwiftKV")
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
        page.goto("about:blank")


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
