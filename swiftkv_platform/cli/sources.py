"""Resolve model names of commands: built-in, directory, GGUF file, object store or hub."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from swiftkv_platform.contract.attempts import MANIFEST
from swiftkv_platform.errors import DataError, InvalidInputError, ModelError
from swiftkv_platform.families import refuse_student
from swiftkv_platform.installing import make_install_command
from swiftkv_platform.limits import MANIFEST_BYTES
from swiftkv_platform.planning import read_config
from swiftkv_platform.sources import UNRESTRICTED, BuiltinSource, HubSource, PathSource, parse_source
from swiftkv_platform.sources.gguf import GGUF_SUFFIX
from swiftkv_platform.sources.loader_rules import ADAPTER_FILE
from swiftkv_platform.sources.peft import LoraConfig, explain_base_errors, parse_base_model, parse_lora_config
from swiftkv_platform.sources.teacher_config import TEACHER_FIELD, find_adapter, read_teacher_config
from swiftkv_platform.sources.untrusted_files import UnusableFileError, read_object, read_small_file
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.artifacts import parse_manifest
from swiftkv_platform.storage.downloads import make_model_download
from swiftkv_platform.storage.object_store import open_store


def read_model_config(name: str) -> dict[str, Any]:
    """Read a model's configuration, without weights, from a directory, GGUF file, `config.json`, `s3://` prefix,
    built-in teacher or hub id; for a PEFT adapter, that of its base model. Raises `ModelError` if there is none, and
    `StorageError` if the store is unavailable.
    """
    if Path(name).suffix == ".json":
        if not Path(name).exists():
            raise ModelError.for_field("model", name, ": no such file or directory here")
        return read_config(name)
    config = read_teacher_config(name, _read_object, field="model")
    if config is not None:
        return config
    # a hub id, or an adapter whose base model is one
    source = UNRESTRICTED.parse_model(name, "model")
    is_hub_id = isinstance(source, HubSource)
    adapter = _download_adapter(name) if is_hub_id else find_adapter(source, _read_object, field="model")
    if adapter is None:
        return read_config(_download_config(name))
    with explain_base_errors("model", name):
        base, base_name = parse_base_model(adapter, UNRESTRICTED), adapter.base_model_name_or_path
        if isinstance(base, HubSource):
            return read_config(_download_config(base_name, adapter.revision))
        return read_model_config(base_name)


def resolve_model_path(name: str) -> str:
    """Return a path or hub id that transformers can load. A built-in teacher, GGUF file or PEFT adapter becomes a
    directory. Raises `InvalidInputError` for other names.
    """
    match parse_source(name, field="model", suffixes=(GGUF_SUFFIX,)):
        case BuiltinSource() | HubSource():
            pass
        case PathSource(path=path) if os.path.isdir(path) or path.suffix == GGUF_SUFFIX:  # noqa: PTH112 (which raises for some)
            read_teacher_config(name, _read_object, field="model")
        case _:
            raise ModelError.for_field(
                "model", name, ": no such directory here; use a directory, a .gguf file or a hub id"
            )
    from swiftkv_platform.model.weights.bases import resolve_model_directory

    return resolve_model_directory(name, field="model")


def check_local_sources(spec: JobSpec) -> None:
    """Check the teacher's configuration and that paths of data exist, before Ray starts. Raises `ModelError`,
    `DataError` and `StorageError`."""
    config = read_teacher_config(spec.model.name_or_path, _read_object)
    if config is not None:
        refuse_student(config.get("model_type"), spec.model.name_or_path, TEACHER_FIELD)
    for source_field, source in spec.list_sources():
        field = f"{source_field}.name_or_path"
        match UNRESTRICTED.parse_data(source.name_or_path, field):
            case PathSource(name=name, path=path) if not path.exists():
                raise DataError.for_field(field, name, ": no such file or directory here")
            case _:
                pass


@contextmanager
def open_base_model(name: str | None, revision: str | None) -> Iterator[str | None]:
    """Yield the directory or hub id of an adapter's base model, or None without a name. A model in an object store is
    downloaded for the context."""
    if name is None:
        yield None
        return
    from swiftkv_platform.model.weights.bases import resolve_model_directory

    with TemporaryDirectory(prefix="swiftkv-base-") as workspace:
        download = make_model_download(Path(workspace), access=UNRESTRICTED, field="base")
        yield resolve_model_directory(name, revision, download=download, field="base")


def read_artifact_teacher(directory: str) -> tuple[str, str | None]:
    """Return (name, revision or None) of an artifact's teacher. Raises `InvalidInputError` without manifest."""
    manifest = Path(directory) / MANIFEST
    if not manifest.is_file():
        raise InvalidInputError(
            f"--base is missing, and {directory!r} has no {MANIFEST} that names its teacher; use --base TEACHER",
            field="base",
        )
    try:
        lineage = parse_manifest(read_small_file(manifest, MANIFEST_BYTES.default)).lineage
    except UnusableFileError as error:
        message = f"--base is missing, and the {MANIFEST} of {directory!r} {error}; use --base TEACHER"
        raise InvalidInputError(message, field="base", value=directory) from error
    return lineage["teacher"], lineage["revision"]


def read_adapter_base(directory: str) -> str | None:
    """Return the base model of the adapter in a directory if it is in an object store, else None."""
    from swiftkv_platform.configs.adapter import read_adapter

    adapter = read_adapter(Path(directory))
    return adapter.base.name_or_path if adapter and adapter.base.name_or_path.startswith("s3://") else None


def _read_object(store: str, key: str) -> bytes:
    return open_store(store).get_bytes(key)


def _download_adapter(name: str) -> LoraConfig | None:
    """Return the configuration of a PEFT adapter on the hub; None for other models, or if the hub is unavailable."""
    try:
        from huggingface_hub import hf_hub_download

        values = read_object(Path(hf_hub_download(name, ADAPTER_FILE)))
    except (OSError, ValueError, ModuleNotFoundError):  # reading config.json reports what is wrong
        return None
    return parse_lora_config(values, name, "model")


def _download_config(name: str, revision: str | None = None) -> str:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError
    except ModuleNotFoundError as error:
        raise ModelError(
            f"{name!r} is not a local file or directory; a hub id needs huggingface_hub "
            f"({make_install_command('model')})",
            field="model",
            value=name,
        ) from error
    try:
        return hf_hub_download(name, "config.json", revision=revision)
    except (OSError, HfHubHTTPError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(
            f"{name!r} is not a local file or directory, and the hub returned no config.json for it ({reason})",
            field="model",
            value=name,
        ) from error
