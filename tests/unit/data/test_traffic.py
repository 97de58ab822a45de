"""Captured traffic as a data source: which requests become rows, and on which side of a split."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from swiftkv_platform.contract.traffic import CapturedRequest
from swiftkv_platform.data import traffic as traffic_module
from swiftkv_platform.data.completions import PromptSource, TeacherCompletions, TeacherIdentity
from swiftkv_platform.data.documents import DocumentEncoder
from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.data.prepared import PreparedData
from swiftkv_platform.data.traffic import hash_conversation
from swiftkv_platform.engine import EngineConfig, LLMEngine
from swiftkv_platform.errors import DataError, InvalidInputError
from swiftkv_platform.jobs.worker import setup
from swiftkv_platform.jobs.worker.prepare import write_source_answers
from swiftkv_platform.jobs.worker.setup import ObjectStoreFiles
from swiftkv_platform.sources import UNRESTRICTED, Access, TrafficSource, parse_source
from swiftkv_platform.specs import BUILTIN_TEACHER, DataSourceSpec, DataSpec
from swiftkv_platform.storage.object_store import open_store
from tests.support.captured_traffic import DEPLOYMENT, NOON, SOURCE, Traffic
from tests.support.training_text import CHAT, prepare, samples_of, targets, texts, turns

pytestmark = pytest.mark.usefixtures("own_cache")

WINDOW = {"name_or_path": SOURCE, "until": "2024-10-05"}
Prepare = Callable[..., PreparedData]


@pytest.fixture
def traffic(tmp_path: Path) -> Traffic:
    return Traffic(open_store(str(tmp_path / "store")))


@pytest.fixture
def prepare_traffic(traffic: Traffic, tmp_path: Path) -> Prepare:
    """Return a function that prepares the traffic as a new attempt does. Arguments: fields of the source."""

    def run(*, data: dict[str, Any] | None = None, **source: Any) -> PreparedData:
        workspace = tmp_path / f"workspace-{time.monotonic_ns()}"
        settings = {"template": CHAT, "max_length": 256, "access": traffic.access, **(data or {})}
        return prepare({**WINDOW, **source}, remote=ObjectStoreFiles(workspace), **settings)

    return run


def left_out(prepared: PreparedData) -> dict[str, int]:
    return prepared.statistics.sources[0].left_out


def test_chats_become_conversations_and_prompts_become_texts(traffic: Traffic, prepare_traffic: Prepare) -> None:
    traffic.chat("ask", "say", system="be brief")
    traffic.text("def f", "(x):")
    prepared = prepare_traffic()
    assert texts(prepared.train) == ["<system>be brief|<user>ask|<assistant>say|", "^def f(x):$"]
    source = prepared.statistics.sources[0]
    assert (source.formats, source.rows, source.left_out) == ({"messages": 1, "text": 1}, 2, {})
    assert prepare_traffic(data={"train_on": "assistant"}).statistics.train.counted_tokens == len("say|(x):$def f")


def test_functions_are_part_of_a_conversation(traffic: Traffic, prepare_traffic: Prepare) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "find")]
    for number in (1, 2):
        traffic.chat("ask", "say", tools=tools[:number])
    named = "{% for t in tools %}[{{ t.function.name }}]{% endfor %}" + CHAT
    rows = prepare_traffic(data={"template": named}).train
    assert texts(rows) == ["[look]<user>ask|<assistant>say|", "[look][find]<user>ask|<assistant>say|"]


@pytest.mark.parametrize("per_merge", [1, 1 << 20])
def test_as_served_a_request_is_used_once_and_without_those_that_a_later_one_contains(
    traffic: Traffic, prepare_traffic: Prepare, monkeypatch: pytest.MonkeyPatch, per_merge: int
) -> None:
    monkeypatch.setattr(traffic_module, "_HASHES_PER_MERGE", per_merge)
    traffic.chat("a", "b", "c", "d", "e", "f")  # stored by a faster replica than its beginnings
    traffic.chat("a", "b")
    traffic.chat("a", "b", "c", "d")
    traffic.chat("a", "b", "c", "other")  # another answer to the same prompt
    traffic.chat("a", "b", "c", "other")
    traffic.chat("a", "b", system="another conversation")
    traffic.text("a", "bc")
    traffic.text("ab", "c")
    prepared = prepare_traffic()
    assert texts(prepared.train) == [
        "<system>another conversation|<user>a|<assistant>b|",
        "<user>a|<assistant>b|<user>c|<assistant>d|<user>e|<assistant>f|",
        "<user>a|<assistant>b|<user>c|<assistant>other|",
        "^abc$",
    ]
    assert left_out(prepared) == {"repeated": 2, "contained in later ones": 2}
    messages = [message for message, _ in prepared.statistics.format_messages()]
    assert any("requests left out: 2 repeated, 2 contained in later ones" in message for message in messages)


def call_and_answer(first: str, second: str) -> list[dict[str, Any]]:
    """A question, two calls with these ids, their results in reverse, and an answer."""
    calls = [{"id": each, "function": {"name": "look", "arguments": {}}} for each in (first, second)]
    results = [
        {"role": "tool", "content": "2", "tool_call_id": second},
        {"role": "tool", "content": "1", "tool_call_id": first},
    ]
    asked = {"role": "user", "content": "ask"}
    return [asked, {"role": "assistant", "tool_calls": calls}, *results, {"role": "assistant", "content": "say"}]


def test_ids_of_calls_distinguish_no_conversations(traffic: Traffic, prepare_traffic: Prepare) -> None:
    """A replica chooses ids at random, also those of the answer that it captures."""
    traffic.store(path="/generate", messages=call_and_answer("a1", "b1")[:2])
    traffic.store(path="/generate", messages=call_and_answer("a2", "b2"))
    traffic.store(path="/generate", messages=call_and_answer("a3", "b3"))
    crossed = call_and_answer("a4", "b4")
    crossed[2]["tool_call_id"], crossed[3]["tool_call_id"] = "a4", "b4"
    traffic.store(path="/generate", messages=crossed)
    called = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls and m.tool_calls|length }};{% endfor %}"
    )
    prepared = prepare_traffic(data={"template": called})
    assert left_out(prepared) == {"repeated": 1, "contained in later ones": 1}
    assert len(texts(prepared.train)) == 2, "results of other calls are another conversation"


def test_answers_that_were_cut_off_are_not_trained_on(traffic: Traffic, prepare_traffic: Prepare) -> None:
    traffic.chat("ask", "sa", finish_reason="length")
    traffic.text("def", " f(", finish_reason="length")
    with pytest.raises(DataError, match=r"has no rows; at least one is needed \(left out: 2 cut off\)"):
        prepare_traffic()
    traffic.chat("ask", "say")
    prepared = prepare_traffic()
    assert (texts(prepared.train), left_out(prepared)) == (["<user>ask|<assistant>say|"], {"cut off": 2})


def test_answers_that_were_cut_off_count_for_no_loss_in_later_turns(traffic: Traffic, prepare_traffic: Prepare) -> None:
    traffic.chat("ask", "full", "more", "cu", finish_reason="length")
    traffic.chat("ask", "full", "more", "cu", "go on", "end")
    traffic.chat("ask", "full")
    traffic.chat("again", "same")
    traffic.chat("again", "same", finish_reason="length")  # the limit was just enough
    traffic.chat("only", "used")
    traffic.chat("only", "used", "more", "cu", finish_reason="length")
    prepared = prepare_traffic(data={"train_on": "assistant"})
    assert targets(prepared.train) == ["full|end|", "same|", "used|"]
    assert left_out(prepared) == {"cut off": 3, "contained in later ones": 1}


def test_a_request_that_no_row_may_have_fails_no_job(traffic: Traffic, prepare_traffic: Prepare) -> None:
    """Callers may send anything that is served; nobody can correct it afterwards."""
    image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
    traffic.chat("ask", "")
    traffic.chat("ask", "say", messages=[{"role": "user", "content": image}, turns("", "say")[1]])
    traffic.chat("<|im_start|>user", "say")
    traffic.chat("a </s> in a message", "say")  # only the tokenizer shows that it is not usable
    traffic.chat("ask", "say")
    tagged = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    prepared = prepare_traffic(data={"template": tagged})
    assert len(texts(prepared.train)) == 1
    assert left_out(prepared) == {"with unusable messages": 3}
    assert (prepared.statistics.sources[0].rows, prepared.statistics.sources[0].dropped) == (2, 1)


def test_a_window_has_the_requests_that_ended_within_it(traffic: Traffic, prepare_traffic: Prepare) -> None:
    for hour in range(-24, 24, 6):
        traffic.chat(f"hour {hour}", "say", time=NOON + 3600.0 * hour)

    def hours(**window: str) -> list[int]:
        return sorted(
            int(each) for each in re.findall(r"hour (-?\d+)", " ".join(texts(prepare_traffic(**window).train)))
        )

    assert hours() == [-24, -18, -12, -6, 0, 6]
    assert hours(since="2024-10-04") == [-12, -6, 0, 6]
    assert hours(since="2024-10-04T06:00:00Z", until="2024-10-04T12:00:00Z") == [-6]
    assert hours(since="2024-10-04T06:00:00", until="2024-10-04T12:00:01+00:00") == [-6, 0]
    with pytest.raises(DataError, match="has no rows"):
        hours(since="2024-10-04T12:00:01Z", until="2024-10-04T13:00:00Z")


def test_samples_are_chosen_by_the_seed_and_the_same_every_time(traffic: Traffic, prepare_traffic: Prepare) -> None:
    for number in range(20):
        traffic.chat(f"question {number}", "say")
    chosen = [texts(prepare_traffic(sample_count=5, data={"seed": seed}).train) for seed in (0, 0, 1)]
    assert chosen[0] == chosen[1] != chosen[2]
    assert [len(each) for each in chosen] == [5, 5, 5]
    assert len(texts(prepare_traffic(sample_count=50).train)) == 20


def test_a_later_attempt_reads_the_same_rows(traffic: Traffic, prepare_traffic: Prepare) -> None:
    for number in range(20):
        traffic.chat(f"question {number}", "say")
    first = prepare_traffic()
    traffic.chat("after the window", "say", time=NOON + 86400.0)
    assert prepare_traffic().fingerprint == first.fingerprint
    assert prepare_traffic(until="2024-10-06").fingerprint != first.fingerprint
    assert prepare_traffic(since="2024-10-04T12:00:10Z").fingerprint != first.fingerprint


def test_what_was_deleted_before_a_job_reads_is_not_in_it(traffic: Traffic, prepare_traffic: Prepare) -> None:
    for number in range(6):
        traffic.chat(f"question {number}", "say", user=f"user {number % 2}")
    assert len(texts(prepare_traffic().train)) == 6
    traffic.delete(user="user 1")
    traffic.delete(request_id="r1")
    assert texts(prepare_traffic().train) == [f"<user>question {number}|<assistant>say|" for number in (2, 4)]


def test_requests_that_replicas_have_not_stored_yet_are_waited_for(
    traffic: Traffic, prepare_traffic: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the next attempt would read more than the first."""
    monkeypatch.setattr(setup, "MAX_WRITE_DELAY_S", 1.5)
    now = time.time()
    traffic.chat("early", "say", time=now - 10)
    late = threading.Timer(0.5, partial(traffic.chat, "late", "say", time=now - 1))
    late.start()
    window = DataSourceSpec(name_or_path=SOURCE).resolve_window(now)
    prepared = prepare_traffic(until=window.until)
    late.join()
    assert texts(prepared.train) == ["<user>early|<assistant>say|", "<user>late|<assistant>say|"]


def find_conversations(rows: PackedRows) -> set[str]:
    """Return the numbers of the conversations whose text is in the rows."""
    found = [re.search(r"talk (\d+)", text) for text in texts(rows)]
    return {match[1] for match in found if match is not None}


def check_split(prepared: PreparedData, num_conversations: int) -> None:
    """Check that every conversation is in one split, and that no text is lost."""
    train, reported, steering = map(find_conversations, (prepared.train, prepared.held_out, prepared.steering))
    assert train
    assert reported
    assert not train & reported
    assert not train & steering
    assert not reported & steering
    assert len(train | reported | steering) == num_conversations


@pytest.mark.parametrize(("num_conversations", "fraction"), [(100, 0.2), (100, 0.01), (12, 0.01), (2, 0.5), (2, 0.001)])
def test_all_requests_of_a_conversation_are_in_one_split(
    traffic: Traffic, prepare_traffic: Prepare, num_conversations: int, fraction: float
) -> None:
    """Turns, near-duplicates with other later turns or tools, and several answers to a text."""
    for number in range(num_conversations):
        if number % 4 == 3:
            for branch in range(3):
                traffic.text(f"talk {number} " * 40, f"answer {branch}")  # longer than a row
            continue
        for branch in range(3):
            traffic.chat(f"talk {number}", "say", f"branch {branch}", "no", system="be brief")
        traffic.chat(f"talk {number}", "say", "branch 0", "no", "more", "yes", system="be brief")
        traffic.chat(f"talk {number}", "cut off", finish_reason="length", system="be brief")
    settings = {"validation_fraction": fraction, "with_steering": True}
    prepared = prepare_traffic(data=settings)
    check_split(prepared, num_conversations)
    if num_conversations == 100 and fraction == 0.2:
        assert 10 <= len(find_conversations(prepared.held_out) | find_conversations(prepared.steering)) <= 30
        assert find_conversations(prepared.steering)


def test_long_texts_are_not_divided_either(traffic: Traffic, prepare_traffic: Prepare) -> None:
    """Of little other text, single samples are held out."""
    for number in range(3):
        traffic.text(f"talk {number} " * 500, "answer")
    prepared = prepare_traffic(data={"validation_fraction": 0.01, "with_steering": True})
    check_split(prepared, 3)
    assert (len(find_conversations(prepared.train)), len(prepared.held_out.members) > 10) == (2, True)


def test_a_single_conversation_is_not_divided(traffic: Traffic, prepare_traffic: Prepare) -> None:
    for branch in range(5):
        traffic.chat("talk 0", "say", f"branch {branch}", "no")
    prepared = prepare_traffic(data={"validation_fraction": 0.5, "with_steering": True})
    assert (len(prepared.train.members), len(prepared.held_out.members), len(prepared.steering.members)) == (5, 0, 0)


def test_a_conversation_is_in_the_same_split_of_every_window(traffic: Traffic, prepare_traffic: Prepare) -> None:
    for number in range(200):
        traffic.chat(f"talk {number}", "say")
        traffic.chat(f"talk {number}", "say", "more", "no")

    def find_held_out(**window: str) -> tuple[set[str], set[str]]:
        prepared = prepare_traffic(data={"validation_fraction": 0.2}, **window)
        return find_conversations(prepared.train), find_conversations(prepared.held_out)

    whole, half = find_held_out(), find_held_out(since="2024-10-04T12:03:00Z")
    assert half[0] < whole[0]
    assert half[1] < whole[1]


def test_other_sources_are_split_as_before(traffic: Traffic, prepare_traffic: Prepare, tmp_path: Path) -> None:
    """A document is on the same side in every mixture."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number in range(200):
        (corpus / f"{number}.txt").write_text(f"document {number} of many")
        traffic.chat(f"talk {number}", "say")
    settings: dict[str, Any] = {"template": CHAT, "max_length": 256, "validation_fraction": 0.2}
    alone = prepare(str(corpus), **settings)
    mixed = prepare(str(corpus), WINDOW, remote=ObjectStoreFiles(tmp_path / "work"), access=traffic.access, **settings)
    assert [text for text in texts(mixed.held_out) if "document" in text] == texts(alone.held_out)


def test_the_key_of_a_conversation_does_not_depend_on_its_answers() -> None:
    def make_keys(messages: list[dict[str, Any]]) -> set[int]:
        fields = {"id": "r", "time": 1.0, "path": "/", "model": "m", "finish_reason": "stop"}
        request = CapturedRequest.model_validate(
            {**fields, "messages": messages, "prompt_tokens": 1, "completion_tokens": 1}
        )
        contents = (traffic_module._parse_content(request, with_answers=each) for each in (True, False))
        return {hash_conversation(request, content) for content in contents}

    system = {"role": "system", "content": "be brief"}
    first = make_keys([system, *turns("a", "b")])
    assert len(first) == 1
    assert first == make_keys([system, *turns("a", "other", "c", "d")])
    parts = [{"type": "text", "text": "a"}]
    assert first == make_keys([system, {"role": "user", "content": parts}, turns("", "b")[1]])
    assert not first & make_keys(turns("a", "b"))
    assert not first & make_keys([system, *turns("b", "a")])


TEACHER = Path(str(files("swiftkv_platform.sources") / "teacher"))


class InMemoryAnswers(dict[str, bytes]):
    """A `CompletionStore`."""

    load_answers = dict[str, bytes].get
    store_answers = dict[str, bytes].__setitem__


@pytest.mark.slow("writes with a model")
def test_the_teacher_answers_each_prompt_once_in_the_split_of_its_conversation(
    traffic: Traffic, tmp_path: Path
) -> None:
    for number in range(12):
        for _ in range(2):
            traffic.chat(f"talk {number}", "one")
        traffic.chat(f"talk {number}", "another", finish_reason="length")  # the same prompt
        traffic.chat(f"talk {number}", "one", "go on", "two")
        traffic.text(f"def talk {number}:", "(")
    traffic.chat("<|im_start|>", "say")
    tokenizer: Any = AutoTokenizer.from_pretrained(TEACHER)
    tokenizer.chat_template = f"{{% if false %}}{tokenizer.eos_token}{{% endif %}}{CHAT}"
    traffic.chat(f"a {tokenizer.eos_token} in a message", "say")  # only the tokenizer shows that it is not usable
    source = {**WINDOW, "complete": {"max_tokens": 4, "num_completions": 2}}
    spec = DataSpec.model_validate({"sources": [source], "max_length": 64, "validation_fraction": 0.3})
    encoder = DocumentEncoder(tokenizer, max_length=64, train_on="all")
    teacher = TeacherIdentity(BUILTIN_TEACHER, None, "float32", 2048)
    engine = LLMEngine.from_pretrained(TEACHER, EngineConfig(kv_cache_bytes=1 << 24, dtype="float32"))
    answers = InMemoryAnswers()
    prompts = partial(PromptSource, spec.sources[0], 0, encoder, teacher=teacher, seed=0, access=traffic.access)
    write_source_answers(prompts(remote=ObjectStoreFiles(tmp_path / "write")), answers, lambda: engine)
    (tmp_path / "rows").mkdir()
    prepared = prepare_data(
        spec,
        tokenizer,
        tmp_path / "rows",
        seed=0,
        remote=ObjectStoreFiles(tmp_path / "prepare"),
        access=traffic.access,
        completions=TeacherCompletions(teacher, answers),
        with_steering=True,
    )
    statistics = prepared.statistics.sources[0]
    assert statistics.left_out == {"with unusable messages": 1, "repeated": 24}
    assert (statistics.rows, statistics.dropped) == (2 * 37, 2)
    sides = []
    for rows in (prepared.train, prepared.held_out, prepared.steering):
        decoded = [tokenizer.decode(tokens) for tokens, _ in samples_of(rows)]
        assert not any("two" in text for text in decoded), "recorded answers are dropped"
        sides.append({re.search(r"(def )?talk (\d+)[:|]", text)[0] for text in decoded if "talk" in text})  # type: ignore[index]
    assert all(sides)
    assert sum(map(len, sides)) == len(set.union(*sides)) == 24


def test_only_the_control_plane_grants_traffic(traffic: Traffic, prepare_traffic: Prepare) -> None:
    traffic.chat("ask", "say")
    with pytest.raises(InvalidInputError, match="only jobs of its control plane can read; submit the job with") as told:
        prepare_traffic(data={"access": UNRESTRICTED})
    assert (told.value.field, told.value.value) == ("data.sources[0].name_or_path", SOURCE)
    with pytest.raises(InvalidInputError, match="there is no deployment with this id"):
        prepare_traffic(data={"access": Access(traffic={})})


@pytest.mark.parametrize(
    ("field", "value"), [("split", "test"), ("subset", "main"), ("format", "messages"), ("streaming", True)]
)
def test_fields_that_captured_traffic_does_not_have_are_refused(
    traffic: Traffic, prepare_traffic: Prepare, field: str, value: Any
) -> None:
    with pytest.raises(DataError, match=f"remove {field}") as refused:
        prepare_traffic(**{field: value})
    assert (refused.value.field, refused.value.value) == (f"data.sources[0].{field}", value)


def test_the_name_of_captured_traffic_has_the_id_of_a_deployment() -> None:
    assert parse_source(SOURCE, field="f", relative_paths=False) == TrafficSource(SOURCE)
    assert TrafficSource(SOURCE).deployment_id == DEPLOYMENT
    for name in ("traffic:", "traffic:chat", SOURCE[:-1], f"{SOURCE}x", SOURCE.lower(), "traffic:dep_../../acme"):
        with pytest.raises(InvalidInputError, match=r"names no deployment; traffic:dep_\.\.\. with its id"):
            parse_source(name, field="f")
    with pytest.raises(InvalidInputError, match="captured traffic; use a hub id"):
        UNRESTRICTED.parse_model(SOURCE)
