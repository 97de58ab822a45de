"""Webhooks as a spec names them. No I/O."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from swiftkv_platform.frozen import FrozenModel

_HOST = re.compile(r"[A-Za-z0-9.:-]+")
Status = Literal[
    "queued", "starting", "running", "evaluating", "pausing", "paused", "cancelling", "succeeded", "failed", "cancelled"
]


class WebhookSpec(FrozenModel):
    """Receiver of a job's changes of status."""

    url: Annotated[str, Field(max_length=500)]
    """Address on a host that the operator allows. It carries no credentials and no query: what is sent is signed."""
    secret_ref: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    """Name of the tenant's secret that signs; the secret itself stays with the operator."""
    on: tuple[Status, ...] = ()
    """Statuses that are told; none named: all."""

    @field_validator("url")
    @classmethod
    def _is_plain(cls, url: str) -> str:
        parts = urlsplit(url)
        if parts.scheme not in ("https", "http") or not _HOST.fullmatch(parts.hostname or ""):
            raise ValueError("an https:// address is needed")
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            raise ValueError("credentials, queries and fragments are refused: the signature says who sends")
        try:
            _ = parts.port
        except ValueError as error:
            raise ValueError("its port is no number in 0..65535") from error
        return url

    def wants(self, status: str) -> bool:
        return not self.on or status in self.on
