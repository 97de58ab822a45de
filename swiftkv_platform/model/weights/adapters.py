"""Adapters on disk: the tensors in which a student differs from a base model, and their merge into a whole model.

The merged directory is read like any model. Unchanged files are links to the base's files; files that lose tensors, or
whose tensors change dtype, are rewritten.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from swiftkv_platform.configs.adapter import (
    ADAPTER_FILE,
    ADAPTER_WEIGHTS_PREFIX,
    AdapterConfig,
    BaseModelReference,
    BaseTensor,
    compute_base_digest,
    get_dtype_name,
    read_adapter,
)
from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.weights.bases import resolve_model_directory
from swiftkv_platform.model.weights.checkpoint import Checkpoint, select_hub_arguments
from swiftkv_platform.model.weights.quantization import QUANTIZED_DTYPES
from swiftkv_platform.model.weights.writing import FilePlacement, ShardWriter, copy_companion_files
from swiftkv_platform.sources.model_directories import fetch_model_directory

FindBase = Callable[[BaseModelReference], str | Path]
"""Function that returns the directory or hub id of a base model."""

MAX_ADAPTER_SHARE = 0.9
"""Share of a student's bytes from which an adapter counts as large as the model."""
_PARALLEL_TENSORS = 4
"""Number of tensors hashed at the same time."""


def write_adapter(
    student: Iterable[tuple[str, torch.Tensor]],
    config: Any,
    base: Checkpoint,
    target: Path,
    *,
    name_or_path: str,
    revision: str | None,
    teacher_modules: Iterable[str],
    refuses_full_size: bool = False,
) -> AdapterConfig:
    """Write the part of a student that its base lacks to the directory `target`: weights, `swiftkv_adapter.json`,
    `config.json`.

    A student exported without its teacher's projections gets them from the base, unless it replaces a base tensor.

    Args:
        student: its tensors by the names in its files, read one at a time.
        config: the student's configuration.
        base: the base's files.
        name_or_path: name by which the base is found when the adapter is loaded.
        teacher_modules: modules of the base that a student may be exported without.
        refuses_full_size: refuse an adapter that is as large as the model.

    Raises:
        ModelError: `refuses_full_size` is set, and the adapter has at least the share `MAX_ADAPTER_SHARE` of the
            student's bytes.
    """
    writer = ShardWriter(target, ADAPTER_WEIGHTS_PREFIX)
    tensors: dict[str, BaseTensor] = {}
    added, replaced, cast, seen = list[str](), list[str](), dict[str, str](), set[str]()
    num_bytes = num_written = 0

    def read_and_record(name: str) -> torch.Tensor:
        """Read a tensor of the base and record its digest."""
        tensor = base.read(name)
        tensors[name] = BaseTensor.from_tensor(tensor)
        return tensor

    # 1. write the tensors that differ from the base, or that the base lacks
    for name, tensor in student:
        seen.add(name)
        num_bytes += tensor.nbytes
        if name not in base.shards:
            added.append(name)
        else:
            before = read_and_record(name)
            if _are_bitwise_equal(before.to(tensor.dtype), tensor):
                if before.dtype != tensor.dtype:
                    cast[name] = get_dtype_name(tensor.dtype)
                continue
            replaced.append(name)
        num_written += tensor.nbytes
        writer.add_tensor(name, tensor)
    writer.flush()
    if refuses_full_size and num_written >= MAX_ADAPTER_SHARE * num_bytes:
        raise ModelError(
            f"adapter is true, and {num_written:,} of the student's {num_bytes:,} bytes differ from "
            f"{name_or_path!r}, so the adapter would be as large as the model; export it without --adapter, or name "
            "the base that it was made from",
            field="adapter",
            value=True,
        )
    # 2. base tensors that the student lacks: its teacher's projections are restored, others are dropped
    missing = [name for name in base.shards if name not in seen]
    for name in missing:
        read_and_record(name)
    modules = frozenset(teacher_modules)
    dropped = [name for name in missing if replaced or name.rpartition(".")[0] not in modules]
    returned = set(missing) - set(dropped)
    if cast:  # cast the teacher's projections to the student's dtype too
        cast |= {name: next(iter(cast.values())) for name in returned}
    adapter = AdapterConfig(
        base=BaseModelReference(
            name_or_path=name_or_path, revision=revision, digest=compute_base_digest(tensors), tensors=tensors
        ),
        swiftkv=config.shape,
        added=tuple(sorted(added)),
        replaced=tuple(sorted(replaced)),
        dropped=tuple(sorted(dropped)),
        cast=cast,
    )
    (target / ADAPTER_FILE).write_text(adapter.model_dump_json(indent=1) + "\n", encoding="utf-8")
    config = copy.deepcopy(config)
    config.swiftkv_teacher_weights = config.swiftkv_teacher_weights or bool(returned)
    config.save_pretrained(target)
    return adapter


def assemble_adapter(
    directory: Path, adapter: AdapterConfig, base: Checkpoint, target: Path, files: FilePlacement
) -> None:
    """Assemble an adapter and its base in the new directory `target`, after checking the base tensor by tensor. Raises
    `ModelError`: the base is not the one that the adapter was made of, or the adapter's files are incomplete."""
    own = Checkpoint.from_directory(directory)
    adapter.check_shape(json.loads((directory / "config.json").read_bytes()), str(directory))
    adapter.check_adapter_tensor_names(own.shards, str(directory))
    check_adapter_base(adapter, base)
    kept = {name: shard for name, shard in base.shards.items() if adapter.keeps_base_tensor(name)}
    whole = {
        shard
        for shard in kept.values()
        if all(adapter.keeps_base_tensor(name) and name not in adapter.cast for name in base.names_by_shard[shard])
    }
    writer = ShardWriter(target, "changed")
    writer.add_checkpoint(base, "base", files, [name for name, shard in kept.items() if shard in whole])
    writer.add_checkpoint(own, "swiftkv", files)
    for name, shard in kept.items():
        if shard not in whole:
            writer.add_tensor(name, adapter.cast_base_tensor(name, base.read(name)))
    writer.finish()
    copy_companion_files(directory, target, leaving_out=(ADAPTER_FILE,))
    shutil.copyfile(directory / "config.json", target / "config.json")


def check_can_be_base(base: Checkpoint, field: str) -> None:
    """Raise `ModelError` for a quantized model: its student is dequantized, so no stored tensor would be shared."""
    if any(info.dtype in (*QUANTIZED_DTYPES, torch.int32) for info in base.headers.values()):
        raise ModelError(
            f"{field} is true, and {base.source!r} is stored quantized, but its student's weights are dequantized, so "
            f"no tensor would be shared; use {field} false",
            field=field,
            value=True,
        )


def check_adapter_base(adapter: AdapterConfig, base: Checkpoint) -> None:
    """Raise `ModelError` unless `base` is the adapter's; names and shapes are compared before a weight is read."""
    adapter.check_base_tensor_names(base.shards, base.source)
    for name, info in base.headers.items():
        adapter.check_base_header(
            name, "unknown" if info.dtype is None else get_dtype_name(info.dtype), info.shape, base.source
        )

    def check_tensor(name: str) -> None:
        adapter.check_base_tensor(name, base.read(name), base.source)

    with ThreadPoolExecutor(_PARALLEL_TENSORS) as pool:
        checks = [pool.submit(check_tensor, name) for name in base.shards]
        try:
            for each in checks:
                each.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@contextmanager
def open_merged_model(
    source: str | Path, *, base_model: str | Path | None = None, find_base: FindBase | None = None, **arguments: Any
) -> Iterator[tuple[str | Path, AdapterConfig | None]]:
    """Yield a readable model and its adapter: for an adapter, a temporary merged directory; for other models, `source`
    itself and None.

    Args:
        base_model: directory or hub id of the base.
        find_base: function that locates the base if `base_model` is not given; None: locate it by its name, as a job's
            teacher, except for `s3://`.
        arguments: the hub arguments of `from_pretrained` for `source`.

    Raises:
        ModelError: the adapter's base is missing, or `base_model` is given and `source` is not an adapter.
    """
    directory = _find_adapter_directory(source, arguments)
    adapter = None if directory is None else read_adapter(directory)
    if directory is None or adapter is None:
        if base_model is not None:
            raise ModelError.for_field(
                "base_model", str(base_model), f", but {str(source)!r} is not an adapter; leave it out"
            )
        yield source, None
        return
    name, revision = adapter.base.name_or_path, adapter.base.revision
    if base_model is None and find_base is not None:
        base_model = find_base(adapter.base)
    elif base_model is None:
        base_model = resolve_model_directory(name, revision, field="base.name_or_path")
    base = Checkpoint.open(base_model, revision=revision)
    with tempfile.TemporaryDirectory(prefix="swiftkv-whole-") as workspace:
        target = Path(workspace)
        assemble_adapter(directory, adapter, base, target, "symlink")
        yield target, adapter


@contextmanager
def open_checkpoint(source: str | Path, arguments: dict[str, Any]) -> Iterator[tuple[str | Path, Checkpoint | None]]:
    """Yield the model and the checkpoint to read for `source`; an adapter is merged. Removes `base_model` from
    `arguments`, those of `from_pretrained`, and for an adapter the hub arguments too. Raises `ModelError` as
    `open_merged_model`."""
    base_model = arguments.pop("base_model", None)
    if arguments.get("state_dict") is not None or arguments.get("gguf_file") is not None:
        yield source, None
        return
    with open_merged_model(source, base_model=base_model, **arguments) as (directory, adapter):
        if adapter is not None:
            for name in select_hub_arguments(arguments):
                del arguments[name]
        yield directory, Checkpoint.open(directory, **arguments)


def _find_adapter_directory(source: str | Path, arguments: dict[str, Any]) -> Path | None:
    """Return the directory of `source` if it is an adapter, else None; an adapter on the hub is downloaded."""
    hub = select_hub_arguments(arguments)
    subfolder = str(hub.get("subfolder", ""))
    if Path(source).is_dir():
        directory = Path(source) / subfolder
        return directory if (directory / ADAPTER_FILE).is_file() else None
    hub_files = Checkpoint(str(source), {}, hub)
    if any(hub_files.find_file(name) for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
        return None  # decided without asking the hub, which an offline machine cannot do
    if hub_files.find_file(ADAPTER_FILE) is None:
        return None
    return fetch_model_directory(str(source), hub.get("revision"), field="model.name_or_path", subfolder=subfolder)


def _are_bitwise_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of the same dtype are bitwise equal, including NaN and signs of zeros."""
    if a.shape != b.shape:
        return False
    flat = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return torch.equal(*flat)
