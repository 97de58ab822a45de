"""Cost and duration of jobs, and of the student that a job makes: estimated from the teacher's configuration and from
measured jobs, and counted from time on the cluster. No I/O.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from swiftkv_platform.contract.events import ReasonCode
from swiftkv_platform.control_plane.access.demand import Demand
from swiftkv_platform.control_plane.access.tenants import TenantPolicy
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus, Reason, Speed
from swiftkv_platform.data.checks import SourceEstimate
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.planning.architecture import read_architecture
from swiftkv_platform.planning.config import Fields
from swiftkv_platform.planning.gates import TaskForecast, forecast
from swiftkv_platform.planning.job import refuse_what_cannot_fit, refuse_writers_without_room, training_setup
from swiftkv_platform.planning.machines import assumed_speed
from swiftkv_platform.planning.prefill import plan_prefill, student_map
from swiftkv_platform.planning.training import plan_training
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.job import FULL_WIDTH, resolve_batch_size, resolve_defaults

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
    """Tokens of all steps, in full batches; None if epochs over data of unknown size decide their number."""
    total_flops: float | None = None
    """FLOPs of those tokens."""
    flops_per_step: float | None = None
    """FLOPs of a step over all workers."""
    seconds: float | None = None
    """Seconds of training, with a measured job's from submission to Ray until the model is there; None without
    `max_tokens`, without a speed, or for a sweep."""
    speed_source: str | None = None
    """Source of the speed: the id of the job that was measured, `configured`, or the share of a GPU's peak that is
    assumed."""
    cost: float | None = None
    """Cost of those seconds, at the operator's prices."""
    sources: tuple[SourceEstimate, ...] = ()
    gates: tuple[TaskForecast, ...] = ()
    """By task: the losses that its number of samples can exclude."""


def estimate(
    spec: JobSpec, config: dict[str, Any], sources: tuple[SourceEstimate, ...], *, num_tokens: int | None = None
) -> JobEstimate:
    """Estimate a job without a sweep. `num_tokens`: tokens of an epoch, if they are known.

    Raises:
        InvalidInputError: l, g, a batch or a sequence is out of range, or training, or a teacher that is to write
            rows, does not fit a worker.
        ModelError: a family without a row, or a configuration that lacks a key.
    """
    spec = _resolved(spec, config)
    setup = training_setup(spec)
    tokens_per_step = setup.batch_size * setup.sequence_length
    steps = _num_steps(spec, num_tokens, tokens_per_step)
    max_tokens = None if steps is None else steps * tokens_per_step
    shape = spec.swiftkv.request.resolve(config["num_hidden_layers"], config.get("num_attention_heads"))
    prefill = plan_prefill(config, shape, sequence_length=spec.data.max_length)
    training = plan_training(config, setup, shape, num_tokens=max_tokens)
    refuse_writers_without_room(spec, config)
    model = read_architecture(config, shape)
    refuse_what_cannot_fit(spec, model, student_map(model))
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
        gates=forecast(spec.evaluation),
    )


def _num_steps(spec: JobSpec, num_tokens: int | None, tokens_per_step: int) -> int | None:
    """Return the steps of a run; None if its epochs decide and their tokens are not known."""
    training = spec.training
    if training.max_steps is not None or num_tokens is None:
        return training.max_steps
    return max(-(-training.num_epochs * num_tokens // tokens_per_step), 1)


def _resolved(spec: JobSpec, config: dict[str, Any]) -> JobSpec:
    """Resolve defaults as preparation will, except the batch size for little data, which is not read here."""
    fields = Fields(config)
    context_length = fields.optional_count("max_position_embeddings")
    hidden_size = fields.optional_count("hidden_size")
    resolved = resolve_defaults(spec, context_length=context_length, hidden_size=hidden_size or FULL_WIDTH)
    return resolve_batch_size(resolved, num_rows=sys.maxsize)


_HOUR = 3600.0


@dataclass(frozen=True)
class Prices:
    """Prices per hour, in the operator's currency. None: unpriced; if both are None, nothing has a cost."""

    gpu_hour: float | None = None
    cpu_hour: float | None = None

    @property
    def are_known(self) -> bool:
        return self.gpu_hour is not None or self.cpu_hour is not None

    def cost(self, spec: JobSpec, seconds: float) -> float | None:
        """Return the cost of `seconds` with the most workers that the spec allows; None without prices."""
        if not self.are_known:
            return None
        demand = Demand.of(spec)
        hourly = demand.gpus * (self.gpu_hour or 0.0) + demand.cpus * (self.cpu_hour or 0.0)
        return hourly * seconds / _HOUR

    def cost_of(self, job: Job, now: float) -> float | None:
        """Cost of a job so far, over all its attempts."""
        return self.cost(job.spec, job.seconds_on_cluster(now))

    def final_cost_of(self, job: Job, now: float) -> float | None:
        """Return the cost of a job at the end of its training, at its present speed; None if that is not known."""
        if job.status.is_terminal:
            return self.cost_of(job, now)
        if job.progress.seconds_remaining is None:
            return None
        return self.cost(job.spec, job.seconds_on_cluster(now) + job.progress.seconds_remaining)


def cost_cap(spec: JobSpec, policy: TenantPolicy) -> float | None:
    """Return the lower of the job's own cap and its tenant's; None if there is neither."""
    return min((cap for cap in (spec.limits.cost_cap, policy.cost_cap) if cap is not None), default=None)


def over_cap(job: Job, policy: TenantPolicy, prices: Prices, now: float) -> Reason | None:
    """Return the reason to pause a running job that has cost more than its cap; None if it has not."""
    cap, cost = cost_cap(job.spec, policy), prices.cost_of(job, now)
    if cap is None or cost is None or cost <= cap or job.status not in (JobStatus.STARTING, JobStatus.RUNNING):
        return None
    message = f"it has cost {cost:.2f}, and its cap is {cap:.2f}; resume it with a higher limits.cost_cap"
    return Reason(ReasonCode.COST_CAP, message, field="limits.cost_cap")


def measured_speed(job: Job, now: float) -> Speed | None:
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
        process_memory=_process_memory(job),
    )


def _process_memory(job: Job) -> int | None:
    if job.spec.resources.gpus_per_worker or not job.attempt.peak_memory or job.planned_memory is None:
        return None
    return max(job.attempt.peak_memory - job.planned_memory, 0)


def speed_for(spec: JobSpec, jobs: Iterable[Job], configured: float | None) -> tuple[Speed, str] | None:
    """Return the speed of the newest job on the same kind of workers, preferably with the same teacher, and its id;
    else the FLOPs per second of a worker that are configured, or assumed for its GPU, and their source."""
    alike = [job for job in jobs if job.speed is not None and _workers(job.spec) == _workers(spec)]
    same = [job for job in alike if job.spec.model.name_or_path == spec.model.name_or_path]
    newest = max(same or alike, key=lambda job: job.id, default=None)
    if newest is not None and newest.speed is not None:
        return newest.speed, newest.id
    known = assumed_speed(spec) if configured is None else (configured, "configured")
    return None if known is None else (Speed(known[0], 0.0, 0.0), known[1])


def with_time(
    found: JobEstimate, spec: JobSpec, speed: tuple[Speed, str] | None, prices: Prices | None = None
) -> JobEstimate:
    """Add the time of a job at a speed, and its cost. Sweeps are not estimated."""
    if speed is None:
        return found
    measured, source = speed
    if found.process_memory is not None and measured.process_memory is not None:
        found = found.model_copy(update={"process_memory": measured.process_memory})
    if found.total_flops is None or spec.sweep is not None:
        return found
    training = found.total_flops / (measured.flops_per_second * spec.resources.max_workers)
    seconds = measured.startup_s + training + measured.finish_s
    cost = None if prices is None else prices.cost(spec, seconds)
    return found.model_copy(update={"seconds": seconds, "speed_source": source, "cost": cost})


def _workers(spec: JobSpec) -> tuple[object, ...]:
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


def prices(settings: Settings) -> Prices:
    return Prices(settings.gpu_hour_price, settings.cpu_hour_price)
