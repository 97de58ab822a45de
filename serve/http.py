"""HTTP application of a replica: `/generate`, tokenizer routes, OpenAI's and Anthropic's routes, `/health`, `/metrics`,
and errors of all routes as problem documents (RFC 9457; below `/v1` in OpenAI's or Anthropic's format). Knows no Ray.
"""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from hmac import compare_digest
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BeforeValidator, FailFast
from sse_starlette import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from swiftkv_platform.contract.autoscaling import REVISION_HEADER
from swiftkv_platform.errors import EngineDeadError, InvalidInputError, SwiftKVError
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.limits import REPLICA_BODIES_BYTES, REPLICA_BODY_STRINGS, UNDELAYED_REFUSALS
from swiftkv_platform.security.principals import Authenticator
from swiftkv_platform.serve.access import (
    AnswerHeaders,
    Caller,
    Door,
    Gate,
    HostGuard,
    MustSee,
    Origins,
    Sees,
    Spelling,
    TheCaller,
)
from swiftkv_platform.serve.answers import Answers, RequestContext, whole
from swiftkv_platform.serve.anthropic import anthropic_router
from swiftkv_platform.serve.chat import about_messages, chat_prompt
from swiftkv_platform.serve.current import Current, Version
from swiftkv_platform.serve.openai.answers import DONE
from swiftkv_platform.serve.openai.fields import ROUTES
from swiftkv_platform.serve.openai.routes import openai_router
from swiftkv_platform.serve.schemas import (
    GenerateRequest,
    GenerateResponse,
    Timings,
    Usage,
    encodable,
    prompts_of,
    to_choice,
)
from swiftkv_platform.web.bodies import BodyReader, BodyRoute, is_json
from swiftkv_platform.web.limiters import ConcurrencyLimits, Sender
from swiftkv_platform.web.middleware import BodyLimit, InputGuard, RefusalBackoff, SecurityHeaders
from swiftkv_platform.web.problems import (
    FieldProblem,
    join_messages,
    make_error_problem,
    make_json_problem,
    make_problem,
    respond_with_error,
    respond_with_problem,
    value_if_short,
)
from swiftkv_platform.web.swagger import LICENSE, OPEN, add_docs

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput


class TokenizeRequest(FrozenModel, strict=True):
    prompt: Annotated[str, BeforeValidator(encodable)]
    add_special_tokens: bool = True


class DetokenizeRequest(FrozenModel, strict=True):
    tokens: Annotated[list[int], FailFast()]


def create_http_app(
    current: Current,
    *,
    key_ring: Authenticator | None = None,
    tenant: str | None = None,
    max_body_bytes: int | None = None,
    allowed_hosts: Sequence[str] = (),
) -> FastAPI:
    """Create the application of one replica. With a key ring, all routes need a key (of `tenant`, if given) except the
    API's documentation and `/health`, which tells strangers only that the replica is alive. `max_body_bytes`,
    `allowed_hosts`: see `ReplicaArgs`."""
    app = FastAPI(
        title="SwiftKV serve",
        license_info=LICENSE,
        docs_url=None,
        redoc_url=None,
        responses={
            "4XX": {"description": "Problem details (RFC 9457); below `/v1` an error in OpenAI's or Anthropic's form"}
        },
    )
    add_docs(app)
    app.router.route_class = BodyRoute
    app.state.gate = Gate(key_ring, tenant)
    app.state.bodies = _bodies(current, max_body_bytes)
    app.add_middleware(InputGuard)
    # The middleware added last runs first: requests refused for their size have been authenticated and counted.
    app.add_middleware(BodyLimit, max_bytes=lambda _path: max_body_bytes or current.body_limits[0])
    app.add_middleware(Door)
    if key_ring is None:
        app.add_middleware(HostGuard, allowed=allowed_hosts)
    app.add_middleware(AnswerHeaders, replica=current.replica)
    app.add_middleware(Origins, allowed=current.origins)
    app.add_middleware(Spelling)
    app.add_middleware(RefusalBackoff, statuses=(413, 429), undelayed_per_minute=UNDELAYED_REFUSALS.default)
    app.add_middleware(SecurityHeaders)
    add_problem_handlers(app, [f"/v1/{route}" for route in ROUTES])
    app.include_router(openai_router(current))
    app.include_router(anthropic_router(current))

    @app.post("/generate", response_model=GenerateResponse)
    async def generate(body: GenerateRequest, request: Request, caller: TheCaller) -> Response:
        """Continue prompts or a conversation. If the client disconnects, the request is aborted within one step."""
        interval_s = body.stream_interval_s if body.stream else math.inf
        context = RequestContext(caller, body.request_id, body.priority, body.timeout_s, interval_s)
        with current.entering() as version, about_messages() if body.messages else nullcontext():
            answers = await current.ask(version, await _prompts(body, version, caller), body.sampling_params(), context)
        if body.stream:
            stream: Response = EventSourceResponse(_events(answers, version.card.model, request.url.path), sep="\n")
            return stream
        with version.in_use():
            outputs = await whole(answers, request)

            def render() -> Response:
                choices = [to_choice(choice, output) for choice, output in enumerate(outputs)]
                return JSONResponse(_response(answers, version.card.model, choices, outputs))

            return await version.rendered(render, outputs, caller.sender)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, caller: TheCaller) -> Response:
        """Convert text to token ids."""
        version, text = current.version, body.prompt
        tokenizer = _tokenizer(version)
        version.engine.input_processor.check_text(text)

        def encode() -> Response:
            encoded = tokenizer(text, add_special_tokens=body.add_special_tokens, return_attention_mask=False)
            tokens: list[int] = encoded["input_ids"]
            return JSONResponse({"count": len(tokens), "max_model_len": version.card.max_model_len, "tokens": tokens})

        return await version.engine.tokenizer_threads.run_unadmitted(encode, len(text), caller.sender)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, caller: TheCaller) -> Response:
        """Convert token ids to text."""
        version, tokens = current.version, body.tokens
        tokenizer, at_most = _tokenizer(version), version.engine.model.context_length
        if len(tokens) > at_most:
            raise InvalidInputError(
                f"tokens has {len(tokens)} ids; at most {at_most} are accepted, the model's context",
                field="tokens",
                value=len(tokens),
            )

        def decode() -> Response:
            outside = next((token for token in tokens if not 0 <= token < len(tokenizer)), None)
            if outside is not None:
                raise InvalidInputError(
                    f"tokens has the id {outside}; this tokenizer accepts 0..{len(tokenizer) - 1}",
                    field="tokens",
                    value=outside,
                )
            return JSONResponse({"prompt": tokenizer.decode(tokens, skip_special_tokens=False)})

        return await version.engine.tokenizer_threads.run_unadmitted(decode, len(tokens), caller.sender)

    @app.get("/health", openapi_extra=OPEN)
    async def health(sees: Sees, revision: Annotated[str, Header(alias=REVISION_HEADER)] = "") -> dict[str, object]:
        """Tell whether a model is served, and to callers of its tenant also which model and the state of a swap.

        The control plane has no key; it sends the wanted revision instead, which strangers do not know.
        """
        version, candidate = current.version, current.version.candidate
        wanted = current.swap.revision
        sees = sees or (wanted != "" and compare_digest(revision.encode(), wanted.encode()))
        try:
            version.check_health()
        except EngineDeadError as error:
            if sees:
                raise
            raise EngineDeadError("the engine is no longer running") from error
        if not sees:
            return {"status": "ok"}
        return {
            "status": "ok",
            **version.card.model_dump(),
            "candidate": candidate and {**candidate.card.model_dump(), "share": version.candidate_share},
            "replica": current.replica,
            "swap": current.swap.model_dump(),
        }

    @app.get("/metrics")
    async def metrics(_sees: MustSee) -> Response:
        """Return the Prometheus metrics of this replica, for callers of its tenant."""
        return Response(current.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return app


async def _prompts(body: GenerateRequest, version: Version, caller: Caller) -> list[str | list[int]]:
    if body.prompt is not None:
        return prompts_of(body.prompt)
    messages = [message.model_dump(exclude_none=True) for message in body.messages or ()]
    return [await chat_prompt(version.engine, messages, caller.sender)]


def _tokenizer(version: Version) -> Any:
    if version.tokenizer is None:
        raise InvalidInputError("this model's directory has no tokenizer", field="prompt", value=None)
    return version.tokenizer


async def _events(answers: Answers, model: str, path: str) -> AsyncIterator[dict[str, str]]:
    """Yield events with the additions of each output, then `[DONE]`; after a failure a problem document."""
    outputs: dict[int, RequestOutput] = {}
    try:
        async for choice, output in answers.as_they_come():
            fresh = to_choice(choice, output, outputs.get(choice))
            outputs[choice] = output
            ended = [other for other in outputs.values() if other.finished]
            complete = [outputs[i] for i in sorted(outputs)] if len(ended) == answers.num_choices else []
            yield {"data": json.dumps(_response(answers, model, [fresh], complete))}
    except SwiftKVError as error:
        yield {"event": "error", "data": json.dumps(make_error_problem(error, path).model_dump())}
        return
    yield {"data": DONE}


def _response(answers: Answers, model: str, choices: list[Any], complete: list[RequestOutput]) -> dict[str, Any]:
    """Build a response or event. `complete`: outputs of all choices, once all are finished, for usage and timings."""
    closing = {"usage": Usage.of(complete), "timings": Timings.of(complete)} if complete else {}
    response = GenerateResponse(id=answers.id, model=model, choices=choices, **closing)
    return response.model_dump(mode="json", exclude_unset=True)


def _bodies(current: Current, own_max_bytes: int | None) -> BodyReader:
    """Return the reader of request bodies, with limits set by the served models. Allows NUL, since prompts may hold any
    character and reach no database. A body counts until it is parsed; then the engine's queue limits apply."""
    most = max(REPLICA_BODIES_BYTES.default, own_max_bytes or 0)
    share = ConcurrencyLimits(per_key=most // 4, per_tenant=most // 2, total=most)

    async def admit(request: Request) -> Sender:  # `Door` has admitted the caller
        caller: Caller = request.state.caller
        return caller.sender

    return BodyReader(
        admit,
        share,
        max_values=lambda: current.body_limits[1],
        max_strings=REPLICA_BODY_STRINGS.default,
        allow_nul=True,
        hold_until_response=False,
    )


MAX_ERRORS = 16
"""Most invalid fields that an answer lists; the rest is only counted."""
MAX_KIND_LENGTH = 100
"""Most characters of a body's content type that an answer repeats."""

_CLIENT_CLOSED_REQUEST = 499


def add_problem_handlers(app: FastAPI, routes: Sequence[str]) -> None:
    """Make `app` answer every error with a document. `routes`: those below `/v1`, named in answers to unknown paths."""

    @app.exception_handler(SwiftKVError)
    async def known_error(request: Request, error: SwiftKVError) -> JSONResponse:
        return respond_with_error(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def invalid_body(request: Request, error: RequestValidationError) -> JSONResponse:
        if not is_json(request):
            kind = request.headers.get("content-type", "")
            detail = f"content-type is {kind[:MAX_KIND_LENGTH]!r}; the body must be JSON, of type application/json"
            named = [FieldProblem(field="content-type", value=kind[:MAX_KIND_LENGTH], message=detail)]
            return respond_with_problem(make_problem(request.url.path, 415, "unsupported_media_type", detail, named))
        found = error.errors()
        errors = [_field_problem(detail) for detail in found[:MAX_ERRORS]]
        detail = join_messages(errors)
        detail += f"; and {len(found) - MAX_ERRORS} more" if len(found) > MAX_ERRORS else ""
        return respond_with_problem(make_problem(request.url.path, 422, InvalidInputError.code, detail, errors))

    @app.exception_handler(ClientDisconnect)
    async def nobody_listens(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        # FastAPI's error for a body that is not text names no field.
        errors = [FieldProblem(field="body", message=str(error.detail))]
        named = errors if status is HTTPStatus.BAD_REQUEST else []
        said = _no_route(request, routes) if status is HTTPStatus.NOT_FOUND else str(error.detail)
        document = make_problem(request.url.path, status, status.name.lower(), said, named)
        return respond_with_problem(document, error.headers)


def _no_route(request: Request, routes: Sequence[str]) -> str:
    """Return the message for a path without a route."""
    path = value_if_short(request.url.path) or "of this name"
    return (
        f"there is no route {path}; the routes below /v1 are {', '.join(routes)}: embeddings, images, sounds, "
        "files and stored responses are not served"
    )


def _field_problem(detail: Any) -> FieldProblem:
    """Convert one of pydantic's errors; the field's path begins after `body`."""
    if detail["type"] == "json_invalid":
        return make_json_problem(detail)
    path = ".".join(str(part) for part in detail["loc"][1:])
    message = detail["msg"].removeprefix("Value error, ")
    return FieldProblem(field=path or "body", value=value_if_short(detail.get("input")), message=message)
