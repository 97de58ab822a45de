"""Webhooks of a job's changes: allowed addresses, signing secrets, and delivery from the outbox until it succeeds.

A change and its deliveries are stored in one transaction, so none is forgotten; a process that dies after sending may
send again. Receivers recognize repetitions by `webhook-id`, the event's id. Deliveries of one job to one address are
sent in order. Deliveries to different receivers do not wait for each other.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.base import Clock
from swiftkv_platform.control_plane.hooks.outbox import Delivery, FindRecipients, Outbox
from swiftkv_platform.control_plane.jobs.job import Job
from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.security.webhooks import ID_HEADER, SIGNATURE_HEADER, TIMESTAMP_HEADER, Secret
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources.access import matches_origin
from swiftkv_platform.specs.publish import WebhookSpec


def make_recipient_finder(policies: TenantPolicies) -> FindRecipients:
    """Return a function that returns the webhooks of a job: from the job's spec and from the tenant's policy."""

    def find(job: Job) -> Sequence[WebhookSpec]:
        found = [job.spec.webhook, policies.get(job.tenant).webhook]
        return list({hook.url: hook for hook in found if hook is not None}.values())

    return find


@dataclass(frozen=True)
class WebhookRules:
    """Allowed webhook addresses and their signing secrets."""

    origins: Sequence[str] = ()
    """`https://host`, `https://*.domain` or `http://host:port`; without any, webhooks are refused."""
    secrets_dir: Path | None = None
    """Secrets as files `{tenant}/{name}`, such as a mounted Kubernetes secret."""

    def get_secret(self, webhook: WebhookSpec, tenant: str) -> Secret:
        """Return the webhook's signing secret. Raises `InvalidInputError` for an address that is not allowed, or a
        missing or invalid secret. Messages never contain the secret."""
        if not any(matches_origin(webhook.url, allowed) for allowed in self.origins):
            opened = ", ".join(self.origins) or "none (SWIFTKV_WEBHOOK_ORIGINS)"
            raise InvalidInputError.for_field(
                "webhook.url", webhook.url, f", which the operator does not allow; allowed origins are: {opened}"
            )
        name = webhook.secret_ref
        where = f"tenant {tenant!r} has no secret {name!r}"
        if self.secrets_dir is None:
            message = f"{where}: SWIFTKV_SECRETS_DIR is not set on the control plane"
            raise InvalidInputError(message, field="webhook.secret_ref", value=name)
        try:
            text = (self.secrets_dir / tenant / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            message = f"{where}; ask the operator to create the file {tenant}/{name} below SWIFTKV_SECRETS_DIR"
            raise InvalidInputError(message, field="webhook.secret_ref", value=name) from error
        return Secret.parse(text, name=name)


def make_webhook_rules(settings: Settings) -> WebhookRules:
    return WebhookRules(settings.webhook_origins, settings.secrets_dir)


SendRequest = Callable[[str, Mapping[str, str], bytes], int]
"""(url, headers, body) -> HTTP status. Raises `OSError` without a response."""

_MIN_DELAY_S = 5.0
_MAX_DELAY_S = 3600.0
_MAX_AGE_S = 24 * 3600.0
_CLAIM_TIMEOUT_S = 60.0
"""Seconds of a claim, during which no other control plane sends the delivery; longer than a request may take."""
_MAX_CONCURRENT = 32
"""Max concurrent deliveries."""
_MAX_PER_ORIGIN = 4

_TOTAL_TIMEOUT_S = 15.0
"""Max seconds for connecting, writing and reading together, so that a receiver cannot stretch them byte by byte."""
_STEP_TIMEOUTS = httpx.Timeout(10.0, connect=5.0)
"""Timeouts of each step of a request."""


def send_webhook(url: str, headers: Mapping[str, str], body: bytes) -> int:
    """Send a webhook and return the HTTP status. Follows no redirects, uses no proxy from the environment, and reads
    no body. Raises `ConnectionError` without a response in time."""
    try:
        return asyncio.run(_send(url, headers, body))
    except (httpx.HTTPError, TimeoutError) as error:
        raise ConnectionError(type(error).__name__) from error


async def _send(url: str, headers: Mapping[str, str], body: bytes) -> int:
    sent = {"Content-Type": "application/json", "User-Agent": "swiftkv-platform", **headers}
    async with (
        asyncio.timeout(_TOTAL_TIMEOUT_S),
        httpx.AsyncClient(timeout=_STEP_TIMEOUTS, follow_redirects=False, trust_env=False) as client,
        client.stream("POST", url, content=body, headers=sent) as response,
    ):
        return response.status_code


def _get_origin(url: str) -> str:
    """Return scheme, host and port of a URL in lower case."""
    parts = urlsplit(url.lower())
    return f"{parts.scheme}://{parts.netloc}"


class WebhookDeliverer:
    """Sends due deliveries, each in its own thread.

    A tick starts deliveries and does not wait for them: up to `_MAX_CONCURRENT`, and up to `_MAX_PER_ORIGIN` to one
    origin.
    """

    def __init__(self, outbox: Outbox, rules: WebhookRules, send: SendRequest, clock: Clock) -> None:
        self._outbox = outbox
        self._rules = rules
        self._send = send
        self._clock = clock
        self._log = get_logger(loop="webhooks")
        self._pool = ThreadPoolExecutor(_MAX_CONCURRENT, thread_name_prefix="webhook")
        self._active: Counter[str] = Counter()
        """Active deliveries by origin."""
        self._changed = threading.Condition()

    def tick(self) -> None:
        """Start due deliveries. Raises `DatabaseUnavailableError`."""
        while (full := self._find_full_origins()) is not None:
            now = self._clock()
            # One at a time: each claim decides whether its receiver has room for another.
            claimed = self._outbox.claim(now=now, until=now + _CLAIM_TIMEOUT_S, limit=1, excluded_origins=full)
            if not claimed:
                return
            [delivery] = claimed
            receiver = _get_origin(delivery.webhook.url)
            with self._changed:
                self._active[receiver] += 1
            self._pool.submit(self._run_delivery, delivery, receiver)

    def wait_until_idle(self) -> None:
        """Wait until no delivery is active."""
        with self._changed:
            self._changed.wait_for(lambda: not self._active.total())

    def close(self) -> None:
        """Finish active deliveries within their timeouts, and start no new delivery."""
        self._pool.shutdown()

    def _find_full_origins(self) -> Sequence[str] | None:
        """Return the origins at their limit of active deliveries; None if the total limit is reached."""
        with self._changed:
            if self._active.total() >= _MAX_CONCURRENT:
                return None
            return [origin for origin, count in self._active.items() if count >= _MAX_PER_ORIGIN]

    def _run_delivery(self, delivery: Delivery, receiver: str) -> None:
        """Send a delivery and store its outcome in the outbox."""
        try:
            self._store_outcome(delivery, self._deliver(delivery))
        except DatabaseUnavailableError as error:
            # Nothing is lost: the claim runs out, and the delivery is sent again.
            self._log.warning("webhook outcome not stored", event_id=delivery.event.id, reason=error.message)
        finally:
            with self._changed:
                self._active[receiver] -= 1
                self._active += Counter()  # drops origins that have none left
                self._changed.notify_all()

    def _deliver(self, delivery: Delivery) -> str | None:
        """Send a delivery. Returns None on success, else the problem, without content from the receiver."""
        try:
            secret = self._rules.get_secret(delivery.webhook, delivery.tenant)
            body, timestamp = _make_body(delivery), int(self._clock())
            headers = {
                ID_HEADER: delivery.event.id,
                TIMESTAMP_HEADER: str(timestamp),
                SIGNATURE_HEADER: secret.sign(delivery.event.id, timestamp, body),
            }
            status = self._send(delivery.webhook.url, headers, body)
        except InvalidInputError as error:
            return error.message
        except OSError as error:
            return f"no response: {error or type(error).__name__}"
        except Exception:
            self._log.exception("unexpected error", job_id=delivery.event.job_id, event_id=delivery.event.id)
            return "not sent: unexpected error; see the control plane's log"
        return None if 200 <= status < 300 else f"receiver returned HTTP {status}"

    def _store_outcome(self, delivery: Delivery, problem: str | None) -> None:
        # delivered, too old to retry, or retried with exponential backoff
        now, log = self._clock(), self._log.bind(job_id=delivery.event.job_id, event_id=delivery.event.id)
        if problem is None:
            self._outbox.mark_delivered(delivery.sequence, now)
        elif now - delivery.created_at > _MAX_AGE_S:
            log.error("webhook failed; no further retries", reason=problem, attempts=delivery.attempts + 1)
            self._outbox.mark_failed(delivery.sequence, problem)
        else:
            delay = min(_MIN_DELAY_S * 2.0 ** min(delivery.attempts, 16), _MAX_DELAY_S)
            log.warning("webhook not delivered", reason=problem, retry_in_s=delay)
            self._outbox.reschedule(delivery.sequence, problem, now + delay)


def _make_body(delivery: Delivery) -> bytes:
    """Return the body of a delivery. It is the same in every attempt, since events never change."""
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
