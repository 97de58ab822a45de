"""Faults of data, and how the refusal names file, place and field."""

from __future__ import annotations

from pathlib import Path

import datasets
import huggingface_hub
import numpy as np
import pytest

from swiftkv_platform.errors import DataError, StorageError
from tests.training_text import CHAT, NUMBERED, TALK, Write, prepare

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.parametrize(
    ("content", "name", "message", "field"),
    [
        ('{"text": "a"}\n{"text": "b"\n', "bad.jsonl", "bad.jsonl, line 2, column 13 is not JSON", "name_or_path"),
        ('[{"text": "a"},\n {"text" "b"}]', "bad.json", "bad.json, line 2, column 10 is not JSON", "name_or_path"),
        (
            '{"text": "a"}\n{"text": "é"}\n'.encode("latin-1"),
            "latin.jsonl",
            "latin.jsonl, line 2, byte 10",
            "name_or_path",
        ),
        ("é".encode("latin-1"), "latin.txt", "latin.txt, line 1, byte 0 is not UTF-8", "name_or_path"),
        ("", "empty.jsonl", "holds no rows", "name_or_path"),
        ("[]", "empty.json", "holds no rows", "name_or_path"),
        ("rubbish", "rubbish.parquet", "rubbish.parquet cannot be read as parquet", "name_or_path"),
        ("a,b", "table.csv", "not a readable file; .jsonl, .json, .parquet", "name_or_path"),
        ('{"body": "a", "title": "b"}', "columns.jsonl", "has the columns body, title", "format"),
        ('{"text": "a"}\n{"text": 3}\n', "mixed.jsonl", "line 2, read as text: text is 3", ""),
    ],
)
def test_unreadable_files_are_named_with_the_place(
    write: Write, content: str | bytes, name: str, message: str, field: str
) -> None:
    path = write(content, name)
    with pytest.raises(DataError) as caught:
        prepare(path)
    assert message in caught.value.message
    assert caught.value.field == ".".join(["data.sources[0]", *filter(None, [field])])
    assert caught.value.value


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/nowhere/at/all", "no such file or directory"),
        ("./rows.jsonl", "no such file or directory"),
        (
            "builtin:ruby",
            "the built-in data sets are builtin:python-stdlib, builtin:chat-prompts, builtin:recall-prompts, "
            "builtin:long-recall-prompts",
        ),
        ("builtin:chat-prompts", "without complete: its rows are requests, which the teacher answers"),
        ("builtin:recall-prompts", "without complete: its rows are requests, which the teacher answers"),
    ],
)
def test_missing_sources_are_named(source: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        prepare(source)
    assert (caught.value.field, caught.value.value) == ("data.sources[0].name_or_path", source)


def test_a_hub_that_does_not_answer_is_no_fault_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match="no such path here, and the hub does not answer") as caught:
        prepare("nobody/nothing")
    assert (caught.value.field, caught.value.value) == ("data.sources[0].name_or_path", "nobody/nothing")


def test_an_empty_directory_lists_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a directory without readable files; \.jsonl"):
        prepare(str(tmp_path))


def test_another_split_of_the_standard_library_is_refused() -> None:
    with pytest.raises(DataError, match="offers 'train'") as caught:
        prepare({"name_or_path": "builtin:python-stdlib", "split": "test"})
    assert caught.value.field == "data.sources[0].split"


def test_the_second_source_is_named_by_its_index(write: Write) -> None:
    with pytest.raises(DataError) as caught:
        prepare(write(NUMBERED), "/nowhere")
    assert caught.value.field == "data.sources[1].name_or_path"


def test_rows_the_template_refuses_are_named_by_their_number_in_the_file(write: Write) -> None:
    refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}hello"
    rows = [{"messages": TALK}] * 20 + [{"messages": TALK[1:]}]
    source = {"name_or_path": write(rows), "sample_count": 20}
    seed = next(s for s in range(50) if 20 in np.random.default_rng((s, 0)).choice(21, size=20, replace=False))
    with pytest.raises(DataError, match=r"line 21, read as messages: .*user first"):
        prepare(source, template=refusing, seed=seed)


def test_data_that_leaves_nothing_to_train_on_says_why(write: Write) -> None:
    with pytest.raises(DataError, match="of 1 rows 0 have a position that counts") as caught:
        prepare(write([{"messages": TALK[:1]}]), template=CHAT, train_on="assistant")
    assert caught.value.field == "data.sources"
