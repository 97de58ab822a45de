"""Print a job's estimate: student, memory, time, cost, and the statistical power of its quality gates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swiftkv_platform.cli.context import load_settings
from swiftkv_platform.cli.output import Columns, print_fields, print_items, print_line
from swiftkv_platform.client import Resource
from swiftkv_platform.control_plane.jobs.estimates import add_time_and_cost, find_speed, validate_and_estimate
from swiftkv_platform.local.formats import format_count, format_duration, format_flops, format_size, pluralize
from swiftkv_platform.planning.gates import (
    MAX_FALSE_PASS_PROBABILITY,
    WORSE_STUDENT_LOSS,
    compute_false_pass_probability,
)
from swiftkv_platform.planning.machines import DEVICE_MEMORY
from swiftkv_platform.sources import UNRESTRICTED
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.student_shape import format_layers

_CPU_ADVICE = "does not fit; reduce the number of workers or training.micro_batch_size"
_GPU_ADVICE = "does not fit; add workers, or reduce training.micro_batch_size or data.max_length"


def describe_estimate(estimate: Resource, spec: JobSpec, machine_bytes: int | None) -> dict[str, str | None]:
    """Return sentences of an estimate by subject; None if unknown. `machine_bytes`: memory of the machine that runs all
    workers, if known."""
    scope = {"scope": "first trial of the sweep" if spec.sweep is not None else None}
    data = {"data": "; ".join(map(_format_source, estimate.sources or ()))}
    if estimate.num_hidden_layers is None:  # the teacher's configuration is on the hub
        return scope | data
    tokens = f" for prompts of {spec.data.max_length:,} tokens" if spec.data.max_length else ""
    listed = f", prompts run layers {format_layers(spec.swiftkv.prefill_layers)}" if spec.swiftkv.prefill_layers else ""
    trained = f"{format_count(estimate.trained_parameters)} ({estimate.trained_parameters / estimate.parameters:.1%})"
    sentences = {
        "student": f"{estimate.num_key_value_layers} of {estimate.num_hidden_layers} layers keep their own KV "
        f"projections; the KV cache has {estimate.num_kv_cache_layers} layers",
        "prefill": f"{estimate.prefill_flops_ratio:.1%} of the teacher's FLOPs{tokens}{listed}",
        "KV cache": f"{format_size(estimate.kv_bytes_per_token)} per token in bfloat16, "
        f"{estimate.kv_bytes_ratio:.1%} of the teacher's",
        "parameters": f"{format_count(estimate.parameters)}, {trained} trainable",
        "training": _format_training(estimate, spec),
        "memory": _format_memory(estimate, spec, machine_bytes),
        "time": _format_time(estimate),
        "cost": None if estimate.cost is None else f"{estimate.cost:,.2f} at the operator's prices",
    }
    return {**scope, **sentences, **data}


def _format_training(estimate: Resource, spec: JobSpec) -> str:
    per_token = f"{format_flops(estimate.flops_per_token)} per token"
    if estimate.max_tokens is None:
        return f"{per_token}; the number of tokens depends on data and epochs"
    training = spec.training
    steps = (
        pluralize(training.num_epochs, "epoch") if training.max_steps is None else pluralize(training.max_steps, "step")
    )
    return f"{steps}, {format_count(estimate.max_tokens)} tokens: {format_flops(estimate.total_flops)}, {per_token}"


def _format_memory(estimate: Resource, spec: JobSpec, machine_bytes: int | None) -> str:
    per_worker = f"{format_size(estimate.memory_per_worker)} per worker"
    if spec.resources.gpus_per_worker:
        return per_worker + _format_gpu_memory(estimate.memory_per_worker, spec.resources.accelerator_type)
    process, workers = estimate.process_memory or 0, spec.resources.max_workers
    required = workers * (estimate.memory_per_worker + process)
    per_worker += f" plus {format_size(process)} process overhead" if process else ""
    total = f"{per_worker}; {format_size(required)} for {pluralize(workers, 'worker')}"
    if machine_bytes is None:
        return total
    verdict = "fits" if required <= machine_bytes else _CPU_ADVICE
    return f"{total}, {format_size(machine_bytes)} on this machine: {verdict}"


def _format_gpu_memory(required: float, accelerator_type: str | None) -> str:
    capacity = DEVICE_MEMORY.get(accelerator_type or "")
    if capacity is None:
        return " of GPU memory"
    verdict = "fits" if required <= capacity else _GPU_ADVICE
    return f", {format_size(capacity)} on one {accelerator_type}: {verdict}"


def _format_time(estimate: Resource) -> str:
    if estimate.seconds is None:
        return "no estimate: no similar job has finished"
    seconds, source = format_duration(estimate.seconds), str(estimate.speed_source)
    if source == "configured":
        return f"{seconds} of training, at the speed set by SWIFTKV_FLOPS_PER_SECOND"
    if source.startswith("assumed"):
        return f"{seconds} of training, {source}"
    return f"{seconds} from start to finish, at the speed of {source}"


def _format_source(source: Mapping[str, Any]) -> str:
    facts = [
        None if source.get("num_files") is None else pluralize(source["num_files"], "file"),
        None if source.get("num_bytes") is None else format_size(source["num_bytes"]),
        f"rows of {' or '.join(source['formats'])}" if source.get("formats") else None,
        f"columns not read: {', '.join(source['unread_columns'])}" if source.get("unread_columns") else None,
        source.get("not_checked"),
    ]
    return f"{source['name_or_path']}: {', '.join(filter(None, facts)) or 'readable only by workers'}"


def estimate_job(spec: JobSpec, *, config: Path | None, num_tokens: int | None = None) -> Resource:
    """Estimate a job in this process, without network. `config`: the teacher's `config.json` or its directory.
    `num_tokens`: tokens per epoch. Raises as `Access.check_spec` and `validate_and_estimate`.
    """
    UNRESTRICTED.check_spec(spec)
    speed = find_speed(spec, (), load_settings().flops_per_second)
    estimate = add_time_and_cost(validate_and_estimate(spec, config=config, num_tokens=num_tokens), spec, speed)
    return Resource.model_validate({"object": "distillation.estimate", **estimate.model_dump()})


def print_estimate(estimate: Resource, spec: JobSpec, machine_bytes: int | None) -> None:
    """Print a response of `POST /jobs/validate`. `machine_bytes`: as in `describe_estimate`."""
    print_fields(describe_estimate(estimate, spec, machine_bytes))
    if estimate.gates:
        print_detectable_losses(estimate.gates)
    if estimate.num_hidden_layers is None:
        print_line("The teacher is on the hub: use --config with its config.json to check layers and estimate memory.")


def print_detectable_losses(gates: Sequence[Mapping[str, Any]]) -> None:
    """Print the smallest loss that each gate's samples can detect, from a response of `POST /jobs/validate`."""

    def make_column(name: str, form: str, default: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda gate: default if gate[name] is None else format(gate[name], form)

    columns: Columns = {
        "gate": "task",
        "samples": make_column("num_samples", ",", "unknown"),
        "smallest detectable loss, points": make_column("excluded", "g", "unknown"),
        "limit": make_column("limit", "g", "auto"),
        "samples needed": make_column("samples_needed", ",", ""),
    }
    print_items(gates, columns, empty="")
    if any(gate["samples_needed"] is not None for gate in gates):
        print_line(
            "Gates with limits below the smallest detectable loss may be inconclusive for good students: use more "
            "samples, a larger limit, or auto."
        )
    worse = compute_false_pass_probability(gates)
    if worse is not None and worse > MAX_FALSE_PASS_PROBABILITY:
        print_line(
            f"A student that loses {WORSE_STUDENT_LOSS:g} points on every task passes these gates with a probability "
            f"of about {worse:.0%}: use more samples or more tasks."
        )
