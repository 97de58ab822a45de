"""Webhooks of a job's changes: recipients, and delivery from the outbox, signed, with retries. Knows ports alone.

A change and the deliveries it asks for are stored in one transaction, so none is forgotten; a process that dies after
sending may send again. Receivers tell repetitions by `webhook-id`, the event's id. What is sent to one address about
one job is sent in order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.orchestration.job import Event, Job
from swiftkv_platform.orchestration.ports import Clock
from swiftkv_platform.orchestration.tenants import Policies
from swiftkv_platform.webhooks import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, Secret, WebhookSpec

Recipients = Callable[[Job], Sequence[WebhookSpec]]
Send = Callable[[str, Mapping[str, str], bytes], int]
"""(url, headers, body) -> HTTP status. Raises `OSError` where there is no answer."""

_FIRST_DELAY_S = 5.0
_LONGEST_DELAY_S = 3600.0
_GIVE_UP_S = 24 * 3600.0
_CLAIM_S = 60.0
"""Seconds for which another control plane leaves a delivery alone that this one has begun."""
_AT_ONCE = 8


@dataclass(frozen=True)
class Delivery:
    """One event for one address."""

    sequence: int
    webhook: WebhookSpec
    event: Event
    tenant: str
    job_name: str
    metadata: Mapping[str, str]
    created_at: float
    attempts: int
    """Failed so far."""


class Outbox(Protocol):
    """Deliveries that wait. Every method raises `DatabaseUnavailableError`."""

    def claim(self, *, now: float, until: float, limit: int) -> Sequence[Delivery]:
        """Claim due deliveries, the oldest of each job and address; no other process is given them before `until`."""
        ...

    def delivered(self, sequence: int, now: float) -> None: ...

    def put_off(self, sequence: int, error: str, not_before: float) -> None: ...

    def give_up(self, sequence: int, error: str) -> None: ...


def recipients(policies: Policies) -> Recipients:
    """The job's own webhook and its tenant's."""

    def find(job: Job) -> Sequence[WebhookSpec]:
        found = [job.spec.webhook, policies.policy(job.tenant).webhook]
        return list({hook.url: hook for hook in found if hook is not None}.values())

    return find


class SecretFiles:
    """Secrets as files `{directory}/{tenant}/{name}`, such as a mounted Kubernetes secret."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory

    def read(self, tenant: str, name: str) -> Secret:
        """Raises `InvalidInputError`, naming where it was looked for, and never its value."""
        where = f"tenant {tenant!r} has no secret {name!r}"
        if self._directory is None:
            raise InvalidInputError(
                f"{where}: the operator names no directory of secrets (SWIFTKV_SECRETS_DIR)",
                field="webhook.secret_ref",
                value=name,
            )
        try:
            text = (self._directory / tenant / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(
                f"{where}; the operator keeps it as {tenant}/{name} below SWIFTKV_SECRETS_DIR",
                field="webhook.secret_ref",
                value=name,
            ) from error
        return Secret.parse(text, name=name)


@dataclass(frozen=True)
class WebhookRules:
    """Addresses that webhooks may go to, and the secrets for them."""

    origins: Sequence[str] = ()
    """`https://host`, `https://*.domain` or `http://host:port`; without any, webhooks are refused."""
    secrets: SecretFiles = field(default_factory=lambda: SecretFiles(None))

    def check(self, webhook: WebhookSpec, tenant: str) -> Secret:
        """The secret that signs. Raises `InvalidInputError` for a closed address or a missing secret."""
        if not any(_is_within(webhook.url, allowed) for allowed in self.origins):
            opened = ", ".join(self.origins) or "none (SWIFTKV_WEBHOOK_ORIGINS)"
            raise InvalidInputError(
                f"webhook.url is {webhook.url!r}, on a host that the operator has not allowed; allowed are: {opened}",
                field="webhook.url",
                value=webhook.url,
            )
        return self.secrets.read(tenant, webhook.secret_ref)


def _is_within(url: str, allowed: str) -> bool:
    """Whether `url` lies at an origin; `https://*.domain` allows every host below the domain."""
    asked, opened = urlsplit(url.lower()), urlsplit(allowed.lower())
    if (asked.scheme, asked.port) != (opened.scheme, opened.port):
        return False
    host, pattern = asked.hostname or "", opened.hostname or ""
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


class Deliverer:
    """Sends what is due."""

    def __init__(self, outbox: Outbox, rules: WebhookRules, send: Send, clock: Clock) -> None:
        self._outbox = outbox
        self._rules = rules
        self._send = send
        self._clock = clock
        self._log = get_logger(loop="webhooks")

    def tick(self) -> None:
        """Raises `DatabaseUnavailableError`."""
        now = self._clock()
        due = self._outbox.claim(now=now, until=now + _CLAIM_S, limit=_AT_ONCE)
        if not due:
            return
        with ThreadPoolExecutor(len(due)) as pool:  # a receiver that does not answer keeps no other waiting
            problems = list(pool.map(self._deliver, due))
        for delivery, problem in zip(due, problems, strict=True):
            self._settle(delivery, problem)

    def _deliver(self, delivery: Delivery) -> str | None:
        """Deliver, and return the problem, without anything that the receiver said; None for success."""
        try:
            secret = self._rules.check(delivery.webhook, delivery.tenant)
            body, timestamp = _body(delivery), int(self._clock())
            headers = {
                ID_HEADER: delivery.event.id,
                TIMESTAMP_HEADER: str(timestamp),
                SIGNATURE_HEADER: secret.sign(delivery.event.id, timestamp, body),
            }
            status = self._send(delivery.webhook.url, headers, body)
        except InvalidInputError as error:
            return error.message
        except OSError as error:
            return f"no answer: {type(error).__name__}"
        return None if 200 <= status < 300 else f"answered with {status}"

    def _settle(self, delivery: Delivery, problem: str | None) -> None:
        now, log = self._clock(), self._log.bind(job_id=delivery.event.job_id, event=delivery.event.id)
        if problem is None:
            self._outbox.delivered(delivery.sequence, now)
        elif now - delivery.created_at > _GIVE_UP_S:
            log.error("webhook given up", reason=problem, attempts=delivery.attempts + 1)
            self._outbox.give_up(delivery.sequence, problem)
        else:
            delay = min(_FIRST_DELAY_S * 2.0 ** min(delivery.attempts, 16), _LONGEST_DELAY_S)
            log.warning("webhook not delivered", reason=problem, retry_in_s=delay)
            self._outbox.put_off(delivery.sequence, problem, now + delay)


def _body(delivery: Delivery) -> bytes:
    """The same at every try: an event never changes."""
    event = delivery.event
    document: dict[str, Any] = {
        "type": f"distillation.job.{event.data['status']}",
        "timestamp": event.created_at,
        "data": {
            **event.data,
            "id": event.id,
            "job_id": event.job_id,
            "name": delivery.job_name,
            "tenant": delivery.tenant,
            "metadata": dict(delivery.metadata),
            "message": event.message,
        },
    }
    return json.dumps(document, separators=(",", ":")).encode()
