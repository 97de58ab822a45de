"""Memory of a worker in the phases of a job, and whether it fits the GPUs that are named. Knows bytes, no cluster."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.planning.architecture import Architecture
from swiftkv_platform.planning.layers import LayerMap
from swiftkv_platform.planning.parameters import Parameters
from swiftkv_platform.planning.training_memory import WIDE, layer_buffers, worker_memory
from swiftkv_platform.planning.training_setup import TrainingSetup

Phase = Literal["train", "calibrate", "evaluate"]

DEVICE_MEMORY = {"B200": 180e9, "H200": 141e9, "H100": 80e9, "L40S": 48e9, "L4": 24e9, "T4": 16e9}
"""Bytes of GPUs by Ray's names that tell them."""

_DOUBLE = 8
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
    on_gpu, layer = setup.device != "cpu", narrow * max(parameters.largest_layer, parameters.root)
    training = worker_memory(model, layer_map, parameters, setup)
    sharded = setup.strategy == "fsdp2" or (setup.strategy == "deepspeed" and setup.zero_stage == 3)
    weights = narrow * parameters.total
    held = weights // setup.num_workers + 2 * layer if sharded else weights
    passing = layer_buffers(model, setup)
    phases = [
        PhaseMemory(
            phase="train", device=training.peak, host=on_gpu * (training.host + (layer if sharded else weights))
        )
    ]
    if calibrated:
        device = layer + passing + _calibration(model, layer_map, setup)
        phases.append(PhaseMemory(phase="calibrate", device=device, host=on_gpu * layer))
    phases.append(PhaseMemory(phase="evaluate", device=held + passing, host=on_gpu * (layer if sharded else weights)))
    return tuple(phases)


def _calibration(model: Architecture, layer_map: LayerMap, setup: TrainingSetup) -> int:
    """Outputs of a teacher's upper layer for one row in float64, and the products of a group's that are kept."""
    own, hidden, tokens = model.shared_attention, model.hidden_size + 1, setup.sequence_length
    key_value = sum(linear.out_features for linear in own.key_value)
    recorded = tokens * (key_value + own.num_heads * own.query_size)
    products = layer_map.key_value_group_size * hidden * key_value
    # The sums of squares, their factors, and a row's inputs.
    return _DOUBLE * (recorded + products + 3 * hidden * hidden + tokens * hidden)


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
