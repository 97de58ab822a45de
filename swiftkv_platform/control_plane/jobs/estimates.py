"""Estimates of a job's cost and of the student it makes, from the teacher's configuration. Reads nothing."""

from __future__ import annotations

import sys
from typing import Any

from swiftkv_platform.data.checks import SourceEstimate
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.planning import (
    LayerMap,
    TrainingSetup,
    plan,
    read_architecture,
    resolve_num_key_value_layers,
    shared_key_value_heads,
)
from swiftkv_platform.planning.architecture import Architecture
from swiftkv_platform.planning.config import Fields
from swiftkv_platform.planning.gates import TaskForecast, forecast
from swiftkv_platform.planning.job_plan import calibration_tokens, plan_job
from swiftkv_platform.planning.job_setup import training_setup
from swiftkv_platform.planning.machines import Machines
from swiftkv_platform.planning.parameters import Parameters
from swiftkv_platform.planning.phase_plans import Assumptions, JobPlan, PhasePlan
from swiftkv_platform.planning.phases import refuse_what_cannot_fit, refuse_writers_without_room
from swiftkv_platform.planning.training import plan_training
from swiftkv_platform.planning.volumes import Inputs, Origin
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources import HubSource, S3Source, parse_source
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.defaults import FULL_WIDTH, resolve_batch_size, resolve_defaults

DEFAULT_MACHINES = Machines()

PROCESS_MEMORY = 710 << 20
"""Bytes of a worker's process in addition to its model, if none was measured: Linux, torch 2.13 for CPUs."""


class JobEstimate(FrozenModel):
    """Estimate of the job's cost and of its student; for a sweep, of its first trial. If the teacher's configuration is
    on the hub, only sources and gates are set, and the rest is None."""

    num_hidden_layers: int | None = None
    num_key_value_layers: int | None = None
    num_kv_cache_layers: int | None = None
    prefill_flops_ratio: float | None = None
    """Prefill FLOPs of SwiftKV relative to the teacher, as executed, for prompts of `data.max_length` tokens."""
    kv_bytes_per_token: float | None = None
    """Bytes of the student's cache per token, in bfloat16."""
    kv_bytes_ratio: float | None = None
    """KV bytes per token relative to the teacher's."""
    parameters: int | None = None
    """Parameters of the student with its teacher's projections."""
    trained_parameters: int | None = None
    flops_per_token: float | None = None
    """FLOPs of training per token, forward and backward."""
    memory_per_worker: int | None = None
    """Peak bytes of a step on each worker's device; without GPUs, in its process, in addition to `process_memory`."""
    process_memory: int | None = None
    """Bytes of a worker's process in addition to its model, as measured by the newest job on such workers, else a
    typical value; None with GPUs, whose memory it does not use."""
    max_tokens: int | None = None
    """Tokens of `training.max_steps` full batches; None if the number of epochs limits training."""
    total_flops: float | None = None
    """FLOPs of those tokens."""
    flops_per_step: float | None = None
    """FLOPs of a step over all workers."""
    seconds: float | None = None
    """Seconds from submission to Ray until the model is there; None without `training.max_steps` or without a speed."""
    speed_source: str | None = None
    """Source of the speed: the id of the job that was measured, or `configured`."""
    cost: float | None = None
    """Cost of those seconds, at the operator's prices."""
    sources: tuple[SourceEstimate, ...] = ()
    phases: tuple[PhasePlan, ...] = ()
    """Memory, disk, bytes moved and time of each phase; without `training.max_steps` by the size of the data, if that
    is known."""
    assumptions: Assumptions | None = None
    """Nodes and rates that `phases` assume."""
    gates: tuple[TaskForecast, ...] = ()
    """By task: the losses that its number of samples can exclude."""


def machines(settings: Settings) -> Machines:
    """Nodes and rates as the operator has set them."""
    return Machines(**settings.model_dump(include=set(Machines.model_fields)))


def estimate(
    spec: JobSpec,
    config: dict[str, Any],
    sources: tuple[SourceEstimate, ...],
    machines: Machines = DEFAULT_MACHINES,
    *,
    num_tokens: int | None = None,
) -> JobEstimate:
    """Estimate a job without a sweep. `num_tokens`: tokens of an epoch, if known better than from the sources' sizes.

    Raises:
        InvalidInputError: l, g or a batch size that does not fit, more memory than the named GPU has or than is asked
            for, or more disk than a node has.
        ModelError: a family without a row, or a configuration that lacks a key.
    """
    spec = _resolved(spec, config)
    setup, steps = training_setup(spec), spec.training.max_steps
    tokens_per_step = setup.batch_size * setup.sequence_length
    max_tokens = None if steps is None else steps * tokens_per_step
    shape: Any = {
        "num_key_value_layers": _num_key_value_layers(spec, config),
        "key_value_group_size": spec.swiftkv.key_value_group_size,
        "prefill_layers": spec.swiftkv.prefill_layers,
    }
    prefill = plan(
        config, **shape, sequence_length=spec.data.max_length, num_key_value_heads_swiftkv=_shared_heads(spec, config)
    )
    training = plan_training(config, setup, **shape, num_tokens=max_tokens)
    refuse_writers_without_room(spec, config)
    planned = _planned(spec, config, Inputs(_origin(spec), _text_bytes(sources), num_tokens), machines)
    return JobEstimate(
        num_hidden_layers=prefill.num_hidden_layers,
        num_key_value_layers=prefill.num_key_value_layers,
        num_kv_cache_layers=prefill.num_kv_cache_layers,
        prefill_flops_ratio=prefill.executed_prefill_flops_ratio,
        kv_bytes_per_token=prefill.kv_bytes_per_token,
        kv_bytes_ratio=prefill.kv_bytes_ratio,
        parameters=training.parameters,
        trained_parameters=training.trained_parameters,
        flops_per_token=training.flops_per_token.total,
        memory_per_worker=training.memory.peak,
        process_memory=None if spec.resources.gpus_per_worker else PROCESS_MEMORY,
        max_tokens=max_tokens,
        total_flops=training.total_flops,
        flops_per_step=training.flops_per_token.total * tokens_per_step,
        sources=sources,
        phases=planned.phases,
        assumptions=planned.assumptions,
        gates=forecast(spec.evaluation),
    )


def _student(spec: JobSpec, config: dict[str, Any]) -> tuple[Architecture, LayerMap, Parameters, TrainingSetup]:
    """Shape of a job's student, and the settings of its training."""
    model, setup = read_architecture(config), training_setup(spec)
    l, size = _num_key_value_layers(spec, config), spec.swiftkv.key_value_group_size  # noqa: E741  # the paper's l
    layer_map = LayerMap(len(model.layers), l, size, spec.swiftkv.bypassed)
    return model, layer_map, setup.student_parameters(model, layer_map), setup


def _planned(spec: JobSpec, config: dict[str, Any], inputs: Inputs, machines: Machines) -> JobPlan:
    """Plan all phases of a spec whose defaults are resolved. Raises if one cannot fit."""
    model, layer_map, parameters, setup = _student(spec, config)
    refuse_what_cannot_fit(
        model,
        layer_map,
        parameters,
        setup,
        calibration_tokens=calibration_tokens(spec),
        accelerator_type=spec.resources.accelerator_type,
        memory_per_worker=spec.resources.memory_per_worker,
    )
    return plan_job(spec, config, model, layer_map, parameters, inputs=inputs, machines=machines)


def _origin(spec: JobSpec) -> Origin:
    """Return where the teacher is stored, by its name."""
    match parse_source(spec.model.name_or_path, field="model.name_or_path"):
        case HubSource():
            return "hub"
        case S3Source():
            return "store"
        case _:
            return "node"


def _text_bytes(sources: tuple[SourceEstimate, ...]) -> int | None:
    """Bytes of all sources; None unless all are known."""
    sizes = [source.num_bytes for source in sources if source.num_bytes is not None]
    return sum(sizes) if sizes and len(sizes) == len(sources) else None


def _resolved(spec: JobSpec, config: dict[str, Any]) -> JobSpec:
    """Resolve defaults as preparation will, except the batch size for little data, which is not read here."""
    fields = Fields(config)
    context_length = fields.optional_count("max_position_embeddings")
    hidden_size = fields.optional_count("hidden_size")
    resolved = resolve_defaults(spec, context_length=context_length, hidden_size=hidden_size or FULL_WIDTH)
    return resolve_batch_size(resolved, num_rows=sys.maxsize)


def _num_key_value_layers(spec: JobSpec, config: dict[str, Any]) -> int:
    return resolve_num_key_value_layers(
        config["num_hidden_layers"], spec.swiftkv.given_layers, spec.swiftkv.prefill_reduction
    )


def _shared_heads(spec: JobSpec, config: dict[str, Any]) -> int | None:
    """Return the number of key-value heads of the student's groups; None if it is the teacher's."""
    query_heads = config.get("num_attention_heads")
    if spec.swiftkv.sharing == "gqa" or not isinstance(query_heads, int):
        return None
    theirs = config.get("num_key_value_heads") or query_heads
    return shared_key_value_heads(spec.swiftkv.sharing, num_attention_heads=query_heads, num_key_value_heads=theirs)
