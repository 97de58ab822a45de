"""The built-in teacher answers prompts: the same ones from every writer, and never twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from swiftkv_platform.data import completions
from swiftkv_platform.data.completions import Answer, PromptSource, Teacher, WrittenBy
from swiftkv_platform.data.documents import DocumentEncoder
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.data.prepared import PreparedData
from swiftkv_platform.distillation.answers import write_answers
from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams
from swiftkv_platform.errors import DataError, StorageError
from swiftkv_platform.specs import BUILTIN_CHATS, BUILTIN_PROMPTS, BUILTIN_RECALL, BUILTIN_TEACHER, DataSpec, JobSpec

TEACHER = Path(str(files("swiftkv_platform.sources") / "teacher"))
ROWS: list[dict[str, Any]] = [{"text": f"def function_{i}(self, value):\n    "} for i in range(5)]
SETTINGS = {"max_tokens": 8, "num_completions": 2, "seed": 3}


class InMemoryAnswers(dict[str, bytes]):
    """An `AnswerStore`."""

    def put(self, key: str, data: bytes) -> None:
        assert key not in self, "nothing is written twice"
        self[key] = data


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return LLMEngine.from_pretrained(TEACHER, EngineConfig(kv_cache_bytes=1 << 24))


@pytest.fixture(autouse=True)
def _two_prompts_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_PROMPTS_PER_SHARD", 2)


Write = Callable[[list[dict[str, Any]]], dict[str, Any]]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes rows of prompts, and returns the source that has them completed."""

    def write_rows(rows: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
        path = tmp_path / f"prompts-{len(list(tmp_path.iterdir()))}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {"name_or_path": str(path), "complete": {**SETTINGS, **settings}}

    return write_rows


def data_spec(*sources: dict[str, Any], **settings: Any) -> DataSpec:
    return DataSpec.model_validate({"sources": sources, "max_length": 64, "validation_fraction": 0.0, **settings})


def prompts_of(spec: DataSpec, template: str | None = None, max_model_len: int = 2048) -> PromptSource:
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    tokenizer.chat_template = template
    encoder = DocumentEncoder(tokenizer, max_length=spec.max_length, train_on=spec.train_on)
    teacher = Teacher(BUILTIN_TEACHER, None, "bfloat16", max_model_len)
    return PromptSource(spec.sources[0], 0, encoder, teacher=teacher, seed=0, remote=None)


def written(source: PromptSource, engine: LLMEngine, **share: int) -> tuple[InMemoryAnswers, list[Answer]]:
    store = InMemoryAnswers()
    write_answers(source, store, lambda: engine, **share)
    return store, list(source.answers(store))


def test_every_prompt_is_answered_by_the_teacher_itself(write: Write, engine: LLMEngine) -> None:
    source = prompts_of(data_spec(write(ROWS, temperature=0.0)))
    store, answers = written(source, engine)
    assert len(store) == 3
    assert len(answers) == 10
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    prompts = [[tokenizer.bos_token_id, *tokenizer.encode(row["text"], add_special_tokens=False)] for row in ROWS]
    for i, output in enumerate(engine.generate(prompts, SamplingParams(max_tokens=8, temperature=0.0))):
        assert answers[2 * i].prompt_token_ids == tuple(prompts[i])
        assert [answer.token_ids for answer in answers[2 * i : 2 * i + 2]] == [tuple(output.token_ids)] * 2
        assert answers[2 * i].text == output.text


def test_answers_depend_on_the_seed_and_on_nothing_around_them(write: Write, engine: LLMEngine) -> None:
    _, answers = written(prompts_of(data_spec(write(ROWS))), engine)
    _, again = written(prompts_of(data_spec(write(ROWS))), engine)
    _, others = written(prompts_of(data_spec(write(ROWS, seed=4))), engine)
    _, backwards = written(prompts_of(data_spec(write(ROWS[::-1]))), engine)
    assert answers == again
    assert sorted(answers, key=lambda a: a.text) == sorted(backwards, key=lambda a: a.text)
    assert {a.token_ids for a in answers} != {a.token_ids for a in others}
    assert answers[0].token_ids != answers[1].token_ids, "answers to one prompt are draws of their own"


def test_workers_share_the_shards_and_a_retry_writes_the_missing_ones(write: Write, engine: LLMEngine) -> None:
    source = prompts_of(data_spec(write(ROWS)))
    whole, answers = written(source, engine)
    store = InMemoryAnswers()
    told: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        told.append((done, total))

    shares = [
        write_answers(source, store, lambda: engine, worker=worker, num_workers=2, progress=progress)
        for worker in range(2)
    ]
    assert all(shares)
    assert told == [(1, 2), (2, 2), (1, 1)]
    assert sum(shares) == sum(len(answer.token_ids) for answer in answers)
    assert store == whole
    lost = next(iter(whole))
    del store[lost]
    with pytest.raises(StorageError, match="are gone"):
        list(source.answers(store))
    told.clear()
    write_answers(source, store, lambda: engine, progress=progress)
    assert store == whole
    assert told == [(1, 3)]

    def refuse() -> LLMEngine:
        raise AssertionError("everything is there: no model need be loaded")

    assert write_answers(source, store, refuse) == 0


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}|{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "ask"}, "<user>ask|<assistant>"),
        ({"question": "ask", "answer": "another's"}, "<user>ask|<assistant>"),
        ({"instruction": "ask", "input": "this"}, "<user>ask\n\nthis|<assistant>"),
        (
            {"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "another's"}]},
            "<user>ask|<assistant>",
        ),
        ({"conversations": [{"from": "human", "value": "ask"}], "system": "be"}, "<system>be|<user>ask|<assistant>"),
        ({"text": "def f("}, "def f("),
        ({"prompt": ""}, ""),
        ({"messages": [{"role": "assistant", "content": "first"}]}, ""),
    ],
)
def test_a_prompt_ends_where_the_answer_begins(write: Write, row: dict[str, Any], prompt: str) -> None:
    source = prompts_of(data_spec(write([row])), TEMPLATE)
    ((found,),) = [shard.prompts for shard in source.shards()]
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    assert tokenizer.decode(found.prompt_token_ids, skip_special_tokens=True) == prompt


def test_texts_may_give_their_beginning_only(write: Write) -> None:
    source = prompts_of(data_spec(write(ROWS, prompt_tokens=3)))
    assert {len(prompt.prompt_token_ids) for shard in source.shards() for prompt in shard.prompts} == {3}


def prepared(spec: DataSpec, engine: LLMEngine, directory: Path) -> PreparedData:
    store = InMemoryAnswers()
    source = prompts_of(spec)
    write_answers(source, store, lambda: engine)
    directory.mkdir()
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    return prepare_data(spec, tokenizer, directory, seed=0, written=WrittenBy(source.teacher, store))


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_written_data_mixes_with_the_rest_token_for_token(
    write: Write, engine: LLMEngine, tmp_path: Path, train_on: str
) -> None:
    path = tmp_path / "plain.jsonl"
    path.write_text('{"text": "x = 1"}\n')
    spec = data_spec(write(ROWS), {"name_or_path": str(path), "weight": 2.0}, train_on=train_on)
    data = prepared(spec, engine, tmp_path / "rows")
    _, answers = written(prompts_of(spec), engine)
    samples = data.train.samples
    for i, answer in enumerate(answers):
        span = slice(samples.starts[i], samples.starts[i + 1])
        assert tuple(samples.tokens[span].tolist()) == answer.prompt_token_ids + answer.token_ids
        counted = np.flatnonzero(samples.counts[span])
        first = len(answer.prompt_token_ids) - 1 if train_on == "assistant" else 0
        assert counted.tolist() == list(range(first, span.stop - span.start - 1))
    source, plain = data.statistics.sources
    assert (source.rows, source.documents, source.formats) == (10, 10, {"text": 10})
    assert source.written_tokens == sum(len(answer.token_ids) for answer in answers)
    assert data.statistics.train.documents == 10 + 2
    assert plain.written_tokens == 0


def test_answers_to_one_prompt_are_on_one_side_of_the_hold_out(write: Write, engine: LLMEngine, tmp_path: Path) -> None:
    data = prepared(data_spec(write(ROWS), validation_fraction=0.4), engine, tmp_path / "rows")
    assert len(data.train.members) + len(data.held_out.members) == 10
    assert len(data.held_out.members) % 2 == 0


def test_prompts_without_room_for_an_answer_are_dropped_and_counted(
    write: Write, engine: LLMEngine, tmp_path: Path
) -> None:
    rows = [*ROWS[:1], {"text": "word " * 200}, {"text": ""}]
    data = prepared(data_spec(write(rows)), engine, tmp_path / "rows")
    assert (data.statistics.sources[0].rows, data.statistics.sources[0].dropped) == (6, 4)
    assert max(np.diff(data.train.samples.starts)) <= 64


def test_rows_without_a_prompt_are_named(write: Write) -> None:
    with pytest.raises(DataError, match=r"these are accepted: .*alpaca: instruction;"):
        list(prompts_of(data_spec(write([{"completion": "an answer"}]))).shards())


@pytest.mark.parametrize("name", [BUILTIN_CHATS, BUILTIN_RECALL])  # the long ones exceed this teacher's context
def test_built_in_requests_are_measured_on_the_split_that_says_so(name: str, engine: LLMEngine, tmp_path: Path) -> None:
    """The side is the recipe's: one source of each split, nothing held out by chance."""
    settings = {"max_tokens": 4, "seed": 1}
    sources = [
        {"name_or_path": name, "split": split, "sample_count": count, "complete": settings}
        for split, count in (("train", 5), ("held_out", 2))
    ]
    spec, store = data_spec(*sources, max_length=1024), InMemoryAnswers()
    one = prompts_of(spec)
    for index, source in enumerate(spec.sources):
        write_answers(replace(one, source=source, index=index), store, lambda: engine)
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    tokenizer.chat_template = None  # as in `prompts_of`
    prepared = prepare_data(spec, tokenizer, tmp_path, seed=0, written=WrittenBy(one.teacher, store))
    assert (prepared.statistics.train.samples, prepared.statistics.held_out.samples) == (5, 2)


@pytest.mark.parametrize("name", BUILTIN_PROMPTS)
def test_something_is_held_out_where_a_split_is(name: str) -> None:
    held_out = {"name_or_path": name, "split": "held_out", "complete": {}}
    train = {**held_out, "split": "train"}
    data = {"sources": [train, held_out], "validation_fraction": 0.0}
    assert JobSpec.model_validate({"name": "n", "data": data}).data.sources[1].is_held_out
    with pytest.raises(ValueError, match="validation_fraction is 0"):
        JobSpec.model_validate({"name": "n", "data": {**data, "sources": [train]}})
