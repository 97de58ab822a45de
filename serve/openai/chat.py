"""The assistant's next turn, for all routes with conversations: answer or chunks in the format of OpenAI's chat
completions, and the conversion of other routes' formats to and from it. Knows no route."""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
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
from swiftkv_platform.serve.answers import Answers, RequestContext, whole
from swiftkv_platform.serve.chat import about_messages, chat_prompt, unread_variables
from swiftkv_platform.serve.openai.answers import (
    CallStreams,
    chat_choice,
    chat_delta,
    chunks_of,
    head_of,
    prompt_logprobs,
    usage,
    with_calls,
)
from swiftkv_platform.serve.openai.fields import Route, names_served
from swiftkv_platform.serve.openai.schemas import ChatRequest, OpenAIFields, StreamOptions
from swiftkv_platform.serve.tools.calling import ToolCalling, tool_calling
from swiftkv_platform.web.problems import Problem, make_error_problem

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.serve.current import Current, Version


@dataclass(frozen=True)
class Form:
    """Field names of a route in relation to those of the chat request that its body is converted to."""

    route: Route
    names: Mapping[str, str]
    """Replacements for the beginnings of field paths: regular expression for the chat's path -> the route's path."""

    def chat(self, asked: OpenAIFields, **fields: Any) -> ChatRequest:
        """Return a chat request with `fields`, and the fields of the body `asked` that have the same names in both.
        Raises `RequestValidationError`."""
        served = names_served(self.route)
        same = {name: getattr(asked, name) for name in asked.given(ChatRequest) if name in served}
        usage_in_each = StreamOptions(continuous_usage_stats=True) if asked.stream else None
        try:
            return ChatRequest.model_validate({**same, "stream_options": usage_in_each, **fields})
        except ValidationError as error:
            found = [(detail, ".".join(str(part) for part in detail["loc"])) for detail in error.errors()]
            errors = [{**detail, "loc": ("body", *self._own(path).split("."))} for detail, path in found]
            raise RequestValidationError(errors) from error

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Make errors raised within the context name the route's own fields."""
        try:
            yield
        except SwiftKVError as error:
            self.rename(error)
            raise

    def rename(self, error: SwiftKVError) -> None:
        if error.field is not None:
            field, error.field = error.field, self._own(error.field)
            error.message = error.message.replace(field, error.field)

    def _own(self, path: str) -> str:
        for chats, own in self.names.items():
            renamed, found = re.subn(rf"^{chats}(?=\.|$)", own, path)
            if found:
                return renamed
        return path


CHAT = Form("chat/completions", {})
"""Form of the chat route itself, without renaming."""


@dataclass(frozen=True)
class Turn:
    """The assistant's next turn, submitted to the engine."""

    body: ChatRequest
    version: Version
    answers: Answers
    calling: ToolCalling | None
    form: Form

    @classmethod
    async def begin(
        cls,
        current: Current,
        body: ChatRequest,
        request: Request,
        caller: Caller,
        *,
        asked: OpenAIFields | None = None,
        form: Form = CHAT,
    ) -> Self:
        """Submit a chat request. `asked`: the body of another route that `body` was made from. Raises as `read` and
        `Current.ask`."""
        with current.entering() as version:
            calling, prompt = await read(version, body, request, asked or body, form)
            context = context_of(caller, body, request)
            kept = body.truncate_prompt_tokens or -1
            num_prompt_tokens = len(prompt) if kept < 0 else min(len(prompt), kept)
            with form.naming(), about_messages():
                params = body.sampling_params(room=max(version.card.max_model_len - num_prompt_tokens, 1))
                params = calling.params(params) if calling else params
                answers = await current.ask(version, [prompt], params, context)
        return cls(body, version, answers, calling, form)

    async def whole(self, request: Request, shape: Callable[[dict[str, Any]], dict[str, Any]] = dict) -> Response:
        """Return the complete answer as a chat completion, converted by `shape` for other routes. Raises as
        `answers.whole`."""
        version, calling = self.version, self.calling
        with version.in_use(), self.form.naming():
            outputs = await whole(self.answers, request)
            vocabulary, top = version.engine.input_processor.vocabulary, self.body.top_logprobs

            def render() -> Response:
                choices = [chat_choice(i, output, vocabulary, top=top) for i, output in enumerate(outputs)]
                choices = [with_calls(choice, calling) for choice in choices] if calling else choices
                head = head_of("chatcmpl", "chat.completion", self.answers, version)
                scores = scores_of(self.body, outputs[0], version)
                return JSONResponse(shape({**head, "choices": choices, "usage": usage(outputs), **scores}))

            return await version.rendered(render, outputs, self.answers.context.caller.sender)

    def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Return the answer as chunks of a chat completion. Raises as `Answers.as_they_come`."""
        vocabulary, top = self.version.engine.input_processor.vocabulary, self.body.top_logprobs
        calls = CallStreams(self.calling) if self.calling else None

        async def chunk(choice: int, output: RequestOutput, since: RequestOutput | None) -> dict[str, Any]:
            render = partial(chat_delta, choice, output, vocabulary, top=top, since=since)
            delta = await self.version.rendered(render, [output], self.answers.context.caller.sender)
            return delta if calls is None else calls.delta(delta)

        head = head_of("chatcmpl", "chat.completion.chunk", self.answers, self.version)
        return chunks_of(self.answers, head, chunk, self.body.stream_options or StreamOptions())


async def read(
    version: Version, body: ChatRequest, request: Request, asked: OpenAIFields, form: Form
) -> tuple[ToolCalling | None, list[int]]:
    """Return the rules for a body's tool calls (or None), and its conversation as token ids. Stores the names of
    ignored fields in `request.state`. Raises `InvalidInputError`, `ModelNotFoundError`, `QueueFullError`."""
    check_model(body.model, version)
    unread = unread_variables(version.tokenizer, body.chat_template_kwargs)
    request.state.ignored_fields = asked.without_effect(form.route, version.ignored_fields, unread)
    with form.naming():
        calling = tool_calling(body, version.tokenizer, version.tool_call_parser, body.constraint())
        prompt = await chat_prompt(
            version.engine,
            [message.for_template() for message in body.messages],
            request.state.caller.sender,
            tools=calling.tools if calling else None,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
    return calling, prompt


def check_model(model: str, version: Version) -> None:
    """Raise `ModelNotFoundError` unless `model` names the served model."""
    if not version.answers_to(model):
        raise ModelNotFoundError.for_field("model", model, f"; {version.card.model!r} is served here")


def context_of(caller: Caller, body: OpenAIFields, request: Request) -> RequestContext:
    """Return the context of a request on whose state the names of ignored fields are stored."""
    return RequestContext(
        caller,
        priority=body.priority,
        timeout_s=body.timeout_s,
        interval_s=None if body.stream else math.inf,
        ignored_fields=request.state.ignored_fields,
    )


def scores_of(body: OpenAIFields, output: RequestOutput, version: Version) -> dict[str, Any]:
    """Return the field `prompt_logprobs` if it was requested, else nothing."""
    if body.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": prompt_logprobs(output, version.engine.input_processor.vocabulary, body.prompt_logprobs)}


@dataclass
class Block:
    """A text or one tool call of an answer, for routes that return lists of blocks."""

    index: int
    call: dict[str, Any] | None
    """The call's `id` and `name`; None for text."""
    text: str = ""
    """Text, or arguments of the call, so far."""


BlockEvent = tuple[Literal["begin", "more", "end"], Block, str]
"""(event, block, added text)."""


@dataclass
class Blocks:
    """Splits an answer into blocks; each ends before the next begins."""

    all: list[Block] = field(default_factory=list)
    _is_open: bool = False

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Self:
        """Return the blocks of a complete message."""
        blocks = cls()
        for _ in blocks.take(message):
            pass
        return blocks

    def take(self, message: Mapping[str, Any]) -> Iterator[BlockEvent]:
        """Yield the events of a complete message, or of the next delta of one."""
        calls: Iterable[Mapping[str, Any]] = message.get("tool_calls") or ()
        more = [call for call in calls if "id" not in call]  # continue the open call
        for call in more:
            yield from self._add(call["function"]["arguments"])
        if text := message.get("content"):
            if not (self._is_open and self.all[-1].call is None):
                yield from self._begin(None)
            yield from self._add(text)
        for call in calls:
            if "id" in call:
                yield from self._begin({"id": call["id"], "name": call["function"]["name"]})
                yield from self._add(call["function"]["arguments"])

    def end(self) -> Iterator[BlockEvent]:
        """Yield the end of the open block, if there is one."""
        if self._is_open:
            self._is_open = False
            yield "end", self.all[-1], ""

    def _begin(self, call: dict[str, Any] | None) -> Iterator[BlockEvent]:
        yield from self.end()
        self.all.append(Block(len(self.all), call))
        self._is_open = True
        yield "begin", self.all[-1], ""

    def _add(self, text: str) -> Iterator[BlockEvent]:
        if text:
            self.all[-1].text += text
            yield "more", self.all[-1], text


class TypedEvents(ABC):
    """Converts an answer to the typed events of another route."""

    def __init__(self) -> None:
        self.blocks = Blocks()

    @abstractmethod
    def taken(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the events of the next chunk of a chat completion; each chunk has the usage so far."""

    @abstractmethod
    def failed(self, problem: Problem) -> Iterator[dict[str, Any]]:
        """Yield the events for an answer that ends with an error."""

    async def stream(self, turn: Turn) -> AsyncIterator[dict[str, str]]:
        """Yield the events of a turn as server-sent events."""
        try:
            async for chunk in turn.chunks():
                for event in self.taken(chunk):
                    yield _sent(event)
        except SwiftKVError as error:
            turn.form.rename(error)
            for event in self.failed(make_error_problem(error, f"/v1/{turn.form.route}")):
                yield _sent(event)


def _sent(event: dict[str, Any]) -> dict[str, str]:
    return {"event": event["type"], "data": json.dumps(event)}
