"""Memory of a worker that writes a job's data with the teacher: the engine there holds all of it. Knows no cluster."""

from __future__ import annotations

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.planning.config import ConfigSource
from swiftkv_platform.planning.devices import DEVICE_MEMORY
from swiftkv_platform.planning.families import read_architecture
from swiftkv_platform.planning.prefill import dense_layer_map
from swiftkv_platform.planning.serving import ServingSetup, plan_serving, weights_bytes
from swiftkv_platform.specs import JobSpec


def teacher_bytes(config: ConfigSource, dtype: str) -> int:
    """Return the size of a teacher's weights."""
    model = read_architecture(config)
    return weights_bytes(model, dense_layer_map(model), dtype)


def refuse_writers_without_room(spec: JobSpec, config: ConfigSource) -> None:
    """Compare the teacher with the memory of the GPU that is named, where workers have one, and of `memory_per_worker`.

    Raises:
        InvalidInputError: a source has its rows written by a teacher that does not fit one worker.
    """
    on_gpu, given = spec.resources.gpus_per_worker > 0, DEVICE_MEMORY.get(spec.resources.accelerator_type or "")
    if on_gpu and given is not None:
        setup = ServingSetup(
            memory_bytes=int(given),
            sequence_length=spec.data.max_length or 1,
            weights_dtype=spec.model.dtype,
            kv_cache_dtype=spec.model.dtype,
        )
        if plan_serving(config, setup).dense.num_sequences < 1:
            refuse(spec, teacher_bytes(config, spec.model.dtype), given * (1 - setup.reserved), "of its device")
    memory = spec.resources.memory_per_worker
    needed = teacher_bytes(config, spec.model.dtype)
    if memory is not None and memory < needed:
        refuse(spec, needed, memory, "of host memory (resources.memory_per_worker)")


def refuse(spec: JobSpec, needed: float, given: float, where: str) -> None:
    """Refuse the first source that the teacher is to write.

    Raises:
        InvalidInputError: there is one.
    """
    for index, source in enumerate(spec.data.sources):
        if source.complete is not None:
            raise InvalidInputError(
                f"data.sources[{index}].complete has every worker load the whole teacher, {needed / 1e9:.1f} GB in "
                f"{spec.model.dtype} and its cache, and a worker has {given / 1e9:.1f} GB {where}: more of it, a "
                "teacher that is smaller, or text that was written elsewhere would do",
                field=f"data.sources.{index}.complete",
                value=source.name_or_path,
            )
