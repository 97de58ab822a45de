"""OpenAI's routes: completions, chat completions, models. Knows no Ray."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from swiftkv_platform.serve.access import HAS_API_KEY, AdmittedCaller
from swiftkv_platform.serve.collector import collect_unless_disconnected
from swiftkv_platform.serve.openai.chat import (
    ChatGeneration,
    make_context,
    make_prompt_logprobs_field,
    require_served_model,
)
from swiftkv_platform.serve.openai.outputs import (
    CompletionFormatter,
    make_common_fields,
    make_event_stream,
    make_usage,
    stream_chunks,
    stream_events,
)
from swiftkv_platform.serve.openai.responses import add_responses_route
from swiftkv_platform.serve.openai.schemas import ChatRequest, CompletionRequest, StreamOptions
from swiftkv_platform.serve.schemas import list_prompts
from swiftkv_platform.web.bodies import BodyRoute

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.serve.replica_state import ModelVersion, ReplicaState


def make_openai_router(state: ReplicaState) -> APIRouter:
    router = APIRouter(prefix="/v1", tags=["openai"], route_class=BodyRoute)

    @router.get("/models", dependencies=[HAS_API_KEY])
    async def list_models(_caller: AdmittedCaller) -> dict[str, Any]:
        """List the served model and its adapters, with the fields of both OpenAI and Anthropic."""
        version = state.version
        models = [_describe_model(version, model) for model in version.served_models]
        return {
            "object": "list",
            "data": models,
            "first_id": models[0]["id"],
            "last_id": models[-1]["id"],
            "has_more": False,
        }

    @router.get("/models/{model:path}", dependencies=[HAS_API_KEY])
    async def get_model(model: str, _caller: AdmittedCaller) -> dict[str, Any]:
        """Describe the served model, or one of its adapters."""
        version = state.version
        adapter = None if version.adapters is None else version.adapters.find_model(model)
        if adapter is None:
            require_served_model(model, version)
        return _describe_model(version, adapter or version.model_info.model)

    @router.post("/completions")
    async def completions(body: CompletionRequest, request: Request, caller: AdmittedCaller) -> Response:
        """Complete one prompt or several."""
        async with state.acquire_version(body.model) as version:
            require_served_model(body.model, version)
            request.state.ignored_fields = body.find_ignored_fields("completions", version.ignored_fields)
            context = make_context(caller, body, request, version)
            with body.rename_errors():
                collector = await state.submit(version, list_prompts(body.prompt), body.make_sampling_params(), context)
        head = make_common_fields("cmpl", "text_completion", collector, version)
        echo, formatter = body.echo, CompletionFormatter(version.engine.input_processor, echo=body.echo)
        if body.stream:

            async def format_chunk(index: int, output: RequestOutput, previous: RequestOutput | None) -> dict[str, Any]:
                render = partial(formatter.format_choice, index, output, previous)
                return await version.render_response(render, [output], caller.sender, echo=echo and previous is None)

            options = body.stream_options or StreamOptions()
            return make_event_stream(stream_events(stream_chunks(collector, head, format_chunk, options)))
        with version.hold_open():
            outputs = await collect_unless_disconnected(collector, request)

            def render() -> Response:
                choices = [
                    {**formatter.format_choice(number, output), **make_prompt_logprobs_field(body, output, version)}
                    for number, output in enumerate(outputs)
                ]
                return JSONResponse({**head, "choices": choices, "usage": make_usage(outputs)})

            return await version.render_response(render, outputs, caller.sender, echo=echo)

    @router.post("/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request, caller: AdmittedCaller) -> Response:
        """Generate the assistant's next message."""
        generation = await ChatGeneration.submit(state, body, request, caller)
        if body.stream:
            return make_event_stream(stream_events(generation.stream_chunks()))
        return await generation.respond(request)

    add_responses_route(router, state)
    return router


def _describe_model(version: ModelVersion, model: str) -> dict[str, Any]:
    """Describe the served model, or an adapter, which has the same shape."""
    model_info = version.model_info
    return {
        "id": model,
        "object": "model",
        "created": version.created,
        "owned_by": "swiftkv",
        "type": "model",
        "display_name": model,
        "created_at": f"{datetime.fromtimestamp(version.created, UTC):%Y-%m-%dT%H:%M:%SZ}",
        "max_model_len": model_info.max_model_len,
        "swiftkv": model_info.swiftkv,
    }
