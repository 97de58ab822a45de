"""Request bodies of OpenAI's completion routes, with the fields served here, and the parts that other routes share with
them. For all other fields see `fields.py`.

Field names and meanings: https://platform.openai.com/docs/api-reference; extensions as in vLLM's server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from swiftkv_platform.data.messages import parse_call_arguments
from swiftkv_platform.engine import SamplingParams, StructuredOutputs
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.serve.openai.fields import ANY, Route, Treatment, fields_of, names_served, names_without_effect
from swiftkv_platform.serve.schemas import (
    Nested,
    PromptField,
    SamplingFields,
    Whole,
    check_generates,
    remove_nulls,
    unknown_keys,
)
from swiftkv_platform.serve.tools.calling import MAX_TOOLS, ToolFields
from swiftkv_platform.specs.base import MAX_MESSAGES
from swiftkv_platform.web.problems import value_if_short

_WORDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Key that holds the text of a content part, by the part's type."""
_LEGACY_ID = "call_0"
"""Id given to a call in the legacy form `function_call`, which has none."""


class Part(Nested):
    """A text part of a message's content."""

    type: str
    text: str = ""
    refusal: str = ""

    @property
    def words(self) -> str:
        words: str = getattr(self, _WORDS[self.type])
        return words


def _content(content: Any) -> str | list[Part] | None:
    if isinstance(content, list):
        return [_part(number, part) for number, part in enumerate(content)]
    if content is None or isinstance(content, str):
        return content
    raise ValueError("must be text, or a list of parts of type 'text'")


def _part(number: int, part: Any) -> Part:
    if isinstance(part, str):
        return Part(type="text", text=part)
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _WORDS:
        raise ValueError(f"part {number} is of type {value_if_short(kind)!r}; only parts of type 'text' are accepted")
    words = part.get(_WORDS[kind])
    others = {key: value for key, value in part.items() if key not in _WORDS.values()}
    if isinstance(words, str):
        return Part(**others, **{_WORDS[kind]: words})
    raise ValueError(f"part {number} is of type {kind!r}; its {_WORDS[kind]} must be a string")


# Replaces pydantic's check of the union, whose errors would name each member type.
Content = Annotated[
    str | list[Part] | None, PlainValidator(_content, json_schema_input_type=str | list[Part | str] | None)
]


def _written(arguments: Any) -> Any:
    """Return arguments as JSON text; some clients send the object itself."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _no_audio(audio: Any) -> Any:
    if audio is not None:
        raise ValueError("messages are text; leave it out, and send its transcript as content")
    return audio


class FunctionCall(Nested):
    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[str, BeforeValidator(_written)] = ""
    """Arguments as JSON text."""

    def for_template(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": parse_call_arguments(self.arguments)}


class ToolCall(Nested):
    """A tool call of an earlier answer. Its `index` in a stream has no effect."""

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Nested):
    """A message. Accepts the keys of a response's message, so that it can be sent back unchanged; keys that are not
    passed to the template have no effect."""

    role: Annotated[str, Field(min_length=1)]
    """`system`, `developer`, `user`, `assistant`, `tool`, or another role that the template knows."""
    content: Content = None
    """Text, or parts of type text; may be null in an assistant's message with tool calls."""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    """Tool calls of an assistant's message."""
    function_call: FunctionCall | None = None
    """Tool call of an assistant's message, in the legacy form."""
    tool_call_id: str | None = None
    """Id of the call that a tool's message answers."""
    reasoning_content: str | None = None
    """Reasoning of an assistant's message, if the template uses it."""
    reasoning: Any = None
    """Other name of `reasoning_content`; ignored unless it is text."""
    refusal: str | None = None
    """Text of an assistant's message without content."""
    audio: Annotated[None, BeforeValidator(_no_audio)] = None

    @property
    def calls(self) -> list[ToolCall]:
        """Tool calls of the message, in either form."""
        if not self.tool_calls and self.function_call is not None:
            return [ToolCall(id=_LEGACY_ID, function=self.function_call)]
        return self.tool_calls or []

    @property
    def words(self) -> str | None:
        if isinstance(self.content, list):
            return "".join(part.words for part in self.content)
        return self.refusal if self.content is None else self.content

    @property
    def thoughts(self) -> str | None:
        """Reasoning of the message, under either name."""
        named = self.reasoning if isinstance(self.reasoning, str) else None
        return named if self.reasoning_content is None else self.reasoning_content

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of role 'tool' needs tool_call_id, the id of the call that it answers")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError(f"role is {self.role!r}; tool_call_id is only for role 'tool'")
        if self.role != "assistant" and self.calls:
            raise ValueError(f"role is {self.role!r}; tool_calls are only for role 'assistant'")
        if self.words is None and self.thoughts is None and not self.calls:
            raise ValueError("content is missing; it may be null only with tool_calls")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates take it, with call arguments as objects if they are valid."""
        fields: dict[str, Any] = {"role": self.role, "content": self.words}
        others = {"name": self.name, "tool_call_id": self.tool_call_id, "reasoning_content": self.thoughts}
        fields |= {name: value for name, value in others.items() if value is not None}
        if self.calls:
            fields["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.for_template()} for call in self.calls
            ]
        return fields


class StreamOptions(Nested):
    """Options of a stream."""

    include_usage: bool = False
    """Send a last event with usage and without choices."""
    continuous_usage_stats: bool = False
    """Send the usage so far in every event, as in vLLM."""


def described(route: Route) -> Callable[[dict[str, Any]], None]:
    """Return a `json_schema_extra` that limits a body's schema to the route's served fields and fields without
    effect."""

    def extend(schema: dict[str, Any]) -> None:
        schema["additionalProperties"] = False
        served = names_served(route)
        schema["properties"] = {name: one for name, one in schema["properties"].items() if name in served}
        for field in fields_of(route).values():
            if field.treatment is Treatment.WITHOUT_EFFECT and "." not in field.name:
                schema["properties"][field.name] = {"description": "Accepted without effect."}

    return extend


class OpenAIFields(SamplingFields, extra="allow"):
    """Fields that all routes below `/v1` share. `null` means the default, as with OpenAI's clients."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: Whole | None = None
    """Return log-probabilities of the prompt's tokens and of this many most probable ones, in vLLM's format."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return remove_nulls(body)

    @model_validator(mode="after")
    def _whole_with_prompt_logprobs(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are not available in a stream; use stream: false")
        return self

    def without_effect(self, route: Route, ignored: Collection[str], unread: Collection[str] = ()) -> tuple[str, ...]:
        """Return the names of the fields that have no effect. `ignored`: fields that the operator wants ignored.
        `unread`: fields that the model does not use. Raises `InvalidInputError` for a field that would change the
        answer, or an unknown one."""
        nested = [*unknown_keys(self), *unread, *(self._unknown_constraints() if ANY in ignored else ())]
        others = {name: getattr(self, name) for name in self.given(type(self)) if name not in names_served(route)}
        return names_without_effect(route, {**(self.model_extra or {}), **others}, nested, self.n, ignored)

    def given(self, kind: type[OpenAIFields]) -> list[str]:
        """Return the names of the fields of `kind` that the body sets."""
        return [name for name in kind.model_fields if name in self.model_fields_set]

    def _unknown_constraints(self) -> Iterator[str]:
        """Remove unknown keys, which would otherwise be refused, from `structured_outputs`, and yield their names."""
        asked = self.structured_outputs or {}
        for key in asked.keys() - StructuredOutputs.keys():
            del asked[key]
            yield f"structured_outputs.{key}"


class CompletionRequest(OpenAIFields, json_schema_extra=described("completions")):
    """Body of `POST /v1/completions`."""

    prompt: PromptField
    max_tokens: Whole = SamplingParams.max_tokens
    """0, with `echo`, scores the prompt and generates nothing."""
    logprobs: Whole | None = None
    echo: bool = False
    """Begin the answer with the prompt, and logprobs with the prompt's."""

    def sampling_params(self) -> SamplingParams:
        """Return the sampling parameters. Raises `InvalidInputError` for a value out of range."""
        if not self.echo and self.prompt_logprobs is None:
            check_generates(self.max_tokens, "echo")
        echoed = self.logprobs if self.echo else None
        if None not in (echoed, self.prompt_logprobs) and echoed != self.prompt_logprobs:
            why = f"; with echo it must be logprobs, {self.logprobs}"
            raise InvalidInputError.for_field("prompt_logprobs", self.prompt_logprobs, why)
        scored = self.prompt_logprobs if echoed is None else echoed
        return self.params(max_tokens=self.max_tokens, logprobs=self.logprobs, prompt_logprobs=scored)


class ChatRequest(ToolFields, OpenAIFields, json_schema_extra=described("chat/completions")):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    """Default: the rest of the context."""
    logprobs: bool = False
    top_logprobs: Whole = 0
    add_generation_prompt: bool = True
    """Begin a new turn of the assistant after the messages."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables for the chat template."""
    continue_final_message: bool = False
    """Continue the last message; needs `add_generation_prompt: false`."""

    @model_validator(mode="after")
    def _one_way_to_begin(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        return self

    def sampling_params(self, room: int) -> SamplingParams:
        """Return the sampling parameters. `room`: tokens that the context leaves for the answer. Raises
        `InvalidInputError`."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidInputError("top_logprobs needs logprobs: true", field="top_logprobs", value=self.top_logprobs)
        limits = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        max_tokens = limits[0] if limits else room
        check_generates(max_tokens, "echo on /v1/completions")
        return self.params(
            max_tokens=max_tokens,
            logprobs=self.top_logprobs if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )
