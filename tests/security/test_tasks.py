"""A tenant's tasks are names of the harness's own index or built-in ones: no file of its own is opened or rendered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.errors import InvalidInputError, SwiftKVError
from swiftkv_platform.evaluation.harness.run import run_tasks
from swiftkv_platform.evaluation.harness.tasks import resolve_tasks
from swiftkv_platform.model import convert
from swiftkv_platform.sources import SourceRules
from swiftkv_platform.specs import EvaluationSpec, JobSpec
from tests.fakes.tokenizers import byte_tokenizer
from tests.security.hostile_sources import Stage, ssti, write_task

TENANT = "acme"


@pytest.fixture
def stage(tmp_path: Path, tiny_teacher: Path) -> Stage:
    return Stage.build(tmp_path, "http://127.0.0.1:1", tiny_teacher)


def job(task: str | dict[str, Any]) -> JobSpec:
    return JobSpec.model_validate({"name": "t", "evaluation": {"tasks": [task]}})


def accept(stage: Stage, spec: JobSpec) -> None:
    SourceRules((str(stage.root),)).access(TENANT).check(spec)


def answer(stage: Stage, spec: JobSpec) -> None:
    """Run the tasks of a spec as a worker does, whoever accepted it."""
    student = convert(stage.teacher, num_key_value_layers=3)
    run_tasks(
        student, byte_tokenizer(), resolve_tasks(spec.evaluation.tasks), EvaluationSpec(task_batch_size=1, task_limit=1)
    )


@pytest.mark.parametrize("where", ["absolute", "relative", "home"])
def test_a_file_of_the_job_is_no_task(stage: Stage, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    monkeypatch.chdir(stage.root)
    monkeypatch.setenv("HOME", str(stage.root))
    for name in ("notes.txt", "config.json", "task", "task.YAML", "task.yaml"):
        file = write_task(stage.root / name, stage)
        named = {"absolute": str(file), "relative": f"./{name}", "home": f"~/{name}"}[where]
        with pytest.raises(InvalidInputError) as caught:
            accept(stage, job(named))
        assert caught.value.field == "evaluation.tasks[0]"


def test_plain_names_of_the_harness_are_accepted_alone(stage: Stage) -> None:
    for name in ("gsm8k", "mmlu_llama", "egymmlu_arabic_language_(general)", "paper"):
        accept(stage, job({"name": name, "num_fewshot": 0}))
    for name in ("a/b", "..", "../task", "task\\x", "s3://bucket/acme/task", "*", " gsm8k", "-n"):
        with pytest.raises(InvalidInputError) as caught:
            accept(stage, job(name))
        assert caught.value.field == "evaluation.tasks[0]"


@pytest.mark.slow  # the harness takes seconds to import and to read its index
def test_a_worker_opens_no_file_that_is_called_like_a_task(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(stage.root)
    for name in ("innocent", "teacher"):
        write_task(stage.root / name, stage)
        accept(stage, job(name))  # the name alone is plain
        with pytest.raises(SwiftKVError, match="no task of that name") as caught:
            answer(stage, job(name))
        assert caught.value.field == "evaluation.tasks"
    assert not stage.marker.exists(), "its code has run"


@pytest.mark.slow  # as above
def test_templates_of_the_harness_are_rendered_in_a_sandbox(stage: Stage) -> None:
    """Templates of a task's own file, where the operator lets such a file run."""
    file = write_task(stage.root / "task.yaml", stage)
    text = "".join(line for line in file.read_text().splitlines(keepends=True) if "!function" not in line)
    file.write_text(text)
    assert ssti(stage.marker) in text
    with pytest.raises(SwiftKVError) as caught:
        answer(stage, job(str(file)))
    assert not stage.marker.exists(), "its template has run a command"
    assert "unsafe" in caught.value.message


@pytest.mark.slow  # as above
def test_tasks_that_run_generated_code_are_the_operators_to_allow() -> None:
    for name in ("humaneval", "mbpp_plus", "cruxeval_input_cot"):
        with pytest.raises(InvalidInputError, match="SWIFTKV_ALLOW_CODE_TASKS") as caught:
            resolve_tasks([name], access=SourceRules(()).access(TENANT))
        assert caught.value.value == name
        [task] = resolve_tasks([name], access=SourceRules((), code_tasks=True).access(TENANT))
        assert task.runs_code


@pytest.mark.slow  # as above
def test_a_group_runs_code_if_one_of_its_tasks_does() -> None:
    from swiftkv_platform.evaluation.harness.tasks import task_manager

    index, longproc = task_manager(True).task_index, "longproc_countdown_2k"
    tags = [name for name, entry in index.items() if "humaneval" in entry.tags or "mbpp" in entry.tags][:1]
    groups = [name for name, entry in index.items() if entry.cfg and longproc in str(entry.cfg.get("task"))]
    found = [name for name in (*tags, *groups) if name != longproc]
    assert found, "the harness has a group with such a task"
    for name in found:
        with pytest.raises(InvalidInputError, match="SWIFTKV_ALLOW_CODE_TASKS"):
            resolve_tasks([name])
    assert not any(task.runs_code for task in resolve_tasks(["gsm8k", "mmlu"]))
