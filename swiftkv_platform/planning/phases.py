"""Memory of a worker in the phases of a job that run the model, and whether it fits the given device and host
memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.planning.architecture import Architecture
from swiftkv_platform.planning.config import ConfigSource
from swiftkv_platform.planning.layers import LayerMap
from swiftkv_platform.planning.machines import DEVICE_MEMORY
from swiftkv_platform.planning.parameters import Parameters, largest_teacher_layer
from swiftkv_platform.planning.phase_plans import JobPlan
from swiftkv_platform.planning.prefill import dense_layer_map
from swiftkv_platform.planning.reading import read_architecture
from swiftkv_platform.planning.serving import ServingSetup, plan_serving, weights_bytes
from swiftkv_platform.planning.training_memory import WIDE, gathered_weights, layer_buffers, worker_memory
from swiftkv_platform.planning.training_setup import TrainingSetup
from swiftkv_platform.specs import JobSpec

Phase = Literal["train", "calibrate", "evaluate"]

_DOUBLE = 8
_TOKENS_PER_FORWARD = 8192
"""Tokens of an evaluation's forward pass; at least one row."""
_MOST_WORKERS = 4096
MODEL_SHARE = 0.5
"""Share of a worker's free memory up to which weights are measured whole; the rest is for activations and caches."""
MAX_ACTIVATION_BYTES = 4 << 30
"""Most bytes of activations that a worker keeps in host memory during calibration; the rest goes to disk."""


class PhaseMemory(FrozenModel):
    """Memory of the worker that holds most in a phase, in bytes."""

    phase: Phase
    on_gpu: bool
    device: int
    """On its device; without a GPU, in its process."""
    host: int
    """Further bytes in host memory: weights on their way to a GPU, offloaded state, activations between layers."""

    @property
    def in_host_memory(self) -> int:
        """Bytes in host memory, in addition to a process without a model."""
        return self.host if self.on_gpu else self.host + self.device


def plan_phases(
    model: Architecture, layer_map: LayerMap, parameters: Parameters, setup: TrainingSetup, *, calibration_tokens: int
) -> tuple[PhaseMemory, ...]:
    """Memory of training, of calibration layer by layer, and of evaluation with the weights divided as in training.
    `calibration_tokens`: tokens of the calibrated start; 0 for a copied one."""
    narrow = 2 if setup.dtype == "bfloat16" else WIDE
    on_gpu = setup.device != "cpu"
    read = narrow * max(parameters.largest_layer, parameters.root)
    training = worker_memory(model, layer_map, parameters, setup)
    sharded = setup.strategy == "fsdp2" or (setup.strategy == "deepspeed" and setup.zero_stage == 3)
    weights = narrow * parameters.total
    whole_on_host = read if sharded else weights
    # One after the other: weights are read, rates tried, checkpoints made.
    training_host = training.host + max(whole_on_host, training.remembered)
    if setup.strategy == "deepspeed":  # the first worker assembles a checkpoint in host memory
        training_host = max(training_host, training.host + 3 * WIDE * parameters.trained)

    def phase(name: Phase, device: int, host: int) -> PhaseMemory:
        return PhaseMemory(phase=name, on_gpu=on_gpu, device=device, host=on_gpu * host)

    phases = [phase("train", training.peak, training_host)]
    if calibration_tokens:
        waiting = min(waiting_activations(model, layer_map, setup, calibration_tokens), MAX_ACTIVATION_BYTES)
        # Without a GPU the row being run is counted in the process already.
        beside = read + waiting if on_gpu else waiting - waiting // calibration_rows(setup, calibration_tokens)
        device = _calibration(model, layer_map, setup, narrow)
        phases.append(PhaseMemory(phase="calibrate", on_gpu=on_gpu, device=device, host=beside))
    device = _evaluation(model, layer_map, parameters, setup, narrow, sharded=sharded)
    phases.append(phase("evaluate", device, whole_on_host))
    return tuple(phases)


def calibration_rows(setup: TrainingSetup, calibration_tokens: int) -> int:
    return -(-calibration_tokens // (setup.sequence_length * setup.num_workers))


def waiting_activations(model: Architecture, layer_map: LayerMap, setup: TrainingSetup, calibration_tokens: int) -> int:
    """Return the bytes of activations that a worker keeps between layers for all its rows, and of those of layer l, two
    sets if prompts bypass layers (prompts and deep tokens). A refitted start adds the student's, and the teacher's
    after the attention of each layer of a group; deep tokens with their own K and V add the inputs of a group's leader.
    """
    narrow = 2 if setup.dtype == "bfloat16" else WIDE
    several = layer_map.key_value_group_size > 1
    states = 2 + setup.refitted * (1 + layer_map.key_value_group_size) + (setup.decodes_own and several)
    states += bool(layer_map.bypassed)
    return calibration_rows(setup, calibration_tokens) * setup.sequence_length * states * narrow * model.hidden_size


def _calibration(model: Architecture, layer_map: LayerMap, setup: TrainingSetup, narrow: int) -> int:
    """Return the peak of calibration: a teacher layer over one row with its records, the fit of a group, or the
    embeddings."""
    own, hidden, tokens = model.shared_attention, model.hidden_size, setup.sequence_length
    key_value, query = sum(linear.out_features for linear in own.key_value), own.num_heads * own.query_size
    states, layer = layer_buffers(model, setup, num_tokens=tokens)
    # Sums of squares with their factors, and those of a group with its outputs.
    size = layer_map.key_value_group_size
    sums = _DOUBLE * (2 * (hidden + 1) ** 2 + (size - 1) * (hidden + 1) * key_value)
    if setup.decodes_own and size > 1:
        sums += _DOUBLE * (2 * (hidden + 1) ** 2 + size * (hidden + 1) * key_value)
    recorded = _DOUBLE * tokens * (key_value + query)
    running = narrow * largest_teacher_layer(model) + states + layer + recorded
    # A projection of queries is rotated in float64: itself, its complex parts, their product and its parts again.
    of_output = setup.own_output_projection * own.output_parameters
    of_decode = setup.decodes_own * own.decode_parameters
    twins = narrow * 2 * (own.query_parameters + of_output + own.key_value_parameters + of_decode)
    turning = twins + 4 * _DOUBLE * max(hidden * query, of_output)
    # The layers of a group are merged by their maps of x and of what deep tokens write: the maps themselves, those
    # of keys weighted, in complex parts, and their products with the sums, in complex numbers. Values are weighted by
    # the teacher's output projections, one of which is in float64.
    maps = _DOUBLE * size * (1 + setup.decodes_own) * (hidden + 1) * 9 * key_value // 4
    weighed = (size * narrow + _DOUBLE) * own.output_parameters
    merging = sums + size * twins + weighed + 2 * _DOUBLE * (hidden + 1) ** 2 + maps
    fitting = max(sums + running, sums + turning, merging, narrow * model.vocab_size * hidden + states)
    if not setup.refitted:
        return fitting
    # Then the student's layer over a row, with the sums of the group and its attention, twins included.
    width = own.output_parameters // hidden  # inputs of the output projection
    attentions = layer_map.key_value_group_size * twins
    regressed = _DOUBLE * (2 * width * (width + hidden) + tokens * (width + hidden))
    attended = regressed + narrow * tokens * (query + width)
    solving = _DOUBLE * width * (3 * width + 4 * hidden)
    beside = max(attended, solving, layer)  # one after the other
    student = narrow * largest_teacher_layer(model) + states + narrow * tokens * key_value + beside
    return max(fitting, sums + attentions + student)


def _evaluation(
    model: Architecture,
    layer_map: LayerMap,
    parameters: Parameters,
    setup: TrainingSetup,
    narrow: int,
    *,
    sharded: bool,
) -> int:
    """Rows through teacher and student, with the student's keys and values of all groups."""
    num_tokens = max(_TOKENS_PER_FORWARD // setup.sequence_length, 1) * setup.sequence_length
    states, layer = layer_buffers(model, setup, num_tokens=num_tokens)
    embedded = 2 * narrow * model.hidden_size * num_tokens
    cached = sum(entry.heads * entry.size for entry in model.shared_attention.entries)
    states += narrow * cached * len(layer_map.leaders) * num_tokens
    weights = narrow * parameters.total
    if not sharded:
        return weights + states + layer
    gathering = states + gathered_weights(parameters, narrow, units=3)
    running = states + gathered_weights(parameters, narrow, units=2) + layer
    # While the first layer runs, the buffer in which embedding and head were gathered is still there.
    beginning = embedded + gathered_weights(parameters, narrow, units=2) + narrow * parameters.root
    return weights // setup.num_workers + max(gathering, running, beginning)


def refuse_what_cannot_fit(
    model: Architecture,
    layer_map: LayerMap,
    parameters: Parameters,
    setup: TrainingSetup,
    *,
    calibration_tokens: int,
    accelerator_type: str | None,
    memory_per_worker: int | None,
) -> None:
    """Raise `InvalidInputError`, naming what is accepted, for a phase that does not fit into the memory of the named
    GPU (if it is known) or into the requested host memory."""

    def planned(setup: TrainingSetup) -> tuple[PhaseMemory, ...]:
        return plan_phases(model, layer_map, parameters, setup, calibration_tokens=calibration_tokens)

    given = DEVICE_MEMORY.get(accelerator_type or "")
    phases = planned(setup)
    unfit = None if given is None else next((each for each in phases if each.on_gpu and each.device > given), None)
    if unfit is not None and given is not None:
        enough = _enough_workers(setup, lambda larger: _of_phase(planned(larger), unfit.phase).device <= given)
        raise _unfit(unfit, accelerator_type, given, setup.num_workers, enough)
    needed = max(phases, key=lambda memory: memory.in_host_memory)
    if memory_per_worker is not None and needed.in_host_memory > memory_per_worker:
        raise InvalidInputError(
            f"phase {needed.phase} needs {needed.in_host_memory / 1e9:.1f} GB of a worker's host memory, and "
            f"resources.memory_per_worker is {memory_per_worker / 1e9:.1f} GB; use {needed.in_host_memory}, and what "
            "the process itself takes",
            field="resources.memory_per_worker",
            value=memory_per_worker,
        )


def refuse_small_disks(plan: JobPlan, teacher: str) -> None:
    """Raise `InvalidInputError` if a phase needs more disk on the fullest node than the operator states for a node."""
    given = plan.assumptions.node_disk_bytes
    needed = max(plan.phases, key=lambda phase: phase.node_disk.total)
    if given is None or needed.node_disk.total <= given:
        return
    use = needed.node_disk
    parts = {"cache": use.cache, "checkpoints": use.checkpoints, "the artifact": use.artifact}
    listed = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items() if size)
    raise InvalidInputError(
        f"phase {needed.phase} needs {use.total / 1e9:.1f} GB of a node's disk ({listed}), and a node has "
        f"{given / 1e9:.1f} GB (SWIFTKV_NODE_DISK_BYTES); use nodes with {use.total} bytes, a smaller teacher, or one "
        "in a directory that every node mounts",
        field="model.name_or_path",
        value=teacher,
    )


def _of_phase(phases: tuple[PhaseMemory, ...], name: Phase) -> PhaseMemory:
    return next(memory for memory in phases if memory.phase == name)


def _enough_workers(setup: TrainingSetup, fits: Callable[[TrainingSetup], bool]) -> int | None:
    """Double the number of workers until a phase fits; None if no number does."""
    wanted = setup.num_workers * 2
    while wanted <= _MOST_WORKERS:
        larger = replace(setup, num_workers=wanted)
        if fits(replace(larger, batch_size=max(setup.batch_size, larger.rows_per_pass))):
            return wanted
        wanted *= 2
    return None


def _unfit(
    memory: PhaseMemory, accelerator_type: str | None, given: float, num_workers: int, enough: int | None
) -> InvalidInputError:
    needed = f"{memory.device / 1e9:.0f} GB of a worker's device, and an {accelerator_type} has {given / 1e9:.0f} GB"
    if enough is not None:
        ways = f"resources.num_workers {enough}"
    elif memory.phase == "calibrate":
        ways = "a GPU with more memory or swiftkv.initialization copied"
    else:
        ways = "sharding.strategy fsdp2 or a GPU with more memory"
    message = f"phase {memory.phase} with {num_workers} workers needs {needed}; use {ways}"
    if memory.phase == "calibrate":  # a worker runs a whole layer, however many workers there are
        return InvalidInputError(message, field="resources.accelerator_type", value=accelerator_type)
    return InvalidInputError(message, field="resources.num_workers", value=num_workers)


def teacher_bytes(config: ConfigSource, dtype: str) -> int:
    model = read_architecture(config)
    return weights_bytes(model, dense_layer_map(model), dtype)


def refuse_writers_without_room(spec: JobSpec, config: ConfigSource) -> None:
    """Raise `InvalidInputError` if a source has its rows written by the teacher and the teacher does not fit: each
    worker's engine holds all of it, in the memory of the named GPU or in `memory_per_worker`."""
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
    """Raise `InvalidInputError` for the first source that the teacher is to write, if any."""
    for index, source in enumerate(spec.data.sources):
        if source.complete is not None:
            raise InvalidInputError(
                f"data.sources[{index}].complete has every worker load the whole teacher, {needed / 1e9:.1f} GB in "
                f"{spec.model.dtype} and its cache, and a worker has {given / 1e9:.1f} GB {where}: use more memory, a "
                "smaller teacher, or text that was generated elsewhere",
                field=f"data.sources.{index}.complete",
                value=source.name_or_path,
            )
