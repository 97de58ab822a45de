"""Conversion of a teacher to a student: rewire the model and initialize its SwiftKV projections, in memory or on disk.

Conversion on disk holds a few tensors in memory at a time, so a laptop converts a 405B model. The student reuses the
teacher's weight files by hard links or copies; new files hold the SwiftKV tensors, and one index lists both.

Source: paper, section 3.1 and 3.2; `calibration` describes the calibrated start.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.calibration import TokenBatch, calibrate, calibrate_layerwise
from swiftkv_platform.model.causal_lm import get_student_classes, make_student_config
from swiftkv_platform.model.configuration import read_config
from swiftkv_platform.model.tokenizers import has_tokenizer, load_tokenizer
from swiftkv_platform.model.weights.checkpoint import Checkpoint, read_rows
from swiftkv_platform.model.weights.lazy_student import LazyStudent, plan_copied_start
from swiftkv_platform.model.weights.loading import load_checked
from swiftkv_platform.model.weights.quantization import exclude_swiftkv_modules, get_quantization_fields, is_quantized
from swiftkv_platform.model.weights.writing import (
    MAX_SHARD_BYTES,
    FilePlacement,
    Progress,
    ShardWriter,
    check_target_is_empty,
    copy_companion_files,
    create_directory_atomically,
)
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.sources.model_directories import fetch_model_directory
from swiftkv_platform.student_shape import DecodeKeyValue, RequestedStudentShape, Sharing, StudentShape


def convert(
    teacher: PreTrainedModel | str | Path,
    *,
    num_key_value_layers: int | None = None,
    prefill_reduction: float | None = None,
    key_value_group_size: int = 1,
    early_exit: bool = False,
    sharing: Sharing = "gqa",
    own_output_projection: bool = False,
    decode_key_value: DecodeKeyValue = "shared",
    prefill_layers: Sequence[int] | None = None,
    deep_tail: int = 1,
    calibration: Iterable[TokenBatch] | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> Any:
    """Make a SwiftKV student that shares its frozen weights with `teacher`.

    Args:
        teacher: a causal language model of a known family, or its path or hub id. The parameters of a model in memory
            are shared with the student, not copied.
        num_key_value_layers: l, 1..L-1.
        prefill_reduction: the share of layers that prefill skips, instead of l (default 0.5).
        key_value_group_size: g of AcrossKV.
        early_exit: add an exit head, started from the teacher's final norm and head.
        sharing: key-value heads of layers >= l (paper, appendix C): the teacher's (`gqa`), one (`mqa`: the mean of the
            teacher's) or one for each query head (`mha`: the teacher's, repeated). `planning.equal_cache_group_size`
            gives the g at which the cache has the same size.
        own_output_projection: give layers >= l their own output projection, which a calibrated start fits to the values
            that layers share; a copied start has the teacher's.
        decode_key_value: source of the K and V of deep tokens, which run through layers >= l: x, as in the paper
            (`shared`), or their own hidden state (`own`).
        prefill_layers: layers that skipped prompt tokens run through, ascending, instead of l, which follows from the
            last of them; needs `decode_key_value` own. None: all layers < l, as in the paper.
        deep_tail: number of tokens at a prompt's end that run all layers; above 1 it needs `decode_key_value` own.
        calibration: batches of token ids [batch, num_tokens] for the calibrated start; None copies the teacher's
            projections (k and v: the mean over the group).
        dtype: dtype to load a path in; None keeps the checkpoint's.
        revision: hub revision of a path.

    Raises:
        ModelError: unreadable model, unknown family, or `sharing` for a family without heads to share (MLA).
        InvalidInputError: l or g out of range, naming what is accepted; raised before weights are read.
    """
    shape = RequestedStudentShape(
        num_key_value_layers=num_key_value_layers,
        prefill_reduction=prefill_reduction,
        key_value_group_size=key_value_group_size,
        early_exit=early_exit,
        sharing=sharing,
        own_output_projection=own_output_projection,
        decode_key_value=decode_key_value,
        prefill_layers=prefill_layers,
        deep_tail=deep_tail,
    )
    return make_student(teacher, shape, calibration=calibration, dtype=dtype, revision=revision)


def make_student(
    teacher: PreTrainedModel | str | Path,
    shape: RequestedStudentShape,
    *,
    calibration: Iterable[TokenBatch] | None = None,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
) -> Any:
    """Make the student that `convert` describes."""
    config = read_config(teacher, revision=revision) if isinstance(teacher, str | Path) else teacher.config
    student_config = make_student_config(config, shape)
    if isinstance(teacher, str | Path):
        if is_quantized(config):
            del student_config.quantization_config  # the student's weights are dequantized
        teacher = load_teacher(teacher, config, revision=revision, dtype=dtype)
    elif getattr(config, "quantization_config", None):
        raise ModelError(
            "this teacher was loaded with quantized weights; pass its path instead, so that they are dequantized on "
            "loading",
            field="model.name_or_path",
            value=str(config.name_or_path),
        )
    student = _rewire(teacher, student_config).eval()  # before calibration, which dropout would change
    parameters = student.state_dict()
    with torch.no_grad():
        for start in plan_copied_start(student):
            parameters[start.name].copy_(start.make_tensor(partial(read_rows, parameters)))
    if calibration is not None:
        calibrate(student, calibration)
    return student


def load_dense(path: str | Path, *, dtype: torch.dtype | None = None, revision: str | None = None) -> Any:
    """Load an unchanged teacher in this project's classes, with l = L: the baseline with a student's forward pass.

    Args:
        path: directory or hub id of a causal language model of a known family; for a student, its teacher is loaded.
        dtype: dtype of the weights; None keeps the checkpoint's.

    Raises:
        ModelError: unreadable model, unknown family, or a student that was exported without its teacher.
    """
    model_class, config = resolve_dense_model(path, revision)
    return model_class.from_pretrained(path, config=config, revision=revision, dtype=dtype or "auto")


def resolve_dense_model(path: str | Path, revision: str | None = None) -> tuple[type[Any], Any]:
    """Return the class and the configuration of the model that `load_dense` loads. Raises `ModelError`."""
    config = read_config(path, revision=revision)
    classes = get_student_classes(config.model_type)
    is_student = isinstance(config, classes.causal_lm.config_class)
    return classes.causal_lm, make_dense_config(config) if is_student else classes.make_config(config)


def make_dense_config(student: Any) -> Any:
    """Return a copy of a student's configuration in which every layer computes its own KV, as in its teacher."""
    dense = copy.deepcopy(student)
    dense.shape = StudentShape.dense(dense.num_hidden_layers)
    return dense


def load_teacher(
    path: str | Path, config: Any = None, *, revision: str | None = None, dtype: torch.dtype | str | None = None
) -> PreTrainedModel:
    """Load a teacher in transformers' class after checking its files. Raises `ModelError`.

    Args:
        config: the teacher's configuration; None reads it.
        dtype: dtype to load in; None keeps the checkpoint's.
    """
    config = read_config(path, revision=revision) if config is None else config
    teacher = get_student_classes(config.model_type).teacher
    checkpoint = Checkpoint.open(path, revision=revision)
    model: PreTrainedModel = load_checked(
        teacher.from_pretrained, teacher, config, path, checkpoint, revision=revision, dtype=dtype or "auto"
    )
    return model


def _rewire(teacher: PreTrainedModel, config: Any) -> Any:
    """Make a student that shares the teacher's parameters; its new parameters are uninitialized."""
    classes = get_student_classes(teacher.config.model_type)
    config.dtype = teacher.dtype
    # Tied as in the loaded model, which may differ from the configuration.
    config.tie_word_embeddings = teacher.lm_head.weight is teacher.model.embed_tokens.weight
    config._attn_implementation = teacher.config._attn_implementation
    # 1. build on the meta device and assign the teacher's parameters
    with torch.device("meta"):
        student = classes.causal_lm(config)
    student.load_state_dict(teacher.state_dict(), strict=False, assign=True)
    student.model.rotary_emb = teacher.model.rotary_emb  # its buffers are not part of a state dict
    student.tie_weights()
    # 2. allocate the new parameters
    for name, parameter in list(student.named_parameters()):
        if parameter.is_meta:
            module, _, leaf = name.rpartition(".")
            empty = torch.empty(parameter.shape, dtype=teacher.dtype, device=teacher.device)
            setattr(student.get_submodule(module), leaf, nn.Parameter(empty))
    student.generation_config = copy.deepcopy(teacher.generation_config)
    return student


@dataclass(frozen=True)
class ConversionResult:
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
    files: FilePlacement = "link",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress = lambda _done, _total: None,
    **shape: Any,
) -> ConversionResult:
    """Write the student that `convert` makes of `source` to the directory `target` atomically.

    Args:
        source: a teacher's directory or hub id, in safetensors.
        target: a new or empty directory.
        calibration: as for `convert`. It holds a layer of the teacher in memory at a time, see `calibrate_layerwise`;
            without it, memory holds at most `max_shard_bytes` or the teacher tensors of one new tensor, whichever is
            larger.
        files: how the teacher's weight files get there. A link falls back to a copy if the file system has no links.
            Links to the hub's cache are safe: its files never change.
        shape: fields of `RequestedStudentShape`, as for `convert`.

    Raises:
        InvalidInputError: l or g out of range.
        ModelError: the teacher, its files or its tokenizer cannot be used; raised before a weight is read.
        ConflictError: `target` exists and is not empty.
    """
    target = Path(target)
    check_target_is_empty(target)
    teacher, request = read_config(source, revision=revision), RequestedStudentShape(**shape)
    # 1. check shape, files and tokenizer before a weight is read
    make_student_config(teacher, request)
    quantization = get_quantization_fields(teacher)
    directory = fetch_model_directory(str(source), revision, field="model.name_or_path")
    student = LazyStudent.open(directory, request, {}, dtype="auto")
    config = student.model.config
    if has_tokenizer(directory):
        load_tokenizer(directory, config.vocab_size)
    # 2. write the new tensors, then link or copy the teacher's files
    if calibration is None:
        tensors = student.read_new_tensors()
    else:
        tensors = calibrate_layerwise(student, calibration, workers=Workers(alone=True))
    total, num_bytes = len(student.new_names), 0
    with create_directory_atomically(target) as partial:
        writer = ShardWriter(partial, "swiftkv", max_shard_bytes)
        for done, (name, tensor) in enumerate(tensors, start=1):
            writer.add_tensor(name, tensor)
            num_bytes += tensor.nbytes
            progress(done, total)
        writer.add_checkpoint(student.base, "teacher", files)
        writer.finish()
        copy_companion_files(directory, partial)
        config.architectures = [type(student.model).__name__]
        if quantization is not None:
            config.quantization_config = exclude_swiftkv_modules(quantization)
        config.save_pretrained(partial)
    return ConversionResult(target, config, total, num_bytes)
