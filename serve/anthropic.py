"""Anthropic's Messages API: requests are converted to chat requests, and chat completions to messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import from_json

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.serve.access import HAS_API_KEY, TheCaller
from swiftkv_platform.serve.current import Current
from swiftkv_platform.serve.openai.answers import event_stream
from swiftkv_platform.serve.openai.chat import Block, BlockEvent, Blocks, Form, Turn, TypedEvents, read
from swiftkv_platform.serve.openai.schemas import ChatRequest, OpenAIFields, described
from swiftkv_platform.serve.schemas import Nested, Positive, checked_kind
from swiftkv_platform.serve.tools.calling import MAX_TOOLS, FunctionTool, ToolName
from swiftkv_platform.specs.base import MAX_MESSAGES
from swiftkv_platform.web.bodies import BodyRoute
from swiftkv_platform.web.problems import Problem, to_anthropic_error

FORM = Form(
    "messages",
    {
        r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
        r"tools\.(\d+)\.function": r"tools.\1",
        r"response_format\.json_schema": "output_config.format",
        "stop": "stop_sequences",
    },
)
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class TextBlock(Nested):
    """A content block; here only text."""

    needs: ClassVar[Mapping[str, tuple[str, ...]]] = {"text": ("text",)}
    """Required keys of a block by its type."""
    type: str
    text: str = ""

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, block: Any) -> Any:
        """Check type and required keys before pydantic validates the fields, since other types have other keys."""
        if isinstance(block, dict):
            checked_kind(block, cls.needs)
        return block


def _blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


TextBlocks = Annotated[list[TextBlock], BeforeValidator(_blocks, json_schema_input_type=str | list[TextBlock])]


class ContentBlock(TextBlock):
    """A content block of a message. Accepts the keys of a response's block, so that it can be sent back unchanged."""

    needs = {
        **TextBlock.needs,
        "tool_use": ("id", "name", "input"),
        "tool_result": ("tool_use_id",),
        "thinking": ("thinking",),
        "redacted_thinking": (),
    }
    id: Annotated[str, Field(min_length=1)] | None = None
    name: Annotated[str, Field(min_length=1)] | None = None
    input: dict[str, Any] | None = None
    """Arguments of a call."""
    tool_use_id: Annotated[str, Field(min_length=1)] | None = None
    content: TextBlocks = []
    """Text of a tool's result."""
    thinking: str | None = None


class Message(Nested):
    """A turn of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[ContentBlock], BeforeValidator(_blocks, json_schema_input_type=str | list[ContentBlock])]

    @model_validator(mode="after")
    def _fits_its_role(self) -> Self:
        roles = dict.fromkeys(("tool_use", "thinking", "redacted_thinking"), "assistant") | {"tool_result": "user"}
        for number, block in enumerate(self.content):
            if roles.get(block.type, self.role) != self.role:
                wanted = f"blocks of type {block.type!r} are for role {roles[block.type]!r}"
                raise ValueError(f"role is {self.role!r}, and content.{number} is of type {block.type!r}; {wanted}")
        return self

    def for_chat(self) -> Iterator[dict[str, Any]]:
        """Yield the turn as chat messages: first a message for each tool result, then one for the rest."""
        of_type: dict[str, list[ContentBlock]] = {}
        for block in self.content:
            of_type.setdefault(block.type, []).append(block)
        of_type.pop("redacted_thinking", None)  # encrypted by another provider
        results = of_type.pop("tool_result", [])
        for block in results:
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _words(block.content)}
        if results and not of_type:
            return
        message: dict[str, Any] = {"role": self.role}
        if "thinking" in of_type:
            message["reasoning_content"] = "".join(block.thinking or "" for block in of_type["thinking"])
        if "text" in of_type or len(of_type) == 0:
            message["content"] = _words(of_type.get("text", []))
        if "tool_use" in of_type:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.input)},
                }
                for call in of_type["tool_use"]
            ]
        yield message


def _words(blocks: list[Any]) -> str:
    return "".join(block.text for block in blocks)


class Tool(Nested):
    type: Literal["custom"] = "custom"
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    """JSON schema of the input, an object."""
    strict: bool | None = None
    """Whether the input follows the schema even if the model chooses whether to call."""

    def for_chat(self) -> dict[str, Any]:
        function = FunctionTool(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return {"type": "function", "function": function}


class ToolChoice(Nested):
    """`auto`: the model chooses; `any`: it calls at least one tool; `tool`: it calls `name`; `none`: no calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_its_tool(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is required with type tool, and refused with other types")
        return self

    def for_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class JSONFormat(Nested):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Nested):
    format: JSONFormat | None = None
    """Schema that the answer follows."""


class CountRequest(OpenAIFields, json_schema_extra=described("messages")):
    """Body of `POST /v1/messages/count_tokens`: that of `/v1/messages`, with `max_tokens` optional."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The conversation; if its last message is the assistant's, the answer continues it."""
    system: TextBlocks = []
    max_tokens: Positive | None = None
    stop_sequences: list[str] = []
    """Strings that end the answer and are not part of it."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: JSONFormat | None = None
    """Older name of `output_config.format`."""
    chat_template_kwargs: dict[str, Any] = {}

    def chat(self) -> ChatRequest:
        """Return the equivalent chat request. Raises `RequestValidationError` and `InvalidInputError`."""
        messages = [one for message in self.messages for one in message.for_chat()]
        goes_on = messages[-1]["role"] == "assistant" and "content" in messages[-1] and "tool_calls" not in messages[-1]
        system = [{"role": "system", "content": _words(self.system)}] if self.system else []
        choice = self.tool_choice
        if choice and choice.type == "any" and not self.tools:
            raise InvalidInputError.for_field(
                "tool_choice.type", "any", ", but there are no tools; leave tool_choice out"
            )
        output = (self.output_config.format if self.output_config else None) or self.output_format
        schema = output and {"type": "json_schema", "json_schema": {"name": "answer", "schema": output.schema_}}
        return FORM.chat(
            self,
            messages=[*system, *messages],
            add_generation_prompt=not goes_on,
            continue_final_message=goes_on,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            tools=None if self.tools is None else [tool.for_chat() for tool in self.tools],
            tool_choice=choice and choice.for_chat(),
            parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
            response_format=schema,
        )


class MessagesRequest(CountRequest, json_schema_extra=described("messages")):
    """Body of `POST /v1/messages`."""

    max_tokens: Positive


def anthropic_router(current: Current) -> APIRouter:
    """Return the routes below `/v1/messages`; they also accept the key in Anthropic's header."""
    router = APIRouter(prefix="/v1/messages", tags=["anthropic"], route_class=BodyRoute, dependencies=[HAS_API_KEY])

    @router.post("")
    async def messages(body: MessagesRequest, request: Request, caller: TheCaller) -> Response:
        """Generate the assistant's next turn, in the format of Anthropic's Messages API."""
        turn = await Turn.begin(current, body.chat(), request, caller, asked=body, form=FORM)
        if body.stream:
            return event_stream(_Events().stream(turn))
        return await turn.whole(request, _whole)

    @router.post("/count_tokens")
    async def count_tokens(body: CountRequest, request: Request, _caller: TheCaller) -> dict[str, int]:
        """Count the tokens of a conversation, including its tools and the text that the chat template adds."""
        with current.entering() as version:
            _, prompt = await read(version, body.chat(), request, body, FORM)
        return {"input_tokens": len(prompt)}

    return router


def _whole(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a chat completion to a message."""
    [choice] = answer["choices"]
    content = [_content(block, block.text) for block in Blocks.of(choice["message"]).all]
    return {**_message(answer), "content": content, **_end(choice)}


def _message(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message's fields at its beginning, with empty content."""
    message_id = str(answer["id"]).removeprefix("chatcmpl-")
    head = {"id": f"msg_{message_id}", "type": "message", "role": "assistant", "model": answer["model"]}
    return {**head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(answer["usage"])}


def _usage(usage: Mapping[str, Any]) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}  # caching needs no request
    return {"input_tokens": usage["prompt_tokens"], **cached, "output_tokens": usage["completion_tokens"]}


def _end(choice: Mapping[str, Any]) -> dict[str, Any]:
    reason, stop = choice["finish_reason"], choice["stop_reason"]
    if reason == "stop" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _STOP_REASONS.get(reason, reason), "stop_sequence": None}


def _content(block: Block, text: str) -> dict[str, Any]:
    """Return the content block for `block`, with `text` as its text or JSON input."""
    if block.call is None:
        return {"type": "text", "text": text}
    return {"type": "tool_use", **block.call, "input": _input(text)}


def _input(arguments: str) -> dict[str, Any]:
    """Parse arguments to an object; if they were cut off, as far as they go."""
    for read_json in (partial(json.loads, strict=False), partial(from_json, allow_partial="trailing-strings")):
        try:
            found = read_json(arguments)
        except (ValueError, RecursionError):
            continue
        return found if isinstance(found, dict) else {}
    return {}


class _Events(TypedEvents):
    """Converts chat completion chunks to the events of a message."""

    _has_begun = False

    def taken(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        [choice] = chunk["choices"]
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": _message(chunk)}
        for event in self.blocks.take(choice["delta"]):
            yield self._told(event)
        if choice["finish_reason"] is not None:
            for event in self.blocks.end():
                yield self._told(event)
            yield {"type": "message_delta", "delta": _end(choice), "usage": _usage(chunk["usage"])}
            yield {"type": "message_stop"}

    def failed(self, problem: Problem) -> Iterator[dict[str, Any]]:
        yield to_anthropic_error(problem)

    def _told(self, event: BlockEvent) -> dict[str, Any]:
        kind, block, added = event
        if kind == "begin":
            return {"type": "content_block_start", "index": block.index, "content_block": _content(block, "")}
        if kind == "end":
            return {"type": "content_block_stop", "index": block.index}
        of_call = {"type": "input_json_delta", "partial_json": added}
        delta = {"type": "text_delta", "text": added} if block.call is None else of_call
        return {"type": "content_block_delta", "index": block.index, "delta": delta}
