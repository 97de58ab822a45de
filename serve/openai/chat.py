"""The next turn of a conversation, whichever route asks for it: its answer, or its chunks, in the shape of OpenAI's
chat completions, and how other routes come to that shape and from it. Knows no route."""

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
    prompt_logprobs,
    usage,
    with_calls,
)
from swiftkv_platform.serve.openai.fields import Route, names_served
from swiftkv_platform.serve.openai.schemas import ChatRequest, OpenAIFields, StreamOptions
from swiftkv_platform.serve.openai.streams import chunks_of, head_of
from swiftkv_platform.serve.tools.calling import ToolCalling, tool_calling
from swiftkv_platform.web.problems import Problem, problem_of

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.serve.current import Current, Version


@dataclass(frozen=True)
class Form:
    """Names of another route beside those of the chat completion that its body becomes."""

    route: Route
    names: Mapping[str, str]
    """Regular expressions for the beginnings of chat's paths of fields, and what the route has in their place."""

    def chat(self, asked: OpenAIFields, **fields: Any) -> ChatRequest:
        """A chat request with `fields`, and those of the body that have the same names. Raises
        `RequestValidationError`."""
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
        """Have errors name the route's own fields."""
        try:
            yield
        except SwiftKVError as error:
            self.rename(error)
            raise

    def rename(self, error: SwiftKVError) -> None:
        """Have an error name the route's own field."""
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
"""The form that is asked for by its own names."""


@dataclass(frozen=True)
class Turn:
    """The assistant's next turn, which the engine has taken on."""

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
        """Raises as `Current.ask`, and for a body that the model cannot answer. `asked`: the body of another route
        that `body` was made of."""
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
        """The answer as a chat completion, which `shape` turns into that of another route. Raises as
        `answers.whole`."""
        version, calling = self.version, self.calling
        with version.in_use(), self.form.naming():
            outputs = await whole(self.answers, request)
            vocabulary, top = version.engine.reader.vocabulary, self.body.top_logprobs

            def render() -> Response:
                choices = [chat_choice(i, output, vocabulary, top=top) for i, output in enumerate(outputs)]
                choices = [with_calls(choice, calling) for choice in choices] if calling else choices
                head = head_of("chatcmpl", "chat.completion", self.answers, version)
                scores = scores_of(self.body, outputs[0], version)
                return JSONResponse(shape({**head, "choices": choices, "usage": usage(outputs), **scores}))

            return await version.rendered(render, outputs)

    def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """The answer as chunks of a chat completion. Raises as `Answers.as_they_come`."""
        vocabulary, top = self.version.engine.reader.vocabulary, self.body.top_logprobs
        calls = CallStreams(self.calling) if self.calling else None

        async def chunk(choice: int, output: RequestOutput, since: RequestOutput | None) -> dict[str, Any]:
            render = partial(chat_delta, choice, output, vocabulary, top=top, since=since)
            delta = await self.version.rendered(render, [output])
            return delta if calls is None else calls.delta(delta)

        head = head_of("chatcmpl", "chat.completion.chunk", self.answers, self.version)
        return chunks_of(self.answers, head, chunk, self.body.stream_options or StreamOptions())


async def read(
    version: Version, body: ChatRequest, request: Request, asked: OpenAIFields, form: Form
) -> tuple[ToolCalling | None, list[int]]:
    """Rules of a body's calls, and its conversation as token ids; the request keeps the names of the fields without
    effect. Raises `InvalidInputError`, `ModelNotFoundError` and `QueueFullError`."""
    check_model(body.model, version)
    unread = unread_variables(version.tokenizer, body.chat_template_kwargs)
    request.state.ignored_fields = asked.without_effect(form.route, version.ignored_fields, unread)
    with form.naming():
        calling = tool_calling(body, version.tokenizer, version.tool_call_parser, body.constraint())
        prompt = await chat_prompt(
            version.engine,
            [message.for_template() for message in body.messages],
            tools=calling.tools if calling else None,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
    return calling, prompt


def check_model(model: str, version: Version) -> None:
    """Raises `ModelNotFoundError` for another model than the one that is served."""
    if not version.answers_to(model):
        raise ModelNotFoundError(
            f"model is {model!r}; {version.card.model!r} is served here", field="model", value=model
        )


def context_of(caller: Caller, body: OpenAIFields, request: Request) -> RequestContext:
    """The context of a request that keeps the names of its fields without effect."""
    return RequestContext(
        caller,
        priority=body.priority,
        timeout_s=body.timeout_s,
        interval_s=None if body.stream else math.inf,
        ignored_fields=request.state.ignored_fields,
    )


def scores_of(body: OpenAIFields, output: RequestOutput, version: Version) -> dict[str, Any]:
    """The prompt's log-probabilities, where they were asked for by that name."""
    if body.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": prompt_logprobs(output, version.engine.reader.vocabulary, body.prompt_logprobs)}


@dataclass
class Block:
    """Text, or one call, of an answer that is told as a list of them."""

    index: int
    call: dict[str, Any] | None
    """The call's `id` and `name`; None of text."""
    text: str = ""
    """The text, or the call's arguments, so far."""


BlockEvent = tuple[Literal["begin", "more", "end"], Block, str]
"""(event, block, what it adds)."""


@dataclass
class Blocks:
    """An answer's blocks, each of which ends before the next one begins."""

    all: list[Block] = field(default_factory=list)
    _is_open: bool = False

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> Self:
        """The blocks of a whole message."""
        blocks = cls()
        for _ in blocks.take(message):
            pass
        return blocks

    def take(self, message: Mapping[str, Any]) -> Iterator[BlockEvent]:
        """The events of a whole message, or of the next delta of one."""
        calls: Iterable[Mapping[str, Any]] = message.get("tool_calls") or ()
        more = [call for call in calls if "id" not in call]  # of the call that is open
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
        """The end of the block that is open, if there is one."""
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
    """An answer as the typed events of another route."""

    def __init__(self) -> None:
        self.blocks = Blocks()

    @abstractmethod
    def taken(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Events of the next chunk of a chat completion; each chunk has the usage so far."""

    @abstractmethod
    def failed(self, problem: Problem) -> Iterator[dict[str, Any]]:
        """Events of an answer that ends in an error."""

    async def stream(self, turn: Turn) -> AsyncIterator[dict[str, str]]:
        """The events of a turn, as they are sent."""
        try:
            async for chunk in turn.chunks():
                for event in self.taken(chunk):
                    yield _sent(event)
        except SwiftKVError as error:
            turn.form.rename(error)
            for event in self.failed(problem_of(error, f"/v1/{turn.form.route}")):
                yield _sent(event)


def _sent(event: dict[str, Any]) -> dict[str, str]:
    return {"event": event["type"], "data": json.dumps(event)}
