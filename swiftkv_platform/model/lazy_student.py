"""A student whose weights are read on demand, so that no process has to hold the whole model.

A module is filled before it runs or is sharded, and released after it has run; for a model that is sharded already each
worker reads its own rows.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers.core_model_loading import revert_weight_conversion

from swiftkv_platform.model.checkpoint import Checkpoint, read_rows
from swiftkv_platform.model.configuration import made_without_weights, read_config
from swiftkv_platform.model.conversion import make_student_config
from swiftkv_platform.model.directories import write_model_shards
from swiftkv_platform.model.families import student_classes
from swiftkv_platform.model.initialization import copied_start
from swiftkv_platform.model.loading import build_empty, check_tensors
from swiftkv_platform.model.stored_quantization import is_quantized
from swiftkv_platform.model.stored_weights import StoredWeights, settle_head
from swiftkv_platform.student_shape import ShapeRequest

_KEPT = "kept_teacher."
_Place = tuple[int, str]
"""Identity of a module, and the name of one of its parameters."""


class LazyStudent:
    """A student on the meta device whose weights are read on demand.

    Args:
        model: the student, with its positional buffers on a real device.
        start: initial values of new tensors, or the student's own tensors, by name; others are copied from the
            teacher's.
        device: device of the values.
    """

    def __init__(
        self, model: Any, teacher: StoredWeights, start: Mapping[str, Tensor], *, device: torch.device | str = "cpu"
    ) -> None:
        self.model = model
        self._teacher = teacher
        self._start = start
        self._device = torch.device(device)
        self._copied = {tensor.name: tensor for tensor in copied_start(model)}
        self._learn(model, lambda name: name)

    @classmethod
    def open(
        cls,
        path: str | Path,
        shape: ShapeRequest,
        start: Mapping[str, Tensor],
        *,
        revision: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> LazyStudent:
        """Make the student of the teacher at `path`, whose tensor names and shapes are checked first.

        Args:
            dtype: dtype of the student; None keeps the checkpoint's values and the configuration's dtype.

        Raises:
            ModelError: unreadable model, unknown family, or tensors that are missing or have another shape.
            InvalidInputError: l or g out of range.
        """
        teacher = read_config(path, revision=revision)
        config = make_student_config(teacher, shape)
        quantized = is_quantized(teacher)
        checkpoint = Checkpoint.open(path, revision=revision)
        settle_head(teacher, checkpoint)
        config.tie_word_embeddings = teacher.tie_word_embeddings
        with made_without_weights(checkpoint.source):
            whole = student_classes(teacher.model_type).teacher(copy.deepcopy(teacher))
        check_tensors(checkpoint, whole, quantized=quantized)
        if quantized:
            del config.quantization_config  # the student's weights are dequantised
        if dtype is not None:
            config.dtype = dtype

        def build() -> Any:
            student = student_classes(teacher.model_type).causal_lm(config)
            return student if dtype is None else student.to(dtype)

        model = build_empty(build, checkpoint, device)
        return cls(model, StoredWeights(checkpoint, teacher, dtype), start, device=device)

    @property
    def base(self) -> Checkpoint:
        return self._teacher.checkpoint

    @property
    def stored_bytes(self) -> int:
        return sum(info.num_bytes for info in self._teacher.checkpoint.headers.values())

    def started_from(self, start: Mapping[str, Tensor]) -> None:
        """Read the student's own tensors from `start` from now on."""
        self._start = start

    def attach(self, fork: nn.Module) -> None:
        """Map the parameters of a fork, or another module with the student as `student` and optionally a
        `kept_teacher`, to their names in the student."""
        self._learn(fork, _student_name)

    def _learn(self, root: nn.Module, student_name: Callable[[str], str]) -> None:
        self._root = root
        self._student_name = student_name
        self._names: dict[_Place, str] = {}
        aliases: dict[int, list[str]] = defaultdict(list)
        for prefix, module in root.named_modules():
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    name = student_name(f"{prefix}.{leaf}" if prefix else leaf)
                    self._names[id(module), leaf] = name
                    aliases[id(parameter)].append(name)
        # A tied parameter goes by its first name; the kept teacher's copies are parameters of their own.
        self._tied = {name: names[0] for names in aliases.values() if len(names) > 1 for name in names}
        self._filled: dict[str, nn.Parameter] = {}

    @torch.no_grad()
    def fill(self, module: nn.Module, *, own: bool = True, read: bool = True) -> None:
        """Load every parameter of `module` that is on the meta device, in its dtype.

        Args:
            own: include parameters that the teacher does not have.
            read: read the values; False only allocates storage, for a worker that receives the values from another.
        """
        for part, leaf, parameter in _parameters(module):
            name = self._names[id(part), leaf]
            if not parameter.is_meta or (not own and name in self._copied):
                continue
            tied = self._tied.get(name)
            filled = None if tied is None else self._filled.get(tied)
            if filled is None:
                if read:
                    values = self.read(name).to(self._device, parameter.dtype, copy=name in self._start)
                else:
                    values = torch.empty_like(parameter, device=self._device)
                filled = nn.Parameter(values, requires_grad=parameter.requires_grad)
                if tied is not None:
                    self._filled[tied] = filled
            part._parameters[leaf] = filled

    def release(self, module: nn.Module) -> None:
        for part, leaf, parameter in _parameters(module):
            part._parameters[leaf] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
            self._filled.pop(self._tied.get(self._names[id(part), leaf], ""), None)

    @torch.no_grad()
    def fill_shards(self, root: nn.Module, only: Mapping[str, Any] | None = None) -> None:
        """Load every parameter of a model sharded by FSDP2; each worker reads its own rows.

        Args:
            root: the module passed to `attach`, or the student.
            only: names in the student of the parameters to load; None: all.
        """
        for own_name, parameter in root.named_parameters():
            name = self._student_name(own_name)
            if only is not None and (name not in only or own_name.startswith(_KEPT)):
                continue
            if not isinstance(parameter, DTensor):
                parameter.copy_(self.read(name))
                continue
            rows = own_rows(parameter)
            if rows.stop > rows.start:
                parameter.to_local().copy_(self.read(name, rows))

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Read a tensor of the student, or only the given rows of it."""
        if name in self._start:
            return read_rows(self._start, name, rows)
        copied = self._copied.get(name)
        if copied is None or name in self._teacher:  # the latter if the files are a student's
            return self._teacher.read(name, rows)
        return copied.made(self._teacher.read, rows)


def own_rows(parameter: DTensor) -> slice:
    """Return the rows of a parameter that this worker holds; the mesh has one dimension."""
    (placement,) = parameter.placements
    if not isinstance(placement, Shard):
        return slice(0, parameter.shape[0])
    assert placement.dim == 0, "FSDP2 shards rows"
    size, rank = parameter.device_mesh.size(), parameter.device_mesh.get_local_rank()
    share = -(-parameter.shape[0] // size)
    start = min(rank * share, parameter.shape[0])
    return slice(start, start + parameter.to_local().shape[0])


def _student_name(name: str) -> str:
    """Return the name in the student of a fork's parameter."""
    return f"model.{name.removeprefix(_KEPT)}" if name.startswith(_KEPT) else name.removeprefix("student.")


def _parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for part in module.modules():
        for leaf, parameter in list(part._parameters.items()):
            if parameter is not None:
                yield part, leaf, parameter


def save_lazy(lazy: LazyStudent, directory: Path, *, teacher: bool) -> None:
    """Write a student's weight files as `save_pretrained` does, with one file's tensors in memory. `teacher`: keep the
    teacher's projections of layers >= l; if not, the model's configuration is updated to say so."""
    write_model_shards(directory, stored_tensors(lazy, teacher=teacher))


def stored_tensors(lazy: LazyStudent, *, teacher: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield a student's tensors by their names in weight files, each read on demand; `teacher` as for `save_lazy`."""
    model = lazy.model
    dropped = () if teacher else tuple(f"{module}." for module in model.teacher_modules(model.config))
    if not teacher:
        model.config.swiftkv_teacher_weights = False
    for name, parameter in model.named_parameters():  # yields a tied head once
        if not name.startswith(dropped):
            read = {name: lazy.read(name).to(parameter.dtype)}
            # Tensors fused in memory are stored separately.
            yield from revert_weight_conversion(model, read).items()
