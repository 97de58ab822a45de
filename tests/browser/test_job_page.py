"""A new job, whose form and editor stay in step, and a job's page: phases, log, checkpoints, worst measure."""

import re
import subprocess
import sys

import pytest
import yaml

from tests.browser.scenes import (
    OUT_OF_MEMORY,
    PUBLISH_TARGET,
    Page,
    address,
    editor,
    evaluated,
    expect,
    failed,
    paste,
    trained,
)
from tests.support.browsers import playwright
from tests.unit.control_plane.routes.conftest import Server


def seconds(text: str, before: str, after: str) -> float:
    """Return the duration between two words, such as `2 min 20 s`."""
    (found,) = re.findall(rf"{before}((?:\d+ (?:d|h|min|s) ?)+){after}", text)
    units = {"d": 86400, "h": 3600, "min": 60, "s": 1}
    return float(sum(int(number) * units[unit] for number, unit in re.findall(r"(\d+) (\w+)", found)))


@pytest.mark.soak("a long scene")
def test_page_and_watch_tell_the_time_left_that_the_api_tells(server: Server, page: Page) -> None:
    """Events from before the page opened are replayed at once, and must not count as speed."""
    job = server.submit(name="timed")["id"]
    worker = server.run(job)
    worker.say("placement", phase="train of timed", state="placed")
    worker.say("progress", phase="calibrate", part="layers", done=3, total=12, eta_s=90.0)
    server.tick()
    page.goto(f"{address(server)}/#/jobs/{job}")
    expect(page.locator("main")).to_contain_text("Calibrating the student: layers 3 of 12, 1 min 30 s left")
    for step in range(1, 41):
        worker.step(step, time=2000.0 + 31.0 * step, total=400)
    server.tick()
    command = [sys.executable, "-m", "swiftkv_platform.cli", "jobs", "watch", job, "--url", address(server)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        told = next((line for line in watch.stdout if "step 40/400" in line), "")
        watch.kill()
    answer = server.get(f"/jobs/{job}")
    left = answer["progress"]["seconds_remaining"]
    assert (answer["phase"], left) == ("train", 360 * 31)
    assert seconds(told, "ETA ", "") == pytest.approx(left, rel=0.05)
    expect(page.locator("main")).to_contain_text("training ends about")
    assert seconds(page.locator("main").inner_text(), "", "left, training") == pytest.approx(left, rel=0.05)
    page.goto(f"{address(server)}/#/")
    expect(page.locator("main")).to_contain_text("training ends about")
    assert seconds(page.locator("main").inner_text(), "", "left, training") == pytest.approx(left, rel=0.05)
    cli = [sys.executable, "-m", "swiftkv_platform.cli", "jobs", "get", job, "--url", address(server)]
    shown = subprocess.run(cli, capture_output=True, text=True, check=True).stdout
    assert seconds(shown, "tokens, ", "left") == pytest.approx(left, rel=0.05)


def test_a_trained_job_leads_with_its_worst_measure(server: Server, page: Page) -> None:
    job = trained(server)
    page.goto(f"{address(server)}/#/jobs/{job['id']}")
    expect(page.locator(".worst")).to_contain_text("Worst of 2 quality gatesKL to the teacher: 0.173 limit 0.2passed")
    phases = page.locator(".timeline li")
    expect(phases).to_have_count(4)
    for phase, status in zip(phases.all(), ("queued", "starting", "running", "evaluating"), strict=True):
        expect(phase).to_contain_text(status)
    expect(phases.nth(2)).to_contain_text("2 checkpoints")
    checkpoints = page.get_by_role("region", name="Checkpoints")
    expect(checkpoints.get_by_role("row")).to_have_count(3)
    expect(checkpoints.get_by_role("row").filter(has_text="ckpt_00000030")).to_contain_text("lowest")
    expect(
        page.get_by_role("img", name="Held-out KL by step; last: held-out KL 0.2, selected checkpoint at step 30")
    ).to_be_visible()


def test_a_job_that_failed_leads_with_cause_and_cure_and_promises_no_curves(server: Server, page: Page) -> None:
    page.goto(f"{address(server)}/#/jobs/{failed(server)}")
    expect(page.locator("main .problem").first).to_contain_text(f"out_of_memory: {OUT_OF_MEMORY}What to do:")
    expect(page.get_by_text("The job ended before its first step.")).to_be_visible()


@pytest.mark.soak("a long scene")
def test_a_chart_tells_its_last_values_until_the_pointer_asks_for_others(server: Server, page: Page) -> None:
    job = trained(server)
    page.goto(f"{address(server)}/#/jobs/{job['id']}")
    legend = page.get_by_role("img", name="Loss by step").locator(".u-legend .u-value")
    expect(legend).to_have_text(["30", "0.462"])
    page.locator(".u-over").first.hover(position={"x": 0, "y": 20})
    expect(legend).to_have_text(["1", "1.8"])
    page.locator("h1").hover()
    expect(legend).to_have_text(["30", "0.462"])


@pytest.mark.soak("a long scene")
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
    page.get_by_label("errors and warnings only").check()
    expect(log).to_have_text("WARNING the store is slow")
    page.get_by_label("Search events").fill("step 15")
    expect(page.get_by_role("region", name="Events, newest first").get_by_role("row")).to_have_count(2)


@pytest.mark.soak("a long scene")
def test_runs_are_laid_over_each_other(server: Server, page: Page) -> None:
    trained(server, "first")
    trained(server, "second")
    page.goto(f"{address(server)}/#/jobs")
    page.get_by_label("Compare first").check()
    page.get_by_label("Compare second").check()
    page.get_by_role("link", name="Compare 2 runs").click()
    expect(page.get_by_role("img", name="Loss by step; last: first 0.4615, second 0.4615")).to_be_visible()
    chosen = "selected checkpoint of first at step 30, selected checkpoint of second at step 30"
    expect(page.get_by_role("img", name=f"Held-out KL by step; last: first 0.2, second 0.2, {chosen}")).to_be_visible()


@pytest.mark.soak("a long scene")
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
    expect(page.get_by_text("No matches")).to_be_visible()


def checkpoint(server: Server, page: Page, job_id: str, step: int) -> playwright.Locator:
    """Return the row of a checkpoint on its job's page."""
    page.goto(f"{address(server)}/#/jobs/{job_id}")
    return page.get_by_role("region", name="Checkpoints").get_by_role("row").filter(has_text=f"ckpt_{step:08d}")


@pytest.mark.soak("a long scene")
def test_a_checkpoint_is_evaluated_and_deployed(server: Server, page: Page) -> None:
    job = trained(server)
    row = checkpoint(server, page, job["id"], 15)
    row.get_by_role("button", name="Evaluate").click()
    expect(row.get_by_role("status")).to_have_text("Evaluation queued")
    (evaluation,) = server.get("/jobs", status="queued")["data"]
    training = evaluation["spec"]["training"]
    assert (training["from"], training["max_steps"]) == (f"{job['id']}:ckpt_00000015_0001", 0)
    model = evaluated(server)
    expect(row.get_by_role("link", name="View model")).to_have_attribute("href", f"#/models?model={model}")
    expect(row.locator('[data-name="Evaluated KL"]')).to_have_text("0.173")
    expect(row.get_by_role("button", name="Evaluate")).to_have_count(0)
    form = row.get_by_role("form", name="Deploy")
    for answer in ("/step-15 is starting.", "route_prefix"):  # the second time, the route is taken
        row.get_by_role("button", name="Deploy ckpt_00000015_0001").click()
        form.get_by_role("button", name="Deploy").click()
        expect(row).to_contain_text(answer)
    (deployment,) = server.get("/deployments")["data"]
    assert (deployment["model"], deployment["route_prefix"]) == (model, "/step-15")


@pytest.mark.soak("a long scene")
def test_a_checkpoint_is_evaluated_before_it_is_published(server: Server, page: Page) -> None:
    row = checkpoint(server, page, trained(server)["id"], 30)
    form = row.get_by_role("form", name="Publish")
    row.get_by_role("button", name="Publish ckpt_00000030_0001").click()
    form.get_by_role("textbox", name="To").fill("s3://elsewhere/half")
    form.get_by_role("button", name="Evaluate and publish").click()
    expect(row.get_by_role("status")).to_contain_text("Will be published after its evaluation")
    model = evaluated(server)
    expect(row.get_by_role("alert")).to_contain_text("may not publish")
    row.get_by_role("button", name="Publish ckpt_00000030_0001").click()
    form.get_by_role("textbox", name="To").fill(f"{PUBLISH_TARGET}/half")
    form.get_by_label("private").uncheck()
    form.get_by_role("button", name="Publish").click()
    expect(row.get_by_role("status")).to_contain_text("publishes it.")
    (copy,) = server.get("/jobs", status="queued")["data"]
    assert copy["spec"]["publish"] == {"adapter": False, "to": f"{PUBLISH_TARGET}/half", "private": False}
    assert copy["spec"]["training"]["from"] == model


@pytest.mark.soak("a long scene")
def test_a_job_continues_from_a_checkpoint(server: Server, page: Page) -> None:
    job = trained(server, training={"max_steps": 30})
    checkpoint(server, page, job["id"], 15).get_by_role("link", name="Continue from ckpt").click()
    expect(page.get_by_label("Steps")).to_have_value("30")
    lines = page.locator(".cm-line").all_inner_texts()
    training = yaml.safe_load("\n".join(lines))["training"]
    assert training == {"max_steps": 30, "from": f"{job['id']}:ckpt_00000015_0001"}
    page.get_by_label("Name").fill("goes-on")
    page.get_by_role("button", name="Submit job").click()
    expect(page.get_by_role("heading", name="goes-on")).to_be_visible()
    assert server.get("/jobs")["data"][0]["spec"]["training"]["from"] == training["from"]


@pytest.mark.soak("a long scene")
def test_a_checkpoint_of_a_job_that_runs_is_refused_beside_its_button(server: Server, page: Page) -> None:
    job_id = server.submit()["id"]
    server.tick()
    worker = server.worker(job_id)
    worker.say("status", status="running")
    worker.say("checkpoint", "step 2 saved", step=2, key=worker.checkpoint(2), size=7, sha256="0" * 64)
    server.tick()
    row = checkpoint(server, page, job_id, 2)
    row.get_by_role("button", name="Evaluate").click()
    expect(row.get_by_role("alert")).to_contain_text("pause it, or wait for its end")
    assert len(server.get("/jobs")["data"]) == 1


_LIST_OPENS_MS = 150


def plan(page: Page) -> playwright.Locator:
    return page.get_by_label("Plan", exact=True)


def accept(page: Page, completion: str) -> None:
    """Accept the only completion offered, once the editor listens: a list that has just opened ignores keys."""
    expect(page.locator(".cm-completionLabel")).to_have_text(completion)
    page.wait_for_timeout(_LIST_OPENS_MS)
    page.keyboard.press("Enter")


@pytest.mark.soak("a long scene")
def test_the_form_and_the_editor_say_the_same(server: Server, page: Page) -> None:
    page.goto(f"{address(server)}/#/submit?recipe=builtin-python-5m")
    expect(page.get_by_label("Steps")).to_have_value("100")
    page.get_by_label("Steps").fill("60")
    expect(editor(page)).to_contain_text("max_steps: 60 # minutes on two cores")  # the comment stays
    page.get_by_label("l, layers with own KV").fill("5")
    expect(editor(page)).to_contain_text("num_key_value_layers: 5")
    expect(editor(page)).not_to_contain_text("prefill_reduction")  # l replaces it
    paste(page, "name: typed\nmodel: {name_or_path: builtin:python-5m}\nresources: {num_workers: 3}\n")
    expect(page.get_by_label("Name")).to_have_value("typed")
    expect(page.get_by_label("Workers")).to_have_value("3")
    page.get_by_label("Early-exit head").check()
    expect(editor(page)).to_contain_text("early_exit: true")


@pytest.mark.soak("a long scene")
def test_the_plan_follows_what_is_typed_and_names_what_does_not_fit(server: Server, page: Page) -> None:
    page.goto(f"{address(server)}/#/submit?recipe=builtin-python-5m")
    expect(plan(page).get_by_role("status")).to_have_text("valid")
    layers = plan(page).locator("dt", has_text="layers skipped").locator("+ dd")
    expect(layers).to_have_text("6 of 12")
    page.get_by_label("l, layers with own KV").fill("9")
    expect(layers).to_have_text("3 of 12")
    expect(plan(page)).to_contain_text("memory per worker")
    page.get_by_label("l, layers with own KV").fill("99")
    field = page.get_by_label("l, layers with own KV")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.locator(f"#{field.get_attribute('aria-describedby')}")).to_contain_text("99")
    expect(plan(page).get_by_role("status")).to_have_text("invalid")
    expect(page.locator(".cm-lintRange-error")).to_have_text("num_key_value_layers")
    plan(page).get_by_role("button", name="swiftkv.num_key_value_layers").click()
    expect(editor(page)).to_be_focused()


@pytest.mark.soak("a long scene")
def test_the_editor_completes_and_checks_against_the_schema(server: Server, page: Page) -> None:
    page.goto(f"{address(server)}/#/submit")
    paste(page, "name: a\nmodel: {name_or_path: org/teacher}\nswiftkv:\n  ")
    page.keyboard.press("Control+End")
    editor(page).press_sequentially("initi")
    accept(page, "initialization")
    editor(page).press_sequentially("co")
    accept(page, "copied")
    expect(editor(page)).to_contain_text("initialization: copied")
    paste(page, "name: a\nmodel: {name_or_path: org/teacher, dtyp: x}\n")
    expect(plan(page)).to_contain_text("model.dtyp")
    paste(page, "name: [\n")
    expect(plan(page)).to_contain_text("cannot be parsed")
    expect(page.get_by_label("Name")).to_be_disabled()


@pytest.mark.soak("a long scene")
def test_a_clone_has_what_was_chosen_and_no_defaults(server: Server, page: Page) -> None:
    job = server.submit(name="origin", training={"max_steps": 7})
    page.goto(f"{address(server)}/#/jobs/{job['id']}")
    page.get_by_role("link", name="Clone").click()
    expect(page.get_by_label("Steps")).to_have_value("7")
    lines = page.locator(".cm-line").all_inner_texts()
    assert yaml.safe_load("\n".join(lines)) == {
        "name": "origin",
        "model": {"name_or_path": "org/teacher"},
        "training": {"max_steps": 7},
    }
    page.get_by_label("Name").fill("copy")
    page.get_by_role("button", name="Submit job").click()
    expect(page.get_by_role("heading", name="copy")).to_be_visible()
    assert [each["name"] for each in server.get("/jobs")["data"]] == ["copy", "origin"]
