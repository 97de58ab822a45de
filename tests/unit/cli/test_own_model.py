"""From a user's own model and file to an answer: `swiftkv distill --model`, `serve`, `recipes`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import openai
import pytest
import yaml

from swiftkv_platform.cli import distill
from swiftkv_platform.errors import DataError, QualityGateError, StorageError
from swiftkv_platform.specs import JobSpec
from tests.contract.serving.replicas import save_chat_model
from tests.support.rays import free_port
from tests.unit.cli.conftest import invoke as run

SWIFTKV = Path(sys.executable).parent / "swiftkv"


@contextmanager
def starting(directory: Path, port: int, *options: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Response]]:
    """Start to serve a model from `directory`; yields the process and its first answer about its health."""
    save_chat_model(directory / "student", 128, "{% for m in messages %}{{ m.content }}{% endfor %}")
    command = [SWIFTKV, "serve", "student", "--port", str(port), *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=directory, stdout=pipe, stderr=pipe, text=True) as server:
        while True:
            try:
                probe = httpx.get(f"http://127.0.0.1:{port}/health", timeout=60.0)
                break
            except httpx.ConnectError:
                assert server.poll() is None, "the server has ended"
                time.sleep(0.02)
        yield server, probe


@pytest.mark.slow("a process of its own, which loads a model")
def test_a_directory_is_served_until_ctrl_c(tmp_path: Path) -> None:
    port = free_port()
    with starting(tmp_path, port, "--max-num-seqs", "3", "--json") as (server, probe):
        assert server.stdout is not None
        assert (probe.status_code, probe.json()["code"]) == (503, "loading"), "it answers before it has loaded"
        assert httpx.head(f"http://127.0.0.1:{port}/health/").status_code == 503
        waiting = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=120.0)
        url = json.loads(server.stdout.readline())["url"]
        assert [model["id"] for model in waiting.json()["data"]] == ["student"]
        assert httpx.get(f"{url}/health").json()["status"] == "ok"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        (model,) = client.models.list().data
        messages = [{"role": "user", "content": "hi"}]
        answer = client.chat.completions.create(model=model.id, messages=messages, max_tokens=4)  # type: ignore[call-overload]
        assert (model.id, answer.usage.completion_tokens) == ("student", 4)
        generated = httpx.post(f"{url}/generate", json={"prompt": "hi", "max_tokens": 2}).json()
        assert generated["usage"]["completion_tokens"] == 2
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0


@pytest.mark.slow("a process of its own, which loads a model")
def test_ctrl_c_while_a_model_is_loading_ends_without_a_traceback(tmp_path: Path) -> None:
    with starting(tmp_path, free_port()) as (server, probe):
        assert probe.json()["code"] == "loading"
        server.send_signal(signal.SIGINT)
        _, errors = server.communicate(timeout=60)
    assert (server.returncode, "Traceback" in errors) == (0, False), errors


def test_what_cannot_be_served_is_said_before_it_is_loaded() -> None:
    for arguments, words in (
        (["serve", "nosuch"], "model is 'nosuch': no such file or directory here"),
        (["serve", "builtin:python-5m", "--dtype", "float8"], "dtype: Input should be"),
        (["serve", "builtin:python-5m", "--host", "192.0.2.1"], "use another --port"),
    ):
        result = run(*arguments)
        assert (result.exit_code, words in result.stderr) == (1, True), result.stderr


@pytest.mark.parametrize("name", ["./nosuch", "~nobody9/x", "https://example.org/x", "s3://Bad/x", "x" * 3000, "{}/b"])
def test_every_command_says_of_a_name_that_it_names_no_model_here(name: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").touch()
    name = name.format(tmp_path / "file.json")
    for command, *more in (["serve"], ["convert", tmp_path / "out"], ["plan"]):
        result = run(command, name, *more)
        said = result.stderr.replace("\n", " ")
        assert (result.exit_code, said.startswith(f"Error: model is {name[:60]!r}"[:-1])) == (1, True), said
        assert len(said) < 400


@pytest.mark.parametrize("name", ["nosuch", "nosuch.gguf", "nosuch.json", "./nosuch", "a/b/c", "/nosuch/model"])
def test_a_mistyped_path_of_a_model_is_not_asked_of_the_hub(name: str, tmp_path: Path) -> None:
    out, text = tmp_path / "out", ["--text", "builtin:python-stdlib"]
    for command in (
        ["serve", name],
        ["convert", name, out],
        ["export", name, out],
        ["export", tmp_path, out, "--base", name],
        ["plan", name],
        ["analyze", name, *text],
        ["distill", "--model", name, "--data", tmp_path, "-o", out],
    ):
        said = run(*command).stderr
        assert said.startswith("Error: "), said
        assert "no such" in said.lower(), said
        assert "hub " not in said.partition("no such")[0], said


@pytest.mark.parametrize("name", ["nosuch.jsonl", "./nosuch", "a/b/c"])
def test_a_mistyped_path_of_data_is_not_asked_of_the_hub(name: str, tmp_path: Path, tiny_teacher: Path) -> None:
    for command in (
        ["analyze", tiny_teacher, "--text", name],
        ["convert", tiny_teacher, tmp_path / "out", "--calibration", name],
        ["distill", "--model", tiny_teacher, "--data", name, "-o", tmp_path / "out"],
    ):
        said = run(*command).stderr.replace("\n", " ")
        assert "no such file or directory" in said, said


def test_no_option_takes_the_home_of_a_user_who_is_not_here(tmp_path: Path) -> None:
    result = run("convert", "builtin:python-5m", "~nobody9/student")
    assert (result.exit_code, "cannot expand ~ in a path: no home directory found" in result.stderr) == (1, True)


def test_a_spec_of_a_few_options(tmp_path: Path, tiny_teacher: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").write_text("{}\n")
    ran: list[JobSpec] = []

    def fake(spec: JobSpec, output: Path) -> Path:
        ran.append(spec)
        output.mkdir(parents=True, exist_ok=True)
        figures = {"perplexity": 1.0, "kl": 0.0, "top1_agreement": 1.0}
        (output / "evaluation.json").write_text(json.dumps({"distilled": figures, "teacher": figures}))
        return output

    monkeypatch.setattr(distill, "_run_job", fake)
    base = ["distill", "--model", tiny_teacher, "--data", "chats.jsonl", "-o", "my student"]
    result = run(*base, "-l", "2", "--set", "training.seed=3")
    assert result.exit_code == 0, result.output
    saved = JobSpec.model_validate(yaml.safe_load(Path("my student.yaml").read_text()))
    assert saved == ran[0]
    context = json.loads((tiny_teacher / "config.json").read_text())["max_position_embeddings"]
    assert (saved.name, saved.swiftkv.num_key_value_layers, saved.training.seed) == ("my-student", 2, 3)
    assert saved.data.max_length == min(context, 512)
    assert saved.data.sources[0].name_or_path == str(tmp_path / "chats.jsonl")

    assert run(*base, "-l", "2", "--set", "training.seed=3").exit_code == 0  # an equal spec
    refused = run(*base, "-l", "1")
    assert (refused.exit_code, "contains another spec" in refused.stderr) == (1, True)
    assert run("distill", "--file", "my student.yaml", "--set", "training.seed=4", "-o", "b").exit_code == 0
    assert ran[-1].training.seed == 4

    run(*base[:-1], "gpus", "--gpus", "2")
    assert (ran[-1].sharding.strategy, ran[-1].resources.gpus_per_worker) == ("fsdp2", 1)
    for wrong in (base[:3], ["distill", "--data", "x"], [*base[:-2], "-f", "my student.yaml"]):
        result = run(*wrong, "-o", "c")
        assert (result.exit_code, "--model together with --data" in result.stderr) == (1, True), result.output


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (QualityGateError("too far", field="evaluation.max_kl"), 2),
        (DataError("no such task"), 1),
        (StorageError("the disk is full"), 1),
        (MemoryError("8 GiB"), 1),
        (SystemExit(143), 143),
        (KeyboardInterrupt(), 130),
    ],
)
@pytest.mark.parametrize("has_model", [True, False])
def test_a_failed_run_says_what_is_kept(
    error: BaseException, exit_code: int, has_model: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_spec: JobSpec, output: Path, **_: object) -> Path:
        (output / "model").mkdir(parents=True) if has_model else output.mkdir()
        (output / "failure.json").write_text("{}")
        raise error

    monkeypatch.setattr("swiftkv_platform.local.training.run_job_locally", fail)
    (tmp_path / "spec.yaml").write_text("name: here\n")
    result = run("distill", "-f", tmp_path / "spec.yaml", "-o", tmp_path / "output")
    assert result.exit_code == exit_code
    kept = f"model is in {tmp_path / 'output' / 'model'}" if has_model else f"checkpoints are in {tmp_path / 'output'}"
    assert kept in result.stderr


def test_a_recipe_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    listed = run("recipes", "list").stdout
    assert "builtin-python-5m" in listed
    assert "8 (H100)   about 78 minutes on 8 H100 GPUs, an estimate" in listed
    assert run("recipes", "copy", "builtin-python-5m").exit_code == 0
    schema = Path("builtin-python-5m.yaml").read_text().partition("\n")[0].partition("$schema=")[2]
    assert json.loads(Path(urlsplit(schema).path).read_text())["title"] == "JobSpec"
    assert run("jobs", "validate", "-f", "builtin-python-5m.yaml").exit_code == 0
    assert "exists; use another FILE" in run("recipes", "copy", "builtin-python-5m").stderr
    assert "one of these is accepted" in run("recipes", "copy", "nosuch").stderr
    assert "use either --file" in run("jobs", "submit").stderr
