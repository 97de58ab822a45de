"""Parse the name of a model or data set as a built-in source, uploaded file, captured traffic, S3 address, path or hub
id; make relative paths and times of a spec absolute, or refuse them; decide which sources a tenant's specs may read.

A relative path is valid only in the caller's working directory. In a worker's, the same name may be missing, or a hub
id.

The platform reads sources with its own credentials. Without the operator's rules, a tenant could train on another
tenant's files and then generate them. The control plane checks a spec before storing it, and passes the tenant's
`Access` to the attempt, which checks every file before it is opened.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from pydantic import BaseModel

from swiftkv_platform.contract.attempts import StoredFile, is_file_id
from swiftkv_platform.contract.traffic import is_deployment_id
from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.sources.layout import DATA_SUFFIXES
from swiftkv_platform.sources.untrusted_files import UNBOUNDED, Boundary
from swiftkv_platform.specs import DataSourceSpec, JobSpec, TaskSpec, is_path_like
from swiftkv_platform.specs.data import TRAFFIC_SCHEME
from swiftkv_platform.specs.evaluation import get_task_name_and_data_dir, is_task_file_name

_BUILTIN_SCHEME = "builtin:"
_S3_SCHEME = "s3://"
BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
BUCKET_NAME_RULE = "3 to 63 lower-case letters, digits, dots, hyphens"
TEMPORARY_PREFIX = ".tmp-"
"""Prefix of unfinished files in a directory store; no segment of a key may start with it."""
_MAX_KEY_BYTES = 1024
_URL_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f]")
_HUB_ID = re.compile(r"(?:(?P<organization>[A-Za-z0-9_][A-Za-z0-9_.-]*)/)?[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_MAX_NAME_BYTES = 2048
"""Max bytes of a name; S3 keys have at most 1,024, paths 4,096."""
_MAX_SEGMENT_BYTES = 255
"""Max bytes between two slashes, as in file systems."""
_MAX_SHOWN_LENGTH = 64
"""Max characters of a refused name in a message."""


@dataclass(frozen=True)
class BuiltinSource:
    """A source that ships with the package; its reader checks whether the name exists."""

    name: str


@dataclass(frozen=True)
class FileSource:
    """A file uploaded to the control plane; the name is its id."""

    name: str


@dataclass(frozen=True)
class TrafficSource:
    """Captured traffic of a deployment of the control plane."""

    name: str

    @property
    def deployment_id(self) -> str:
        return self.name.removeprefix(TRAFFIC_SCHEME)


@dataclass(frozen=True)
class S3Source:
    """An object, or everything below a prefix."""

    name: str

    @property
    def bucket(self) -> str:
        return self.name.removeprefix(_S3_SCHEME).partition("/")[0]

    @property
    def store(self) -> str:
        """Address of the bucket."""
        return f"{_S3_SCHEME}{self.bucket}"

    @property
    def key(self) -> str:
        """Key or prefix, unescaped: `#`, `?` and `%` have no special meaning."""
        return self.name.removeprefix(_S3_SCHEME).partition("/")[2].rstrip("/")

    def is_below(self, root: str) -> bool:
        """Whether the address is at or below the `s3://` prefix `root`, with `..` resolved."""
        path, prefix = (posixpath.normpath(uri.removeprefix(_S3_SCHEME)) for uri in (self.name, root))
        return path == prefix or path.startswith(f"{prefix}/")


@dataclass(frozen=True)
class PathSource:
    """A file or directory on the machine that reads it."""

    name: str
    path: Path
    """Path with `~` expanded."""


@dataclass(frozen=True)
class HubSource:
    """A repository of the hub."""

    name: str

    @property
    def organization(self) -> str:
        """Part before the slash; the whole name if there is none."""
        return self.name.partition("/")[0]


ModelSource = BuiltinSource | S3Source | PathSource | HubSource
Source = ModelSource | FileSource | TrafficSource


def parse_source(name: str, *, field: str, suffixes: Collection[str] = (), relative_paths: bool = True) -> Source:
    """Parse a name. Raises `InvalidInputError` for one that no file system, store or hub could have, and `ModelError`
    for a model without a slash in its name that does not exist here.

    Args:
        suffixes: a name with one of these is a path, even if no such file exists.
        relative_paths: whether an ambiguous name is a path if this path exists. False with restricted sources, since
            control plane and workers have different working directories.
    """
    check_name(name, field)
    if name.startswith(_BUILTIN_SCHEME):
        return BuiltinSource(name)
    if name.startswith(_S3_SCHEME):
        return _parse_s3(name, field)
    if is_file_id(name):
        return FileSource(name)
    if name.startswith(TRAFFIC_SCHEME):
        if not is_deployment_id(name.removeprefix(TRAFFIC_SCHEME)):
            raise _make_error(name, field, f"names no deployment; {TRAFFIC_SCHEME}dep_... with its id is accepted")
        return TrafficSource(name)
    is_path = is_path_like(name, suffixes) or _HUB_ID.fullmatch(name) is None
    # In a directory that this process may not enter, this is False, where `Path.exists` raises.
    if is_path or (relative_paths and os.path.exists(name)):  # noqa: PTH110
        return PathSource(name, _expand_user(name, field))
    # A mistyped path, which the hub would be asked for, with retries. The hub has data sets without an organization.
    if relative_paths and "/" not in name and suffixes != DATA_SUFFIXES:
        raise ModelError.for_field(
            field, name, ": no such file or directory here; a hub id has an organization, e.g. Qwen/Qwen3-0.6B"
        )
    return HubSource(name)


def parse_location(name: str, *, field: str) -> S3Source | PathSource:
    """Parse a name that is never a hub id, such as a task's `data_dir`. Raises as `parse_source`."""
    check_name(name, field)
    return _parse_s3(name, field) if name.startswith(_S3_SCHEME) else PathSource(name, _expand_user(name, field))


def _parse_s3(name: str, field: str) -> S3Source:
    source = S3Source(name)
    if BUCKET_NAME.fullmatch(source.bucket) is None:
        raise _make_error(name, field, f"names no bucket; {BUCKET_NAME_RULE} are accepted")
    fault = find_key_fault(source.key) if source.key else None
    if fault is not None:
        raise _make_error(name, field, f"has a key that {fault}; s3://bucket/prefix is accepted")
    return source


def find_key_fault(key: str) -> str | None:
    """Return why `key` is not a plain relative path; None if it is one."""
    segments = key.split("/")
    if "" in segments:
        return "is empty, absolute or has an empty segment"
    if "." in segments or ".." in segments:
        return "has a '.' or '..' segment"
    if any(segment.startswith(TEMPORARY_PREFIX) for segment in segments):
        return f"has a segment that starts with {TEMPORARY_PREFIX!r}"
    if "\\" in key or not key.isprintable():
        return "has a backslash or a character that cannot be printed"
    if len(key.encode()) > _MAX_KEY_BYTES:
        return f"is longer than {_MAX_KEY_BYTES} bytes"
    return None


def check_name(name: str, field: str) -> None:
    """Raise `InvalidInputError` for a name with control characters or lone surrogates, one that is too long, or a URL
    of a scheme that is not supported."""
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise _make_error(name, field, "has a character that cannot be encoded") from error
    if _CONTROL_CHARACTER.search(name) is not None:
        raise _make_error(name, field, "has a control character")
    if len(encoded) > _MAX_NAME_BYTES:
        raise _make_error(name, field, f"has {len(encoded)} bytes, and at most {_MAX_NAME_BYTES} are accepted")
    if max(map(len, encoded.split(b"/"))) > _MAX_SEGMENT_BYTES:
        raise _make_error(name, field, f"has more than {_MAX_SEGMENT_BYTES} bytes between two slashes")
    scheme = _URL_SCHEME.match(name)
    if scheme is not None and not name.startswith(_S3_SCHEME):
        raise _make_error(
            name, field, f"begins with {scheme[0]}; use a path without this scheme, an {_S3_SCHEME} address or a hub id"
        )


def refuse_shadowed_id(name: str, field: str) -> None:
    """Raise `InvalidInputError` if a path with the hub id `name` exists, since `transformers` and `datasets` would
    prefer it."""
    if os.path.exists(name):  # noqa: PTH110
        why = ", a hub id, but the worker's working directory has a file or directory of that name"
        instead = "use an absolute path below an allowed root, or another working directory"
        raise InvalidInputError.for_field(field, name, f"{why}; {instead}")


def escapes_directory(name: str) -> bool:
    """Whether a name may be outside of its directory: an absolute path, one with `..`, or a URL, including chained ones
    (`::`)."""
    path = PurePosixPath(name)
    return "::" in name or ":/" in name or path.is_absolute() or ".." in path.parts or name.startswith("~")


def _expand_user(name: str, field: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # the home directory of an unknown user
        raise _make_error(
            name, field, "begins with ~ and a user that does not exist on this machine; use an absolute path"
        ) from error


def _make_error(name: str, field: str, why: str) -> InvalidInputError:
    shown = ascii(name[:_MAX_SHOWN_LENGTH]) + ("..." if len(name) > _MAX_SHOWN_LENGTH else "")
    return InvalidInputError(f"{field} is {shown}, which {why}", field=field, value=shown)


Section = TypeVar("Section", bound=BaseModel)
NameKind = Literal["model", "data", "location"]
"""A location is a path or `s3://` address, never a hub id."""
ChangeName = Callable[[str, NameKind, str], str]
"""Function: (name, kind of the name, field of the spec with the name) -> new name."""


def make_absolute(name: str, kind: NameKind, field: str) -> str:
    """Return `name`, made absolute if it is a path. Raises `InvalidInputError` for an invalid name."""
    path = _parse_path(name, kind, field, relative_paths=True)
    return name if path is None else os.path.abspath(path)  # noqa: PTH100  # without resolving links


def make_paths_absolute(spec: JobSpec) -> JobSpec:
    """Return the spec with every path made absolute. Raises `InvalidInputError` for an invalid name."""
    return _map_names(spec, make_absolute)


def make_override_absolute(field: str, value: Any) -> Any:
    if field == "model.name_or_path" and isinstance(value, str):
        return make_absolute(value, "model", field)
    if field == "data.sources" and isinstance(value, list):
        return [_make_source_absolute(source) for source in value]
    if field == "evaluation.rows" and isinstance(value, list):
        return [
            {**task, "source": _make_source_absolute(task["source"])}
            if isinstance(task, dict) and "source" in task
            else task
            for task in value
        ]
    return value


def refuse_relative_paths(spec: JobSpec, *, relative_paths: bool) -> None:
    """Raise `InvalidInputError` for the first relative path, or path in another user's home: workers would resolve it
    differently. `relative_paths`: as for `parse_source`."""

    def require_absolute(name: str, kind: NameKind, field: str) -> str:
        path = _parse_path(name, kind, field, relative_paths=relative_paths)
        if path is not None and is_relative(name):
            raise InvalidInputError.for_field(
                field, name, ", a relative path, which workers cannot resolve; use an absolute path that they can read"
            )
        return name

    _map_names(spec, require_absolute)


def resolve_traffic_windows(spec: JobSpec, now: float) -> JobSpec:
    """Return the spec with absolute times for all captured traffic, see `DataSourceSpec.resolve_window`. Raises
    `InvalidInputError` for an empty window.

    Args:
        now: Unix seconds of the submission.
    """

    def resolve(field: str, source: DataSourceSpec) -> DataSourceSpec:
        try:
            return source.resolve_window(now) if source.is_traffic else source
        except ValueError as error:
            raise InvalidInputError.for_field(f"{field}.since", source.since, str(error)) from error

    return _map_sources(spec, resolve)


def is_relative(path: str) -> bool:
    """Whether a path depends on the process: its working directory, or its user's home."""
    return not path.startswith("/")


def _parse_path(name: str, kind: NameKind, field: str, *, relative_paths: bool) -> Path | None:
    """Return the path that a name stands for; None if it is not a path."""
    source: Any
    if kind == "location":
        source = parse_location(name, field=field)
    else:
        suffixes = DATA_SUFFIXES if kind == "data" else ()
        source = parse_source(name, field=field, suffixes=suffixes, relative_paths=relative_paths)
    return source.path if isinstance(source, PathSource) else None


def _make_source_absolute(source: Any) -> Any:
    name = source.get("name_or_path") if isinstance(source, dict) else None
    return {**source, "name_or_path": make_absolute(name, "data", "data.sources")} if isinstance(name, str) else source


def _map_names(spec: JobSpec, change: ChangeName) -> JobSpec:
    """Return the spec with `change` applied to every name that may be a path; unchanged sections are not copied."""
    model = _copy_with_changes(spec.model, name_or_path=change(spec.model.name_or_path, "model", "model.name_or_path"))
    tasks = tuple(_map_task(task, f"evaluation.tasks[{i}]", change) for i, task in enumerate(spec.evaluation.tasks))
    evaluation = _copy_with_changes(spec.evaluation, tasks=tasks)

    def change_source(field: str, source: DataSourceSpec) -> DataSourceSpec:
        return _copy_with_changes(source, name_or_path=change(source.name_or_path, "data", f"{field}.name_or_path"))

    return _map_sources(_copy_with_changes(spec, model=model, evaluation=evaluation), change_source)


def _map_sources(spec: JobSpec, change: Callable[[str, DataSourceSpec], DataSourceSpec]) -> JobSpec:
    """Return the spec with `change(JSON path, source)` for every data source."""
    sources = [change(field, source) for field, source in spec.list_sources()]
    own, of_rows = tuple(sources[: len(spec.data.sources)]), sources[len(spec.data.sources) :]
    rows = tuple(
        _copy_with_changes(task, source=source) for task, source in zip(spec.evaluation.rows, of_rows, strict=True)
    )
    data, evaluation = _copy_with_changes(spec.data, sources=own), _copy_with_changes(spec.evaluation, rows=rows)
    return _copy_with_changes(spec, data=data, evaluation=evaluation)


def _map_task(task: str | TaskSpec, field: str, change: ChangeName) -> str | TaskSpec:
    name, data_dir = get_task_name_and_data_dir(task)
    if is_task_file_name(name):
        name = change(name, "location", field)
    if isinstance(task, str):
        return name
    if data_dir is not None:
        data_dir = change(data_dir, "location", f"{field}.data_dir")
    return _copy_with_changes(task, name=name, data_dir=data_dir)


def _copy_with_changes(section: Section, **fields: Any) -> Section:
    """Return a copy of `section` with changed values, which count as set; itself if nothing differs."""
    changed = {name: value for name, value in fields.items() if getattr(section, name) != value}
    return section.model_copy(update=changed) if changed else section


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
