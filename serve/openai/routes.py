"""OpenAI's routes on the engine: completions, chat completions, models. Knows no Ray.

Errors have OpenAI's shape below `/v1` (see `http.py`).
"""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from swiftkv_platform.serve.access import HAS_API_KEY, TheCaller
from swiftkv_platform.serve.answers import whole
from swiftkv_platform.serve.openai.answers import CompletionChoices, chunks_of, event_stream, events_of, head_of, usage
from swiftkv_platform.serve.openai.chat import Turn, check_model, context_of, scores_of
from swiftkv_platform.serve.openai.responses import add_responses
from swiftkv_platform.serve.openai.schemas import ChatRequest, CompletionRequest, StreamOptions
from swiftkv_platform.serve.schemas import prompts_of
from swiftkv_platform.web.bodies import BodyRoute

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.serve.current import Current, Version


def openai_router(current: Current) -> APIRouter:
    """Return OpenAI's routes below `/v1`."""
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=BodyRoute)

    @router.get("/models", dependencies=[HAS_API_KEY])
    async def list_models(_caller: TheCaller) -> dict[str, Any]:
        """List the served model, with the fields of both OpenAI and Anthropic."""
        model = _model(current.version)
        return {"object": "list", "data": [model], "first_id": model["id"], "last_id": model["id"], "has_more": False}

    @router.get("/models/{model:path}", dependencies=[HAS_API_KEY])
    async def get_model(model: str, _caller: TheCaller) -> dict[str, Any]:
        """Describe the served model."""
        check_model(model, current.version)
        return _model(current.version)

    @router.post("/completions")
    async def completions(body: CompletionRequest, request: Request, caller: TheCaller) -> Response:
        """Continue one prompt or several."""
        with current.entering() as version:
            check_model(body.model, version)
            request.state.ignored_fields = body.without_effect("completions", version.ignored_fields)
            context = context_of(caller, body, request)
            answers = await current.ask(version, prompts_of(body.prompt), body.sampling_params(), context)
        head = head_of("cmpl", "text_completion", answers, version)
        echo, choices = body.echo, CompletionChoices(version.engine.input_processor, echo=body.echo)
        if body.stream:

            async def chunk(choice: int, output: RequestOutput, since: RequestOutput | None) -> dict[str, Any]:
                render = partial(choices.choice, choice, output, since)
                return await version.rendered(render, [output], caller.sender, echo=echo and since is None)

            options = body.stream_options or StreamOptions()
            return event_stream(events_of(chunks_of(answers, head, chunk, options)))
        with version.in_use():
            outputs = await whole(answers, request)

            def render() -> Response:
                answered = [
                    {**choices.choice(number, output), **scores_of(body, output, version)}
                    for number, output in enumerate(outputs)
                ]
                return JSONResponse({**head, "choices": answered, "usage": usage(outputs)})

            return await version.rendered(render, outputs, caller.sender, echo=echo)

    @router.post("/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request, caller: TheCaller) -> Response:
        """Generate the assistant's next turn."""
        turn = await Turn.begin(current, body, request, caller)
        return event_stream(events_of(turn.chunks())) if body.stream else await turn.whole(request)

    add_responses(router, current)
    return router


def _model(version: Version) -> dict[str, Any]:
    card = version.card
    return {
        "id": card.model,
        "object": "model",
        "created": version.created,
        "owned_by": "swiftkv",
        "type": "model",
        "display_name": card.model,
        "created_at": f"{datetime.fromtimestamp(version.created, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "max_model_len": card.max_model_len,
        "swiftkv": card.swiftkv,
    }
