"""The training setup of a job spec, and checks that training and the generation of rows fit a worker's memory."""

from __future__ import annotations

from dataclasses import replace

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.planning.architecture import Architecture, count_student_parameters, read_architecture
from swiftkv_platform.planning.config import ConfigSource
from swiftkv_platform.planning.machines import DEVICE_MEMORY
from swiftkv_platform.planning.serving import ServingSetup, compute_weight_bytes, plan_serving
from swiftkv_platform.planning.training import FLOAT32_BYTES, TrainingSetup, compute_worker_memory, has_rate_search
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.job import BATCH_SIZE
from swiftkv_platform.student_shape import LayerMap

_MAX_WORKERS = 4096
"""Max number of workers that an error message proposes."""


def make_training_setup(spec: JobSpec) -> TrainingSetup:
    """Return the settings of `spec` that determine its training cost."""
    return TrainingSetup(
        sequence_length=spec.data.max_length,
        micro_batch_size=spec.training.micro_batch_size,
        batch_size=spec.training.batch_size or BATCH_SIZE,
        num_workers=spec.resources.max_workers,
        dtype=spec.model.dtype,
        strategy=spec.sharding.strategy,
        zero_stage=spec.sharding.zero_stage,
        cpu_offload=spec.sharding.cpu_offload,
        sequence_parallel_size=spec.sharding.sequence_parallel_size,
        gradient_checkpointing=spec.training.gradient_checkpointing,
        compiled=spec.training.compile,
        trainable=spec.distillation.trainable,
        objective=spec.distillation.objective,
        hidden_loss=spec.distillation.hidden_loss_weight > 0,
        searches_rate=has_rate_search(spec),
        device="cuda" if spec.resources.gpus_per_worker else "cpu",
    )


def check_training_memory(spec: JobSpec, model: Architecture, layer_map: LayerMap) -> None:
    """Raise `InvalidInputError` with a sufficient setting if training does not fit into the memory of the named GPU (if
    known) or into the requested host memory."""
    setup, resources = make_training_setup(spec), spec.resources
    device, host = _compute_training_bytes(model, layer_map, setup)
    given = DEVICE_MEMORY.get(resources.accelerator_type or "")
    if resources.gpus_per_worker and given is not None and device > given:
        enough = _find_sufficient_workers(model, layer_map, setup, given)
        advice = "sharding.strategy fsdp2 or a GPU with more memory"
        if enough is not None:
            advice = f"resources.num_workers {enough}"
        raise InvalidInputError(
            f"training with {setup.num_workers} workers needs {device / 1e9:.0f} GB of GPU memory per worker, but an "
            f"{resources.accelerator_type} has {given / 1e9:.0f} GB; use {advice}",
            field="resources.num_workers",
            value=setup.num_workers,
        )
    requested = resources.memory_per_worker
    if requested is not None and host > requested:
        raise InvalidInputError(
            f"training needs {host / 1e9:.1f} GB of host memory per worker, but resources.memory_per_worker is "
            f"{requested / 1e9:.1f} GB; use {host} plus the memory of the process itself",
            field="resources.memory_per_worker",
            value=requested,
        )


def _compute_training_bytes(model: Architecture, layer_map: LayerMap, setup: TrainingSetup) -> tuple[int, int]:
    """Return the peak bytes of a worker's device, and of its host memory beyond a process without a model. Without a
    GPU the device is the host."""
    parameters = count_student_parameters(model, layer_map, setup.trainable)
    memory = compute_worker_memory(model, layer_map, parameters, setup)
    if setup.device == "cpu":
        return memory.peak, memory.peak
    narrow = 2 if setup.dtype == "bfloat16" else FLOAT32_BYTES
    sharded = setup.strategy == "fsdp2" or (setup.strategy == "deepspeed" and setup.zero_stage == 3)
    read = max(parameters.largest_layer, parameters.root) if sharded else parameters.total
    # Reading weights, trying learning rates and writing checkpoints happen at different times: take the maximum.
    host = memory.host + max(narrow * read, memory.remembered)
    if setup.strategy == "deepspeed":  # the first worker assembles a checkpoint in host memory
        host = max(host, memory.host + 3 * FLOAT32_BYTES * parameters.trained)
    return memory.peak, host


def _find_sufficient_workers(
    model: Architecture, layer_map: LayerMap, setup: TrainingSetup, device_bytes: float
) -> int | None:
    """Double the number of workers until training fits devices of `device_bytes`. None if `_MAX_WORKERS` do not fit."""
    num_workers = setup.num_workers * 2
    while num_workers <= _MAX_WORKERS:
        larger = replace(setup, num_workers=num_workers)
        larger = replace(larger, batch_size=max(setup.batch_size, larger.global_micro_batch_size))
        if _compute_training_bytes(model, layer_map, larger)[0] <= device_bytes:
            return num_workers
        num_workers *= 2
    return None


def compute_teacher_bytes(config: ConfigSource, dtype: str) -> int:
    model = read_architecture(config)
    return compute_weight_bytes(model, LayerMap.dense(len(model.layers)), dtype)


def check_row_generation_memory(spec: JobSpec, config: ConfigSource) -> None:
    """Raise `InvalidInputError` if the teacher generates rows of a source, without an endpoint, but does not fit into a
    worker's memory (that of the named GPU, or `memory_per_worker`). Each worker's engine holds the whole teacher."""
    on_gpu, gpu_bytes = spec.resources.gpus_per_worker > 0, DEVICE_MEMORY.get(spec.resources.accelerator_type or "")
    teacher_bytes = compute_teacher_bytes(config, spec.model.dtype)
    if on_gpu and gpu_bytes is not None:
        setup = ServingSetup(
            memory_bytes=int(gpu_bytes),
            sequence_length=spec.data.max_length or 1,
            weights_dtype=spec.model.dtype,
            kv_cache_dtype=spec.model.dtype,
        )
        if plan_serving(config, setup).dense.num_sequences < 1:
            refuse_row_generation(spec, teacher_bytes, gpu_bytes * (1 - setup.reserved), "of GPU memory")
    memory = spec.resources.memory_per_worker
    if memory is not None and memory < teacher_bytes:
        refuse_row_generation(spec, teacher_bytes, memory, "of host memory (resources.memory_per_worker)")


def refuse_row_generation(spec: JobSpec, teacher_bytes: float, worker_bytes: float, memory_kind: str) -> None:
    """Raise `InvalidInputError` for the first source whose rows the teacher generates, if any."""
    for index, source in enumerate(spec.data.sources):
        if source.complete is not None and source.complete.endpoint is None:
            raise InvalidInputError(
                f"data.sources[{index}].complete makes every worker load the whole teacher, {teacher_bytes / 1e9:.1f} "
                f"GB in {spec.model.dtype} plus its KV cache, but a worker has {worker_bytes / 1e9:.1f} GB "
                f"{memory_kind}: use more memory, a smaller teacher, or complete.endpoint, a server of the teacher",
                field=f"data.sources.{index}.complete",
                value=source.name_or_path,
            )
