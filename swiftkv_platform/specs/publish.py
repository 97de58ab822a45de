"""Sections `publish`, `rollout` and `webhook` of a job spec. No I/O."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.specs.base import HttpUrl, Range, Share, Spec

Status = Literal[
    "queued", "starting", "running", "evaluating", "pausing", "paused", "cancelling", "succeeded", "failed", "cancelled"
]


class WebhookSpec(FrozenModel):
    """Webhook for a job's status changes."""

    url: HttpUrl
    """URL on a host that the operator allows; deliveries are signed."""
    secret_ref: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    """Name of the tenant's signing secret, which the operator stores."""
    on: tuple[Status, ...] = ()
    """Statuses to send; empty: all."""

    def includes_status(self, status: str) -> bool:
        return not self.on or status in self.on


_HUB_TARGET = re.compile(r"hf://(?P<repository>[A-Za-z0-9][A-Za-z0-9_.-]{0,95}/[A-Za-z0-9][A-Za-z0-9_.-]{0,95})")
_BUCKET_TARGET = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.*'()=+@,-]+)+")
_DIRECTORY_TARGET = re.compile(r"(/[^/\x00-\x1f]+)+")


def parse_target_kind(target: str) -> Literal["hub", "store"]:
    """Return `hub` for a hub repository, `store` for a bucket or directory. Raises `ValueError` for other targets."""
    has_dot_segments = any(part in (".", "..") for part in target.split("/"))
    if _HUB_TARGET.fullmatch(target) and not has_dot_segments:
        return "hub"
    if (_BUCKET_TARGET.fullmatch(target) or _DIRECTORY_TARGET.fullmatch(target)) and not has_dot_segments:
        return "store"
    raise ValueError(
        f"{target[:120]!r} is not a valid target; use hf://organization/name, s3://bucket/prefix or an absolute "
        "directory"
    )


def get_repository_name(target: str) -> str:
    """Return `organization/name` of `hf://organization/name`."""
    match = _HUB_TARGET.fullmatch(target)
    assert match is not None, "not a hub repository"
    return match["repository"]


def _validate_target(target: str) -> str:
    trimmed = target.rstrip("/")
    parse_target_kind(trimmed)
    return trimmed


Target = Annotated[str, Field(max_length=1024), AfterValidator(_validate_target)]
Private = Annotated[
    bool,
    Field(description="Visibility of a newly created hub repository; that of an existing one does not change."),
]


class PublicationSpec(Spec):
    """Copy of a model outside the platform."""

    to: Target
    """`hf://organization/name`, `s3://bucket/prefix` or an absolute directory that every node mounts. Must be allowed
    by the operator (`SWIFTKV_PUBLISH_TARGETS`). Receives the model and its card (README.md)."""
    private: Private = True


class PublishSpec(Spec):
    """Format of the model, and target to publish it to after it has passed its gates."""

    adapter: bool = False
    """Publish only the tensors that differ from the teacher; loading the model then also reads the teacher. Not with
    `distillation.trainable: all`, which changes every tensor."""
    to: Target | None = None
    """Target of a copy, see `PublicationSpec`; null: the model is only in the platform's object store."""
    private: Private = True

    @property
    def publication(self) -> PublicationSpec | None:
        """Copy outside the platform, if any."""
        return None if self.to is None else PublicationSpec(to=self.to, private=self.private)


DeploymentId = Annotated[str, Field(pattern=r"^dep_[0-9A-Za-z]{1,36}$")]


class RolloutSpec(Spec):
    """Rollout of the model to a deployment after it has passed its gates: first as the deployment's candidate, then as
    its model. A model with an undecided gate is not rolled out."""

    deployment: DeploymentId
    """`dep_` id. If the deployment follows an alias, the model is promoted to that alias."""
    share: Share = 0.1
    """Share of the requests that the candidate serves."""
    promote_after_s: Annotated[int, Range(0, 10**8)] | None = 3600
    """Seconds for which the candidate serves before it is promoted; null: it stays a candidate until somebody promotes
    it."""
