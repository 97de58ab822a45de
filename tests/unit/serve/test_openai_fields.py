"""The table of request fields: complete by OpenAI's own types, obeyed by the bodies, and equal to the page."""

import json
import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import pytest
from openai.types import completion_create_params as completion
from openai.types.chat import chat_completion_stream_options_param as options
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.serve.anthropic import MessagesRequest
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.openai.fields import (
    FIELDS,
    MAX_IGNORED_FIELDS,
    ROUTES,
    FieldTreatment,
    Route,
    find_ignored_fields,
    get_fields,
)
from swiftkv_platform.serve.openai.responses import ResponsesRequest
from swiftkv_platform.serve.openai.schemas import ChatRequest, CompletionRequest, OpenAIFields, StreamOptions
from swiftkv_platform.serve.replica_state import ReplicaState

ANTHROPIC = """cache_control container context_management diagnostics inference_geo max_tokens mcp_servers messages
    metadata model output_config service_tier speed stop_sequences stream system temperature thinking tool_choice tools
    top_k top_p user_profile_id workspace_id"""
AnthropicParams = TypedDict("AnthropicParams", dict.fromkeys(ANTHROPIC.split(), Any))  # type: ignore[misc]
"""Fields of Anthropic's own client, whose package is not installed here."""
PAGE = Path("docs/compatibility.md")
SENT_ANYWHERE = ["cache_control", "prompt_cache_key", "reasoning_effort", "request_id", "thinking", "truncation"]
"""Fields without effect that clients of one API send to routes of others."""
SHOWN = (FieldTreatment.SERVED, FieldTreatment.WITHOUT_EFFECT)
PARTS = [field.name for field in FIELDS if "." in field.name]
Body = tuple[Route, type[OpenAIFields], Sequence[type]]
BODIES: list[Body] = [
    (
        "completions",
        CompletionRequest,
        (completion.CompletionCreateParamsBase, completion.CompletionCreateParamsStreaming),
    ),
    ("chat/completions", ChatRequest, (chat.CompletionCreateParamsBase, chat.CompletionCreateParamsStreaming)),
    ("responses", ResponsesRequest, (responses.ResponseCreateParamsBase, responses.ResponseCreateParamsStreaming)),
    ("messages", MessagesRequest, (AnthropicParams,)),
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body[0])
def test_every_field_of_openais_own_client_has_one_treatment_which_the_body_obeys(body: Body) -> None:
    route, model, types = body
    table = get_fields(route)
    theirs = {name for one in types for name in one.__annotations__}
    if "stream_options.include_usage" in table:
        theirs |= {f"stream_options.{name}" for name in options.ChatCompletionStreamOptionsParam.__annotations__}
    assert theirs <= table.keys(), "give each a treatment in serve/openai/fields.py"
    served = {name for name, field in table.items() if field.treatment is FieldTreatment.SERVED}
    schema = model.model_json_schema()
    ours = {*model.model_fields, *(f"stream_options.{name}" for name in StreamOptions.model_fields)}
    assert served <= ours
    assert {*schema["properties"]} == {name for name, field in table.items() if field.treatment in SHOWN} - {*PARTS}
    names = [field.name for field in FIELDS if route in field.routes]
    assert len(names) == len(set(names))
    assert all(field.note for field in FIELDS if field.treatment is FieldTreatment.REFUSED), "a refusal has a reason"
    assert schema["additionalProperties"] is False
    assert "metadata" in schema["properties"]
    assert json.dumps(schema)


def test_the_document_of_the_routes_has_json_schemas_names_of_bounds() -> None:
    """Pydantic writes other names where a bound comes after a validator."""
    document = json.dumps(create_http_app(ReplicaState()).openapi())
    assert '"minimum": 1' in document
    assert not re.findall(r'"(?:ge|gt|le|lt)": ', document)


def test_an_unknown_path_is_told_every_route() -> None:
    served = {
        path.removeprefix("/v1/") for path in create_http_app(ReplicaState()).openapi()["paths"] if "/v1/" in path
    }
    assert {path.split("/{")[0] for path in served} == {*ROUTES}


def test_the_page_is_what_the_command_prints() -> None:
    page = runpy.run_path("docs/hooks/compatibility.py")["page"]()
    assert PAGE.read_text() == page, f"write it again: python docs/hooks/compatibility.py > {PAGE}"


@pytest.mark.parametrize(
    ("route", "name", "value"),
    [
        (field.routes[0], field.name, {"any": ["thing"]})
        for field in FIELDS
        if field.treatment is FieldTreatment.REFUSED
    ],
)
def test_what_would_change_the_answer_is_refused_with_its_reason(route: Route, name: str, value: Any) -> None:
    with pytest.raises(InvalidInputError) as caught:
        find_ignored_fields(route, {name: value}, (), 1, ())
    assert caught.value.field == name
    assert get_fields(route)[name].note.replace("`", "") in caught.value.message
    assert find_ignored_fields(route, {name: value}, (), 1, {name}) == (name,)


@pytest.mark.parametrize(
    ("route", "name", "value", "n"),
    [
        ("completions", "best_of", 2, 2),
        ("completions", "suffix", "", 1),
        ("chat/completions", "modalities", ["text"], 1),
        ("chat/completions", "best_of", 1, 1),
        ("chat/completions", "add_special_tokens", False, 1),
        ("completions", "add_special_tokens", True, 1),
        ("completions", "length_penalty", 1.0, 1),
        *((route, name, "auto", 1) for route, *_ in BODIES for name in SENT_ANYWHERE),
        ("messages", "context_management", {}, 1),
        ("messages", "context_management", {"edits": []}, 1),
        (
            "messages",
            "context_management",
            {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]},
            1,
        ),
    ],
)
def test_a_value_that_asks_for_nothing_is_accepted(route: Route, name: str, value: Any, n: int) -> None:
    assert find_ignored_fields(route, {name: value}, (), n, ()) == (name,)


@pytest.mark.parametrize("value", [True, 1.0, "1", 2])
def test_best_of_is_the_number_of_answers_and_nothing_like_it(value: Any) -> None:
    with pytest.raises(InvalidInputError, match="only the value of n is accepted"):
        find_ignored_fields("completions", {"best_of": value}, (), 1, ())


@pytest.mark.parametrize(
    ("route", "name", "where"),
    [
        ("completions", "temprature", "did you mean temperature?"),
        ("chat/completions", "max_completion_token", "did you mean max_completion_tokens?"),
        ("chat/completions", "include_usage", "did you mean stream_options.include_usage?"),
        ("chat/completions", "repeat_penalty", "did you mean repetition_penalty?"),
        ("completions", "messages", "it is a field of /v1/chat/completions"),
        ("responses", "messages", "it is a field of /v1/chat/completions"),
        ("messages", "max_output_tokens", "it is a field of /v1/responses"),
        ("completions", "", "see docs/compatibility.md for all fields"),
        ("completions", "\ud800", "see docs/compatibility.md for all fields"),
        ("completions", "x" * 1_000_000, "see docs/compatibility.md for all fields"),
    ],
)
def test_an_unknown_field_is_refused_with_where_to_look(route: Route, name: str, where: str) -> None:
    with pytest.raises(InvalidInputError, match="is not a field of") as caught:
        find_ignored_fields(route, {name: 1}, (), 1, {"other"})
    assert where in caught.value.message
    assert len(caught.value.message) < 200
    assert find_ignored_fields(route, {name: 1}, (), 1, {"*"})


def test_names_that_a_caller_chose_fit_into_a_header() -> None:
    names = find_ignored_fields("completions", {}, ["a\r\nx: y", "é,\ud800", "z" * 9999, *map(str, range(99))], 1, ())
    assert len(names) == MAX_IGNORED_FIELDS
    assert all(name.isascii() and len(name) <= 3 * 64 and not set(name) & set("\r\n,: ") for name in names)
