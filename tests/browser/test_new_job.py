"""A new job: form and editor are in step, the plan follows what is typed, and faults stand beside their fields."""

from __future__ import annotations

import re

import yaml

from tests.browser.scenes import Page, address, editor, expect, paste
from tests.browsers import playwright
from tests.unit.api.conftest import Server

_LIST_OPENS_MS = 150


def plan(page: Page) -> playwright.Locator:
    return page.get_by_label("Plan", exact=True)


def accept(page: Page, completion: str) -> None:
    """Take the one completion that is offered, no sooner than the editor listens: a list that has just opened does not
    take what was typed for the text."""
    expect(page.locator(".cm-completionLabel")).to_have_text(completion)
    page.wait_for_timeout(_LIST_OPENS_MS)
    page.keyboard.press("Enter")


def test_the_form_and_the_editor_say_the_same(server: Server, page: Page) -> None:
    page.goto(f"{address(server)}/#/submit?recipe=builtin-python-5m")
    expect(page.get_by_label("Steps")).to_have_value("100")
    page.get_by_label("Steps").fill("60")
    expect(editor(page)).to_contain_text("max_steps: 60 # three to four minutes")  # the comment stays
    page.get_by_label("l, layers with KV").fill("5")
    expect(editor(page)).to_contain_text("num_key_value_layers: 5")
    expect(editor(page)).not_to_contain_text("prefill_reduction")  # one stands in for the other
    paste(page, "name: typed\nmodel: {name_or_path: builtin:python-5m}\nresources: {num_workers: 3}\n")
    expect(page.get_by_label("Name")).to_have_value("typed")
    expect(page.get_by_label("Workers")).to_have_value("3")
    page.get_by_label("Exit head").check()
    expect(editor(page)).to_contain_text("early_exit: true")


def test_the_plan_follows_what_is_typed_and_names_what_does_not_fit(server: Server, page: Page) -> None:
    page.goto(f"{address(server)}/#/submit?recipe=builtin-python-5m")
    expect(plan(page).get_by_role("status")).to_have_text("accepted")
    layers = plan(page).locator("dt", has_text="layers skipped").locator("+ dd")
    expect(layers).to_have_text("6 of 12")
    page.get_by_label("l, layers with KV").fill("9")
    expect(layers).to_have_text("3 of 12")
    expect(plan(page)).to_contain_text("memory a worker")
    phases = plan(page).locator("li", has_text="of a node's disk")
    expect(phases).to_have_count(5)
    expect(phases.nth(2)).to_have_text(re.compile(r"train[\d.]+ MiB"))
    page.get_by_label("l, layers with KV").fill("99")
    field = page.get_by_label("l, layers with KV")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(page.locator(f"#{field.get_attribute('aria-describedby')}")).to_contain_text("99")
    expect(plan(page).get_by_role("status")).to_have_text("does not fit")
    expect(page.locator(".cm-lintRange-error")).to_have_text("num_key_value_layers")
    plan(page).get_by_role("button", name="swiftkv.num_key_value_layers").click()
    expect(editor(page)).to_be_focused()


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
    expect(plan(page)).to_contain_text("cannot be read")
    expect(page.get_by_label("Name")).to_be_disabled()


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
