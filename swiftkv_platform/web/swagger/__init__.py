"""`/docs`: an application's OpenAPI document in Swagger UI, whose files come from the package `fastapi-offline`. That
package's own page has an inline script, which our content security policy forbids, and supports no route prefix.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import FileResponse

from swiftkv_platform.web.middleware import PAGE_HEADERS, PageFiles

SWAGGER_DIRECTORY = Path(__file__).parent
LICENSE = {"name": "Apache 2.0", "identifier": "Apache-2.0"}
"""The `license_info` of both applications."""
OPEN: dict[str, Any] = {"security": []}
"""The `openapi_extra` of a route that needs no key."""


def add_docs(app: FastAPI) -> None:
    """Serve `/docs` without network, for an application made with `docs_url=None` and `redoc_url=None`."""
    app.add_api_route("/docs", _page, include_in_schema=False)
    app.mount("/docs/assets/vendor", PageFiles(packages=[("fastapi_offline", "static")]))
    app.mount("/docs/assets", PageFiles(directory=SWAGGER_DIRECTORY))


async def _page() -> FileResponse:
    return FileResponse(SWAGGER_DIRECTORY / "index.html", headers=dict(PAGE_HEADERS))
