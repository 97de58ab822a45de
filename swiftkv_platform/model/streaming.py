"""Teacher checkpoint -> student checkpoint on disk, with a few tensors in memory: converts a 405B model on a laptop.

The teacher's weights do not change, so the student reuses their files, as hard links unless copies are asked for:
140 GB need not be written again. New files hold the SwiftKV tensors, each made from a few teacher tensors; one index
names both. This is the copied start; the calibrated start needs the whole teacher in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from swiftkv_platform.model.calibration import TokenBatch
from swiftkv_platform.model.checkpoint import Checkpoint
from swiftkv_platform.model.configuration import made_without_weights, read_config
from swiftkv_platform.model.conversion import make_student, make_student_config
from swiftkv_platform.model.directories import (
    MAX_SHARD_BYTES,
    Files,
    ShardWriter,
    check_new,
    copy_companions,
    new_directory,
    place,
    shard_names,
    write_index,
)
from swiftkv_platform.model.families import student_classes
from swiftkv_platform.model.initialization import copied_start
from swiftkv_platform.model.loading import check_tensors, first_dtype
from swiftkv_platform.model.stored_quantization import is_quantized, without_swiftkv
from swiftkv_platform.model.stored_weights import StoredWeights, settle_head
from swiftkv_platform.model.tokenizers import has_tokenizer, load_tokenizer
from swiftkv_platform.sources.model_directories import local_directory
from swiftkv_platform.student_shape import ShapeRequest

Progress = Callable[[int, int], None]
"""Callback that gets the number of tensors (or files) done and of all."""


@dataclass(frozen=True)
class Converted:
    """Result of a conversion."""

    path: Path
    config: Any
    num_new_tensors: int
    new_bytes: int
    """Bytes of the SwiftKV tensors, without the teacher's files."""


def convert_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    calibration: Iterable[TokenBatch] | None = None,
    revision: str | None = None,
    files: Files = "link",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
    **shape: Any,
) -> Converted:
    """Write the student that `convert` makes of `source` to the directory `target`, completely or not at all.

    Args:
        source: a teacher's directory or hub id, in safetensors.
        target: a new or empty directory.
        calibration: as for `convert`. It loads the whole teacher into memory; without it, memory holds at most
            `max_shard_bytes` or the teacher tensors of one new tensor, whichever is larger.
        files: how the teacher's weight files get there. A link falls back to a copy if the file system has no links.
            Links to the hub's cache are safe: its files never change.
        shape: fields of `ShapeRequest`, as for `convert`.

    Raises:
        InvalidInputError: l or g out of range.
        ModelError: the teacher, its files or its tokenizer cannot be used; raised before a weight is read.
        ConflictError: `target` exists and is not empty.
    """
    target = Path(target)
    check_new(target)
    teacher = read_config(source, revision=revision)
    request = ShapeRequest(**shape)
    config = make_student_config(teacher, request)
    quantized = is_quantized(teacher)
    directory = local_directory(str(source), revision, field="model.name_or_path")
    checkpoint = Checkpoint.open(directory)
    settle_head(teacher, checkpoint)
    config.tie_word_embeddings = teacher.tie_word_embeddings
    with made_without_weights(source):
        whole = student_classes(teacher.model_type).teacher(teacher)
        student = student_classes(teacher.model_type).causal_lm(config)
    check_tensors(checkpoint, whole, quantized=quantized)
    if has_tokenizer(directory):
        load_tokenizer(directory, config.vocab_size)  # refuse it now rather than in serving
    config.dtype = config.dtype or first_dtype(checkpoint)
    if calibration is None:
        tensors = _copied(student, StoredWeights(checkpoint, teacher, config.dtype))
    else:
        tensors = _trained(make_student(directory, request, calibration=calibration))
    total = sum(1 for _ in copied_start(student))
    with new_directory(target) as partial:
        writer = ShardWriter(partial, "swiftkv", max_shard_bytes)
        num_bytes = 0
        for done, (name, tensor) in enumerate(tensors, start=1):
            writer.add(name, tensor)
            num_bytes += tensor.nbytes
            if progress is not None:
                progress(done, total)
        writer.flush()
        shards = writer.shards | _place_shards(checkpoint, partial, files)
        write_index(partial, shards, num_bytes + sum(info.num_bytes for info in checkpoint.headers.values()))
        copy_companions(directory, partial)
        config.architectures = [type(student).__name__]
        if quantized:
            config.quantization_config = without_swiftkv(_fields(config.quantization_config))
        config.save_pretrained(partial)
    return Converted(target, config, total, num_bytes)


def _copied(student: Any, teacher: StoredWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the copied start of `student`, made from its teacher's files one tensor at a time."""
    for start in copied_start(student):
        yield start.name, start.made(teacher.read)


def _trained(student: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield from student.swiftkv_parameters().items()


def _place_shards(checkpoint: Checkpoint, target: Path, files: Files) -> dict[str, str]:
    """Put the teacher's weight files into `target`; returns the file of each tensor."""
    names = shard_names(checkpoint.shards.values(), "teacher")
    for shard, name in names.items():
        place(checkpoint.path(shard), target / name, files)
    return {tensor: names[shard] for tensor, shard in checkpoint.shards.items()}


def _fields(quantization: Any) -> dict[str, Any]:
    fields: dict[str, Any] = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return fields
