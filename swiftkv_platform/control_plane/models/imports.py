"""Import of students that were made elsewhere: they are listed, bounded, copied, checked, and registered as models
without a job.

Nothing is copied before the listed bytes fit the tenant's quota. Small files are copied to this machine, checked, and
uploaded from that copy; weights are hashed while they are streamed from store to store. The objects are written before
the row, so that a model always has its objects. Before the objects, a deletion is noted, with which the sweeper removes
what an interrupted import has left.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from swiftkv_platform.contract.attempts import ADAPTER_LINEAGE, MANIFEST, Manifest, ManifestFile
from swiftkv_platform.contract.verdicts import describe_undecided_gates, summarize_quality
from swiftkv_platform.control_plane.access.tenants import get_source_access
from swiftkv_platform.control_plane.base import Caller, new_id
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.control_plane.models.repository import Model, find_exceeded_document_limit, get_import_prefix
from swiftkv_platform.control_plane.models.responses import LineageResponse, make_comparison
from swiftkv_platform.control_plane.parsing import ParserPool
from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError, StorageError
from swiftkv_platform.families import STUDENT_SUFFIX
from swiftkv_platform.limits import MANIFEST_BYTES
from swiftkv_platform.private_directories import open_workspace
from swiftkv_platform.reports.model_card import render_model_card
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources import Boundary, S3Source
from swiftkv_platform.sources.model_directories import check_model_files
from swiftkv_platform.sources.names import is_relative
from swiftkv_platform.sources.peft import refuse_peft_adapter
from swiftkv_platform.sources.untrusted_files import CONFIG_BYTES, UnusableFileError, read_object, read_small_file
from swiftkv_platform.specs.job import JobName
from swiftkv_platform.storage.artifacts import delete_directory, hash_manifest, parse_manifest, write_manifest
from swiftkv_platform.storage.downloads import IncomingFile, check_sizes, list_bucket, list_directory
from swiftkv_platform.storage.object_store import join_object_key
from swiftkv_platform.web.limiters import Client

_FIELD = "source"
_NAME_ADAPTER: TypeAdapter[str] = TypeAdapter(JobName)
_ADAPTER_FILE = "swiftkv_adapter.json"


@dataclass(frozen=True)
class ModelImporter:
    """Imports student models for a tenant."""

    parts: Components
    settings: Settings
    client: Client
    """The import stops when this client disconnects."""
    parsers: ParserPool
    """Processes that check a model's small files."""

    def import_model(self, source: str, name: str | None, caller: Caller) -> Model:
        """Copy the student at `source`, a directory or an `s3://` prefix, into the store and register it.

        Raises `InvalidInputError` for a source that the tenant may not read, is too large, is no student, differs from
        its manifest, or changes meanwhile, `QuotaExceededError` for more models, or bytes, than the tenant may store,
        and `StorageError` and `DatabaseUnavailableError` if it is not stored.
        """
        try:
            with self._list_source(source, caller) as files, open_workspace() as directory:
                # 1. what is listed fits  2. small files are copied and checked  3. they are stored, and the weights
                self._check_capacity(files, caller)
                copy = directory / "model"
                copy.mkdir()
                stored = self._copy_small_files(files, copy)
                source_manifest = self.parsers.run(
                    self.client, _check_student, copy, stored, {file.name: file.size for file in files}, source
                )
                model = self._make_model(source_manifest, source, name, caller)
                return self._store_model(model, source_manifest, copy, files, stored)
        except OSError as error:
            raise StorageError(f"{_FIELD} is {source!r}, which cannot be copied: {error}", field=_FIELD) from error

    @contextmanager
    def _list_source(self, source: str, caller: Caller) -> Iterator[Sequence[IncomingFile]]:
        """List the files of the source, readable within the context."""
        access = get_source_access(self.settings, self.parts.policies, caller.tenant)
        place = access.parse_location(source, _FIELD)
        if isinstance(place, S3Source):
            with list_bucket(place, field=_FIELD) as files:
                yield files
        elif is_relative(source):
            raise _make_error(source, "a relative path; use an absolute path of the control plane's machine")
        elif not Path(place.path).is_dir():
            raise _make_error(
                source,
                "which is no directory on the control plane's machine; use a directory of that machine, or an "
                "s3:// prefix that this tenant may read",
            )
        else:
            yield list_directory(Path(place.path), access.boundary, field=_FIELD)

    def _check_capacity(self, files: Sequence[IncomingFile], caller: Caller) -> None:
        """Check the listed bytes against the operator's limit, the tenant's quotas, and the store's free space."""
        size = check_sizes(files, self.settings.max_import_bytes, field=_FIELD)
        self.parts.registry.check_import_quota(caller.tenant, size, self.parts.policies.get(caller.tenant))
        free = self.parts.objects.free_bytes()
        if free is not None and size > free:
            message = (
                f"{_FIELD} has {size} bytes, and the object store has {free} bytes free; delete models or files first"
            )
            raise StorageError(message, field=_FIELD)

    def _copy_small_files(self, files: Sequence[IncomingFile], copy: Path) -> dict[str, ManifestFile]:
        """Copy small files, and create an empty file for each other file, since checks look at names."""
        copied: dict[str, ManifestFile] = {}
        for file in files:
            path = copy / file.name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as target:
                if file.is_small:
                    digest = hashlib.sha256()
                    target.writelines(self._stream_file(file, digest.update))
                    copied[file.name] = ManifestFile(size=file.size, sha256=digest.hexdigest())
        copied.pop(MANIFEST, None)
        return copied

    def _make_model(self, source_manifest: Manifest, source: str, name: str | None, caller: Caller) -> Model:
        """Return the model without digest and size. Raises `InvalidInputError` if its documents cannot be stored."""
        lineage = {**source_manifest.lineage, "imported_from": source, "imported_by": caller.name}
        lineage.pop(ADAPTER_LINEAGE, None)
        model_id = new_id("mdl")
        model = Model(
            id=model_id,
            tenant=caller.tenant,
            name=name or _choose_name(source_manifest, source),
            job_id=None,
            attempt=0,
            created_at=int(self.parts.clock()),
            artifact_uri=join_object_key(self.parts.objects.uri, get_import_prefix(model_id)),
            manifest_digest="",
            size=0,
            lineage=lineage,
            metrics=source_manifest.metrics,
        )
        _check_lineage_and_metrics(model, source)
        return model

    def _store_model(
        self,
        model: Model,
        source_manifest: Manifest,
        copy: Path,
        files: Sequence[IncomingFile],
        stored: dict[str, ManifestFile],
    ) -> Model:
        """Store all files, the manifest and the row; on failure, remove all of them."""
        # 1. schedule the removal  2. small files, then weights  3. manifest  4. row, which cancels the removal
        self.parts.registry.schedule_import_cleanup(
            model.prefix, by=model.lineage["imported_by"], now=self.parts.clock()
        )
        try:
            for name in stored:
                self.client.check_connected()
                self.parts.objects.upload_file(copy / name, join_object_key(model.prefix, name))
            for file in files:
                if not file.is_small:
                    digest = hashlib.sha256()
                    key = join_object_key(model.prefix, file.name)
                    self.parts.objects.upload_chunks(self._stream_file(file, digest.update), key, file.size)
                    stored[file.name] = ManifestFile(size=file.size, sha256=digest.hexdigest())
                    _check_digest(source_manifest, stored, file.name, model.lineage["imported_from"])
            manifest = write_manifest(
                self.parts.objects, model.prefix, stored, kind="artifact", lineage=model.lineage, metrics=model.metrics
            )
            made = replace(model, manifest_digest=hash_manifest(manifest), size=manifest.size)
            self.parts.registry.register_import(
                made, policy=self.parts.policies.get(model.tenant), now=self.parts.clock()
            )
        except DatabaseUnavailableError:
            raise  # The row may be stored although no answer came.
        except Exception:
            delete_directory(self.parts.objects, model.prefix)
            raise
        return made

    def _stream_file(self, file: IncomingFile, observe: Callable[[bytes], None]) -> Iterator[bytes]:
        """Yield the file's chunks while the client is connected, and pass each to `observe`."""
        for chunk in file.stream_with_size_check():
            self.client.check_connected()
            observe(chunk)
            yield chunk


def _check_student(copy: Path, stored: Mapping[str, ManifestFile], sizes: Mapping[str, int], source: str) -> Manifest:
    """Check a student's small files and file names. Returns its manifest, an empty one if it has none. Raises
    `InvalidInputError`."""
    check_model_files(copy, Boundary.from_directories(copy), _FIELD)
    refuse_peft_adapter(copy, source, field=_FIELD)
    if _ADAPTER_FILE in sizes:
        raise _make_error(source, "which is an adapter; import the full model that `swiftkv export` writes")
    try:
        kind = read_object(copy / "config.json", CONFIG_BYTES).get("model_type")
    except (OSError, UnusableFileError) as error:
        raise _make_error(source, "which has no config.json that can be read; use a student's directory") from error
    if not str(kind).endswith(STUDENT_SUFFIX):
        raise _make_error(
            source, f"a model of type {str(kind)[:64]!r}, which is not a SwiftKV student; `swiftkv distill` makes one"
        )
    if not any(copy.glob("*.safetensors")):
        raise _make_error(source, "which has no weights (*.safetensors); copy the complete directory")
    if MANIFEST not in sizes:
        return Manifest(kind="artifact", files={}, created_at=0.0)
    try:
        manifest = parse_manifest(read_small_file(copy / MANIFEST, MANIFEST_BYTES.default))
    except UnusableFileError as error:
        why = f"whose {MANIFEST} {error}; remove it, or distill again"
        raise _make_error(source, why) from error
    if manifest.kind != "artifact":
        raise _make_error(
            source, f"a {manifest.kind}, not a model; use an artifact, such as the output of `swiftkv distill`"
        )
    found = {name: size for name, size in sizes.items() if name != MANIFEST}
    told = {name: file.size for name, file in manifest.files.items()}
    wrong = sorted(name for name in {*found, *told} if found.get(name) != told.get(name))
    if wrong:
        raise _make_manifest_mismatch_error(source, wrong)
    for name in stored:
        _check_digest(manifest, stored, name, source)
    return manifest


def _check_digest(source_manifest: Manifest, stored: Mapping[str, ManifestFile], name: str, source: str) -> None:
    """Raise `InvalidInputError` if a file differs from the source's manifest."""
    if source_manifest.files and source_manifest.files[name] != stored[name]:
        raise _make_manifest_mismatch_error(source, [name])


def _make_manifest_mismatch_error(source: str, names: Sequence[str]) -> InvalidInputError:
    which = f"whose {', '.join(names[:3])} differs from its {MANIFEST}"
    return _make_error(source, f"{which}; copy the original directory again")


def _check_lineage_and_metrics(model: Model, source: str) -> None:
    """Raise `InvalidInputError` for lineage or metrics that this program cannot display: any program may have
    written them."""
    fault = find_exceeded_document_limit(model)
    if fault is not None:
        raise _make_error(source, f"whose {MANIFEST} is too large: {fault}; remove it, or distill again")
    try:
        plain = "\\u0000" not in json.dumps([model.lineage, model.metrics], allow_nan=False)
        render_model_card(model.lineage, model.metrics, license_id=None).encode()
        make_comparison(model, model)
        describe_undecided_gates(model.metrics)
        summarize_quality(model.metrics)
        LineageResponse.from_model(model, [], [], [])
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        plain = False
    if not plain:
        raise _make_error(source, f"whose {MANIFEST} has lineage or metrics in an unknown format; remove that file")


def _choose_name(source_manifest: Manifest, source: str) -> str:
    spec: Any = source_manifest.lineage.get("spec")
    name = spec.get("name") if isinstance(spec, dict) else None
    name = name or source.rstrip("/").rpartition("/")[2]
    try:
        return _NAME_ADAPTER.validate_python(name)
    except ValidationError as error:
        message = f"name is missing, and {str(name)[:64]!r} is not a valid name; set one"
        raise InvalidInputError(message, field="name", value=name) from error


def _make_error(source: str, why: str) -> InvalidInputError:
    return InvalidInputError(f"{_FIELD} is {source!r}, {why}", field=_FIELD, value=source)
