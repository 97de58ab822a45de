"""Messages of a chat request, and what templates are told of them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from swiftkv_platform.data.messages import call_arguments
from swiftkv_platform.serve.nested import Nested
from swiftkv_platform.serve.tools.calling import MAX_TOOLS
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
    str | list[Part] | None, PlainValidator(_content, json_schema_input_type=str | list[dict[str, Any]] | None)
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
