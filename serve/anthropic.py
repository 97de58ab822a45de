"""Anthropic's Messages API, by conversion to chat requests and from chat completions."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import from_json

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.serve.access import HAS_API_KEY, AdmittedCaller
from swiftkv_platform.serve.openai.chat import (
    BlockEvent,
    BlockSplitter,
    ChatFieldMap,
    ChatGeneration,
    EventConverter,
    OutputBlock,
    prepare_prompt,
)
from swiftkv_platform.serve.openai.outputs import make_event_stream
from swiftkv_platform.serve.openai.schemas import (
    CallArguments,
    ChatRequest,
    OpenAIFields,
    index_parts_by_path,
    make_route_schema_filter,
)
from swiftkv_platform.serve.replica_state import ReplicaState
from swiftkv_platform.serve.schemas import BodyPart, PositiveNumber, TextPart, TypedPart
from swiftkv_platform.serve.tools.calling import ANTHROPIC_LIMITS, MAX_TOOLS, SKIPPED_TOOL, FunctionTool, ToolName
from swiftkv_platform.specs.base import MAX_MESSAGES
from swiftkv_platform.web.bodies import BodyRoute
from swiftkv_platform.web.problems import Problem, to_anthropic_error

FIELD_MAP = ChatFieldMap(
    "messages",
    {
        r"tools\.(\d+)\.function\.parameters": r"tools.\1.input_schema",
        r"tools\.(\d+)\.function": r"tools.\1",
        r"response_format\.json_schema": "output_config.format",
        "stop": "stop_sequences",
    },
    ANTHROPIC_LIMITS,
)
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _to_blocks(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


TextBlocks = Annotated[list[TextPart], BeforeValidator(_to_blocks, json_schema_input_type=str | list[TextPart])]


class ContentBlock(TextPart):
    """A content block of a message. Accepts the keys of a response's block, so that it can be sent back unchanged."""

    required_keys = {
        **TextPart.required_keys,
        "tool_use": ("id", "name"),
        "tool_result": ("tool_use_id",),
        "thinking": ("thinking",),
        "redacted_thinking": (),
    }
    id: Annotated[str, Field(min_length=1)] | None = None
    name: Annotated[str, Field(min_length=1)] | None = None
    input: CallArguments = ""
    """Arguments of a call."""
    tool_use_id: Annotated[str, Field(min_length=1)] | None = None
    content: TextBlocks = []
    """Text of a tool result."""
    thinking: str | None = None


class Message(BodyPart):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[ContentBlock], BeforeValidator(_to_blocks, json_schema_input_type=str | list[ContentBlock])]

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        roles = dict.fromkeys(("tool_use", "thinking", "redacted_thinking"), "assistant") | {"tool_result": "user"}
        for number, block in enumerate(self.content):
            if roles.get(block.type, self.role) != self.role:
                accepted = f"blocks of type {block.type!r} are for role {roles[block.type]!r}"
                raise ValueError(f"role is {self.role!r}, and content.{number} is of type {block.type!r}; {accepted}")
        return self

    def to_chat(self) -> Iterator[dict[str, Any]]:
        """Yield chat messages: one per tool result, then one for the other blocks."""
        by_type: dict[str, list[ContentBlock]] = {}
        for block in self.content:
            by_type.setdefault("text" if block.replaced_type else block.type, []).append(block)
        by_type.pop("redacted_thinking", None)  # encrypted by another provider
        results = by_type.pop("tool_result", [])
        for block in results:
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _join_texts(block.content)}
        if results and not by_type:
            return
        message: dict[str, Any] = {"role": self.role}
        if "thinking" in by_type:
            message["reasoning_content"] = "".join(block.thinking or "" for block in by_type["thinking"])
        if "text" in by_type or len(by_type) == 0:
            message["content"] = _join_texts(by_type.get("text", []))
        if "tool_use" in by_type:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.input},
                }
                for call in by_type["tool_use"]
            ]
        yield message


def _join_texts(blocks: list[Any]) -> str:
    return "".join(block.text for block in blocks)


class Tool(TypedPart):
    """A function. Tools of other types, which Anthropic's servers run or whose schema its models know, are skipped."""

    required_keys = {"custom": ("name", "input_schema")}
    default_type = "custom"
    type: str = default_type
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    """JSON schema of the input, an object."""
    strict: bool | None = None
    """Whether inputs follow the schema even if calls are optional."""

    def to_chat(self) -> dict[str, Any]:
        if self.replaced_type is not None:
            return SKIPPED_TOOL
        function = FunctionTool(
            name=self.name, description=self.description, parameters=self.input_schema, strict=self.strict
        )
        return {"type": "function", "function": function}


class ToolChoice(BodyPart):
    """`auto`: the model chooses; `any`: it calls at least one tool; `tool`: it calls `name`; `none`: no calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _check_name(self) -> Self:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name is required with type tool, and refused with other types")
        return self

    def to_chat(self) -> Any:
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name}}
        return "required" if self.type == "any" else self.type


class JSONFormat(BodyPart):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BodyPart):
    format: JSONFormat | None = None
    """Schema of the completion."""


class CountTokensRequest(OpenAIFields, json_schema_extra=make_route_schema_filter("messages")):
    """Body of `POST /v1/messages/count_tokens`: as of `/v1/messages`, with optional `max_tokens`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    """The conversation. The completion continues a last message of the assistant."""
    system: TextBlocks = []
    max_tokens: PositiveNumber | None = None
    stop_sequences: list[str] = []
    """Strings that end the completion and are not part of it."""
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: JSONFormat | None = None
    """Older name of `output_config.format`."""
    chat_template_kwargs: dict[str, Any] = {}

    def list_messages(self) -> Iterator[tuple[str, Mapping[str, TextPart]]]:
        yield "system", index_parts_by_path("system", self.system)
        for number, message in enumerate(self.messages):
            parts = index_parts_by_path(f"messages.{number}.content", message.content)
            if any(part.type == "tool_result" for part in parts.values()):
                yield "tool", {}
            yield message.role, parts

    def to_chat_request(self) -> ChatRequest:
        """Return the equivalent chat request. Raises `RequestValidationError` and `InvalidInputError`."""
        messages = [chat_message for message in self.messages for chat_message in message.to_chat()]
        last = messages[-1]
        is_continued = last["role"] == "assistant" and "content" in last and "tool_calls" not in last
        system = [{"role": "system", "content": [block.text for block in self.system]}] if self.system else []
        choice = self.tool_choice
        if choice and choice.type == "any" and not self.tools:
            raise InvalidInputError.for_field(
                "tool_choice.type", "any", ", but there are no tools; leave tool_choice out"
            )
        output = (self.output_config.format if self.output_config else None) or self.output_format
        response_format = output and {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": output.schema_},
        }
        return FIELD_MAP.make_chat_request(
            self,
            messages=[*system, *messages],
            add_generation_prompt=not is_continued,
            continue_final_message=is_continued,
            max_tokens=self.max_tokens,
            stop=self.stop_sequences,
            tools=None if self.tools is None else [tool.to_chat() for tool in self.tools],
            tool_choice=choice and choice.to_chat(),
            parallel_tool_calls=False if choice and choice.disable_parallel_tool_use else None,
            response_format=response_format,
        )


class MessagesRequest(CountTokensRequest, json_schema_extra=make_route_schema_filter("messages")):
    """Body of `POST /v1/messages`."""

    max_tokens: PositiveNumber


def make_anthropic_router(state: ReplicaState) -> APIRouter:
    """Return the routes below `/v1/messages`, which also accept the key in Anthropic's header."""
    router = APIRouter(prefix="/v1/messages", tags=["anthropic"], route_class=BodyRoute, dependencies=[HAS_API_KEY])

    @router.post("")
    async def messages(body: MessagesRequest, request: Request, caller: AdmittedCaller) -> Response:
        """Generate the assistant's next message, in the format of Anthropic's Messages API."""
        generation = await ChatGeneration.submit(
            state, body.to_chat_request(), request, caller, route_body=body, field_map=FIELD_MAP
        )
        if body.stream:
            return make_event_stream(_MessageEvents().stream_events(generation))
        return await generation.respond(request, _convert_completion)

    @router.post("/count_tokens")
    async def count_tokens(body: CountTokensRequest, request: Request, _caller: AdmittedCaller) -> dict[str, int]:
        """Count the tokens of a conversation with its tools and the chat template."""
        async with state.acquire_version(body.model) as version:
            _, prompt = await prepare_prompt(version, body.to_chat_request(), request, body, FIELD_MAP)
        return {"input_tokens": len(prompt)}

    return router


def _convert_completion(completion: Mapping[str, Any]) -> dict[str, Any]:
    [choice] = completion["choices"]
    content = [_make_content_block(block, block.text) for block in BlockSplitter.from_message(choice["message"]).blocks]
    return {**_make_message(completion), "content": content, **_make_stop_fields(choice)}


def _make_message(completion: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without content."""
    message_id = str(completion["id"]).removeprefix("chatcmpl-")
    head = {"id": f"msg_{message_id}", "type": "message", "role": "assistant", "model": completion["model"]}
    return {
        **head,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _convert_usage(completion["usage"]),
    }


def _convert_usage(usage: Mapping[str, Any]) -> dict[str, int]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,  # clients add up the three counts
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _make_stop_fields(choice: Mapping[str, Any]) -> dict[str, Any]:
    reason, stop = choice["finish_reason"], choice["stop_reason"]
    if reason == "stop" and isinstance(stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _STOP_REASONS.get(reason, reason), "stop_sequence": None}


def _make_content_block(block: OutputBlock, text: str) -> dict[str, Any]:
    """Return the content block for `block`, with `text` as its text or JSON input."""
    if block.call is None:
        return {"type": "text", "text": text}
    return {"type": "tool_use", **block.call, "input": _parse_input(text)}


def _parse_input(arguments: str) -> dict[str, Any]:
    """Parse a call's arguments, also truncated ones, to an object."""
    for read_json in (partial(json.loads, strict=False), partial(from_json, allow_partial="trailing-strings")):
        try:
            value = read_json(arguments)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else {}
    return {}


class _MessageEvents(EventConverter):
    """Converts chat completion chunks to the events of a message."""

    _has_begun = False

    def convert_chunk(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        [choice] = chunk["choices"]
        if not self._has_begun:
            self._has_begun = True
            yield {"type": "message_start", "message": _make_message(chunk)}
        for event in self.splitter.add_delta(choice["delta"]):
            yield self._convert_block_event(event)
        if choice["finish_reason"] is not None:
            for event in self.splitter.finish():
                yield self._convert_block_event(event)
            yield {"type": "message_delta", "delta": _make_stop_fields(choice), "usage": _convert_usage(chunk["usage"])}
            yield {"type": "message_stop"}

    def convert_error(self, problem: Problem) -> Iterator[dict[str, Any]]:
        yield to_anthropic_error(problem)

    def _convert_block_event(self, event: BlockEvent) -> dict[str, Any]:
        kind, block, added = event
        if kind == "begin":
            return {
                "type": "content_block_start",
                "index": block.index,
                "content_block": _make_content_block(block, ""),
            }
        if kind == "end":
            return {"type": "content_block_stop", "index": block.index}
        call_delta = {"type": "input_json_delta", "partial_json": added}
        delta = {"type": "text_delta", "text": added} if block.call is None else call_delta
        return {"type": "content_block_delta", "index": block.index, "delta": delta}
