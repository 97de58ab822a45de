"""Targets to publish a model to, outside the platform's own store, and webhooks for a job's status. No look-ups."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, field_validator

from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.specs.base import Spec

_HOST = re.compile(r"[A-Za-z0-9.:-]+")
Status = Literal[
    "queued", "starting", "running", "evaluating", "pausing", "paused", "cancelling", "succeeded", "failed", "cancelled"
]


class WebhookSpec(FrozenModel):
    """Receiver of a job's changes of status."""

    url: Annotated[str, Field(max_length=500)]
    """Address on a host that the operator allows, without credentials and query: deliveries are signed."""
    secret_ref: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    """Name of the tenant's secret that signs; the secret itself stays with the operator."""
    on: tuple[Status, ...] = ()
    """Statuses to send; empty: all."""

    @field_validator("url")
    @classmethod
    def _validate_url(cls, url: str) -> str:
        unusable = next((character for character in url if not "!" <= character <= "~"), None)
        if unusable is not None:  # `urlsplit` drops some of these
            raise ValueError(f"it has {unusable!a}, which URLs cannot contain; write it as %-escapes of its UTF-8")
        parts = urlsplit(url)
        if parts.scheme not in ("https", "http") or not _HOST.fullmatch(parts.hostname or ""):
            raise ValueError("an https:// address is needed")
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            raise ValueError("credentials, queries and fragments are refused: the signature identifies the sender")
        try:
            _ = parts.port
        except ValueError as error:
            raise ValueError("its port is not a number in 0..65535") from error
        return url

    def includes_status(self, status: str) -> bool:
        return not self.on or status in self.on


_HUB = re.compile(r"hf://(?P<repository>[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})")
_BUCKET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()=+@,-]+)+")
_DIRECTORY = re.compile(r"(/[^/\x00-\x1f]+)+")


def parse_target_kind(target: str) -> Literal["hub", "store"]:
    """Whether a target is a repository of the hub (`hub`), or a bucket or directory (`store`). Raises `ValueError` for
    others."""
    has_dot_segments = any(part in (".", "..") for part in target.split("/"))
    if _HUB.fullmatch(target) and not has_dot_segments:
        return "hub"
    if (_BUCKET.fullmatch(target) or _DIRECTORY.fullmatch(target)) and not has_dot_segments:
        return "store"
    raise ValueError(
        f"{target[:120]!r} is not a place to publish to; hf://organization/name, s3://bucket/prefix or an absolute "
        "directory is accepted"
    )


def get_repository_name(target: str) -> str:
    """Return the name on the hub of the repository `hf://organization/name`."""
    match = _HUB.fullmatch(target)
    assert match is not None, "only hub repositories have one"
    return match["repository"]


def _validate_target(target: str) -> str:
    trimmed = target.rstrip("/")
    parse_target_kind(trimmed)
    return trimmed


Target = Annotated[str, Field(max_length=1024), AfterValidator(_validate_target)]
Private = Annotated[
    bool,
    Field(description="Visibility of a repository of the hub that is made for it; one that is there stays as it is."),
]


class PublicationSpec(Spec):
    """Copy of a model outside the platform."""

    to: Target
    """`hf://organization/name`, `s3://bucket/prefix` or an absolute directory that every node mounts, within what the
    operator allows (`SWIFTKV_PUBLISH_TARGETS`). The model and its card, README.md, are written there."""
    private: Private = True


class PublishSpec(Spec):
    """Format of the model, and where it is published after it has passed its gates."""

    adapter: bool = False
    """Publish only the tensors in which the student differs from its teacher, instead of the whole model; the teacher
    is then read wherever the model is loaded. Not with `distillation.trainable: all`, which changes every tensor."""
    to: Target | None = None
    """Target of a copy outside the platform, see `PublicationSpec`; null keeps the model only in the platform's object
    store."""
    private: Private = True

    @property
    def publication(self) -> PublicationSpec | None:
        """Copy outside the platform, if the spec asks for one."""
        return None if self.to is None else PublicationSpec(to=self.to, private=self.private)
