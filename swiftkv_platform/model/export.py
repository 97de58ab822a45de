"""Export of a student: with its teacher, or for serving without the modules that only the teacher runs (paper, section
3: inference drops the replaced projections of layers >= l).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from transformers import PreTrainedModel

from swiftkv_platform.configs import SwiftKVConfigMixin
from swiftkv_platform.configs.adapter import ADAPTER_FILE, AdapterConfig
from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.calibration import TokenBatch
from swiftkv_platform.model.calibration.rounding import quantize_layerwise
from swiftkv_platform.model.causal_lm import get_student_classes
from swiftkv_platform.model.configuration import read_config, refuse_prefill_only
from swiftkv_platform.model.weights.adapters import open_merged_model, write_adapter
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.model.weights.lazy_student import LazyStudent
from swiftkv_platform.model.weights.loading import check_finite, get_first_dtype, resolve_tied_head
from swiftkv_platform.model.weights.quantization import (
    WeightFormat,
    choose_scale_group_size,
    dequantize_checkpoint,
    get_quantization_fields,
    is_mixed_int8,
    is_projection,
    is_quantized,
    make_compressed_tensors_config,
    make_int8_pattern,
    make_stored_tensors,
    quantize_weight,
)
from swiftkv_platform.model.weights.writing import (
    FilePlacement,
    Progress,
    ShardWriter,
    check_target_is_empty,
    copy_companion_files,
    create_directory_atomically,
)
from swiftkv_platform.sources.model_directories import fetch_model_directory

Quantization = Literal["int8", "int4", "mixed"]


def export(
    student: PreTrainedModel | str | Path,
    target: str | Path,
    *,
    teacher: bool = False,
    prefill_only: bool = False,
    quantize: Quantization | None = None,
    calibration: Iterable[TokenBatch] | None = None,
    files: FilePlacement = "link",
    revision: str | None = None,
    base_model: str | Path | None = None,
    progress: Progress = lambda _done, _total: None,
) -> Path:
    """Write a student to the directory `target`. If writing fails, `target` stays empty.

    A student without its teacher's projections loads, generates and serves as before, but `swiftkv(False)` is an error.
    Other files of a student's directory, such as the tokenizer, are copied.

    Raises:
        ModelError: the student is not a SwiftKV model or already quantized to integers (`quantize`), lacks its teacher
            (`teacher`), or is an adapter whose base is missing or another model; or `calibration` without `quantize`.
        InvalidInputError: `calibration` has no tokens.
        ConflictError: `target` exists and is not empty.

    Args:
        student: a SwiftKV model in memory, which is not changed; or the directory or hub id of a SwiftKV model or
            adapter. Its files are written one at a time: files whose tensors are all kept are linked or copied (see
            `files`), the others are rewritten. An adapter is merged with its base.
        target: a new or empty directory.
        teacher: keep the teacher's projections of layers >= l.
        prefill_only: write only the modules that process skipped prompt tokens. In vLLM, such a model fills the KV
            caches of other servers.
        quantize: store the projections of the layers in integers, in the formats of compressed-tensors: `int8` with a
            scale per row (W8A8); `int4` with a scale per group of 128 inputs, or fewer (W4A16); or `mixed`, with the
            projections of queries, keys and values and the last eighth of the MLPs in int8 and the others in int4 by
            groups of 32. Heads, embeddings, norms and routers stay unquantized. The directory is read tensor by tensor.
        calibration: rows of tokens for the rounding of `quantize`, see `quantize_layerwise`; the directory is read
            layer by layer. None: each weight is rounded to nearest.
        base_model: directory or hub id of an adapter's base; None: as named in the adapter.
        progress: called with the number of files written and the total; only if `student` is a directory or hub id.
    """
    target = Path(target)
    check_target_is_empty(target)
    if calibration is not None and quantize is None:
        raise ModelError("calibration needs quantize, which is not set; use quantize='int4'", field="calibration")
    if isinstance(student, str | Path):
        read_config(student, revision=revision)  # raises for a bad config.json before weights are downloaded
        with open_merged_model(student, base_model=base_model, revision=revision) as (whole, adapter):
            source = _ExportSource.open(whole, teacher, prefill_only, revision if adapter is None else None)
            if quantize is not None:
                return _export_quantized(source, target, quantize, calibration, progress)
            with create_directory_atomically(target) as partial:
                writer = ShardWriter(partial, "weights")
                writer.add_checkpoint(source.checkpoint, "weights", files, source.kept_tensors, progress)
                writer.finish()
                copy_companion_files(source.directory, partial)
                source.config.save_pretrained(partial)
            return target
    config, keeps = _make_export_config(student.config, str(student.config.name_or_path), teacher, prefill_only)
    config.dtype = student.dtype
    if teacher and not student.config.swiftkv_teacher_weights:
        raise _make_missing_teacher_error(str(student.config.name_or_path))
    if quantize is not None:
        with TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.whole-") as whole:
            exported = export(student, Path(whole) / "student", teacher=teacher)
            source = _ExportSource.open(exported, teacher, prefill_only)
            return _export_quantized(source, target, quantize, calibration, progress)
    weights = {name: tensor for name, tensor in student.state_dict().items() if keeps(name)}
    with create_directory_atomically(target) as partial:
        student.save_pretrained(partial, state_dict=weights)
        config.save_pretrained(partial)
    return target


def export_adapter(
    student: str | Path,
    target: str | Path,
    *,
    base: str | Path,
    name_or_path: str | None = None,
    revision: str | None = None,
    progress: Progress = lambda _done, _total: None,
) -> AdapterConfig:
    """Write the tensors in which `student` differs from its base model to the directory `target` atomically.

    Memory holds one tensor of each model and the tensors of the next file.

    Args:
        student: directory or hub id of a SwiftKV model.
        target: a new or empty directory.
        base: directory or hub id of the student's teacher.
        name_or_path: name by which the adapter refers to the base; None: `base`, as a full path if it is a directory.
        revision: the base's revision on the hub.
        progress: called with the number of tensors compared and of all tensors.

    Raises:
        ModelError: not a SwiftKV model, an adapter already, or a model that shares almost no tensor with the base.
        ConflictError: `target` exists and is not empty.
    """
    target = Path(target)
    check_target_is_empty(target)
    config, _ = _make_export_config(read_config(student), str(student), True, False)
    directory = fetch_model_directory(str(student), field="model.name_or_path")
    if (directory / ADAPTER_FILE).is_file():
        raise ModelError(
            f"{str(student)!r} is an adapter already; copy it, or export a whole model from it",
            field="model",
            value=str(student),
        )
    checkpoint, of_base = Checkpoint.open(directory), Checkpoint.open(base, revision=revision)
    if name_or_path is None:
        name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else str(base)

    def iterate_tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for done, name in enumerate(checkpoint.shards, start=1):
            yield name, checkpoint.read(name)
            progress(done, len(checkpoint.shards))

    with create_directory_atomically(target) as partial:
        adapter = write_adapter(
            iterate_tensors(),
            config,
            of_base,
            partial,
            name_or_path=name_or_path,
            revision=revision,
            teacher_modules=list_teacher_modules(config),
            refuses_full_size=True,
        )
        copy_companion_files(directory, partial)
    return adapter


def drop_teacher(student: Any) -> None:
    """Remove the modules that only the teacher runs from a model in memory."""
    student.config.swiftkv_teacher_weights = False
    for layer in student.model.layers[student.config.num_key_value_layers :]:
        layer.self_attn.drop_teacher()


@dataclass(frozen=True)
class _ExportSource:
    """A student on disk to export."""

    name: str
    directory: Path
    whole: Any
    """Configuration of the student."""
    config: Any
    """Configuration to write."""
    checkpoint: Checkpoint
    kept_tensors: frozenset[str]
    """Names of the tensors to keep."""

    @classmethod
    def open(cls, source: str | Path, teacher: bool, prefill_only: bool, revision: str | None = None) -> _ExportSource:
        whole = read_config(source, revision=revision)
        config, keeps = _make_export_config(whole, str(source), teacher, prefill_only)
        directory = fetch_model_directory(str(source), revision, field="model.name_or_path")
        checkpoint = Checkpoint.open(directory)
        modules = {name.rpartition(".")[0] for name in checkpoint.shards}
        if teacher and modules.isdisjoint(list_teacher_modules(config)):
            raise _make_missing_teacher_error(str(source))
        return cls(str(source), directory, whole, config, checkpoint, frozenset(filter(keeps, checkpoint.shards)))


def _export_quantized(
    source: _ExportSource,
    target: Path,
    form: Quantization,
    calibration: Iterable[TokenBatch] | None,
    progress: Progress,
) -> Path:
    config, stored, kept = source.config, source.checkpoint, source.kept_tensors
    resolve_tied_head(config, stored)
    checkpoint = dequantize_checkpoint(stored) if is_quantized(config) else stored
    if any(info.dtype in (torch.int8, torch.int32) for info in stored.headers.values()):
        method = (get_quantization_fields(config) or {}).get("quant_method")
        raise ModelError(
            f"quantize is {form!r}, but {source.name!r} is quantized to integers already ({method}); export the model "
            "that it was made from",
            field="quantize",
            value=form,
        )
    # 1. choose the format of each projection
    dtype = config.dtype if isinstance(config.dtype, torch.dtype) else get_first_dtype(stored)
    names = [name for name in checkpoint.shards if name in kept]
    inputs = {name: info.shape[1] for name in names if len((info := checkpoint.headers[name]).shape) == 2}
    projections = {name: size for name, size in inputs.items() if is_projection(name)}
    num_layers = config.num_hidden_layers
    eight = [name for name in projections if form == "int8" or (form == "mixed" and is_mixed_int8(name, num_layers))]
    sizes = [size for name, size in projections.items() if name not in eight]
    group = choose_scale_group_size(sizes, smallest=form == "mixed")
    formats: dict[str, tuple[WeightFormat, int | None]] = dict.fromkeys(eight, ("int8", None))
    if group:
        four = (name for name, size in projections.items() if name not in formats and size % group == 0)
        formats |= dict.fromkeys(four, ("int4", group))
    if not formats or (form != "int8" and not group):
        raise ModelError.for_field(
            "quantize", form, f", and no projection of {source.name!r} has inputs in groups of 32"
        )
    # 2. list the linear modules that stay unquantized
    embeddings = ("embed_tokens", *(("lm_head",) if config.tie_word_embeddings else ()))
    plain = [name.removesuffix(".weight") for name in inputs if name not in formats]
    ignored = sorted({"lm_head", *(name for name in plain if not name.endswith(embeddings))})

    def iterate_tensors() -> Iterator[dict[str, torch.Tensor]]:
        rounded = set()
        if calibration is not None:
            student = get_student_classes(source.whole.model_type).causal_lm
            model, weights = student.open_without_weights(source.directory, config=source.whole, dtype=torch.float32)
            if model.config.swiftkv_teacher_weights:
                drop_teacher(model)
            lazy = LazyStudent(model, weights, {})
            for name, values in quantize_layerwise(lazy, calibration, formats, dtype=dtype):
                rounded.add(name)
                yield make_stored_tensors(name, *values, formats[name][0])
        for name in names:
            if name not in rounded:
                tensor = checkpoint.read(name).to(dtype)
                check_finite(name, tensor, source.name)
                if name in formats:
                    yield make_stored_tensors(name, *quantize_weight(tensor, *formats[name]), formats[name][0])
                else:
                    yield {name: tensor}

    with create_directory_atomically(target) as partial:
        writer = ShardWriter(partial, "weights")
        for done, made in enumerate(iterate_tensors(), start=1):
            for part, values in made.items():
                writer.add_tensor(part, values)
            progress(done, len(names))
        writer.finish()
        copy_companion_files(source.directory, partial)
        targets: dict[WeightFormat, str] = (
            {"int8": f"re:{make_int8_pattern(num_layers)}", "int4": "Linear"} if form == "mixed" else {form: "Linear"}
        )
        config.quantization_config = make_compressed_tensors_config(
            targets, group, ignored, calibrated=calibration is not None
        )
        config.save_pretrained(partial)
    return target


def _make_export_config(
    config: Any, source: str, teacher: bool, prefill_only: bool
) -> tuple[Any, Callable[[str], bool]]:
    """Return the configuration to write, and a predicate of the names of tensors to keep. Raises `ModelError`."""
    if not isinstance(config, SwiftKVConfigMixin):
        raise ModelError(
            f"{source!r} is a {getattr(config, 'model_type', '?')} model without SwiftKV; convert it first",
            field="model.name_or_path",
            value=source,
        )
    refuse_prefill_only(config, source)
    config = copy.deepcopy(config)
    if prefill_only:
        _check_prefill_only(config, source, teacher)
        config.swiftkv_prefill_only, config.swiftkv_teacher_weights = True, False
        config.validate_shape()
        return config, config.layer_map.is_prefill_tensor
    if teacher:
        return config, lambda _: True
    config.swiftkv_teacher_weights = False
    dropped = frozenset(list_teacher_modules(config))
    return config, lambda name: name.rpartition(".")[0] not in dropped


def _check_prefill_only(config: SwiftKVConfigMixin, source: str, teacher: bool) -> None:
    """Raise `ModelError` if prefill runs all layers of the student, or vLLM does not serve its family."""
    refused = config.family.vllm_obstacle
    if teacher or refused or not config.layer_map.leaders:
        why = "teacher is true, and teacher mode also decodes" if teacher else refused or "its prompts run all layers"
        raise ModelError(
            f"{source!r} cannot be exported for prefill only: {why}; omit prefill_only",
            field="prefill_only",
            value=True,
        )


def list_teacher_modules(config: Any) -> list[str]:
    """Return the names of the modules in a student that only its teacher runs."""
    modules: list[str] = get_student_classes(config.model_type).causal_lm.list_teacher_modules(config)
    return modules


def _make_missing_teacher_error(source: str) -> ModelError:
    return ModelError(
        f"{source!r} was exported without its teacher's projections; use teacher=False",
        field="teacher",
        value=True,
    )
