"""Teachers and base models by name: resolve a name under the access rules of `sources`, and download the model. The
caller passes the function that downloads from an object store.

GGUF files (llama.cpp's format, which needs the package `gguf`) become model directories, cached on each machine, with
their quantized weights in bfloat16. PEFT LoRA adapters are merged into their base models: a new directory, which
everything else reads like any model. The base is streamed tensor by tensor. Merged directories are cached on each
machine, by the adapter's content and by path and change times of the base's files.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from filelock import FileLock
from huggingface_hub.constants import HF_HOME
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from swiftkv_platform.errors import ModelError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.model.configuration import find_directory, read_config
from swiftkv_platform.model.tokenizers import has_tokenizer
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.model.weights.loading import EMBEDDING, HEAD, TIED_NAMES, resolve_tied_head
from swiftkv_platform.model.weights.quantization import is_quantized
from swiftkv_platform.model.weights.writing import copy_companion_files, create_directory_atomically, write_model_shards
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
from swiftkv_platform.sources.cards import read_license
from swiftkv_platform.sources.gguf import GGUF_SUFFIX, read_gguf_config
from swiftkv_platform.sources.loader_rules import ADAPTER_FILE, CONFIG
from swiftkv_platform.sources.model_directories import TOKENIZER_FILES, check_model_files, fetch_model_directory
from swiftkv_platform.sources.names import ModelSource, refuse_shadowed_id
from swiftkv_platform.sources.peft import (
    BASE_FIELD,
    MERGE_ADVICE,
    PEFT_WEIGHTS,
    LoraConfig,
    explain_base_errors,
    parse_base_model,
    read_lora_config,
    refuse_other_weights,
)
from swiftkv_platform.sources.teacher_config import TEACHER_FIELD, find_builtin_teacher
from swiftkv_platform.sources.untrusted_files import read_object

PEFT_CACHE = Path(HF_HOME) / "swiftkv" / "peft"
"""Cache of merged directories, next to the hub's cache, which operators size and mount."""
_MERGE_VERSION = 1
"""Version of the merge, part of the name of a merged directory."""
_ROWS = 1024
"""Number of rows of a weight that are merged at a time."""
_MAX_SHOWN_NAMES = 3
_PREFIX = "base_model.model."
_PART = re.compile(
    r"(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|lora_magnitude_vector)(\.weight)?"
)


def merge_adapter(
    adapter: Path,
    lora: LoraConfig,
    base: Path,
    *,
    name: str,
    field: str,
    boundary: Boundary = UNBOUNDED,
    cache: Path | None = None,
) -> Path:
    """Return the directory of the model that a PEFT adapter makes of its base, merging them if this machine has not
    done so before.

    A private copy of the adapter is merged, since its owner could change it once its digest is known.

    Args:
        adapter: the adapter's directory.
        base: the base model's directory.
        name: name of the adapter in messages.
        field: field of the input that names the adapter.
        boundary: where the adapter's files must lie.
        cache: directory of merged directories; None: this machine's cache.

    Raises:
        ModelError: the base is quantized or cannot be read, the adapter's tensors do not fit it, the adapter changes
            while it is read, or the cache cannot be used.
    """
    cache = PEFT_CACHE if cache is None else cache
    with explain_base_errors(field, name):
        config = read_config(base, field=BASE_FIELD)
        if is_quantized(config):
            why = f", which is quantized; name the model before quantization in {ADAPTER_FILE}"
            raise ModelError.for_field(BASE_FIELD, lora.base_model_name_or_path, why)
    try:
        ensure_private_directory(cache)
    except PermissionError as error:
        raise ModelError.for_field(
            field, name, f": the merged model cannot be written to the cache: {error}"
        ) from error
    files = _list_adapter_files(adapter)
    if adapter / PEFT_WEIGHTS not in files:
        raise ModelError.for_field(
            field, name, f": it has no {PEFT_WEIGHTS}; save the adapter as safetensors (pickles may run code)"
        )
    digest = _compute_digest(files, boundary, field)
    key = hashlib.sha256(f"{_MERGE_VERSION} {digest} {_describe_files(base)}".encode()).hexdigest()
    directory = cache / key[:32]
    with FileLock(cache / f"{directory.name}.lock"):
        if not is_private(directory):
            with tempfile.TemporaryDirectory(prefix=".adapter-", dir=cache) as workspace:
                copy = Path(workspace)
                for file in files:
                    with boundary.open_file(file, field, error=ModelError) as stream:
                        (copy / file.name).write_bytes(stream.read())
                if _compute_digest(_list_adapter_files(copy), UNBOUNDED, field) != digest:
                    why = ", which changes while it is read; use it once it is written"
                    raise ModelError.for_field(field, name, why)
                with create_directory_atomically(directory) as target:
                    _write_merged_model(copy, lora, base, config, target, name, field)
                    target.chmod(0o700)
    get_logger().info(
        "merged a PEFT adapter into its base model",
        adapter=name,
        base=lora.base_model_name_or_path,
        directory=str(directory),
    )
    return directory


def _list_adapter_files(directory: Path) -> list[Path]:
    """Return the files of an adapter that decide about the merged model: its configuration, weights and tokenizer."""
    patterns = {ADAPTER_FILE, PEFT_WEIGHTS, *TOKENIZER_FILES} - {CONFIG}
    return sorted({path for pattern in patterns for path in directory.glob(pattern) if path.parent == directory})


def _compute_digest(files: Iterable[Path], boundary: Boundary, field: str) -> str:
    digest = hashlib.sha256()
    for file in files:
        with boundary.open_file(file, field, error=ModelError) as stream:
            digest.update(f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def _describe_files(directory: Path) -> list[Any]:
    """Return what changes with a model's files, without reading them. Their owner cannot set change times."""
    files = [(path.name, path.stat().st_ctime_ns) for path in sorted(directory.iterdir()) if path.is_file()]
    return [str(directory.resolve()), *files]


def _write_merged_model(
    adapter: Path, lora: LoraConfig, base: Path, config: Any, target: Path, name: str, field: str
) -> None:
    # 1. weights
    merged = _MergedTensors(Checkpoint.from_directory(adapter), lora, Checkpoint.open(base), config, name, field)
    write_model_shards(target, merged.read_all())
    # 2. what the new embedding and head change in the configuration
    written = Checkpoint.open(target)
    resolve_tied_head(config, written)
    rows = {key: written.headers[key].shape[0] for key in (EMBEDDING, HEAD) if key in written.shards}
    if len(set(rows.values())) > 1:
        raise merged.make_error(f"its tensors have different numbers of tokens: {rows}")
    values = read_object(base / CONFIG) | {
        "vocab_size": next(iter(rows.values())),
        "tie_word_embeddings": config.tie_word_embeddings,
        "license": read_license(base),
    }
    (target / CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    # 3. the adapter's tokenizer, which may have added tokens, else that of the base
    replaced = {path.name for pattern in TOKENIZER_FILES for path in base.glob(pattern)}
    copy_companion_files(base, target, leaving_out=replaced if has_tokenizer(adapter) else ())
    copy_companion_files(adapter, target, leaving_out=(ADAPTER_FILE,))


class _MergedTensors:
    """The tensors of a base model with an adapter's changes.

    A tied head is a tensor of its own as soon as the adapter changes head or embedding, since PEFT changes only the
    named one.
    """

    def __init__(
        self, adapter: Checkpoint, lora: LoraConfig, base: Checkpoint, config: Any, name: str, field: str
    ) -> None:
        self._adapter, self._lora, self._base = adapter, lora, base
        self._name, self._field = name, field
        self._parts: dict[str, dict[str, str]] = defaultdict(dict)
        """Names of the adapter's tensors by base tensor and part."""
        self._replaced: dict[str, str] = {}
        """Names of the adapter's tensors that replace a base tensor: of `modules_to_save`, biases and embeddings."""
        for stored in adapter.shards:
            own = stored.removeprefix(_PREFIX)
            if match := _PART.fullmatch(own):
                self._parts[f"{match['module']}.weight"][match["part"]] = stored
            else:
                self._replaced[own.replace(".base_layer.", ".")] = stored
        changed = {*self._parts, *self._replaced}
        self._names = list(base.shards)
        resolve_tied_head(config, base)
        if config.tie_word_embeddings and not changed.isdisjoint(TIED_NAMES):
            self._names += [key for key in TIED_NAMES if key not in base.shards]
        if unknown := sorted(changed.difference(self._names)):
            shown = ", ".join(unknown[:_MAX_SHOWN_NAMES]) + (", ..." if len(unknown) > _MAX_SHOWN_NAMES else "")
            raise self.make_error(f"it changes {len(unknown)} tensors that its base model does not have: {shown}")
        if not changed:
            raise self.make_error(f"its {PEFT_WEIGHTS} has no tensors")

    def read_all(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key in self._names:
            yield key, self._merge_weight(key, self._read_base(key))

    def make_error(self, why: str) -> ModelError:
        base = self._lora.base_model_name_or_path
        return ModelError.for_field(
            self._field, self._name, f": {why}; check that {base!r} is its base model, or {MERGE_ADVICE}"
        )

    def _read_base(self, key: str) -> torch.Tensor:
        before = self._base.read(key if key in self._base.shards else TIED_NAMES[key])
        if key not in self._replaced:
            return before
        after = self._adapter.read(self._replaced[key]).to(before.dtype)
        may_grow = key in TIED_NAMES  # by the rows of added tokens
        if after.shape[may_grow:] != before.shape[may_grow:]:
            raise self.make_error(f"its {key} is {list(after.shape)}, and its base model's {list(before.shape)}")
        return after

    def _merge_weight(self, key: str, weight: torch.Tensor) -> torch.Tensor:
        """Add scale * B A to a weight [rows, columns], and with DoRA give its rows the stored norms."""
        if key not in self._parts:
            return weight
        parts = {part: self._adapter.read(stored) for part, stored in self._parts[key].items()}
        magnitude = parts.pop("lora_magnitude_vector", None)
        match sorted(parts):
            case ["lora_A", "lora_B"] if (magnitude is not None) == self._lora.use_dora:
                left, right = parts["lora_B"], parts["lora_A"]
            case ["lora_embedding_A", "lora_embedding_B"] if magnitude is None and not self._lora.use_dora:
                left, right = parts["lora_embedding_A"].T, parts["lora_embedding_B"].T
            case _:
                found = ", ".join(sorted(self._parts[key]))
                raise self.make_error(f"it has {found} for {key}, with use_dora {self._lora.use_dora}")
        module = key.removesuffix(".weight")
        rank, scale = self._lora.get_rank(module), self._lora.get_scale(module)
        shapes = [list(each.shape) for each in (left, right)]
        if shapes != [[weight.shape[0], rank], [rank, *weight.shape[1:]]] or not weight.is_floating_point():
            raise self.make_error(
                f"its matrices for {key} are {shapes[0]} and {shapes[1]}, which do not fit rank {rank} and a base "
                f"weight of {list(weight.shape)} in {weight.dtype}"
            )
        # In float64, so that machines that sum in another order agree on the rounded weights.
        for start in range(0, weight.shape[0], _ROWS):
            rows = slice(start, start + _ROWS)
            merged = weight[rows].double() + scale * (left[rows].double() @ right.double())
            if magnitude is not None:
                merged *= (magnitude[rows].double() / merged.norm(dim=1)).unsqueeze(1)
            weight[rows] = merged.to(weight.dtype)
        return weight


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
        base_source = parse_base_model(lora, access)
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
            # loaders read these files
            check_model_files(directory, Boundary.from_directories(directory.parents[1]), field)
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
