"""Who asks a replica: the tenant of an API key, where the deployment has keys. Knows no model."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from swiftkv_platform.keys import KeyRing, Scope


def get_caller(
    request: Request, _header: Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]
) -> str:
    """The caller's tenant; empty where nobody needs a key. Raises `UnauthenticatedError` and `ForbiddenError`."""
    key_ring: KeyRing | None = request.app.state.key_ring
    if key_ring is None:
        return ""
    key = key_ring.authenticate(request.headers.get("authorization"))
    key.require(Scope.GENERATE)
    return key.tenant


TheCaller = Annotated[str, Depends(get_caller)]
