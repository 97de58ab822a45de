"""From files to rows: what is read, what counts, and what is held out."""

from __future__ import annotations

from pathlib import Path

import datasets
import numpy as np
import pytest
from tokenizers import models

from swiftkv_platform.data import documents
from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.data.prepared import PreparedData
from swiftkv_platform.errors import DataError, InvalidInputError
from tests.fakes.tokenizers import BOS, EOS, byte_tokenizer
from tests.training_text import CHAT, NUMBERED, TALK, Write, new_directory, prepare, spec

pytestmark = pytest.mark.usefixtures("own_cache")


def texts(rows: PackedRows) -> list[str]:
    """Each sample as text, `^` for BOS, `$` for EOS, in no particular order."""
    tokenizer, found = byte_tokenizer(), []
    for member in rows.members:
        ids = rows.samples.tokens[rows.samples.starts[member] : rows.samples.starts[member + 1]].tolist()
        found.append("".join({BOS: "^", EOS: "$"}.get(i) or tokenizer.decode([i]) for i in ids))
    return sorted(found)


def targets(rows: PackedRows) -> list[str]:
    """The tokens that each sample is trained to predict, as text."""
    tokenizer, found = byte_tokenizer(), []
    for member in rows.members:
        span = slice(rows.samples.starts[member], rows.samples.starts[member + 1])
        ids, counts = rows.samples.tokens[span], rows.samples.counts[span]
        found.append("".join("$" if i == EOS else tokenizer.decode([i]) for i in ids[1:][counts[:-1]]))
    return sorted(found)


def test_a_document_has_bos_in_front_and_eos_behind_and_all_of_it_counts(write: Write) -> None:
    prepared = prepare(write([{"text": "one"}, {"text": "two"}, {"text": None}, {"text": ""}]))
    assert texts(prepared.train) == ["^one$", "^two$"]
    assert targets(prepared.train) == ["one$", "two$"]
    source = prepared.statistics.sources[0]
    assert (source.formats, source.rows, source.documents, source.dropped) == ({"text": 4}, 4, 2, 2)
    assert prepared.statistics.train.model_dump() == {
        "documents": 2, "samples": 2, "tokens": 10, "counted_tokens": 8, "rows": 1, "packing_efficiency": 10 / 64,
    }  # fmt: skip


def test_special_tokens_the_text_has_are_not_doubled(write: Write) -> None:
    assert texts(prepare(write([{"text": "<s>one</s>"}])).train) == ["^one$"]


def test_a_tokenizer_without_special_tokens_adds_none(write: Write) -> None:
    prepared = prepare_data(spec(write([{"text": "one"}])), byte_tokenizer(special=False), new_directory(), seed=0)
    assert texts(prepared.train) == ["one"]


def test_a_long_text_is_split_into_consecutive_windows(write: Write) -> None:
    prepared = prepare(write([{"text": "abcdefghij" * 4}]), max_length=16)
    assert texts(prepared.train) == sorted(["^abcdefghijabcde", "fghijabcdefghija", "bcdefghij$"])
    assert "ghijabcdefghija" in targets(prepared.train)
    assert (prepared.statistics.sources[0].split, prepared.statistics.sources[0].truncated) == (1, 0)
    assert (prepared.statistics.train.documents, prepared.statistics.train.samples) == (1, 3)


RENDERED = "<user>ask|<assistant>say|<user>more|<assistant>no|"
PLAIN = "^### User:\nask\n### Assistant:\nsay\n### User:\nmore\n### Assistant:\nno\n$"


@pytest.mark.parametrize(
    ("template", "train_on", "text", "target"),
    [
        (CHAT, "assistant", RENDERED, "say|no|"),
        (CHAT, "all", RENDERED, RENDERED[1:]),
        (None, "assistant", PLAIN, "say\nno\n$"),
        (None, "all", PLAIN, PLAIN[1:]),
    ],
)
def test_conversations_count_what_train_on_says(
    write: Write, template: str | None, train_on: str, text: str, target: str
) -> None:
    path = write([{"messages": TALK}])
    prepared = prepare(path, template=template, train_on=train_on, max_length=128)
    assert texts(prepared.train) == [text]
    assert targets(prepared.train) == [target]


def test_the_end_counts_only_where_the_assistant_has_the_last_word(write: Write) -> None:
    prepared = prepare(write([{"messages": TALK[:3]}]), train_on="assistant", max_length=128)
    assert texts(prepared.train)[0].endswith("more\n$")
    assert targets(prepared.train) == ["say\n"]


def test_characters_of_several_tokens_count_whole(write: Write) -> None:
    talk = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "né"}]
    prepared = prepare(write([{"messages": talk}]), template=CHAT, train_on="assistant")
    assert prepared.statistics.train.counted_tokens == len("né|".encode())


def test_a_long_conversation_is_cut_and_one_without_an_answer_left_is_dropped(write: Write) -> None:
    late = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "late"}]
    question = [{"role": "user", "content": "nobody answers"}]
    rows = [{"messages": TALK}, {"messages": late}, {"messages": question}, {"messages": []}]
    prepared = prepare(write(rows), template=CHAT, train_on="assistant", max_length=24)
    assert texts(prepared.train) == ["<user>ask|<assistant>say"]
    assert targets(prepared.train) == ["say"]
    source = prepared.statistics.sources[0]
    assert (source.documents, source.dropped, source.truncated, source.split) == (1, 3, 1, 0)


def test_every_kind_of_file_is_read_and_formats_are_reported(write: Write, tmp_path: Path) -> None:
    write([{"text": "lines"}], "all/a.jsonl")
    write('[{"text": "array"}, {"text": "array 2"}]', "all/b.json")
    write("plain", "all/deep/c.txt")
    write("x = 1", "all/d.py")
    write("not read", "all/e.bin")
    datasets.Dataset.from_dict({"prompt": ["ask"], "completion": ["say"]}).to_parquet(tmp_path / "all" / "f.parquet")
    prepared = prepare(str(tmp_path / "all"))
    conversation = "^### User:\nask\n### Assistant:\nsay\n$"
    assert texts(prepared.train) == sorted(["^lines$", "^array$", "^array 2$", "^plain$", "^x = 1$", conversation])
    assert prepared.statistics.sources[0].formats == {"text": 5, "prompt_completion": 1}


def test_the_standard_library_brings_its_own_held_out_modules() -> None:
    source = {"name_or_path": "builtin:python-stdlib", "sample_count": 3}
    prepared = prepare(source, validation_fraction=0.5, max_length=4096)
    assert prepared.statistics.train.documents == 3
    assert prepared.statistics.held_out.documents > 3
    assert prepared.statistics.sources[0].formats.keys() == {"text"}


@pytest.mark.parametrize("streaming", [False, True])
def test_s3_sources_come_through_the_given_remote(write: Write, streaming: bool) -> None:
    objects = {"a.jsonl": NUMBERED[:6], "b.txt": "plain", "c.bin": "no rows"}
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
        data = prepare_data(spec(source), byte_tokenizer(), new_directory(), seed=0, remote=Remote())
        return texts(data.train)

    if streaming:
        assert prepared(3) == [f"^document {i}$" for i in range(3)]
    else:
        assert len(prepared(3)) == 3
    assert prepared(None) == ["^document 0$", *(f"^document {i}$" for i in range(1, 6)), "^plain$"]
    assert {name: path.exists() for name, path in fetched.items()} == dict.fromkeys(("a.jsonl", "b.txt"), not streaming)
    with pytest.raises(InvalidInputError, match="no object store"):
        prepare("s3://bucket/prefix")


def test_a_sample_is_on_the_same_side_whatever_surrounds_it(write: Write) -> None:
    whole = prepare(write(NUMBERED), validation_fraction=0.3)
    part = prepare(write(NUMBERED[:50][::-1], "part.jsonl"), validation_fraction=0.3, seed=7)
    held_out, train = set(texts(whole.held_out)), set(texts(whole.train))
    assert held_out.isdisjoint(train)
    assert held_out | train == {f"^{row['text']}$" for row in NUMBERED}
    assert 15 <= len(held_out) <= 45
    assert set(texts(part.held_out)) <= held_out
    assert set(texts(part.train)) <= train
    more = prepare(write(NUMBERED), validation_fraction=0.5)
    assert held_out < set(texts(more.held_out))


@pytest.mark.parametrize("fraction", [1e-9, 0.999999])
def test_both_sides_get_a_sample_where_there_are_two(write: Write, fraction: float) -> None:
    prepared = prepare(write([{"text": "a"}, {"text": "a"}, {"text": "b"}]), validation_fraction=fraction)
    assert {len(set(texts(side))) for side in (prepared.train, prepared.held_out)} == {1}
    assert len(prepared.train.members) + len(prepared.held_out.members) == 3
    alone = prepare(write([{"text": "a"}, {"text": "a"}], "alone.jsonl"), validation_fraction=fraction)
    assert (len(alone.train.members), len(alone.held_out)) == (2, 0)


def test_of_one_long_text_parts_are_held_out(write: Write) -> None:
    text = "".join(f"line {i:03d} of one text\n" for i in range(200))
    prepared = prepare(write(text, "corpus.txt"), validation_fraction=0.2)
    held_out, train = texts(prepared.held_out), texts(prepared.train)
    assert sum(map(len, held_out + train)) == len(text) + 2
    assert 0.1 < len(held_out) / len(held_out + train) < 0.3
    assert not set(held_out) & set(train)
    assert [side.documents for side in (prepared.statistics.train, prepared.statistics.held_out)] == [1, 1]
    again = prepare(write(text, "copy.txt"), write([{"text": "another"}]), validation_fraction=0.2)
    assert set(texts(again.held_out)) - {"^another$"} == set(held_out)


def test_a_large_document_among_a_few_is_not_held_out_whole(write: Write) -> None:
    rows = [{"text": str(i) * length} for i, length in enumerate((6000, 900, 800, 30))]
    prepared = prepare(write(rows), validation_fraction=0.1)
    shares = prepared.held_out.num_tokens / (prepared.held_out.num_tokens + prepared.train.num_tokens)
    assert 0.02 < shares < 0.25


def test_a_long_text_is_tokenized_in_pieces(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a few words\n" * 20 + "x" * 90
    whole = texts(prepare(write(text, "whole.txt")).train)
    monkeypatch.setattr(documents, "_LONG_TEXT", 50)
    assert texts(prepare(write(text, "pieces.txt")).train) == whole


def test_token_ids_beyond_the_number_of_words_are_kept(write: Write) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.model = models.BPE(vocab={"x": 70_000, "<s>": BOS, "</s>": EOS}, merges=[])
    prepared = prepare_data(spec(write([{"text": "xx"}])), tokenizer, new_directory(), seed=0)
    assert prepared.train.samples.tokens.tolist() == [BOS, 70_000, 70_000, EOS]


def test_what_is_no_data_beside_the_data_is_passed_over(write: Write, tmp_path: Path) -> None:
    write([{"text": "read"}], "all/a.jsonl")
    write([{"text": "as well"}], "elsewhere/b.jsonl")
    write([{"text": "hidden"}], "all/.cache/c.jsonl")
    write("hidden", "all/._d.txt")
    write([{"text": "part"}], "all/spark.json/part-0.json")
    (tmp_path / "all" / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    (tmp_path / "all" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "all" / "loop").symlink_to(tmp_path / "all")
    assert texts(prepare(str(tmp_path / "all")).train) == ["^as well$", "^part$", "^read$"]


def test_a_shard_beside_other_files_is_one_of_them(write: Write, tmp_path: Path) -> None:
    write([{"text": "lines"}], "all/extra.jsonl")
    shard = tmp_path / "all" / "part-00000-of-00001.parquet"
    datasets.Dataset.from_dict({"text": ["shard"]}).to_parquet(shard)
    assert texts(prepare(str(tmp_path / "all")).train) == ["^lines$", "^shard$"]


def test_a_subset_names_one_of_several_configurations(write: Write, tmp_path: Path) -> None:
    for name in ("main", "socratic"):
        write([{"text": name}], f"hub/{name}/train.jsonl")
    configs = "".join(f"- config_name: {name}\n  data_files: {name}/train.jsonl\n" for name in ("main", "socratic"))
    (tmp_path / "hub" / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    source = {"name_or_path": str(tmp_path / "hub")}
    assert texts(prepare({**source, "subset": "socratic"}).train) == ["^socratic$"]
    with pytest.raises(DataError, match=r"data.sources\[0\].subset names one"):
        prepare(source)


def test_weights_repeat_and_thin_out_training_samples_only(write: Write) -> None:
    path, other = write(NUMBERED), write([{"text": "other"}], "other.jsonl")
    once = prepare(path, other, validation_fraction=0.2)
    own = [text for text in texts(once.train) if text != "^other$"]

    def weighed(weight: float, seed: int = 0) -> list[str]:
        source = {"name_or_path": path, "weight": weight}
        prepared = prepare(source, other, validation_fraction=0.2, seed=seed)
        assert texts(prepared.held_out) == texts(once.held_out)
        return [text for text in texts(prepared.train) if text != "^other$"]

    assert weighed(2.0) == sorted(own * 2)
    half = weighed(0.5)
    assert len(half) == round(len(own) / 2)
    assert set(half) < set(own)
    assert half == weighed(0.5) != weighed(0.5, seed=1)
    assert len(weighed(1.5)) == len(own) + len(half)


def test_sample_count_takes_so_many_by_the_seed(write: Write) -> None:
    source = {"name_or_path": write(NUMBERED), "sample_count": 10}
    first, again, other = (texts(prepare(source, seed=seed).train) for seed in (0, 0, 1))
    assert len(set(first)) == 10
    assert first == again != other
    assert first != sorted(f"^document {i}$" for i in range(10))
    assert prepare({**source, "sample_count": 1000}).statistics.sources[0].rows == 100


def test_the_same_input_gives_the_same_rows_and_fingerprint(write: Write) -> None:
    path, copy = write(NUMBERED), write(NUMBERED, "copy.jsonl")
    first, second = prepare(path, validation_fraction=0.1), prepare(copy, validation_fraction=0.1)
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(first.train.members, second.train.members)
    changed = [
        prepare(write([*NUMBERED[:-1], {"text": "document 9!"}], "changed.jsonl"), validation_fraction=0.1),
        prepare(path, validation_fraction=0.1, packing=False),
        prepare(path, validation_fraction=0.1, max_length=128),
        prepare(path, validation_fraction=0.2),
    ]
    assert len({first.fingerprint, *(prepared.fingerprint for prepared in changed)}) == 5


def test_token_ids_take_two_bytes_where_the_vocabulary_allows(write: Write) -> None:
    assert prepare(write(NUMBERED)).train.samples.tokens.dtype == np.uint16


CARD = """---
configs:
- config_name: default
  data_files:
  - {split: train_sft, path: chat/train.parquet}
  - {split: test_sft, path: chat/test.parquet}
---
"""


@pytest.fixture
def repository(write: Write, tmp_path: Path) -> Path:
    """A directory as the hub lays out a data set with two splits."""
    write(CARD, "repository/README.md")
    (tmp_path / "repository" / "chat").mkdir()
    for side in ("train", "test"):
        rows = datasets.Dataset.from_dict({"prompt": [f"{side} {i}" for i in range(4)], "completion": ["say"] * 4})
        rows.to_parquet(tmp_path / "repository" / "chat" / f"{side}.parquet")
    return tmp_path / "repository"


@pytest.mark.parametrize("streaming", [False, True])
def test_a_directory_laid_out_as_on_the_hub_gives_the_split(repository: Path, streaming: bool) -> None:
    source = {"name_or_path": str(repository), "split": "test_sft", "streaming": streaming, "sample_count": 3}
    found = prepare(source, template=CHAT)
    assert len(found.train.members) == 3
    assert all(text.startswith("<user>test ") for text in texts(found.train))
    if streaming:
        assert texts(found.train) == [f"<user>test {i}|<assistant>say|" for i in range(3)]
    with pytest.raises(DataError, match="split 'train'"):
        prepare({"name_or_path": str(repository), "streaming": streaming})


def test_shards_named_as_on_the_hub_are_a_data_set_with_splits(tmp_path: Path) -> None:
    for side in ("train", "test"):
        rows = datasets.Dataset.from_dict({"text": [side]})
        rows.to_parquet(tmp_path / "data" / f"{side}-00000-of-00001.parquet")
    assert texts(prepare(str(tmp_path / "data")).train) == ["^train$"]


def test_what_datasets_saved_to_disk_is_read(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["saved"]})
    datasets.DatasetDict(train=rows).save_to_disk(tmp_path / "both")
    rows.save_to_disk(tmp_path / "one")
    assert texts(prepare(str(tmp_path / "both"), str(tmp_path / "one")).train) == ["^saved$", "^saved$"]
    with pytest.raises(DataError, match="has train") as caught:
        prepare({"name_or_path": str(tmp_path / "both"), "split": "test"})
    assert caught.value.field == "data.sources[0].split"


def test_every_row_of_a_file_may_have_its_own_format(write: Write) -> None:
    path = write([{"text": "one"}, {"messages": TALK[:2], "text": "two"}, {"question": "q", "answer": "a"}])
    assert prepare(path, max_length=128).statistics.sources[0].formats == {
        "text": 1,
        "messages": 1,
        "prompt_completion": 1,
    }
    with pytest.raises(DataError, match=r"rows.jsonl, line 2, has the columns body") as caught:
        prepare(write([{"text": "one"}, {"body": "two"}]))
    assert caught.value.field == "data.sources[0].format"


def test_half_a_surrogate_pair_is_no_text(write: Write) -> None:
    with pytest.raises(DataError, match="line 1, read as text: character 1 is half of a surrogate pair"):
        prepare(write('{"text": "a\\ud800"}\n'))


def test_token_lengths_and_losses_are_counted(write: Write) -> None:
    late = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "late"}]
    path = write([{"messages": TALK}] * 3 + [{"messages": late}])
    source = prepare(path, template=CHAT, max_length=24).statistics.sources[0]
    rendered = len("<user>" + "x" * 40 + "|<assistant>late|")
    assert source.lengths.model_dump() == {"median": len(RENDERED), "p95": len(RENDERED), "longest": rendered}
    assert source.tokens == 3 * len(RENDERED) + rendered
    assert (source.truncated, source.truncated_tokens) == (4, source.tokens - 4 * 24)


def test_tokens_are_mapped_from_files_that_can_be_opened_again(write: Write) -> None:
    directory = new_directory()
    made = prepare_data(spec(write(NUMBERED), validation_fraction=0.2), byte_tokenizer(), directory, seed=0)
    opened = PreparedData.load(directory)
    assert isinstance(made.train.samples.tokens, np.memmap)
    assert (opened.statistics, opened.fingerprint) == (made.statistics, made.fingerprint)
    for side in ("train", "held_out"):
        ours, theirs = getattr(made, side), getattr(opened, side)
        assert len(ours) == len(theirs) > 0
        for index in range(len(ours)):
            for name, array in ours[index].items():
                assert np.array_equal(array, theirs[index][name])
