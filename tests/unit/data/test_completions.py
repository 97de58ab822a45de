"""The built-in teacher answers prompts: the same answers whichever worker writes them, and each written once."""

from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from transformers import AutoTokenizer

from swiftkv_platform.data import completions
from swiftkv_platform.data.completions import Completion, PromptSource, TeacherCompletions, TeacherIdentity
from swiftkv_platform.data.documents import DocumentEncoder
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.data.prepared import PreparedData
from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine, SamplingParams
from swiftkv_platform.errors import DataError, GenerationError, InvalidInputError, StorageError
from swiftkv_platform.jobs.worker import served_teacher
from swiftkv_platform.jobs.worker.prepare import write_source_answers
from swiftkv_platform.jobs.worker.served_teacher import ServedTeacher
from swiftkv_platform.specs import BUILTIN_CHATS, BUILTIN_PROMPTS, BUILTIN_RECALL, BUILTIN_TEACHER, DataSpec, JobSpec
from swiftkv_platform.specs.data import CompletionSpec
from tests.contract.serving.replicas import application, version_of
from tests.support.fakes.scripted_server import Answer, Script, json_answer, serve
from tests.support.servers import serving
from tests.support.training_text import CHAT, Write, turns

pytestmark = pytest.mark.slow("writes with models")

TEACHER = Path(str(files("swiftkv_platform.sources") / "teacher"))
ROWS: list[dict[str, Any]] = [{"text": f"def function_{i}(self, value):\n    "} for i in range(5)]
SETTINGS = {"max_tokens": 8, "num_completions": 2, "seed": 3}


class InMemoryAnswers(dict[str, bytes]):
    """A `CompletionStore` that refuses to overwrite."""

    load_answers = dict[str, bytes].get

    def store_answers(self, key: str, data: bytes) -> None:
        assert key not in self, "an answer is written twice"
        self[key] = data


@pytest.fixture(scope="module")
def engine() -> LLMEngine:
    return LLMEngine.from_pretrained(TEACHER, EngineConfig(kv_cache_bytes=1 << 24, dtype="float32"))


@pytest.fixture(autouse=True)
def _two_prompts_a_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "_PROMPTS_PER_SHARD", 2)


Prompts = Callable[..., dict[str, Any]]


@pytest.fixture
def prompts(write: Write) -> Prompts:
    """Return a function that writes rows of prompts and returns a source that has them completed."""
    return lambda rows, **settings: {"name_or_path": write(rows), "complete": {**SETTINGS, **settings}}


def data_spec(*sources: dict[str, Any], **settings: Any) -> DataSpec:
    return DataSpec.model_validate({"sources": sources, "max_length": 64, "validation_fraction": 0.0, **settings})


def tokenizer_of(template: str | None = None) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    tokenizer.chat_template = template
    return tokenizer


def prompts_of(spec: DataSpec, template: str | None = None) -> PromptSource:
    encoder = DocumentEncoder(tokenizer_of(template), max_length=spec.max_length, train_on=spec.train_on)
    teacher = TeacherIdentity(BUILTIN_TEACHER, None, "float32", 2048)
    return PromptSource(spec.sources[0], 0, encoder, teacher=teacher, seed=0, remote=None)


def written(source: PromptSource, engine: LLMEngine) -> tuple[InMemoryAnswers, list[Completion]]:
    store = InMemoryAnswers()
    write_source_answers(source, store, lambda: engine)
    return store, list(source.read_teacher_completions(store))


def test_every_prompt_is_answered_by_the_teacher_itself(prompts: Prompts, engine: LLMEngine) -> None:
    store, answers = written(prompts_of(data_spec(prompts(ROWS, temperature=0.0))), engine)
    assert (len(store), len(answers)) == (3, 10)
    tokenizer = tokenizer_of()
    asked = [[tokenizer.bos_token_id, *tokenizer.encode(row["text"], add_special_tokens=False)] for row in ROWS]
    for i, output in enumerate(engine.generate(asked, SamplingParams(max_tokens=8, temperature=0.0))):
        assert answers[2 * i].prompt_token_ids == tuple(asked[i])
        assert [answer.token_ids for answer in answers[2 * i : 2 * i + 2]] == [tuple(output.token_ids)] * 2
        assert answers[2 * i].text == output.text


def test_answers_depend_on_the_seed_and_on_nothing_around_them(prompts: Prompts, engine: LLMEngine) -> None:
    def answered(rows: list[dict[str, Any]], **settings: Any) -> list[Completion]:
        return written(prompts_of(data_spec(prompts(rows, **settings))), engine)[1]

    answers, others, backwards = answered(ROWS), answered(ROWS, seed=4), answered(ROWS[::-1])
    assert answers == answered(ROWS)
    assert sorted(answers, key=lambda a: a.text) == sorted(backwards, key=lambda a: a.text)
    assert {a.token_ids for a in answers} != {a.token_ids for a in others}
    assert answers[0].token_ids != answers[1].token_ids, "answers to one prompt are drawn independently"


def test_workers_share_the_shards_and_a_retry_writes_the_missing_ones(prompts: Prompts, engine: LLMEngine) -> None:
    source = prompts_of(data_spec(prompts(ROWS)))
    whole, answers = written(source, engine)
    store, told = InMemoryAnswers(), list[tuple[int, int]]()

    def write(load: Callable[[], LLMEngine] = lambda: engine, **share: int) -> int:
        return write_source_answers(source, store, load, progress=lambda *counts: told.append(counts), **share)

    shares = [write(worker=worker, num_workers=2) for worker in range(2)]
    assert all(shares)
    assert told == [(0, 3), (2, 3), (3, 3), (0, 2), (2, 2)]
    assert sum(shares) == sum(len(answer.token_ids) for answer in answers)
    assert store == whole
    del store[next(iter(whole))]
    with pytest.raises(StorageError, match="are missing"):
        list(source.read_teacher_completions(store))
    told.clear()
    write()
    assert store == whole
    assert told == [(0, 5), (2, 5)]
    assert write(lambda: pytest.fail("everything is there: no model need be loaded")) == 0


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "ask"}, "<user>ask|<assistant>"),
        ({"question": "ask", "answer": "another's"}, "<user>ask|<assistant>"),
        ({"instruction": "ask", "input": "this"}, "<user>ask\n\nthis|<assistant>"),
        ({"messages": turns("ask", "another's")}, "<user>ask|<assistant>"),
        ({"conversations": [{"from": "human", "value": "ask"}], "system": "be"}, "<system>be|<user>ask|<assistant>"),
        ({"text": "def f("}, "def f("),
        ({"prompt": ""}, ""),
        ({"messages": [{"role": "assistant", "content": "first"}]}, ""),
    ],
)
def test_a_prompt_ends_where_the_answer_begins(prompts: Prompts, row: dict[str, Any], prompt: str) -> None:
    ((found,),) = [shard.prompts for shard in prompts_of(data_spec(prompts([row])), CHAT).plan_shards()]
    assert tokenizer_of().decode(found.prompt_token_ids, skip_special_tokens=True) == prompt


def test_texts_may_give_their_beginning_only(prompts: Prompts) -> None:
    source = prompts_of(data_spec(prompts(ROWS, prompt_tokens=3)))
    assert {len(prompt.prompt_token_ids) for shard in source.plan_shards() for prompt in shard.prompts} == {3}
    with pytest.raises(DataError, match="alpaca: instruction;"):
        list(prompts_of(data_spec(prompts([{"completion": "an answer"}]))).plan_shards())


def prepared(spec: DataSpec, engine: LLMEngine, directory: Path) -> PreparedData:
    store, one = InMemoryAnswers(), prompts_of(spec)
    for index, source in enumerate(spec.sources):
        if source.complete is not None:
            write_source_answers(replace(one, source=source, index=index), store, lambda: engine)
    directory.mkdir()
    return prepare_data(spec, tokenizer_of(), directory, seed=0, completions=TeacherCompletions(one.teacher, store))


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_written_data_mixes_with_the_rest_token_for_token(
    prompts: Prompts, write: Write, engine: LLMEngine, tmp_path: Path, train_on: str
) -> None:
    plain = {"name_or_path": write([{"text": "x = 1"}], "plain.jsonl"), "weight": 2.0}
    spec = data_spec(prompts(ROWS), plain, train_on=train_on)
    data = prepared(spec, engine, tmp_path / "rows")
    _, answers = written(prompts_of(spec), engine)
    samples = data.train.samples
    for i, answer in enumerate(answers):
        span = slice(samples.starts[i], samples.starts[i + 1])
        assert tuple(samples.tokens[span].tolist()) == answer.prompt_token_ids + answer.token_ids
        first = len(answer.prompt_token_ids) - 1 if train_on == "assistant" else 0
        assert np.flatnonzero(samples.loss_mask[span]).tolist() == list(range(first, span.stop - span.start - 1))
    source, other = data.statistics.sources
    assert (source.rows, source.documents, source.formats) == (10, 10, {"text": 10})
    assert source.written_tokens == sum(len(answer.token_ids) for answer in answers)
    assert (data.statistics.train.documents, other.written_tokens) == (10 + 2, 0)


def test_answers_to_one_prompt_are_on_one_side_of_the_hold_out(
    prompts: Prompts, engine: LLMEngine, tmp_path: Path
) -> None:
    data = prepared(data_spec(prompts(ROWS), validation_fraction=0.4), engine, tmp_path / "rows")
    assert len(data.train.members) + len(data.held_out.members) == 10
    assert len(data.held_out.members) % 2 == 0


def test_prompts_without_room_for_an_answer_are_dropped_and_counted(
    prompts: Prompts, engine: LLMEngine, tmp_path: Path
) -> None:
    rows = [*ROWS[:1], {"text": "word " * 200}, {"text": ""}]
    data = prepared(data_spec(prompts(rows)), engine, tmp_path / "rows")
    assert (data.statistics.sources[0].rows, data.statistics.sources[0].dropped) == (6, 4)
    assert max(np.diff(data.train.samples.starts)) <= 64


@pytest.mark.parametrize(
    ("name", "other"),  # the long ones exceed this teacher's context
    [(BUILTIN_CHATS, "held_out"), (BUILTIN_CHATS, "unseen"), (BUILTIN_RECALL, "held_out")],
)
def test_built_in_requests_are_measured_on_the_split_that_says_so(
    name: str, other: str, engine: LLMEngine, tmp_path: Path
) -> None:
    """The recipe chooses the sides by split, one source for each, so nothing is held out at random."""
    sources = [
        {"name_or_path": name, "split": split, "sample_count": count, "complete": {"max_tokens": 4, "seed": 1}}
        for split, count in (("train", 5), (other, 2))
    ]
    statistics = prepared(data_spec(*sources, max_length=1024), engine, tmp_path / "rows").statistics
    assert (statistics.train.samples, statistics.held_out.samples) == (5, 2)
    if name != BUILTIN_CHATS:
        wrong = {**sources[1], "split": "unseen"}
        with pytest.raises(DataError, match=f"split is 'unseen'.*{name} has train and held_out"):
            prepared(data_spec(sources[0], wrong, max_length=1024), engine, tmp_path / "refused")


@pytest.mark.parametrize("name", BUILTIN_PROMPTS)
def test_something_is_held_out_where_a_split_is(name: str) -> None:
    held_out = {"name_or_path": name, "split": "held_out", "complete": {}}
    train = {**held_out, "split": "train"}
    data = {"sources": [train, held_out], "validation_fraction": 0.0}
    assert JobSpec.model_validate({"name": "n", "data": data}).data.sources[1].is_held_out
    with pytest.raises(ValueError, match="validation_fraction is 0"):
        JobSpec.model_validate({"name": "n", "data": {**data, "sources": [train]}})


def make_answer(text: str, finish: str = "stop", **fields: Any) -> Answer:
    choice = {"index": 0, "text": text, "finish_reason": finish, "logprobs": None, **fields}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return json_answer(
        {"id": "1", "object": "text_completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    )


def served_by(address: str, **settings: Any) -> ServedTeacher:
    complete = CompletionSpec(endpoint=f"{address}/v1", model="mdl_1", **settings)
    return ServedTeacher(complete, "data.sources[0].complete", tokenizer_of())


def test_a_served_teacher_answers_as_one_in_the_worker(prompts: Prompts, engine: LLMEngine) -> None:
    _, expected = written(prompts_of(data_spec(prompts(ROWS))), engine)
    other = LLMEngine.from_pretrained(TEACHER, EngineConfig(kv_cache_bytes=1 << 24, dtype="float32"))
    with serving(application(version_of(AsyncLLMEngine(other), context=2048))) as address:
        source = prompts_of(data_spec(prompts(ROWS, endpoint=f"{address}/v1", model="mdl_1")))
        store = InMemoryAnswers()
        served = served_by(address)
        write_source_answers(source, store, lambda: served)
    answers = list(source.read_teacher_completions(store))
    assert [answer.text for answer in answers] == [answer.text for answer in expected]
    num_prompt_tokens = sum(len(answer.prompt_token_ids) for answer in answers)
    counted = f"{address}/v1 counted {num_prompt_tokens} prompt tokens and 80 completion tokens of mdl_1"
    assert served.describe_usage() == counted


def test_answers_do_not_depend_on_where_the_server_runs(prompts: Prompts) -> None:
    def keys(**settings: Any) -> list[str]:
        return [shard.key for shard in prompts_of(data_spec(prompts(ROWS, **settings))).plan_shards()]

    here, there = (keys(endpoint=f"http://{host}/v1", model="m") for host in ("here", "there"))
    assert here == there
    assert here != keys(endpoint="http://here/v1", model="n") != keys()


def test_token_ids_are_the_servers_own_if_it_returns_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_API_KEY", "key-of-the-teacher")
    script = Script()
    with serve(script) as address:
        script.on("POST", "/v1/completions", make_answer("ab", token_ids=[7, 8, 9]))
        [answer] = served_by(address).generate([[1, 2, 3]], [SamplingParams(max_tokens=5, temperature=0.0, seed=4)])
    assert (answer.token_ids, answer.text) == ([7, 8, 9], "ab")
    [request] = script.requests
    wanted = {"model": "mdl_1", "prompt": [1, 2, 3], "max_tokens": 5, "temperature": 0.0, "top_p": 1.0, "seed": 4}
    assert request.body == wanted | {"return_token_ids": True}
    assert request.headers["authorization"] == "Bearer key-of-the-teacher"


def test_text_is_tokenized_and_ends_with_eos_if_the_teacher_ended_it() -> None:
    script, tokenizer = Script(), tokenizer_of()
    refusal = json_answer({"error": {"message": "unknown field return_token_ids"}}, 400)
    script.on("POST", "/v1/completions", refusal, make_answer("return 1"), make_answer("return 1", "length"))
    text = tokenizer.encode("return 1", add_special_tokens=False)
    with serve(script) as address:
        teacher = served_by(address)
        for expected in ([*text, tokenizer.eos_token_id], text):
            [answer] = teacher.generate([[1]], [SamplingParams(max_tokens=len(text))])
            assert answer.token_ids == expected
    assert ["return_token_ids" in request.body for request in script.requests] == [True, False, False]


def test_a_busy_server_is_asked_again_and_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    asked: list[list[int]] = [[1]]

    def ask(*steps: Answer) -> Any:
        script.requests.clear()
        script.on("POST", "/v1/completions", *steps)
        return served_by(address).generate(asked, [SamplingParams(max_tokens=5)])

    with serve(script) as address:
        busy, gone = json_answer({}, 429, retry_after="0.01"), json_answer({}, 503, retry_after="0.01")
        assert ask(busy, gone, Answer(cut=True), make_answer("a", token_ids=[5]))[0].token_ids == [5]
        assert len(script.requests) == 4
        monkeypatch.setattr(served_teacher, "_MAX_RETRIES", 1)
        refused: list[tuple[Answer, type[Exception], str]] = [
            (gone, GenerationError, r"data.sources\[0\].complete.endpoint is .* after 1 retries"),
            (json_answer({}, 401), InvalidInputError, "rejects the key; set TEACHER_API_KEY"),
            (json_answer({}, 404), InvalidInputError, "complete.model is 'mdl_1', which .* does not serve"),
            (json_answer({"error": {"message": "no"}}, 400), InvalidInputError, "which refuses a request: .*no"),
            (Answer(307, headers={"Location": "/v1/other"}), InvalidInputError, "which refuses a request"),
        ]
        for answer, error, message in refused:
            with pytest.raises(error, match=message):
                ask(answer)


@pytest.mark.parametrize(
    "given", [{"endpoint": "http://here/v1"}, {"model": "m"}, {"endpoint": "ftp://x", "model": "m"}]
)
def test_a_served_teacher_needs_an_address_and_a_name(given: dict[str, str]) -> None:
    with pytest.raises(ValidationError, match=r"a served teacher needs both|use an https:// URL"):
        CompletionSpec.model_validate(given)
