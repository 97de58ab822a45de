"""OpenAI's routes with OpenAI's own client: answers, refusals, parameter values as clients write them, and tokens as
answers report them, on the real engine of the fixture `engine`."""

import math
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from swiftkv_platform.engine import EngineConfig
from swiftkv_platform.engine.frontend import EngineFrontend
from swiftkv_platform.security.keys import KeyRing, Scope, create_key
from swiftkv_platform.serve.replica_state import ModelVersion
from swiftkv_platform.specs.base import MAX_PRIORITY, MAX_SEED, MAX_TOP_K
from swiftkv_platform.specs.sampling import RANGES
from tests.contract.serving.mistakes import check_mistake, list_mistakes
from tests.contract.serving.replicas import application, asgi_client, openai_client, save_chat_model, version_of
from tests.support.fakes.tokenizers import BOS

MESSAGES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
TEMPLATE = MESSAGES + "{% if add_generation_prompt %}assistant:{% endif %}"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("swiftkv"), 256, TEMPLATE)


@pytest.fixture(scope="module")
def engine_config() -> EngineConfig:
    # `swiftkv: false`: in vLLM a student has no prompt log-probabilities.
    return EngineConfig(max_num_seqs=8, stream_interval_s=0.0, kv_cache_bytes=16 << 20, swiftkv=False)


@pytest.fixture
def version(engine: EngineFrontend) -> ModelVersion:
    return version_of(engine, "tiny", 256)


@pytest.fixture
def client(version: ModelVersion) -> Any:
    return openai_client(application(version))


@pytest.fixture
def http(version: ModelVersion) -> httpx.AsyncClient:
    return asgi_client(application(version))


def asked(**fields: Any) -> dict[str, Any]:
    """Return a request for 8 greedy tokens that ignores the end of text; `extra` holds fields that OpenAI does not
    have."""
    extra = {"ignore_eos": True, **fields.pop("extra", {})}
    return {"model": "tiny", "max_tokens": 8, "temperature": 0.0, "extra_body": extra, **fields}


async def complete(client: Any, prompt: Any = "hello", **fields: Any) -> Any:
    return await client.completions.create(prompt=prompt, **asked(**fields))


async def chat(client: Any, messages: Any = HELLO, **fields: Any) -> Any:
    return await client.chat.completions.create(messages=messages, **asked(**fields))


async def generate(http: httpx.AsyncClient) -> Any:
    """Return the same 8 tokens from `/generate`."""
    body = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return (await http.post("/generate", json=body)).json()["choices"][0]


def texts(answer: Any) -> list[str]:
    return [choice.text for choice in answer.choices]


async def test_models_are_listed(client: Any) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "swiftkv"
    with pytest.raises(openai.NotFoundError, match="model is 'org/other'; the served model is 'tiny'") as caught:
        await client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


async def test_a_completion_is_the_engines(client: Any, http: httpx.AsyncClient) -> None:
    answer, expected = await complete(client), await generate(http)
    assert texts(answer) == [expected["text"]]
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 8, 13)
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    nothing = dict.fromkeys(("n", "top_p", "stop", "logit_bias", "min_tokens", "suffix", "stream_options", "user", "k"))
    with_nulls = (await http.post("/v1/completions", json=body | nothing)).json()
    assert [choice["text"] for choice in with_nulls["choices"]] == texts(answer), "null means that the field is absent"


async def test_choices_are_samples_within_prompts(client: Any) -> None:
    sampled = {"n": 2, "temperature": 1.0, "seed": 3}
    both = await complete(client, ["hello", "world"], **sampled)
    apart = [await complete(client, prompt, **sampled) for prompt in ("hello", "world")]
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert texts(both) == [text for one in apart for text in texts(one)]
    assert both.usage.prompt_tokens == 10, "a prompt counts once for all its samples"


@pytest.mark.parametrize("n", [1, 2])
async def test_a_streamed_completion_joins_to_the_whole(client: Any, n: int) -> None:
    whole = await complete(client, n=n, seed=1)
    stream = await complete(client, n=n, seed=1, stream=True, stream_options={"include_usage": True})
    joined, usages = [""] * n, []
    async for chunk in stream:
        for choice in chunk.choices:
            joined[choice.index] += choice.text
        usages += [chunk.usage] if chunk.usage else []
    assert joined == texts(whole)
    assert usages == [whole.usage]


async def test_log_probabilities_and_echo(client: Any) -> None:
    [choice] = (await complete(client, logprobs=2, echo=True)).choices
    found = choice.logprobs
    assert choice.text.startswith("hello")
    assert "".join(found.tokens)[:5] == "hello"
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 13
    assert found.token_logprobs[0] is None
    assert all(value < 0 for value in found.token_logprobs[1:])
    assert found.text_offset[:6] == [0, 1, 2, 3, 4, 5]


async def test_a_chat_is_laid_out_by_the_template(client: Any) -> None:
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    answer = await chat(client, [{"role": "system", "content": "short"}, {"role": "user", "content": parts}])
    plain = await complete(client, "system: short\nuser: hello\nassistant:")
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", plain.choices[0].text)
    assert answer.usage.prompt_tokens == plain.usage.prompt_tokens


async def test_a_streamed_chat_joins_to_the_whole(client: Any) -> None:
    [whole] = (await chat(client, logprobs=True, top_logprobs=3)).choices
    stream = await chat(client, logprobs=True, top_logprobs=3, stream=True)
    deltas = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.message.content
    assert [choice.delta.role for choice in deltas] == ["assistant"] + [None] * 7
    assert [choice.finish_reason for choice in deltas] == [None] * 7 + ["length"]
    streamed = [token for choice in deltas if choice.logprobs for token in choice.logprobs.content or ()]
    assert [token.token for token in streamed] == [token.token for token in whole.logprobs.content]
    # The second prompt's beginning came from the prefix cache, so the last digits differ.
    expected = [token.logprob for token in whole.logprobs.content]
    assert [token.logprob for token in streamed] == pytest.approx(expected, abs=1e-4)
    for token in whole.logprobs.content:
        assert len(token.top_logprobs) == 3
        assert math.isclose(token.logprob, token.top_logprobs[0].logprob), "greedy: the most probable token is chosen"


@pytest.mark.parametrize(("path", "bodies", "field", "message"), list_mistakes())
async def test_a_mistake_has_the_same_error_on_each_engine(
    http: httpx.AsyncClient, path: str, bodies: list[bytes], field: str | None, message: str
) -> None:
    for body in bodies:
        await check_mistake(http, path, body, field, message)


IGNORED: dict[str, Any] = {
    **dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), "x"),
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "prediction": {"type": "content", "content": "hello"},
    "reasoning_effort": "low",
    "modalities": ["text"],
}


async def test_fields_without_effect_are_named_in_a_header(client: Any, version: ModelVersion) -> None:
    raw = client.chat.completions.with_raw_response.create
    plain = await raw(messages=HELLO, **asked())
    assert "x-swiftkv-ignored-fields" not in plain.headers
    options = {"stream_options": {"include_obfuscation": False, "a\r\nb: c": 1}}
    parts = {"stream_options.include_obfuscation", "stream_options.a%0D%0Ab%3A%20c"}
    for fields, named in (({}, set()), ({"stream": True, **options}, parts)):
        answer = await raw(messages=HELLO, **asked(**IGNORED, **fields))
        assert set(answer.headers["x-swiftkv-ignored-fields"].split(", ")) == {*IGNORED, *named}
        assert fields or answer.parse().choices == plain.parse().choices
    nested = {"stream_options": {"include_usage": None, "x": 1}, "response_format": {"type": "text"}}
    answer = await raw(messages=[{**HELLO[0], "x": 1}] * 2, **asked(stream=True, **nested))
    named = "stream_options.x, messages.x"
    assert set(answer.headers["x-swiftkv-ignored-fields"].split(", ")) == set(named.split(", "))
    version.ignored_fields = frozenset({"suffix", "colour"})
    unknown: dict[str, Any] = {"prompt": "hello", **asked(suffix="x", extra={"colour": "red"})}
    answer = await client.completions.with_raw_response.create(**unknown)
    assert answer.headers["x-swiftkv-ignored-fields"] == "suffix, colour", "the ignored fields are named"
    version.ignored_fields = frozenset({"*"})
    with pytest.raises(openai.BadRequestError, match="suffix is 'x'"):
        await client.completions.create(**unknown)
    deep: dict[str, Any] = {"structured_outputs": {"regex": "a+b", "colour": "red"}, "ignore_eos": False}
    unknown |= {"suffix": None, "extra_body": {**unknown["extra_body"], **deep}}
    answer = await client.completions.with_raw_response.create(**unknown)
    assert answer.headers["x-swiftkv-ignored-fields"] == "colour, structured_outputs.colour"
    version.ignored_fields = frozenset()
    with pytest.raises(openai.BadRequestError, match="structured_outputs has colour"):
        await complete(client, extra=deep)


@pytest.mark.parametrize("n", [1, 2])
async def test_the_usage_so_far_is_in_every_event(client: Any, n: int) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await complete(client, ["hello", "worlds"], n=n, seed=1, stream=True, stream_options=options)
    usages = [chunk.usage async for chunk in stream]
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert counts[0] >= 1
    assert counts[-2:] == [16 * n] * 2, "the last event has only the usage"
    assert {usage.prompt_tokens for usage in usages} <= {5, 6, 11}
    assert usages[-1].prompt_tokens == 11


async def test_a_prompt_is_scored_and_nothing_generated(client: Any) -> None:
    scored = {"echo": True, "logprobs": 2}
    longer = (await complete(client, **scored, max_tokens=1)).choices[0].logprobs.token_logprobs[1:5]
    answer = await complete(client, **scored, max_tokens=0)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 0)
    [chunk] = [chunk async for chunk in await complete(client, **scored, max_tokens=0, stream=True)]
    for [choice] in (answer.choices, chunk.choices):
        assert (choice.text, choice.finish_reason) == ("hello", "length")
        assert choice.logprobs.tokens == list("hello")
        assert choice.logprobs.token_logprobs[1:] == pytest.approx(longer, abs=1e-4)
    [unscored] = (await complete(client, echo=True, max_tokens=0)).choices
    assert (unscored.text, unscored.logprobs) == ("hello", None)


async def test_an_answer_ends_no_earlier_than_it_may(client: Any, http: httpx.AsyncClient) -> None:
    """The text may include the string that ended it."""
    whole = await generate(http)
    stop, string = whole["token_ids"][2], whole["text"][3:5]
    short = await complete(client, extra={"stop_token_ids": [stop]})
    late = await complete(client, extra={"stop_token_ids": [stop], "min_tokens": 6})
    assert short.usage.completion_tokens == whole["token_ids"].index(stop) + 1
    assert late.usage.completion_tokens > 6
    including = [{"include_stop_str_in_output": with_stop} for with_stop in (False, True)]
    cut, left = [(await complete(client, stop=string, extra=extra)).choices[0] for extra in including]
    assert left.text == cut.text + string
    assert (short.choices[0].stop_reason, cut.stop_reason, left.stop_reason) == (stop, string, string)
    assert cut.finish_reason == left.finish_reason == "stop"


async def test_a_prompt_is_cut_to_its_end(client: Any, http: httpx.AsyncClient) -> None:
    expected = await complete(client, "world")
    tokens = (await http.post("/tokenize", json={"prompt": "hello world"})).json()["tokens"]
    for prompt in ("hello world", tokens):
        answer = await complete(client, prompt, extra={"truncate_prompt_tokens": 5})
        assert (texts(answer), answer.usage.prompt_tokens) == (texts(expected), 5)
    long = [{"role": "user", "content": "x" * 300}]
    usage = (await chat(client, long, extra={"truncate_prompt_tokens": -1})).usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (248, 8)


async def test_a_chat_goes_on_with_its_last_message(client: Any) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "wor"}]
    for extra, ending in (({"continue_final_message": True}, ""), ({}, "\n")):
        answer = await chat(client, messages, extra={"add_generation_prompt": False, **extra})
        plain = await complete(client, f"user: hello\nassistant: wor{ending}")
        assert answer.choices[0].message.content == plain.choices[0].text


async def test_keys_open_the_door_and_keep_tenants_apart(version: ModelVersion, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    scopes = {"ann": Scope.GENERATE, "bob": Scope.GENERATE, "eve": Scope.JOBS_READ, "adm": Scope.ADMIN}
    keys = {name: create_key(path, name=name, tenant=name, scopes=frozenset({scope})) for name, scope in scopes.items()}
    app = application(version, key_ring=KeyRing(path))
    ann, bob, eve = (openai_client(app, keys[name]) for name in ("ann", "bob", "eve"))
    prompt = "a prompt of more than one block of tokens; " * 4
    usages = [(await complete(who, prompt)).usage for who in (ann, ann, bob)]
    first, again, another = [usage.prompt_tokens_details.cached_tokens for usage in usages]
    assert again >= 128
    assert first == another == 0, "a tenant reuses only its own prefixes"
    with pytest.raises(openai.PermissionDeniedError, match="this request needs the scope generate"):
        await complete(eve, prompt)
    with pytest.raises(openai.AuthenticationError, match="unknown, or was revoked"):
        await complete(openai_client(app, "skv_nobody"), prompt)
    own = application(version, key_ring=KeyRing(path), tenant="ann")
    assert (await complete(openai_client(own, keys["ann"]))).choices
    of_another = "key 'adm' belongs to tenant 'adm', but this deployment to another"
    with pytest.raises(openai.PermissionDeniedError, match=of_another):
        await complete(openai_client(own, keys["adm"]))


@pytest.mark.parametrize("path", ["embeddings", "images/generations", "responses/resp_1", "messages/batches", "files"])
async def test_what_is_not_served_is_refused_in_a_sentence(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.post(f"/v1/{path}", json={"model": "tiny", "input": "a"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (404, "not_found")
    begins = f"there is no route /v1/{path}; the routes below /v1 are /v1/completions, /v1/chat/completions, "
    assert error["message"].startswith(begins)
    assert "embeddings, images, sounds, files and stored responses are not served" in error["message"]


async def test_tokens_there_and_back(http: httpx.AsyncClient) -> None:
    tokens = (await http.post("/tokenize", json={"prompt": "héllo"})).json()["tokens"]
    assert (await http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": "héllo"}


async def test_vllms_documented_tokenizer_requests(http: httpx.AsyncClient, version: ModelVersion) -> None:
    async def tokenize(**body: Any) -> dict[str, Any]:
        answer: dict[str, Any] = (await http.post("/tokenize", json=body)).raise_for_status().json()
        assert answer["count"] == len(answer["tokens"])
        assert answer["max_model_len"] == version.model_info.max_model_len
        return answer

    plain = await tokenize(prompt="héllo", model=version.model_info.model, return_token_strs=None)
    assert plain["token_strs"] is None
    named = await tokenize(prompt="héllo", return_token_strs=True)
    assert named["tokens"] == plain["tokens"]
    assert named["token_strs"] == version.tokenizer.convert_ids_to_tokens(plain["tokens"])
    back = {"model": version.model_info.model, "tokens": plain["tokens"]}
    assert (await http.post("/detokenize", json=back)).json() == {"prompt": "héllo"}

    prompted = await tokenize(messages=HELLO, return_token_strs=True)
    asked = {"model": version.model_info.model, "messages": HELLO, "max_tokens": 1}
    usage = (await http.post("/v1/chat/completions", json=asked)).json()["usage"]
    assert prompted["count"] == len(prompted["token_strs"]) == usage["prompt_tokens"]
    unprompted = await tokenize(messages=HELLO, add_generation_prompt=False, add_special_tokens=False)
    assert unprompted["count"] < prompted["count"]
    assert unprompted["tokens"] == prompted["tokens"][: unprompted["count"]]
    added = {flag: (await tokenize(prompt="a", add_special_tokens=flag))["count"] for flag in (False, True)}
    with_special = await tokenize(messages=HELLO, add_special_tokens=True)
    assert with_special["count"] - prompted["count"] == added[True] - added[False]
    parts = [{**HELLO[0], "content": [{"type": "text", "text": HELLO[0]["content"]}]}]
    variables = {"tools": None, "continue_final_message": False, "chat_template_kwargs": {}}
    assert (await tokenize(messages=parts, **variables))["tokens"] == prompted["tokens"]


async def test_metrics_count_what_was_served(version: ModelVersion) -> None:
    app = application(version)
    await complete(openai_client(app), n=2)
    with pytest.raises(openai.BadRequestError):
        await complete(openai_client(app), "x" * 300)
    text = (await asgi_client(app).get("/metrics")).text
    for line in (
        "swiftkv:prompt_tokens_total 5.0",
        "swiftkv:prefix_cache_queries_total 5.0",
        "swiftkv:prefix_cache_hits_total 0.0",
        "swiftkv:generation_tokens_total 16.0",
        'swiftkv:request_success_total{finished_reason="length"} 2.0',
        'swiftkv:rejected_requests_total{reason="context_length_exceeded"} 1.0',
        "swiftkv:time_to_first_token_seconds_count 2.0",
        "swiftkv:num_requests_running 0.0",
    ):
        assert line in text


PARTS = {"structured_outputs": {"choice": ["é€🙂!"]}, "ignore_eos": False}
PLAIN = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "ignore_eos": True, "seed": 5}


@pytest.mark.parametrize("echo", [False, True])
async def test_offsets_and_parts_of_characters_are_told_alike_whole_and_streamed(client: Any, echo: bool) -> None:
    prompt = "hé<s>"
    fields: dict[str, Any] = {"prompt": prompt, "logprobs": 3, "echo": echo, "max_tokens": 20, "extra": PARTS}
    [whole] = (await complete(client, **fields)).choices
    found = whole.logprobs
    data = b"".join(_bytes(token) for token in found.tokens)
    assert data.decode() == whole.text == (prompt if echo else "") + "é€🙂!"
    expected = [at for at, character in enumerate(whole.text) for _ in character.encode()]
    special = 4 if echo else 0  # `<s>` is one token
    assert found.text_offset == [*expected[:special], *expected[special + 2 if echo else 0 :]]
    assert all(len(entry) in (3, 4) for entry in found.top_logprobs if entry), "every entry has a name of its own"
    streamed = [chunk.choices[0].logprobs async for chunk in await complete(client, **fields, stream=True)]
    joined = [(token, at) for one in streamed if one for token, at in zip(one.tokens, one.text_offset, strict=True)]
    assert joined == list(zip(found.tokens, found.text_offset, strict=True))
    [said] = (await chat(client, logprobs=True, top_logprobs=3, max_tokens=20, extra=PARTS)).choices
    assert bytes(byte for token in said.logprobs.content for byte in token.bytes).decode() == "é€🙂!"
    assert all(len({top.token for top in token.top_logprobs}) == 3 for token in said.logprobs.content)


def _bytes(token: str) -> bytes:
    return bytes.fromhex(token.removeprefix("bytes:").replace(r"\x", "")) if token[:6] == "bytes:" else token.encode()


async def test_a_stop_string_may_name_a_special_token(client: Any) -> None:
    """A bias makes the model choose the token, which is not shown in the text."""
    favoured = {"logit_bias": {str(BOS): 100}, "extra": {"ignore_eos": True}}
    [choice] = (await complete(client, **favoured, stop=["<s>"])).choices
    assert (choice.text, choice.finish_reason) == ("", "stop")
    answer = await complete(client, **favoured, stop=["<s><s><s>", "x<s>"])
    assert (answer.usage.completion_tokens, answer.choices[0].text) == (3, "")


@pytest.mark.parametrize(
    ("body", "same"),
    [
        ({"top_p": 0}, {"temperature": 0}),
        ({"top_k": -1}, {}),
        ({"max_tokens": 4.0, "seed": 5.0, "n": 1.0, "top_k": 0.0, "logprobs": 1.0}, {"logprobs": 1}),
        ({"seed": -9223372036854775803}, {}),
        ({"stop_token_ids": [1 << 40]}, {}),
        ({"stream_options": {"include_usage": None}, "structured_outputs": None}, {}),
    ],
    ids=str,
)
async def test_values_as_clients_write_them_mean_what_they_mean_there(
    http: httpx.AsyncClient, body: dict[str, Any], same: dict[str, Any]
) -> None:
    answers = [await http.post("/v1/completions", json={**PLAIN, **fields}) for fields in (body, same)]
    texts = [answer.raise_for_status().json()["choices"][0]["text"] for answer in answers]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("end", [0, 1])
async def test_both_ends_of_every_range_are_answered(http: httpx.AsyncClient, end: int) -> None:
    """On vLLM too, whose ranges include ours."""
    numbers = {name: ends[end] for name, ends in RANGES.items()}
    whole = {"seed": (-1, MAX_SEED)[end], "top_k": (-1, MAX_TOP_K)[end], "priority": (1 - 2 * end) * MAX_PRIORITY}
    body = {**PLAIN, **numbers, **whole, "logit_bias": {"5": (-100, 100)[end]}, "min_tokens": 4 * end}
    assert (await http.post("/v1/completions", json=body)).raise_for_status().json()["usage"]["completion_tokens"] == 4


async def test_variables_of_the_template_switch_it(
    client: Any, version: ModelVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = TEMPLATE + "{% if enable_thinking is false %}<none>{% endif %}{{ depth or '' }}"
    monkeypatch.setattr(version.tokenizer, "chat_template", template)
    raw = client.chat.completions.with_raw_response.create
    for given, written in (({}, ""), ({"enable_thinking": False, "depth": 3, "colour": "red"}, "<none>3")):
        answer = await raw(messages=HELLO, **asked(extra={"chat_template_kwargs": given}))
        plain = await complete(client, f"user: hello\nassistant:{written}")
        assert answer.parse().choices[0].message.content == plain.choices[0].text
        named = answer.headers.get("x-swiftkv-ignored-fields")
        assert named == ("chat_template_kwargs.colour" if given else None)


async def test_special_tokens_are_shown_where_that_is_asked_for(client: Any) -> None:
    bos = {"logit_bias": {str(BOS): 100}, "max_tokens": 2}
    shown = [await complete(client, **bos, extra={"skip_special_tokens": skip}) for skip in (True, False)]
    assert [texts(answer) for answer in shown] == [[""], ["<s><s>"]]


@pytest.mark.parametrize("temperature", [0.0, 2.0])
async def test_an_answer_keeps_to_the_tokens_that_are_allowed(client: Any, temperature: float) -> None:
    extra = {"allowed_token_ids": [64.0, 65]}
    answer = await complete(client, temperature=temperature, n=4, seed=1, extra=extra)
    assert set("".join(texts(answer))) <= set("ab")
    with pytest.raises(openai.BadRequestError, match="left out with structured_outputs"):
        await complete(client, extra={**extra, "ignore_eos": False, "structured_outputs": {"regex": "a"}})


async def test_a_prompt_is_scored_in_vllms_shape(client: Any) -> None:
    extra = {"prompt_logprobs": 2}
    echoed = (await complete(client, echo=True, logprobs=2, max_tokens=0)).choices[0].logprobs
    scored = (await complete(client, max_tokens=0, extra=extra)).choices[0].prompt_logprobs
    assert scored[0] is None
    for entry, text, logprob in zip(scored[1:], echoed.tokens[1:], echoed.token_logprobs[1:], strict=True):
        by_text = {one["decoded_token"]: one["logprob"] for one in entry.values()}
        assert by_text[text] == pytest.approx(logprob, abs=1e-4)
        assert [one["rank"] for one in entry.values()] in ([1, 2], [1, 2, None])
    answer = await chat(client, extra=extra)
    assert len(answer.prompt_logprobs) == answer.usage.prompt_tokens
    with pytest.raises(openai.BadRequestError, match="not available in a stream"):
        await chat(client, extra=extra, stream=True)
