"""OpenAI's Responses API, without storage: requests are converted to chat requests, and chat completions to
responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field, Tag, model_validator

from swiftkv_platform.serve.access import TheCaller
from swiftkv_platform.serve.current import Current
from swiftkv_platform.serve.openai.answers import event_stream
from swiftkv_platform.serve.openai.chat import Block, BlockEvent, Blocks, Form, Turn, TypedEvents
from swiftkv_platform.serve.openai.schemas import ChatRequest, Content, OpenAIFields, described
from swiftkv_platform.serve.schemas import Nested, Whole, checked_kind
from swiftkv_platform.serve.tools.calling import CHOICE_KINDS, MAX_TOOLS, FunctionTool, NamedFunction
from swiftkv_platform.specs.base import MAX_MESSAGES
from swiftkv_platform.web.problems import Problem, to_openai_error

FORM = Form(
    "responses",
    {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        r"tools\.(\d+)\.function": r"tools.\1",
        r"response_format\.json_schema": "text.format",
        "response_format": "text.format",
    },
)
_NEEDS = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
"""Required keys of an item by its type."""


class Item(Nested):
    """An item of the conversation. Accepts the keys of a response's item, so that it can be sent back unchanged."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content = None
    """Content of a message."""
    call_id: Annotated[str, Field(min_length=1)] | None = None
    """Id of a call, also in the item with its output."""
    name: Annotated[str, Field(min_length=1)] | None = None
    """Name of the called function."""
    arguments: str | None = None
    """Arguments as JSON text."""
    output: Content = None

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, item: Any) -> Any:
        """Check type and required keys before pydantic validates the fields, since other types have other keys."""
        if not isinstance(item, dict):
            return item
        kind = checked_kind(item, _NEEDS, "message")
        # The parts of a reasoning item have other types than a message's.
        return {**item, "content": _thoughts(item)} if kind == "reasoning" else item


def _thoughts(item: dict[str, Any]) -> str:
    parts = item.get("content")
    parts = parts if isinstance(parts, list) else []
    words = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "reasoning_text"]
    return "".join(word for word in words if isinstance(word, str))


class FlatTool(FunctionTool):
    type: Literal["function"]

    @model_validator(mode="before")
    @classmethod
    def _is_known(cls, tool: Any) -> Any:
        """Check type and required keys before pydantic validates the fields, since hosted tools have other keys."""
        if isinstance(tool, dict):
            checked_kind(tool, {"function": ("name",)})
        return tool


class FlatNamedTool(NamedFunction):
    type: Literal["function"]


class FlatAllowedTools(Nested):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[FlatNamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


FlatToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")]
    | Annotated[FlatNamedTool, Tag("function")]
    | Annotated[FlatAllowedTools, Tag("allowed_tools")],
    CHOICE_KINDS,
]


class TextFormat(Nested):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _schema_where_it_belongs(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise ValueError("schema is required with type json_schema, and refused with other types")
        return self

    def for_chat(self) -> dict[str, Any]:
        if self.schema_ is None:
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": "answer", "schema": self.schema_}}


class TextOptions(Nested):
    format: TextFormat | None = None


def _items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(OpenAIFields, json_schema_extra=described("responses")):
    """Body of `POST /v1/responses`."""

    input: Annotated[
        list[Item],
        Field(min_length=1, max_length=MAX_MESSAGES),
        BeforeValidator(_items, json_schema_input_type=str | list[Item]),
    ]
    """Text of a user message, or the conversation so far."""
    instructions: str | None = None
    """A message of role `system` before the input."""
    max_output_tokens: Whole | None = None
    """Default: the rest of the context."""
    text: TextOptions | None = None
    """`format`: `text`, `json_object`, or `json_schema` with a schema that the answer follows."""
    tools: Annotated[list[FlatTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: FlatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}

    def chat(self) -> ChatRequest:
        """Return the equivalent chat request. Raises `RequestValidationError`."""
        system = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        choice: Any = self.tool_choice
        if isinstance(choice, FlatNamedTool):
            choice = _nested(choice)
        elif isinstance(choice, FlatAllowedTools):
            tools = [_nested(tool) for tool in choice.tools]
            choice = {"type": choice.type, "allowed_tools": {"mode": choice.mode, "tools": tools}}
        return FORM.chat(
            self,
            messages=[*system, *_messages(self.input)],
            max_tokens=self.max_output_tokens,
            tools=None if self.tools is None else [_nested(tool) for tool in self.tools],
            tool_choice=choice,
            response_format=self.text.format.for_chat() if self.text and self.text.format else None,
        )


def _nested(tool: FlatTool | FlatNamedTool) -> dict[str, Any]:
    function = tool.model_dump(include={*FunctionTool.model_fields} & {*type(tool).model_fields})
    return {"type": "function", "function": function}


_OF_ASSISTANT = {"function_call": "tool_calls", "reasoning": "reasoning_content"}


def _messages(items: list[Item]) -> Iterator[dict[str, Any]]:
    """Yield the items as chat messages; consecutive reasoning, text and calls of the assistant become one message."""
    turn: dict[str, Any] = {}
    for item in items:
        is_said = (item.type, item.role) == ("message", "assistant")
        key = "content" if is_said else _OF_ASSISTANT.get(item.type)
        again = {"content": "content" in turn and "tool_calls" not in turn, "tool_calls": False}
        if turn and (key is None or again.get(key, "content" in turn or "tool_calls" in turn)):
            yield turn
            turn = {}
        if key is None:
            yield _other(item)
        elif key == "tool_calls":
            function = {"name": item.name, "arguments": item.arguments}
            call = {"id": item.call_id, "type": "function", "function": function}
            turn = {"role": "assistant", **turn, key: [*turn.get(key, ()), call]}
        elif item.content or key == "content":
            turn = {"role": "assistant", **turn, key: turn.get(key, "") + _words(item.content)}
    if turn:
        yield turn


def _other(item: Item) -> dict[str, Any]:
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id, "content": _words(item.output)}
    return {"role": item.role, "content": _words(item.content)}


def _words(content: Any) -> str:
    return "".join(part.words for part in content) if isinstance(content, list) else content


def add_responses(router: APIRouter, current: Current) -> None:
    """Add the route `/v1/responses`."""

    @router.post("/responses")
    async def responses(body: ResponsesRequest, request: Request, caller: TheCaller) -> Response:
        """Generate the assistant's next turn, in the format of OpenAI's Responses API. Nothing is stored."""
        turn = await Turn.begin(current, body.chat(), request, caller, asked=body, form=FORM)
        if body.stream:
            return event_stream(_Events(body).stream(turn))
        return await turn.whole(request, partial(_whole, body))


def _whole(body: ResponsesRequest, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a chat completion to a response."""
    [choice] = answer["choices"]
    return _response(body, answer, Blocks.of(choice["message"]), _status(choice["finish_reason"]))


def _status(reason: str) -> str:
    return "incomplete" if reason == "length" else "completed"


def _response(body: ResponsesRequest, answer: Mapping[str, Any], blocks: Blocks, status: str) -> dict[str, Any]:
    """Return the current state of a response. `answer`: the chat completion, or its newest chunk."""
    output = [_item(block, _id(answer), "completed") for block in blocks.all]
    if output and status != "completed":
        output[-1]["status"] = "incomplete"
    return {
        "id": f"resp_{_id(answer)}",
        "object": "response",
        "created_at": answer["created"],
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "model": answer["model"],
        "output": output,
        "usage": None if status == "in_progress" else _usage(answer["usage"]),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": body.temperature,
        "text": _dumped(body.text or TextOptions(format=TextFormat(type="text"))),
        "tool_choice": "auto" if body.tool_choice is None else _dumped(body.tool_choice),
        "tools": [_dumped(tool) for tool in body.tools or ()],
        "top_p": body.top_p,
        "truncation": "disabled",
    }


def _dumped(value: Any) -> Any:
    return value if isinstance(value, str) else value.model_dump(exclude_none=True, by_alias=True)


def _id(answer: Mapping[str, Any]) -> str:
    return str(answer["id"]).removeprefix("chatcmpl-")


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


def _item(block: Block, answer_id: str, status: str) -> dict[str, Any]:
    """Convert a block to an output item."""
    if block.call is not None:
        call = {"call_id": block.call["id"], "name": block.call["name"], "arguments": block.text}
        return {"type": "function_call", "id": f"fc_{answer_id}_{block.index}", "status": status, **call}
    message = {"id": f"msg_{answer_id}_{block.index}", "status": status, "role": "assistant"}
    return {"type": "message", **message, "content": [_part(block.text)]}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class _Events(TypedEvents):
    """Converts chat completion chunks to the numbered events of a response."""

    def __init__(self, body: ResponsesRequest) -> None:
        super().__init__()
        self._body = body
        self._numbers = count()
        self._last: Mapping[str, Any] = {}
        """Previous chunk; empty before the first."""

    def taken(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        [choice] = chunk["choices"]
        reason = choice["finish_reason"]
        if not self._last:
            yield self._lifecycle("response.created", chunk, "in_progress")
            yield self._lifecycle("response.in_progress", chunk, "in_progress")
        self._last = chunk
        for event in self.blocks.take(choice["delta"]):
            yield from self._told(event, "completed")
        if reason is not None:
            status = _status(reason)
            for event in self.blocks.end():
                yield from self._told(event, status)
            yield self._lifecycle(f"response.{status}", chunk, status)

    def failed(self, problem: Problem) -> Iterator[dict[str, Any]]:
        error = to_openai_error(problem)["error"]
        yield self._event("error", code=error["code"], message=error["message"], param=error["param"])
        if self._last:
            failed = self._lifecycle("response.failed", self._last, "failed")
            failed["response"]["error"] = {"code": "server_error", "message": error["message"]}
            yield failed

    def _told(self, event: BlockEvent, status: str) -> Iterator[dict[str, Any]]:
        kind, block, added = event
        item = _item(block, _id(self._last), status)
        place = {"item_id": item["id"], "output_index": block.index}
        text = {**place, "content_index": 0}
        if kind == "begin":
            item = {**item, "status": "in_progress"} | ({"content": []} if block.call is None else {})
            yield self._event("response.output_item.added", output_index=block.index, item=item)
            if block.call is None:
                yield self._event("response.content_part.added", **text, part=_part(""))
        elif kind == "more" and block.call is None:
            yield self._event("response.output_text.delta", **text, delta=added, logprobs=[])
        elif kind == "more":
            yield self._event("response.function_call_arguments.delta", **place, delta=added)
        else:
            if block.call is None:
                yield self._event("response.output_text.done", **text, text=block.text, logprobs=[])
                yield self._event("response.content_part.done", **text, part=_part(block.text))
            else:
                yield self._event(
                    "response.function_call_arguments.done", **place, name=item["name"], arguments=block.text
                )
            yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _lifecycle(self, kind: str, chunk: Mapping[str, Any], status: str) -> dict[str, Any]:
        return self._event(kind, response=_response(self._body, chunk, self.blocks, status))

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}
