"""OpenAI's fine-tuning API over the same jobs: driven by OpenAI's client, and held to its types."""

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai.types.fine_tuning import FineTuningJob, FineTuningJobEvent
from openai.types.fine_tuning.jobs import FineTuningJobCheckpoint

from swiftkv_platform.control_plane.ray import SubmissionStatus
from tests.unit.control_plane.routes.conftest import URL, Server

pytestmark = pytest.mark.slow("starts an application for each test")

ROWS = b'{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}\n'

JOBS = "/v1/fine_tuning/jobs"

TEACHER = "org/teacher"


@pytest.fixture
def client(server: Server) -> OpenAI:
    return OpenAI(api_key="none", base_url=f"{URL}/v1", http_client=server.client, max_retries=0)


@pytest.fixture
def file_id(client: OpenAI) -> str:
    return client.files.create(file=("chats.jsonl", ROWS), purpose="fine-tune").id


def conforms(server: Server, path: str, kind: type[Any]) -> None:
    """Check strictly that every object at `path` is of the type that OpenAI's client has for it."""
    answer = server.get(path)
    for each in answer["data"] if answer["object"] == "list" else [answer]:
        kind.model_validate_json(json.dumps(each), strict=True)


def test_a_job_from_upload_to_model(client: OpenAI, server: Server, file_id: str) -> None:
    job = client.fine_tuning.jobs.create(
        model=TEACHER,
        training_file=file_id,
        method={"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 3, "batch_size": 4}}},
        seed=7,
        suffix="greeter",
        metadata={"team": "blue"},
        integrations=[{"type": "wandb", "wandb": {"project": "greetings", "tags": ["a"]}}],
        extra_body={"swiftkv": {"swiftkv": {"num_key_value_layers": 2}, "data": {"max_length": 64}}},
    )
    assert (job.status, job.model, job.training_file, job.seed) == ("queued", TEACHER, file_id, 7)
    assert (job.hyperparameters.n_epochs, job.hyperparameters.batch_size) == (3, 4)
    assert (job.metadata, job.fine_tuned_model, job.trained_tokens) == ({"team": "blue"}, None, None)
    assert (job.integrations or [])[0].wandb.project == "greetings"
    native = server.get(f"/jobs/{job.id}")
    assert native["name"] == "greeter"
    assert (native["spec"]["swiftkv"]["num_key_value_layers"], native["spec"]["data"]["max_length"]) == (2, 64)
    assert [source["name_or_path"] for source in native["spec"]["data"]["sources"]] == [file_id]
    assert job.model_extra is not None
    assert job.model_extra["swiftkv"] == native

    worker = server.run(job.id)
    worker.step(1, 2, time=1001)
    worker.step(3, time=1002)
    worker.checkpoint(2)
    worker.checkpoint(3)
    server.tick()
    assert client.fine_tuning.jobs.retrieve(job.id).status == "running"
    worker.artifact()
    server.end(job.id)

    done = client.fine_tuning.jobs.retrieve(job.id)
    assert (done.status, done.trained_tokens) == ("succeeded", 300)
    assert done.fine_tuned_model == server.get("/models")["data"][0]["id"]
    events = list(client.fine_tuning.jobs.list_events(job.id, limit=2))
    told = server.get(f"/jobs/{job.id}/events")["data"]
    assert [event.id for event in events] == [event["id"] for event in reversed(told)], "newest first, all pages"
    assert {event.type for event in events} == {"message", "metrics"}
    checkpoints = list(client.fine_tuning.jobs.checkpoints.list(job.id, limit=1))
    losses = [(each.step_number, each.metrics.train_loss) for each in checkpoints]
    assert losses == [(3, pytest.approx(1 / 3)), (2, 0.5)]
    assert checkpoints[0].fine_tuned_model_checkpoint == f"{job.id}:{checkpoints[0].id}"
    conforms(server, f"{JOBS}/{job.id}", FineTuningJob)
    conforms(server, JOBS, FineTuningJob)
    conforms(server, f"{JOBS}/{job.id}/events", FineTuningJobEvent)
    conforms(server, f"{JOBS}/{job.id}/checkpoints", FineTuningJobCheckpoint)


def test_jobs_of_both_faces_are_the_same_jobs(client: OpenAI, server: Server, file_id: str) -> None:
    native = server.submit(metadata={"team": "red"})
    once = {"Idempotency-Key": "once"}
    other, again = (
        client.fine_tuning.jobs.create(
            model=TEACHER, training_file=file_id, metadata={"team": "blue"}, extra_headers=once
        )
        for _ in range(2)
    )
    assert other.id == again.id
    assert [each.id for each in client.fine_tuning.jobs.list(limit=1)] == [other.id, native["id"]]
    assert [each.id for each in client.fine_tuning.jobs.list(metadata={"team": "red"})] == [native["id"]]
    assert client.fine_tuning.jobs.retrieve(native["id"]).training_file == "builtin:python-stdlib"
    conforms(server, JOBS, FineTuningJob)


def test_openai_fields_and_a_spec_make_the_same_job(client: OpenAI, server: Server, file_id: str) -> None:
    data, training = {"sources": [{"name_or_path": file_id}]}, {"num_epochs": 4}
    native = server.submit(name="same", data=data, training=training)
    job = client.fine_tuning.jobs.create(
        model=TEACHER, training_file=file_id, suffix="same", hyperparameters={"n_epochs": 4}
    )
    assert server.get(f"/jobs/{job.id}")["spec"] == native["spec"]


def test_pausing_resuming_and_cancelling(client: OpenAI, server: Server, file_id: str) -> None:
    job = client.fine_tuning.jobs.create(model=TEACHER, training_file=file_id).id
    assert client.fine_tuning.jobs.pause(job).status == "queued"
    assert server.get(f"/jobs/{job}")["status"] == "paused"
    assert client.fine_tuning.jobs.resume(job).status == "queued"
    assert server.get(f"/jobs/{job}")["status"] == "queued"
    for _ in range(2):
        cancelled = client.fine_tuning.jobs.cancel(job)
        assert (cancelled.status, cancelled.finished_at is None) == ("cancelled", False)
    with pytest.raises(openai.ConflictError) as refused:
        client.fine_tuning.jobs.resume(job)
    assert refused.value.code == "illegal_transition"
    conforms(server, f"{JOBS}/{job}", FineTuningJob)


@pytest.mark.parametrize("verb", ["pause", "cancel"])
def test_every_status_has_a_name_that_openais_clients_know(
    client: OpenAI, server: Server, file_id: str, verb: str
) -> None:
    job = client.fine_tuning.jobs.create(model=TEACHER, training_file=file_id).id
    kinds = ["starting", "running"] if verb == "pause" else ["starting", "running", "evaluating"]
    for kind in kinds:
        if kind != "starting":
            server.worker(job).say("status", status=kind)
        server.tick()
        assert server.get(f"/jobs/{job}")["status"] == kind
        conforms(server, f"{JOBS}/{job}", FineTuningJob)
    stopping = server.client.post(f"{JOBS}/{job}/{verb}").json()["swiftkv"]["status"]
    assert stopping == {"pause": "pausing", "cancel": "cancelling"}[verb]
    conforms(server, f"{JOBS}/{job}", FineTuningJob)


def test_a_failed_job_says_why(client: OpenAI, server: Server, file_id: str) -> None:
    job = client.fine_tuning.jobs.create(model=TEACHER, training_file=file_id).id
    server.tick()
    server.worker(job).say("error", "row 3 is empty", code="data_error", field="data.sources[0]", retryable=False)
    server.end(job, SubmissionStatus.FAILED)
    failed = client.fine_tuning.jobs.retrieve(job)
    assert (failed.status, failed.error is None) == ("failed", False)
    told = failed.error.code, failed.error.message, failed.error.param  # type: ignore[union-attr]
    assert told == ("data_error", "row 3 is empty", "data.sources[0]")
    conforms(server, f"{JOBS}/{job}", FineTuningJob)


def test_the_training_file_may_have_options_and_company(client: OpenAI, server: Server, file_id: str) -> None:
    sources = [{"name_or_path": "org/data"}, {"name_or_path": file_id, "weight": 2.0}]
    for given, expected in ((sources, sources), (sources[:1], [{"name_or_path": file_id}, sources[0]])):
        method: Any = {"type": "swiftkv", "swiftkv": {"data": {"sources": given}}}
        job = client.fine_tuning.jobs.create(model=TEACHER, training_file=file_id, method=method)
        made = server.get(f"/jobs/{job.id}")["spec"]["data"]["sources"]
        assert [{key: each[key] for key in wanted} for each, wanted in zip(made, expected, strict=True)] == expected


def test_what_is_refused_names_the_field_that_was_sent(server: Server, file_id: str) -> None:
    """Each refusal is the one of `/jobs`, with the fields of this route."""
    no_file = f"file-{26 * '0'}"
    rows = [{"name": "a", "metric": "contains", "source": {"name_or_path": "org/data", "weight": 2.0}}]
    two_sources = [{"name_or_path": "org/data"}, {"name_or_path": no_file}]
    refusals: list[tuple[dict[str, Any], str | None, str]] = [
        ({"model": "../a"}, "model", "model is '../a', a relative path"),
        ({"training_file": no_file}, "training_file", f"training_file is '{no_file}', but no file with this id"),
        (
            {"validation_file": "file-x"},
            "validation_file",
            "sets the share of training rows that is held out (given: 'file-x')",
        ),
        ({"method": {"type": "dpo"}}, "method.type", "'supervised' or 'swiftkv'"),
        (
            {"hyperparameters": {"learning_rate_multiplier": 2.0}},
            "hyperparameters.learning_rate_multiplier",
            "multipliers are not supported; set swiftkv.optimizer.learning_rate (given: 2.0)",
        ),
        (
            {"hyperparameters": {"batch_size": 3}},
            "hyperparameters.batch_size",
            "hyperparameters.batch_size 3 must be a multiple of swiftkv.resources.num_workers x ",
        ),
        (
            {"hyperparameters": {"n_epochs": 0}},
            "hyperparameters.n_epochs",
            "hyperparameters.n_epochs: is 0; 1 to 1,000,000 is accepted",
        ),
        ({"suffix": "two words"}, "suffix", "(given: 'two words')"),
        ({"swiftkv": {"training": {"max_stepz": 1}}}, "swiftkv.training.max_stepz", "did you mean max_steps?"),
        (
            {"swiftkv": {"training": {"max_steps": 0}}},
            "swiftkv.training.max_steps",
            "swiftkv.training.max_steps is 0: set swiftkv.training.from to the checkpoint",
        ),
        ({"swiftkv": {"training": {"from": "mdl_x"}}}, "swiftkv.training.from", "swiftkv.training.from is 'mdl_x'"),
        ({"swiftkv": {"model": {"name_or_path": "another"}}}, "swiftkv.model.name_or_path", "set only one of them"),
        ({"swiftkv": {"training": {"seed": 1}}, "seed": 2}, "swiftkv.training.seed", "seed is 2 and swiftkv."),
        ({"swiftkv": {"data": {"validation_fraction": 0.0}}}, "swiftkv.data.validation_fraction", "use 0.01"),
        ({"swiftkv": {"swiftkv": {"prefill_layers": [1, 0]}}}, "swiftkv.swiftkv.prefill_layers", "is [1, 0]"),
        ({"swiftkv": {"evaluation": {"rows": rows}}}, "swiftkv.evaluation.rows[0].source.weight", "is 2"),
        ({"swiftkv": {"data": {"sources": two_sources}}}, "swiftkv.data.sources[1].name_or_path", no_file),
        (
            {"method": {"type": "swiftkv", "swiftkv": {"data": {"sources": two_sources}}}},
            "method.swiftkv.data.sources[1].name_or_path",
            no_file,
        ),
        ({"unknown": 1}, "unknown", "accepted here: hyperparameters, "),
        ({"swiftkv": {}, "method": {"type": "swiftkv", "swiftkv": {}}}, None, "not both"),
    ]
    for asked, param, message in refusals:
        refused = server.client.post(JOBS, json={"model": TEACHER, "training_file": file_id, **asked})
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error"), error
        assert message in error["message"], error
    assert server.get("/jobs")["data"] == []


def test_settings_of_both_parts_of_a_request_are_checked_together(client: OpenAI, server: Server) -> None:
    """A built-in file has held-out rows of its own, so no fraction of the others is needed."""
    swiftkv = {"data": {"sources": [{"name_or_path": "org/data"}], "validation_fraction": 0}}
    job = client.fine_tuning.jobs.create(
        model=TEACHER, training_file="builtin:python-stdlib", extra_body={"swiftkv": swiftkv}
    )
    sources = server.get(f"/jobs/{job.id}")["spec"]["data"]["sources"]
    assert [source["name_or_path"] for source in sources] == ["builtin:python-stdlib", "org/data"]


def test_what_there_is_not_is_not_found(client: OpenAI) -> None:
    for call in (
        client.fine_tuning.jobs.retrieve,
        client.fine_tuning.jobs.cancel,
        client.fine_tuning.jobs.list_events,
        client.fine_tuning.jobs.checkpoints.list,
        client.files.retrieve,
        client.files.delete,
    ):
        with pytest.raises(openai.NotFoundError) as missing:
            call("nothing")
        assert (missing.value.code, missing.value.type) == ("not_found", "invalid_request_error")
