"""OpenAI's routes on the engine: completions, chat completions, models. Knows no Ray.

Errors have OpenAI's shape below `/v1` (see `problems.py`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from sse_starlette import EventSourceResponse

from swiftkv_platform.errors import ModelNotFoundError, SwiftKVError
from swiftkv_platform.serve.access import Caller, TheCaller
from swiftkv_platform.serve.answers import Answers, RequestContext, whole
from swiftkv_platform.serve.chat import about_messages, chat_prompt, unread_variables
from swiftkv_platform.serve.openai.answers import (
    CallStreams,
    CompletionChoices,
    chat_choice,
    chat_delta,
    prompt_logprobs,
    usage,
    with_calls,
)
from swiftkv_platform.serve.openai.schemas import ChatRequest, CompletionRequest, OpenAIFields, StreamOptions
from swiftkv_platform.serve.schemas import prompts_of
from swiftkv_platform.serve.tools.calling import tool_calling
from swiftkv_platform.web.bodies import BodyRoute
from swiftkv_platform.web.problems import openai_error, problem_of

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.serve.current import Current, Version

DONE = "[DONE]"

Chunk = Callable[[int, "RequestOutput", "RequestOutput | None"], Awaitable[dict[str, Any]]]
"""(choice, output so far, the output before it) -> what is new."""


def openai_router(current: Current) -> APIRouter:
    """The routes below `/v1`."""
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=BodyRoute)

    @router.get("/models")
    async def list_models(_caller: TheCaller) -> dict[str, Any]:
        """List the served model."""
        return {"object": "list", "data": [_model(current.version)]}

    @router.get("/models/{model}")
    async def get_model(model: str, _caller: TheCaller) -> dict[str, Any]:
        """The served model."""
        _check_model(model, current.version)
        return _model(current.version)

    @router.post("/completions")
    async def completions(body: CompletionRequest, request: Request, caller: TheCaller) -> Response:
        """Continue one prompt or several."""
        with current.entering() as version:
            _check_model(body.model, version)
            context = _context(caller, body, request, body.without_effect("completions", version.ignored_fields))
            answers = await current.ask(version, prompts_of(body.prompt), body.sampling_params(), context)
        head = _head("cmpl", "text_completion", answers, version)
        echo, choices = body.echo, CompletionChoices(version.engine.reader, echo=body.echo)
        if body.stream:

            async def chunk(choice: int, output: RequestOutput, since: RequestOutput | None) -> dict[str, Any]:
                render = partial(choices.choice, choice, output, since)
                return await version.rendered(render, [output], echo=echo and since is None)

            return _stream(answers, head, chunk, body)
        with version.in_use():
            outputs = await whole(answers, request)

            def render() -> Response:
                answered = [
                    {**choices.choice(number, output), **_scores(body, output, version)}
                    for number, output in enumerate(outputs)
                ]
                return JSONResponse({**head, "choices": answered, "usage": usage(outputs)})

            return await version.rendered(render, outputs, echo=echo)

    @router.post("/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request, caller: TheCaller) -> Response:
        """The assistant's next turn."""
        messages = [message.for_template() for message in body.messages]
        with current.entering() as version:
            _check_model(body.model, version)
            unread = unread_variables(version.tokenizer, body.chat_template_kwargs)
            ignored = body.without_effect("chat/completions", version.ignored_fields, unread)
            context = _context(caller, body, request, ignored)
            calling = tool_calling(body, version.tokenizer, version.tool_call_parser, body.constraint())
            prompt = await chat_prompt(
                version.engine,
                messages,
                tools=calling.tools if calling else None,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                variables=body.chat_template_kwargs,
            )
            kept = body.truncate_prompt_tokens or -1
            num_prompt_tokens = len(prompt) if kept < 0 else min(len(prompt), kept)
            params = body.sampling_params(room=max(version.card.max_model_len - num_prompt_tokens, 1))
            params = calling.params(params) if calling else params
            with about_messages():
                answers = await current.ask(version, [prompt], params, context)
        vocabulary, top = version.engine.reader.vocabulary, body.top_logprobs
        if body.stream:
            calls = CallStreams(calling) if calling else None

            async def chunk(choice: int, output: RequestOutput, since: RequestOutput | None) -> dict[str, Any]:
                render = partial(chat_delta, choice, output, vocabulary, top=top, since=since)
                delta = await version.rendered(render, [output])
                return delta if calls is None else calls.delta(delta)

            return _stream(answers, _head("chatcmpl", "chat.completion.chunk", answers, version), chunk, body)
        with version.in_use():
            outputs = await whole(answers, request)
            head = _head("chatcmpl", "chat.completion", answers, version)

            def render() -> Response:
                choices = [chat_choice(i, output, vocabulary, top=top) for i, output in enumerate(outputs)]
                choices = [with_calls(choice, calling) for choice in choices] if calling else choices
                scores = _scores(body, outputs[0], version)
                return JSONResponse({**head, "choices": choices, "usage": usage(outputs), **scores})

            return await version.rendered(render, outputs)

    return router


def _context(caller: Caller, body: OpenAIFields, request: Request, ignored_fields: tuple[str, ...]) -> RequestContext:
    request.state.ignored_fields = ignored_fields
    interval_s = None if body.stream else math.inf
    return RequestContext(
        caller, priority=body.priority, timeout_s=body.timeout_s, interval_s=interval_s, ignored_fields=ignored_fields
    )


def _scores(body: OpenAIFields, output: RequestOutput, version: Version) -> dict[str, Any]:
    """The prompt's log-probabilities, where they were asked for by that name."""
    if body.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": prompt_logprobs(output, version.engine.reader.vocabulary, body.prompt_logprobs)}


def _model(version: Version) -> dict[str, Any]:
    card = version.card
    return {
        "id": card.model,
        "object": "model",
        "created": version.created,
        "owned_by": "swiftkv",
        "max_model_len": card.max_model_len,
        "swiftkv": card.swiftkv,
    }


def _check_model(model: str, version: Version) -> None:
    if not version.answers_to(model):
        raise ModelNotFoundError(
            f"model is {model!r}; {version.card.model!r} is served here", field="model", value=model
        )


def _head(prefix: str, kind: str, answers: Answers, version: Version) -> dict[str, Any]:
    request_id = f"{prefix}-{answers.id.removeprefix('gen_')}"
    return {"id": request_id, "object": kind, "created": int(time.time()), "model": version.card.model}


def _stream(answers: Answers, head: dict[str, Any], chunk: Chunk, body: OpenAIFields) -> Response:
    stream: Response = EventSourceResponse(
        _events(answers, head, chunk, body.stream_options or StreamOptions()), sep="\n"
    )
    return stream


async def _events(
    answers: Answers, head: dict[str, Any], chunk: Chunk, options: StreamOptions
) -> AsyncIterator[dict[str, str]]:
    """Events with what each output adds, the usage if it is wanted, `[DONE]`; an error document if it fails."""
    outputs: dict[int, RequestOutput] = {}

    def usage_so_far() -> dict[str, Any]:
        return usage([outputs[choice] for choice in sorted(outputs)])

    try:
        async for choice, output in answers.as_they_come():
            fresh = await chunk(choice, output, outputs.get(choice))
            outputs[choice] = output
            event = {**head, "choices": [fresh]}
            if options.continuous_usage_stats:
                event["usage"] = usage_so_far()
            elif options.include_usage:
                event["usage"] = None
            yield {"data": json.dumps(event)}
    except SwiftKVError as error:
        yield {"data": json.dumps(openai_error(problem_of(error, "/v1/")))}
        return
    if options.include_usage:
        yield {"data": json.dumps({**head, "choices": [], "usage": usage_so_far()})}
    yield {"data": DONE}
