"""The command line against a scripted control plane: output, JSON, errors and exit codes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from swiftkv_platform.cli.app import app
from tests.support.fakes.scripted_server import Answer, Script, event_stream, json_answer, list_answer, problem_answer
from tests.support.model_configs import llama_config
from tests.support.rays import free_port
from tests.unit.cli.conftest import Run, job_row


def event_row(number: int, kind: str, message: str, **data: Any) -> dict[str, Any]:
    row = {"id": f"evt_{number}", "created_at": number, "level": "info", "type": kind, "message": message}
    return {**row, "data": data}


def steps(first: int, last: int) -> dict[str, Any]:
    points = [
        {"step": n, "tokens": n * 10, "loss": 1.0 / n, "tokens_per_second": 1234.5} for n in range(first, last + 1)
    ]
    return event_row(last, "metrics", f"step {last}", points=points, total_steps=4)


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text("name: tiny\nswiftkv: {key_value_group_size: 2}\n")
    return path


def finished(script: Script, status: str, **changes: Any) -> None:
    """A job that runs four steps and ends with `status`."""
    script.on("POST", "/jobs", json_answer(job_row(), 201))
    events = [
        event_row(0, "status", "running, attempt 1", status="running"),
        steps(1, 2),
        steps(3, 4),
        event_row(9, "status", status, status=status),
    ]
    script.on("GET", "/jobs/job_1/events", event_stream(*((row["id"], row) for row in events)), list_answer([]))
    script.on("GET", "/jobs/job_1", json_answer(job_row(status, **changes)))


def test_a_submission_prints_the_id_or_the_job(run: Run, script: Script, spec: Path) -> None:
    script.on("POST", "/jobs", json_answer(job_row(), 201))
    assert "job_1" in run("jobs", "submit", "-f", str(spec)).stdout
    result = run("jobs", "submit", "-f", str(spec), "--idempotency-key", "k", "--json")
    assert json.loads(result.stdout)["id"] == "job_1"
    assert script.requests[0].body == {"name": "tiny", "swiftkv": {"key_value_group_size": 2}}
    assert script.requests[1].headers["idempotency-key"] == "k"


def test_a_clone_is_the_spec_with_what_is_set(run: Run, script: Script) -> None:
    spec = {"name": "tiny", "training": {"max_steps": None, "seed": 0}, "data": {"sources": [{"weight": 1.0}]}}
    script.on("GET", "/jobs/job_1", json_answer(job_row("failed", spec=spec)))
    script.on("POST", "/jobs", json_answer(job_row(id="job_2"), 201))
    for change, told in (
        ("training.max_steps", "KEY=VALUE"),
        ("name={", "not valid YAML"),
        ("name.first=1", "is not a valid path"),
    ):
        refused = run("jobs", "clone", "job_1", "--set", change)
        assert refused.exit_code != 0
        assert told in " ".join(refused.output.split())
    changes = ("--set", "training.max_steps=100", "--set", "data.sources.0.weight=2.5", "--set", "name=again")
    result = run("jobs", "clone", "job_1", *changes)
    assert result.exit_code == 0, result.output
    assert "Submitted job_2" in result.output
    [sent] = script.sent("POST", "/jobs")
    training = {"max_steps": 100, "seed": 0}
    assert sent.body == {"name": "again", "training": training, "data": {"sources": [{"weight": 2.5}]}}


def test_submit_and_follow_shows_progress_and_the_end(run: Run, script: Script, spec: Path) -> None:
    finished(script, "succeeded", distilled_model="mdl_1")
    result = run("jobs", "submit", "-f", str(spec), "--follow")
    assert result.exit_code == 0
    for shown in ("running, attempt 1", "step 4/4", "loss 0.2500", "mdl_1"):
        assert shown in result.stdout
    finished(script, "succeeded")
    printed = run("jobs", "watch", "job_1", "--json").stdout.splitlines()
    assert [json.loads(line)["id"] for line in printed] == ["evt_0", "evt_2", "evt_4", "evt_9", "job_1"]
    for status in ("failed", "cancelled"):
        finished(script, status, error={"code": "data_error", "message": "no rows"})
        result = run("jobs", "watch", "job_1")
        assert (result.exit_code, "data_error: no rows" in result.stdout) == (1, True)


def test_list_is_a_table_with_whole_ids(run: Run, script: Script) -> None:
    identifier = "job_01J" + "X" * 60
    row = job_row("running", id=identifier, name="a" * 60, progress={"step": 3, "total_steps": 9})
    script.on("GET", "/jobs", list_answer([row]))
    result = run("jobs", "list", "--status", "running")
    assert identifier in result.stdout
    assert "3/9" in result.stdout
    assert script.requests[0].query["status"] == "running"
    script.on("GET", "/jobs", list_answer([]))
    assert run("jobs", "list").stdout.strip() == "No jobs."
    assert json.loads(run("jobs", "list", "--json").stdout) == []


def test_a_refused_spec_names_field_value_and_reason_before_anything_is_sent(
    run: Run, script: Script, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: tiny\ntraining: {batch_size: 0, max_step: 9}\nswiftkv: {layers: 3}\n")
    result = run("jobs", "submit", "-f", str(bad))
    assert result.exit_code == 1
    assert "training.batch_size" in result.stderr
    assert "swiftkv.layers" in result.stderr
    assert "given: 3" in result.stderr
    assert "training.max_step: unknown key (did you mean max_steps?); accepted here: " in result.stderr
    assert "Traceback" not in result.stderr
    assert script.requests == []


@pytest.mark.parametrize(
    ("command", "options", "method", "body"),
    [
        (
            "deploy mdl_2 --replace dep_1 --no-wait",
            ["--max-replicas", "3"],
            "PATCH",
            {"model": "mdl_2", "max_replicas": 3},
        ),
        (
            "deploy mdl_2 --replace dep_1 --no-wait",
            [
                *("--adapters", "mdl_2", "--adapters", "{model: mdl_3, name: legal}"),
                *("--capture", "null", "--cors-origins", "null", "--tool-call-parser", "null"),
            ],
            "PATCH",
            {
                "model": "mdl_2",
                "adapters": ["mdl_2", {"model": "mdl_3", "name": "legal"}],
                "capture": None,
                "cors_origins": None,
                "tool_call_parser": None,
            },
        ),
        (
            "deploy mdl_2 --no-wait --target-ongoing-requests 3",
            [
                *("--engine", "{max_num_seqs: 8}", "--candidate", '{"model": "mdl_3"}', "--upscale-delay-s", "2.5"),
                *("--ignored-fields", "suffix", "--ignored-fields", "*"),
            ],
            "POST",
            {
                "model": "mdl_2",
                "engine": {"max_num_seqs": 8},
                "candidate": {"model": "mdl_3"},
                "upscale_delay_s": 2.5,
                "ignored_fields": ["suffix", "*"],
                "target_ongoing_requests": 3.0,
            },
        ),
        (
            "deployments update dep_1",
            ["--set", "capture.share=0.1", "--set", "engine.max_num_seqs=null", "--set", "adapters=[mdl_2]"],
            "PATCH",
            {"capture": {"share": 0.1}, "engine": {"max_num_seqs": None}, "adapters": ["mdl_2"]},
        ),
    ],
    ids=["replaces", "objects-and-null", "every-type-of-option", "update-of-keys"],
)
def test_a_deployment_is_sent_as_its_options_say(
    run: Run, script: Script, command: str, options: list[str], method: str, body: dict[str, Any]
) -> None:
    row = {"id": "dep_1", "model": "mdl_2", "status": "swapping", "version": 4}
    script.on("POST", "/deployments", json_answer(row, 201))
    script.on("PATCH", "/deployments/dep_1", json_answer(row))
    result = run(*command.split(), *options)
    assert result.exit_code == 0, result.output
    told = "dep_1 is swapping, version 4." if "update" in command else "Deployment dep_1 of mdl_2 is swapping"
    assert told in result.output
    [sent] = script.sent(method, "/deployments" if method == "POST" else "/deployments/dep_1")
    assert sent.body == body


@pytest.mark.parametrize("refused", [["--engine", "[8]"], ["--engine", "{"], ["--min-replicas", "-1"]])
def test_deploy_refuses_what_is_no_such_option(run: Run, script: Script, refused: list[str]) -> None:
    assert run("deploy", "mdl_1", *refused).exit_code == 1
    assert script.requests == []


def test_deploy_waits_until_the_model_answers(run: Run, script: Script) -> None:
    row = {"id": "dep_1", "model": "mdl_1", "status": "deploying"}
    script.on("POST", "/deployments", json_answer(row, 201))
    script.on("GET", "/deployments/dep_1", json_answer({**row, "status": "running"}))
    result = run("deploy", "mdl_1", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["status"] == "running"


def test_generate_streams_the_text(run: Run, script: Script) -> None:
    def piece(text: str, **changes: Any) -> tuple[None, dict[str, Any]]:
        return None, {"id": "g", "model": "mdl_1", "choices": [{"index": 0, "text": text}], **changes}

    usage = {"prompt_tokens": 2, "completion_tokens": 3}
    last = piece(" lazy()", usage=usage, timings={"ttft_ms": 12.0})
    script.on("POST", "/generate", event_stream(piece("def"), last, (None, "[DONE]")))
    result = run("generate", "x", "--max-tokens", "3", "--stop", "\n", "--seed", "7")
    assert result.stdout == "def lazy()\n"
    assert "2 + 3 tokens" in result.stderr
    body = script.requests[0].body
    assert (body["max_tokens"], body["stop"], body["seed"], body["stream"]) == (3, ["\n"], 7, True)


def test_status_of_nothing_fails(tmp_path: Path) -> None:
    result = CliRunner(env={"SWIFTKV_HOME": str(tmp_path)}).invoke(app, ["status", "--json"])
    assert result.exit_code == 1
    assert {part["state"] for part in json.loads(result.stdout)["parts"]} == {"stopped"}


def test_a_given_configuration_is_checked_here(run: Run, script: Script, spec: Path, tmp_path: Path) -> None:
    spec.write_text("name: tiny\nmodel: {name_or_path: org/model}\nswiftkv: {num_key_value_layers: 3}\n")
    config = tmp_path / "teacher.json"
    config.write_text(json.dumps(llama_config(4)))
    result = run("jobs", "validate", "-f", str(spec), "--config", str(config), "--json")
    assert json.loads(result.stdout)["num_kv_cache_layers"] == 4
    config.write_text(json.dumps(llama_config(3)))
    result = run("jobs", "validate", "-f", str(spec), "--config", str(config))
    assert result.exit_code != 0
    assert "1..2 are accepted" in result.stderr
    (tmp_path / "config.json").write_text("[]")
    result = run("jobs", "validate", "-f", str(spec), "--config", str(tmp_path))
    assert str(tmp_path) in result.stderr
    assert "is not a JSON object" in result.stderr
    assert not script.requests


def test_an_error_names_what_is_wrong_in_one_block(run: Run, script: Script, spec: Path, tmp_path: Path) -> None:
    entry = {"field": "model.name_or_path", "value": "nowhere", "message": "a directory or hub id is accepted"}
    script.on("POST", "/jobs", problem_answer(422, "The spec is refused.", errors=[entry]))
    refused = run("jobs", "submit", "-f", str(spec))
    assert (refused.exit_code, refused.stdout, "Traceback" in refused.stderr) == (1, "", False)
    assert "model.name_or_path: a directory or hub id is accepted" in refused.stderr
    for text in ("a: [1", "just text", "", "name: 2026-13-01", f"name: {'[' * 2000}{']' * 2000}"):
        (tmp_path / "bad.yaml").write_text(text)
        result = run("jobs", "submit", "-f", str(tmp_path / "bad.yaml"))
        assert (result.exit_code, "bad.yaml" in result.stderr) == (1, True)
    error = json.loads(run("jobs", "get", "job_9", "--json").stderr)["error"]
    assert (error["code"], error["status"]) == ("not_found", 404), "with --json, errors are JSON"
    for environment, command, named in (
        ({"SWIFTKV_URL": f"http://127.0.0.1:{free_port()}"}, ["jobs", "list"], "swiftkv up"),
        ({"SWIFTKV_PORT": "many"}, ["status"], "many"),
        ({"SWIFTKV_URL": "http://[::1"}, ["jobs", "list"], "base_url is 'http://[::1'"),
        ({"SWIFTKV_API_KEY": "ключ"}, ["jobs", "list"], "api_key has a line break"),
        ({}, ["recipes", "copy", "builtin-python-5m", str(tmp_path / "no" / "x.yaml")], "No such file or directory"),
        (
            {},
            ["keys", "create", "ann", "--scope", "admin", "--file", str(spec / "keys.json")],
            "spec.yaml: File exists",
        ),
    ):
        result = CliRunner(env={"SWIFTKV_HOME": str(tmp_path), **environment}).invoke(app, command)
        assert (result.exit_code, named in result.stderr) == (1, True)


def test_a_full_disk_is_an_error_and_no_traceback() -> None:
    command = [sys.executable, "-m", "swiftkv_platform.cli", "jobs", "schema"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "Error: cannot write the output: No space left on device\n"


def test_names_are_accepted_where_ids_are(run: Run, script: Script) -> None:
    script.on("GET", "/jobs", list_answer([job_row(id="job_2", name="other"), job_row()]))
    script.on("GET", "/jobs/job_1", json_answer(job_row()))
    script.on("GET", "/jobs/job_1/logs", Answer(200, b"one"))  # a last line without an end
    script.on("POST", "/jobs/job_1/cancel", json_answer(job_row("canceled")))
    script.on("GET", "/models/tiny", json_answer({"id": "mdl_1", "name": "tiny"}))
    script.on("DELETE", "/models/mdl_1", Answer(204, b""))
    script.on(
        "GET", "/deployments", list_answer([{"id": "dep_1", "model": "mdl_1", "alias": None, "status": "running"}])
    )
    script.on("DELETE", "/deployments/dep_1", Answer(204, b""))
    script.on("GET", "/v1/files", list_answer([{"id": "file-1", "filename": "rows.jsonl", "rows": 2}]))
    script.on("DELETE", "/v1/files/file-1", Answer(204, b""))
    for command in (
        ("jobs", "get", "tiny"),
        ("jobs", "logs", "tiny"),
        ("jobs", "cancel", "tiny"),
        ("models", "delete", "tiny"),
        ("deployments", "delete", "tiny"),
        ("deployments", "delete", "mdl_1"),
        ("files", "delete", "rows.jsonl"),
    ):
        result = run(*command)
        assert (result.exit_code, result.stdout == "one\n") == (0, "logs" in command), (command, result.output)


def test_a_name_of_no_job_or_several_is_refused(run: Run, script: Script) -> None:
    script.on("GET", "/jobs", list_answer([job_row(id="job_2"), job_row()]))
    several, none = run("jobs", "cancel", "tiny"), run("jobs", "cancel", "tinny")
    assert "the name of 2 jobs; use an id: job_2 (queued), job_1 (queued)" in several.stderr.replace("\n", " ")
    assert "there is no job of this id or name (did you mean tiny?)" in none.stderr.replace("\n", " ")
    assert (several.exit_code, none.exit_code) == (1, 1)


def test_the_list_of_models_has_their_kl(run: Run, script: Script) -> None:
    rows = [
        {"id": "mdl_1", "name": "tiny", "job_id": "job_1", "created_at": 1, "metrics": {"distilled": {"kl": 0.0625}}}
    ]
    rows.append({"id": "mdl_2", "name": "raw", "job_id": None, "created_at": 1, "metrics": {}})
    script.on("GET", "/models", list_answer(rows))
    lines = run("models", "list").output.splitlines()
    assert lines[0].split()[:4] == ["model", "name", "KL", "job"]
    assert lines[1].split()[:4] == ["mdl_1", "tiny", "0.0625", "job_1"]


def test_a_comparison_lists_flips_with_both_answers(run: Run, script: Script) -> None:
    task = {"task": "own", "metric": "contains", "num_rows": 40, "num_only_a": 2, "num_only_b": 0, "a": 0.9, "b": 0.8}
    task |= {"interval": [-0.2, 0.01], "num_worse": 5, "num_better": 1}
    both = {"a": "mdl_1", "b": "mdl_2", "figures": [], "differences": [], "spec_differences": [], "tasks": [task]}
    result = {"score": 1.0, "answer": "It is \n four"}
    row = {"id": "0f", "object": "changed_row", "change": "worse", "prompt": "2 + 2?", "expected": "four"}
    row |= {"a": result, "b": {"score": 0.0, "answer": "five " * 40}}
    script.on("GET", "/models/one/compare/two", json_answer(both))
    script.on("GET", "/models/one/compare/two/rows/own", list_answer([row]))
    printed = run("compare", "one", "two", "--rows", "1").stdout
    assert printed.startswith("a: mdl_1, b: mdl_2\n")
    assert "-0.2 to +0.01" in printed
    assert "own: 1 of 6 rows with different scores (not compared: 2 rows that only a has, 0 that only b has)" in printed
    [line] = [line for line in printed.splitlines() if line.startswith("0f")]
    assert "1 It is four" in line
    assert "0 five" in line
    assert line.rstrip().endswith("…")
    [asked] = script.sent("GET", "/models/one/compare/two/rows/own")
    assert asked.query["limit"] == "1"
    document = json.loads(run("compare", "one", "two", "--json").stdout)
    assert (document["tasks"], document["changed_rows"]) == ([task], {"own": [row]})
    assert "changed" not in run("compare", "one", "two", "--rows", "0").stdout
    refused = run("compare", "one", "two", "--task", "other")
    assert refused.exit_code == 1
    assert "--task is 'other', but only tasks with rows of both models can be compared: own" in " ".join(
        refused.output.split()
    )
    of_older_version = {"figures": [], "differences": [], "spec_differences": []}
    script.on("GET", "/models/one/compare/two", json_answer(of_older_version))
    assert "No evaluation task with rows of both models." in run("compare", "one", "two").stdout


@pytest.mark.parametrize(
    ("arguments", "field", "reason"),
    [
        (["jobs", "list", "--limit", "none"], "limit", "Invalid value for '--limit'"),
        (["jobs", "validate", "--file", "missing.yaml"], "file", "'missing.yaml' does not exist"),
        (["plan", "--typo"], None, "No such option: --typo"),
        (["evaluate"], "directory", "Missing argument 'DIR'"),
        (["nothing"], None, "No such command 'nothing'"),
    ],
)
def test_wrong_usage_is_no_unmet_gate_and_is_json_if_asked_for(
    run: Run, arguments: list[str], field: str | None, reason: str
) -> None:
    assert run(*arguments).exit_code == 1
    result = run(*arguments, "--json")
    error = json.loads(result.stderr)["error"]
    assert (result.exit_code, result.stdout, error["code"], error["field"]) == (1, "", "invalid_input", field)
    assert reason in error["message"]


@pytest.mark.parametrize("arguments", [["--typo"], [], ["jobs"]])
def test_wrong_usage_of_a_group_exits_with_1(run: Run, arguments: list[str]) -> None:
    assert run(*arguments).exit_code == 1


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("--steps", "training.max_steps"),
        ("--gpus", "resources.gpus_per_worker"),
        ("--num-key-value-layers", "swiftkv.num_key_value_layers"),
        ("--prefill-layers", "swiftkv.prefill_layers"),
        ("-g", "swiftkv.key_value_group_size"),
    ],
)
def test_distill_refuses_options_that_a_spec_file_would_hide(
    run: Run, spec: Path, tmp_path: Path, option: str, field: str
) -> None:
    result = run("distill", "-f", str(spec), "-o", str(tmp_path / "output"), option, "2")
    assert result.exit_code == 1
    assert f"needs --model; with --file, use --set {field}=VALUE instead" in result.stderr
    assert not (tmp_path / "output").exists()


def test_a_teacher_that_is_a_student_or_has_no_configuration_is_refused_before_ray_starts(
    run: Run, tmp_path: Path
) -> None:
    teacher, output = tmp_path / "teacher", tmp_path / "output"
    teacher.mkdir()
    spec = tmp_path / "spec.yaml"
    spec.write_text(f"name: tiny\nmodel: {{name_or_path: '{teacher}'}}\n")
    result = run("distill", "-f", str(spec), "-o", str(output))
    named = f"model.name_or_path is {str(teacher)!r}"
    assert f"{named}: its config.json cannot be read (No such file or directory)" in result.stderr
    (teacher / "config.json").write_text(json.dumps({**llama_config(4), "model_type": "llama_swiftkv"}))
    result = run("distill", "-f", str(spec), "-o", str(output))
    assert f"{named}, which is a SwiftKV student already; use the teacher that it was made from" in result.stderr
    assert not output.exists()


@pytest.mark.parametrize("command", ["plan", "serve"])
def test_commands_agree_on_a_directory_without_configuration(run: Run, tmp_path: Path, command: str) -> None:
    result = run(command, str(tmp_path), "--json")
    error = json.loads(result.stderr)["error"]
    assert (result.exit_code, error["code"], error["field"]) == (1, "model_error", "model")
    assert error["message"] == (
        f"model is {str(tmp_path)!r}: its config.json cannot be read (No such file or directory); "
        "a Hugging Face model directory is accepted"
    )


def test_a_binary_chat_template_is_an_error_and_no_traceback(run: Run, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_bytes(b"a\xff")
    result = run("serve", "builtin:python-5m", "--chat-template", str(template))
    assert result.exit_code == 1
    assert "which is not UTF-8 at byte 1; use a text file in UTF-8" in result.stderr
