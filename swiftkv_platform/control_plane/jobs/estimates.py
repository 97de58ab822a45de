"""Estimates of a job's cost and of the student it makes, from the teacher's configuration. Reads nothing."""

from __future__ import annotations

import sys
from typing import Any

from swiftkv_platform.data.checks import SourceEstimate
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.planning.architecture import read_architecture
from swiftkv_platform.planning.config import Fields
from swiftkv_platform.planning.gates import TaskForecast, forecast
from swiftkv_platform.planning.job import refuse_what_cannot_fit, refuse_writers_without_room, training_setup
from swiftkv_platform.planning.prefill import plan_prefill, student_map
from swiftkv_platform.planning.training import plan_training
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.defaults import FULL_WIDTH, resolve_batch_size, resolve_defaults

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
