"""The operator's grants to each tenant: quotas and weights, from a YAML file. Knows neither jobs nor callers.

default: {max_queued_jobs: 100, max_running_jobs: 4}
tenants:
  research: {weight: 2, max_gpus: 32}     # the rest as in `default`
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Protocol

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.webhooks import WebhookSpec


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class TenantPolicy(_Record):
    """Grants of one tenant; None is no limit."""

    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Share of the cluster relative to other tenants that wait."""
    max_queued_jobs: Annotated[int, Field(ge=0)] | None = None
    """Jobs that wait or are paused; a further one is refused until one has started or ended."""
    max_running_jobs: Annotated[int, Field(ge=1)] | None = None
    """Jobs on the cluster at a time; the others wait."""
    max_gpus: Annotated[float, Field(ge=0.0)] | None = None
    """GPUs that its jobs hold at a time; a job that alone asks for more is refused."""
    max_cpus: Annotated[float, Field(ge=0.0)] | None = None
    """CPU cores that its jobs hold at a time; a job that alone asks for more is refused."""
    cost_cap: Annotated[float, Field(gt=0.0)] | None = None
    """Cost at which one job is paused, whatever its spec says."""
    webhook: WebhookSpec | None = None
    """Webhook for all its jobs' changes of status, beside what each job names."""


class _TenantsFile(_Record):
    default: TenantPolicy = TenantPolicy()
    tenants: dict[str, TenantPolicy] = {}


class Policies(Protocol):
    def policy(self, tenant: str) -> TenantPolicy: ...


class Tenants:
    """The policies in a file, read again when it has changed; without a file there are no limits.

    Raises `InvalidInputError` for a file that cannot be used. One that is broken later is logged, and what it said
    before goes on to hold.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._content = _TenantsFile()
        if path is not None:
            self._stamp, self._content = _stamp(path), _read(path)

    def policy(self, tenant: str) -> TenantPolicy:
        """The tenant's own, completed by the default's."""
        self._refresh()
        default, own = self._content.default, self._content.tenants.get(tenant)
        if own is None:
            return default
        return default.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})

    def _refresh(self) -> None:
        if self._path is None:
            return
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._content = _read(self._path)
        except InvalidInputError as error:
            get_logger().warning("tenants file not usable; its last version holds", reason=error.message)


NO_LIMITS = Tenants()


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Another one for every version of the file; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read(path: Path) -> _TenantsFile:
    try:
        document: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        return _TenantsFile.model_validate(document if document is not None else {})
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise _unusable(path, error) from error


def _unusable(path: Path, error: Exception) -> InvalidInputError:
    return InvalidInputError(
        f"the tenants file {str(path)!r} cannot be used: {error}; keys are `default` and `tenants`, and of each tenant "
        f"{', '.join(TenantPolicy.model_fields)}",
        field="tenants_file",
        value=str(path),
    )
