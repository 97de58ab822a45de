"""OpenAI's routes by OpenAI's own client, on whichever real engine the fixture `engine` gives."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from transformers import AutoTokenizer

from swiftkv_platform.engine import EngineConfig
from swiftkv_platform.engine.frontend import EngineFrontend
from swiftkv_platform.security.keys import KeyRing, Scope, create_key
from swiftkv_platform.serve.current import Current, ModelCard, Version
from swiftkv_platform.serve.http import create_http_app
from tests.unit.engine.tiny_models import save_swiftkv

MESSAGES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE = MESSAGES + "{% if add_generation_prompt %}assistant:{% endif %}"
GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "temperature": 0.0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_swiftkv(tmp_path_factory.mktemp("swiftkv"), 256)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engine_config() -> EngineConfig:
    # `swiftkv: false`: a student has no log-probabilities of its prompt in vLLM.
    return EngineConfig(max_num_seqs=8, stream_interval_s=0.0, kv_cache_bytes=16 << 20, swiftkv=False)


@pytest.fixture
def current(engine: EngineFrontend) -> Current:
    card = ModelCard(deployment="dep_1", model="tiny", manifest_digest=None, swiftkv=None, max_model_len=256)
    return Current(Version(engine, card, created=1))


def connect(app: FastAPI, api_key: str = "none") -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app))
    return openai.AsyncOpenAI(api_key=api_key, base_url="http://serve/v1", http_client=http, max_retries=0)


@pytest.fixture
def client(current: Current) -> openai.AsyncOpenAI:
    return connect(create_http_app(current))


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "swiftkv"
    with pytest.raises(openai.NotFoundError, match="'tiny' is served here"):
        await client.models.retrieve("other")


async def test_a_completion_is_the_engines(client: openai.AsyncOpenAI, model_dir: Path) -> None:
    answer = await client.completions.create(prompt="hello", **GREEDY)
    raw = await client._client.post(
        "http://serve/generate", json={"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    )
    assert [choice.text for choice in answer.choices] == [raw.json()["choices"][0]["text"]]
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 8, 13)


async def test_choices_are_samples_within_prompts(client: openai.AsyncOpenAI) -> None:
    sampled = {**GREEDY, "temperature": 1.0, "seed": 3}
    both = await client.completions.create(prompt=["hello", "world"], n=2, **sampled)
    apart = [await client.completions.create(prompt=prompt, n=2, **sampled) for prompt in ("hello", "world")]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in both.choices] == [choice.text for one in apart for choice in one.choices]
    assert both.usage is not None
    assert both.usage.prompt_tokens == 10, "a prompt counts once for all its samples"


@pytest.mark.parametrize("n", [1, 2])
async def test_a_streamed_completion_joins_to_the_whole(client: openai.AsyncOpenAI, n: int) -> None:
    whole = await client.completions.create(prompt="hello", n=n, seed=1, **GREEDY)
    stream = await client.completions.create(
        prompt="hello", n=n, seed=1, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    texts, usages = [""] * n, []
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
        if chunk.usage:
            usages.append(chunk.usage)
    assert texts == [choice.text for choice in whole.choices]
    assert usages == [whole.usage]


async def test_log_probabilities_and_echo(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(prompt="hello", logprobs=2, echo=True, **GREEDY)
    choice = answer.choices[0]
    found = choice.logprobs
    assert choice.text.startswith("hello")
    assert found is not None
    assert "".join(found.tokens or ())[:5] == "hello"
    assert len(found.tokens or ()) == len(found.token_logprobs or ()) == len(found.top_logprobs or ()) == 13
    assert (found.token_logprobs or [0])[0] is None
    assert all(value < 0 for value in (found.token_logprobs or ())[1:])
    assert (found.text_offset or ())[:6] == [0, 1, 2, 3, 4, 5]


async def test_a_chat_is_laid_out_by_the_template(client: openai.AsyncOpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "short"},
        {"role": "user", "content": [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]},
    ]
    answer = await client.chat.completions.create(messages=messages, **GREEDY)
    plain = await client.completions.create(prompt="system: short\nuser: hello\nassistant:", **GREEDY)
    assert answer.choices[0].message.content == plain.choices[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert plain.usage is not None
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens


async def test_a_streamed_chat_joins_to_the_whole(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    whole = await client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=3, **GREEDY)
    stream = await client.chat.completions.create(
        messages=messages, logprobs=True, top_logprobs=3, stream=True, **GREEDY
    )
    deltas = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
    assert [choice.delta.role for choice in deltas] == ["assistant"] + [None] * 7
    assert [choice.finish_reason for choice in deltas] == [None] * 7 + ["length"]
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    streamed = [token for choice in deltas if choice.logprobs for token in choice.logprobs.content or ()]
    assert [token.token for token in streamed] == [token.token for token in logprobs.content or ()]
    # The second prompt's beginning came from the prefix cache, so the last digits differ.
    expected = [token.logprob for token in logprobs.content or ()]
    assert [token.logprob for token in streamed] == pytest.approx(expected, abs=1e-4)
    for token in logprobs.content or ():
        assert len(token.top_logprobs) == 3
        assert math.isclose(token.logprob, token.top_logprobs[0].logprob), (
            "greedy: the chosen token is the most probable"
        )


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"model": "other"}, "model", "is served here"),
        ({"temperature": -1.0}, "temperature", "at least 0"),
        ({"best_of": 3}, "best_of", "only the value of n"),
        ({"suffix": "x"}, "suffix", "suffix is 'x'; no model here fills in the middle"),
        ({"extra_body": {"colour": "red"}}, "colour", "colour is not a field of /v1/completions"),
        ({"extra_body": {"max_token": 3}}, "max_token", "the nearest one is max_tokens"),
        ({"extra_body": {"top_logprobs": 3}}, "top_logprobs", "it is one of /v1/chat/completions"),
        ({"max_tokens": 0}, "max_tokens", "or be given with echo"),
        ({"max_tokens": 4, "extra_body": {"min_tokens": 5}}, "min_tokens", "at most max_tokens, 4"),
        (
            {"extra_body": {"min_tokens": 5, "structured_outputs": {"choice": ["a", "b"]}}},
            "min_tokens",
            "must be 0 where structured_outputs says where the answer ends",
        ),
        ({"extra_body": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens", "at least 1"),
        ({"prompt": "x" * 300}, "prompt", "the context of 256 tokens"),
    ],
)
async def test_bad_requests_have_openais_shape(
    client: openai.AsyncOpenAI, body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await client.completions.create(**{"prompt": "a", "model": "tiny", **body})
    assert caught.value.status_code == (404 if param == "model" else 400)
    assert caught.value.body is not None
    assert caught.value.param == param
    assert message in caught.value.message


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"modalities": ["text", "audio"]}, "modalities", "answers are text"),
        ({"web_search_options": {}}, "web_search_options", "nothing is searched"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
        ({"extra_body": {"echo": True}}, "echo", "it is one of /v1/completions"),
        ({"extra_body": {"continue_final_message": True}}, "body", "needs add_generation_prompt: false"),
    ],
)
async def test_bad_chats_have_openais_shape(
    client: openai.AsyncOpenAI, body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            **{"messages": [{"role": "user", "content": "a"}], "model": "tiny", **body}
        )
    assert caught.value.param == param
    assert message in caught.value.message


async def test_fields_without_effect_are_named_in_a_header(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}]
    plain = await client.chat.completions.with_raw_response.create(messages=messages, **GREEDY)
    assert "x-swiftkv-ignored-fields" not in plain.headers
    for stream in (False, True):
        answer = await client.chat.completions.with_raw_response.create(
            messages=messages,
            user="me",
            store=True,
            metadata={"a": "b"},
            service_tier="auto",
            safety_identifier="x",
            prompt_cache_key="x",
            prediction={"type": "content", "content": "hello"},
            reasoning_effort="low",
            modalities=["text"],
            stream=stream,
            **({"stream_options": {"include_obfuscation": False, "a\r\nb: c": 1}} if stream else {}),  # type: ignore[call-overload]
            **GREEDY,
        )
        named = set(answer.headers["x-swiftkv-ignored-fields"].split(", "))
        expected = {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prediction"}
        expected |= {"reasoning_effort", "modalities"}
        if stream:
            expected |= {"stream_options.include_obfuscation", "stream_options.a%0D%0Ab%3A%20c"}
        else:
            assert answer.parse().choices == plain.parse().choices
        assert named == expected


async def test_an_operator_sets_fields_to_be_ignored(client: openai.AsyncOpenAI, current: Current) -> None:
    body: dict[str, Any] = {"prompt": "hello", "suffix": "x", "extra_body": {"ignore_eos": True, "colour": "red"}}
    current.version.ignored_fields = frozenset({"suffix", "colour"})
    answer = await client.completions.with_raw_response.create(model="tiny", max_tokens=1, **body)
    assert answer.headers["x-swiftkv-ignored-fields"] == "suffix, colour"
    current.version.ignored_fields = frozenset({"*"})
    with pytest.raises(openai.BadRequestError, match="suffix is 'x'"):
        await client.completions.create(model="tiny", max_tokens=1, **body)
    assert (await client.completions.create(model="tiny", max_tokens=1, **body | {"suffix": None})).choices


async def test_null_is_as_if_a_field_was_left_out(client: openai.AsyncOpenAI) -> None:
    expected = await client.completions.create(prompt="hello", **GREEDY)
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    nothing = dict.fromkeys(("n", "top_p", "stop", "logit_bias", "min_tokens", "suffix", "stream_options", "user", "k"))
    answer = (await client._client.post("http://serve/v1/completions", json=body | nothing)).json()
    assert [choice["text"] for choice in answer["choices"]] == [choice.text for choice in expected.choices]


@pytest.mark.parametrize("n", [1, 2])
async def test_the_usage_so_far_is_in_every_event(client: openai.AsyncOpenAI, n: int) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.completions.create(
        prompt=["hello", "worlds"], n=n, seed=1, stream=True, stream_options=options, **GREEDY
    )
    chunks = [chunk async for chunk in stream]
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert len(usages) == len(chunks)
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-2:] == [16 * n] * 2, "the last event has the usage alone"
    assert {usage.prompt_tokens for usage in usages} <= {5, 6, 11}
    assert usages[-1].prompt_tokens == 11


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_is_scored_and_nothing_generated(client: openai.AsyncOpenAI, *, stream: bool) -> None:
    asked: dict[str, Any] = {**GREEDY, "prompt": "hello", "echo": True, "logprobs": 2}
    longer = (await client.completions.create(**asked | {"max_tokens": 1})).choices[0].logprobs
    answer: Any = await client.completions.create(**asked | {"max_tokens": 0}, stream=stream)
    if stream:
        [answer] = [chunk async for chunk in answer]
    else:
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 0)
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("hello", "length")
    assert longer is not None
    assert choice.logprobs.tokens == list("hello")
    assert choice.logprobs.token_logprobs[1:] == pytest.approx(longer.token_logprobs[1:5], abs=1e-4)  # type: ignore[index]
    unscored = await client.completions.create(**asked | {"max_tokens": 0, "logprobs": None})
    assert (unscored.choices[0].text, unscored.choices[0].logprobs) == ("hello", None)


async def test_an_answer_ends_no_earlier_than_it_may(client: openai.AsyncOpenAI) -> None:
    """Its text may end with what ended it."""
    whole = await client._client.post(
        "http://serve/generate", json={"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    )
    [choice] = whole.json()["choices"]
    stop = choice["token_ids"][2]
    asked = {**GREEDY, "prompt": "hello"}
    extra = {"ignore_eos": True, "stop_token_ids": [stop]}
    short = await client.completions.create(**asked | {"extra_body": extra})
    late = await client.completions.create(**asked | {"extra_body": {**extra, "min_tokens": 6}})
    assert (short.usage.completion_tokens, late.usage.completion_tokens > 6) == (  # type: ignore[union-attr]
        choice["token_ids"].index(stop) + 1,
        True,
    )
    string = choice["text"][3:5]
    cut, left = [
        await client.completions.create(
            stop=string, **asked | {"extra_body": {"ignore_eos": True, "include_stop_str_in_output": with_stop}}
        )
        for with_stop in (False, True)
    ]
    assert left.choices[0].text == cut.choices[0].text + string
    assert cut.choices[0].finish_reason == left.choices[0].finish_reason == "stop"


async def test_a_prompt_is_cut_to_its_end(client: openai.AsyncOpenAI) -> None:
    expected = await client.completions.create(prompt="world", **GREEDY)
    tokens = (await client._client.post("http://serve/tokenize", json={"prompt": "hello world"})).json()["tokens"]
    for prompt in ("hello world", tokens):
        extra = {"ignore_eos": True, "truncate_prompt_tokens": 5}
        answer = await client.completions.create(**{**GREEDY, "prompt": prompt, "extra_body": extra})
        assert answer.choices[0].text == expected.choices[0].text
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 5
    extra = {"ignore_eos": True, "truncate_prompt_tokens": -1}
    messages: Any = [{"role": "user", "content": "x" * 300}]
    chat = await client.chat.completions.create(messages=messages, **GREEDY | {"extra_body": extra})
    assert chat.usage is not None
    assert (chat.usage.prompt_tokens, chat.usage.completion_tokens) == (248, 8)


async def test_a_chat_goes_on_with_its_last_message(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "wor"}]
    for extra, prompt in (
        ({"add_generation_prompt": False, "continue_final_message": True}, "user: hello\nassistant: wor"),
        ({"add_generation_prompt": False}, "user: hello\nassistant: wor\n"),
    ):
        body = {"ignore_eos": True, **extra}
        answer = await client.chat.completions.create(messages=messages, **GREEDY | {"extra_body": body})
        plain = await client.completions.create(prompt=prompt, **GREEDY)
        assert answer.choices[0].message.content == plain.choices[0].text


async def test_keys_open_the_door_and_keep_tenants_apart(current: Current, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    tokens = [
        create_key(path, name=name, tenant=name, scopes=frozenset({scope}))
        for name, scope in (("ann", Scope.GENERATE), ("bob", Scope.GENERATE), ("eve", Scope.JOBS_READ))
    ]
    app = create_http_app(current, key_ring=KeyRing(path))
    ann, bob, eve = (connect(app, token) for token in tokens)
    prompt = "a prompt of more than one block of tokens; " * 4
    cached = []
    for who in (ann, ann, bob):
        usage = (await who.completions.create(prompt=prompt, **GREEDY)).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None  # type: ignore[attr-defined]
        cached.append(usage.prompt_tokens_details.cached_tokens)  # type: ignore[attr-defined]
    assert cached[1] >= 128
    assert cached == [0, cached[1], 0], "a prefix is found again by its own tenant alone"
    with pytest.raises(openai.PermissionDeniedError, match="this needs generate"):
        await eve.completions.create(prompt=prompt, **GREEDY)
    with pytest.raises(openai.AuthenticationError, match="unknown, or was revoked"):
        await connect(app, "skv_nobody").completions.create(prompt=prompt, **GREEDY)


async def test_a_tenants_deployment_answers_its_own_keys_alone(current: Current, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    scopes = frozenset({Scope.ADMIN})
    own, others = (create_key(path, name=name, tenant=name, scopes=scopes) for name in ("ann", "bob"))
    app = create_http_app(current, key_ring=KeyRing(path), tenant="ann")
    assert (await connect(app, own).completions.create(prompt="a", **GREEDY)).choices
    with pytest.raises(
        openai.PermissionDeniedError, match="key 'bob' is of tenant 'bob', and this deployment of another"
    ):
        await connect(app, others).completions.create(prompt="a", **GREEDY)


async def test_tokens_there_and_back(client: openai.AsyncOpenAI) -> None:
    there = await client._client.post("http://serve/tokenize", json={"prompt": "héllo"})
    tokens = there.json()["tokens"]
    back = await client._client.post("http://serve/detokenize", json={"tokens": tokens})
    assert back.json() == {"prompt": "héllo"}
    outside = await client._client.post("http://serve/detokenize", json={"tokens": [99999]})
    assert (outside.status_code, outside.json()["errors"][0]["field"]) == (422, "tokens")


async def test_metrics_count_what_was_served(client: openai.AsyncOpenAI) -> None:
    await client.completions.create(prompt="hello", n=2, **GREEDY)
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(prompt="x" * 300, model="tiny")
    text = (await client._client.get("http://serve/metrics")).text
    for line in (
        "swiftkv:prompt_tokens_total 5.0",
        "swiftkv:generation_tokens_total 16.0",
        'swiftkv:request_success_total{finished_reason="length"} 2.0',
        'swiftkv:rejected_requests_total{reason="invalid_input"} 1.0',
        "swiftkv:time_to_first_token_seconds_count 2.0",
        "swiftkv:num_requests_running 0.0",
    ):
        assert line in text
