"""HTTP application of a replica: `/generate`, tokenizer routes, OpenAI's and Anthropic's routes, `/health`, `/metrics`,
and handlers of errors. Knows no Ray."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from hmac import compare_digest
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Self

from fastapi import FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BeforeValidator, FailFast, Field, model_validator
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from swiftkv_platform.contract.autoscaling import REVISION_HEADER
from swiftkv_platform.errors import EngineDeadError, InvalidInputError, SwiftKVError
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.limits import REPLICA_BODIES_BYTES, REPLICA_BODY_STRINGS, UNDELAYED_REFUSALS
from swiftkv_platform.security.principals import Authenticator
from swiftkv_platform.serve.access import (
    AdmittedCaller,
    AllowedHostsMiddleware,
    AuthMiddleware,
    Caller,
    DeploymentCORS,
    HasTenantAccess,
    PathNormalizerMiddleware,
    RequestAuthenticator,
    ResponseHeadersMiddleware,
    TenantAccessRequired,
)
from swiftkv_platform.serve.anthropic import make_anthropic_router
from swiftkv_platform.serve.chat import rename_prompt_errors, tokenize_chat
from swiftkv_platform.serve.collector import OutputCollector, RequestContext, collect_unless_disconnected
from swiftkv_platform.serve.openai.chat import CHAT, ChatConversation, prepare_prompt, require_served_model
from swiftkv_platform.serve.openai.fields import ROUTES
from swiftkv_platform.serve.openai.outputs import DONE, make_event_stream
from swiftkv_platform.serve.openai.routes import make_openai_router
from swiftkv_platform.serve.openai.schemas import ChatMessage
from swiftkv_platform.serve.replica_state import ModelVersion, ReplicaState
from swiftkv_platform.serve.schemas import (
    GenerateRequest,
    GenerateResponse,
    Timings,
    Usage,
    list_prompts,
    make_choice,
    remove_nulls,
    validate_encodable,
)
from swiftkv_platform.serve.tools.calling import MAX_TOOLS, Tool
from swiftkv_platform.specs.base import MAX_MESSAGES
from swiftkv_platform.web.bodies import BodyReader, BodyRoute, is_json
from swiftkv_platform.web.invalid_fields import describe_validation_error, get_body_annotation
from swiftkv_platform.web.limiters import ConcurrencyLimits, Sender
from swiftkv_platform.web.middleware import BodyLimit, InputGuard, RefusalBackoff, SecurityHeaders
from swiftkv_platform.web.problems import (
    FieldProblem,
    drop_long_value,
    join_messages,
    make_error_problem,
    make_json_problem,
    make_problem,
    respond_with_error,
    respond_with_problem,
)
from swiftkv_platform.web.swagger import LICENSE, OPEN, add_docs

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput


class TokenizerFields(FrozenBaseModel, strict=True):
    """Fields of both tokenizer routes, as in vLLM. `null` is the default."""

    model: str | None = None
    """A name of the served model."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        return remove_nulls(body)


class TokenizeRequest(TokenizerFields):
    """Body of `POST /tokenize`: a `prompt`, or the fields of a conversation as of `/v1/chat/completions`."""

    prompt: Annotated[str, BeforeValidator(validate_encodable)] | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens. Default: true for a prompt, false for messages."""
    return_token_strs: bool = False
    """Return the tokens as strings too."""

    @model_validator(mode="after")
    def _check_prompt_or_messages(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        others = sorted({*_CHAT_FIELDS[1:]} & self.model_fields_set)
        if self.messages is None and others:
            raise ValueError(f"{others[0]} needs messages")
        return self


_CHAT_FIELDS = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")
"""Fields that `/tokenize` has in common with a chat request."""


class DetokenizeRequest(TokenizerFields):
    tokens: Annotated[list[int], FailFast()]


def create_http_app(
    state: ReplicaState,
    *,
    key_ring: Authenticator | None = None,
    tenant: str | None = None,
    max_body_bytes: int | None = None,
    allowed_hosts: Sequence[str] = (),
) -> FastAPI:
    """Create the application of one replica.

    With a key ring, all routes require a key (of `tenant`, if given) except the API's documentation and `/health`,
    whose response without a key is the status only. `max_body_bytes`, `allowed_hosts`: see `ReplicaArgs`.
    """

    @asynccontextmanager
    async def record_until_end(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(state.recorder.close)

    app = FastAPI(
        title="SwiftKV serve",
        lifespan=record_until_end,
        license_info=LICENSE,
        docs_url=None,
        redoc_url=None,
        responses={
            "4XX": {"description": "Problem details (RFC 9457); below `/v1` an error in OpenAI's or Anthropic's format"}
        },
    )
    add_docs(app)
    app.router.route_class = BodyRoute
    app.state.request_authenticator = RequestAuthenticator(key_ring, tenant)
    app.state.bodies = _make_body_reader(state, max_body_bytes)
    app.add_middleware(InputGuard)
    # The middleware added last runs first: requests are authenticated and counted before their size is checked.
    app.add_middleware(BodyLimit, max_bytes=lambda _path: max_body_bytes or state.body_limits[0])
    app.add_middleware(AuthMiddleware)
    if key_ring is None:
        app.add_middleware(AllowedHostsMiddleware, allowed=allowed_hosts)
    app.add_middleware(ResponseHeadersMiddleware, replica=state.replica)
    app.add_middleware(DeploymentCORS, get_allowed=state.get_cors_origins)
    app.add_middleware(PathNormalizerMiddleware)
    app.add_middleware(RefusalBackoff, statuses=(413, 429), undelayed_per_minute=UNDELAYED_REFUSALS.default)
    app.add_middleware(SecurityHeaders)
    add_problem_handlers(app, [f"/v1/{route}" for route in ROUTES])
    app.include_router(make_openai_router(state))
    app.include_router(make_anthropic_router(state))

    @app.post("/generate", response_model=GenerateResponse)
    async def generate(body: GenerateRequest, request: Request, caller: AdmittedCaller) -> Response:
        """Complete prompts or a conversation. If the client disconnects, the request is aborted within one step."""
        interval_s = body.stream_interval_s if body.stream else math.inf
        conversation = None if body.messages is None else ChatConversation(body.messages)
        async with state.acquire_version(body.model) as version:
            _check_model(body, version)
            plan = version.plan_capture(
                "/generate", allows_capture=body.store, user=body.user, conversation=conversation
            )
            context = RequestContext(caller, body.request_id, body.priority, body.timeout_s, interval_s, capture=plan)
            with rename_prompt_errors() if body.messages else nullcontext():
                prompts = await _read_prompts(body, version, caller)
                collector = await state.submit(version, prompts, body.make_sampling_params(), context)
        if body.stream:
            return make_event_stream(_stream_events(collector, version.model_info.model, request.url.path))
        with version.hold_open():
            outputs = await collect_unless_disconnected(collector, request)

            def render() -> Response:
                choices = [make_choice(choice, output) for choice, output in enumerate(outputs)]
                return JSONResponse(_make_response(collector, version.model_info.model, choices, outputs))

            return await version.render_response(render, outputs, caller.sender)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request, caller: AdmittedCaller) -> Response:
        """Convert text or a conversation to token ids, as vLLM's route."""
        version, text = await state.find_version(body.model), body.prompt or ""
        _check_model(body, version)
        prompt = None if body.messages is None else await _tokenize_messages(body, version, request)
        tokenizer = _require_tokenizer(version)
        version.engine.input_processor.check_text(text)

        def encode() -> Response:
            tokens: list[int] | None = prompt
            if tokens is None:
                add_special_tokens = body.add_special_tokens is not False
                encoded = tokenizer(text, add_special_tokens=add_special_tokens, return_attention_mask=False)
                tokens = list(encoded["input_ids"])
            strings = tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
            counts = {"count": len(tokens), "max_model_len": version.model_info.max_model_len}
            return JSONResponse({**counts, "tokens": tokens, "token_strs": strings})

        size = len(text) if prompt is None else len(prompt)
        return await version.engine.tokenizer_threads.run_unadmitted(encode, size, caller.sender)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, caller: AdmittedCaller) -> Response:
        """Convert token ids to text."""
        version, tokens = await state.find_version(body.model), body.tokens
        _check_model(body, version)
        tokenizer, max_tokens = _require_tokenizer(version), version.engine.model.context_length
        if len(tokens) > max_tokens:
            raise InvalidInputError(
                f"tokens has {len(tokens)} ids; at most {max_tokens} are accepted, the model's context",
                field="tokens",
                value=len(tokens),
            )

        def decode() -> Response:
            unknown = next((token for token in tokens if not 0 <= token < len(tokenizer)), None)
            if unknown is not None:
                raise InvalidInputError(
                    f"tokens has the id {unknown}; this tokenizer accepts 0..{len(tokenizer) - 1}",
                    field="tokens",
                    value=unknown,
                )
            return JSONResponse({"prompt": tokenizer.decode(tokens, skip_special_tokens=False)})

        return await version.engine.tokenizer_threads.run_unadmitted(decode, len(tokens), caller.sender)

    @app.get("/health", openapi_extra=OPEN)
    async def health(
        has_access: HasTenantAccess, revision: Annotated[str, Header(alias=REVISION_HEADER)] = ""
    ) -> dict[str, object]:
        """Return the status, and for callers of the tenant the served model and the state of a swap.

        The control plane has no key. It sends the requested revision instead, which others do not know.
        """
        version, candidate = state.version, state.version.candidate
        requested = state.swap.revision
        has_access |= requested != "" and compare_digest(revision.encode(), requested.encode())
        try:
            version.check_health()
        except EngineDeadError as error:
            if has_access:
                raise
            raise EngineDeadError("the engine is no longer running") from error
        if not has_access:
            return {"status": "ok"}
        return {
            "status": "ok",
            **version.model_info.model_dump(),
            "candidate": candidate and {**candidate.model_info.model_dump(), "share": version.candidate_share},
            "adapters": version.adapters and version.adapters.describe(),
            "replica": state.replica,
            "swap": state.swap.model_dump(),
        }

    @app.get("/metrics")
    async def metrics(_access: TenantAccessRequired) -> Response:
        """Return the Prometheus metrics of this replica, for callers of its tenant."""
        return Response(state.metrics.render_page(), media_type=CONTENT_TYPE_LATEST)

    return app


async def _read_prompts(body: GenerateRequest, version: ModelVersion, caller: Caller) -> list[str | list[int]]:
    if body.prompt is not None:
        return list_prompts(body.prompt)
    messages = [message.to_openai_format() for message in body.messages or ()]
    return [await tokenize_chat(version.engine, messages, caller.sender)]


async def _tokenize_messages(body: TokenizeRequest, version: ModelVersion, request: Request) -> list[int]:
    fields = {name: getattr(body, name) for name in _CHAT_FIELDS}
    chat = CHAT.make_chat_request(None, model=body.model or version.model_info.model, **fields)
    with rename_prompt_errors():
        _, tokens = await prepare_prompt(
            version, chat, request, chat, CHAT, add_special_tokens=body.add_special_tokens is True
        )
    return tokens


def _check_model(body: TokenizerFields | GenerateRequest, version: ModelVersion) -> None:
    if body.model is not None:
        require_served_model(body.model, version)


def _require_tokenizer(version: ModelVersion) -> Any:
    if version.tokenizer is None:
        raise InvalidInputError("this model's directory has no tokenizer", field="prompt", value=None)
    return version.tokenizer


async def _stream_events(collector: OutputCollector, model: str, path: str) -> AsyncIterator[dict[str, str]]:
    """Yield an event for each new output, then `[DONE]`, or the problem document of an error."""
    outputs: dict[int, RequestOutput] = {}
    try:
        async for choice, output in collector.stream_outputs():
            added = make_choice(choice, output, outputs.get(choice))
            outputs[choice] = output
            num_finished = sum(other.finished for other in outputs.values())
            complete = [outputs[i] for i in sorted(outputs)] if num_finished == collector.num_choices else []
            yield {"data": json.dumps(_make_response(collector, model, [added], complete))}
    except SwiftKVError as error:
        yield {"event": "error", "data": json.dumps(make_error_problem(error, path).model_dump())}
        return
    yield {"data": DONE}


def _make_response(
    collector: OutputCollector, model: str, choices: list[Any], complete: list[RequestOutput]
) -> dict[str, Any]:
    """Return a response or event. `complete`: outputs of all choices if all are finished, for usage and timings."""
    totals = {"usage": Usage.from_outputs(complete), "timings": Timings.from_outputs(complete)} if complete else {}
    response = GenerateResponse(id=collector.id, model=model, choices=choices, **totals)
    return response.model_dump(mode="json", exclude_unset=True)


def _make_body_reader(state: ReplicaState, own_max_bytes: int | None) -> BodyReader:
    """Return the reader of request bodies, with limits by the served models. It allows NUL, since prompts may have any
    character and no database stores them. A body counts until it is parsed; then the engine's queue limits apply."""
    total = max(REPLICA_BODIES_BYTES.default, own_max_bytes or 0)
    limits = ConcurrencyLimits(per_key=total // 4, per_tenant=total // 2, total=total)

    async def get_sender(request: Request) -> Sender:  # `AuthMiddleware` has admitted the caller
        caller: Caller = request.state.caller
        return caller.sender

    return BodyReader(
        get_sender,
        limits,
        max_values=lambda: state.body_limits[1],
        max_strings=REPLICA_BODY_STRINGS.default,
        allow_nul=True,
        hold_until_response=False,
    )


MAX_ERRORS = 16
"""Max invalid fields that a response lists; further fields are counted."""
MAX_CONTENT_TYPE_LENGTH = 100
"""Max characters of a content type that a response repeats."""

_CLIENT_CLOSED_REQUEST = 499


def add_problem_handlers(app: FastAPI, routes: Sequence[str]) -> None:
    """Make `app` respond to every error with a document. `routes`: those below `/v1`, for responses to unknown
    paths."""

    @app.exception_handler(SwiftKVError)
    async def handle_error(request: Request, error: SwiftKVError) -> JSONResponse:
        return respond_with_error(error, request.url.path)

    @app.exception_handler(RequestValidationError)
    async def handle_invalid_body(request: Request, error: RequestValidationError) -> JSONResponse:
        if not is_json(request):
            content_type = request.headers.get("content-type", "")[:MAX_CONTENT_TYPE_LENGTH]
            detail = f"content-type is {content_type!r}; the body must be JSON, of type application/json"
            problems = [FieldProblem(field="content-type", value=content_type, message=detail)]
            return respond_with_problem(make_problem(request.url.path, 415, "unsupported_media_type", detail, problems))
        errors, body = error.errors(), get_body_annotation(request.scope)
        problems = [_make_field_problem(each, body) for each in errors[:MAX_ERRORS]]
        detail = join_messages(problems)
        detail += f"; and {len(errors) - MAX_ERRORS} more" if len(errors) > MAX_ERRORS else ""
        return respond_with_problem(make_problem(request.url.path, 422, InvalidInputError.code, detail, problems))

    @app.exception_handler(ClientDisconnect)
    async def handle_disconnect(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)

    @app.exception_handler(HTTPException)
    async def handle_http_error(request: Request, error: HTTPException) -> JSONResponse:
        status = HTTPStatus(error.status_code)
        # FastAPI's error for a body that is not text names no field.
        problems = [FieldProblem(field="body", message=str(error.detail))] if status is HTTPStatus.BAD_REQUEST else []
        detail = _describe_missing_route(request, routes) if status is HTTPStatus.NOT_FOUND else str(error.detail)
        document = make_problem(request.url.path, status, status.name.lower(), detail, problems)
        return respond_with_problem(document, error.headers)


def _describe_missing_route(request: Request, routes: Sequence[str]) -> str:
    path = drop_long_value(request.url.path) or "of this name"
    return (
        f"there is no route {path}; the routes below /v1 are {', '.join(routes)}: embeddings, images, sounds, "
        "files and stored responses are not served"
    )


def _make_field_problem(error: Any, body: Any) -> FieldProblem:
    """Convert an error of pydantic; the field's path begins after `body`. `body`: type of the endpoint's body."""
    if error["type"] == "json_invalid":
        return make_json_problem(error)
    path = ".".join(str(part) for part in error["loc"][1:])
    message = describe_validation_error(error, body)
    return FieldProblem(field=path or "body", value=drop_long_value(error.get("input")), message=message)
