"""Access rules for a tenant's specs: directories and object-store prefixes that the operator opens. Reads nothing.

The platform reads sources with its own credentials, so without such rules a tenant could train on, and then generate,
another's files.
"""

from __future__ import annotations

import os.path
import posixpath
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs import JobSpec, looks_like_a_path

_S3 = "s3://"
_BUILTIN = "builtin:"
_TENANT = "{tenant}"


@dataclass(frozen=True)
class SourceRules:
    """Everything built in and on the hub is open; local paths and `s3://` addresses where they lie below a root."""

    roots: Sequence[str] | None
    """Directories and `s3://` prefixes, in which `{tenant}` stands for the caller's tenant; None opens everything."""

    def check(self, spec: JobSpec, tenant: str) -> None:
        """Raises `InvalidInputError` naming the first field that reads what is closed."""
        if self.roots is None:
            return
        roots = [root.replace(_TENANT, tenant) for root in self.roots]
        for index, task in enumerate(spec.evaluation.tasks):
            name = task if isinstance(task, str) else task.name
            if name.endswith((".yaml", ".yml")):
                raise InvalidInputError(
                    f"evaluation.tasks[{index}] is the file {name!r}, which may name functions to run; where sources "
                    "have rules, tasks that the harness knows or `builtin:` ones would do",
                    field=f"evaluation.tasks[{index}]",
                    value=name,
                )
        for field, name in _addresses(spec):
            if not _is_open(name, roots):
                opened = ", ".join(roots) or "none"
                raise InvalidInputError(
                    f"{field} is {name!r}, which tenant {tenant!r} may not read; open to it are the hub, built-in "
                    f"sources, and what lies below: {opened}",
                    field=field,
                    value=name,
                )


OPEN = SourceRules(roots=None)
"""Rules for a server that only its own machine's user reaches."""


def _addresses(spec: JobSpec) -> Iterator[tuple[str, str]]:
    yield "model.name_or_path", spec.model.name_or_path
    for index, source in enumerate(spec.data.sources):
        yield f"data.sources[{index}].name_or_path", source.name_or_path
    for index, task in enumerate(spec.evaluation.tasks):
        if not isinstance(task, str) and task.data_dir is not None:
            where = task.data_dir  # never a hub id
            yield f"evaluation.tasks[{index}].data_dir", where if where.startswith(_S3) else str(Path(where).absolute())


def _is_open(name: str, roots: Sequence[str]) -> bool:
    if name.startswith(_BUILTIN):
        return True
    if name.startswith(_S3):
        path = posixpath.normpath(name.removeprefix(_S3))
        prefixes = [posixpath.normpath(root.removeprefix(_S3)) for root in roots if root.startswith(_S3)]
        return any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)
    local = Path(name).expanduser()
    if not (local.exists() or looks_like_a_path(name) or ":" in name):
        return True  # a hub id
    resolved = Path(os.path.realpath(local))  # a link inside a root may lead out of it
    directories = [Path(os.path.realpath(root)) for root in roots if not root.startswith(_S3)]
    return any(resolved.is_relative_to(directory) for directory in directories)
