"""Chat completions for all routes with conversations: generation in the format of OpenAI's chat completions, and
conversion of other routes' formats from and to it. Knows no route."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError

from swiftkv_platform.errors import ModelNotFoundError, SwiftKVError
from swiftkv_platform.serve.access import Caller
from swiftkv_platform.serve.chat import find_unused_variables, rename_prompt_errors, tokenize_chat
from swiftkv_platform.serve.collector import OutputCollector, RequestContext, collect_unless_disconnected
from swiftkv_platform.serve.openai.fields import Route, get_served_field_names
from swiftkv_platform.serve.openai.outputs import (
    ToolCallStreams,
    format_answer,
    format_chat_choice,
    format_chat_delta,
    format_prompt_logprobs,
    make_common_fields,
    make_usage,
    parse_tool_calls,
    stream_chunks,
)
from swiftkv_platform.serve.openai.schemas import ChatMessage, ChatRequest, OpenAIFields, StreamOptions
from swiftkv_platform.serve.schemas import Message
from swiftkv_platform.serve.tools.calling import OPENAI_LIMITS, ToolCallRules, ToolLimits, make_tool_call_rules
from swiftkv_platform.web.problems import Problem, make_error_problem

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.serve.replica_state import ModelVersion, ReplicaState


@dataclass(frozen=True)
class ChatFieldMap:
    """Mapping between a route's field names and the field names of a chat request."""

    route: Route
    names: Mapping[str, str]
    """Prefixes of field paths: regular expression for the chat request's -> replacement for the route's."""
    tool_limits: ToolLimits = OPENAI_LIMITS

    def make_chat_request(self, body: OpenAIFields | None, **fields: Any) -> ChatRequest:
        """Return a chat request with `fields`, and with the fields of `body` that have the same names in both. Raises
        `RequestValidationError`."""
        served, given = get_served_field_names(self.route), [] if body is None else body.list_given_fields(ChatRequest)
        same = {name: getattr(body, name) for name in given if name in served}
        stream_options = StreamOptions(continuous_usage_stats=True) if body is not None and body.stream else None
        try:
            return ChatRequest.model_validate({**same, "stream_options": stream_options, **fields})
        except ValidationError as error:
            found = [(detail, ".".join(str(part) for part in detail["loc"])) for detail in error.errors()]
            errors = [{**detail, "loc": ("body", *self._to_route_path(path).split("."))} for detail, path in found]
            raise RequestValidationError(errors) from error

    @contextmanager
    def rename_errors(self) -> Iterator[None]:
        """Make errors in the context name the route's fields."""
        try:
            yield
        except SwiftKVError as error:
            self.rename_field(error)
            raise

    def rename_field(self, error: SwiftKVError) -> None:
        error.rename_fields(self._to_route_path)

    def _to_route_path(self, path: str) -> str:
        for chat_prefix, route_prefix in self.names.items():
            renamed, count = re.subn(rf"^{chat_prefix}(?=\.|$)", route_prefix, path)
            if count:
                return renamed
        return path


CHAT = ChatFieldMap("chat/completions", {})


@dataclass(frozen=True)
class ChatConversation:
    """Conversation of a request, for captured traffic. `is_continued`: the answer continues the last message."""

    messages: Sequence[ChatMessage | Message]
    tool_rules: ToolCallRules | None = None
    is_continued: bool = False

    @property
    def num_bytes(self) -> int:
        return sum(message.num_bytes for message in self.messages)

    def make_row_fields(self, output: RequestOutput) -> dict[str, Any]:
        """Return `messages`, `tools` and `finish_reason` of the captured row with this answer."""
        messages = [message.to_openai_format() for message in self.messages]
        choice = format_answer(output)
        if self.tool_rules is not None:
            choice = parse_tool_calls(choice, self.tool_rules)
        answer = {name: value for name, value in choice["message"].items() if name != "refusal"}
        if self.is_continued:
            last = messages.pop()
            answer = {**last, **answer, "content": (last["content"] or "") + (answer["content"] or "")}
        tools = self.tool_rules and self.tool_rules.tools
        return {"messages": [*messages, answer], "tools": tools, "finish_reason": choice["finish_reason"]}


@dataclass(frozen=True)
class ChatGeneration:
    """Generation of the assistant's next message, submitted to the engine."""

    body: ChatRequest
    version: ModelVersion
    collector: OutputCollector
    tool_rules: ToolCallRules | None
    field_map: ChatFieldMap

    @classmethod
    async def submit(
        cls,
        state: ReplicaState,
        body: ChatRequest,
        request: Request,
        caller: Caller,
        *,
        route_body: OpenAIFields | None = None,
        field_map: ChatFieldMap = CHAT,
    ) -> Self:
        """Submit a chat request. `route_body`: body of another route that `body` was converted from. Raises as
        `prepare_prompt` and `ReplicaState.submit`."""
        async with state.acquire_version(body.model) as version:
            tool_rules, prompt = await prepare_prompt(version, body, request, route_body or body, field_map)
            conversation = ChatConversation(body.messages, tool_rules, is_continued=body.continue_final_message)
            context = make_context(caller, route_body or body, request, version, conversation)
            # max_tokens defaults to the context that the prompt leaves
            limit = body.truncate_prompt_tokens or -1
            num_prompt_tokens = len(prompt) if limit < 0 else min(len(prompt), limit)
            with field_map.rename_errors(), body.rename_errors(), rename_prompt_errors():
                params = body.make_sampling_params(max(version.model_info.max_model_len - num_prompt_tokens, 1))
                params = tool_rules.apply_to_params(params) if tool_rules else params
                collector = await state.submit(version, [prompt], params, context)
        return cls(body, version, collector, tool_rules, field_map)

    async def respond(self, request: Request, convert: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> Response:
        """Return the complete chat completion, converted by `convert` for other routes. Raises as
        `collect_unless_disconnected`."""
        version, tool_rules = self.version, self.tool_rules
        with version.hold_open(), self.field_map.rename_errors():
            outputs = await collect_unless_disconnected(self.collector, request)
            vocabulary, top = version.engine.input_processor.vocabulary, self.body.top_logprobs

            def render() -> Response:
                choices = [format_chat_choice(i, output, vocabulary, top=top) for i, output in enumerate(outputs)]
                choices = [parse_tool_calls(choice, tool_rules) for choice in choices] if tool_rules else choices
                head = make_common_fields("chatcmpl", "chat.completion", self.collector, version)
                head |= {"choices": choices, "usage": make_usage(outputs)}
                return JSONResponse(convert(head | make_prompt_logprobs_field(self.body, outputs[0], version)))

            return await version.render_response(render, outputs, self.collector.context.caller.sender)

    def stream_chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Yield the chunks of the chat completion. Raises as `OutputCollector.stream_outputs`."""
        vocabulary, top = self.version.engine.input_processor.vocabulary, self.body.top_logprobs
        tool_calls = ToolCallStreams(self.tool_rules) if self.tool_rules else None

        async def format_chunk(choice: int, output: RequestOutput, previous: RequestOutput | None) -> dict[str, Any]:
            render = partial(format_chat_delta, choice, output, vocabulary, top=top, previous=previous)
            delta = await self.version.render_response(render, [output], self.collector.context.caller.sender)
            return delta if tool_calls is None else tool_calls.convert_delta(delta)

        head = make_common_fields("chatcmpl", "chat.completion.chunk", self.collector, self.version)
        return stream_chunks(self.collector, head, format_chunk, self.body.stream_options or StreamOptions())


async def prepare_prompt(
    version: ModelVersion,
    body: ChatRequest,
    request: Request,
    route_body: OpenAIFields,
    field_map: ChatFieldMap,
    *,
    add_special_tokens: bool = False,
) -> tuple[ToolCallRules | None, list[int]]:
    """Return the rules of a body's tool calls (or None), and the token ids of its conversation. Stores the names of
    ignored fields in `request.state`. Raises `InvalidInputError`, `ModelNotFoundError`, `QueueFullError`."""
    require_served_model(body.model, version)
    unused = find_unused_variables(version.tokenizer, body.chat_template_kwargs)
    unused += [name for message in body.messages for name in message.client_lines]
    request.state.ignored_fields = route_body.find_ignored_fields(field_map.route, version.ignored_fields, unused)
    with field_map.rename_errors():
        tool_rules = make_tool_call_rules(
            body, version.tokenizer, field_map.tool_limits, version.tool_call_parser, body.make_constraint()
        )
        prompt = await tokenize_chat(
            version.engine,
            [message.to_template_format() for message in body.messages],
            request.state.caller.sender,
            tools=tool_rules.tools if tool_rules else None,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            template_kwargs=body.chat_template_kwargs,
            add_special_tokens=add_special_tokens,
        )
    return tool_rules, prompt


def require_served_model(model: str, version: ModelVersion) -> None:
    if not version.accepts_model_name(model):
        served = version.served_models
        names = f"model is {served[0]!r}" if len(served) == 1 else f"models are {', '.join(map(repr, served))}"
        raise ModelNotFoundError.for_field("model", model, f"; the served {names}")


def make_context(
    caller: Caller,
    body: OpenAIFields,
    request: Request,
    version: ModelVersion,
    conversation: ChatConversation | None = None,
) -> RequestContext:
    """Return the context of a request after `prepare_prompt` or `find_ignored_fields`, which set its ignored fields.
    `conversation`: None if its prompts are texts or token ids."""
    path = request.scope["route"].path
    return RequestContext(
        caller,
        priority=body.priority,
        timeout_s=body.timeout_s,
        interval_s=None if body.stream else math.inf,
        ignored_fields=request.state.ignored_fields,
        capture=version.plan_capture(
            path, allows_capture=body.allows_capture, user=body.end_user, conversation=conversation
        ),
    )


def make_prompt_logprobs_field(body: OpenAIFields, output: RequestOutput, version: ModelVersion) -> dict[str, Any]:
    if body.prompt_logprobs is None:
        return {}
    return {
        "prompt_logprobs": format_prompt_logprobs(
            output, version.engine.input_processor.vocabulary, body.prompt_logprobs
        )
    }


@dataclass
class OutputBlock:
    """Text or tool call of a completion, for routes that return lists of blocks."""

    index: int
    call: dict[str, Any] | None
    """`id` and `name` of the tool call; None for text."""
    text: str = ""


BlockEvent = tuple[Literal["begin", "append", "end"], OutputBlock, str]
"""(event, block, added text)."""


@dataclass
class BlockSplitter:
    """Splits a completion into consecutive blocks."""

    blocks: list[OutputBlock] = field(default_factory=list)
    _is_open: bool = False

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        splitter = cls()
        for _ in splitter.add_delta(message):
            pass
        return splitter

    def add_delta(self, message: Mapping[str, Any]) -> Iterator[BlockEvent]:
        """Yield the events of the next delta, or of a complete message."""
        calls: Iterable[Mapping[str, Any]] = message.get("tool_calls") or ()
        for call in calls:
            if "id" not in call:  # continues the open call
                yield from self._append_text(call["function"]["arguments"])
        if text := message.get("content"):
            if not (self._is_open and self.blocks[-1].call is None):
                yield from self._begin_output_block(None)
            yield from self._append_text(text)
        for call in calls:
            if "id" in call:
                yield from self._begin_output_block({"id": call["id"], "name": call["function"]["name"]})
                yield from self._append_text(call["function"]["arguments"])

    def finish(self) -> Iterator[BlockEvent]:
        """Yield the end of the open block, if there is one."""
        if self._is_open:
            self._is_open = False
            yield "end", self.blocks[-1], ""

    def _begin_output_block(self, call: dict[str, Any] | None) -> Iterator[BlockEvent]:
        yield from self.finish()
        self.blocks.append(OutputBlock(len(self.blocks), call))
        self._is_open = True
        yield "begin", self.blocks[-1], ""

    def _append_text(self, text: str) -> Iterator[BlockEvent]:
        if text:
            self.blocks[-1].text += text
            yield "append", self.blocks[-1], text


class EventConverter(ABC):
    """Converts a streamed chat completion to the typed events of another route."""

    def __init__(self) -> None:
        self.splitter = BlockSplitter()

    @abstractmethod
    def convert_chunk(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of the next chunk, which has the token usage up to it."""

    @abstractmethod
    def convert_error(self, problem: Problem) -> Iterator[dict[str, Any]]:
        """Yield the events of an error that ends the stream."""

    async def stream_events(self, generation: ChatGeneration) -> AsyncIterator[dict[str, str]]:
        try:
            async for chunk in generation.stream_chunks():
                for event in self.convert_chunk(chunk):
                    yield _make_sse_event(event)
        except SwiftKVError as error:
            generation.field_map.rename_field(error)
            for event in self.convert_error(make_error_problem(error, f"/v1/{generation.field_map.route}")):
                yield _make_sse_event(event)


def _make_sse_event(event: dict[str, Any]) -> dict[str, str]:
    return {"event": event["type"], "data": json.dumps(event)}
