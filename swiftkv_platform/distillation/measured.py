"""Student and teacher for measurements: whole on every worker, or sharded by FSDP2 and gathered layer by layer in each
forward pass.
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
    """A student made from its lazy weights, with the copied start. If layers of its own are trained, the teacher keeps
    the untrained ones.

    Args:
        sharded: whether each worker of the default process group holds only its rows of every parameter.
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
        """Return `work(student)`. Collective if sharded, since its forward passes are."""
        return work(self.student)


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters on any device."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
