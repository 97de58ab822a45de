"""Model directories on disk: written completely or not at all, weights linked or copied, shards with an index."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from swiftkv_platform.errors import ConflictError
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.sources.loader_rules import TOKENIZER, TOKENIZER_CLASS, TOKENIZER_CONFIG

FilePlacement = Literal["link", "copy", "symlink"]
"""How an unchanged weight file gets into a new directory: a hard link, which takes no space; a copy; or a symbolic
link, for a temporary target."""

Progress = Callable[[int, int], None]
"""Function called with the number of finished tensors (or files) and the total."""

MAX_SHARD_BYTES = 2 << 30
"""Max size of a weight file, unless a single tensor is larger."""

_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".msgpack", ".h5", ".onnx", ".index.json")
_MODEL_SPECIFIC_FILES = ("config.json", "README.md", "evaluation.json", "manifest.json")
"""Files that describe one model and do not fit a model derived from it."""


def check_target_is_empty(target: Path) -> None:
    """Raise `ConflictError` unless `target` does not exist or is an empty directory."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConflictError.for_field(
            "output", str(target), ", which exists and is not empty; name a new or an empty directory"
        )


@contextmanager
def create_directory_atomically(target: Path) -> Iterator[Path]:
    """Yield a directory to fill. It is renamed to `target` if the block succeeds, else deleted.

    It is a hidden sibling of `target`, so that a killed process leaves no incomplete target.

    Raises:
        ConflictError: `target` exists and is not empty.
    """
    check_target_is_empty(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    try:
        partial.chmod(0o777 & ~_get_umask())
        yield partial
        partial.replace(target)  # replaces an empty directory
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def link_or_copy_file(source: Path, target: Path, files: FilePlacement) -> None:
    """Link or copy `source` to `target`. A hard link falls back to a copy."""
    source = source.resolve()  # the hub's cache links to its blobs
    if files == "symlink":
        target.symlink_to(source)
        return
    if files == "link":
        try:
            target.hardlink_to(source)
            return
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EACCES):
                raise
    shutil.copyfile(source, target)


def copy_companion_files(source: Path, target: Path, *, leaving_out: Collection[str] = ()) -> None:
    """Copy a model's other files: tokenizer, generation defaults, chat template, license. The copied tokenizer is that
    of `tokenizer.json` for every loader."""
    for path in sorted(source.iterdir()):
        skipped = path.name.startswith(".") or path.name in {*_MODEL_SPECIFIC_FILES, *leaving_out}
        if path.is_file() and not skipped and not path.name.endswith((*_WEIGHT_SUFFIXES, ".py")):
            shutil.copyfile(path, target / path.name)
    # Classes in tokenizer_config.json rebuild parts of tokenizer.json, which `load_tokenizer` uses unchanged.
    if (target / TOKENIZER).is_file():
        settings = target / TOKENIZER_CONFIG
        values = json.loads(settings.read_bytes()) if settings.is_file() else {}
        values["tokenizer_class"] = TOKENIZER_CLASS
        settings.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def make_shard_names(shards: Iterable[str], prefix: str) -> dict[str, str]:
    """Return new names of weight files. They differ from those of `save_pretrained`, which would overwrite linked
    files together with their sources."""
    ordered = sorted(set(shards))
    return {shard: f"{prefix}-{n:05d}-of-{len(ordered):05d}.safetensors" for n, shard in enumerate(ordered, start=1)}


class ShardWriter:
    """Writes tensors to numbered files, with at most one file's tensors in memory."""

    def __init__(self, directory: Path, name: str, max_bytes: int = MAX_SHARD_BYTES) -> None:
        self._directory, self._name, self._max_bytes = directory, name, max_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._num_bytes = 0
        self.shards: dict[str, str] = {}
        """File by tensor, complete after `flush`."""
        self._num_files = 0

    def add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        if self._pending and self._pending_bytes + tensor.nbytes > self._max_bytes:
            self.flush()
        tensor = tensor.detach().cpu().contiguous()
        # A view would keep its larger storage alive, and safetensors refuses tensors that share memory.
        self._pending[name] = tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
        self._pending_bytes += tensor.nbytes
        self._num_bytes += tensor.nbytes

    def flush(self) -> None:
        if not self._pending:
            return
        self._num_files += 1
        file = f"{self._name}-{self._num_files:05d}.safetensors"
        write_shard(self._pending, self._directory / file)
        self.shards |= dict.fromkeys(self._pending, file)
        self._pending, self._pending_bytes = {}, 0

    def add_checkpoint(
        self,
        checkpoint: Checkpoint,
        prefix: str,
        files: FilePlacement,
        kept_tensors: Collection[str] | None = None,
        progress: Progress = lambda _done, _total: None,
    ) -> None:
        """Add the weight files of a checkpoint. A file whose tensors are all in `kept_tensors` (None: all tensors) is
        linked or copied, see `files`; other files are rewritten with their kept tensors."""
        kept = checkpoint.shards.keys() if kept_tensors is None else kept_tensors
        wanted = {shard: [name for name in names if name in kept] for shard, names in checkpoint.names_by_shard.items()}
        targets = make_shard_names((shard for shard, names in wanted.items() if names), prefix)
        for done, (shard, file) in enumerate(targets.items(), start=1):
            names = wanted[shard]
            if len(names) == len(checkpoint.names_by_shard[shard]):
                link_or_copy_file(checkpoint.get_path(shard), self._directory / file, files)
            else:
                write_shard(checkpoint.read_tensors(names), self._directory / file)
            self.shards |= dict.fromkeys(names, file)
            self._num_bytes += sum(checkpoint.headers[name].num_bytes for name in names)
            progress(done, len(targets))

    def finish(self) -> None:
        """Write the last file and `model.safetensors.index.json`."""
        self.flush()
        index = {"metadata": {"total_size": self._num_bytes}, "weight_map": dict(sorted(self.shards.items()))}
        (self._directory / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def write_model_shards(
    directory: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write a model's tensors to files named as by `save_pretrained`, with one file's tensors in memory at a time."""
    writer = ShardWriter(directory, "partial", max_shard_bytes)
    for name, tensor in tensors:
        writer.add_tensor(name, tensor)
    writer.flush()
    files = sorted(set(writer.shards.values()))
    if len(files) == 1:
        (directory / files[0]).rename(directory / SAFE_WEIGHTS_NAME)
        return
    names = make_shard_names(files, "model")
    for file, name in names.items():
        (directory / file).rename(directory / name)
    writer.shards = {tensor: names[file] for tensor, file in writer.shards.items()}
    writer.finish()


def write_shard(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a weight file with default permissions. safetensors writes private files."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o666 & ~_get_umask())


def _get_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask
