"""Files, directories, hub layouts and buckets as sources of rows, and errors that name what cannot be read."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import numpy as np
import pytest
from transformers import AutoTokenizer

import swiftkv_platform.sources
from swiftkv_platform.data.checks import check_sources, check_upload
from swiftkv_platform.data.source_rows import RemoteFile
from swiftkv_platform.errors import DataError, InvalidInputError, StorageError
from swiftkv_platform.sources import UNRESTRICTED, Access, S3Source
from swiftkv_platform.specs import DataSourceSpec
from tests.support.training_text import CHAT, NUMBERED, TALK, Write, prepare, texts

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
    tokenizer.chat_template = CHAT.replace(
        "|{% endfor", "{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}|{% endfor"
    )
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


class Remote:
    """A bucket whose objects below `prefix` are given with their contents, or are files here."""

    def __init__(self, prefix: str, objects: Mapping[str, Any], write: Write) -> None:
        self.prefix, self.objects, self.write = prefix, objects, write
        self.fetched: dict[str, Path] = {}

    def list_files(self, source: S3Source) -> list[RemoteFile]:
        return [RemoteFile(f"s3://{source.bucket}", f"{source.key}/{name}") for name in sorted(self.objects)]

    def fetch_file(self, file: RemoteFile) -> Path:
        assert file.store == "s3://bucket"
        name = file.key.removeprefix(self.prefix)
        content = self.objects[name]
        self.fetched[name] = content if isinstance(content, Path) else Path(self.write(content, f"fetched/{name}"))
        return self.fetched[name]


SPLIT = ("train.jsonl", "test.jsonl", "dev-00001.jsonl.gz")


@pytest.mark.parametrize(
    ("names", "split", "read"),
    [
        (SPLIT, "train", ["train.jsonl"]),
        (SPLIT, "validation", ["dev-00001.jsonl.gz"]),
        (SPLIT, "val", ["dev-00001.jsonl.gz"]),
        (SPLIT, "held-out", ["test.jsonl"]),
        (("TRAIN.JSONL", "Eval_1.jsonl"), "test", ["Eval_1.jsonl"]),
        (("my_training.jsonl", "held_out.jsonl"), "train", ["my_training.jsonl"]),
        (("trainset.jsonl", "testdata.jsonl", "x_hold-out.jsonl"), "train", ["trainset.jsonl"]),
        (("train/a.jsonl", "train/deep/b.jsonl", "valid/a.jsonl"), "train", ["train/a.jsonl", "train/deep/b.jsonl"]),
        (("contest.jsonl", "latest.jsonl"), "train", ["contest.jsonl", "latest.jsonl"]),
        (("a.py", "tests/test_a.py"), "train", ["a.py", "tests/test_a.py"]),
        (("dev notes.txt", "ideas.txt"), "train", ["dev notes.txt", "ideas.txt"]),
        (("a.JSONL", "b.jsonl.GZ", "c.csv"), "train", ["a.JSONL", "b.jsonl.GZ", "c.csv"]),
        (SPLIT[:2], "dev", "split is 'dev'; {} has test (test.jsonl), train (train.jsonl)"),
        (SPLIT[1:2], "train", "split is 'train'; {} has test (test.jsonl)"),
        (("a.jsonl",), "test", "split is 'test'; {} has no split (a.jsonl)"),
        (
            ("a.jsonl", *SPLIT),
            "train",
            "files of splits (dev-00001.jsonl.gz, test.jsonl, train.jsonl) and files without a clear split (a.jsonl)",
        ),
        (
            ("train-test.jsonl", "train.jsonl"),
            "train",
            "files without a clear split (train-test.jsonl)",
        ),
        (("a.jsonl", "b.zip"), "train", "which has unsupported files (b.zip); unpack, convert or remove them"),
        (("a.jsonl", "b.gz", "c.tar.xz"), "train", "which has unsupported files (b.gz, c.tar.xz)"),
        (("b.parquet.gz",), "train", "which has unsupported files (b.parquet.gz)"),
    ],
)
def test_a_directory_gives_its_split_and_passes_nothing_over_in_silence(
    write: Write, tmp_path: Path, names: tuple[str, ...], split: str, read: list[str] | str
) -> None:
    for name in names:
        rows = f"text\n{name}\n" if name.endswith("csv") else json.dumps({"text": name}) + "\n"
        content = name if name.endswith((".py", ".txt")) else rows
        write(gzip.compress(content.encode()) if name.lower().endswith(".gz") else content, f"d/{name}")
    source = {"name_or_path": str(tmp_path / "d"), "split": split}
    bucket = Remote("d/", {name: tmp_path / "d" / name for name in names}, write)
    checked = partial(check_sources, (DataSourceSpec.model_validate(source),))
    remote = {**source, "name_or_path": "s3://bucket/d"}
    if isinstance(read, list):
        expected = sorted(f"^{name}$" for name in read)
        assert texts(prepare(source).train) == texts(prepare(remote, remote=bucket).train) == expected
        assert checked()[0].num_files == len(read)
        return
    for called, where in ((checked, source), (partial(prepare, source), source)):
        with pytest.raises(DataError) as caught:
            called()
        assert read.format(where["name_or_path"]) in caught.value.message
    with pytest.raises(DataError) as caught:
        prepare(remote, remote=bucket)
    assert read.format("s3://bucket/d") in caught.value.message


@pytest.mark.parametrize("names", [("rows.jsonl",), ("d/rows.jsonl",)])
@pytest.mark.parametrize("fields", [{"subset": "main"}, {"split": "test"}])
def test_a_split_or_a_subset_that_a_path_has_not_is_refused(
    write: Write, tmp_path: Path, names: tuple[str, ...], fields: dict[str, str]
) -> None:
    [path] = [write([{"text": "a"}], name) for name in names]
    source = {"name_or_path": path if "/" not in names[0] else str(tmp_path / "d"), **fields}
    for called in (lambda: prepare(source), lambda: check_sources((DataSourceSpec.model_validate(source),))):
        with pytest.raises(DataError) as caught:
            called()
        assert caught.value.field == f"data.sources[0].{next(iter(fields))}"


def test_a_file_is_read_whole_and_its_name_may_tell_the_split(write: Write) -> None:
    path = write([{"text": "a"}], "gsm8k_test.jsonl.gz"[:-3])
    assert texts(prepare(path).train) == texts(prepare({"name_or_path": path, "split": "eval"}).train) == ["^a$"]


@pytest.mark.parametrize(
    ("layout", "directory"),
    [
        *(("card", each) for each in ("a[b]", "a*", "a?")),
        *((each, "a[b]*{c}#1") for each in ("plain", "shards", "saved")),
    ],
)
def test_the_name_of_a_directory_is_no_pattern(write: Write, tmp_path: Path, layout: str, directory: str) -> None:
    write([{"text": "other"}], "ab/train.jsonl")
    rows = [{"text": "own"}]
    if layout == "saved":
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / directory))
    else:
        write(rows, f"{directory}/{'train-00000-of-00001.parquet' if layout == 'shards' else 'train.jsonl'}")
    if layout == "card":
        write(card(default="'*.jsonl'"), f"{directory}/README.md")
    source = {"name_or_path": str(tmp_path / directory)}
    for access in (UNRESTRICTED, Access(roots=(str(tmp_path / directory),))):
        for streaming in (False, True):
            prepared = prepare({**source, "streaming": streaming}, access=access)
            assert texts(prepared.train) == ["^own$"]


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"role": "assistant", "content": None}, "message 2 (role assistant) has no text"),
        ({"role": "critic", "content": "no"}, "a message has the role 'critic'"),
        ({"from": "gpt", "value": "say", "weight": 2}, "a message has the weight 2; 0 and 1 are accepted"),
        ({"role": "assistant", "function_call": {"name": "f", "arguments": "-"}}, "calls f with the arguments '-'"),
        ({"role": "assistant", "content": [{"type": "image_url"}]}, "only text parts are accepted"),
    ],
)
@pytest.mark.parametrize(("column", "format_"), [("messages", "messages"), ("conversations", "sharegpt")])
def test_an_upload_and_a_job_refuse_the_same_rows_with_the_same_words(
    write: Write, column: str, format_: str, turn: dict[str, Any], message: str
) -> None:
    path = write([{column: TALK}, {column: [TALK[0], turn]}])
    uploads, job = (partial(check_upload, Path(path), path, field="file", max_rows=9), partial(prepare, path))
    for refuses in (uploads, job):
        with pytest.raises(DataError) as caught:
            refuses()
        assert f"line 2, read as {format_}: " in caught.value.message
        assert message in caught.value.message
        assert caught.value.value == f"{path}:2"


def test_every_row_of_a_file_may_have_its_own_format(write: Write) -> None:
    path = write([{"text": "one"}, {"messages": TALK[:2], "text": "two"}, {"question": "q", "answer": "a"}])
    formats = prepare(path, max_length=128).statistics.sources[0].formats
    assert formats == dict.fromkeys(("text", "messages", "prompt_completion"), 1)


TWICE = (
    '{"prompt": "a", "prompt": "b", "completion": "c"}',
    '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
    '{"text": "a", "text": "a"}',
    '{"text": "a", "t\\u0065xt": "b"}',
    '{"text": "a", "meta": [{"b": {"c": 1, "c": 2}}]}',
)


@pytest.mark.parametrize("row", TWICE)
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_key_that_an_object_has_twice_is_refused_with_its_line(write: Write, name: str, row: str) -> None:
    good, is_list = '{"text": "a"}', name.endswith(".json")
    path = write(f"[{good},\n{row}]" if is_list else f"{good}\n{row}\n", name)
    with pytest.raises(DataError, match=r"line 2.*an object has the key '\w+' more than once; use each key once"):
        prepare(path)
    first = DataSourceSpec(name_or_path=write(f"[{row}]" if is_list else row, f"first-{name}"))
    with pytest.raises(DataError, match=r"an object has the key '\w+' more than once"):
        check_sources([first])
    if not is_list:
        with pytest.raises(DataError, match=r"line 2.*more than once"):
            check_upload(Path(path), path, field="file", max_rows=9)


NOTHING = [{"messages": None, "prompt": "", "completion": "-", "text": f"{i}"} for i in range(3)]
LATE = [{"prompt": "ask", "completion": "", "text": "-"}, {"prompt": "ask", "completion": "say", "text": "-"}]
TALKS = [{"messages": TALK[:2], "text": "-"}, {"messages": None, "text": "-"}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "data/train-00000-of-00001.parquet"])
@pytest.mark.parametrize(("rows", "expected"), [(NOTHING, "text"), (LATE, "prompt_completion"), (TALKS, "messages")])
def test_columns_that_hold_nothing_in_any_row_decide_nothing(
    write: Write, tmp_path: Path, name: str, rows: list[dict[str, Any]], expected: str
) -> None:
    path = write(rows, name)
    prepared = prepare(str(tmp_path / "data") if "/" in name else path, max_length=128)
    assert prepared.statistics.sources[0].formats == {expected: len(rows)}
    if name.endswith(".jsonl"):
        assert check_upload(Path(path), name, field="file", max_rows=9).format == expected


@pytest.mark.parametrize("answer", [None, "", []])
def test_uploaded_rows_whose_answers_are_empty_are_prompts(write: Write, answer: object) -> None:
    path = write([{"prompt": "ask", "completion": answer}] * 2)
    assert check_upload(Path(path), "rows.jsonl", field="file", max_rows=9).format == "prompts"


def test_the_standard_library_brings_its_own_held_out_modules() -> None:
    source = {"name_or_path": "builtin:python-stdlib", "sample_count": 3}
    prepared = prepare(source, validation_fraction=0.5, max_length=4096)
    assert prepared.statistics.train.documents == 3 < prepared.statistics.held_out.documents
    assert prepared.statistics.sources[0].formats.keys() == {"text"}
    with pytest.raises(DataError, match="builtin:python-stdlib has train") as caught:
        prepare({"name_or_path": "builtin:python-stdlib", "split": "test"})
    assert caught.value.field == "data.sources[0].split"


@pytest.mark.parametrize("streaming", [False, True])
def test_s3_sources_come_through_the_given_remote(write: Write, streaming: bool) -> None:
    bucket = Remote("prefix/", {"a.jsonl": NUMBERED[:6], "b.txt": "plain", "c.bin": "no rows"}, write)

    def prepared(sample_count: int | None) -> list[str]:
        source = {"name_or_path": "s3://bucket/prefix", "streaming": streaming, "sample_count": sample_count}
        return texts(prepare(source, remote=bucket).train)

    first, numbered = prepared(3), [f"^document {i}$" for i in range(6)]
    assert first == numbered[:3] if streaming else len(first) == 3
    assert prepared(None) == [*numbered, "^plain$"]
    left = {name: path.exists() for name, path in bucket.fetched.items()}
    assert left == dict.fromkeys(("a.jsonl", "b.txt"), not streaming)
    with pytest.raises(InvalidInputError, match="no object store"):
        prepare("s3://bucket/prefix")


def card(**configs: str) -> str:
    """Card of a data set on the hub that lists data files by configuration."""
    lines = (f"- config_name: {name}\n  data_files: {files}\n" for name, files in configs.items())
    return f"---\nconfigs:\n{''.join(lines)}---\n"


def test_a_subset_names_one_of_several_configurations(write: Write, tmp_path: Path) -> None:
    names = ("main", "socratic")
    write(card(**{name: f"{name}/train.jsonl" for name in names}), "hub/README.md")
    for name in names:
        write([{"text": name}], f"hub/{name}/train.jsonl")
    source = {"name_or_path": str(tmp_path / "hub")}
    assert texts(prepare({**source, "subset": "socratic"}).train) == ["^socratic$"]
    with pytest.raises(DataError, match=r"name one in data.sources\[0\].subset"):
        prepare(source)


@pytest.mark.parametrize("streaming", [False, True])
def test_a_directory_laid_out_as_on_the_hub_gives_the_split(write: Write, tmp_path: Path, streaming: bool) -> None:
    sides = ("train", "test")
    mask_prompts = "".join(f"\n  - {{split: {side}_sft, path: chat/{side}.parquet}}" for side in sides)
    write(card(default=mask_prompts), "hub/README.md")
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
        ("", "empty.jsonl", "has no rows", ".name_or_path"),
        ("[]", "empty.json", "has no rows", ".name_or_path"),
        ("rubbish", "rubbish.parquet", "rubbish.parquet cannot be read as parquet", ".name_or_path"),
        ("a,b", "table.xlsx", "not a readable file; .jsonl, .ndjson, .json", ".name_or_path"),
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
        ("builtin:ruby", "builtin:python-stdlib, builtin:chat-prompts, builtin:recall-prompts, "),
        ("builtin:chat-prompts", "which has prompts only; add complete"),
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
    with pytest.raises(StorageError, match="no such local path, and the hub is unavailable") as caught:
        prepare("nobody/nothing")
    assert (caught.value.field, caught.value.value) == ("data.sources[0].name_or_path", "nobody/nothing")


def test_rows_the_template_refuses_are_named_by_their_number_in_the_file(write: Write) -> None:
    refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}hello"
    source = {"name_or_path": write([{"messages": TALK}] * 20 + [{"messages": TALK[1:]}]), "sample_count": 20}
    seed = next(s for s in range(50) if 20 in np.random.default_rng((s, 0)).choice(21, size=20, replace=False))
    with pytest.raises(DataError, match=r"line 21, read as messages: .*user first"):
        prepare(source, template=refusing, seed=seed)
