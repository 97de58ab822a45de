"""Files, directories, hub layouts and buckets as sources of rows, and how what cannot be read is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pytest
from transformers import AutoTokenizer

import swiftkv_platform.sources
from swiftkv_platform.errors import DataError, InvalidInputError, StorageError
from tests.training_text import CHAT, NUMBERED, TALK, Write, prepare, texts

pytestmark = pytest.mark.usefixtures("own_cache")

PUBLISHED = Path(__file__).parents[4] / "shared" / "data" / "instruct"
TEACHER = Path(swiftkv_platform.sources.__path__[0]) / "teacher"
ASKED = [{"prompt": "ask", "completion": "say"}]


@pytest.mark.skipif(not PUBLISHED.is_dir(), reason=f"needs {PUBLISHED}: tests without network cannot fetch it")
@pytest.mark.parametrize(
    ("name", "format_", "rows"),
    [
        ("gsm8k_test.jsonl", "prompt_completion", 1319),
        ("alpaca_en_demo.json", "alpaca", 999),
        ("glaive_toolcall_en_demo.json", "sharegpt", 300),
        ("dpo_en_demo.json", "sharegpt", 300),
    ],
)
def test_published_files_are_read_whole(name: str, format_: str, rows: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    tokenizer.chat_template = CHAT
    data = prepare(str(PUBLISHED / name), tokenizer=tokenizer, max_length=1024, validation_fraction=0.01)
    (source,) = data.statistics.sources
    assert (source.formats, source.dropped, source.documents) == ({format_: rows}, 0, rows)
    assert data.statistics.train.packing_efficiency > 0.97
    assert len(data.held_out) > 0


def test_every_kind_of_file_is_read_and_what_is_no_data_beside_them_is_passed_over(
    write: Write, tmp_path: Path
) -> None:
    write([{"text": "lines"}], "all/a.jsonl")
    write('[{"text": "array"}, {"text": "array 2"}]', "all/b.json")
    write("plain", "all/deep/c.txt")
    write("x = 1", "all/d.py")
    write(ASKED, "all/f.parquet")
    write([{"text": "shard"}], "all/part-00000-of-00001.parquet")
    write([{"text": "part"}], "all/spark.json/part-0.json")
    write([{"text": "as well"}], "elsewhere/b.jsonl")
    for name in ("all/e.bin", "all/.cache/c.jsonl", "all/._d.txt"):
        write([{"text": "hidden"}], name)
    for name, target in (("gone.txt", "nowhere.txt"), ("linked", "elsewhere"), ("loop", "all")):
        (tmp_path / "all" / name).symlink_to(tmp_path / target)
    prepared = prepare(str(tmp_path / "all"))
    plain = ["^lines$", "^array$", "^array 2$", "^plain$", "^x = 1$", "^shard$", "^part$", "^as well$"]
    assert texts(prepared.train) == sorted([*plain, "^### User:\nask\n### Assistant:\nsay\n$"])
    assert prepared.statistics.sources[0].formats == {"text": 8, "prompt_completion": 1}


def test_every_row_of_a_file_may_have_its_own_format(write: Write) -> None:
    path = write([{"text": "one"}, {"messages": TALK[:2], "text": "two"}, {"question": "q", "answer": "a"}])
    formats = prepare(path, max_length=128).statistics.sources[0].formats
    assert formats == dict.fromkeys(("text", "messages", "prompt_completion"), 1)


def test_the_standard_library_brings_its_own_held_out_modules() -> None:
    source = {"name_or_path": "builtin:python-stdlib", "sample_count": 3}
    prepared = prepare(source, validation_fraction=0.5, max_length=4096)
    assert prepared.statistics.train.documents == 3 < prepared.statistics.held_out.documents
    assert prepared.statistics.sources[0].formats.keys() == {"text"}
    with pytest.raises(DataError, match="offers 'train'") as caught:
        prepare({"name_or_path": "builtin:python-stdlib", "split": "test"})
    assert caught.value.field == "data.sources[0].split"


@pytest.mark.parametrize("streaming", [False, True])
def test_s3_sources_come_through_the_given_remote(write: Write, streaming: bool) -> None:
    objects: dict[str, Any] = {"a.jsonl": NUMBERED[:6], "b.txt": "plain", "c.bin": "no rows"}
    fetched = dict[str, Path]()

    class Remote:
        def list(self, uri: str) -> list[str]:
            return [f"{uri}/{name}" for name in objects]

        def fetch(self, uri: str) -> Path:
            name = uri.removeprefix("s3://bucket/prefix/")
            fetched[name] = Path(write(objects[name], f"fetched/{name}"))
            return fetched[name]

    def prepared(sample_count: int | None) -> list[str]:
        source = {"name_or_path": "s3://bucket/prefix", "streaming": streaming, "sample_count": sample_count}
        return texts(prepare(source, remote=Remote()).train)

    first, numbered = prepared(3), [f"^document {i}$" for i in range(6)]
    assert first == numbered[:3] if streaming else len(first) == 3
    assert prepared(None) == [*numbered, "^plain$"]
    assert {name: path.exists() for name, path in fetched.items()} == dict.fromkeys(("a.jsonl", "b.txt"), not streaming)
    with pytest.raises(InvalidInputError, match="no object store"):
        prepare("s3://bucket/prefix")


def card(**configs: str) -> str:
    """The card of a data set on the hub, with data files by configuration."""
    lines = (f"- config_name: {name}\n  data_files: {files}\n" for name, files in configs.items())
    return f"---\nconfigs:\n{''.join(lines)}---\n"


def test_a_subset_names_one_of_several_configurations(write: Write, tmp_path: Path) -> None:
    names = ("main", "socratic")
    write(card(**{name: f"{name}/train.jsonl" for name in names}), "hub/README.md")
    for name in names:
        write([{"text": name}], f"hub/{name}/train.jsonl")
    source = {"name_or_path": str(tmp_path / "hub")}
    assert texts(prepare({**source, "subset": "socratic"}).train) == ["^socratic$"]
    with pytest.raises(DataError, match=r"data.sources\[0\].subset names one"):
        prepare(source)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_directory_laid_out_as_on_the_hub_gives_the_split(write: Write, tmp_path: Path, streaming: bool) -> None:
    sides = ("train", "test")
    splits = "".join(f"\n  - {{split: {side}_sft, path: chat/{side}.parquet}}" for side in sides)
    write(card(default=splits), "hub/README.md")
    for side in sides:
        write([{"prompt": f"{side} {i}", "completion": "say"} for i in range(4)], f"hub/chat/{side}.parquet")
    source = {"name_or_path": str(tmp_path / "hub"), "streaming": streaming}
    found = texts(prepare({**source, "split": "test_sft", "sample_count": 3}, template=CHAT).train)
    assert len(found) == 3
    assert all(text.startswith("<user>test ") for text in found)
    assert not streaming or found == [f"<user>test {i}|<assistant>say|" for i in range(3)]
    with pytest.raises(DataError, match="split 'train'"):
        prepare(source)


def test_shards_named_as_on_the_hub_and_what_datasets_saved_are_data_sets_with_splits(
    write: Write, tmp_path: Path
) -> None:
    for side in ("train", "test"):
        write([{"text": side}], f"data/{side}-00000-of-00001.parquet")
    assert texts(prepare(str(tmp_path / "data")).train) == ["^train$"]
    rows = datasets.Dataset.from_list([{"text": "saved"}])
    datasets.DatasetDict(train=rows).save_to_disk(tmp_path / "both")
    rows.save_to_disk(tmp_path / "one")
    assert texts(prepare(str(tmp_path / "both"), str(tmp_path / "one")).train) == ["^saved$", "^saved$"]
    with pytest.raises(DataError, match="has train") as caught:
        prepare({"name_or_path": str(tmp_path / "both"), "split": "test"})
    assert caught.value.field == "data.sources[0].split"


@pytest.mark.parametrize(
    ("content", "name", "message", "field"),
    [
        ('{"text": "a"}\n{"text": "b"\n', "bad.jsonl", "bad.jsonl, line 2, column 13 is not JSON", ".name_or_path"),
        ('[{"text": "a"},\n {"text" "b"}]', "bad.json", "bad.json, line 2, column 10 is not JSON", ".name_or_path"),
        ("é".encode("latin-1"), "latin.txt", "latin.txt, line 1, byte 0 is not UTF-8", ".name_or_path"),
        ("", "empty.jsonl", "holds no rows", ".name_or_path"),
        ("[]", "empty.json", "holds no rows", ".name_or_path"),
        ("rubbish", "rubbish.parquet", "rubbish.parquet cannot be read as parquet", ".name_or_path"),
        ("a,b", "table.csv", "not a readable file; .jsonl, .json, .parquet", ".name_or_path"),
        ('{"text": "a"}\n{"body": "b"}', "columns.jsonl", "columns.jsonl, line 2, has the columns body", ".format"),
        ('{"text": "a"}\n{"text": 3}\n', "mixed.jsonl", "line 2, read as text: text is 3", ""),
        ('{"text": "a\\ud800"}\n', "half.jsonl", "line 1, read as text: character 1 is half of a surrogate pair", ""),
    ],
)
def test_unreadable_files_are_named_with_the_place(
    write: Write, content: str | bytes, name: str, message: str, field: str
) -> None:
    with pytest.raises(DataError) as caught:
        prepare(write([{"text": "sound"}]), write(content, name))
    assert message in caught.value.message
    assert caught.value.field == f"data.sources[1]{field}"
    assert caught.value.value


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/nowhere/at/all", "no such file or directory"),
        ("./rows.jsonl", "no such file or directory"),
        (
            "builtin:ruby",
            "builtin:python-stdlib, builtin:chat-prompts, builtin:recall-prompts, builtin:long-recall-pro",
        ),
        ("builtin:chat-prompts", "without complete: its rows are requests, which the teacher answers"),
        ("builtin:recall-prompts", "without complete: its rows are requests, which the teacher answers"),
    ],
)
def test_missing_sources_are_named(source: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        prepare(source)
    assert (caught.value.field, caught.value.value) == ("data.sources[0].name_or_path", source)


def test_an_empty_directory_lists_what_would_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a directory without readable files; \.jsonl"):
        prepare(str(tmp_path))


def test_a_hub_that_does_not_answer_is_no_fault_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    for constants in (datasets.config, huggingface_hub.constants):
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StorageError, match="no such path here, and the hub does not answer") as caught:
        prepare("nobody/nothing")
    assert (caught.value.field, caught.value.value) == ("data.sources[0].name_or_path", "nobody/nothing")


def test_rows_the_template_refuses_are_named_by_their_number_in_the_file(write: Write) -> None:
    refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}hello"
    source = {"name_or_path": write([{"messages": TALK}] * 20 + [{"messages": TALK[1:]}]), "sample_count": 20}
    seed = next(s for s in range(50) if 20 in np.random.default_rng((s, 0)).choice(21, size=20, replace=False))
    with pytest.raises(DataError, match=r"line 21, read as messages: .*user first"):
        prepare(source, template=refusing, seed=seed)
