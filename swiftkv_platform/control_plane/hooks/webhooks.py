"""Webhooks of a job's changes: their recipients, allowed addresses and signing secrets. Sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from swiftkv_platform.control_plane.access.tenants import Tenants
from swiftkv_platform.control_plane.jobs.job import Event, Job
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.security.webhooks import Secret
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs.publish import WebhookSpec

Recipients = Callable[[Job], Sequence[WebhookSpec]]


@dataclass(frozen=True)
class Delivery:
    """Delivery of one event to one address."""

    sequence: int
    webhook: WebhookSpec
    event: Event
    tenant: str
    job_name: str
    metadata: Mapping[str, str]
    created_at: float
    attempts: int
    """Failed tries so far."""


def recipients(policies: Tenants) -> Recipients:
    """Return the lookup of a job's recipients: its own webhook and its tenant's."""

    def find(job: Job) -> Sequence[WebhookSpec]:
        found = [job.spec.webhook, policies.policy(job.tenant).webhook]
        return list({hook.url: hook for hook in found if hook is not None}.values())

    return find


@dataclass(frozen=True)
class SecretFiles:
    """Secrets as files `{directory}/{tenant}/{name}`, such as a mounted Kubernetes secret."""

    directory: Path | None = None

    def read(self, tenant: str, name: str) -> Secret:
        """Return a tenant's secret. Raises `InvalidInputError`, which says where it was looked for and never its
        value."""
        where = f"tenant {tenant!r} has no secret {name!r}"
        if self.directory is None:
            message = f"{where}: the operator has set no directory of secrets (SWIFTKV_SECRETS_DIR)"
            raise InvalidInputError(message, field="webhook.secret_ref", value=name)
        try:
            text = (self.directory / tenant / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            message = f"{where}; the operator keeps it as {tenant}/{name} below SWIFTKV_SECRETS_DIR"
            raise InvalidInputError(message, field="webhook.secret_ref", value=name) from error
        return Secret.parse(text, name=name)


@dataclass(frozen=True)
class WebhookRules:
    """Addresses that webhooks may go to, and the secrets for them."""

    origins: Sequence[str] = ()
    """`https://host`, `https://*.domain` or `http://host:port`; without any, webhooks are refused."""
    secrets: SecretFiles = SecretFiles()

    def check(self, webhook: WebhookSpec, tenant: str) -> Secret:
        """Return the signing secret. Raises `InvalidInputError` for an address that is not allowed, or a missing
        secret."""
        if not any(_is_within(webhook.url, allowed) for allowed in self.origins):
            opened = ", ".join(self.origins) or "none (SWIFTKV_WEBHOOK_ORIGINS)"
            raise InvalidInputError.of(
                "webhook.url", webhook.url, f", on a host that the operator has not allowed; allowed are: {opened}"
            )
        return self.secrets.read(tenant, webhook.secret_ref)


def _is_within(url: str, allowed: str) -> bool:
    """Whether `url` is at the origin `allowed`; `https://*.domain` allows every host below the domain."""
    asked, opened = urlsplit(url.lower()), urlsplit(allowed.lower())
    if (asked.scheme, asked.port) != (opened.scheme, opened.port):
        return False
    host, pattern = asked.hostname or "", opened.hostname or ""
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def webhook_rules(settings: Settings) -> WebhookRules:
    return WebhookRules(settings.webhook_origins, SecretFiles(settings.secrets_dir))
