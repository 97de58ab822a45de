"""The control plane as an ASGI application: its routes and middleware."""

from __future__ import annotations

import time
from functools import partial

from fastapi import FastAPI
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from swiftkv_platform.control_plane import health
from swiftkv_platform.control_plane.access import routes as access
from swiftkv_platform.control_plane.access.audit import AuditMiddleware
from swiftkv_platform.control_plane.access.callers import SIGN_IN_PATH, admit_request
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.control_plane.deployments import routes as deployments
from swiftkv_platform.control_plane.files import routes as files
from swiftkv_platform.control_plane.health import ControlPlaneHistograms
from swiftkv_platform.control_plane.jobs import fine_tuning
from swiftkv_platform.control_plane.jobs import routes as jobs
from swiftkv_platform.control_plane.models import routes as models
from swiftkv_platform.control_plane.responses import install_error_handlers
from swiftkv_platform.control_plane.wiring import run_control_plane
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.limits import BODY_KEYS
from swiftkv_platform.security.keys import open_credentials
from swiftkv_platform.settings import Settings, is_loopback
from swiftkv_platform.web.bodies import BodyReader
from swiftkv_platform.web.limiters import ConcurrencyLimits
from swiftkv_platform.web.middleware import (
    BodyLimit,
    InputGuard,
    OriginGuard,
    PageFiles,
    RefusalBackoff,
    RequestTimer,
    SecurityHeaders,
    SessionOriginGuard,
)
from swiftkv_platform.web.problems import Problem
from swiftkv_platform.web.swagger import LICENSE, add_docs

_MAX_SIGN_IN_BYTES = 1 << 16


def create_app(settings: Settings, *, components: Components | None = None) -> FastAPI:
    """Build the control plane's application; nothing is opened before it starts. `components`: parts to use instead of
    those that `settings` describes. Raises `InvalidInputError`: `settings.host` is not a loopback address and there are
    neither API keys nor issuers of tokens, or their file cannot be used."""
    clock = time.time if components is None else components.clock
    credentials = open_credentials(settings.api_keys_file, settings.oidc_file, clock=clock)
    if credentials is None:
        _check_host(settings.host)
    histograms = ControlPlaneHistograms()
    app = FastAPI(
        title="SwiftKV platform",
        description="Distill and serve SwiftKV models.",
        lifespan=partial(
            run_control_plane, settings=settings, credentials=credentials, histograms=histograms, components=components
        ),
        docs_url=None,
        redoc_url=None,
        license_info=LICENSE,
        # Any request may get these: its query, path and headers are checked before its route runs.
        responses={
            status: {"model": Problem, "description": "Problem details (RFC 9457)"} for status in ("4XX", "default")
        },
    )
    install_error_handlers(app)
    at_once = max(settings.max_body_bytes_at_once, settings.max_request_bytes)
    share = ConcurrencyLimits(per_key=at_once // 8, per_tenant=at_once // 4, total=at_once)
    # Each unknown key is reported, on the event loop.
    app.state.bodies = BodyReader(admit_request, share, max_keys=BODY_KEYS.default)
    app.add_middleware(InputGuard)
    most = {files.PATH: settings.max_file_bytes + files.MAX_FORM_BYTES, SIGN_IN_PATH: _MAX_SIGN_IN_BYTES}
    app.add_middleware(BodyLimit, max_bytes=lambda path: most.get(path, settings.max_request_bytes))
    if credentials is None:
        app.add_middleware(OriginGuard, allowed_hosts=settings.allowed_hosts, forms=(files.PATH,))
    else:
        app.add_middleware(SessionOriginGuard)
    app.add_middleware(AuditMiddleware)
    app.add_middleware(ProxyHeadersMiddleware, trusted_hosts=list(settings.trusted_proxies))
    app.add_middleware(RequestTimer, on_response=histograms.observe_request)
    app.add_middleware(RefusalBackoff, statuses=(413, 429))
    app.add_middleware(SecurityHeaders)
    modules = (jobs, models, deployments, files, fine_tuning, access)
    for module in (*modules, health):
        app.include_router(module.router)
    app.mount("/dashboard", PageFiles(directory=access.DASHBOARD_DIRECTORY))
    add_docs(app)
    return app


def _check_host(host: str) -> None:
    if not is_loopback(host):
        raise InvalidInputError(
            f"host is {host!r}; without API keys (SWIFTKV_API_KEYS_FILE) or issuers (SWIFTKV_OIDC_FILE) only a "
            "loopback address such as 127.0.0.1 is accepted",
            field="host",
            value=host,
        )
