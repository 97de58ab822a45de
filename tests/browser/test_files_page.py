"""Uploaded files: their page, and the upload while creating a job."""

import json
import re
from typing import Any

import pytest

from tests.browser.scenes import Page, address, editor, expect
from tests.support.browsers import playwright
from tests.unit.control_plane.routes.conftest import Server

CHATS = "".join(
    json.dumps({"messages": [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "Yes."}]}) + "\n"
    for i in range(3)
).encode()
PROMPTS = b'{"prompt": "Why?"}\n'
HOSTILE = "<img src=x onerror=alert(1)>&amp;${7*7}.jsonl"
LARGE = b'{"text": "' + b"x" * 990 + b'"}\n'


def rows(name: str, content: bytes) -> Any:
    return {"name": name, "mimeType": "application/jsonl", "buffer": content}


def files(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/v1/files")["data"]
    return found


def listed(page: Page) -> playwright.Locator:
    return page.get_by_role("region", name="Files").locator("tbody tr")


def answer_next_question(page: Page, *, yes: bool) -> list[str]:
    """Answer the next confirmation; return a list that will receive its text."""
    asked: list[str] = []

    def answer(dialog: playwright.Dialog) -> None:
        asked.append(dialog.message)
        if yes:
            dialog.accept()
        else:
            dialog.dismiss()

    page.once("dialog", answer)
    return asked


def test_files_are_uploaded_described_refused_and_deleted(server: Server, page: Page) -> None:
    page.goto(f"{address(server)}/#/files")
    expect(page.get_by_text("No files yet")).to_be_visible()
    field = page.get_by_label("Upload rows")
    field.set_input_files(rows("broken.jsonl", b'{"text": "x"}\nnonsense\n'))
    expect(page.get_by_role("alert")).to_contain_text("broken.jsonl, line 2, column 1 is not JSON")
    expect(field).to_have_attribute("aria-invalid", "true")
    assert "upload-error" in (field.get_attribute("aria-describedby") or "").split()
    assert files(server) == []

    field.set_input_files(rows(HOSTILE, CHATS))
    row = listed(page)
    expect(row.get_by_role("link", name=HOSTILE, exact=True)).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_role("status")).to_have_text(f"Uploaded {HOSTILE}: 3 rows, messages")
    assert page.locator("img").count() == 0, "a file's name was rendered as HTML"
    (file,) = files(server)
    expect(row).to_contain_text(file["id"])
    for name, value in (("Rows", "3"), ("Format", "messages"), ("Purpose", "fine-tune"), ("Size", f"{len(CHATS)} B")):
        expect(row.locator(f'[data-name="{name}"]')).to_have_text(value)
    with page.expect_download() as download:
        row.get_by_role("link", name=HOSTILE, exact=True).click()
    assert download.value.path().read_bytes() == CHATS

    job = server.submit(name="uses-it", data={"sources": [{"name_or_path": file["id"]}]})
    page.reload()
    expect(row.get_by_role("link", name="uses-it")).to_have_attribute("href", f"#/jobs/{job['id']}")
    delete = row.get_by_role("button", name="Delete")
    asked = answer_next_question(page, yes=False)
    delete.click()
    assert HOSTILE in asked[0]
    answer_next_question(page, yes=True)
    delete.click()
    expect(page.get_by_role("alert")).to_contain_text(f"is used by {job['id']}")
    assert files(server) == [file]
    server.client.post(f"/jobs/{job['id']}/cancel").raise_for_status()
    answer_next_question(page, yes=True)
    delete.click()
    expect(page.get_by_text("No files yet")).to_be_visible()
    assert files(server) == []


@pytest.mark.soak("a long scene")
def test_an_upload_tells_how_far_it_is_and_can_be_stopped(server: Server, page: Page) -> None:
    page.goto(f"{address(server)}/#/files")
    network = page.context.new_cdp_session(page)
    slow = {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": 400_000}
    network.send("Network.emulateNetworkConditions", slow)
    page.get_by_label("Upload rows").set_input_files(rows("large.jsonl", LARGE * 8000))
    progress = page.get_by_role("progressbar", name="Upload progress")
    page.wait_for_function("bar => bar.value > 0 && bar.value < 1", arg=progress.element_handle())
    expect(page.get_by_label("Upload rows")).to_be_disabled()
    page.get_by_role("button", name="Stop").click()
    expect(progress).to_have_count(0)
    expect(page.get_by_label("Upload rows")).to_be_enabled()
    expect(page.get_by_role("alert")).to_have_count(0)
    assert files(server) == []


@pytest.mark.soak("a long scene")
def test_a_new_job_trains_on_what_is_dropped_into_it(server: Server, page: Page) -> None:
    page.goto(f"{address(server)}/#/submit?recipe=builtin-python-5m-teacher-written")
    page.get_by_label("Name").fill("on-mine")
    upload, plan = page.get_by_label("or upload rows"), page.get_by_label("Plan", exact=True)
    upload.set_input_files(rows("broken.jsonl", b"{}\n"))
    error = page.locator(f"#{upload.get_attribute('id')}-error")
    expect(error).to_contain_text("broken.jsonl, line 1")
    upload.set_input_files(rows("prompts.jsonl", PROMPTS))
    expect(page.get_by_label("Data", exact=True)).to_have_value(re.compile("^file-"))
    (prompts,) = files(server)
    expect(error).to_have_count(0)
    expect(editor(page)).to_contain_text("complete: {}")  # no other source completes the prompts
    expect(plan.get_by_role("status")).to_have_text("valid")

    drop(page, ".drop", "chats.jsonl", CHATS)
    expect(page.get_by_label("Data", exact=True)).not_to_have_value(prompts["id"])
    chats = files(server)[0]
    assert chats["filename"] == "chats.jsonl"
    expect(page.get_by_label("Data", exact=True)).to_have_value(chats["id"])
    expect(editor(page)).to_contain_text(f"name_or_path: {chats['id']}")
    expect(page.locator(".form > fieldset > .quiet").first).to_have_text("chats.jsonl: 3 rows, messages")
    expect(plan.get_by_role("status")).to_have_text("valid")
    page.get_by_role("button", name="Submit job").click()
    expect(page.get_by_role("heading", name="on-mine")).to_be_visible()
    spec = server.get("/jobs")["data"][0]["spec"]
    first, second = spec["data"]["sources"]
    assert (first["name_or_path"], first["complete"], first["sample_count"]) == (chats["id"], None, None)
    assert (second["name_or_path"], second["sample_count"]) == ("builtin:python-stdlib", 200), "the other source stays"

    page.goto(f"{address(server)}/#/files")
    listed(page).filter(has_text="prompts.jsonl").get_by_role("link", name="Train on").click()
    expect(page.get_by_label("Data", exact=True)).to_have_value(prompts["id"])
    expect(editor(page)).to_contain_text("complete: {}")


def drop(page: Page, place: str, name: str, content: bytes) -> None:
    """Drop a file on the element `place` of the page."""
    page.locator(place).evaluate(
        """(element, [name, content]) => {
          const dataTransfer = new DataTransfer();
          dataTransfer.items.add(new File([content], name));
          for (const kind of ["dragover", "drop"]) {
            element.dispatchEvent(new DragEvent(kind, {dataTransfer, bubbles: true, cancelable: true}));
          }
        }""",
        [name, content.decode()],
    )
