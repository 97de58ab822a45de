"""`swiftkv evaluate` on directories, in this process."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from swiftkv_platform.contract.attempts import MANIFEST, Manifest
from swiftkv_platform.contract.row_results import load_rows
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.jobs.worker.measure import evaluate_directory
from swiftkv_platform.model import convert, export
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.job import resolve_model_defaults
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.support.tiny_models import random_teacher, save_teacher
from tests.unit.cli.conftest import invoke


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "functions.jsonl"
    path.write_text("".join(json.dumps({"text": f"def add_{i}(x):\n    return x + {i}\n"}) + "\n" for i in range(60)))
    return path


def rows_of(corpus: Path, validation_fraction: float = 0.2) -> dict[str, Any]:
    """Section `data` of a job on the corpus."""
    source = {"name_or_path": str(corpus)}
    return {"sources": [source], "max_length": 96, "validation_fraction": validation_fraction}


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("student")
    convert(random_teacher(), num_key_value_layers=3, key_value_group_size=2, early_exit=True).save_pretrained(
        directory
    )
    byte_tokenizer().save_pretrained(directory)
    return directory


run = partial(invoke, "evaluate")


@pytest.mark.slow("evaluates, prefill cost and plots included")
def test_a_student_is_measured_against_its_teacher_mode(student: Path, corpus: Path, tmp_path: Path) -> None:
    task = {
        "task": "add",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": corpus.name}},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "def",
        "doc_to_target": "{{text[4:9]}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "add.yaml").write_text(yaml.safe_dump(task))
    page = tmp_path / "report.html"
    arguments = ["--data", corpus, "--tasks", tmp_path / "add.yaml", "--task-data", corpus.parent, "--task-limit", 5]

    result = run(student, *arguments, "--html", page, "--json")

    assert result.exit_code == 2, "five samples cannot decide about one point"
    report = json.loads(result.stdout)
    assert report["distilled"]["kl"] > 0
    assert (report["rewired"], report["tokens_trained"]) == (None, None)
    assert report["num_positions"] > 60 * 20, "all of the text is measured"
    assert len(report["exit_head"]) == 20
    assert report["tasks"][0]["num_samples"] == 5
    (gate,) = report["gates"]
    assert (gate["field"], gate["outcome"]) == ("evaluation.max_drop", "undecided")
    assert gate["samples_needed"] > 5
    assert gate["interval"] == report["tasks"][0]["drop_interval"]
    assert "<svg" in page.read_text()


def _artifact(
    student: Path,
    directory: Path,
    data: dict[str, Any],
    lineage: dict[str, Any] | None = None,
    evaluation: dict[str, Any] | None = None,
) -> Path:
    """Lay the student out as a job's artifact."""
    directory.mkdir()
    for file in student.iterdir():
        (directory / file.name).hardlink_to(file)
    spec = {"name": "n", "data": data, "evaluation": {"max_kl": 1e-9, "continuations": 0, **(evaluation or {})}}
    manifest = Manifest(kind="artifact", files={}, created_at=0.0, lineage={"spec": spec, **(lineage or {})})
    (directory / MANIFEST).write_text(manifest.model_dump_json())
    return directory


def test_an_artifact_brings_its_text_and_limits(student: Path, corpus: Path, tmp_path: Path) -> None:
    result = run(_artifact(student, tmp_path / "artifact", rows_of(corpus)))

    assert result.exit_code == 2
    assert "evaluation.max_kl 1e-09:" in result.output
    assert "failed" in result.output
    assert "perplexity" in result.output
    assert "continuations" not in result.output


@pytest.mark.slow("evaluates twice")
def test_own_rows_are_measured_and_kept(student: Path, corpus: Path, tmp_path: Path) -> None:
    """A list of rows replaces the job's, of which uploaded files cannot be read here and are named."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i} + 1 =", "completion": str(i + 1)}) + "\n" for i in range(4)))
    source = {"name_or_path": str(rows)}
    listed = tmp_path / "rows.yaml"
    listed.write_text(yaml.safe_dump([{"name": "sums", "metric": "numeric", "max_tokens": 4, "source": source}]))
    uploaded = {"name": "uploaded", "metric": "contains", "source": {"name_or_path": f"file-{'0' * 26}"}}
    artifact = _artifact(student, tmp_path / "artifact", rows_of(corpus), evaluation={"rows": [uploaded]})

    own = json.loads(run(artifact, "--rows", listed, "--row-results", tmp_path / "results", "--json").stdout)
    of_job = json.loads(run(artifact, "--json").stdout)

    [task] = own["tasks"]
    assert (task["task"], task["metric"], task["num_samples"]) == ("sums", "numeric", 4)
    results = load_rows((tmp_path / "results" / f"{task['row_results']}.jsonl").read_bytes())
    assert [row.prompt for row in results] == [f"{i} + 1 =" for i in range(4)]
    assert own["tasks_left_out"] == []
    assert (of_job["tasks"], of_job["tasks_left_out"]) == ([], ["uploaded"])
    for text, message in (
        ("rows: [}", "--rows is .* which is not YAML"),
        ("- {name: a, metric: contains}", "source"),
        ("- {name: a, metric: contains, source: {name_or_path: nowhere.jsonl}}", "nowhere.jsonl.*no such file"),
    ):
        listed.write_text(text)
        result = run(artifact, "--rows", listed)
        assert result.exit_code in (1, 2)
        assert re.search(message, " ".join(result.output.split())), result.output


def test_rows_are_no_longer_than_the_models_context(student: Path, corpus: Path, tmp_path: Path) -> None:
    """Rows are limited to the model's context, as in a job, although `max_length` is 8,192 by default."""
    config = json.loads((student / "config.json").read_text())
    whole = _artifact(student, tmp_path / "whole", {"sources": [{"name_or_path": str(corpus)}]})
    fitting = {"sources": [{"name_or_path": str(corpus)}], "max_length": config["max_position_embeddings"]}
    figures = [
        json.loads(run(path, "--json").output)["distilled"]
        for path in (whole, _artifact(student, tmp_path / "fitting", fitting))
    ]
    assert figures[0] == figures[1]


@pytest.mark.slow("measures three times")
def test_a_student_without_its_teacher_is_measured_against_one_that_is_named(
    student: Path, corpus: Path, tmp_path: Path
) -> None:
    """Such a student, left by `trainable: all`, has changed layers < l; its job's lineage names the teacher."""
    save_teacher(tmp_path / "teacher")
    save_teacher(tmp_path / "other", seed=1)
    trained = convert(random_teacher(), num_key_value_layers=3, key_value_group_size=2, early_exit=True)
    with torch.no_grad():
        trained.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    export(trained, tmp_path / "exported", teacher=False)
    byte_tokenizer().save_pretrained(tmp_path / "exported")
    lineage = {"teacher": str(tmp_path / "teacher")}
    artifact = _artifact(tmp_path / "exported", tmp_path / "artifact", rows_of(corpus), lineage)
    few = tmp_path / "few.jsonl"
    few.write_text("".join(corpus.read_text().splitlines(keepends=True)[:12]))
    arguments = ["--data", few, "--needle-length", 128, "--needle-samples", 1, "--json"]

    own = json.loads(run(student, *arguments).stdout)
    named = json.loads(run(tmp_path / "exported", "--teacher", tmp_path / "teacher", *arguments).stdout)
    of_job = json.loads(run(artifact, *arguments).stdout)

    for report in (named, of_job):
        assert report["teacher"] == own["teacher"]
        assert report["distilled"]["kl"] > own["distilled"]["kl"]
        assert report["tasks"][0]["teacher"] == own["tasks"][0]["teacher"]
    for named_teacher, message in (
        ((), "does not contain its teacher"),
        (("--teacher", tmp_path / "other"), "which the student was not made from: layers or embeddings differ"),
    ):
        result = run(tmp_path / "exported", *named_teacher, "--data", corpus)
        assert result.exit_code == 1
        assert message in " ".join(result.output.split())


def test_what_cannot_be_measured_is_said(student: Path, corpus: Path, tmp_path: Path) -> None:
    save_teacher(tmp_path / "dense")
    (tmp_path / "empty").mkdir()
    source = {"name_or_path": str(corpus), "complete": {}}
    artifact = _artifact(student, tmp_path / "artifact", {"sources": [source]})
    for directory, arguments, message in (
        (student, (), "set --data to the evaluation text"),
        (artifact, (), "set --data to the evaluation text"),  # a job does not keep the texts that its teacher wrote
        (student, ("--data", "/nowhere.txt"), "/nowhere.txt"),
        (tmp_path / "dense", ("--data", corpus), "a llama model, not a student"),
        (tmp_path / "empty", ("--data", corpus), "there is no config.json"),
    ):
        result = run(directory, *arguments)
        assert (result.exit_code, message in " ".join(result.output.split())) == (1, True), result.output


def test_rows_that_steered_the_training_are_not_measured(student: Path, corpus: Path, tmp_path: Path) -> None:
    data = rows_of(corpus, 0.5)
    spec = JobSpec.model_validate({"name": "n", "data": data})
    (tmp_path / "rows").mkdir()
    prepared = prepare_data(
        resolve_model_defaults(spec, context_length=256, hidden_size=32).data,
        byte_tokenizer(),
        tmp_path / "rows",
        seed=spec.training.seed,
        with_steering=True,
    )
    assert len(prepared.steering.samples) > 0

    steps: list[str] = []
    report, _ = evaluate_directory(_artifact(student, tmp_path / "artifact", data), progress=steps.append)

    assert report.num_positions == prepared.statistics.held_out.counted_tokens
    assert any(step.startswith("Measuring distilled") for step in steps)
