"""Mistakes in requests of every route, with the error that both engines give. Run by `openai_routes`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import pytest

GENERATE, COMPLETIONS, CHAT = "/generate", "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES, TOKENIZE, DETOKENIZE = "/v1/responses", "/v1/messages", "/tokenize", "/detokenize"
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {
    GENERATE: {"prompt": "hello", "max_tokens": 8},
    COMPLETIONS: {"model": "tiny", "prompt": "hello", "max_tokens": 8},
    CHAT: {"model": "tiny", "messages": HELLO, "max_tokens": 8},
    RESPONSES: {"model": "tiny", "input": "hello", "max_output_tokens": 8},
    MESSAGES: {"model": "tiny", "messages": HELLO, "max_tokens": 8},
}
"""Valid bodies, to which a mistake adds fields. The tokenizer's routes need none."""
Fields = dict[str, Any]
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]}]
TOOL: Fields = {"type": "function", "function": {"name": "f"}}


def constrain(**constraint: Any) -> Fields:
    return {"structured_outputs": constraint}


MISTAKES: Mapping[tuple[str, ...], list[tuple[Fields, str, str]]] = {
    # 1. the same on all routes with an engine
    (GENERATE, COMPLETIONS, CHAT, RESPONSES, MESSAGES): [
        ({"temperature": -1}, "temperature", "temperature is -1.0; it must be a number from 0 to 2"),
        ({"temperature": "0.5"}, "temperature", "Input should be a valid number (given: '0.5')"),
        ({"top_p": 1.5}, "top_p", "from 0 to 1"),
        ({"top_k": -2}, "top_k", "top_k is -2; it must be a whole number from -1 to 2147483647"),
        ({"top_k": 1 << 64}, "top_k", "top_k is an integer of more than 63 bits"),
        ({"min_p": 1.1}, "min_p", "from 0 to 1"),
        ({"repetition_penalty": 1e-39}, "repetition_penalty", "from 0.01 to 100"),
        ({"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2"),
        ({"frequency_penalty": 1e39}, "frequency_penalty", "from -2 to 2"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "must be an object of numbers by token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "numbers from -100 to 100 by token id"),
        ({"logit_bias": {"258": 1}}, "logit_bias", "has the token id 258; this model's vocabulary accepts 0..257"),
        ({"allowed_token_ids": [258]}, "allowed_token_ids", "has the token id 258"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "at least one token id, or left out"),
        ({"stop_token_ids": [-1]}, "stop_token_ids", "stop_token_ids is [-1]; it must be a list of token ids"),
        ({"seed": 1.5}, "seed", "Input should be a valid integer (given: 1.5)"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "of at least 1"),
        ({"ignore_eos": 1}, "ignore_eos", "Input should be a valid boolean (given: 1)"),
        ({"timeout_s": 1e-9}, "timeout_s", "was not finished within timeout_s"),
        ({"early_exit": "sometimes"}, "early_exit.mode", "it must be off, threshold or lossless"),
        ({"early_exit": "lossless"}, "early_exit", "but this model has no exit head; use 'off'"),
        ({"early_exit": "lossless", "logit_bias": {"258": 1}}, "early_exit", "no exit head"),
        (constrain(), "structured_outputs", "has no constraint; give exactly one of json, json_object, regex"),
        (constrain(regex="a", choice=["b"]), "structured_outputs", "has regex and choice"),
        (constrain(regex="(a"), "structured_outputs.regex", "cannot be compiled"),
        (constrain(regex="a\0b"), "structured_outputs.regex", r"has a NUL character; write it as \x00"),
        (constrain(grammar='{"grammars": []}'), "structured_outputs.grammar", "must be a Lark grammar: it is JSON"),
        (constrain(grammar='root ::= "a"'), "structured_outputs.grammar", "cannot be compiled"),
        (constrain(choice=[]), "structured_outputs.choice", "a list of at least one non-empty string"),
        (constrain(choice=["<s>"]), "structured_outputs.choice", "requires text that is a special token of this model"),
        (constrain(json={"type": "wat"}), "structured_outputs.json", "structured_outputs.json.type cannot be compiled"),
        (constrain(json={"not": {"type": "null"}}), "structured_outputs.json", "has 'not', which cannot be compiled"),
        (constrain(json={"type": "null", "x-guidance": 5}), "structured_outputs.json", "its x-guidance is no object"),
        (constrain(choice=["a"]) | {"ignore_eos": True}, "ignore_eos", "false with structured_outputs.choice"),
        (constrain(choice=["a"]) | {"min_tokens": 5}, "min_tokens", "must be 0 with structured_outputs.choice"),
    ],
    # 2. fields whose names or rules differ between routes
    (GENERATE, COMPLETIONS, CHAT): [
        ({"n": 0}, "n", "n is 0; it must be a whole number from 1 to 64"),
        ({"n": 65}, "n", "n is 65"),
        ({"stop": [1]}, "stop", "must be a string or a list of strings"),
        ({"stop": ""}, "stop", "a non-empty string or a list of them"),
        ({"min_tokens": 9}, "min_tokens", "min_tokens is 9; it must be at most max_tokens, 8"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; it must be at least 1, or be sent with "),
        ({"max_tokens": -1}, "max_tokens", "of at least 0"),
        ({"max_tokens": "9"}, "max_tokens", "Input should be a valid integer (given: '9')"),
        ({"prompt_logprobs": 101, "stream": False}, "prompt_logprobs", "from 0 to 100"),
        (
            {"response_format": {"type": "json_object"}, "ignore_eos": True},
            "ignore_eos",
            "ignore_eos is True; it must be false with response_format, which",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'text', 'json_object' or 'json_schema'"),
    ],
    (GENERATE, COMPLETIONS): [
        ({"prompt": ""}, "prompt", "prompt is empty; give at least one token"),
        ({"prompt": ["a", ""]}, "prompt", "prompt is empty"),
        ({"prompt": []}, "prompt", "prompt is empty"),
        ({"prompt": 3}, "prompt", "must be text, a list of token ids, or a list of either (given: 3)"),
        ({"prompt": [1, "a"]}, "prompt", "must be text, a list of token ids, or a list of either"),
        ({"prompt": [1, 999]}, "prompt", "prompt has the token id 999; this model's vocabulary accepts 0..257"),
        ({"prompt": [5] * 256}, "prompt", "prompt has 256 tokens; the context of 256 tokens holds prompts of 1..255"),
        ({"prompt": "x" * 300}, "prompt", "prompt has 300 tokens; the context of 256 tokens"),
        ({"prompt": [[1]] * 257}, "prompt", "prompt has 257 entries"),
        ({"prompt": [[1]] * 256}, "prompt", "256 prompts x n 1 are 256 outputs; the max per request is "),
        ({"logprobs": 101}, "logprobs", "logprobs is 101; it must be a whole number from 0 to 100"),
    ],
    (COMPLETIONS, CHAT, RESPONSES, MESSAGES): [
        ({"model": "other"}, "model", "model is 'other'; the served model is 'tiny'"),
        ({"colour": "red"}, "colour", "colour is not a field of /v1/"),
        ({"bad_words": ["a"]}, "bad_words", "use a logit_bias of -100 to forbid tokens"),
    ],
    (GENERATE,): [
        ({"prompt": None}, "body", "give either prompt or messages"),
        ({"messages": HELLO}, "body", "give either prompt or messages"),
        ({"prompt": None, "messages": [{**HELLO[0], "content": "x" * 300}]}, "messages", "the context of 256 tokens"),
        ({"stream_interval_s": -1}, "stream_interval_s", "greater than or equal to 0"),
        ({"colour": "red"}, "colour", "unknown key; accepted here: "),
        ({"max_token": 3}, "max_token", "unknown key (did you mean max_tokens?)"),
    ],
    (COMPLETIONS,): [
        ({"suffix": "x"}, "suffix", "suffix is 'x'; leave it out: fill-in-the-middle is not supported"),
        ({"best_of": 2}, "best_of", "only the value of n is accepted"),
        ({"echo": True, "logprobs": 101}, "logprobs", "logprobs is 101"),
        (
            {"echo": True, "logprobs": 2, "prompt_logprobs": 1, "stream": False},
            "prompt_logprobs",
            "with echo, it must be equal to logprobs (2)",
        ),
        ({"prompt_logprobs": 1, "stream": True}, "body", "not available in a stream; use stream: false"),
        ({"max_completion_tokens": 3}, "max_completion_tokens", "it is a field of /v1/chat/completions"),
    ],
    (CHAT,): [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": IMAGE}, "messages.0.content.0.type", "the model accepts only text"),
        ({"messages": [{"role": "user"}]}, "messages.0", "content is missing"),
        ({"messages": [{**HELLO[0], "content": "x" * 300}]}, "messages", "the context of 256 tokens"),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs: true"),
        ({"logprobs": True, "top_logprobs": 101}, "top_logprobs", "top_logprobs is 101; it must be a whole number"),
        ({"max_completion_tokens": -1}, "max_completion_tokens", "max_completion_tokens is -1; it must be"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens is 0; it must be at least 1"),
        (
            {"max_completion_tokens": 3, "min_tokens": 5},
            "min_tokens",
            "min_tokens is 5; it must be at most max_completion_tokens, 3",
        ),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize", "is reserved"),
        ({"chat_template_kwargs": ["a"]}, "chat_template_kwargs", "dictionary"),
        ({"continue_final_message": True}, "body", "needs add_generation_prompt: false"),
        ({"tools": [TOOL]}, "tools", "the model's chat template does not support tools"),
        ({"tool_choice": "required"}, "tool_choice", "the functions in tools are none"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice",
            "the functions in tools are f: name one of them",
        ),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is required"),
        ({"echo": True}, "echo", "only /v1/completions supports it"),
    ],
    (RESPONSES,): [
        ({"input": []}, "input", "at least 1 item"),
        ({"input": "x" * 300}, "input", "the context of 256 tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0; it must be at least 1"),
        ({"min_tokens": 9}, "min_tokens", "it must be at most max_output_tokens, 8"),
        ({"previous_response_id": "r"}, "previous_response_id", "nothing is stored"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "wat"}}}},
            "text.format.schema",
            "text.format.schema.type cannot be compiled",
        ),
        (
            {"text": {"format": {"type": "json_object"}}, "ignore_eos": True},
            "ignore_eos",
            "it must be false with text.format, which",
        ),
    ],
    (MESSAGES,): [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"max_tokens": None}, "max_tokens", "required, and missing"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"stop_sequences": [""]}, "stop_sequences", "stop_sequences is ['']"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type", "there are no tools; leave tool_choice out"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "wat"}}}},
            "output_config.format.schema",
            "output_config.format.schema.type cannot be compiled",
        ),
    ],
    # 3. the tokenizer's routes
    (TOKENIZE,): [
        ({}, "body", "give either prompt or messages"),
        ({"prompt": "a", "messages": HELLO}, "body", "give either prompt or messages"),
        ({"prompt": "a", "model": "other"}, "model", "model is 'other'"),
        ({"prompt": "a", "add_generation_prompt": False}, "body", "add_generation_prompt needs messages"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "user"}]}, "messages.0", "content is missing"),
        ({"prompt": ["a", "b"]}, "prompt", "Input should be a valid string"),
        ({"prompt": "a", "mm_processor_kwargs": {}}, "mm_processor_kwargs", "unknown key"),
    ],
    (DETOKENIZE,): [
        ({"tokens": [1], "model": "other"}, "model", "model is 'other'"),
        ({"tokens": [99999]}, "tokens", "tokens has the id 99999; this tokenizer accepts 0..257"),
        ({"tokens": [1] * 257}, "tokens", "tokens has 257 ids; at most 256 are accepted"),
    ],
}
_CODES = {
    "model is 'other'": ("model_not_found", 404),
    "was not finished": ("deadline_exceeded", 504),
    "the context of": ("context_length_exceeded", 422),
}
"""(code, status with a problem document) by a part of the message; others are `invalid_input`."""
UNREADABLE: list[tuple[bytes, str | None, str]] = [
    (b"", "body", "required, and missing"),
    (b"null", "body", "required, and missing"),
    (b"[]", "body", "valid dictionary"),
    (b'{"model": tiny}', None, "the body is not valid JSON: Expecting value (character 10)"),
    (b'{"temperature": NaN}', "temperature", "temperature is not a finite number, as JSON requires"),
    (b'{"prompt": "\xff"}', "body", "body is not UTF-8 at byte 12; use UTF-8"),
    (rb'{"stop": "\ud800"}', "stop", "lone surrogate at character 0"),
]
"""Bodies that are no JSON objects, or have values that JSON lacks."""


def list_mistakes() -> Iterator[Any]:
    """Yield a case per mistake: path, request bodies, invalid field and part of the error message. A second body is the
    same request with `stream: true`."""
    for paths, mistakes in MISTAKES.items():
        for path in paths:
            for fields, field, message in mistakes:
                streams: tuple[Fields, ...] = ({}, {"stream": True}) if path in BODIES else ({},)
                bodies = [json.dumps({**BODIES.get(path, {}), **stream, **fields}).encode() for stream in streams]
                yield pytest.param(path, bodies, field, message, id=f"{path} {fields}"[:70])
    for path in (*BODIES, TOKENIZE):
        for body, field, message in UNREADABLE:
            yield pytest.param(path, [body], field, message, id=f"{path} {body!r}")


async def check_mistake(http: httpx.AsyncClient, path: str, body: bytes, field: str | None, message: str) -> None:
    """Check the error of a request, also at the end of a stream, in the format of its route."""
    response = await http.post(path, content=body, headers={"content-type": "application/json"})
    code, status = next((each for part, each in _CODES.items() if part in message), ("invalid_input", 422))
    if response.status_code == 200:
        assert b'"stream": true' in body, response.text
        data = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: {")]
        error = next(each for each in map(json.loads, reversed(data)) if {"error", "code"} & each.keys())
    else:
        assert response.status_code == (400 if status == 422 and "/v1/" in path else status), response.text
        error = response.json()
    if "/v1/" in path:
        error = error.get("error", error)
    else:
        assert error.keys() == {"type", "title", "status", "detail", "instance", "code", "errors"}
        assert (error["status"], error["instance"]) == (status, path)
        fields = [each["field"] for each in error["errors"]]
        error = {"param": fields[0], "message": error["detail"], "code": error["code"]}
    assert (error["param"], error["code"], message in error["message"]) == (field, code, True), error
