"""The bodies of OpenAI's completion routes, as far as this server answers them, and what those of other routes share
with them. Other keys are for `fields.py`.

Field names and meanings: https://platform.openai.com/docs/api-reference; extensions as in vLLM's server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from swiftkv_platform.data.messages import call_arguments
from swiftkv_platform.engine import SamplingParams, StructuredOutputs
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.serve.openai.fields import ANY, Route, Treatment, fields_of, names_served, names_without_effect
from swiftkv_platform.serve.schemas import (
    Nested,
    PromptField,
    SamplingFields,
    Whole,
    check_generates,
    unknown_keys,
    without_nulls,
)
from swiftkv_platform.serve.tools.calling import MAX_TOOLS, ToolFields
from swiftkv_platform.specs.base import MAX_MESSAGES
from swiftkv_platform.web.problems import short_value

_WORDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Key of a part's words, by its type."""
_LEGACY_ID = "call_0"
"""Id of a call in the form that had none."""


class Part(Nested):
    """Part of a message's content that is text."""

    type: str
    text: str = ""
    refusal: str = ""

    @property
    def words(self) -> str:
        """The part's text."""
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
        raise ValueError(f"part {number} is of type {short_value(kind)!r}; only parts of type 'text' are accepted")
    words = part.get(_WORDS[kind])
    others = {key: value for key, value in part.items() if key not in _WORDS.values()}
    if isinstance(words, str):
        return Part(**others, **{_WORDS[kind]: words})
    raise ValueError(f"part {number} is of type {kind!r}; its {_WORDS[kind]} must be a string")


# In place of pydantic's own check of the union, whose errors would name each of its types.
Content = Annotated[
    str | list[Part] | None, PlainValidator(_content, json_schema_input_type=str | list[Part | str] | None)
]


def _written(arguments: Any) -> Any:
    """Arguments as text; some clients send the object."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _no_audio(audio: Any) -> Any:
    if audio is not None:
        raise ValueError("messages are text; leave it out, and give its transcript as content")
    return audio


class FunctionCall(Nested):
    name: Annotated[str, Field(min_length=1)]
    arguments: Annotated[str, BeforeValidator(_written)] = ""
    """JSON, as the answer had it."""

    def for_template(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": call_arguments(self.arguments)}


class ToolCall(Nested):
    """A call that an answer has made. Its number in a stream, `index`, has no effect."""

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(Nested):
    """A turn. What an answer's message has is accepted, so that it can be sent back as it came; keys that no template
    is told of are without effect."""

    role: Annotated[str, Field(min_length=1)]
    """`system`, `developer`, `user`, `assistant` or `tool`; or another one that the template knows."""
    content: Content = None
    """Text, or parts of type text; null in an assistant's turn that calls tools."""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    """Calls of an assistant's turn."""
    function_call: FunctionCall | None = None
    """The call of an assistant's turn, in the form before `tool_calls`."""
    tool_call_id: str | None = None
    """In a tool's turn: the call that it answers."""
    reasoning_content: str | None = None
    """Thoughts of an assistant's turn, where the template has a place for them."""
    reasoning: Any = None
    """The same under another name, where it is text."""
    refusal: str | None = None
    """Words of an assistant's turn that has no content."""
    audio: Annotated[None, BeforeValidator(_no_audio)] = None

    @property
    def calls(self) -> list[ToolCall]:
        """Calls of the turn, in whichever form."""
        if not self.tool_calls and self.function_call is not None:
            return [ToolCall(id=_LEGACY_ID, function=self.function_call)]
        return self.tool_calls or []

    @property
    def words(self) -> str | None:
        """Text of the turn; None where it has calls or thoughts alone."""
        if isinstance(self.content, list):
            return "".join(part.words for part in self.content)
        return self.refusal if self.content is None else self.content

    @property
    def thoughts(self) -> str | None:
        """Thoughts of the turn, by whichever name."""
        named = self.reasoning if isinstance(self.reasoning, str) else None
        return named if self.reasoning_content is None else self.reasoning_content

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of role 'tool' needs tool_call_id, the id of the call that it answers")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError(f"role is {self.role!r}; tool_call_id is for role 'tool'")
        if self.role != "assistant" and self.calls:
            raise ValueError(f"role is {self.role!r}; tool_calls are for role 'assistant'")
        if self.words is None and self.thoughts is None and not self.calls:
            raise ValueError("content is missing; it may be null beside tool_calls alone")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as templates take it: arguments as objects, where they are."""
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
    """Send a last event that has usage and no choices."""
    continuous_usage_stats: bool = False
    """Have the usage so far in every event, as in vLLM."""


def described(route: Route) -> Callable[[dict[str, Any]], None]:
    """Change of a body's schema: it shows the fields without effect, and no others beside the body's own."""

    def extend(schema: dict[str, Any]) -> None:
        schema["additionalProperties"] = False
        served = names_served(route)
        schema["properties"] = {name: one for name, one in schema["properties"].items() if name in served}
        for field in fields_of(route).values():
            if field.treatment is Treatment.WITHOUT_EFFECT and "." not in field.name:
                schema["properties"][field.name] = {"description": "Accepted without effect."}

    return extend


class OpenAIFields(SamplingFields, extra="allow"):
    """Fields that both completion routes take. `null` means the default, as with OpenAI's clients."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    prompt_logprobs: Whole | None = None
    """Log-probabilities of the prompt's tokens and of this number of the most probable ones, in vLLM's shape."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, body: Any) -> Any:
        return without_nulls(body)

    @model_validator(mode="after")
    def _whole_with_prompt_logprobs(self) -> Self:
        if self.stream and self.prompt_logprobs is not None:
            raise ValueError("prompt_logprobs are not in a stream; give stream: false")
        return self

    def without_effect(self, route: Route, ignored: Collection[str], unread: Collection[str] = ()) -> tuple[str, ...]:
        """Names of the fields that have no effect; `ignored`: those that the operator sets to be, `unread`: those
        that the model has no use for. Raises `InvalidInputError`: a field that would change the answer, or an unknown
        one."""
        nested = [*unknown_keys(self), *unread, *(self._unknown_constraints() if ANY in ignored else ())]
        others = {name: getattr(self, name) for name in self.given(type(self)) if name not in names_served(route)}
        return names_without_effect(route, {**(self.model_extra or {}), **others}, nested, self.n, ignored)

    def given(self, kind: type[OpenAIFields]) -> list[str]:
        """Names of the fields of `kind` that the body has."""
        return [name for name in kind.model_fields if name in self.model_fields_set]

    def _unknown_constraints(self) -> Iterator[str]:
        """Take the unknown keys, which else are refused since they would change the answer, out of
        `structured_outputs`, and name them."""
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
    """Begin the answer with the prompt; with logprobs also the prompt's."""

    def sampling_params(self) -> SamplingParams:
        """Raises `InvalidInputError` for a value out of range."""
        if not self.echo and self.prompt_logprobs is None:
            check_generates(self.max_tokens, "echo")
        echoed = self.logprobs if self.echo else None
        if None not in (echoed, self.prompt_logprobs) and echoed != self.prompt_logprobs:
            raise InvalidInputError(
                f"prompt_logprobs is {self.prompt_logprobs}; with echo it must be logprobs, {self.logprobs}",
                field="prompt_logprobs",
                value=self.prompt_logprobs,
            )
        scored = self.prompt_logprobs if echoed is None else echoed
        return self.params(max_tokens=self.max_tokens, logprobs=self.logprobs, prompt_logprobs=scored)


class ChatRequest(ToolFields, OpenAIFields, json_schema_extra=described("chat/completions")):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: Whole | None = None
    max_completion_tokens: Whole | None = None
    """Default: what the context leaves."""
    logprobs: bool = False
    top_logprobs: Whole = 0
    add_generation_prompt: bool = True
    """Let the assistant begin a turn of its own behind the messages."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template."""
    continue_final_message: bool = False
    """Let the answer go on where the last message ends; `add_generation_prompt` is then false."""

    @model_validator(mode="after")
    def _one_way_to_begin(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise ValueError("continue_final_message needs add_generation_prompt: false")
        return self

    def sampling_params(self, room: int) -> SamplingParams:
        """`room`: tokens that the context leaves for the answer. Raises `InvalidInputError`."""
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
