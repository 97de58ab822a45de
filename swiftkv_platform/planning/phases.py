"""Memory of a worker in the phases of a job, and whether it fits the GPUs that are named. Knows bytes, no cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.planning.architecture import Architecture
from swiftkv_platform.planning.layers import LayerMap
from swiftkv_platform.planning.parameters import Parameters, largest_teacher_layer
from swiftkv_platform.planning.training_memory import WIDE, gathered_weights, layer_buffers, worker_memory
from swiftkv_platform.planning.training_setup import TrainingSetup

Phase = Literal["train", "calibrate", "evaluate"]

DEVICE_MEMORY = {"B200": 180e9, "H200": 141e9, "H100": 80e9, "L40S": 48e9, "L4": 24e9, "T4": 16e9}
"""Bytes of GPUs by Ray's names that tell them."""

_DOUBLE = 8
_TOKENS_PER_FORWARD = 8192
"""Tokens of the rows of a forward pass of an evaluation, or a whole row."""
_MOST_WORKERS = 4096


class PhaseMemory(FrozenModel):
    """Bytes that the worker with the most holds in a phase."""

    phase: Phase
    device: int
    """On its device; without a GPU, in its process."""
    host: int
    """In host memory beside that, while weights are read: 0 without a GPU."""


def plan_phases(
    model: Architecture, layer_map: LayerMap, parameters: Parameters, setup: TrainingSetup, *, calibrated: bool
) -> tuple[PhaseMemory, ...]:
    """Memory of training, of calibration layer by layer, and of evaluation with the weights divided as in training."""
    narrow = 2 if setup.dtype == "bfloat16" else WIDE
    on_gpu = setup.device != "cpu"
    read = narrow * max(parameters.largest_layer, parameters.root)
    training = worker_memory(model, layer_map, parameters, setup)
    sharded = setup.strategy == "fsdp2" or (setup.strategy == "deepspeed" and setup.zero_stage == 3)
    weights = narrow * parameters.total
    phases = [
        PhaseMemory(phase="train", device=training.peak, host=on_gpu * (training.host + (read if sharded else weights)))
    ]
    if calibrated:
        device = _calibration(model, layer_map, setup, narrow)
        phases.append(PhaseMemory(phase="calibrate", device=device, host=on_gpu * read))
    device = _evaluation(model, layer_map, parameters, setup, narrow, sharded=sharded)
    phases.append(PhaseMemory(phase="evaluate", device=device, host=on_gpu * (read if sharded else weights)))
    return tuple(phases)


def _calibration(model: Architecture, layer_map: LayerMap, setup: TrainingSetup, narrow: int) -> int:
    """One layer of the teacher over one row with what is recorded of it, or the fit of a group, or the embeddings."""
    own, hidden, tokens = model.shared_attention, model.hidden_size, setup.sequence_length
    key_value, query = sum(linear.out_features for linear in own.key_value), own.num_heads * own.query_size
    states, layer = layer_buffers(model, setup, num_tokens=tokens)
    # Sums of squares with their factors, and those of a group with its outputs.
    sums = _DOUBLE * (2 * (hidden + 1) ** 2 + (layer_map.key_value_group_size - 1) * (hidden + 1) * key_value)
    recorded = _DOUBLE * tokens * (key_value + query)
    running = narrow * largest_teacher_layer(model) + states + layer + recorded
    # A projection of queries is turned in float64: itself, its complex parts, their product and its parts again.
    turning = narrow * 2 * (own.query_parameters + own.key_value_parameters) + 4 * _DOUBLE * hidden * query
    return max(sums + running, sums + turning, narrow * model.vocab_size * hidden + states)


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
    cached = sum(entry.heads * entry.size for entry in model.shared_attention.entries)
    states += narrow * cached * len(layer_map.leaders) * num_tokens
    weights = narrow * parameters.total
    if not sharded:
        return weights + states + layer
    gathering = gathered_weights(parameters, narrow, units=3)
    running = gathered_weights(parameters, narrow, units=2) + layer
    return weights // setup.num_workers + states + max(gathering, running)


def refuse_what_cannot_fit(
    model: Architecture,
    layer_map: LayerMap,
    parameters: Parameters,
    setup: TrainingSetup,
    *,
    calibrated: bool,
    accelerator_type: str | None,
) -> None:
    """Compare what each phase needs with the memory of the GPU that is named; others are not known.

    Raises:
        InvalidInputError: a phase that cannot fit, with what would do.
    """
    given = DEVICE_MEMORY.get(accelerator_type or "")
    if given is None or setup.device == "cpu":
        return
    for memory in plan_phases(model, layer_map, parameters, setup, calibrated=calibrated):
        if memory.device <= given:
            continue
        enough = None
        if memory.phase == "train":
            enough = _enough_workers(model, layer_map, parameters, setup, given)
        raise _unfit(memory, accelerator_type, given, setup.num_workers, enough)


def _enough_workers(
    model: Architecture, layer_map: LayerMap, parameters: Parameters, setup: TrainingSetup, given: float
) -> int | None:
    """The number of workers, doubled until a step fits; None where no number does."""
    wanted = setup.num_workers * 2
    while wanted <= _MOST_WORKERS:
        larger = replace(setup, num_workers=wanted)
        larger = replace(larger, batch_size=max(setup.batch_size, larger.rows_per_pass))
        if worker_memory(model, layer_map, parameters, larger).peak <= given:
            return wanted
        wanted *= 2
    return None


def _unfit(
    memory: PhaseMemory, accelerator_type: str | None, given: float, num_workers: int, enough: int | None
) -> InvalidInputError:
    needed = f"{memory.device / 1e9:.0f} GB of a worker's device, and an {accelerator_type} has {given / 1e9:.0f} GB"
    if memory.phase != "train":
        ways = "a GPU with more memory"
        ways += " or swiftkv.initialization copied" if memory.phase == "calibrate" else " or more workers"
        return InvalidInputError(
            f"to {memory.phase} needs {needed}; {ways} would do",
            field="resources.accelerator_type",
            value=accelerator_type,
        )
    ways = f"resources.num_workers {enough}" if enough else "sharding.strategy fsdp2, or a GPU with more memory,"
    return InvalidInputError(
        f"to train with {num_workers} workers needs {needed}; {ways} would do",
        field="resources.num_workers",
        value=num_workers,
    )
