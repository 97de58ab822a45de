"""From rows to training and held-out samples: what counts, what is held out, and how often a sample is taken."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import models, pre_tokenizers, processors

from swiftkv_platform.data import documents
from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.data.prepared import PreparedData
from swiftkv_platform.errors import DataError
from tests.support.fakes.tokenizers import BOS, EOS, byte_tokenizer, sentence_tokenizer
from tests.support.training_text import CHAT, NUMBERED, TALK, Write, prepare, samples_of, targets, texts, turns

pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_document_has_bos_in_front_and_eos_behind_and_all_of_it_counts(write: Write) -> None:
    prepared = prepare(write([{"text": "one"}, {"text": "<s>two</s>"}, {"text": None}, {"text": ""}]))
    assert texts(prepared.train) == ["^one$", "^two$"], "special tokens in the text are not doubled"
    assert targets(prepared.train) == ["one$", "two$"]
    source = prepared.statistics.sources[0]
    assert (source.formats, source.rows, source.documents, source.dropped) == ({"text": 4}, 4, 2, 2)
    assert prepared.statistics.train.model_dump() == {
        "documents": 2, "samples": 2, "tokens": 10, "counted_tokens": 8, "rows": 1, "packing_efficiency": 10 / 64,
    }  # fmt: skip
    without = prepare(write([{"text": "one"}]), tokenizer=byte_tokenizer(special=False))
    assert texts(without.train) == ["one"]


def test_texts_start_with_what_the_tokenizer_adds_and_nothing_else(write: Write) -> None:
    """As served prompts do: BOS is added neither because there is one, nor where a chat template writes it."""
    two = byte_tokenizer()
    two.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> <s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", EOS)]
    )
    for tokenizer, start in (
        (byte_tokenizer(add_bos_token=True), "^"),
        (byte_tokenizer(), ""),
        (byte_tokenizer(special=False), ""),
        (two, "^^"),
    ):
        path, end = write([{"text": "abcdefghij" * 2}]), "$" if tokenizer.eos_token else ""
        rows = prepare(path, tokenizer=tokenizer, max_length=16).train
        size = 16 - len(start)
        assert texts(rows) == sorted([start + ("abcdefghij" * 2)[:size], start + ("abcdefghij" * 2)[size:] + end])
        assert tokenizer("abcdefghij" * 2)["input_ids"][:16] in [tokens.tolist() for tokens, _ in samples_of(rows)]
        tokenizer.chat_template = CHAT
        assert not texts(prepare(write([{"messages": TALK}]), tokenizer=tokenizer).train)[0].startswith("^")
        encoder = documents.DocumentEncoder(tokenizer, max_length=16, train_on="all")
        assert encoder.encode_prompt("ab").tolist() == [BOS] * len(start) + [64, 65]


TAGGED = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}</s>{% endfor %}"


@pytest.mark.parametrize("row", [{"prompt": "? <s>", "completion": "!"}, {"prompt": "?", "completion": "!</s>"}])
def test_messages_with_the_special_tokens_of_the_template_are_refused(write: Write, row: dict[str, str]) -> None:
    with pytest.raises(
        DataError, match=r"line 2, read as prompt_completion: message . .*'</?s>', a marker of a chat template"
    ):
        prepare(write([{"prompt": "a", "completion": "b"}, row]), template=TAGGED)
    assert prepare(write([row]), template=CHAT).train, "this template does not write them"


def test_a_template_that_leaves_out_the_end_of_answers_is_warned_about(write: Write) -> None:
    open_end = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"
    rows, texts_ = write([{"prompt": "a", "completion": "b"}]), write([{"text": "a"}], "texts.jsonl")

    def warnings(path: str, **settings: str) -> list[str]:
        found = prepare(path, template=open_end, **settings).statistics.format_messages()
        return [message for message, is_warning in found if is_warning]

    [warning] = warnings(rows, train_on="assistant")
    assert "{% generation %} before '|'" in warning
    assert not warnings(rows, train_on="all")
    assert not warnings(texts_, train_on="assistant")


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_columns_that_are_not_read_are_reported(write: Write, name: str) -> None:
    rows = [{"prompt": "a", "completion": "b", "score": 1.0, "label": True, "source": "web"}] * 2
    prepared = prepare(write(rows, name), template=CHAT)
    assert prepared.statistics.sources[0].unread_columns == ("score", "source")
    assert any("columns not read: score, source" in message for message, _ in prepared.statistics.format_messages())
    bad = write([*rows, {**rows[0], "label": False}], name)
    with pytest.raises(DataError, match=r"(line|row) 3, read as prompt_completion: label is False"):
        prepare(bad, template=CHAT)


def test_a_long_text_is_split_into_consecutive_windows_that_start_like_a_text(write: Write) -> None:
    path = write([{"text": "abcdefghij" * 4}])
    prepared = prepare(path, max_length=16)
    assert texts(prepared.train) == sorted(["^abcdefghijabcde", "^fghijabcdefghij", "^abcdefghij$"])
    assert targets(prepared.train) == sorted(["abcdefghijabcde", "ghijabcdefghij", "bcdefghij$"])
    assert (prepared.statistics.sources[0].split, prepared.statistics.sources[0].truncated) == (1, 0)
    assert (prepared.statistics.train.documents, prepared.statistics.train.samples) == (1, 3)


RENDERED = "<user>ask|<assistant>say|<user>more|<assistant>no|"
PLAIN = "^### User:\nask\n### Assistant:\nsay\n### User:\nmore\n### Assistant:\nno\n$"


@pytest.mark.parametrize(
    ("template", "train_on", "talk", "text", "target"),
    [
        (CHAT, "assistant", TALK, RENDERED, "say|no|"),
        (CHAT, "all", TALK, RENDERED, RENDERED[1:]),
        (None, "assistant", TALK, PLAIN, "say\nno\n$"),
        (None, "all", TALK, PLAIN, PLAIN[1:]),
        # The end counts only where the assistant has the last word.
        (None, "assistant", TALK[:3], "^### User:\nask\n### Assistant:\nsay\n### User:\nmore\n$", "say\n"),
    ],
)
def test_conversations_count_what_train_on_says(
    write: Write, template: str | None, train_on: str, talk: list[dict[str, str]], text: str, target: str
) -> None:
    prepared = prepare(write([{"messages": talk}]), template=template, train_on=train_on, max_length=128)
    assert (texts(prepared.train), targets(prepared.train)) == ([text], [target])


def test_with_splits_what_counts_as_a_whole_begins_with_a_prompt(write: Write) -> None:
    """Windows of texts and conversations with `train_on: all` begin with tokens that do not count; answers are kept."""
    rows = [{"text": f"document {i} says little, but says it at length " * (1 + i % 4)} for i in range(60)]
    talks = [{"messages": TALK}] * 3
    lengths, begins = [], []
    for source, settings in ((rows, {}), (talks, {"train_on": "all"})):
        path = write(source, f"{len(lengths)}.jsonl")
        split = prepare(path, template=CHAT, mask_prompts=True, **settings).train
        whole = prepare(path, template=CHAT, **settings).train
        assert np.array_equal(split.samples.tokens, whole.samples.tokens)
        for first, end in pairwise(split.samples.starts):
            counts = split.samples.loss_mask[first:end]
            begin = int(counts.argmax())
            assert counts[begin:-1].all()
            assert not counts[-1]
            lengths.append(len(counts))
            begins.append(begin)
    assert {0 <= begin < length - 1 for begin, length in zip(begins, lengths, strict=True)} == {True}
    assert np.mean(np.array(begins) / (np.array(lengths) - 1)) == pytest.approx(0.5, abs=0.1)
    assert len(set(begins[-3:])) == 1, "equal content is split equally"
    path = write(talks)
    answers = [
        prepare(path, template=CHAT, mask_prompts=mask_prompts, train_on="assistant") for mask_prompts in (False, True)
    ]
    assert answers[0].fingerprint == answers[1].fingerprint
    encoder = documents.DocumentEncoder(byte_tokenizer(), max_length=64, train_on="all", mask_prompts=True)
    [(_, counts)] = encoder.encode_completion([1, 2, 3], [4, 5]).samples
    assert counts.tolist() == [False, False, True, True, False], "what the teacher wrote begins after its prompt"


def test_characters_of_several_tokens_count_whole(write: Write) -> None:
    prepared = prepare(write([{"messages": turns("é", "né")}]), template=CHAT, train_on="assistant")
    assert prepared.statistics.train.counted_tokens == len("né|".encode())


def test_a_long_conversation_is_cut_and_one_without_an_answer_left_is_dropped(write: Write) -> None:
    rows = [{"messages": talk} for talk in (TALK, turns("x" * 40, "late"), turns("nobody answers"), [])]
    prepared = prepare(write(rows), template=CHAT, train_on="assistant", max_length=24)
    assert (texts(prepared.train), targets(prepared.train)) == (["<user>ask|<assistant>say"], ["say"])
    source = prepared.statistics.sources[0]
    assert (source.documents, source.dropped, source.truncated, source.split) == (1, 3, 1, 0)
    with pytest.raises(DataError, match="of 1 rows, 0 have loss targets") as caught:
        prepare(write(rows[2:3]), template=CHAT, train_on="assistant")
    assert caught.value.field == "data.sources"


def test_token_lengths_and_losses_are_counted(write: Write) -> None:
    path = write([{"messages": TALK}] * 3 + [{"messages": turns("x" * 40, "late")}])
    source = prepare(path, template=CHAT, max_length=24).statistics.sources[0]
    rendered = len("<user>" + "x" * 40 + "|<assistant>late|")
    assert source.lengths.model_dump() == {"median": len(RENDERED), "p95": len(RENDERED), "longest": rendered}
    assert source.tokens == 3 * len(RENDERED) + rendered
    assert (source.truncated, source.truncated_tokens) == (4, source.tokens - 4 * 24)


def test_a_sample_is_on_the_same_side_whatever_surrounds_it(write: Write) -> None:
    whole = prepare(write(NUMBERED), validation_fraction=0.3)
    part = prepare(write(NUMBERED[:50][::-1], "part.jsonl"), validation_fraction=0.3, seed=7)
    held_out, train = set(texts(whole.held_out)), set(texts(whole.train))
    assert held_out.isdisjoint(train)
    assert held_out | train == {f"^{row['text']}$" for row in NUMBERED}
    assert 15 <= len(held_out) <= 45
    assert set(texts(part.held_out)) <= held_out
    assert set(texts(part.train)) <= train
    assert held_out < set(texts(prepare(write(NUMBERED), validation_fraction=0.5).held_out))


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
    assert sum(len(each.strip("^")) for each in held_out + train) == len(text) + 1
    assert 0.1 < len(held_out) / len(held_out + train) < 0.3
    assert not set(held_out) & set(train)
    assert [side.documents for side in (prepared.statistics.train, prepared.statistics.held_out)] == [1, 1]
    again = prepare(write(text, "copy.txt"), write([{"text": "another"}]), validation_fraction=0.2)
    assert set(texts(again.held_out)) - {"^another$"} == set(held_out)


def test_rows_that_steer_are_none_that_are_reported(write: Write) -> None:
    """A whole conversation either steers or is reported, and is on the same side in every data set."""
    long = [{"text": f"{i:03d} " * 40} for i in range(100)]
    whole = prepare(write(long), validation_fraction=0.4, with_steering=True)
    part = prepare(write(long[:60][::-1], "part.jsonl"), validation_fraction=0.4, with_steering=True, seed=7)
    undivided = prepare(write(long, "undivided.jsonl"), validation_fraction=0.4)

    def numbers(rows: PackedRows) -> set[str]:
        return {found for text in texts(rows) for found in re.findall(r"\d{3}", text)}

    steering, reported = numbers(whole.steering), numbers(whole.held_out)
    assert steering.isdisjoint(reported)
    assert steering | reported == numbers(undivided.held_out)
    assert 4 <= len(steering) <= 18 < len(reported)
    assert numbers(part.steering) <= steering
    assert numbers(part.held_out) <= reported
    assert (len(undivided.steering), undivided.statistics.steering) == (0, None)
    texts_of_rows = [set(map(int, rows.samples.content_ids[rows.members])) for rows in (whole.steering, whole.held_out)]
    assert [len(found) for found in texts_of_rows] == [len(steering), len(reported)], "parts of a text are one text"


def test_of_one_text_parts_steer_and_of_one_sample_nothing_does(write: Write) -> None:
    text = "".join(f"line {i:03d} of one text\n" for i in range(200))
    one = prepare(write(text, "corpus.txt"), validation_fraction=0.2, with_steering=True)
    assert 1 <= len(one.steering.members) < len(one.held_out.members)
    assert not set(texts(one.steering)) & set(texts(one.held_out))
    alone = prepare(write([{"text": "a"}, {"text": "b"}]), validation_fraction=0.5, with_steering=True)
    assert (len(alone.steering), len(alone.held_out)) == (0, 1)
    assert any(
        warns and "the only held-out sample is reserved" in said for said, warns in alone.statistics.format_messages()
    )


def test_rows_of_before_steering_still_open(write: Write, tmp_path: Path) -> None:
    directory = tmp_path / "rows"
    directory.mkdir()
    prepared = prepare(write(NUMBERED), validation_fraction=0.3, directory=directory)
    for name in ("texts.npy", "steering-members.npy", "steering-rows.npy"):
        (directory / name).unlink()
    opened = PreparedData.load(directory)
    assert texts(opened.steering) == texts(opened.held_out) == texts(prepared.held_out)
    assert list(opened.held_out.get_content_ids(0)) == list(opened.held_out.get_sample_indices(0))


def test_a_large_document_among_a_few_is_not_held_out_whole(write: Write) -> None:
    rows = [{"text": str(i) * length} for i, length in enumerate((6000, 900, 800, 30))]
    prepared = prepare(write(rows), validation_fraction=0.1)
    assert 0.02 < prepared.held_out.num_tokens / (prepared.held_out.num_tokens + prepared.train.num_tokens) < 0.25


LONG_TEXTS = ("a few words\n" * 20 + "x" * 90, "the cat\n\n" * 30, " the cat\r\n" * 20, "the cat " * 40, "\n" * 120)


def metaspace(prepend_scheme: str) -> Any:
    tokenizer = sentence_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.normalizer = None  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    return tokenizer


@pytest.mark.parametrize("text", LONG_TEXTS)
@pytest.mark.parametrize(
    "make", [byte_tokenizer, sentence_tokenizer, partial(metaspace, "always"), partial(metaspace, "first")]
)
def test_a_long_text_is_tokenized_in_pieces(
    text: str, make: Callable[[], Any], write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, tokenizer = write(text, "long.txt"), make()
    whole = prepare(path, tokenizer=tokenizer).train.samples.tokens.tolist()
    monkeypatch.setattr(documents, "_MAX_PIECE_LENGTH", 50)
    assert prepare(path, tokenizer=tokenizer).train.samples.tokens.tolist() == whole


def test_token_ids_take_two_bytes_where_the_vocabulary_allows(write: Write) -> None:
    assert prepare(write(NUMBERED)).train.samples.tokens.dtype == np.uint16
    tokenizer = byte_tokenizer(add_bos_token=True)
    tokenizer.backend_tokenizer.model = models.BPE(vocab={"x": 70_000, "<s>": BOS, "</s>": EOS}, merges=[])
    beyond = prepare(write([{"text": "xx"}]), tokenizer=tokenizer)
    assert beyond.train.samples.tokens.tolist() == [BOS, 70_000, 70_000, EOS]


def test_weights_repeat_and_thin_out_training_samples_only(write: Write) -> None:
    path, other = write(NUMBERED), write([{"text": "other"}], "other.jsonl")
    once = prepare(path, other, validation_fraction=0.2)
    own = [text for text in texts(once.train) if text != "^other$"]

    def weighed(weight: float, seed: int = 0) -> list[str]:
        prepared = prepare({"name_or_path": path, "weight": weight}, other, validation_fraction=0.2, seed=seed)
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
    other = write([*NUMBERED[:-1], {"text": "document 9!"}], "changed.jsonl")
    first, second = prepare(path, validation_fraction=0.1), prepare(copy, validation_fraction=0.1)
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(first.train.members, second.train.members)
    changes = [{"packing": False}, {"max_length": 128}, {"validation_fraction": 0.2}]
    changed = [prepare(other, validation_fraction=0.1)]
    changed += [prepare(path, **{"validation_fraction": 0.1, **change}) for change in changes]
    assert len({first.fingerprint, *(prepared.fingerprint for prepared in changed)}) == 5


def test_training_samples_share_a_prompt_and_held_out_ones_do_not(write: Write, tmp_path: Path) -> None:
    """The rows have its tokens once, and so do the statistics. All rows are the same after they are loaded."""
    path = write([{"prompt": "a long text" * 30, "completion": f"answer {number}"} for number in range(12)])
    settings: Any = {"max_length": 1024, "train_on": "assistant", "validation_fraction": 0.4}
    separate = prepare(path, template=CHAT, **settings)
    shared = prepare(path, template=CHAT, directory=tmp_path, share_prefixes=True, **settings)
    assert separate.train.prefix_lengths is None
    assert shared.held_out.prefix_lengths is None
    assert shared.train.prefix_lengths is not None
    assert shared.fingerprint != separate.fingerprint
    assert (texts(shared.train), targets(shared.train)) == (texts(separate.train), targets(separate.train))
    found, before = shared.statistics.train, separate.statistics.train
    assert (found.samples, found.counted_tokens) == (before.samples, before.counted_tokens)
    assert found.tokens == before.tokens - shared.train.prefix_lengths.sum() < before.tokens / 2
    opened = PreparedData.load(tmp_path)
    assert (opened.fingerprint, opened.held_out.prefix_lengths) == (shared.fingerprint, None)
    assert np.array_equal(opened.train.prefix_lengths, shared.train.prefix_lengths)


def test_tokens_are_mapped_from_files_that_can_be_opened_again(write: Write, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    made = prepare(write(NUMBERED), validation_fraction=0.2, directory=tmp_path / "made", with_steering=True)
    opened = PreparedData.load(tmp_path / "made")
    assert isinstance(made.train.samples.tokens, np.memmap)
    assert (opened.statistics, opened.fingerprint) == (made.statistics, made.fingerprint)
    for ours, theirs in ((getattr(made, side), getattr(opened, side)) for side in ("train", "held_out", "steering")):
        assert len(ours) == len(theirs) > 0
        for index in range(len(ours)):
            assert all(np.array_equal(array, theirs[index][name]) for name, array in ours[index].items())
