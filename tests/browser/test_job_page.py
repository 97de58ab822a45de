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
    job = trained(server, swiftkv={"deep_tail": 16})
    page.goto(f"{address(server)}/#/jobs/{job['id']}")
    expect(page.locator("main")).to_contain_text("The last 16 prompt tokens run all layers.")
    expect(page.locator(".worst")).to_contain_text("Worst of 2 quality gatesKL to the teacher: 0.173 limit 0.2passed")
    phases = page.locator(".timeline li")
    expect(phases).to_have_count(4)
    for phase, status in zip(phases.all(), ("queued", "starting", "running", "evaluating"), strict=True):
        expect(phase).to_contain_text(status)
    expect(phases.nth(2)).to_contain_text("2 checkpoints")
    page.get_by_role("link", name="Checkpoints").click()
    checkpoints = page.get_by_role("region", name="Checkpoints")
    expect(checkpoints.get_by_role("row")).to_have_count(3)
    expect(checkpoints.get_by_role("row").filter(has_text="ckpt_00000030")).to_contain_text("lowest")
    page.get_by_role("link", name="Metrics").click()
    expect(
        page.get_by_role("img", name="Held-out KL by step; last: held-out KL 0.2, selected checkpoint at step 30")
    ).to_be_visible()


def test_a_job_that_failed_leads_with_cause_and_cure_and_promises_no_curves(server: Server, page: Page) -> None:
    page.goto(f"{address(server)}/#/jobs/{failed(server)}")
    expect(page.locator("main .problem").first).to_contain_text(f"out_of_memory: {OUT_OF_MEMORY}What to do:")
    page.get_by_role("link", name="Metrics").click()
    expect(page.get_by_text("The job ended before its first step.")).to_be_visible()


@pytest.mark.soak("a long scene")
def test_a_chart_tells_its_last_values_until_the_pointer_asks_for_others(server: Server, page: Page) -> None:
    job = trained(server)
    page.goto(f"{address(server)}/#/jobs/{job['id']}?tab=metrics")
    legend = page.get_by_role("img", name="Loss by step").locator(".u-legend .u-value")
    expect(legend).to_have_text(["30", "0.462"])
    page.locator(".u-over").first.hover(position={"x": 0, "y": 20})
    expect(legend).to_have_text(["1", "1.8"])
    page.locator("h1").hover()
    expect(legend).to_have_text(["30", "0.462"])


def test_charts_share_the_pointer_and_are_smoothed(server: Server, page: Page) -> None:
    job = trained(server)
    page.goto(f"{address(server)}/#/jobs/{job['id']}?tab=metrics")
    loss, kl = (
        page.get_by_role("img", name=f"{name} by step").locator(".u-legend .u-value")
        for name in ("Loss", "Held-out KL")
    )
    expect(loss).to_have_text(["30", "0.462"])
    expect(kl).to_have_text(["30", "0.2"])
    page.locator(".u-over").first.hover()
    expect(loss.first).to_have_text(re.compile("1[56]"))  # in the middle
    expect(kl).to_have_text(["15", "0.4"])  # the nearest measurement
    page.locator("h1").hover()
    page.get_by_label("Smoothing").fill("0.5")
    expect(kl).to_have_text(["30", "0.267"])  # (0.5 * 0.4 + 0.2) / 1.5
    smooth = "async (weight) => (await import('/dashboard/parts.js')).smooth([4, null, 1, 1], weight)"
    assert page.evaluate(smooth, 0) == [4, None, 1, 1]
    assert page.evaluate(smooth, 0.5) == pytest.approx([4, None, 2, 10 / 7])


def test_a_job_is_shown_in_tabs_that_its_address_names(server: Server, page: Page) -> None:
    job = trained(server)
    for size in ({"width": 1280, "height": 900}, {"width": 390, "height": 844}):
        page.set_viewport_size(size)  # type: ignore[arg-type]
        page.goto(f"{address(server)}/#/jobs/{job['id']}")
        tabs = page.get_by_role("navigation", name="Tabs")
        expect(tabs.get_by_role("link", name="Summary")).to_have_attribute("aria-current", "page")
        with page.expect_response("**/logs*"):
            tabs.get_by_role("link", name="Log").click()
        log = page.get_by_role("region", name="Log")
        expect(log).to_be_in_viewport()
        expect(page.get_by_role("heading", name="Phases")).to_have_count(0)
    page.reload()
    expect(log).to_contain_text("worker ready")
    page.go_back()
    expect(page.get_by_role("heading", name="Phases")).to_be_visible()


@pytest.mark.parametrize("width", [1280, 390])
def test_a_spec_that_is_invalid_is_not_submitted(server: Server, page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto(f"{address(server)}/#/submit")
    submit, steps = page.get_by_role("button", name="Submit job"), page.get_by_label("Steps")
    expect(submit).to_be_enabled()
    steps.fill("-3")
    expect(submit).to_be_disabled()
    error = page.locator(f"#{steps.get_attribute('aria-describedby')}")
    expect(error).to_contain_text("is accepted")  # the API's message
    assert not error.evaluate("element => element.scrollWidth > element.clientWidth"), "it overlaps the next field"
    field, after = error.bounding_box(), page.get_by_label("Learning rate").bounding_box()
    assert field is not None
    assert after is not None
    assert field["y"] + field["height"] <= after["y"], "they overlap"
    editor(page).focus()
    page.keyboard.press("Control+Enter")
    page.wait_for_timeout(500)
    assert server.get("/jobs")["data"] == []
    steps.fill("3")
    submit.click()
    expect(page.locator(".toasts")).to_contain_text("Submitted")
    assert len(server.get("/jobs")["data"]) == 1


def test_a_spec_is_submitted_while_its_validation_is_unavailable(server: Server, page: Page) -> None:
    page.route("**/jobs/validate", lambda route: route.fulfill(status=503, json={"detail": "busy", "status": 503}))
    page.goto(f"{address(server)}/#/submit")
    expect(page.get_by_label("Plan", exact=True)).to_contain_text("busy")
    page.get_by_label("Steps").fill("-3")
    expect(page.get_by_role("button", name="Submit job")).to_be_disabled()
    page.get_by_label("Steps").fill("3")
    page.get_by_role("button", name="Submit job").click()
    expect(page.get_by_role("heading", name="Phases")).to_be_visible()


@pytest.mark.soak("a long scene")
def test_the_log_and_the_events_are_searched(server: Server, page: Page) -> None:
    job = trained(server)
    page.goto(f"{address(server)}/#/jobs/{job['id']}?tab=log")
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
    expect(page.get_by_role("row").filter(has_text="first").locator('[data-name="KL"]')).to_have_text("0.173")
    page.get_by_role("link", name="Compare 2 runs").click()
    run = page.get_by_role("region", name="Runs").get_by_role("row").filter(has_text="first")
    for column, value in (("KL, nats", "0.173"), ("Time to first token", "52.13%"), ("Trained tokens/s", "2,530")):
        expect(run.locator(f'[data-name="{column}"]')).to_have_text(value)
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
    page.goto(f"{address(server)}/#/jobs/{job_id}?tab=checkpoints")
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
    expect(row.get_by_role("link", name="View model")).to_have_attribute("href", f"#/models/{model}")
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
    expect(row.get_by_role("status")).to_contain_text("publishes the model.")
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
    page.get_by_label("l, layers that prompts run").fill("5")
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
    page.get_by_label("l, layers that prompts run").fill("9")
    expect(layers).to_have_text("3 of 12")
    expect(plan(page)).to_contain_text("memory per worker")
    page.get_by_label("l, layers that prompts run").fill("99")
    field = page.get_by_label("l, layers that prompts run")
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
