"""Models, deployments and the playground."""

import json

import pytest

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.contract.row_results import ModeResult, RowResult, dump_rows
from tests.browser.scenes import REPORT, Page, address, deploy, expect, trained
from tests.browser.test_accessibility import AXE, FOUND, NAMELESS, TOO_WIDE, WIDTHS
from tests.support.browsers import playwright
from tests.unit.control_plane.routes.conftest import Server


def test_a_deployment_shows_what_its_replicas_measure(server: Server, page: Page) -> None:
    deployment = deploy(server, route_prefix="/chat")
    page.goto(f"{address(server)}/#/deployments")
    page.get_by_role("link", name="at /chat").click()
    page.get_by_role("heading", name="Current load").wait_for()
    tile = page.locator(".tile")
    expect(tile.filter(has_text="time to first token")).to_contain_text("200")
    expect(tile.filter(has_text="exited early")).to_contain_text("21.5")
    expect(tile.filter(has_text="KV cache")).to_contain_text("25")
    expect(page.get_by_role("img", name="Time to first token by second; last: time to first token")).to_be_visible()
    page.get_by_text("Code examples").click()
    url = server.get(f"/deployments/{deployment}")["url"].rstrip("/")
    for language in ("curl", "Python", "Node"):
        expect(page.get_by_role("region", name=language)).to_contain_text(f"{url}/v1")


@pytest.mark.soak("a long scene")
def test_what_is_away_is_told_and_an_exit_that_is_not_there_is_not_offered(server: Server, page: Page) -> None:
    deploy(server)
    models = server.get("/models")
    models["data"][0]["lineage"]["spec"] = server.get("/jobs")["data"][0]["spec"]
    page.route("**/models?*", lambda route: route.fulfill(json=models))
    page.goto(f"{address(server)}/#/playground")
    expect(page.get_by_label("Temperature")).to_be_visible()
    expect(page.get_by_label("Early exit")).to_have_count(0)
    expect(page.get_by_role("status")).to_have_count(0)
    problem = {"status": 503, "code": "not_ready", "detail": "", "errors": [{"field": "ray", "message": "refused"}]}
    page.route("**/readyz", lambda route: route.fulfill(status=503, body=json.dumps(problem)))
    page.reload()
    expect(page.get_by_role("status")).to_contain_text("Ray: refused")


@pytest.mark.soak("a long scene")
def test_a_model_is_swapped_and_a_candidate_tried(server: Server, page: Page) -> None:
    first, second = (trained(server, name)["distilled_model"] for name in ("first", "second"))
    deployment = deploy(server, first, route_prefix="/chat")
    page.goto(f"{address(server)}/#/deployments/{deployment}")

    def stored() -> dict[str, object]:
        answer: dict[str, object] = server.get(f"/deployments/{deployment}")
        return answer

    candidate = page.get_by_role("form", name="Candidate")
    candidate.get_by_label("Model").select_option(second)
    candidate.get_by_label("Share, %").fill("10")
    candidate.get_by_role("button", name="Add").click()
    expect(page.get_by_text("serves 10% of the requests")).to_be_visible()
    assert stored()["candidate"]["share"] == 0.1  # type: ignore[index]
    candidate.get_by_role("button", name="Remove").click()
    expect(page.get_by_text("Serve a share of the requests")).to_be_visible()
    page.get_by_role("form", name="Swap the model").get_by_label("Model").select_option(second)
    with page.expect_response(lambda answer: answer.request.method == "PATCH"):
        page.get_by_role("button", name="Swap in").click()
    expect(page.locator("main .head .status")).to_have_text("swapping")
    assert (stored()["model"], stored()["candidate"]) == (second, None)
    history = page.get_by_role("region", name="Changes, newest first").locator("tbody tr")
    expect(history).to_have_count(3)
    expect(history.first).to_contain_text("updated")


def test_adapters_are_added_and_removed(server: Server, page: Page) -> None:
    publish = {"adapter": True}
    first, legal = (trained(server, name, publish=publish)["distilled_model"] for name in ("first", "legal"))
    deployment = deploy(server, first, route_prefix="/chat")
    page.goto(f"{address(server)}/#/deployments/{deployment}")
    form = page.get_by_role("form", name="Adapters")
    form.get_by_label("Model").select_option(legal)
    form.get_by_label("Name").fill("law")
    form.get_by_role("button", name="Add").click()
    added = page.get_by_role("list", name="Adapters").get_by_role("listitem")
    expect(added).to_contain_text("law")
    [stored] = server.get(f"/deployments/{deployment}")["adapters"]
    assert (stored["model"], stored["name"]) == (legal, "law")
    added.get_by_role("button", name="Remove law").click()
    expect(added).to_have_count(0)
    assert server.get(f"/deployments/{deployment}")["adapters"] == []


@pytest.mark.soak("a long scene")
def test_what_is_typed_stays_while_the_page_is_renewed(server: Server, page: Page) -> None:
    deployment = deploy(server, route_prefix="/chat")
    page.goto(f"{address(server)}/#/deployments/{deployment}")
    share, most = page.get_by_label("Share, %"), page.get_by_label("Max")
    share.fill("10")
    most.fill("3")
    for _ in range(2):  # the first one may have been sent before the input
        with page.expect_response(f"**/deployments/{deployment}"):
            pass
    expect(page.get_by_role("heading", name="Current load")).to_be_visible()
    assert (share.input_value(), most.input_value()) == ("10", "3")


@pytest.mark.soak("a long scene")
def test_a_models_lineage_is_drawn_and_two_are_compared(server: Server, page: Page) -> None:
    first, second = (trained(server, name) for name in ("first", "second"))
    server.client.post(f"/models/{first['distilled_model']}/promote", json={"reason": "best"}).raise_for_status()
    deploy(server, first["distilled_model"], route_prefix="/chat")
    page.goto(f"{address(server)}/#/models/{first['distilled_model']}")
    lineage = page.get_by_role("list", name="Lineage of first").get_by_role("listitem")
    kinds = ["data", "teacher", "job, attempt 1", "model", "alias", "deployment"]
    expect(lineage.locator(".kind")).to_have_text(kinds)
    expect(page.get_by_role("region", name="Quality on held-out text")).to_contain_text("0.173")
    expect(page.locator("main")).to_contain_text("376 ms dense, 196 ms SwiftKV")
    expect(page.get_by_role("region", name="Files")).to_contain_text("evaluation.json")
    command = page.get_by_role("region", name="Command on this platform")
    expect(command).to_have_text(f"swiftkv deploy {first['distilled_model']}")
    expect(page.get_by_role("region", name="Command on your machine")).to_contain_text(f"download {first['id']} model")
    page.get_by_role("link", name="Models").first.click()
    for name in ("first", "second"):
        page.get_by_label(f"Compare {name}").check()
    expect(page.get_by_role("region", name="Figures of both models")).to_contain_text("distilled.kl")
    assert second["name"] == "second"


def store_rows(server: Server, model: str, passed: range) -> None:
    """Store the results of 30 rows, of which `passed` are right."""
    job = server.get(f"/models/{model}")["job_id"]
    rows = [
        RowResult(
            key=f"{i:02}",
            prompt=f"Question {i}?",
            expected=f"right {i}",
            teacher=ModeResult(score=1.0, answer=f"right {i}"),
            student=ModeResult(score=float(i in passed), answer=f"{'right' if i in passed else 'wrong'} {i}"),
        )
        for i in range(30)
    ]
    server.parts.objects.put_bytes(AttemptId(job, 1).row_results_key("000-own"), dump_rows(rows)[0])


def test_rows_that_went_from_pass_to_fail_are_side_by_side(
    server: Server, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [{"task": "own", "metric": "contains", "student": 0.8, "row_results": "000-own"}]
    monkeypatch.setitem(REPORT, "tasks", tasks)
    first, second = (trained(server, name)["distilled_model"] for name in ("first", "second"))
    store_rows(server, first, range(28))
    store_rows(server, second, range(4, 30))
    page.goto(f"{address(server)}/#/models")
    for name in ("first", "second"):
        page.get_by_label(f"Compare {name}").check()
    tasks_table = page.get_by_role("region", name="Evaluation tasks")
    expect(tasks_table.get_by_role("row").nth(1)).to_contain_text("own contains")
    rows = page.get_by_role("region", name="Changed rows").get_by_role("row")
    expect(rows).to_have_count(7)
    cells = rows.nth(1).get_by_role("cell")
    expect(cells).to_have_text(["Question 0?", "right 0", "worse", "1right 0", "0wrong 0"])
    page.evaluate(AXE)
    for width, height in WIDTHS.items():
        page.set_viewport_size({"width": width, "height": height})
        for problems in (FOUND, NAMELESS, TOO_WIDE):
            assert page.evaluate(problems) == [], width
    page.get_by_role("combobox", name="Change").select_option("better")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_contain_text("Question 28?")


def asked_by(page: Page, path: str, body: str) -> list[dict[str, object]]:
    """Answer the page's requests to `path` with `body` from now on; return a list that receives their bodies."""
    asked: list[dict[str, object]] = []

    def answer(route: playwright.Route) -> None:
        asked.append(json.loads(route.request.post_data or ""))
        route.fulfill(headers={"content-type": "text/event-stream"}, body=body)

    page.route(path, answer)
    return asked


def test_two_models_answer_side_by_side_with_their_exits_and_drafts_marked(server: Server, page: Page) -> None:
    model = trained(server, swiftkv={"deep_tail": 16})["distilled_model"]
    first, second = deploy(server, model, route_prefix="/a"), deploy(server, model, route_prefix="/b")
    page.goto(f"{address(server)}/#/playground?a={first}&b={second}")
    page.get_by_label("Prompt").fill("How?")
    page.get_by_role("button", name="Generate").click()
    for route in ("/a", "/b"):
        talk = page.get_by_role("region", name=f"at {route}")
        expect(talk.locator(".turn.assistant")).to_contain_text("Prompts stop at layer l and go on.")
        expect(talk.locator(".exited")).to_have_text([" stop", " go on."])
        expect(talk.locator(".drafted")).to_have_text(" layer l and")
        expect(talk.locator(".live")).to_contain_text("22 ms")
        expect(talk.locator(".live")).to_contain_text("125")  # tokens per second, at 8 ms per token
        expect(talk.locator("dd")).to_have_text(["40", "16", "8", "16", "The last 16 prompt tokens run all layers."])


ANSWER = 'data: {"choices": [{"text": " pass", "num_exited_tokens": 1}]}\n\ndata: [DONE]\n\n'


@pytest.mark.soak("a long scene")
def test_the_playground_asks_for_what_was_chosen(server: Server, page: Page) -> None:
    deploy(server)
    asked = asked_by(page, "**/generate", ANSWER)
    page.goto(f"{address(server)}/#/playground")
    page.get_by_label("Kind").select_option("text")
    page.get_by_label("Prompt").fill("def f():")
    for mode in ("off", "threshold", "lossless"):
        page.get_by_label("Early exit").select_option(mode)
        with page.expect_response("**/generate"):
            page.get_by_role("button", name="Generate").click()
        expect(page.get_by_role("button", name="New conversation")).to_be_visible()
    page.get_by_role("button", name="New conversation").click()
    page.get_by_label("Kind").select_option("chat")
    for turn in ("first", "second"):
        page.get_by_label("Prompt").fill(turn)
        page.keyboard.press("Control+Enter")
        expect(page.locator(".turn.user").filter(has_text=turn)).to_be_visible()
        expect(page.get_by_role("button", name="New conversation")).to_be_visible()
    plain = {"prompt": "def f():", "max_tokens": 128, "temperature": 0, "stream": True, "stream_interval_s": 0}
    chat = {name: value for name, value in plain.items() if name != "prompt"} | {"early_exit": {"mode": "lossless"}}
    turns = [("user", "first"), ("assistant", " pass"), ("user", "second")]
    messages = [{"role": role, "content": content} for role, content in turns]
    assert asked == [
        plain,
        {**plain, "early_exit": {"mode": "threshold", "threshold": 0.95}},
        {**plain, "early_exit": {"mode": "lossless"}},
        {**chat, "messages": messages[:1]},
        {**chat, "messages": messages},
    ]


CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": '}}
REST = {"index": 0, "function": {"arguments": '"Oslo"}'}}
CALLED = "".join(
    f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'tool_calls': [part]}}]})}\n\n" for part in (CALL, REST)
)


@pytest.mark.soak("a long scene")
def test_a_called_tool_is_shown_and_its_result_sent_back(server: Server, page: Page) -> None:
    deploy(server)
    asked = asked_by(page, "**/chat/completions", f"{CALLED}data: [DONE]\n\n")
    page.goto(f"{address(server)}/#/playground")
    page.get_by_role("checkbox", name="tools").check()
    page.get_by_label("Prompt").fill("Weather in Oslo?")
    page.get_by_role("button", name="Generate").click()
    expect(page.locator(".turn.assistant")).to_contain_text('calls get_weather({"city": "Oslo"})')
    page.get_by_label("Result of get_weather").fill("3 degrees")
    page.get_by_role("button", name="Send result").click()
    expect(page.locator(".turn.tool")).to_contain_text("3 degrees")
    expect(page.locator(".turn.assistant")).to_have_count(2)
    assert asked[0]["tools"][0]["function"]["name"] == "get_weather"  # type: ignore[index]
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'}}
    assert asked[1]["messages"] == [
        {"role": "user", "content": "Weather in Oslo?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "3 degrees", "tool_call_id": "call_1"},
    ]
