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

from swiftkv_platform.distillation.model import DistillationModel
from swiftkv_platform.distillation.strategy import (
    STUDENT_PREFIX,
    StateReader,
    Strategy,
    TrainingState,
    WeightSource,
    build_adamw,
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

MAX_BUILD_SECONDS = 600.0
"""Age after which a build lock is stale; a build takes a minute or two."""


def remove_stale_build_locks() -> None:
    """Remove the locks of interrupted builds, for which later processes on the machine would wait forever."""
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in root.glob("**/lock"):
        try:
            is_stale = time.time() - lock.stat().st_mtime > MAX_BUILD_SECONDS
        except FileNotFoundError:  # the build has just ended
            continue
        if is_stale:
            lock.unlink(missing_ok=True)
            get_logger().warning("stale_build_lock_removed", path=str(lock))


_ADAM_MOMENT_NAMES = ("exp_avg", "exp_avg_sq")


class DeepSpeedStrategy(Strategy):
    """ZeRO stage 1 shards optimizer state, 2 also gradients, 3 also parameters, including frozen ones.

    Stage 3 reads the `weights` of a model on the meta device unit by unit.
    """

    def __init__(
        self,
        model: DistillationModel,
        spec: JobSpec,
        weights: WeightSource | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__(model, device=device)
        os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # DeepSpeed requires it; launchers set it
        remove_stale_build_locks()
        deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False, verbose=False)
        settings = _build_deepspeed_config(spec, dtype, device)
        self._stage = spec.sharding.zero_stage
        for parameter in model.parameters():  # with bfloat16, ZeRO keeps the float32 masters
            parameter.data = parameter.data.to(dtype)
        if self._stage == 3:
            _partition_weights(model, weights, settings)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=build_adamw(trained, spec.optimizer), config=settings, dist_init_required=False
        )
        self.module: nn.Module = self._engine
        self._optimizer = self._engine.optimizer
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._create_moments()

    @contextmanager
    def run_micro_batch(self, *, last: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self._engine.backward(loss)

    def step_optimizer(self, learning_rate: float) -> float:
        set_learning_rate([self._optimizer], learning_rate)
        self._engine.step()  # clips; skips the update if the norm is not finite
        norm = float(self._engine.get_global_grad_norm())
        return norm if norm >= 0.0 else math.nan

    def snapshot_weights(self) -> Callable[[], None]:
        saved = {name: safe_get_full_fp32_param(p).detach().to("cpu", copy=True) for name, p in self._trained.items()}

        def restore_weights() -> None:
            for name, parameter in self._trained.items():
                whole = saved[name].view(_get_full_shape(parameter))
                self._set_parameter(parameter, whole)
                self._set_moments(parameter, [torch.zeros_like(whole) for _ in _ADAM_MOMENT_NAMES])
            self._set_step_count(torch.zeros(()))

        return restore_weights

    def gather_matrices(self) -> Iterator[Tensor]:
        for parameter in self._trained.values():
            whole = safe_get_full_fp32_param(parameter)  # collective, so called for vectors too
            if len(_get_full_shape(parameter)) >= 2:
                yield whole.detach().view(_get_full_shape(parameter))

    def get_state(self) -> TrainingState:
        """Return whole tensors in host memory of rank 0, gathered one at a time; other workers return none."""
        model, optimizer = {}, {}
        step = self._list_moments()[0]["step"]
        for name, parameter in self._trained.items():
            tensors = [safe_get_full_fp32_param(parameter)]
            tensors += [safe_get_full_optimizer_state(parameter, key) for key in _ADAM_MOMENT_NAMES]
            if self.rank == 0:
                whole, *moments = (tensor.detach().cpu().clone().view(_get_full_shape(parameter)) for tensor in tensors)
                model[name] = whole
                optimizer[name] = {**dict(zip(_ADAM_MOMENT_NAMES, moments, strict=True)), "step": step.clone()}
        return {"model": model, "optimizer": optimizer}

    def load_state(self, read: StateReader) -> None:
        """Load one parameter at a time, so that no worker holds several whole ones."""
        step = torch.zeros(())
        for name, parameter in self._trained.items():
            whole, *moments = (torch.empty(_get_full_shape(parameter)) for _ in range(3))
            read(
                {
                    "model": {name: whole},
                    "optimizer": {name: {**dict(zip(_ADAM_MOMENT_NAMES, moments, strict=True)), "step": step}},
                }
            )
            self._set_parameter(parameter, whole)
            self._set_moments(parameter, moments)
        self._set_step_count(step)

    def _set_step_count(self, step: Tensor) -> None:
        for state in self._list_moments():
            state["step"].copy_(step)
        if self._stage < 3:
            self._optimizer.update_lp_params()

    def load_trained_tensors(self, tensors: Mapping[str, Tensor]) -> list[str]:
        missing = []
        for name, parameter in self._trained.items():
            if (own := name.removeprefix(STUDENT_PREFIX)) in tensors:
                self._set_parameter(parameter, tensors[own].float())
            else:
                missing.append(own)
        if self._stage < 3:
            self._optimizer.update_lp_params()
        return missing

    def _list_moments(self) -> list[dict[str, Tensor]]:
        """Return AdamW's state of each flat partition."""
        return list(self._optimizer.optimizer.state.values())

    def _create_moments(self) -> None:
        """Create the moments before AdamW's first step, because DeepSpeed needs all of them after the first group's
        step."""
        adam = self._optimizer.optimizer
        sharded = getattr(self._optimizer, "fp32_partitioned_groups_flat", None)  # stage 3
        flats = sharded or [flat for group in adam.param_groups for flat in group["params"]]
        for flat in flats:
            adam.state[flat] = {"step": torch.zeros(()), **{key: torch.zeros_like(flat) for key in _ADAM_MOMENT_NAMES}}
        if sharded is None:
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _set_parameter(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Set a parameter and its float32 master."""
        if self._stage < 3:
            safe_set_full_fp32_param(parameter, whole.to(self.device))
            return
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.data.copy_(whole)
        safe_set_local_fp32_param(parameter, self._cut_own_shard(parameter, whole))

    def _set_moments(self, parameter: nn.Parameter, moments: list[Tensor]) -> None:
        for key, tensor in zip(_ADAM_MOMENT_NAMES, moments, strict=True):
            if self._stage < 3:
                safe_set_full_optimizer_state(parameter, tensor.to(self.device), key)
            else:
                safe_set_local_optimizer_state(parameter, self._cut_own_shard(parameter, tensor), key)

    def _cut_own_shard(self, parameter: Any, whole: Tensor) -> Tensor:
        """Return this worker's stage 3 shard of a whole tensor, padded as DeepSpeed pads."""
        size = parameter.ds_tensor.numel()
        flat = nn.functional.pad(whole.flatten(), (0, size * self.world_size - whole.numel()))
        return flat[self.rank * size : (self.rank + 1) * size]


def _get_full_shape(parameter: Any) -> torch.Size:
    """Return the shape of the whole parameter; stage 3 frees its values between uses."""
    shape: torch.Size = getattr(parameter, "ds_shape", parameter.shape)
    return shape


def _partition_weights(model: DistillationModel, weights: WeightSource | None, settings: dict[str, Any]) -> None:
    for unit in [*model.iter_sharding_units(), model]:
        for module in unit if isinstance(unit, list) else [unit]:
            if weights is not None:
                weights.load_parameters(module, read=dist.get_rank() == 0)  # DeepSpeed broadcasts rank 0's values
            deepspeed.zero.Init(module=module, mem_efficient_linear=False, config_dict_or_path=settings)
    # The losses use the heads' weights without calling the heads.
    for head in model.get_heads():
        deepspeed.zero.register_external_parameter(model, head.weight)


def _build_deepspeed_config(spec: JobSpec, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Return DeepSpeed's configuration. The trainer splits micro batches and marks the last one of a step."""
    sharding = spec.sharding
    zero: dict[str, Any] = {"stage": sharding.zero_stage}
    # On a CPU everything is in host memory already; the setting applies anyway.
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
