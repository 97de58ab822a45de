"""`/`: the dashboard's files, and the session by which a browser brings an API key. Knows no job."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter, Request, Response, status
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict

from swiftkv_platform.api.dependencies import SESSION_COOKIE
from swiftkv_platform.asgi import PAGE_HEADERS
from swiftkv_platform.keys import KeyRing

FILES = Path(__file__).parent.parent / "dashboard"

router = APIRouter(include_in_schema=False)


@router.get("/")
def index() -> FileResponse:
    """The dashboard."""
    return FileResponse(FILES / "index.html", headers=dict(PAGE_HEADERS))


class SignIn(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    api_key: str


@router.post("/session", status_code=status.HTTP_204_NO_CONTENT)
def sign_in(body: SignIn, request: Request, response: Response) -> None:
    """Keep a key in a cookie that pages cannot read: an event stream sends no header of its own."""
    key_ring: KeyRing | None = request.app.state.key_ring
    if key_ring is not None:
        key_ring.authenticate(f"Bearer {body.api_key}")
    secure = request.url.scheme == "https"
    response.set_cookie(SESSION_COOKIE, body.api_key, httponly=True, samesite="strict", secure=secure)


@router.delete("/session", status_code=status.HTTP_204_NO_CONTENT)
def sign_out(response: Response) -> None:
    """Forget the key."""
    response.delete_cookie(SESSION_COOKIE)
