"""Captured traffic: objects below `traffic/{tenant}/{deployment}/`, which replicas write, and jobs and the control
plane read. No I/O here.

    {YYYY-MM-DD}/{part}.jsonl.gz   captured requests (`CapturedRequest`) that ended on one UTC day, a line each
    deletions/{id}.json            a `TrafficDeletion`

A replica only adds parts. A deletion hides rows from every reader as soon as it is stored; the control plane then
rewrites the parts without these rows, and removes the deletion when no replica can still write such rows.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import Field, model_validator
from ulid import ULID

from swiftkv_platform.frozen import FrozenBaseModel

TRAFFIC_PREFIX = "traffic"
"""Prefix of the captured traffic of all tenants."""
PART_SUFFIX = ".jsonl.gz"
_ROUTE_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_", "gen_")
MAX_USER_CHARS = 512
"""Max characters of an end user's name, by which rows are listed and deleted."""
MAX_WRITE_DELAY_S = 60.0
"""Max seconds after a request's end until its row is stored; later ones are dropped."""
_DEPLOYMENT_ID = re.compile(r"dep_[0-7][0-9A-HJKMNP-TV-Z]{25}")


def is_deployment_id(name: str) -> bool:
    """Whether a name has the form of a deployment's id."""
    return _DEPLOYMENT_ID.fullmatch(name) is not None


def is_valid_user(user: str) -> bool:
    """Whether rows can be listed and deleted by this name of an end user."""
    return len(user) <= MAX_USER_CHARS and "\0" not in user


class CapturedRequest(FrozenBaseModel):
    """A served request with one answer: a conversation (`messages`), or a text (`prompt` and `completion`)."""

    id: str
    """Id of the response without the prefix of its route, such as `chatcmpl-`; of several prompts with `/{number}`."""
    time: float
    """End of the request in Unix seconds."""
    path: str
    """Route, such as `/v1/chat/completions`."""
    model: str
    """Served model, as in the response."""
    user: str | None = None
    """End user, as the caller named him: OpenAI's `user` or `safety_identifier`, Anthropic's `metadata.user_id`."""
    messages: list[dict[str, Any]] | None = None
    """Conversation in OpenAI's format, the answer last."""
    tools: list[dict[str, Any]] | None = None
    prompt: str | None = None
    completion: str | None = None
    finish_reason: str
    """As in the response; `length` for an answer that was cut off."""
    prompt_tokens: int
    completion_tokens: int
    redacted: int = 0
    """Number of passages that `redact` has replaced."""


class TrafficDeletion(FrozenBaseModel):
    """Rows to delete: those that match all given fields. Rows that end after `requested_at` are kept, unless
    `request_id` names them."""

    requested_at: float
    """Unix seconds."""
    request_id: Annotated[str, Field(min_length=1)] | None = None
    user: str | None = None
    before: float | None = None
    """Delete requests that ended before this time, in Unix seconds."""

    @model_validator(mode="after")
    def _check_condition(self) -> Self:
        if self.request_id is None and self.user is None and self.before is None:
            raise ValueError("give request_id, user or before")
        return self

    def matches(self, row: CapturedRequest) -> bool:
        return (
            (self.request_id is not None or row.time <= self.requested_at)
            and self.request_id in (None, row.id, row.id.rpartition("/")[0])
            and self.user in (None, row.user)
            and (self.before is None or row.time < self.before)
        )


def make_traffic_prefix(tenant: str, deployment_id: str) -> str:
    return f"{TRAFFIC_PREFIX}/{tenant}/{deployment_id}"


def strip_response_id_prefix(response_id: str) -> str:
    """Return the id of a captured request: that of its response without the prefix of a route, such as `chatcmpl-`.
    A prefix alone, which a caller may choose as an id, stays."""
    prefix = next((each for each in _ROUTE_PREFIXES if response_id.startswith(each)), "")
    return response_id[len(prefix) :] or response_id


def format_utc_day(time: float) -> str:
    """Return the UTC day, as `2026-11-30`, of a time in Unix seconds."""
    return datetime.fromtimestamp(time, UTC).date().isoformat()


def make_part_key(day: str) -> str:
    """Return the key of a new part below the deployment's prefix; the parts of a day sort by creation time."""
    return f"{day}/{ULID()}{PART_SUFFIX}"


def make_deletion_key() -> str:
    """Return the key of a new deletion below the deployment's prefix."""
    return f"deletions/{ULID()}.json"
