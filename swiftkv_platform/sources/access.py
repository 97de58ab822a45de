"""Rules on the sources that a tenant's specs may read: the operator's rules, and the resulting `Access` of one tenant.

The platform reads sources with its own credentials. Without rules, a tenant could train on another tenant's files and
then generate them. The control plane checks a spec before storing it, and passes the tenant's `Access` to the attempt,
which checks every file before it is opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from swiftkv_platform.contract.attempts import StoredFile, is_file_id
from swiftkv_platform.contract.traffic import is_deployment_id
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.sources.layout import DATA_SUFFIXES
from swiftkv_platform.sources.names import (
    FileSource,
    HubSource,
    ModelSource,
    PathSource,
    S3Source,
    Source,
    TrafficSource,
    check_name,
    parse_location,
    parse_source,
)
from swiftkv_platform.sources.untrusted_files import UNBOUNDED, Boundary
from swiftkv_platform.specs import DataSourceSpec, JobSpec, TaskSpec
from swiftkv_platform.specs.data import TRAFFIC_SCHEME
from swiftkv_platform.specs.evaluation import get_task_name_and_data_dir, is_task_file_name

_S3_SCHEME = "s3://"
_TENANT_PLACEHOLDER = "{tenant}"
_TASK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.()+-]*", re.ASCII)
"""Pattern of the harness's task names; no path with a directory matches."""
_HUB_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*(/[A-Za-z0-9][A-Za-z0-9_.-]*)*", re.ASCII)
_MAX_REVISION_LENGTH = 255


@dataclass(frozen=True)
class CapturedTraffic:
    """Captured traffic of a deployment."""

    uri: str
    """Address of its prefix in the object store."""
    window_sizes: Mapping[tuple[float, float], int] = field(default_factory=dict)
    """Bytes of the stored parts by window of the spec's sources; known at submission only."""
    days: Sequence[str] = ()
    """UTC days with captured requests; known at submission, if a window is empty."""


@dataclass(frozen=True)
class Access:
    """Sources that the specs of one tenant may read. The default allows all, except tasks that run generated code."""

    roots: tuple[str, ...] | None = None
    """Directories and `s3://` prefixes that may be read; None allows every path and address."""
    hub_organizations: tuple[str, ...] | None = None
    """Hub organizations (and repositories without one) whose models and data may be used; None allows the whole hub."""
    code_tasks: bool = False
    """Whether tasks may run code that a model generates."""
    teacher_origins: tuple[str, ...] | None = None
    """Origins of the servers that may be asked as teachers (see `matches_origin`); None allows all."""
    tenant: str | None = None
    files: Mapping[str, StoredFile] | None = None
    """Uploaded files of the tenant that the job's spec names, by id."""
    traffic: Mapping[str, CapturedTraffic] | None = None
    """Captured traffic of the tenant that the job's spec names, by deployment; None without a control plane."""

    @property
    def is_restricted(self) -> bool:
        """Whether paths are restricted. If so, ambiguous names are hub ids, and tasks may not be files."""
        return self.roots is not None

    @property
    def boundary(self) -> Boundary:
        """Allowed directories of local files."""
        if self.roots is None:
            return UNBOUNDED
        return Boundary.from_directories(*(root for root in self.roots if not root.startswith(_S3_SCHEME)))

    def parse_model(self, name: str, field: str = "model.name_or_path") -> ModelSource:
        """Parse the name of a model. Raises `InvalidInputError` if it is not valid, or the tenant may not read it."""
        parsed = parse_source(name, field=field, relative_paths=not self.is_restricted)
        if isinstance(parsed, FileSource | TrafficSource):
            kind = "an uploaded file of rows" if isinstance(parsed, FileSource) else "captured traffic"
            raise InvalidInputError.for_field(field, name, f", {kind}; use a hub id, a directory or a built-in teacher")
        self._check_source(parsed, field)
        return parsed

    def parse_data(self, name: str, field: str) -> Source:
        """Parse the name of a data set. Raises as `parse_model`."""
        parsed = parse_source(name, field=field, suffixes=DATA_SUFFIXES, relative_paths=not self.is_restricted)
        self._check_source(parsed, field)
        return parsed

    def parse_location(self, name: str, field: str) -> S3Source | PathSource:
        """Parse a path or `s3://` address, never a hub id. Raises as `parse_model`."""
        parsed = parse_location(name, field=field)
        self._check_source(parsed, field)
        return parsed

    def check_spec(self, spec: JobSpec) -> None:
        """Raise `InvalidInputError` for the first field with a name that is not valid or may not be read."""
        self.parse_model(spec.model.name_or_path)
        if spec.model.revision is not None:
            check_revision(spec.model.revision, "model.revision")
        for source_field, source in spec.list_sources():
            self.parse_data(source.name_or_path, f"{source_field}.name_or_path")
            if source.complete is not None and source.complete.endpoint is not None:
                self._check_teacher_endpoint(source.complete.endpoint, f"{source_field}.complete.endpoint")
        for index, task in enumerate(spec.evaluation.tasks):
            self.check_task(task, f"evaluation.tasks[{index}]")

    def _check_teacher_endpoint(self, endpoint: str, field: str) -> None:
        allowed = self.teacher_origins
        if allowed is not None and not any(matches_origin(endpoint, origin) for origin in allowed):
            known = ", ".join(allowed) or "none (SWIFTKV_TEACHER_ORIGINS)"
            why = f", which the operator does not allow; allowed origins are: {known}"
            raise InvalidInputError.for_field(field, endpoint, why)

    def check_task(self, task: str | TaskSpec, field: str) -> None:
        """Raise `InvalidInputError` for an evaluation task whose name or data may not be used."""
        name, data_dir = get_task_name_and_data_dir(task)
        check_name(name, field)
        names_file = is_task_file_name(name) or _TASK_NAME.fullmatch(name) is None
        if self.is_restricted and names_file and not name.startswith("builtin:"):
            why = "; only tasks of the harness and `builtin:` tasks are accepted, since task files may run code"
            raise InvalidInputError.for_field(field, name, why)
        if data_dir is not None:
            self.parse_location(data_dir, f"{field}.data_dir")

    def _check_source(self, source: Source, field: str) -> None:
        """Raise `InvalidInputError` if the tenant may not read `source`."""
        allowed = ", ".join(["the hub", "built-in sources", *(self.roots or ())])
        allowed += " (the operator's SWIFTKV_SOURCE_ROOTS adds directories and s3:// prefixes)"
        if isinstance(source, FileSource):
            if source.name not in (self.files or {}):
                raise InvalidInputError.for_field(
                    field,
                    source.name,
                    ", but no file with this id is uploaded; list the files with `swiftkv files list`",
                )
        elif isinstance(source, TrafficSource):
            if self.traffic is None:
                why = ", which only jobs of its control plane can read; submit the job with `swiftkv jobs submit`"
                raise InvalidInputError.for_field(field, source.name, why)
            if source.deployment_id not in self.traffic:
                why = ", but there is no deployment with this id; list them with `swiftkv deployments`"
                raise InvalidInputError.for_field(field, source.name, why)
        elif isinstance(source, HubSource):
            organizations = self.hub_organizations
            if organizations is not None and source.organization not in organizations:
                known = f"{', '.join(organizations) or 'none'} (the tenant's policy: hub_organizations)"
                raise self._make_forbidden_error(source, field, f"the hub's organizations: {known}")
        elif isinstance(source, S3Source) and self.roots is not None:
            if not any(source.is_below(root) for root in self.roots if root.startswith(_S3_SCHEME)):
                raise self._make_forbidden_error(source, field, allowed)
        elif isinstance(source, PathSource) and not self.boundary.contains(source.path):
            raise self._make_forbidden_error(source, field, allowed)

    def _make_forbidden_error(self, source: Source, field: str, allowed: str) -> InvalidInputError:
        reader = "this tenant" if self.tenant is None else f"tenant {self.tenant!r}"
        return InvalidInputError.for_field(field, source.name, f", which {reader} may not read; it may read {allowed}")


UNRESTRICTED = Access()
"""Access of programs that users run themselves."""


@dataclass(frozen=True)
class SourceRules:
    """Sources that the operator allows tenants to read, in addition to built-in sources and the hub."""

    roots: Sequence[str] | None = None
    """Directories and `s3://` prefixes, in which `{tenant}` stands for the caller's tenant; None allows everything."""
    code_tasks: bool = False
    """Whether tasks may run code that a model generates."""
    teacher_origins: Sequence[str] | None = None
    """Origins of the servers that may be asked as teachers; None allows all."""

    def build_access(
        self,
        tenant: str,
        hub_organizations: Sequence[str] | None = None,
        files: Mapping[str, StoredFile] | None = None,
        traffic: Mapping[str, CapturedTraffic] | None = None,
    ) -> Access:
        """Return a tenant's access under these rules, with the hub organizations of its policy (None: all) and the
        uploaded files and captured traffic of its spec."""
        return Access(
            roots=None
            if self.roots is None
            else tuple(root.replace(_TENANT_PLACEHOLDER, tenant) for root in self.roots),
            hub_organizations=None if hub_organizations is None else tuple(hub_organizations),
            code_tasks=self.code_tasks,
            teacher_origins=None if self.teacher_origins is None else tuple(self.teacher_origins),
            tenant=tenant,
            files=files,
            traffic=traffic,
        )


NO_RULES = SourceRules()
"""Rules of a server that only local users can reach."""


def matches_origin(url: str, allowed: str) -> bool:
    """Whether `url` has the origin `allowed`, as `http://host:port`; `https://*.domain` allows every host below the
    domain."""
    asked, opened = urlsplit(url.lower()), urlsplit(allowed.lower())
    if (asked.scheme, asked.port) != (opened.scheme, opened.port):
        return False
    host, pattern = asked.hostname or "", opened.hostname or ""
    return host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern


def list_file_ids(spec: JobSpec) -> list[str]:
    """Return the ids of the uploaded files that a spec names as data, each once."""
    return list(dict.fromkeys(each.name_or_path for _, each in spec.list_sources() if is_file_id(each.name_or_path)))


def list_traffic_sources(spec: JobSpec) -> list[tuple[str, DataSourceSpec]]:
    """Return (deployment id, source) of the sources of captured traffic."""
    named = (
        (each.name_or_path.removeprefix(TRAFFIC_SCHEME), each) for _, each in spec.list_sources() if each.is_traffic
    )
    return [(deployment_id, each) for deployment_id, each in named if is_deployment_id(deployment_id)]


def check_revision(revision: str, field: str) -> None:
    """Raise `InvalidInputError` for a revision that, as part of a path, could escape the hub's cache."""
    if len(revision) > _MAX_REVISION_LENGTH or _HUB_REVISION.fullmatch(revision) is None:
        raise InvalidInputError(
            f"{field} is {revision[:64]!a}; a branch, tag or commit of the hub is accepted",
            field=field,
            value=ascii(revision[:64]),
        )
