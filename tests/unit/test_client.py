"""The HTTP client against real sockets: retries, errors, events over broken connections, streamed generation."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv_platform.client import (
    APIError,
    AuthenticationError,
    Client,
    InvalidRequestError,
    RateLimitedError,
    RequestConflictError,
    ResourceNotFoundError,
    ServerError,
    ServiceUnavailableError,
    UnreachableError,
    WaitTimeoutError,
)
from swiftkv_platform.client.transport import iter_events, iter_lines
from swiftkv_platform.errors import ConflictError, InvalidInputError, NotFoundError, SwiftKVError
from swiftkv_platform.specs import JobSpec
from tests.support.fakes.scripted_server import (
    Answer,
    Script,
    event_stream,
    json_answer,
    list_answer,
    problem_answer,
    serve,
)
from tests.support.rays import free_port
from tests.unit.cli.conftest import job_row

CUT = Answer(cut=True)


def event_row(number: int, **changes: Any) -> dict[str, Any]:
    row = {"id": f"evt_{number}", "created_at": number, "level": "info", "type": "message"}
    return {**row, "message": f"event {number}", **changes}


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def client(script: Script) -> Iterator[Client]:
    with serve(script) as url, Client(url, serve_url=url, outage_s=5.0) as client:
        yield client


# Submitting


def test_a_submission_repeated_after_a_broken_connection_carries_the_same_key(script: Script, client: Client) -> None:
    script.on("POST", "/jobs", CUT, json_answer(job_row(), 201))
    spec = {"name": "tiny", "swiftkv": {"key_value_group_size": 2}}
    job = client.jobs.create(JobSpec.model_validate(spec))
    client.jobs.create({"name": "tiny"})
    client.jobs.create({"name": "tiny"}, idempotency_key="mine")
    first, again, second, own = (request.headers["idempotency-key"] for request in script.sent("POST", "/jobs"))
    assert (job.id, first == again, first != second, own) == ("job_1", True, True, "mine")
    assert script.requests[0].body == spec, "the spec is sent as it was written"


# Errors


@pytest.mark.parametrize(
    ("tracking", "environment", "sent"),
    [
        (None, {"WANDB_MODE": "disabled"}, {"wandb": {"mode": "disabled"}}),
        (
            {"wandb": {"mode": "online", "project": "p"}},
            {"WANDB_MODE": "dryrun"},
            {"wandb": {"mode": "offline", "project": "p"}},
        ),
        ({"wandb": None}, {"WANDB_DISABLED": "true"}, {"wandb": {"mode": "disabled"}}),
        ({"wandb": {"mode": "disabled"}}, {"WANDB_MODE": "online"}, {"wandb": {"mode": "disabled"}}),
        ({"wandb": {"mode": "sometimes"}}, {"WANDB_MODE": "offline"}, {"wandb": {"mode": "sometimes"}}),
        (["wandb"], {"WANDB_MODE": "offline"}, ["wandb"]),
    ],
)
def test_a_submitted_job_tracks_no_more_than_the_environment_allows(
    tracking: Any,
    environment: dict[str, str],
    sent: Any,
    script: Script,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    script.on("POST", "/jobs", json_answer(job_row(), 201))
    client.jobs.create({"name": "tiny", "tracking": tracking})
    assert script.requests[0].body == {"name": "tiny", "tracking": sent}


def test_a_refused_field_is_named_with_its_value(script: Script, client: Client) -> None:
    entry = {"field": "swiftkv.num_key_value_layers", "value": 99, "message": "12 layers accept 1..11"}
    script.on("POST", "/jobs", problem_answer(422, "The spec is refused.", errors=[entry]))
    with pytest.raises(InvalidRequestError) as caught:
        client.jobs.create({"name": "tiny"})
    [field_error] = caught.value.errors
    assert (field_error.field, field_error.value) == ("swiftkv.num_key_value_layers", 99)
    assert (caught.value.field, caught.value.value) == ("swiftkv.num_key_value_layers", 99)
    assert "swiftkv.num_key_value_layers: 12 layers accept 1..11" in str(caught.value)


# Following


def test_a_503_is_repeated_where_it_says_when(script: Script, client: Client) -> None:
    away = Answer(503, b"{}", {"Retry-After": "0"})
    script.on("POST", "/jobs", away, away, json_answer(job_row(), 201), Answer(503, b"busy"))
    assert client.jobs.create({"name": "tiny"}).id == "job_1"
    assert len(script.requests) == 3
    with pytest.raises(ServiceUnavailableError, match="busy"):
        client.jobs.create({"name": "tiny"})
    assert len(script.requests) == 4


def test_every_status_has_its_exception() -> None:
    kinds: dict[int, tuple[type[APIError], type[Exception]]] = {
        400: (InvalidRequestError, InvalidInputError),
        401: (AuthenticationError, APIError),
        403: (AuthenticationError, APIError),
        404: (ResourceNotFoundError, NotFoundError),
        409: (RequestConflictError, ConflictError),
        413: (InvalidRequestError, InvalidInputError),
        422: (InvalidRequestError, InvalidInputError),
        429: (RateLimitedError, APIError),
        500: (ServerError, APIError),
        502: (ServerError, APIError),
        503: (ServiceUnavailableError, ServerError),
        418: (APIError, SwiftKVError),
    }
    for status, (kind, also) in kinds.items():
        answer = {"status": status, "title": "No", "detail": "because", "code": "some_code"}
        transport = httpx.MockTransport(lambda _, status=status, answer=answer: httpx.Response(status, json=answer))  # type: ignore[misc]
        with pytest.raises(kind, match="because") as caught:
            Client("http://test", transport=transport).jobs.get("job_1")
        assert (type(caught.value), isinstance(caught.value, also)) == (kind, True)
        assert (caught.value.status, caught.value.code) == (status, "some_code")


def test_what_is_no_answer_of_ours_is_still_an_error(script: Script, client: Client) -> None:
    for body in (b"<html>Bad gateway</html>", b"", b"[1, 2]", b'{"status": "no number"}'):
        script.on("GET", "/jobs/job_1", Answer(502, body))
        with pytest.raises(ServerError) as caught:
            client.jobs.get("job_1")
        assert (caught.value.status, body.decode() in caught.value.message) == (502, True)
    script.on("POST", "/generate", Answer(200, b"<html>", {"Content-Type": "text/html"}))
    with pytest.raises(UnreachableError, match="'text/html'"):
        list(client.generate("a", stream=True))
    with pytest.raises(UnreachableError, match="swiftkv up"):
        Client(f"http://127.0.0.1:{free_port()}", max_retries=1).jobs.list()
    with pytest.raises(ResourceNotFoundError):
        list(client.jobs.events("job_2"))


def test_wait_brings_the_submitted_job_up_to_date(script: Script, client: Client) -> None:
    script.on("POST", "/jobs", json_answer(job_row(), 201))
    away = Answer(503, b"{}", {"Retry-After": "0"})
    done = json_answer(job_row("succeeded", distilled_model="mdl_1"))
    script.on("GET", "/jobs/job_1", json_answer(job_row("running")), away, done)
    script.on("POST", "/deployments", json_answer({"id": "dep_1", "model": "mdl_1", "status": "pending"}, 201))
    job = client.jobs.create({"name": "tiny"})
    with pytest.raises(InvalidInputError, match="distilled_model"):
        client.deployments.create(model=job.distilled_model)
    assert client.jobs.wait(job.id, poll_interval=0.01) is job
    assert job.status == "succeeded"
    client.deployments.create(model=job.distilled_model)
    assert script.sent("POST", "/deployments")[0].body == {"model": "mdl_1"}
    script.on("GET", "/jobs/job_1", json_answer(job_row("running")))
    with pytest.raises(WaitTimeoutError, match="jobs watch job_1"):
        client.jobs.wait("job_1", timeout=0.0, poll_interval=0.01)


def test_events_go_on_where_a_broken_connection_left_them(script: Script, client: Client) -> None:
    def rest(request: Any) -> Answer:
        assert request.headers["last-event-id"] == "evt_2"
        return event_stream(("evt_3", event_row(3)))

    first = event_stream(("evt_1", event_row(1)), ("evt_2", event_row(2)), cut=True)
    script.on("GET", "/jobs/job_1/events", first, CUT, rest, list_answer([event_row(4)]))
    script.on("GET", "/jobs/job_1", json_answer(job_row("succeeded")))
    assert [event.id for event in client.jobs.events("job_1")] == ["evt_1", "evt_2", "evt_3", "evt_4"]
    drained = script.sent("GET", "/jobs/job_1/events")[-1]
    assert drained.query["after"] == "evt_3"
    assert drained.query["order"] == "asc"


def test_a_stream_that_ends_before_its_job_is_opened_again(script: Script, client: Client) -> None:
    streams = [event_stream((f"evt_{number}", event_row(number))) for number in (1, 2)]
    script.on("GET", "/jobs/job_1/events", *streams, list_answer([]))
    script.on("GET", "/jobs/job_1", json_answer(job_row("running")), json_answer(job_row("failed")))
    assert [event.id for event in client.jobs.events("job_1")] == ["evt_1", "evt_2"]


def test_events_of_a_server_that_stays_away_end_in_an_error(script: Script) -> None:
    script.on("GET", "/jobs/job_1/events", event_stream(("evt_1", event_row(1)), cut=True))
    with serve(script) as url:
        events = Client(url, max_retries=0, outage_s=0.0).jobs.events("job_1")
        assert next(events).id == "evt_1"
    with pytest.raises(UnreachableError):
        next(events)


def test_rows_that_the_server_cannot_read_are_named_and_end_no_list(
    script: Script, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    unreadable = {"object": "list", "data": [], "has_more": True, "last_id": "job_2", "left_out": ["job_2"]}
    script.on("GET", "/jobs", json_answer(unreadable), list_answer([job_row(id="job_1")]))
    assert [job.id for job in client.jobs.list()] == ["job_1"]
    assert script.requests[1].query["after"] == "job_2"
    assert "job_2" in caplog.text


def test_a_download_is_whole_or_absent(script: Script, client: Client, tmp_path: Path) -> None:
    script.on("GET", "/jobs/job_1/artifacts/evaluation.json", Answer(200, b'{"a"', cut=True), Answer(200, b'{"a": 1}'))
    target = tmp_path / "evaluation.json"
    with pytest.raises(UnreachableError):
        client.jobs.download("job_1", "evaluation.json", target)
    assert list(tmp_path.iterdir()) == []
    assert client.jobs.download("job_1", "evaluation.json", target).read_bytes() == b'{"a": 1}'
    assert list(tmp_path.iterdir()) == [target]


def test_logs_are_lines(script: Script, client: Client) -> None:
    script.on("GET", "/jobs/job_1/logs", *[Answer(200, "one\ntwö\n".encode())] * 2)
    assert list(client.jobs.logs("job_1", follow=True)) == ["one", "twö"]
    assert script.requests[0].query == {"follow": "true"}
    assert list(client.jobs.logs("job_1", tail_lines=2)) == ["one", "twö"]
    assert script.requests[1].query == {"tail_lines": "2"}


# Generating


def piece(text: str) -> dict[str, Any]:
    return {"id": "gen_1", "model": "mdl_1", "choices": [{"index": 0, "text": text, "token_ids": [1]}]}


def test_a_streamed_answer_comes_in_pieces(script: Script, client: Client) -> None:
    script.on("POST", "/generate", event_stream((None, piece("a\u2028")), (None, piece("b")), (None, "[DONE]")))
    assert [part.text for part in client.generate("x", stream=True, max_tokens=2)] == ["a\u2028", "b"]
    assert script.requests[0].body == {"prompt": "x", "stream": True, "max_tokens": 2}


def test_generation_goes_to_the_newest_running_deployment(script: Script) -> None:
    with serve(script) as url, Client(url, "secret-key") as client:
        script.on("GET", "/deployments", list_answer([]))
        with pytest.raises(SwiftKVError, match="swiftkv deploy"):
            client.generate("x")
        rows = [
            {"id": "dep_3", "model": "mdl_3", "status": "deploying", "url": f"{url}/three"},
            {"id": "dep_2", "model": "mdl_2", "status": "running", "url": f"{url}/two"},
            {"id": "dep_1", "model": "mdl_1", "status": "running", "url": f"{url}/one"},
        ]
        script.on("GET", "/deployments", list_answer(rows))
        script.on("POST", "/two/generate", json_answer(piece("a")))
        assert client.generate("x").text == "a"
    assert {request.headers["authorization"] for request in script.requests} == {"Bearer secret-key"}


# Server-sent events


def _pieces(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(stream), *(min(cut, len(stream)) for cut in cuts)})
    return [stream[start:end] for start, end in itertools.pairwise(places)]


def test_a_list_is_read_over_all_its_pages_up_to_a_limit(script: Script, client: Client) -> None:
    first = list_answer([job_row(id="job_3"), job_row(id="job_2")], has_more=True)
    script.on("GET", "/jobs", first, list_answer([job_row(id="job_1")]), first)
    jobs = client.jobs.list(status="queued", metadata={"team": "a"})
    assert [job.id for job in jobs] == ["job_3", "job_2", "job_1"]
    assert (script.requests[0].query["status"], script.requests[0].query["metadata.team"]) == ("queued", "a")
    assert script.requests[1].query["after"] == "job_2"
    assert len(client.jobs.list(limit=2)) == 2
    assert (script.requests[2].query["limit"], len(script.requests)) == ("2", 3)
    script.on("GET", "/jobs/job_1/metrics", list_answer([{"step": 2, "loss": 0.5}, {"step": 1, "loss": 0.9}]))
    assert [(point.step, point.loss) for point in client.jobs.metrics("job_1")] == [(1, 0.9), (2, 0.5)], "by step"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://", "ftp://host", "http://[::1", "http://host:port", ""])
def test_an_address_that_is_none_is_refused_before_it_is_asked(url: str) -> None:
    with pytest.raises(InvalidInputError, match=r"expected a URL, e\.g\. http://"):
        Client(url)


@pytest.mark.parametrize("key", ["secret\n", "s\N{LATIN SMALL LETTER E WITH ACUTE}cret"])
def test_a_key_that_no_header_takes_is_refused_and_not_shown(key: str, client: Client) -> None:
    for call in (lambda: Client(api_key=key), lambda: client.jobs.create({"name": "a"}, key)):
        with pytest.raises(InvalidInputError, match="_key has a line break or another character") as refusal:
            call()
        assert "cret" not in str(refusal.value)


@pytest.mark.parametrize("answer", [Answer(200, b"<html>", {"Content-Type": "text/html"}), json_answer([1])])
def test_another_server_at_the_address_is_told_from_ours(answer: Answer, script: Script, client: Client) -> None:
    for path in ("/jobs", "/jobs/job_1", "/models/mdl_1", "/quota"):
        script.on("GET", path, answer)
    for call in (client.jobs.list, lambda: client.jobs.get("job_1"), lambda: client.models.get("mdl_1"), client.quota):
        with pytest.raises(UnreachableError, match=r"is not a SwiftKV server: .*\. Check the URL"):
            call()


def test_a_failure_or_an_end_midway_is_raised(script: Script, client: Client) -> None:
    failure = {"status": 503, "code": "engine_dead", "title": "Unavailable", "detail": "the engine has died"}
    script.on("POST", "/generate", event_stream((None, piece("a")), (None, failure)), event_stream((None, piece("a"))))
    parts = client.generate("x", stream=True)
    assert next(parts).text == "a"
    with pytest.raises(ServerError, match="the engine has died"):
        next(parts)
    with pytest.raises(SwiftKVError, match="before its end"):
        list(client.generate("x", stream=True))


def test_a_deployment_is_changed_and_may_refuse_or_fail(script: Script, client: Client) -> None:
    row = {"id": "dep_1", "model": "mdl_2", "status": "swapping"}
    script.on("PATCH", "/deployments/dep_1", json_answer(row))
    assert client.deployments.update("dep_1", model="mdl_2").status == "swapping"
    assert script.sent("PATCH", "/deployments/dep_1")[0].body == {"model": "mdl_2"}
    for status, said, told in (
        ("refused", "bad", "rejected mdl_2 and keeps serving the previous model: bad"),
        ("failed", "manifest differs", "manifest differs"),
    ):
        ended = json_answer({**row, "status": status, "message": said})
        script.on("GET", "/deployments/dep_1", json_answer(row), ended)
        with pytest.raises(SwiftKVError, match=told):
            client.deployments.wait_ready("dep_1", poll_interval=0.01)


@given(st.lists(st.integers(min_value=0, max_value=200), max_size=12))
def test_events_and_lines_do_not_depend_on_how_the_bytes_arrive(cuts: list[int]) -> None:
    stream = (
        ": comment\r\n\r\nid: 1\r\nevent: tick\r\ndata: å\u2028b\r\n\r\n"
        "data: one\ndata:two\n\n\n"
        "id: 2\rdata: cr\r\r"
        "data: never finished"
    ).encode()
    response = httpx.Response(200, headers={"Content-Type": "text/event-stream"}, content=iter(_pieces(stream, cuts)))
    found = [(event.data, event.event, event.id) for event in iter_events(response)]
    assert found == [("å\u2028b", "tick", "1"), ("one\ntwo", "message", "1"), ("cr", "message", "2")]
    log = "step 1\r\nå\u2028b\x0cc\n\nprogress 1%\rprogress 2%\r\nunfinished\r".encode()
    lines = ["step 1", "å\u2028b\x0cc", "", "progress 1%", "progress 2%", "unfinished"]
    assert list(iter_lines(_pieces(log, cuts))) == lines
