"""A student without weights, and where each tensor's values come from: no process need ever hold it whole.

A module is filled before it runs or is sharded, and released when it has run; of a model that is sharded already every
worker reads its own rows. It knows names and files, no strategy.
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

_KEPT = "kept_teacher."
_Place = tuple[int, str]
"""Identity of a module, and the name of one of its parameters."""


class LazyStudent:
    """A student on the meta device whose weights are read when they are asked for.

    Args:
        model: the student, its positional buffers in place.
        start: where new tensors start, or tensors that are the student's own, by name; what it lacks is copied from the
            teacher's.
        device: where values go.
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
        start: Mapping[str, Tensor],
        *,
        revision: str | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        **shape: Any,
    ) -> LazyStudent:
        """The student of the teacher at `path`, whose names and shapes are checked first.

        Args:
            dtype: dtype of the student; None keeps the checkpoint's values and the configuration's dtype.
            shape: what `make_student_config` takes.

        Raises:
            ModelError: unreadable model, unknown family, or tensors that are missing or do not fit.
            InvalidInputError: l or g out of range.
        """
        teacher = read_config(path, revision=revision)
        config = make_student_config(teacher, **shape)
        quantized = is_quantized(teacher)
        checkpoint = Checkpoint.open(path, revision=revision)
        settle_head(teacher, checkpoint)
        config.tie_word_embeddings = teacher.tie_word_embeddings
        with made_without_weights(checkpoint.source):
            whole = student_classes(teacher.model_type).teacher(copy.deepcopy(teacher))
        check_tensors(checkpoint, whole, quantized=quantized)
        if quantized:
            del config.quantization_config  # the student holds what the quantised weights stand for
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
        """Take the student's own tensors from `start` from now on."""
        self._start = start

    def attach(self, fork: nn.Module) -> None:
        """Learn which parameter is which of a fork, or of what else has the student as `student` and may have a
        `kept_teacher`."""
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
        # The first of the names that a tied parameter has; of the kept teacher's copies each is a parameter.
        self._tied = {name: names[0] for names in aliases.values() if len(names) > 1 for name in names}
        self._filled: dict[str, nn.Parameter] = {}

    @torch.no_grad()
    def fill(self, module: nn.Module, *, own: bool = True, read: bool = True) -> None:
        """Give every parameter of `module` that is on the meta device its values, in the dtype it has.

        Args:
            own: those that the teacher has not among them.
            read: without, there is storage and no value, as for a worker that gets the values of another.
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
        """Give every parameter of a model that FSDP2 has sharded its values, of which a worker reads its own rows.

        Args:
            root: the module that the names were learnt of.
            only: names of the student's to write; None: all.
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
        """A tensor of the student, or no more than some rows of it."""
        if name in self._start:
            return read_rows(self._start, name, rows)
        copied = self._copied.get(name)
        if copied is None or name in self._teacher:  # the files are a student's
            return self._teacher.read(name, rows)
        return copied.made(self._teacher.read, rows)


def own_rows(parameter: DTensor) -> slice:
    """The rows of a parameter that this worker holds, one mesh dimension sharded along the first."""
    (placement,) = parameter.placements
    if not isinstance(placement, Shard):
        return slice(0, parameter.shape[0])
    assert placement.dim == 0, "FSDP2 shards rows"
    size, rank = parameter.device_mesh.size(), parameter.device_mesh.get_local_rank()
    share = -(-parameter.shape[0] // size)
    start = min(rank * share, parameter.shape[0])
    return slice(start, start + parameter.to_local().shape[0])


def _student_name(name: str) -> str:
    """The student's name of a fork's parameter."""
    return f"model.{name.removeprefix(_KEPT)}" if name.startswith(_KEPT) else name.removeprefix("student.")


def _parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for part in module.modules():
        for leaf, parameter in list(part._parameters.items()):
            if parameter is not None:
                yield part, leaf, parameter


def save_lazy(lazy: LazyStudent, directory: Path, *, teacher: bool) -> None:
    """Write a student's weight files as `save_pretrained` would, one file's worth in memory. `teacher`: keep the
    teacher's projections of layers >= l; without, the configuration says that they are gone."""
    write_model_shards(directory, stored_tensors(lazy, teacher=teacher))


def stored_tensors(lazy: LazyStudent, *, teacher: bool) -> Iterator[tuple[str, Tensor]]:
    """A student's tensors under the names of its weight files, each read when it is asked for; `teacher` as for
    `save_lazy`."""
    model = lazy.model
    dropped = () if teacher else tuple(f"{module}." for module in model.teacher_modules(model.config))
    if not teacher:
        model.config.swiftkv_teacher_weights = False
    for name, parameter in model.named_parameters():  # a tied head comes once
        if not name.startswith(dropped):
            read = {name: lazy.read(name).to(parameter.dtype)}
            # What is fused in memory is stored apart.
            yield from revert_weight_conversion(model, read).items()
