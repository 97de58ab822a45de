"""The HTTP face of a replica: `/generate` and `/health` on any `AsyncLLMEngine`. Knows no Ray."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from sse_starlette import EventSourceResponse

from serve.problems import add_problem_handlers, problem
from serve.schemas import GenerateRequest, GenerateResponse, to_response
from swiftkv_platform.errors import EngineDeadError

if TYPE_CHECKING:
    from swiftkv_platform.engine import AsyncLLMEngine, RequestOutput

DONE = "[DONE]"
"""Data of the event that ends a stream."""


class ModelCard(BaseModel):
    """What is served."""

    model_config = ConfigDict(frozen=True)

    deployment: str
    """`dep_` id."""
    model: str
    manifest_digest: str | None
    """SHA-256 of the artifact's manifest; null for a model served unverified."""
    swiftkv: dict[str, int] | None
    """num_hidden_layers, num_key_value_layers and key_value_group_size; null for a dense model."""
    max_model_len: int
    """Tokens of prompt and answer together."""


def create_http_app(engine: AsyncLLMEngine, card: ModelCard) -> FastAPI:
    """The application of one replica."""
    app = FastAPI(title="SwiftKV serve", docs_url="/docs", redoc_url=None)
    add_problem_handlers(app)

    @app.post("/generate", response_model=GenerateResponse)
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Continue a prompt. A client that goes away frees the engine within one step."""
        outputs = engine.generate(body.prompt, body.sampling_params())
        # A refusal must be a status code, so the first output is awaited before any header is sent.
        output = await anext(outputs)
        if body.stream:
            events = _events(output, outputs, card.model, request.url.path)
            stream: Response = EventSourceResponse(events, sep="\n")
            return stream
        async with aclosing(outputs):
            async for output in outputs:  # noqa: B007
                pass
        return JSONResponse(to_response(output, card.model).model_dump(exclude_unset=True))

    @app.get("/health")
    async def health() -> dict[str, object]:
        """What is served, while it is."""
        engine.check_health()
        return {"status": "ok", **card.model_dump()}

    return app


async def _events(
    first: RequestOutput, rest: AsyncGenerator[RequestOutput, None], model: str, path: str
) -> AsyncIterator[dict[str, str]]:
    """One event for each output with what it adds to the one before, then `[DONE]`; a problem document if it fails."""
    try:
        async with aclosing(rest):
            yield _event(first, None, model)
            previous = first
            async for output in rest:
                yield _event(output, previous, model)
                previous = output
    except EngineDeadError as error:
        yield {"event": "error", "data": json.dumps(problem(error, path))}
        return
    yield {"data": DONE}


def _event(output: RequestOutput, since: RequestOutput | None, model: str) -> dict[str, str]:
    return {"data": to_response(output, model, since=since).model_dump_json(exclude_unset=True)}
