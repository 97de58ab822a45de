"""Parameter values as clients write them, and tokens as answers report them, on the engine of the fixture `engine`."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from swiftkv_platform.serve.current import Version
from swiftkv_platform.specs.base import MAX_PRIORITY, MAX_SEED, MAX_TOP_K
from swiftkv_platform.specs.sampling import RANGES
from tests.fakes.tokenizers import BOS
from tests.surface import openai_routes
from tests.surface.openai_routes import HELLO, TEMPLATE, asked, chat, complete, texts

client = openai_routes.client
engine_config = openai_routes.engine_config
http = openai_routes.http
model_dir = openai_routes.model_dir
version = openai_routes.version

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
    client: Any, version: Version, monkeypatch: pytest.MonkeyPatch
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
