"""Parse the name of a model or data set into one of five types: built-in, uploaded file, S3 address, path or hub id,
and make relative paths of a spec absolute, or refuse them. Reads nothing, except whether a relative path exists.

A relative path has a meaning only in the caller's working directory. In a worker's, the same name may not exist, or may
be a hub id.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from swiftkv_platform.contract.attempts import is_file_id
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.sources.layout import ENDINGS
from swiftkv_platform.specs import JobSpec, TaskSpec, is_path_like
from swiftkv_platform.specs.evaluation import get_task_name_and_data_dir, is_task_file_name

_BUILTIN = "builtin:"
_S3 = "s3://"
BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]")
"""Names of buckets."""
BUCKETS = "3 to 63 lower-case letters, digits, dots, hyphens"
TEMPORARY_PREFIX = ".tmp-"
"""File names a directory store keeps for objects being written; no key may contain such a segment."""
_MAX_KEY_BYTES = 1024
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_CONTROL = re.compile(r"[\x00-\x1f]")
_HUB_ID = re.compile(r"(?:(?P<organization>[A-Za-z0-9_][A-Za-z0-9_.-]*)/)?[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)
_LONGEST_NAME = 2048
"""Most bytes of a name; S3 keys have at most 1,024, paths 4,096."""
_LONGEST_SEGMENT = 255
"""Most bytes between two slashes, as in file systems."""
_SHOWN = 64
"""Most characters of a refused name in its message."""


@dataclass(frozen=True)
class BuiltinSource:
    """A source that ships with the package; its reader checks whether the name exists."""

    name: str


@dataclass(frozen=True)
class FileSource:
    """A file uploaded to the control plane; the name is its id."""

    name: str


@dataclass(frozen=True)
class S3Source:
    """An object, or everything below a prefix."""

    name: str

    @property
    def bucket(self) -> str:
        return self.name.removeprefix(_S3).partition("/")[0]

    @property
    def store(self) -> str:
        """Address of the bucket, in which keys are named as they are."""
        return f"{_S3}{self.bucket}"

    @property
    def key(self) -> str:
        """Key or prefix, taken literally: `#`, `?` and `%` have no special meaning."""
        return self.name.removeprefix(_S3).partition("/")[2].rstrip("/")

    def lies_below(self, root: str) -> bool:
        """Whether it is at or below the `s3://` prefix `root`, with `..` resolved."""
        path, prefix = (posixpath.normpath(uri.removeprefix(_S3)) for uri in (self.name, root))
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
Source = ModelSource | FileSource


def parse_source(name: str, *, field: str, suffixes: Collection[str] = (), relative_paths: bool = True) -> Source:
    """Parse a name. Raises `InvalidInputError` for one that no file system, store or hub could have.

    Args:
        suffixes: endings that make a name a path even if nothing with this name exists.
        relative_paths: whether a name that could be a hub id is taken for a path if this machine has one with this
            name. False if sources are restricted: control plane and workers have different working directories.
    """
    check_name(name, field)
    if name.startswith(_BUILTIN):
        return BuiltinSource(name)
    if name.startswith(_S3):
        return _s3(name, field)
    if is_file_id(name):
        return FileSource(name)
    is_path = is_path_like(name, suffixes) or _HUB_ID.fullmatch(name) is None
    # In a directory that this process may not enter, this is False, where `Path.exists` raises.
    if is_path or (relative_paths and os.path.exists(name)):  # noqa: PTH110
        return PathSource(name, _expanded(name, field))
    return HubSource(name)


def parse_location(name: str, *, field: str) -> S3Source | PathSource:
    """Parse a name that is never a hub id, such as a task's `data_dir`. Raises as `parse_source`."""
    check_name(name, field)
    return _s3(name, field) if name.startswith(_S3) else PathSource(name, _expanded(name, field))


def _s3(name: str, field: str) -> S3Source:
    source = S3Source(name)
    if BUCKET.fullmatch(source.bucket) is None:
        raise _refused(name, field, f"names no bucket; {BUCKETS} are accepted")
    fault = key_fault(source.key) if source.key else None
    if fault is not None:
        raise _refused(name, field, f"has a key that {fault}; s3://bucket/prefix is accepted")
    return source


def key_fault(key: str) -> str | None:
    """Return why `key` is no relative path of ordinary segments; None if it is one."""
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
        raise _refused(name, field, "holds a character that cannot be encoded") from error
    if _CONTROL.search(name) is not None:
        raise _refused(name, field, "holds a control character")
    if len(encoded) > _LONGEST_NAME:
        raise _refused(name, field, f"has {len(encoded)} bytes, and at most {_LONGEST_NAME} are accepted")
    if max(map(len, encoded.split(b"/"))) > _LONGEST_SEGMENT:
        raise _refused(name, field, f"has more than {_LONGEST_SEGMENT} bytes between two slashes")
    scheme = _SCHEME.match(name)
    if scheme is not None and not name.startswith(_S3):
        raise _refused(name, field, f"begins with {scheme[0]}; a path without it, {_S3} or a hub id is accepted")


def refuse_shadowed(name: str, field: str) -> None:
    """Raise `InvalidInputError` if a path with the hub id `name` exists, since `transformers` and `datasets` would read
    it instead."""
    if os.path.exists(name):  # noqa: PTH110
        why = ", a hub id, but the worker's working directory has something of that name"
        instead = "use an absolute path that the operator has opened, or another working directory"
        raise InvalidInputError.for_field(field, name, f"{why}; {instead}")


def leads_out(name: str) -> bool:
    """Whether a name that should lie below some directory may not: an absolute path, one with `..`, or a URL, including
    chained ones (`::`)."""
    path = PurePosixPath(name)
    return "::" in name or ":/" in name or path.is_absolute() or ".." in path.parts or name.startswith("~")


def _expanded(name: str, field: str) -> Path:
    try:
        return Path(name).expanduser()
    except RuntimeError as error:  # the home directory of an unknown user
        raise _refused(
            name, field, "begins with a user that does not exist on this machine; use an absolute path"
        ) from error


def _refused(name: str, field: str, why: str) -> InvalidInputError:
    shown = ascii(name[:_SHOWN]) + ("..." if len(name) > _SHOWN else "")
    return InvalidInputError(f"{field} is {shown}, which {why}", field=field, value=shown)


Section = TypeVar("Section", bound=BaseModel)
Kind = Literal["model", "data", "location"]
"""Kind of a named thing; a location is never a hub id."""
Change = Callable[[str, Kind, str], str]
"""(name, its kind, its place in the spec) -> new name."""


def absolute(name: str, kind: Kind, field: str) -> str:
    """Return `name`, made absolute if it is a path. Raises `InvalidInputError` if it is not a valid name."""
    path = _path(name, kind, field, relative_paths=True)
    return name if path is None else os.path.abspath(path)  # noqa: PTH100  # without resolving links


def absolute_paths(spec: JobSpec) -> JobSpec:
    """Return the spec with every path made absolute from this process's working directory. Raises `InvalidInputError`
    for a name that is not valid."""
    return _mapped(spec, absolute)


def absolute_change(place: str, value: Any) -> Any:
    """Return the value of the spec field at `place` with its paths made absolute."""
    if place == "model.name_or_path" and isinstance(value, str):
        return absolute(value, "model", place)
    if place == "data.sources" and isinstance(value, list):
        return [_absolute_source(source) for source in value]
    return value


def refuse_relative_paths(spec: JobSpec, *, relative_paths: bool) -> None:
    """Raise `InvalidInputError` for the first relative path, or path in another user's home: workers would resolve it
    differently. `relative_paths`: as for `parse_source`."""

    def check(name: str, kind: Kind, field: str) -> str:
        path = _path(name, kind, field, relative_paths=relative_paths)
        if path is not None and is_relative(name):
            raise InvalidInputError.for_field(
                field, name, ", a relative path, which workers cannot resolve; use an absolute path that they can read"
            )
        return name

    _mapped(spec, check)


def is_relative(path: str) -> bool:
    """Whether another process sees something else at this path: below its own directory, or another user's home."""
    return not path.startswith("/")


def _path(name: str, kind: Kind, field: str, *, relative_paths: bool) -> Path | None:
    """Return the path that a name stands for; None if it is not a path."""
    source: Any
    if kind == "location":
        source = parse_location(name, field=field)
    else:
        suffixes = ENDINGS if kind == "data" else ()
        source = parse_source(name, field=field, suffixes=suffixes, relative_paths=relative_paths)
    return source.path if isinstance(source, PathSource) else None


def _absolute_source(source: Any) -> Any:
    name = source.get("name_or_path") if isinstance(source, dict) else None
    return {**source, "name_or_path": absolute(name, "data", "data.sources")} if isinstance(name, str) else source


def _mapped(spec: JobSpec, change: Change) -> JobSpec:
    """Return the spec with `change` applied to every name that may be a path; unchanged sections are not copied."""
    model = _updated(spec.model, name_or_path=change(spec.model.name_or_path, "model", "model.name_or_path"))
    sources = tuple(
        _updated(source, name_or_path=change(source.name_or_path, "data", f"data.sources[{i}].name_or_path"))
        for i, source in enumerate(spec.data.sources)
    )
    tasks = tuple(_task(task, f"evaluation.tasks[{i}]", change) for i, task in enumerate(spec.evaluation.tasks))
    data, evaluation = _updated(spec.data, sources=sources), _updated(spec.evaluation, tasks=tasks)
    return _updated(spec, model=model, data=data, evaluation=evaluation)


def _task(task: str | TaskSpec, field: str, change: Change) -> str | TaskSpec:
    name, data_dir = get_task_name_and_data_dir(task)
    if is_task_file_name(name):
        name = change(name, "location", field)
    if isinstance(task, str):
        return name
    if data_dir is not None:
        data_dir = change(data_dir, "location", f"{field}.data_dir")
    return _updated(task, name=name, data_dir=data_dir)


def _updated(section: Section, **fields: Any) -> Section:
    """Return a copy of `section` with changed values, which count as set; itself if nothing differs."""
    changed = {name: value for name, value in fields.items() if getattr(section, name) != value}
    return section.model_copy(update=changed) if changed else section
