"""A student and its teacher as they are measured: whole on every worker, or FSDP2's shards, gathered layer by layer for
each forward pass. It knows no measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from swiftkv_platform.distillation.fork import first_trained_layer, keep_teacher, load_trained, sharding_units
from swiftkv_platform.distillation.parallel import materialize
from swiftkv_platform.model.lazy_student import LazyStudent
from swiftkv_platform.specs import DistillationSpec

T = TypeVar("T")


class MeasuredStudent(nn.Module):
    """A student from its lazy weights, which starts as copied. With layers of its own trained, its teacher keeps those
    that they started as.

    Args:
        sharded: a worker of the default process group holds its rows of every parameter; else all.
    """

    def __init__(self, lazy: LazyStudent, spec: DistillationSpec, *, sharded: bool, device: torch.device) -> None:
        super().__init__()
        self.student = lazy.model
        self.kept_teacher: Any = None
        self.sharded = sharded
        self._lazy = lazy
        if spec.trainable != "qkv":
            self._keep_teacher(spec)
        self.requires_grad_(False)
        lazy.attach(self)
        if sharded:
            self._shard(spec, device)
        else:
            lazy.fill(self)

    def _keep_teacher(self, spec: DistillationSpec) -> None:
        decoder = self.student.model
        self.kept_teacher = keep_teacher(decoder, spec)
        decoder.teacher_upper = self.kept_teacher.teacher_upper
        if spec.trainable == "all":
            decoder.teacher_lower = self.kept_teacher.lower

    def _shard(self, spec: DistillationSpec, device: torch.device) -> None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        units = list(sharding_units(self.student.model))
        if self.kept_teacher is not None:
            units += list(self.kept_teacher.layers[first_trained_layer(self.student.config, spec) :])
        for unit in [*units, self]:
            fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        materialize(self, device)
        self._lazy.fill_shards(self)

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        if self.sharded:
            self._lazy.started_from(tensors)
            self._lazy.fill_shards(self, only=tensors)
        else:
            load_trained(self.student, tensors)

    @torch.no_grad()
    def forward(self, work: Callable[[Any], T]) -> T:
        """Return what `work` makes of the student; collective where it is sharded, and so are its forward passes."""
        return work(self.student)


def parameter_bytes(model: nn.Module) -> int:
    """Bytes of a model's parameters, wherever they are."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
