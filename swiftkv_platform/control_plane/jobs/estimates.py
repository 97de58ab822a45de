"""Validation of specs before anything runs, and cost: estimated from the teacher's configuration and measured jobs, and
counted from time on the cluster. Imports no torch.

Local paths and objects are read; a hub id is not checked, and the worker reports if it does not exist. The control
plane calls `check_spec` in a parser process.
"""

from __future__ import annotations

import os.path
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swiftkv_platform.contract.events import ReasonCode
from swiftkv_platform.contract.sweeps import GROUP_SIZE_FIELD, expand_sweep
from swiftkv_platform.control_plane.access.tenants import Demand, TenantPolicy
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus, Reason, Speed
from swiftkv_platform.data.checks import SourceEstimate, check_row_sources, check_sources
from swiftkv_platform.errors import DataError, InvalidInputError, ModelError
from swiftkv_platform.families import refuse_student
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.planning import has_quantized_weights
from swiftkv_platform.planning.architecture import read_architecture
from swiftkv_platform.planning.config import ConfigFields
from swiftkv_platform.planning.gates import TaskForecast, forecast_gates
from swiftkv_platform.planning.job import check_row_generation_memory, check_training_memory, make_training_setup
from swiftkv_platform.planning.machines import assume_speed
from swiftkv_platform.planning.prefill import plan_prefill, resolve_layer_map
from swiftkv_platform.planning.training import plan_training
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources import UNRESTRICTED, Access, PathSource, S3Source, parse_location, parse_source
from swiftkv_platform.sources.names import refuse_relative_paths
from swiftkv_platform.sources.teacher_config import (
    TEACHER_FIELD,
    ReadObject,
    make_teacher_error,
    read_config_file,
    read_teacher_config,
)
from swiftkv_platform.sources.untrusted_files import CONFIG_BYTES, check_length
from swiftkv_platform.specs import JobSpec, TaskSpec
from swiftkv_platform.specs.base import MAX_LAYERS
from swiftkv_platform.specs.evaluation import (
    BUILTIN_TASKS,
    find_task_directory,
    get_task_name_and_data_dir,
    is_task_file_name,
)
from swiftkv_platform.specs.job import REFERENCE_HIDDEN_SIZE, resolve_batch_size, resolve_model_defaults
from swiftkv_platform.storage.object_store import open_store

PROCESS_MEMORY = 710 << 20
"""Assumed bytes of a worker's process in addition to the model, if none was measured: Linux, torch 2.13 for CPUs."""


class JobEstimate(FrozenBaseModel):
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
    """Tokens of all steps, in full batches; None if epochs over data of unknown size decide their number."""
    total_flops: float | None = None
    """FLOPs to train on `tokens`."""
    flops_per_step: float | None = None
    """FLOPs of a step over all workers."""
    seconds: float | None = None
    """Seconds of training, with a measured job's from submission to Ray until the model is there; None without
    `max_tokens`, without a speed, or for a sweep."""
    speed_source: str | None = None
    """Source of the speed: the id of the job that was measured, `configured`, or the share of a GPU's peak that is
    assumed."""
    cost: float | None = None
    """Cost of `seconds` on the cluster, at the operator's prices."""
    sources: tuple[SourceEstimate, ...] = ()
    gates: tuple[TaskForecast, ...] = ()
    """For each evaluation task: the quality losses that its number of samples can exclude."""


def estimate(
    spec: JobSpec, config: dict[str, Any], sources: tuple[SourceEstimate, ...], *, num_tokens: int | None = None
) -> JobEstimate:
    """Estimate a job without a sweep. `num_tokens`: tokens of an epoch, if they are known.

    Raises:
        InvalidInputError: l, g, a batch or a sequence is out of range, or training, or a teacher that is to write
            rows, does not fit a worker.
        ModelError: a family without a row, or a configuration that lacks a key.
    """
    spec = _resolve_spec_defaults(spec, config)
    setup = make_training_setup(spec)
    tokens_per_step = setup.batch_size * setup.sequence_length
    steps = _count_steps(spec, num_tokens, tokens_per_step)
    max_tokens = None if steps is None else steps * tokens_per_step
    shape = spec.swiftkv.request.resolve(config["num_hidden_layers"], config.get("num_attention_heads"))
    prefill = plan_prefill(config, shape, sequence_length=spec.data.max_length)
    training = plan_training(config, setup, shape, num_tokens=max_tokens)
    check_row_generation_memory(spec, config)
    model = read_architecture(config, shape)
    check_training_memory(spec, model, resolve_layer_map(model))
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
        gates=forecast_gates(spec.evaluation),
    )


def _count_steps(spec: JobSpec, num_tokens: int | None, tokens_per_step: int) -> int | None:
    """Return the steps of a run; None if the number of epochs sets them and the number of tokens is unknown."""
    training = spec.training
    if training.max_steps is not None or num_tokens is None:
        return training.max_steps
    return max(-(-training.num_epochs * num_tokens // tokens_per_step), 1)


def _resolve_spec_defaults(spec: JobSpec, config: dict[str, Any]) -> JobSpec:
    """Resolve defaults as preparation will, except the batch size for little data, which is not read here."""
    fields = ConfigFields(config)
    context_length = fields.get_optional_count("max_position_embeddings")
    hidden_size = fields.get_optional_count("hidden_size")
    resolved = resolve_model_defaults(
        spec, context_length=context_length, hidden_size=hidden_size or REFERENCE_HIDDEN_SIZE
    )
    return resolve_batch_size(resolved, num_rows=sys.maxsize)


_HOUR_S = 3600.0


@dataclass(frozen=True)
class Prices:
    """Prices per hour, in the operator's currency. None: not set; if both are None, jobs have no cost."""

    gpu_hour: float | None = None
    cpu_hour: float | None = None

    @property
    def are_known(self) -> bool:
        return self.gpu_hour is not None or self.cpu_hour is not None

    def compute_cost(self, spec: JobSpec, seconds: float) -> float | None:
        """Return the cost of `seconds` with the most workers that the spec allows; None without prices."""
        if not self.are_known:
            return None
        demand = Demand.for_job(spec)
        hourly = demand.gpus * (self.gpu_hour or 0.0) + demand.cpus * (self.cpu_hour or 0.0)
        return hourly * seconds / _HOUR_S

    def compute_cost_so_far(self, job: Job, now: float) -> float | None:
        """Cost of a job up to now, over all attempts."""
        return self.compute_cost(job.spec, job.compute_seconds_on_cluster(now))

    def estimate_final_cost(self, job: Job, now: float) -> float | None:
        """Return the cost of a job at the end of its training, at its present speed; None if the speed is unknown."""
        if job.status.is_terminal:
            return self.compute_cost_so_far(job, now)
        if job.progress.seconds_remaining is None:
            return None
        return self.compute_cost(job.spec, job.compute_seconds_on_cluster(now) + job.progress.seconds_remaining)


def get_cost_cap(spec: JobSpec, policy: TenantPolicy) -> float | None:
    """Return the lower one of the job's and the tenant's cost caps; None without a cap."""
    return min((cap for cap in (spec.limits.cost_cap, policy.cost_cap) if cap is not None), default=None)


def find_exceeded_cost_cap(job: Job, policy: TenantPolicy, prices: Prices, now: float) -> Reason | None:
    """Return the reason to pause a running job above its cost cap; None below it."""
    cap, cost = get_cost_cap(job.spec, policy), prices.compute_cost_so_far(job, now)
    if cap is None or cost is None or cost <= cap or job.status not in (JobStatus.STARTING, JobStatus.RUNNING):
        return None
    message = (
        f"cost cap reached: {cost:.2f} spent, and the cap is {cap:.2f}; resume the job with a higher limits.cost_cap"
    )
    return Reason(ReasonCode.COST_CAP, message, field="limits.cost_cap")


def measure_speed(job: Job, now: float) -> Speed | None:
    """Return the speed of a job whose present attempt has just succeeded; None if it reported too little to measure
    it."""
    attempt, pace = job.attempt, job.attempt.pace
    if attempt.submitted_at is None or attempt.resume_from is not None or pace is None or job.flops_per_step is None:
        return None
    steps, seconds = job.progress.step - pace.step, pace.last_time - pace.time
    if steps <= 0 or seconds <= 0:
        return None
    return Speed(
        flops_per_second=job.flops_per_step * steps / seconds / job.spec.resources.max_workers,
        startup_s=max(pace.time - attempt.submitted_at - pace.step * seconds / steps, 0.0),
        finish_s=max(now - pace.last_time, 0.0),
        process_memory=_measure_process_memory(job),
    )


def _measure_process_memory(job: Job) -> int | None:
    if job.spec.resources.gpus_per_worker or not job.attempt.peak_memory or job.planned_memory is None:
        return None
    return max(job.attempt.peak_memory - job.planned_memory, 0)


def find_speed(spec: JobSpec, jobs: Iterable[Job], configured: float | None) -> tuple[Speed, str] | None:
    """Return (speed, source): of the newest job on the same kind of workers, preferably with the same teacher, and the
    job's id; else the configured FLOPs per second of a worker, or assumed ones for its GPU."""
    alike = [job for job in jobs if job.speed is not None and _make_worker_key(job.spec) == _make_worker_key(spec)]
    same = [job for job in alike if job.spec.model.name_or_path == spec.model.name_or_path]
    newest = max(same or alike, key=lambda job: job.id, default=None)
    if newest is not None and newest.speed is not None:
        return newest.speed, newest.id
    known = assume_speed(spec) if configured is None else (configured, "configured")
    return None if known is None else (Speed(known[0], 0.0, 0.0), known[1])


def add_time_and_cost(
    estimate: JobEstimate, spec: JobSpec, speed: tuple[Speed, str] | None, prices: Prices | None = None
) -> JobEstimate:
    """Add time and cost to a job's estimate. `speed`: (measured speed, its source). Sweeps get no time."""
    if speed is None:
        return estimate
    measured, source = speed
    if estimate.process_memory is not None and measured.process_memory is not None:
        estimate = estimate.model_copy(update={"process_memory": measured.process_memory})
    if estimate.total_flops is None or spec.sweep is not None:
        return estimate
    training = estimate.total_flops / (measured.flops_per_second * spec.resources.max_workers)
    seconds = measured.startup_s + training + measured.finish_s
    cost = None if prices is None else prices.compute_cost(spec, seconds)
    return estimate.model_copy(update={"seconds": seconds, "speed_source": source, "cost": cost})


def _make_worker_key(spec: JobSpec) -> tuple[object, ...]:
    resources, sharding = spec.resources, spec.sharding
    return (
        resources.max_workers,
        resources.gpus_per_worker,
        resources.cpus_per_worker,
        resources.accelerator_type,
        spec.model.dtype,
        sharding.strategy,
        sharding.cpu_offload,
        spec.training.compile,
    )


def get_prices(settings: Settings) -> Prices:
    return Prices(settings.gpu_hour_price, settings.cpu_hour_price)


def read_object(store: str, key: str) -> bytes:
    """Read a small object of any store, to check a spec's sources. Raises `UnusableFileError` if it is too long."""
    data = b"".join(open_store(store, patient=False).stream(key, stop=CONFIG_BYTES + 1))
    return check_length(data, CONFIG_BYTES)


def requires_file_access(spec: JobSpec) -> bool:
    """Whether checking a spec reads files or stored objects, rather than names only. Raises as `parse_source`."""
    names = {"model.name_or_path": spec.model.name_or_path}
    names |= {f"{field}.name_or_path": source.name_or_path for field, source in spec.list_sources()}
    parsed = (parse_source(name, field=field) for field, name in names.items())
    return any(isinstance(source, PathSource | S3Source) for source in parsed) or any(
        data is not None or is_task_file_name(name)
        for name, data in map(get_task_name_and_data_dir, spec.evaluation.tasks)
    )


def check_spec(spec: JobSpec, access: Access) -> JobEstimate:
    """Check a spec that a caller sends to the control plane. Raises as `validate_and_estimate`, and
    `InvalidInputError` for a relative path."""
    access.check_spec(spec)
    refuse_relative_paths(spec, relative_paths=not access.is_restricted)
    return validate_and_estimate(spec, access=access)


def validate_and_estimate(
    spec: JobSpec,
    read_object: ReadObject = read_object,
    *,
    config: Path | None = None,
    access: Access = UNRESTRICTED,
    num_tokens: int | None = None,
) -> JobEstimate:
    """Check `spec` as far as this machine can.

    Args:
        config: the teacher's `config.json`, or its directory, read instead of the one at `model.name_or_path`.
        access: sources that the caller may read.
        num_tokens: tokens of an epoch, if they are known.

    Raises:
        ModelError: the teacher's configuration cannot be read, is of another family or quantization, or has a value
            that no model can have.
        DataError: a source is missing, empty or without the columns of a known format, or a task's data is missing.
        InvalidInputError: the transformation does not fit the teacher, or a task does not exist. Names are checked
            before (`Access.check_spec`).
        StorageError: an `s3://` address does not answer.
    """
    name = spec.model.name_or_path if config is None else str(config)
    values = read_teacher_config(name, read_object, access=access) if config is None else read_config_file(config)
    num_hidden_layers = None if values is None else _read_num_hidden_layers(values, name)
    sources = check_sources(spec.data.sources, access)
    check_evaluation_tasks(spec.evaluation.tasks, access)
    check_row_sources(spec.evaluation.rows, access)
    if values is None or num_hidden_layers is None:
        return JobEstimate(sources=sources, gates=forecast_gates(spec.evaluation))
    trial = _find_first_fitting_trial(spec, num_hidden_layers)
    return estimate(trial, values, sources, num_tokens=num_tokens)


def _find_first_fitting_trial(spec: JobSpec, num_hidden_layers: int) -> JobSpec:
    """The job, or the first trial that fits: a sweep may name a g that is too large for some of its l, and reports
    those trials as failed."""
    refused: InvalidInputError | None = None
    fitting: list[JobSpec] = []
    for trial in expand_sweep(spec):
        try:
            trial.spec.swiftkv.request.resolve(num_hidden_layers)
            fitting.append(trial.spec)
        except InvalidInputError as error:
            if error.field != GROUP_SIZE_FIELD:
                raise
            refused = error
    if not fitting:
        assert refused is not None, "a spec has a trial"
        raise refused
    return fitting[0]


def _read_num_hidden_layers(config: dict[str, Any], name: str) -> int:
    """Return the number of a teacher's layers. Raises `ModelError` for a `config.json` that no job can use."""
    refuse_student(config.get("model_type"), name, TEACHER_FIELD)
    try:
        read_architecture(config)
        has_quantized_weights(config)
    except ModelError as error:
        raise make_teacher_error(name, f"its {error.message}") from error
    value = config.get("num_hidden_layers")
    if not isinstance(value, int) or not 2 <= value <= MAX_LAYERS:
        accepted = f"expected a decoder of 2 to {MAX_LAYERS:,} layers"
        raise make_teacher_error(name, f"its config.json has num_hidden_layers {value!r:.80}; {accepted}")
    return value


def check_evaluation_tasks(tasks: Sequence[str | TaskSpec], access: Access = UNRESTRICTED) -> None:
    """Refuse the first task that cannot be run, naming its field. Raises `InvalidInputError`: an unknown built-in task,
    one without `data_dir`, or a task's file that does not exist; `DataError`: `data_dir` does not exist, lacks the
    files of a built-in task, or leads to files that may not be read."""
    for index, task in enumerate(tasks):
        _check_task(*get_task_name_and_data_dir(task), f"evaluation.tasks[{index}]", access)


def _check_task(name: str, data_dir: str | None, field: str, access: Access) -> None:
    is_builtin, names_file = name.startswith("builtin:"), is_task_file_name(name)
    if is_builtin and name not in BUILTIN_TASKS:
        known = " and ".join(BUILTIN_TASKS)
        raise InvalidInputError(f"{field} is {name!r}; the built-in tasks are {known}", field=field, value=name)
    if is_builtin and BUILTIN_TASKS[name] and data_dir is None:
        wanted = " and ".join(BUILTIN_TASKS[name])
        message = f"{field} is {name!r} without data_dir; use a directory that holds {wanted}"
        raise InvalidInputError(message, field=f"{field}.data_dir", value=None)
    file = parse_location(name, field=field) if names_file else None
    if isinstance(file, PathSource) and not os.path.isfile(file.path):  # noqa: PTH113 (which raises for some)
        message = f"{field} is {name!r}: no such file; use a task's .yaml file, or a name that the harness knows"
        raise InvalidInputError(message, field=field, value=name)
    if (is_builtin or names_file) and data_dir is not None:
        _check_task_data(name, data_dir, f"{field}.data_dir", access)


def _check_task_data(name: str, data_dir: str, field: str, access: Access) -> None:
    location = access.parse_location(data_dir, field)
    if not isinstance(location, PathSource):
        return
    try:
        directory = access.boundary.check_path(location.path, field)
        if not directory.is_dir():
            raise DataError(f"{field} is {data_dir!r}: no such directory", field=field, value=data_dir)
        if BUILTIN_TASKS.get(name):
            find_task_directory(name, directory, field)
    except OSError as error:
        message = f"{field} is {data_dir!r}, which cannot be read; use a readable directory"
        raise DataError(message, field=field, value=data_dir) from error
