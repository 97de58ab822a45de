"""Publish models outside of the platform's store: to hub repositories, buckets and directories.

A model is copied file by file, so that this machine stores one weight file at a time. Idempotent. Credentials come from
this process's environment (`HF_TOKEN`, `AWS_*`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from swiftkv_platform.contract.attempts import MANIFEST, Manifest
from swiftkv_platform.errors import ConflictError, InvalidInputError, ObjectNotFoundError, StorageError
from swiftkv_platform.limits import MANIFEST_BYTES
from swiftkv_platform.logs import redact
from swiftkv_platform.sources import UNBOUNDED, Boundary
from swiftkv_platform.specs.job import get_repository_name, parse_target_kind
from swiftkv_platform.storage.artifacts import fetch_file, parse_manifest, read_manifest, to_canonical_json
from swiftkv_platform.storage.object_store import ObjectStore, open_store, read_small_object

if TYPE_CHECKING:
    from huggingface_hub import HfApi

MODEL_CARD_FILE = "README.md"
_IN_PROGRESS_MARKER = "publishing.json"
"""Object that marks an incomplete target: the manifest of the model being copied."""
_FIELD = "publish.to"


def publish(
    source: ObjectStore,
    key: str,
    target: str,
    *,
    card: Callable[[Manifest], str],
    private: bool = True,
    targets: Sequence[str] | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> str:
    """Copy the artifact at `key`, with its card, to `target`, and return the target's URL.

    Args:
        card: renders the card of an artifact without one.
        private: visibility of a new repository.
        targets: directories that a target directory must be within, after resolving links; None allows all.
        progress: called with copied and total bytes.

    Raises:
        InvalidInputError: the target directory, or a directory in it, is outside of `targets`.
        ObjectNotFoundError: the artifact is not complete.
        ArtifactCorruptError: a file differs from its manifest.
        ConflictError: the target has other files than a model.
        StorageError: the target cannot be written.
    """
    manifest = read_manifest(source, key)
    extra = {} if MODEL_CARD_FILE in manifest.files else {MODEL_CARD_FILE: card(manifest).encode()}
    extra[MANIFEST] = to_canonical_json(manifest)
    files = _fetch_files(source, key, manifest, progress)
    if parse_target_kind(target) == "hub":
        return _publish_to_hub(files, manifest, extra, get_repository_name(target), private=private)
    _publish_to_store(files, manifest, extra, open_store(target), _TargetDirectory.for_target(target, targets))
    return target


@dataclass(frozen=True)
class _TargetDirectory:
    """Target directory, and the boundary that it must be within, since tenants may have placed links."""

    directory: Path | None
    """None for a bucket, which has no links."""
    boundary: Boundary

    @classmethod
    def for_target(cls, target: str, targets: Sequence[str] | None) -> Self:
        if not target.startswith("/") or targets is None:
            return cls(None, UNBOUNDED)
        return cls(Path(target), Boundary.from_directories(*(each for each in targets if each.startswith("/"))))

    def check_path(self, name: str) -> str:
        """Return `name`. Raises `InvalidInputError` if, after resolving links, the target is outside of the allowed
        directories, or the file outside of the target."""
        if self.directory is not None:
            inside = Boundary.from_directories(self.directory)
            parent = (self.directory / name).parent
            if not (self.boundary.contains(self.directory) and inside.contains(parent)):
                why = f", where {name!r} links to a directory that this tenant may not write"
                raise InvalidInputError.for_field(_FIELD, str(self.directory), f"{why}; use a directory without links")
        return name


def _publish_to_store(
    files: Iterator[tuple[str, Path]],
    manifest: Manifest,
    extra: Mapping[str, bytes],
    target: ObjectStore,
    target_directory: _TargetDirectory,
) -> None:
    """Copy a model to a store. The manifest is deleted first and written last, so that a partial copy is incomplete."""
    for name in (_IN_PROGRESS_MARKER, *manifest.files, *extra):
        target_directory.check_path(name)
    before = _read_manifest(target, MANIFEST)
    if before == manifest:
        return
    marked = _read_manifest(target, _IN_PROGRESS_MARKER)
    if before is None and marked is None and next(target.list(""), None) is not None:
        raise ConflictError.for_field(_FIELD, target.uri, ", which has other files than a model; use an empty target")
    target.put_bytes(_IN_PROGRESS_MARKER, extra[MANIFEST])
    target.delete(MANIFEST)
    for stale in {name for each in (before, marked) if each is not None for name in each.files} - {*manifest.files}:
        target.delete(target_directory.check_path(stale))
    for name, path in files:
        target.upload_file(path, target_directory.check_path(name))
    for name in sorted(extra, key=lambda name: name == MANIFEST):
        target.put_bytes(target_directory.check_path(name), extra[name])
    target.delete(_IN_PROGRESS_MARKER)


def _read_manifest(store: ObjectStore, key: str) -> Manifest | None:
    try:
        return parse_manifest(read_small_object(store, key, MANIFEST_BYTES.default))
    except ObjectNotFoundError:
        return None
    except ValueError as error:
        why = f", whose {key} is not a model's manifest; use an empty target"
        raise ConflictError.for_field(_FIELD, store.uri, why) from error


def _fetch_files(
    source: ObjectStore, key: str, manifest: Manifest, progress: Callable[[int, int], None]
) -> Iterator[tuple[str, Path]]:
    """Yield (name, local copy) of each file of an artifact; the copy is deleted before the next file."""
    done, total = 0, sum(file.size for file in manifest.files.values())
    progress(done, total)
    for name, expected in sorted(manifest.files.items()):
        with tempfile.TemporaryDirectory(prefix="publish-") as directory:
            path = Path(directory) / name
            fetch_file(source, f"{key}/{name}", path, expected)
            yield name, path
        done += expected.size
        progress(done, total)


def _publish_to_hub(
    files: Iterator[tuple[str, Path]], manifest: Manifest, extra: Mapping[str, bytes], repository: str, *, private: bool
) -> str:
    """Copy a model to a hub repository in one commit; missing large files are uploaded first."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # they would fill the log
    api = HfApi(library_name="swiftkv-platform")
    with _translate_hub_errors(repository):
        url = str(api.create_repo(repository, private=private, exist_ok=True))
        _check_repository(api, repository)
        operations: list[Any] = []
        for name, path in files:
            operation = CommitOperationAdd(path_in_repo=name, path_or_fileobj=path)
            api.preupload_lfs_files(repository, additions=[operation])
            if operation.path_or_fileobj:  # a small file, sent with the commit
                operation = CommitOperationAdd(path_in_repo=name, path_or_fileobj=path.read_bytes())
            operations.append(operation)
        operations += [CommitOperationAdd(path_in_repo=name, path_or_fileobj=data) for name, data in extra.items()]
        operations += _list_deletions(api, repository, keep={operation.path_in_repo for operation in operations})
        lineage = manifest.lineage
        message = f"Publish {lineage.get('spec', {}).get('name', 'model')} of job {lineage.get('job_id')}"
        api.create_commit(repository, operations, commit_message=message)
    return url


def _check_repository(api: HfApi, repository: str) -> None:
    """Raise `ConflictError` if the repository has files but no model of this platform."""
    present = set(api.list_repo_files(repository))
    if present - {MODEL_CARD_FILE, ".gitattributes"} and MANIFEST not in present:
        why = ", which has other files than a model of this platform; use another name"
        raise ConflictError.for_field(_FIELD, f"hf://{repository}", why)


def _list_deletions(api: HfApi, repository: str, *, keep: set[str]) -> list[Any]:
    """Return deletions of weight files of an earlier model."""
    from huggingface_hub import CommitOperationDelete

    present = api.list_repo_files(repository)
    return [CommitOperationDelete(name) for name in present if name.endswith(".safetensors") and name not in keep]


@contextmanager
def _translate_hub_errors(repository: str) -> Iterator[None]:
    import httpx
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except (HfHubHTTPError, httpx.HTTPError, ConnectionError, RuntimeError) as error:  # the last: failed uploads
        first = redact(str(error)).strip().splitlines()
        why = f", and the hub refuses it ({first[0] if first else type(error).__name__})"
        instead = "use a repository that the workers' HF_TOKEN may write"
        raise StorageError.for_field(_FIELD, f"hf://{repository}", f"{why}; {instead}") from error
