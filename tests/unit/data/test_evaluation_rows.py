"""Own rows to evaluate: prompts and expected answers in every format, and rows that lack what a metric needs."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from swiftkv_platform.data.checks import check_row_sources
from swiftkv_platform.data.evaluation_rows import EvaluationRow, read_evaluation_rows
from swiftkv_platform.data.formats import Conversation
from swiftkv_platform.errors import DataError, InvalidInputError
from swiftkv_platform.jobs.worker.setup import ObjectStoreFiles
from swiftkv_platform.sources import Access
from swiftkv_platform.specs import EvaluationSpec, JobSpec, RowTaskSpec
from swiftkv_platform.storage.object_store import open_store
from tests.support.captured_traffic import SOURCE, Traffic

ASK = {"role": "user", "content": "2 + 2?"}
SAY = {"role": "assistant", "content": "4"}
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def task(path: str, metric: str = "exact_match", **more: Any) -> RowTaskSpec:
    return RowTaskSpec.model_validate({"name": "own", "source": {"name_or_path": path}, "metric": metric, **more})


def read(path: str, metric: str = "exact_match", **more: Any) -> list[EvaluationRow]:
    return list(read_evaluation_rows(task(path, metric, **more), 2, remote=None))


def test_prompts_and_answers_of_every_format(tmp_path: Path) -> None:
    rows = [
        {"messages": [ASK, SAY]},
        {"prompt": "2 + 2?", "completion": "4"},
        {"instruction": "2 + 2?", "output": "4"},
        {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]},
    ]
    found = read(write(tmp_path / "rows.jsonl", *rows))
    assert {(str(row.prompt), row.expected) for row in found} == {(str(Conversation([ASK])), "4")}
    assert len({row.key for row in found}) == 1, "the key is that of the prompt"
    talk = [{"role": "system", "content": "Be brief."}, ASK, SAY, {"role": "user", "content": "Sure?"}, SAY]
    [long] = read(write(tmp_path / "talk.jsonl", {"messages": talk, "tools": [{"name": "add"}]}))
    assert isinstance(long.prompt, Conversation)
    assert [message["content"] for message in long.prompt.messages] == ["Be brief.", "2 + 2?", "4", "Sure?"]
    assert long.prompt.tools
    assert long.key != found[0].key


def test_a_column_may_have_the_answer(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,total,completion\nsum?,12,no\nall?,7.5,no\n")
    assert [row.expected for row in read(str(tmp_path / "rows.csv"), "numeric", answer_column="total")] == ["12", "7.5"]
    numbers = write(tmp_path / "rows.jsonl", {"text": "Two and two make", "n": 4}, {"text": "One half is", "n": 0.5})
    assert [(row.prompt, row.expected) for row in read(numbers, "numeric", answer_column="n")] == [
        ("Two and two make", "4"),
        ("One half is", "0.5"),
    ]
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"prompt": ["a", "b"], "other": [1, 2], "gold": ["x", "y"]}), tmp_path / "rows.parquet")
    assert [row.expected for row in read(str(tmp_path / "rows.parquet"), answer_column="gold")] == ["x", "y"]


def test_likelihood_needs_no_answer_and_takes_calls(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"messages": [ASK]}, {"messages": [ASK, CALL]}, {"prompt": "2 + 2?"})
    alone, called, prompt = read(path, "likelihood")
    assert (alone.answer, prompt.answer) == (None, None)
    assert called.expected == '[{"name": "add", "arguments": {"a": 2}}]'
    assert alone.key == called.key == prompt.key


def test_captured_requests_have_their_answers_and_may_lack_what_a_metric_needs(tmp_path: Path) -> None:
    traffic = Traffic(open_store(str(tmp_path / "store")))
    traffic.chat("2 + 2?", "4")
    traffic.text("2 + 3 =", " 5")
    traffic.chat("A poem?", "A rose.")
    traffic.chat("2 + 2?", "4", "And 1?", "It is 5.")
    source = {"name_or_path": SOURCE, "until": "2024-10-05"}
    spec = RowTaskSpec.model_validate({"name": "own", "source": source, "metric": "numeric"})
    rows = read_evaluation_rows(spec, 0, remote=ObjectStoreFiles(tmp_path / "workspace"), access=traffic.access)
    found = [(row.prompt if isinstance(row.prompt, str) else row.prompt.messages, row.expected) for row in rows]
    assert found == [("2 + 3 =", " 5"), ([ASK, SAY, {"role": "user", "content": "And 1?"}], "It is 5.")]


def test_the_same_rows_are_drawn_for_all_jobs(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", *({"prompt": str(i), "completion": "a"} for i in range(50)))
    source = {"name_or_path": path, "sample_count": 5}
    first, second = (read(path, source=source) for _ in range(2))
    assert [row.key for row in first] == [row.key for row in second]
    assert len(first) == 5


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"messages": [ASK]}, {}, "has no answer, which metric exact_match needs; .*answer_column"),
        ({"text": "alone"}, {}, "has no answer, which metric exact_match needs"),
        ({"prompt": "a", "completion": " "}, {}, "the answer in the last message is empty; fill it"),
        ({"prompt": "", "completion": "a"}, {}, "its prompt or its answer is empty"),
        ({"messages": [SAY]}, {}, "no message before it"),
        ({"messages": [ASK, CALL]}, {}, "calls a tool, which metric exact_match cannot score; use likelihood"),
        ({"prompt": "a"}, {"answer_column": "gold"}, "the answer in column gold is None; .*change answer_column"),
        ({"prompt": "a", "gold": None}, {"answer_column": "gold"}, "column gold is None"),
        ({"prompt": "a", "gold": True}, {"answer_column": "gold"}, "column gold is True"),
        ({"prompt": "a", "gold": ["b"]}, {"answer_column": "gold"}, r"column gold is \['b'\]"),
        ({"prompt": "a", "completion": "none"}, {"metric": "numeric"}, "is 'none', which has no number"),
        ({"prompt": "a", "completion": "NaN"}, {"metric": "numeric"}, "has no number"),
        (
            {"prompt": "a", "completion": "c"},
            {"metric": "classification", "labels": ["a", "b"]},
            r"is 'c', none of the labels \(a, b\); add it to labels",
        ),
        ({"prompt": "a"}, {"metric": "json_schema", "json_schema_column": "s"}, "column s has no schema; fill in"),
        ({"prompt": "a", "s": "{"}, {"metric": "json_schema", "json_schema_column": "s"}, "s is .*JSON"),
        ({"prompt": "a", "s": {"type": 1}}, {"metric": "json_schema", "json_schema_column": "s"}, "not valid at type"),
        ({"prompt": "a", "s": [1]}, {"metric": "json_schema", "json_schema_column": "s"}, "an object with a JSON"),
        ({"prompt": "\ud800", "completion": "a"}, {}, "half of a surrogate pair"),
    ],
)
def test_a_row_that_lacks_something_is_named(
    row: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "rows.jsonl", row)
    with pytest.raises(DataError, match=message) as caught:
        read(path, **settings)
    assert str(caught.value).startswith(f"evaluation.rows[2].source: {path}, line 1")
    assert caught.value.field == "evaluation.rows[2].source"


def test_a_source_without_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n")
    with pytest.raises(DataError, match="has no rows; add rows, or leave out the task"):
        read(str(tmp_path / "rows.jsonl"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metric": "numeric", "ignore_case": True}, "ignore_case is set, but metric 'numeric' does not use it"),
        ({"metric": "exact_match", "labels": ["a", "b"]}, "labels is set.*it is for classification"),
        ({"metric": "classification", "max_tokens": 5, "labels": ["a", "b"]}, "max_tokens is set"),
        ({"metric": "classification"}, "labels is empty; use two or more different labels"),
        ({"metric": "classification", "labels": ["a", "a"]}, "labels is a, a"),
        ({"metric": "classification", "labels": ["a", ""]}, "at least 1 character"),
        ({"metric": "classification", "labels": ["a", " a "]}, "labels is a,  a "),
        ({"metric": "classification", "labels": ["a", " "]}, "two or more different labels"),
        ({"metric": "json_schema"}, "needs either json_schema or json_schema_column, and neither is set"),
        ({"metric": "json_schema", "json_schema": {}, "json_schema_column": "s"}, "and both are set"),
        ({"metric": "numeric", "absolute_tolerance": -1}, "0 to 1e\\+30 is accepted"),
        ({"metric": "bleu"}, "'exact_match', 'contains'"),
        ({"metric": "contains", "name": "../up"}, "match pattern"),
        ({"metric": "contains", "source": {"name_or_path": "a.jsonl", "weight": 2.0}}, "source.weight is 2"),
        ({"metric": "contains", "source": {"name_or_path": "a.jsonl", "complete": {}}}, "source.complete is set"),
        ({"metric": "json_schema", "json_schema": {"enum": ["a\0"]}}, "NUL"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        task("a.jsonl", **settings)


def test_names_of_tasks_are_unique() -> None:
    own = task("a.jsonl")
    for rows, tasks, name in (
        ((own, own), (), "own"),
        ((own,), ("own",), "own"),
        ((own.model_copy(update={"name": "winogrande"}),), ("paper",), "winogrande"),
        ((own.model_copy(update={"name": "needle_12"}),), (), "needle_12"),
    ):
        with pytest.raises(ValidationError, match=f"name is '{name}', the name of another task"):
            EvaluationSpec(rows=rows, tasks=tasks)


def make_spec(path: str) -> JobSpec:
    return JobSpec(name="job", evaluation=EvaluationSpec(rows=(task(path),)))


def test_a_tenant_reads_only_its_own_rows(tmp_path: Path) -> None:
    """The rules of training data apply to rows to evaluate."""
    own, other = tmp_path / "own", tmp_path / "other"
    own.mkdir()
    other.mkdir()
    access = Access(roots=(str(own),), files={})
    (own / "link.jsonl").symlink_to(write(other / "rows.jsonl", {"prompt": "a", "completion": "b"}))
    access.check_spec(make_spec(str(own / "rows.jsonl")))
    for name in (str(other / "rows.jsonl"), "s3://other/rows.jsonl", "file-01J00000000000000000000000"):
        with pytest.raises(InvalidInputError) as caught:
            access.check_spec(make_spec(name))
        assert caught.value.field == "evaluation.rows[0].source.name_or_path"
    with pytest.raises(InvalidInputError, match="link"):
        list(read_evaluation_rows(task(str(own / "link.jsonl")), 0, remote=None, access=access))


def test_sources_and_schemas_are_checked_when_a_job_is_submitted(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.jsonl", {"prompt": "a"})
    check_row_sources([task(path, answer_column="gold")])
    check_row_sources([task(path, "likelihood")])
    with pytest.raises(DataError, match=r"these are accepted: .*prompt") as caught:
        check_row_sources([task(path, "likelihood"), task(path)])
    assert caught.value.field == "evaluation.rows[1].source.name_or_path"
    with pytest.raises(DataError, match="no such file"):
        check_row_sources([task(str(tmp_path / "lost.jsonl"))])
    with pytest.raises(DataError, match=r"evaluation.rows\[0\].json_schema: the schema refers to 'http://a'"):
        check_row_sources([task(path, "json_schema", json_schema={"$ref": "http://a"})])
