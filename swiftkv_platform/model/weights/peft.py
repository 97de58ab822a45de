"""Merge of a PEFT LoRA adapter into its base model: a new directory, which everything else reads like any model.

The base is streamed tensor by tensor. Merged directories are cached on each machine, by the adapter's content and by
path and change times of the base's files.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from huggingface_hub.constants import HF_HOME

from swiftkv_platform.errors import ModelError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.model.configuration import read_config
from swiftkv_platform.model.tokenizers import has_tokenizer
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.model.weights.loading import EMBEDDING, HEAD, TIED_NAMES, resolve_tied_head
from swiftkv_platform.model.weights.quantization import is_quantized
from swiftkv_platform.model.weights.writing import copy_companion_files, create_directory_atomically, write_model_shards
from swiftkv_platform.private_directories import ensure_private_directory, is_private
from swiftkv_platform.sources import UNBOUNDED, Boundary
from swiftkv_platform.sources.cards import read_license
from swiftkv_platform.sources.loader_rules import ADAPTER_FILE, CONFIG
from swiftkv_platform.sources.model_directories import TOKENIZER_FILES
from swiftkv_platform.sources.peft import BASE_FIELD, MERGE_ADVICE, PEFT_WEIGHTS, LoraConfig, explain_base_errors
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
