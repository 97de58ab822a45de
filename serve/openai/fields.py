"""All request fields below `/v1`: served, accepted without effect, or refused. The routes and `docs/compatibility.md`
follow this table. Knows no body."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from typing import Any, Literal
from urllib.parse import quote

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.serve.schemas import MAX_NAME_LENGTH
from swiftkv_platform.web.problems import drop_long_value

Route = Literal["completions", "chat/completions", "responses", "messages"]
"""Routes below `/v1`."""
Origin = Literal["OpenAI", "Anthropic", "vLLM", "SwiftKV"]

COMPLETIONS: tuple[Route, ...] = ("completions",)
CHAT: tuple[Route, ...] = ("chat/completions",)
RESPONSES: tuple[Route, ...] = ("responses",)
MESSAGES: tuple[Route, ...] = ("messages",)
OPENAI = COMPLETIONS + CHAT + RESPONSES
CONVERSATIONS = CHAT + RESPONSES + MESSAGES
"""Routes with conversations."""
ALL = OPENAI + MESSAGES
ROUTES = (*ALL, "messages/count_tokens", "models")

ANY_UNKNOWN_FIELD = "*"
"""Wildcard in `ignored_fields`, for all unknown fields."""
MAX_IGNORED_FIELDS = 32
"""Max ignored fields that the response header and the log name."""


class FieldTreatment(StrEnum):
    SERVED = "served"
    WITHOUT_EFFECT = "accepted without effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class RequestField:
    name: str
    treatment: FieldTreatment
    note: str
    """Supported values, or why the field has no effect or is refused."""
    routes: tuple[Route, ...]
    origin: Origin
    accepted: tuple[Any, ...]
    """Accepted values of a refused field, which have no effect, or predicates of (value, the request's `n`)."""

    def accepts(self, value: Any, n: int) -> bool:
        """Whether this value of a refused field has no effect, and is accepted."""
        return any(
            each(value, n) if callable(each) else type(value) is type(each) and value == each for each in self.accepted
        )


_ROUTES_WITH_N = COMPLETIONS + CHAT
_NO_LOGPROBS = "log-probabilities are available from /v1/chat/completions only"


def _equals_n(value: Any, n: int) -> bool:
    return type(value) is int and value == n


def _requests_no_logprobs(include: Any, _n: int) -> bool:
    """Whether `include` requests no log-probabilities; its other values are for hosted tools."""
    return isinstance(include, list) and "message.output_text.logprobs" not in include


def _keeps_conversation(management: Any, _n: int) -> bool:
    """Whether `context_management` keeps the whole conversation with its thinking, as Claude Code always sends."""
    if not isinstance(management, dict) or management.keys() - {"edits"}:
        return False
    accepted = [{"type": "clear_thinking_20251015", "keep": keep} for keep in ("all", {"type": "all"})]
    edits = management.get("edits") or []
    return isinstance(edits, list) and all(edit in accepted for edit in edits)


Rows = Mapping[str, str | tuple[Any, ...]]
"""Names of fields, separated by spaces -> their note, or (note, accepted values...) of refused fields."""
_TABLE: Mapping[FieldTreatment, Mapping[tuple[Origin, tuple[Route, ...]], Rows]] = {
    FieldTreatment.SERVED: {
        ("OpenAI", ALL): {
            "model": "the served model's id, or one of its deployment's names",
            "temperature top_p presence_penalty frequency_penalty logit_bias stream": "",
            "seed": "reproduces an answer on the same engine",
        },
        ("OpenAI", OPENAI): {"stop": ""},
        ("OpenAI", _ROUTES_WITH_N): {
            "n stream_options stream_options.include_usage response_format": "",
        },
        ("OpenAI", COMPLETIONS): {
            "prompt logprobs echo": "",
            "max_tokens": "0 with `echo` only scores the prompt",
        },
        ("OpenAI", CHAT): {
            "messages": "parts of type `text`, `input_text`, `output_text` and `refusal`; others as text",
            "max_tokens": "`max_completion_tokens` takes precedence",
            "max_completion_tokens": "default: the rest of the context",
            "logprobs top_logprobs": "",
            "tools": "of type `function`; others are skipped",
        },
        ("OpenAI", RESPONSES): {
            "input": "text, or items of type `message`, `function_call`, `function_call_output` and `reasoning`; "
            "others as text",
            "instructions": "",
            "max_output_tokens": "default: the rest of the context",
            "text": "`format`; `verbosity` has no effect",
            "tools": "of type `function`; others are skipped",
        },
        ("OpenAI", CHAT + RESPONSES): {"tool_choice": "", "parallel_tool_calls": "no effect without `tools`"},
        ("Anthropic", MESSAGES): {
            "messages": "blocks of type `text`, `tool_use`, `tool_result` and `thinking`; `redacted_thinking` has no "
            "effect; others as text",
            "system max_tokens stop_sequences tool_choice": "",
            "output_config": "`format`; `effort` has no effect",
            "output_format": "older name of `output_config.format`",
            "tools": "with an `input_schema`; others are skipped",
        },
        ("vLLM", ALL): {
            "top_k min_p repetition_penalty min_tokens stop_token_ids include_stop_str_in_output ignore_eos "
            "skip_special_tokens structured_outputs truncate_prompt_tokens priority": "",
            "allowed_token_ids": "refused with structured outputs",
        },
        ("vLLM", _ROUTES_WITH_N): {
            "prompt_logprobs": "not with `stream: true`",
            "stream_options.continuous_usage_stats": "token usage up to each event, in every event",
        },
        ("vLLM", CHAT): {"add_generation_prompt continue_final_message": ""},
        ("vLLM", CONVERSATIONS): {
            "chat_template_kwargs": "variables of the template, such as `enable_thinking`; unused ones have no effect",
        },
        ("SwiftKV", ALL): {"early_exit num_lookup_tokens timeout_s": ""},
    },
    FieldTreatment.WITHOUT_EFFECT: {
        # On every route, since clients send an option of one API to another, as Vercel's AI SDK does with any option
        ("OpenAI", ALL): {
            "service_tier prompt_cache_options prompt_cache_retention verbosity client_metadata": "",
            "user safety_identifier": "end user in captured traffic",
            "metadata": "`user_id`: end user in captured traffic",
            "store": "`false`: the request is not captured",
            "prompt_cache_key": "prefix caching needs no key",
            "prediction": "`num_lookup_tokens` drafts from the prompt",
            "reasoning reasoning_effort": "not passed to the model",
            "max_tool_calls": "limits server-side tools, which are skipped",
            "truncation": "a prompt longer than the context is refused; `truncate_prompt_tokens` keeps its end",
        },
        ("OpenAI", _ROUTES_WITH_N): {"stream_options.include_obfuscation": ""},
        ("OpenAI", RESPONSES + MESSAGES): {"stream_options": "the last event has the usage"},
        ("OpenAI", RESPONSES): {"image access_programs": ""},
        ("Anthropic", ALL): {
            "diagnostics inference_geo speed user_profile_id workspace_id": "",
            "cache_control": "prefix caching needs no markers",
            "thinking": "not passed to the model",
        },
        ("vLLM", ALL): {"spaces_between_special_tokens request_id": ""},
    },
    FieldTreatment.REFUSED: {
        ("OpenAI", _ROUTES_WITH_N): {"best_of": ("only the value of `n` is accepted", _equals_n)},
        ("OpenAI", COMPLETIONS): {"suffix": ("fill-in-the-middle is not supported", "")},
        ("OpenAI", CHAT): {
            "audio": "answers are text",
            "modalities": ('answers are text; `["text"]` is accepted', ["text"], []),
            "web_search_options": "web search is not supported",
            "functions": ("`tools` have replaced them", []),
            "function_call": ("`tool_choice` has replaced it", "none", "auto"),
        },
        ("OpenAI", CHAT + RESPONSES): {"moderation": "moderation is not supported"},
        ("OpenAI", RESPONSES): {
            "previous_response_id conversation": "nothing is stored; send the whole conversation as `input`",
            "prompt": "no prompt is stored; send it as `instructions` and `input`",
            "background": ("nothing is stored; wait for the answer, or `stream` it", False),
            "include": (_NO_LOGPROBS, _requests_no_logprobs),
            "top_logprobs": (_NO_LOGPROBS, 0),
            "context_management": ("conversations are not shortened", []),
        },
        ("Anthropic", MESSAGES): {
            "context_management": ("conversations are not shortened", _keeps_conversation),
            "container": "code execution is not supported",
            "mcp_servers": ("MCP servers are not supported; give `tools`", []),
        },
        ("vLLM", ALL): {"bad_words": ("use a logit_bias of -100 to forbid tokens", [])},
        ("vLLM", _ROUTES_WITH_N): {
            "use_beam_search": ("beam search is not supported", False),
            "length_penalty": ("beam search is not supported", 1, 1.0),
            "return_token_ids return_tokens_as_token_ids": ("only /generate returns token ids", False),
        },
        ("vLLM", COMPLETIONS): {"add_special_tokens": ("send token ids to control special tokens", True)},
        ("vLLM", CHAT): {
            "add_special_tokens": ("the chat template adds special tokens", False),
            "echo": ("only /v1/completions supports it", False),
            "include_reasoning": ("reasoning is part of the text", True),
        },
        ("vLLM", CONVERSATIONS): {"enable_thinking": "send `chat_template_kwargs` with `enable_thinking`"},
    },
}


def _expand_table() -> Iterator[RequestField]:
    for treatment, groups in _TABLE.items():
        for (origin, routes), rows in groups.items():
            for names, row in rows.items():
                note, *accepted = (row,) if isinstance(row, str) else row
                for name in names.split():
                    yield RequestField(name, treatment, note, routes, origin, tuple(accepted))


FIELDS = tuple(_expand_table())


def get_fields(route: Route) -> dict[str, RequestField]:
    return {field.name: field for field in FIELDS if route in field.routes}


@cache
def get_served_field_names(route: Route) -> frozenset[str]:
    return frozenset(name for name, field in get_fields(route).items() if field.treatment is FieldTreatment.SERVED)


def find_ignored_fields(
    route: Route, extra: Mapping[str, Any], nested: Iterable[str], n: int, ignored: Collection[str]
) -> tuple[str, ...]:
    """Return the names of a request's fields that have no effect, at most `MAX_IGNORED_FIELDS`.

    Args:
        extra: fields that the body's pydantic model lacks.
        nested: dotted paths of unknown keys in messages, tools and other parts, which are never refused.
        ignored: fields that the deployment ignores; `ANY_UNKNOWN_FIELD`: all unknown ones.

    Raises:
        InvalidInputError: an unknown or unsupported field.
    """
    known = get_fields(route)
    for name, value in extra.items():
        if name not in ignored:
            _check_field(name, value, n, known.get(name), route, any_ignored=ANY_UNKNOWN_FIELD in ignored)
    names = [*dict.fromkeys([*extra, *nested])]
    return tuple(quote(name[:MAX_NAME_LENGTH], safe="", errors="replace") for name in names[:MAX_IGNORED_FIELDS])


def _check_field(name: str, value: Any, n: int, field: RequestField | None, route: Route, *, any_ignored: bool) -> None:
    if field is not None and field.treatment is FieldTreatment.REFUSED:
        if not field.accepts(value, n):
            shown = "too long to repeat" if (short := drop_long_value(value)) is None else repr(short)
            message = f"{name} is {shown}; leave it out: {field.note.replace('`', '')}"
            raise InvalidInputError(message, field=name, value=short)
    elif (field is None or field.treatment is FieldTreatment.SERVED) and not any_ignored:
        # A served field that the body's model lacks is of another route.
        shown = name[:MAX_NAME_LENGTH] or '""'
        message = f"{shown} is not a field of /v1/{route}{_suggest_name(name, route)}"
        raise InvalidInputError(message, field=shown, value=drop_long_value(value))


def _suggest_name(name: str, route: Route) -> str:
    """Return a suggestion: another route with this field, or the most similar field."""
    other_route = next((field.routes[0] for field in FIELDS if field.name == name and route not in field.routes), None)
    if other_route is not None:
        return f"; it is a field of /v1/{other_route}"
    similar = get_close_matches(name, get_fields(route), n=1) if len(name) <= MAX_NAME_LENGTH else []
    return f"; did you mean {similar[0]}?" if similar else "; see docs/compatibility.md for all fields"
