"""DeepSpeed ZeRO 1, 2 and 3 with torch's AdamW. Its checkpoints are whole tensors, which every strategy reads."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.cpp_extension import get_default_build_root

from swiftkv_platform.distillation.fork import Fork
from swiftkv_platform.distillation.parallel import (
    STUDENT,
    Parallel,
    Read,
    State,
    Weights,
    build_optimizer,
    set_learning_rate,
)
from swiftkv_platform.logs import get_logger
from swiftkv_platform.specs import JobSpec

os.environ.setdefault("DS_SKIP_CUDA_CHECK", "1")
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)

import deepspeed  # noqa: E402
from deepspeed.utils import (  # noqa: E402
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)

LONGEST_BUILD_S = 600.0
"""Seconds after which a build lock counts as left behind by a process that died; a build takes a minute or two."""


def remove_abandoned_locks() -> None:
    """Remove the locks of interrupted builds, on which every later process on the machine would wait forever."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in root.glob("**/lock"):
        try:
            abandoned = time.time() - lock.stat().st_mtime > LONGEST_BUILD_S
        except FileNotFoundError:  # its build has just ended
            continue
        if abandoned:
            lock.unlink(missing_ok=True)
            get_logger().warning("abandoned_build_lock_removed", path=str(lock))


_MOMENTS = ("exp_avg", "exp_avg_sq")


class ZeRO(Parallel):
    """Stage 1 shards optimizer state, 2 gradients too, 3 parameters too, frozen ones included.

    Stage 3 gives a fork on the meta device its `weights` unit by unit as each is sharded.
    """

    def __init__(
        self, fork: Fork, spec: JobSpec, weights: Weights | None, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(fork, device=device)
        os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # DeepSpeed requires it; launchers set it
        remove_abandoned_locks()
        deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)
        settings = _settings(spec, dtype, device)
        self._stage = spec.sharding.zero_stage
        for parameter in fork.parameters():  # with bfloat16, ZeRO keeps the float32 masters
            parameter.data = parameter.data.to(dtype)
        if self._stage == 3:
            _partition(fork, weights, settings)
        trained = [parameter for parameter in fork.parameters() if parameter.requires_grad]
        self._engine, *_ = deepspeed.initialize(
            model=fork, optimizer=build_optimizer(trained, spec.optimizer), config=settings, dist_init_required=False
        )
        self.module: nn.Module = self._engine
        self._optimizer = self._engine.optimizer
        self._trained = {name: p for name, p in fork.named_parameters() if p.requires_grad}
        self._create_moments()

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def update(self, learning_rate: float) -> float:
        set_learning_rate([self._optimizer], learning_rate)
        self._engine.step()  # clips; skips the update if the norm is not finite
        norm = float(self._engine.get_global_grad_norm())
        return norm if norm >= 0.0 else math.nan

    def remember(self) -> Callable[[], None]:
        kept = {name: safe_get_full_fp32_param(p).detach().to("cpu", copy=True) for name, p in self._trained.items()}

        def put_back() -> None:
            for name, parameter in self._trained.items():
                whole = kept[name].view(_shape(parameter))
                self._set(parameter, whole)
                self._set_moments(parameter, [torch.zeros_like(whole) for _ in _MOMENTS])
            self._finish_setting(torch.zeros(()))

        return put_back

    def matrices(self) -> Iterator[Tensor]:
        for parameter in self._trained.values():
            whole = safe_get_full_fp32_param(parameter)  # collective, so called for vectors too
            if len(_shape(parameter)) >= 2:
                yield whole.detach().view(_shape(parameter))

    def state(self) -> State:
        """Return whole tensors, gathered one at a time, in host memory of rank 0; other workers get none."""
        first = self.rank == 0
        model, optimizer = {}, {}
        step = self._moments()[0]["step"]
        for name, parameter in self._trained.items():
            tensors = [safe_get_full_fp32_param(parameter)]
            tensors += [safe_get_full_optimizer_state(parameter, key) for key in _MOMENTS]
            if first:
                whole, *moments = (tensor.detach().cpu().clone().view(_shape(parameter)) for tensor in tensors)
                model[name] = whole
                optimizer[name] = {**dict(zip(_MOMENTS, moments, strict=True)), "step": step.clone()}
        return {"model": model, "optimizer": optimizer}

    def load_state(self, read: Read) -> None:
        """One parameter at a time, so that no worker holds more than one that is whole."""
        step = torch.zeros(())
        for name, parameter in self._trained.items():
            whole, *moments = (torch.empty(_shape(parameter)) for _ in range(3))
            read(
                {
                    "model": {name: whole},
                    "optimizer": {name: {**dict(zip(_MOMENTS, moments, strict=True)), "step": step}},
                }
            )
            self._set(parameter, whole)
            self._set_moments(parameter, moments)
        self._finish_setting(step)

    def _finish_setting(self, step: Tensor) -> None:
        for state in self._moments():
            state["step"].copy_(step)
        if self._stage < 3:
            self._optimizer.update_lp_params()

    def load_trained(self, tensors: Mapping[str, Tensor]) -> list[str]:
        missing = []
        for name, parameter in self._trained.items():
            if (own := name.removeprefix(STUDENT)) in tensors:
                self._set(parameter, tensors[own].float())
            else:
                missing.append(own)
        if self._stage < 3:
            self._optimizer.update_lp_params()
        return missing

    def _moments(self) -> list[dict[str, Tensor]]:
        """AdamW's state of each flat partition."""
        return list(self._optimizer.optimizer.state.values())

    def _create_moments(self) -> None:
        """Create the moments before AdamW's first step. DeepSpeed looks for them after the first group's step."""
        adam = self._optimizer.optimizer
        sharded = getattr(self._optimizer, "fp32_partitioned_groups_flat", None)  # stage 3
        flats = sharded or [flat for group in adam.param_groups for flat in group["params"]]
        for flat in flats:
            adam.state[flat] = {"step": torch.zeros(()), **{key: torch.zeros_like(flat) for key in _MOMENTS}}
        if sharded is None:
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _set(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Parameter and its float32 master."""
        if self._stage < 3:
            safe_set_full_fp32_param(parameter, whole.to(self.device))
            return
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(whole)
        safe_set_local_fp32_param(parameter, self._local(parameter, whole))

    def _set_moments(self, parameter: nn.Parameter, moments: list[Tensor]) -> None:
        for key, tensor in zip(_MOMENTS, moments, strict=True):
            if self._stage < 3:
                safe_set_full_optimizer_state(parameter, tensor.to(self.device), key)
            else:
                safe_set_local_optimizer_state(parameter, self._local(parameter, tensor), key)

    def _local(self, parameter: Any, whole: Tensor) -> Tensor:
        """Cut this worker's piece of stage 3 out of a whole tensor, padded as DeepSpeed pads."""
        size = parameter.ds_tensor.numel()
        flat = nn.functional.pad(whole.flatten(), (0, size * self.world_size - whole.numel()))
        return flat[self.rank * size : (self.rank + 1) * size]


def _shape(parameter: Any) -> torch.Size:
    """Return the shape of the whole parameter: stage 3 leaves an empty one between uses."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _partition(fork: Fork, weights: Weights | None, settings: dict[str, Any]) -> None:
    for unit in [*fork.units(), fork]:
        for module in unit if isinstance(unit, list) else [unit]:
            if weights is not None:
                weights.fill(module, read=dist.get_rank() == 0)  # DeepSpeed broadcasts rank 0's values
            deepspeed.zero.Init(module=module, mem_efficient_linear=False, config_dict_or_path=settings)
    # The losses use the heads' weights outside the heads' forward.
    for head in fork.heads():
        deepspeed.zero.register_external_parameter(fork, head.weight)


def _settings(spec: JobSpec, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return DeepSpeed's configuration. Our code cuts micro batches and tells DeepSpeed which is the last of a step."""
    sharding = spec.sharding
    zero: dict[str, Any] = {"stage": sharding.zero_stage}
    # On a CPU everything is in host memory already; the setting is honoured anyway.
    if sharding.cpu_offload:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": device.type != "cpu"}
        if sharding.zero_stage == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": device.type != "cpu"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": spec.training.micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": spec.optimizer.max_grad_norm,
        "zero_optimization": zero,
        # torch's AdamW: DeepSpeed's own compiles for minutes on first use on a CPU.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 60,
    }
    if dtype == torch.bfloat16:
        settings |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return settings
