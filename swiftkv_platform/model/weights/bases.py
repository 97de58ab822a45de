"""Teachers and base models by name: resolve a name under the access rules of `sources`, and download the model. The
caller passes the function that downloads from an object store.

GGUF files (llama.cpp's format, which needs the package `gguf`) become model directories, cached on each machine, with
their quantized weights in bfloat16. PEFT adapters are merged into their base models, see `peft`.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from filelock import FileLock
from huggingface_hub.constants import HF_HOME
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.configuration import find_directory
from swiftkv_platform.model.weights.peft import merge_adapter
from swiftkv_platform.model.weights.writing import create_directory_atomically
from swiftkv_platform.private_directories import ensure_private_directory, is_private
from swiftkv_platform.sources import (
    UNBOUNDED,
    UNRESTRICTED,
    Access,
    Boundary,
    BuiltinSource,
    HubSource,
    PathSource,
    S3Source,
)
from swiftkv_platform.sources.gguf import GGUF_SUFFIX, read_gguf_config
from swiftkv_platform.sources.model_directories import check_model_files, fetch_model_directory
from swiftkv_platform.sources.names import ModelSource, refuse_shadowed_id
from swiftkv_platform.sources.peft import (
    BASE_FIELD,
    explain_base_errors,
    parse_base,
    read_lora_config,
    refuse_other_weights,
)
from swiftkv_platform.sources.teacher_config import TEACHER_FIELD, find_builtin_teacher

Download = Callable[[str], Path]
"""Function that downloads everything below an `s3://` address to a directory, under the rules. Raises `ModelError`."""


def resolve_model_directory(
    name: str,
    revision: str | None = None,
    *,
    access: Access = UNRESTRICTED,
    download: Download | None = None,
    field: str = TEACHER_FIELD,
) -> str:
    """Return a name that transformers can load: a directory, or an unchanged hub id if access is unrestricted. A GGUF
    file, or a PEFT adapter with its base model, becomes a directory in this machine's cache.

    Args:
        revision: hub revision.
        access: rules on what may be read; they apply to a directory, to every file in it, and to an adapter's base.
        download: function for `s3://` addresses; None: they are refused.
        field: name of the input in error messages.

    Raises:
        ModelError: the built-in teacher is unknown, nothing is below the address, the model needs remote code or files
            that may not be read, or an adapter cannot be merged.
        InvalidInputError: the name is not allowed, or a path in the working directory shadows the hub id.
    """
    source = access.parse_model(name, field)
    found = _find_model(source, revision, access, download, field)
    # 1. is it a PEFT adapter?
    boundary = access.boundary if isinstance(source, PathSource) else UNBOUNDED
    directory = find_directory(found, {} if revision is None else {"revision": revision})
    lora = read_lora_config(directory, name, field=field, boundary=boundary)
    if lora is None:
        return found
    # 2. find it and its base, which cannot be an adapter too
    adapter = fetch_model_directory(found, revision, field=field)
    refuse_other_weights(adapter, name, field=field)
    with explain_base_errors(field, name):
        base_source = parse_base(lora, access)
        base = _find_model(base_source, lora.revision, access, download, BASE_FIELD)
        base_directory = fetch_model_directory(base, lora.revision, field=BASE_FIELD)
    # 3. merge them, beside a downloaded base, which is deleted after use
    cache = base_directory.parent / "merged" if isinstance(base_source, S3Source) else None
    return str(merge_adapter(adapter, lora, base_directory, name=name, field=field, boundary=boundary, cache=cache))


def _find_model(
    source: ModelSource, revision: str | None, access: Access, download: Download | None, field: str
) -> str:
    match source:
        case BuiltinSource(name):
            path = find_builtin_teacher(name, field=field)
            return str(path if path.suffix != GGUF_SUFFIX else convert_gguf(path, name, field=field))
        case S3Source(name):
            if download is None:
                why = ", which cannot be downloaded here; use a directory with the model's files"
                raise ModelError.for_field(field, name, why)
            return str(download(name))
        case PathSource(name, path):
            if path.suffix == GGUF_SUFFIX:
                return str(convert_gguf(path, name, field=field, boundary=access.boundary))
            if not path.exists() and not access.is_restricted:
                raise ModelError.for_field(field, name, ": no such file or directory here")
            if not access.is_restricted:
                return str(path)
            directory = access.boundary.check_path(path, field, error=ModelError)
            if not directory.is_dir():
                raise ModelError(f"{field} is {name!r}: no such directory", field=field, value=name)
            check_model_files(directory, access.boundary, field)
            return str(directory)
        case HubSource(name):
            if not access.is_restricted:
                return name
            refuse_shadowed_id(name, field)
            directory = fetch_model_directory(name, revision, field=field)
            check_model_files(
                directory, Boundary.from_directories(directory.parents[1]), field
            )  # loaders read these files
            return str(directory)


GGUF_CACHE = Path(HF_HOME) / "swiftkv" / "gguf"
"""Cache of converted directories by digest of their file, next to the hub's cache, which operators size and mount."""
_CONVERSION_VERSION = 2
"""Version of the conversion from GGUF, part of the name of a converted directory."""
_COPY_CHUNK_BYTES = 1 << 24


def convert_gguf(
    file: Path,
    name: str | None = None,
    *,
    field: str = "model.name_or_path",
    boundary: Boundary = UNBOUNDED,
) -> Path:
    """Return the model directory for a GGUF file, converting the file if this machine has not done so before.

    A private copy is converted, since the owner could change the file, or add files to its directory, once the digest
    is known. The conversion holds the whole model in memory, in bfloat16.

    Args:
        name: name of the file in error messages.
        field: its place in the spec, for error messages.
        boundary: where the file must lie.

    Raises:
        ModelError: the file is not one that `read_gguf_config` and transformers read, it changes while it is read, the
            cache cannot be used, or the package `gguf` is missing.
    """
    name = str(file) if name is None else name
    read_gguf_config(file, name, field=field, boundary=boundary)  # refuses other files before they are copied
    try:
        ensure_private_directory(GGUF_CACHE)
    except PermissionError as error:
        raise ModelError.for_field(field, name, f": it cannot be converted in the cache: {error}") from error
    with boundary.open_file(file, field, error=ModelError) as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
        directory = GGUF_CACHE / f"{digest[:32]}-{_CONVERSION_VERSION}"
        if not is_private(directory):
            with FileLock(GGUF_CACHE / f"{directory.name}.lock"):
                if not is_private(directory):
                    _convert_copy(stream, digest, directory, name, field)
    return directory


def _convert_copy(stream: BinaryIO, digest: str, directory: Path, name: str, field: str) -> None:
    """Convert a copy of an open file to `directory`. Raises `ModelError` if the copy has another digest."""
    with tempfile.TemporaryDirectory(prefix=".file-", dir=directory.parent) as workspace:
        # The copy is alone in its directory: transformers also reads other files there, e.g. tokenizer_config.json.
        copy = Path(workspace) / f"model{GGUF_SUFFIX}"
        stream.seek(0)
        with copy.open("xb") as target:
            shutil.copyfileobj(stream, target, _COPY_CHUNK_BYTES)
        with copy.open("rb") as copied:
            if hashlib.file_digest(copied, "sha256").hexdigest() != digest:
                raise ModelError.for_field(field, name, ", which changes while it is read; use it once it is written")
        with create_directory_atomically(directory) as converted:
            _write_converted_model(copy, read_gguf_config(copy, name, field=field), converted, name, field)
            converted.chmod(0o700)


def _write_converted_model(file: Path, config: Mapping[str, Any], target: Path, name: str, field: str) -> None:
    location = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        tokenizer = AutoTokenizer.from_pretrained(**location)
        model, report = load(
            **location,
            config=AutoConfig.for_model(**config),
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
            output_loading_info=True,
        )
    except ImportError as error:
        raise ModelError.for_field(
            field, name, ": GGUF files are read with the package gguf: pip install gguf"
        ) from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, AssertionError, RuntimeError) as error:
        raise ModelError.for_field(field, name, f": transformers cannot read it ({type(error).__name__})") from error
    if wrong := {kind: names for kind, names in report.items() if names}:  # transformers would use random weights
        raise ModelError.for_field(field, name, f": its tensors do not match the model in its header: {wrong}")
    _copy_without_quantization(model, tokenizer).save_pretrained(target)
    tokenizer.save_pretrained(target)


def _copy_without_quantization(loaded: Any, tokenizer: Any) -> Any:
    """Move the weights to a model that was never quantized, since transformers saves only such models."""
    values = {key: value for key, value in loaded.config.to_dict().items() if key != "quantization_config"}
    values |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    with torch.device("meta"):
        model = type(loaded)._from_config(type(loaded.config).from_dict(values), dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig.from_model_config(model.config)
    return model
