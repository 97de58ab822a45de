"""Import of students that were made elsewhere: they are copied, checked, and registered as models without a job.

The objects are written before the row, so that a model always has its objects. Before the objects, a deletion is noted,
with which the sweeper removes what an interrupted import has left.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from swiftkv_platform.contract.attempts import ADAPTER_LINEAGE, MANIFEST, Manifest
from swiftkv_platform.contract.verdicts import undecided, verdict_sentence
from swiftkv_platform.control_plane.access.tenants import NO_LIMITS, Tenants
from swiftkv_platform.control_plane.base import Caller, Clock, new_id
from swiftkv_platform.control_plane.models.answers import LineageAnswer
from swiftkv_platform.control_plane.models.comparison import compare
from swiftkv_platform.control_plane.models.model import Model, imported_prefix
from swiftkv_platform.control_plane.models.rows import Registry
from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError, ModelError, StorageError
from swiftkv_platform.families import STUDENT_SUFFIX
from swiftkv_platform.reports.model_card import model_card
from swiftkv_platform.sources import Access, Boundary, S3Source
from swiftkv_platform.sources.models import check_model_files
from swiftkv_platform.sources.relative import is_relative
from swiftkv_platform.sources.small_files import CONFIG_BYTES, UnusableFileError, read_object
from swiftkv_platform.specs.job import JobName
from swiftkv_platform.storage.artifacts import delete_directory, describe_directory, manifest_digest, publish_directory
from swiftkv_platform.storage.downloads import download_below
from swiftkv_platform.storage.object_store import ObjectStore, join_key

_FIELD = "source"
_NAME: TypeAdapter[str] = TypeAdapter(JobName)
_ADAPTER = "swiftkv_adapter.json"


@dataclass(frozen=True)
class ModelImports:
    """Imports students for a tenant."""

    registry: Registry
    objects: ObjectStore
    _: KW_ONLY
    clock: Clock
    access: Callable[[str], Access]
    """Sources that a tenant may read."""
    policies: Tenants = NO_LIMITS

    def add(self, source: str, name: str | None, caller: Caller) -> Model:
        """Copy the student at `source`, a directory or an `s3://` prefix, into the store and register it.

        Raises:
            InvalidInputError: a source that the tenant may not read, is no student, or differs from its manifest.
            QuotaExceededError: more models, or bytes, than the tenant may store.
            StorageError, DatabaseUnavailableError: not stored.
        """
        access = self.access(caller.tenant)
        place = access.location(source, _FIELD)
        try:
            with tempfile.TemporaryDirectory(prefix="import-") as directory:
                copy = Path(directory) / "model"
                if isinstance(place, S3Source):
                    download_below(place.name, copy, ModelError, field=_FIELD)
                elif is_relative(source):
                    raise _unusable(source, "a relative path; use an absolute path of the control plane's machine")
                else:
                    _copy(Path(place.path), copy, access.boundary)
                return self._keep(copy, source, name, caller)
        except OSError as error:
            raise StorageError(f"{_FIELD} is {source!r}, which cannot be copied: {error}", field=_FIELD) from error

    def _keep(self, copy: Path, source: str, name: str | None, caller: Caller) -> Model:
        known = _checked(copy, source)
        files = describe_directory(copy)
        lineage = {**known.lineage, "imported_from": source, "imported_by": caller.name}
        lineage.pop(ADAPTER_LINEAGE, None)
        model_id = new_id("mdl")
        prefix = imported_prefix(model_id)
        model = Model(
            id=model_id,
            tenant=caller.tenant,
            name=name or _name(known, source),
            job_id=None,
            attempt=0,
            created_at=int(self.clock()),
            artifact_uri=join_key(self.objects.uri, prefix),
            manifest_digest="",
            size=sum(file.size for file in files.values()),
            lineage=lineage,
            metrics=known.metrics,
        )
        _check_readable(model, source)
        self.registry.note_import(prefix, by=caller.name, now=self.clock())
        try:
            manifest = publish_directory(
                self.objects, copy, prefix, kind="artifact", lineage=lineage, metrics=known.metrics
            )
            stored = Model(**{**vars(model), "manifest_digest": manifest_digest(manifest)})
            self.registry.add_model(stored, policy=self.policies.policy(caller.tenant), now=self.clock())
        except DatabaseUnavailableError:
            raise  # The row may be stored although no answer came.
        except Exception:
            delete_directory(self.objects, prefix)
            raise
        return stored


def _copy(source: Path, target: Path, boundary: Boundary) -> None:
    """Copy a directory within the boundary, so that nothing changes the files while they are checked."""
    if not source.is_dir():
        raise _unusable(
            str(source),
            "and the control plane's machine has no such directory; name one of that machine, or copy it to an s3:// "
            "prefix that this tenant may read",
        )
    boundary.check_tree(source, _FIELD, error=ModelError)
    for path in sorted(source.rglob("*")):
        if path.is_file():
            to = target / path.relative_to(source)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(boundary.check(path, _FIELD, error=ModelError), to)


def _checked(directory: Path, source: str) -> Manifest:
    """Check a student, and return its manifest, or an empty one if it has none. Raises `InvalidInputError`."""
    check_model_files(directory, Boundary.of(directory), _FIELD)
    if (directory / _ADAPTER).is_file():
        raise _unusable(source, "which is an adapter; import the whole model that `swiftkv export` makes of it")
    try:
        kind = read_object(directory / "config.json", CONFIG_BYTES).get("model_type")
    except (OSError, UnusableFileError) as error:
        raise _unusable(source, "which has no config.json that can be read; use a student's directory") from error
    if not str(kind).endswith(STUDENT_SUFFIX):
        raise _unusable(source, f"a {str(kind)[:64]!r}, which is not a SwiftKV student; `swiftkv distill` makes one")
    if not any(directory.glob("*.safetensors")):
        raise _unusable(source, "which has no weights (*.safetensors)")
    if not (directory / MANIFEST).is_file():
        return Manifest(kind="artifact", files={}, created_at=0.0)
    try:
        manifest = Manifest.model_validate_json((directory / MANIFEST).read_bytes())
    except ValidationError as error:
        raise _unusable(source, f"whose {MANIFEST} cannot be read; remove it, or distil again") from error
    found = describe_directory(directory)
    wrong = sorted(name for name in {*found, *manifest.files} if found.get(name) != manifest.files.get(name))
    if wrong or manifest.kind != "artifact":
        which = f"whose {', '.join(wrong[:3])} differs from its {MANIFEST}" if wrong else f"a {manifest.kind}"
        raise _unusable(source, f"{which}; copy it again from where it was made")
    return manifest


def _check_readable(model: Model, source: str) -> None:
    """Refuse a lineage or report that pages and answers could not read: any program may have written it."""
    try:
        plain = "\\u0000" not in json.dumps([model.lineage, model.metrics], allow_nan=False)
        model_card(model.lineage, model.metrics, licence=None).encode()
        compare(model, model)
        undecided(model.metrics)
        verdict_sentence(model.metrics)
        LineageAnswer.of(model, [], [], [])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        plain = False
    if not plain:
        raise _unusable(source, f"whose {MANIFEST} has lineage or metrics in another form; remove it")


def _name(known: Manifest, source: str) -> str:
    spec: Any = known.lineage.get("spec")
    name = spec.get("name") if isinstance(spec, dict) else None
    name = name or source.rstrip("/").rpartition("/")[2]
    try:
        return _NAME.validate_python(name)
    except ValidationError as error:
        message = f"name is missing, and {str(name)[:64]!r} is not a valid name; give one"
        raise InvalidInputError(message, field="name", value=name) from error


def _unusable(source: str, why: str) -> InvalidInputError:
    return InvalidInputError(f"{_FIELD} is {source!r}, {why}", field=_FIELD, value=source)
