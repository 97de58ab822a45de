"""All request fields below `/v1`: served, accepted without effect, or refused. Knows no body.

This is the single source: the routes follow it, and `docs/compatibility.md` is generated from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from typing import Any, Literal
from urllib.parse import quote

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.serve.schemas import MAX_NAME_LENGTH
from swiftkv_platform.web.problems import short_value

Route = Literal["completions", "chat/completions", "responses", "messages"]
"""Routes below `/v1`."""

COMPLETIONS: tuple[Route, ...] = ("completions",)
CHAT: tuple[Route, ...] = ("chat/completions",)
RESPONSES: tuple[Route, ...] = ("responses",)
MESSAGES: tuple[Route, ...] = ("messages",)
OPENAI = COMPLETIONS + CHAT + RESPONSES
TURNS = CHAT + RESPONSES + MESSAGES
"""Routes that take a conversation."""
ALL = OPENAI + MESSAGES
ROUTES = (*ALL, "messages/count_tokens", "models")
"""All routes below `/v1`."""

ANY = "*"
"""Name in `ignored_fields` that stands for all unknown fields."""
MAX_NAMES = 32
"""Most ignored fields that are named to the caller and in the log."""


class Treatment(StrEnum):
    """Treatment of a field."""

    SERVED = "served"
    WITHOUT_EFFECT = "accepted without effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class RequestField:
    """A field of a request's body."""

    name: str
    treatment: Treatment
    note: str = ""
    """Remark on what is served, or the reason for a refusal."""
    routes: tuple[Route, ...] = ALL
    origin: Literal["OpenAI", "Anthropic", "vLLM", "SwiftKV"] = "OpenAI"
    """API that the field comes from."""
    accepts: Callable[[Any, int], bool] = lambda _value, _n: False
    """(value, the request's `n`) -> whether an otherwise refused field is accepted because this value has no effect."""


def _served(name: str, note: str = "", **more: Any) -> RequestField:
    return RequestField(name, Treatment.SERVED, note, **more)


def _without_effect(name: str, note: str = "", **more: Any) -> RequestField:
    return RequestField(name, Treatment.WITHOUT_EFFECT, note, **more)


def _refused(name: str, note: str, **more: Any) -> RequestField:
    return RequestField(name, Treatment.REFUSED, note, **more)


def _is(*values: Any) -> Callable[[Any, int], bool]:
    return lambda value, _n: any(type(value) is type(one) and value == one for one in values)


def _no_logprobs(include: Any, _n: int) -> bool:
    """Whether `include` does not ask for log-probabilities; its other values concern hosted tools only."""
    return isinstance(include, list) and "message.output_text.logprobs" not in include


def _clears_nothing(management: Any, _n: int) -> bool:
    """Whether `context_management` keeps the whole conversation including thoughts, as Claude Code always sends."""
    if not isinstance(management, dict) or management.keys() - {"edits"}:
        return False
    kept = [{"type": "clear_thinking_20251015", "keep": keep} for keep in ("all", {"type": "all"})]
    edits = management.get("edits") or []
    return isinstance(edits, list) and all(edit in kept for edit in edits)


FIELDS: tuple[RequestField, ...] = (
    _served("model", "the served model's id, or one of its deployment's names"),
    _served("prompt", "text, token ids, or a list of either", routes=COMPLETIONS),
    _served(
        "messages",
        "parts of type `text`, `input_text`, `output_text` and `refusal`; image, audio and file parts are refused",
        routes=CHAT,
    ),
    _served(
        "messages",
        "blocks of type `text`, `tool_use`, `tool_result` and `thinking`; `redacted_thinking` has no effect, and "
        "images and documents are refused",
        routes=MESSAGES,
        origin="Anthropic",
    ),
    _served(
        "input",
        "text, or items of type `message`, `function_call`, `function_call_output` and `reasoning`; images and files "
        "are refused",
        routes=RESPONSES,
    ),
    _served("instructions", routes=RESPONSES),
    _served("system", "text, or blocks of type `text`", routes=MESSAGES, origin="Anthropic"),
    _served("max_tokens", "0 with `echo` only scores the prompt", routes=COMPLETIONS),
    _served("max_tokens", "`max_completion_tokens` takes precedence", routes=CHAT),
    _served("max_tokens", "required", routes=MESSAGES, origin="Anthropic"),
    _served("max_completion_tokens", "default: the rest of the context", routes=CHAT),
    _served("max_output_tokens", "default: the rest of the context", routes=RESPONSES),
    _served("temperature"),
    _served("top_p"),
    _served("n", routes=COMPLETIONS + CHAT),
    _served("stop", routes=OPENAI),
    _served("stop_sequences", routes=MESSAGES, origin="Anthropic"),
    _served("seed", "repeats an answer within one engine"),
    _served("presence_penalty"),
    _served("frequency_penalty"),
    _served("logit_bias"),
    _served("logprobs", "a number of tokens", routes=COMPLETIONS),
    _served("logprobs", "true or false", routes=CHAT),
    _served("top_logprobs", routes=CHAT),
    _served("echo", "with `logprobs`, includes those of the prompt", routes=COMPLETIONS),
    _served("stream"),
    _served("stream_options", routes=COMPLETIONS + CHAT),
    _served("stream_options.include_usage", "a last event with the usage", routes=COMPLETIONS + CHAT),
    _served(
        "stream_options.continuous_usage_stats",
        "the usage so far, in every event",
        routes=COMPLETIONS + CHAT,
        origin="vLLM",
    ),
    _without_effect("stream_options.include_obfuscation", "like all unknown nested keys", routes=COMPLETIONS + CHAT),
    _without_effect("stream_options", "the last event has the usage", routes=RESPONSES),
    _served("response_format", routes=COMPLETIONS + CHAT),
    _served("text", "`format`; `verbosity` has no effect", routes=RESPONSES),
    _served("output_config", "`format`; `effort` has no effect", routes=MESSAGES, origin="Anthropic"),
    _served("output_format", "the older name of `output_config.format`", routes=MESSAGES, origin="Anthropic"),
    _served("tools", routes=CHAT),
    _served("tools", "of type `function`", routes=RESPONSES),
    _served(
        "tools", "with an `input_schema`; tools that a server runs are refused", routes=MESSAGES, origin="Anthropic"
    ),
    _served("tool_choice", routes=CHAT + RESPONSES),
    _served("tool_choice", "`auto`, `any`, `tool`, `none`", routes=MESSAGES, origin="Anthropic"),
    _served("parallel_tool_calls", "no effect without `tools`", routes=CHAT + RESPONSES),
    _without_effect("user", routes=OPENAI),
    _without_effect("store", "nothing is stored", routes=OPENAI),
    _without_effect("metadata"),
    _without_effect("client_metadata", routes=RESPONSES),
    _without_effect("service_tier"),
    _without_effect("safety_identifier", routes=OPENAI),
    _without_effect("prompt_cache_key", "prefix caching needs no key", routes=OPENAI),
    _without_effect("prompt_cache_options", routes=OPENAI),
    _without_effect("prompt_cache_retention", routes=OPENAI),
    _without_effect("prediction", "`num_lookup_tokens` drafts from the prompt", routes=CHAT),
    _without_effect("reasoning_effort", "not passed to the model", routes=CHAT),
    _without_effect("reasoning", "not passed to the model", routes=CHAT + RESPONSES),
    _without_effect("thinking", "not passed to the model", routes=CHAT + MESSAGES, origin="Anthropic"),
    _without_effect("verbosity", routes=CHAT),
    _without_effect("max_tool_calls", "it limits server-side tools, which are refused", routes=RESPONSES),
    _without_effect("image", routes=RESPONSES),
    _without_effect("access_programs", routes=RESPONSES),
    *(
        _without_effect(name, routes=MESSAGES, origin="Anthropic")
        for name in ("diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id")
    ),
    _without_effect("cache_control", "prefix caching needs no markers", routes=MESSAGES, origin="Anthropic"),
    _refused(
        "best_of",
        "only the value of `n` is accepted",
        routes=COMPLETIONS + CHAT,
        accepts=lambda value, n: type(value) is int and value == n,
    ),
    _refused("suffix", "fill-in-the-middle is not supported", routes=COMPLETIONS, accepts=_is("")),
    _refused("audio", "answers are text", routes=CHAT),
    _refused("modalities", 'answers are text; `["text"]` is accepted', routes=CHAT, accepts=_is(["text"], [])),
    _refused("web_search_options", "web search is not supported", routes=CHAT),
    _refused("moderation", "moderation is not supported", routes=CHAT + RESPONSES),
    _refused("functions", "`tools` have replaced them", routes=CHAT, accepts=_is([])),
    _refused("function_call", "`tool_choice` has replaced it", routes=CHAT, accepts=_is("none", "auto")),
    *(
        _refused(name, "nothing is stored; send the whole conversation as `input`", routes=RESPONSES)
        for name in ("previous_response_id", "conversation")
    ),
    _refused("prompt", "no prompt is stored; send it as `instructions` and `input`", routes=RESPONSES),
    _refused(
        "background", "nothing is stored; wait for the answer, or `stream` it", routes=RESPONSES, accepts=_is(False)
    ),
    _refused(
        "include",
        "log-probabilities are available from /v1/chat/completions only",
        routes=RESPONSES,
        accepts=_no_logprobs,
    ),
    _refused(
        "top_logprobs",
        "log-probabilities are available from /v1/chat/completions only",
        routes=RESPONSES,
        accepts=_is(0),
    ),
    _refused(
        "truncation", "`truncate_prompt_tokens` keeps the end of the prompt", routes=RESPONSES, accepts=_is("disabled")
    ),
    _refused("context_management", "conversations are not shortened", routes=RESPONSES, accepts=_is([])),
    _refused(
        "context_management",
        "conversations are not shortened",
        routes=MESSAGES,
        origin="Anthropic",
        accepts=_clears_nothing,
    ),
    _refused("container", "code execution is not supported", routes=MESSAGES, origin="Anthropic"),
    _refused(
        "mcp_servers",
        "MCP servers are not supported; give `tools`",
        routes=MESSAGES,
        origin="Anthropic",
        accepts=_is([]),
    ),
    _served("top_k", origin="vLLM"),
    _served("min_p", origin="vLLM"),
    _served("repetition_penalty", origin="vLLM"),
    _served("min_tokens", origin="vLLM"),
    _served("stop_token_ids", origin="vLLM"),
    _served("include_stop_str_in_output", origin="vLLM"),
    _served("ignore_eos", origin="vLLM"),
    _served("skip_special_tokens", origin="vLLM"),
    _served("allowed_token_ids", "not with a constraint", origin="vLLM"),
    _refused("bad_words", "logit_bias of -100 forbids tokens", origin="vLLM", accepts=_is([])),
    _refused(
        "use_beam_search", "beam search is not supported", routes=COMPLETIONS + CHAT, origin="vLLM", accepts=_is(False)
    ),
    _refused(
        "length_penalty", "beam search is not supported", routes=COMPLETIONS + CHAT, origin="vLLM", accepts=_is(1, 1.0)
    ),
    _refused("echo", "only /v1/completions supports it", routes=CHAT, origin="vLLM", accepts=_is(False)),
    _refused(
        "return_token_ids", "only /generate returns them", routes=COMPLETIONS + CHAT, origin="vLLM", accepts=_is(False)
    ),
    _refused(
        "return_tokens_as_token_ids",
        "only /generate returns them",
        routes=COMPLETIONS + CHAT,
        origin="vLLM",
        accepts=_is(False),
    ),
    _refused(
        "add_special_tokens",
        "send token ids to control special tokens",
        routes=COMPLETIONS,
        origin="vLLM",
        accepts=_is(True),
    ),
    _refused("add_special_tokens", "the chat template adds them", routes=CHAT, origin="vLLM", accepts=_is(False)),
    _refused("include_reasoning", "reasoning is part of the text", routes=CHAT, origin="vLLM", accepts=_is(True)),
    _refused("enable_thinking", "it belongs in `chat_template_kwargs`", routes=TURNS, origin="vLLM"),
    _without_effect(
        "spaces_between_special_tokens", "no spaces are added between them", routes=COMPLETIONS + CHAT, origin="vLLM"
    ),
    _without_effect("request_id", routes=COMPLETIONS + CHAT, origin="vLLM"),
    _served("prompt_logprobs", "not in a stream", routes=COMPLETIONS + CHAT, origin="vLLM"),
    _served("truncate_prompt_tokens", "keeps the end of the prompt", origin="vLLM"),
    _served("structured_outputs", origin="vLLM"),
    _served("priority", "lower goes first", origin="vLLM"),
    _served("add_generation_prompt", routes=CHAT, origin="vLLM"),
    _served("continue_final_message", routes=CHAT, origin="vLLM"),
    _served(
        "chat_template_kwargs",
        "variables of the template, such as `enable_thinking`; those that it does not use have no effect",
        routes=TURNS,
        origin="vLLM",
    ),
    _served("early_exit", origin="SwiftKV"),
    _served("num_lookup_tokens", origin="SwiftKV"),
    _served("timeout_s", origin="SwiftKV"),
)


def fields_of(route: Route) -> dict[str, RequestField]:
    """Return the route's fields by name."""
    return {field.name: field for field in FIELDS if route in field.routes}


@cache
def names_served(route: Route) -> frozenset[str]:
    """Return the names of the route's served fields."""
    return frozenset(name for name, field in fields_of(route).items() if field.treatment is Treatment.SERVED)


def names_without_effect(
    route: Route, extra: Mapping[str, Any], nested: Iterable[str], n: int, ignored: Collection[str]
) -> tuple[str, ...]:
    """Return the names of a request's fields that have no effect, at most `MAX_NAMES` of them.

    Args:
        extra: fields that the body's model does not have.
        nested: dotted paths of unknown keys of messages, tools and other parts, which are never refused.
        ignored: fields that the operator wants ignored; `ANY`: all unknown ones.

    Raises:
        InvalidInputError: a field that would change the answer, or an unknown one.
    """
    known = fields_of(route)
    for name, value in extra.items():
        if name not in ignored:
            _check(name, value, n, known.get(name), route, any_ignored=ANY in ignored)
    names = [*dict.fromkeys([*extra, *nested])]
    return tuple(quote(name[:MAX_NAME_LENGTH], safe="", errors="replace") for name in names[:MAX_NAMES])


def _check(name: str, value: Any, n: int, field: RequestField | None, route: Route, *, any_ignored: bool) -> None:
    """Raise `InvalidInputError` unless the field is accepted without effect."""
    if field is not None and field.treatment is Treatment.REFUSED:
        if not field.accepts(value, n):
            shown = "too long to repeat" if (short := short_value(value)) is None else repr(short)
            message = f"{name} is {shown}; {field.note.replace('`', '')}: leave it out"
            raise InvalidInputError(message, field=name, value=short)
    elif (field is None or field.treatment is Treatment.SERVED) and not any_ignored:
        # A served field that the body's model lacks belongs to another route.
        shown = name[:MAX_NAME_LENGTH] or '""'
        message = f"{shown} is not a field of /v1/{route}{_suggestion(name, route)}"
        raise InvalidInputError(message, field=shown, value=short_value(value))


def _suggestion(name: str, route: Route) -> str:
    """Return a hint to the route or the field that was probably meant."""
    elsewhere = next((field.routes[0] for field in FIELDS if field.name == name and route not in field.routes), None)
    if elsewhere is not None:
        return f"; it is a field of /v1/{elsewhere}"
    nearest = get_close_matches(name, fields_of(route), n=1) if len(name) <= MAX_NAME_LENGTH else []
    return f"; the nearest one is {nearest[0]}" if nearest else "; docs/compatibility.md has all of them"
