"""OpenAI's Responses API, without storage: requests are converted to chat requests, and chat completions to
responses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import count
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field, Tag, model_validator

from swiftkv_platform.serve.access import AdmittedCaller
from swiftkv_platform.serve.openai.chat import (
    BlockEvent,
    BlockSplitter,
    ChatFieldMap,
    ChatGeneration,
    EventConverter,
    OutputBlock,
)
from swiftkv_platform.serve.openai.outputs import make_event_stream
from swiftkv_platform.serve.openai.schemas import (
    CallArguments,
    ChatRequest,
    Content,
    OpenAIFields,
    Part,
    index_parts_by_path,
    make_route_schema_filter,
)
from swiftkv_platform.serve.replica_state import ReplicaState
from swiftkv_platform.serve.schemas import BodyPart, TextPart, TypedPart, WholeNumber, describe_part
from swiftkv_platform.serve.tools.calling import (
    CHOICE_KINDS,
    MAX_TOOLS,
    SKIPPED_TOOL,
    FunctionTool,
    NamedFunction,
)
from swiftkv_platform.specs.base import MAX_MESSAGES
from swiftkv_platform.web.problems import Problem, to_openai_error

FIELD_MAP = ChatFieldMap(
    "responses",
    {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        r"tools\.(\d+)\.function": r"tools.\1",
        "response_format": "text.format",
    },
)
_CALL_KEYS = ("type", "id", "call_id", "name", "status")
"""Keys of a call's item besides its arguments."""


class Item(TypedPart):
    """An item of the conversation. Accepts the keys of a response's item, so that it can be sent back unchanged."""

    required_keys = {
        "message": ("role", "content"),
        "function_call": ("call_id", "name"),
        "function_call_output": ("call_id",),
        "reasoning": (),
    }
    default_type = "message"
    type: str = default_type
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content = None
    """Content of a message."""
    call_id: Annotated[str, Field(min_length=1)] | None = None
    """Id of a call, also of an item with its output."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Name of the called function."""
    arguments: CallArguments = ""
    output: Content = None
    """Result of a call; null if the function returned nothing."""

    @classmethod
    def replace_unsupported(cls, item: Mapping[str, Any], validate: Callable[[dict[str, Any]], Self]) -> Self:
        """Return a function's call or result for an item that is one of another tool, and else a message."""
        kind, call_id = str(item["type"]), item.get("call_id")
        if call_id and kind.endswith("_call"):
            arguments = {key: value for key, value in item.items() if key not in _CALL_KEYS}
            call = {
                "name": item.get("name") or kind.removesuffix("_call"),
                "arguments": json.dumps(arguments, ensure_ascii=False),
            }
            return validate({"type": "function_call", "call_id": call_id, **call})
        if call_id and kind.endswith("_output"):
            text = describe_part(item)
            return validate({"type": "function_call_output", "call_id": call_id, "output": text})
        role = item.get("role") or ("user" if kind.startswith("input_") else "assistant")
        return validate({"type": "message", "role": role, "content": [item]})

    @model_validator(mode="before")
    @classmethod
    def _join_reasoning(cls, item: Any) -> Any:
        """Join the parts of a reasoning item, which have other types than those of a message."""
        if not isinstance(item, dict) or item.get("type") != "reasoning":
            return item
        parts = item.get("content")
        parts = parts if isinstance(parts, list) else []
        texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "reasoning_text"]
        return {**item, "content": "".join(text for text in texts if isinstance(text, str))}


class FlatTool(FunctionTool, TypedPart):
    """A function. Tools of other types, which Codex sends by default, are skipped."""

    required_keys = {"function": ("name",)}

    def to_chat(self) -> dict[str, Any]:
        return SKIPPED_TOOL if self.replaced_type is not None else _to_chat_tool(self)


class FlatNamedTool(NamedFunction):
    type: Literal["function"]


class FlatAllowedTools(BodyPart):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


FlatToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[FlatNamedTool, Tag("function")]
    | Annotated[FlatAllowedTools, Tag("allowed_tools")],
    CHOICE_KINDS,
]


class TextFormat(BodyPart):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise ValueError("schema is required with type json_schema")
        return self

    def to_chat(self) -> dict[str, Any]:
        return {"type": self.type, "schema": self.schema_}


class TextOptions(BodyPart):
    format: TextFormat | None = None


def _to_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(OpenAIFields, json_schema_extra=make_route_schema_filter("responses")):
    """Body of `POST /v1/responses`."""

    input: Annotated[
        list[Item],
        Field(min_length=1, max_length=MAX_MESSAGES),
        BeforeValidator(_to_items, json_schema_input_type=str | list[Item]),
    ]
    """Text of a user message, or the conversation up to now."""
    instructions: str | None = None
    """A message of role `system` before the input."""
    max_output_tokens: WholeNumber | None = None
    """Default: the rest of the context."""
    text: TextOptions | None = None
    """`format`: `text`, `json_object`, or `json_schema` with the schema of the completion."""
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def list_messages(self) -> Iterator[tuple[str, Mapping[str, TextPart]]]:
        for number, item in enumerate(self.input):
            role = "tool" if item.type == "function_call_output" else item.role or "assistant"
            if item.replaced_type == "item_reference":  # maybe to the new message
                role = "user"
            parts = index_parts_by_path(f"input.{number}.content", item.content)
            yield role, {f"input.{number}": part for part in parts.values()} if item.replaced_type else parts

    def to_chat_request(self) -> ChatRequest:
        """Return the equivalent chat request. Raises `RequestValidationError`."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        choice: Any = self.tool_choice
        if isinstance(choice, FlatNamedTool):
            choice = _to_chat_tool(choice)
        elif isinstance(choice, FlatAllowedTools):
            tools = [_to_chat_tool(tool) for tool in choice.tools]
            choice = {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": tools}}
        return FIELD_MAP.make_chat_request(
            self,
            messages=[*system, *_to_chat_messages(self.input)],
            max_tokens=self.max_output_tokens,
            tools=None if self.tools is None else [tool.to_chat() for tool in self.tools],
            tool_choice=choice,
            response_format=self.text.format.to_chat() if self.text and self.text.format else None,
        )


def _to_chat_tool(tool: FlatTool | FlatNamedTool) -> dict[str, Any]:
    function = tool.model_dump(include={*FunctionTool.model_fields} & {*type(tool).model_fields})
    return {"type": "function", "function": function}


_ASSISTANT_KEYS = {"function_call": "tool_calls", "reasoning": "reasoning_content"}


def _to_chat_messages(items: list[Item]) -> Iterator[dict[str, Any]]:
    """Yield the items as chat messages. Consecutive reasoning, text and calls of the assistant become one message."""
    message: dict[str, Any] = {}
    has_text = False  # of an item that was not replaced
    for item in items:
        # 1. find the item's key in an assistant's message; None: it is another role's message
        is_text = (item.type, item.role) == ("message", "assistant")
        key = "content" if is_text else _ASSISTANT_KEYS.get(item.type)
        # 2. yield the open message unless the item continues it: calls come last
        is_placeholder = is_text and item.replaced_type is not None
        ends_message = {
            "content": has_text and "tool_calls" not in message and not is_placeholder,
            "tool_calls": False,
        }
        if message and (key is None or ends_message.get(key, has_text or "tool_calls" in message)):
            yield message
            message, has_text = {}, False
        has_text = has_text or (is_text and not is_placeholder)
        # 3. convert the item, or add it to the open message
        if key is None:
            yield _to_chat_message(item)
        elif key == "tool_calls":
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            message = {"role": "assistant", **message, key: [*message.get(key, ()), call]}
        elif (text := _join_texts(item.content)) or key == "content":
            message = {"role": "assistant", **message, key: message.get(key, "") + (text or "")}
    if message:
        yield message


def _to_chat_message(item: Item) -> dict[str, Any]:
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": _join_texts(item.output)}
    return {"role": item.role, "content": _join_texts(item.content)}


def _join_texts(parts: list[Part] | None) -> str | None:
    return None if parts is None else "".join(part.text_content for part in parts)


def add_responses_route(router: APIRouter, state: ReplicaState) -> None:
    @router.post("/responses")
    async def responses(body: ResponsesRequest, request: Request, caller: AdmittedCaller) -> Response:
        """Generate the assistant's next message, in the format of OpenAI's Responses API. Nothing is stored."""
        generation = await ChatGeneration.submit(
            state, body.to_chat_request(), request, caller, route_body=body, field_map=FIELD_MAP
        )
        if body.stream:
            return make_event_stream(_ResponseEvents(body).stream_events(generation))
        return await generation.respond(request, partial(_convert_completion, body))


def _convert_completion(body: ResponsesRequest, completion: Mapping[str, Any]) -> dict[str, Any]:
    [choice] = completion["choices"]
    splitter = BlockSplitter.from_message(choice["message"])
    return _make_response(body, completion, splitter, _to_response_status(choice["finish_reason"]))


def _to_response_status(reason: str) -> str:
    return "incomplete" if reason == "length" else "completed"


def _make_response(
    body: ResponsesRequest, completion: Mapping[str, Any], splitter: BlockSplitter, status: str
) -> dict[str, Any]:
    """Return the current state of a response. `completion`: a chat completion or its newest chunk."""
    output = [_make_item(block, _get_response_id(completion), "completed") for block in splitter.blocks]
    if output and status != "completed":
        output[-1]["status"] = "incomplete"
    return {
        "id": f"resp_{_get_response_id(completion)}",
        "object": "response",
        "created_at": completion["created"],
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": completion["model"],
        "output": output,
        "usage": None if status == "in_progress" else _convert_usage(completion["usage"]),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": body.temperature,
        "text": _dump_field(body.text or TextOptions(format=TextFormat(type="text"))),
        "tool_choice": "auto" if body.tool_choice is None else _dump_field(body.tool_choice),
        "tools": [_dump_field(tool) for tool in body.tools or () if tool.replaced_type is None],
        "top_p": body.top_p,
        "truncation": "disabled",
    }


def _dump_field(value: Any) -> Any:
    return value if isinstance(value, str) else value.model_dump(exclude_none=True, by_alias=True)


def _get_response_id(completion: Mapping[str, Any]) -> str:
    return str(completion["id"]).removeprefix("chatcmpl-")


def _convert_usage(usage: dict[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _make_item(block: OutputBlock, response_id: str, status: str) -> dict[str, Any]:
    if block.call is not None:
        call = {"call_id": block.call["id"], "name": block.call["name"], "arguments": block.text}
        return {"type": "function_call", "id": f"fc_{response_id}_{block.index}", "status": status, **call}
    message = {"id": f"msg_{response_id}_{block.index}", "status": status, "role": "assistant"}
    return {"type": "message", **message, "content": [_make_text_part(block.text)]}


def _make_text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class _ResponseEvents(EventConverter):
    """Converts chat completion chunks to the numbered events of a response."""

    def __init__(self, body: ResponsesRequest) -> None:
        super().__init__()
        self._body = body
        self._numbers = count()
        self._last: Mapping[str, Any] = {}

    def convert_chunk(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        [choice] = chunk["choices"]
        reason = choice["finish_reason"]
        if not self._last:
            yield self._make_lifecycle_event("response.created", chunk, "in_progress")
            yield self._make_lifecycle_event("response.in_progress", chunk, "in_progress")
        self._last = chunk
        for event in self.splitter.add_delta(choice["delta"]):
            yield from self._convert_block_event(event, "completed")
        if reason is not None:
            status = _to_response_status(reason)
            for event in self.splitter.finish():
                yield from self._convert_block_event(event, status)
            yield self._make_lifecycle_event(f"response.{status}", chunk, status)

    def convert_error(self, problem: Problem) -> Iterator[dict[str, Any]]:
        error = to_openai_error(problem)["error"]
        yield self._make_event("error", code=error["code"], message=error["message"], param=error["param"])
        if self._last:
            failed = self._make_lifecycle_event("response.failed", self._last, "failed")
            failed["response"]["error"] = {"code": "server_error", "message": error["message"]}
            yield failed

    def _convert_block_event(self, event: BlockEvent, status: str) -> Iterator[dict[str, Any]]:
        kind, block, added = event
        item = _make_item(block, _get_response_id(self._last), status)
        position = {"item_id": item["id"], "output_index": block.index}
        text = {**position, "content_index": 0}
        if kind == "begin":
            item = {**item, "status": "in_progress"} | ({"content": []} if block.call is None else {})
            yield self._make_event("response.output_item.added", output_index=block.index, item=item)
            if block.call is None:
                yield self._make_event("response.content_part.added", **text, part=_make_text_part(""))
        elif kind == "append" and block.call is None:
            yield self._make_event("response.output_text.delta", **text, delta=added, logprobs=[])
        elif kind == "append":
            yield self._make_event("response.function_call_arguments.delta", **position, delta=added)
        else:
            if block.call is None:
                yield self._make_event("response.output_text.done", **text, text=block.text, logprobs=[])
                yield self._make_event("response.content_part.done", **text, part=_make_text_part(block.text))
            else:
                call = {"name": item["name"], "arguments": block.text}
                yield self._make_event("response.function_call_arguments.done", **position, **call)
            yield self._make_event("response.output_item.done", output_index=block.index, item=item)

    def _make_lifecycle_event(self, kind: str, chunk: Mapping[str, Any], status: str) -> dict[str, Any]:
        return self._make_event(kind, response=_make_response(self._body, chunk, self.splitter, status))

    def _make_event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}
