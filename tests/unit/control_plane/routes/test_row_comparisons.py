"""Comparison of two models row by row: flips in pages, intervals, and what a model's report may not lead to."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from swiftkv_platform.contract import row_results
from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.contract.row_results import ModeResult, RowResult, dump_rows
from swiftkv_platform.control_plane.models.routes import RowComparisons
from tests.support.records import make_job, make_model, store
from tests.unit.control_plane.routes.conftest import Server, refusal

pytestmark = pytest.mark.slow("starts an application for each test")


def make_rows(scores: dict[str, float]) -> list[RowResult]:
    return [
        RowResult(
            key=key,
            prompt=f"prompt {key}",
            expected="yes",
            teacher=ModeResult(score=1.0, answer="yes"),
            student=ModeResult(score=score, answer=f"said {score:g}"),
        )
        for key, score in scores.items()
    ]


def evaluate(server: Server, name: str, lost: str | None = None, **tasks: dict[str, float]) -> str:
    """Run a job whose tasks have these scores by row, all but those of `lost` stored; return its model."""
    files = {task: f"000-{task.replace('/', '-')}" for task in tasks}
    report = [
        {"task": task, "metric": "contains", "student": 0.5, "row_results": file, "higher_is_better": True}
        for task, file in files.items()
    ]
    job = server.succeed(name=name, report={"tasks": report})
    for task, scores in tasks.items():
        if task != lost:
            key = AttemptId(job["id"], 1).row_results_key(files[task])
            server.parts.objects.put_bytes(key, dump_rows(make_rows(scores))[0])
    model: str = job["distilled_model"]
    return model


def list_rows(server: Server, a: str, b: str, task: str = "own", **params: Any) -> Sequence[str]:
    page = server.get(f"/models/{a}/compare/{b}/rows/{task}", **params)
    return [row["id"] for row in page["data"]]


def test_flips_are_listed_in_pages(server: Server) -> None:
    a = evaluate(server, "a", own={f"{i:02}": float(i < 10) for i in range(20)} | {"only-a": 1.0})
    b = evaluate(server, "b", own={f"{i:02}": float(i % 2) for i in range(20)} | {"b1": 1.0, "b2": 0.0})
    [task] = server.get(f"/models/{a}/compare/{b}")["tasks"]
    assert {name: task[name] for name in ("task", "metric", "num_rows", "num_only_a", "num_only_b", "a", "b")} == {
        "task": "own",
        "metric": "contains",
        "num_rows": 20,
        "num_only_a": 1,
        "num_only_b": 2,
        "a": 0.5,
        "b": 0.5,
    }
    assert (task["num_worse"], task["num_better"]) == (5, 5)
    low, high = task["interval"]
    assert low < 0 < high
    page = server.get(f"/models/{a}/compare/{b}/rows/own", limit=4)
    assert page["data"][0] == {
        "id": "00",
        "object": "changed_row",
        "prompt": "prompt 00",
        "expected": "yes",
        "change": "worse",
        "a": {"score": 1.0, "answer": "said 1"},
        "b": {"score": 0.0, "answer": "said 0"},
    }
    assert (page["has_more"], page["last_id"]) == (True, "06")
    changed = ["00", "02", "04", "06", "08", "11", "13", "15", "17", "19"]
    assert list_rows(server, a, b) == changed
    assert list_rows(server, a, b, after="06", limit=4) == changed[4:8]
    assert list_rows(server, a, b, order="desc", limit=3) == changed[:-4:-1]
    assert list_rows(server, a, b, change="better") == changed[5:]
    assert list_rows(server, b, a, change="better") == changed[:5]
    assert list_rows(server, a, a) == []
    unknown = server.client.get(f"/models/{a}/compare/{b}/rows/own", params={"after": "lost"})
    assert (unknown.status_code, refusal(unknown)["field"]) == (422, "after")
    assert server.client.get(f"/models/{a}/compare/{b}/rows/own", params={"change": "same"}).status_code == 422


@pytest.mark.parametrize("swapped", [False, True])
def test_a_model_is_compared_with_its_parent_on_the_rows_of_its_own_job(server: Server, swapped: bool) -> None:
    parent = make_model(store(server.parts.jobs, make_job()))
    child = make_model(store(server.parts.jobs, make_job()))
    scores = {name: [{"task": "own", "metric": "contains", "row_results": name}] for name in ("0-own", "parent-0-own")}
    metrics = {"tasks": scores["0-own"], "parent_tasks": scores["parent-0-own"]}
    child = replace(child, metrics=metrics, lineage={"parent": {"name": parent.id}})
    for name, value in (("0-own", 1.0), ("parent-0-own", 0.0)):
        key = AttemptId(str(child.job_id), child.attempt).row_results_key(name)
        server.parts.objects.put_bytes(key, dump_rows(make_rows({"x": value, "y": 1.0}))[0])
    models = (child, parent) if swapped else (parent, child)
    [task] = RowComparisons(server.parts.objects, *models).list_tasks()
    expected = (1.0, 0.5, 1, 0) if swapped else (0.5, 1.0, 0, 1)
    assert (task.a, task.b, task.num_worse, task.num_better) == expected
    stranger = replace(parent, id="mdl_other")
    assert RowComparisons(server.parts.objects, stranger, child).list_tasks() == []


def test_names_and_aliases_stand_for_models_and_tasks_may_have_slashes(server: Server) -> None:
    evaluate(server, "first", **{"a/b": {"x": 1.0}})
    evaluate(server, "second", **{"a/b": {"x": 0.0}})
    assert [task["task"] for task in server.get("/models/first/compare/second")["tasks"]] == ["a/b"]
    assert list_rows(server, "first", "second", "a/b") == list_rows(server, "first", "second", "a%2Fb") == ["x"]


def test_tasks_without_rows_of_both_models_are_left_out(server: Server) -> None:
    a = evaluate(server, "a", **{key: {"x": 1.0} for key in ("own", "missing", "damaged", "only")})
    b = evaluate(server, "b", lost="missing", **{key: {"x": 0.0} for key in ("own", "missing", "damaged")})
    job = server.get(f"/models/{b}")["job_id"]
    server.parts.objects.put_bytes(AttemptId(job, 1).row_results_key("000-damaged"), b'{"key": "of another version"}\n')
    assert [task["task"] for task in server.get(f"/models/{a}/compare/{b}")["tasks"]] == ["own"]
    for task in ("missing", "damaged", "only", "never"):
        missing = server.client.get(f"/models/{a}/compare/{b}/rows/{task}")
        assert refusal(missing, 404)["field"] == "task"


def test_a_comparison_reads_a_bounded_number_of_bytes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = {f"t{i}": {f"{j}": float(j % 2) for j in range(10)} for i in range(4)}
    a, b = (evaluate(server, name, **tasks) for name in ("a", "b"))
    size = len(dump_rows(make_rows(tasks["t0"]))[0])
    module = "swiftkv_platform.control_plane.models.routes"
    monkeypatch.setattr(f"{module}.MAX_COMPARED_BYTES", 2 * size)
    assert [task["task"] for task in server.get(f"/models/{a}/compare/{b}")["tasks"]] == ["t0", "t1"]
    assert list_rows(server, a, b, "t3") == [], "a task alone is read"
    monkeypatch.setattr(f"{module}.MAX_FILE_BYTES", size - 1)
    assert server.get(f"/models/{a}/compare/{b}")["tasks"] == []
    assert size < row_results.MAX_FILE_BYTES


@pytest.mark.parametrize("name", ["../../../../victim/attempts/1/rows/000-own", "..", "", 7, "a" * 300])
def test_a_report_leads_to_no_other_objects(server: Server, name: Any) -> None:
    """Workers, which run a tenant's code, write the report."""
    victim = evaluate(server, "victim", own={"secret": 0.0})
    job = server.get(f"/models/{victim}")["job_id"]
    server.parts.objects.put_bytes("jobs/victim/attempts/1/rows/000-own.jsonl", b"")
    path = name.replace("victim", job) if isinstance(name, str) else name
    report = {"tasks": [{"task": "own", "metric": "contains", "row_results": path}]}
    hostile = server.succeed(name="hostile", report=report)["distilled_model"]
    assert server.get(f"/models/{hostile}/compare/{hostile}")["tasks"] == []
    assert server.client.get(f"/models/{hostile}/compare/{hostile}/rows/own").status_code == 404
