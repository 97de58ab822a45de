"""Messages of a chat request, and what templates are told of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from swiftkv_platform.data.messages import call_arguments
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.serve.tools.calling import MAX_TOOLS


def _joined_text(content: Any) -> Any:
    """Content parts that are text, as one text."""
    if not isinstance(content, list) or not content:
        return content
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"part {number} is of type {kind!r}; only parts of type 'text' are accepted")
        if set(part) != {"type", "text"} or not isinstance(part["text"], str):
            raise ValueError(f"part {number} has {', '.join(sorted(map(str, part)))}; accepted are type and text")
    return "".join(part["text"] for part in content)


class FunctionCall(FrozenModel, strict=True):
    name: Annotated[str, Field(min_length=1)]
    arguments: str
    """JSON, as the answer had it."""

    def for_template(self) -> dict[str, Any]:
        return {"name": self.name, "arguments": call_arguments(self.arguments)}


class ToolCall(FrozenModel, strict=True):
    """A call that an answer has made."""

    id: Annotated[str, Field(min_length=1)]
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None
    """Number in a stream, without effect."""


class ChatMessage(FrozenModel, strict=True):
    """A turn. What an answer's message has is accepted, so that it can be sent back as it came."""

    role: Annotated[str, Field(min_length=1)]
    """`system`, `developer`, `user`, `assistant` or `tool`; or another one that the template knows."""
    content: Annotated[str | None, BeforeValidator(_joined_text)] = None
    """Text, or parts of type text; null in an assistant's turn that calls tools."""
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS)] | None = None
    """Calls of an assistant's turn."""
    tool_call_id: str | None = None
    """In a tool's turn: the call that it answers."""
    reasoning_content: str | None = None
    """Thoughts of an assistant's turn, where the template has a place for them."""
    refusal: str | None = None
    """Without effect."""
    annotations: list[Any] | None = None
    """Without effect."""
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        if self.role == "tool" and not self.tool_call_id:
            raise ValueError("a message of role 'tool' needs tool_call_id, the id of the call that it answers")
        if self.role != "tool" and self.tool_call_id is not None:
            raise ValueError(f"role is {self.role!r}; tool_call_id is for role 'tool'")
        if self.role != "assistant" and self.tool_calls:
            raise ValueError(f"role is {self.role!r}; tool_calls are for role 'assistant'")
        if self.content is None and not self.tool_calls:
            raise ValueError("content is missing; it may be null beside tool_calls alone")
        return self

    def for_template(self) -> dict[str, Any]:
        """The message as templates take it: arguments as objects, where they are."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                fields[name] = getattr(self, name)
        if self.tool_calls:
            fields["tool_calls"] = [
                {"id": call.id, "type": "function", "function": call.function.for_template()}
                for call in self.tool_calls
            ]
        return fields
