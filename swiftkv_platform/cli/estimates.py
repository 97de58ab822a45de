"""Print estimates of a job: the student, memory, time and cost as sentences, and what its gates can decide."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swiftkv_platform.cli.context import load_settings
from swiftkv_platform.cli.output import Columns, print_fields, print_items, print_line
from swiftkv_platform.client import Resource
from swiftkv_platform.control_plane.jobs.estimates import add_time, find_speed, validate
from swiftkv_platform.local.terminal import format_count, format_duration, format_flops, format_size, pluralize
from swiftkv_platform.planning.gates import (
    MAX_FALSE_PASS_PROBABILITY,
    WORSE_STUDENT_LOSS,
    compute_false_pass_probability,
)
from swiftkv_platform.planning.machines import DEVICE_MEMORY
from swiftkv_platform.sources import UNRESTRICTED
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.student_shape import format_layers

_CPU_ADVICE = "does not fit; use fewer workers or a smaller training.micro_batch_size"
_GPU_ADVICE = "does not fit; use more workers, or a smaller training.micro_batch_size or data.max_length"


def describe_estimate(found: Resource, spec: JobSpec, machine_bytes: int | None) -> dict[str, str | None]:
    """Return sentences by subject, None if nothing is known. `machine_bytes`: memory of the machine that runs all
    workers; None if it is not known.
    """
    of = {"of": "the first trial of the sweep" if spec.sweep is not None else None}
    data = {"data": "; ".join(map(_format_source, found.sources or ()))}
    if found.num_hidden_layers is None:  # the teacher's configuration is on the hub
        return of | data
    tokens = f" for prompts of {spec.data.max_length:,} tokens" if spec.data.max_length else ""
    listed = f", through layers {format_layers(spec.swiftkv.prefill_layers)}" if spec.swiftkv.prefill_layers else ""
    trained = f"{format_count(found.trained_parameters)} ({found.trained_parameters / found.parameters:.1%})"
    sentences = {
        "student": f"{found.num_key_value_layers} of {found.num_hidden_layers} layers compute K and V of their own; "
        f"{found.num_kv_cache_layers} layers are cached",
        "prefill": f"{found.prefill_flops_ratio:.1%} of the teacher's FLOPs{tokens}{listed}",
        "KV cache": f"{format_size(found.kv_bytes_per_token)} a token in bfloat16, "
        f"{found.kv_bytes_ratio:.1%} of the teacher's",
        "parameters": f"{format_count(found.parameters)}, of which {trained} are trained",
        "training": _format_training(found, spec),
        "memory": _format_memory(found, spec, machine_bytes),
        "time": _format_time(found),
        "cost": None if found.cost is None else f"{found.cost:,.2f} at the operator's prices",
    }
    return {**of, **sentences, **data}


def _format_training(found: Resource, spec: JobSpec) -> str:
    each = f"{format_flops(found.flops_per_token)} a token"
    if found.max_tokens is None:
        return f"{each}; data and epochs decide the number of tokens"
    training = spec.training
    steps = (
        pluralize(training.num_epochs, "epoch") if training.max_steps is None else pluralize(training.max_steps, "step")
    )
    return f"{steps}, {format_count(found.max_tokens)} tokens: {format_flops(found.total_flops)}, {each}"


def _format_memory(found: Resource, spec: JobSpec, machine_bytes: int | None) -> str:
    each = f"{format_size(found.memory_per_worker)} a worker"
    if spec.resources.gpus_per_worker:
        return each + _format_gpu_memory(found.memory_per_worker, spec.resources.accelerator_type)
    process, workers = found.process_memory or 0, spec.resources.max_workers
    wanted = workers * (found.memory_per_worker + process)
    each += f" plus {format_size(process)} for its process" if process else ""
    total = f"{each}; {pluralize(workers, 'worker')} {'takes' if workers == 1 else 'take'} {format_size(wanted)}"
    if machine_bytes is None:
        return total
    verdict = "fits" if wanted <= machine_bytes else _CPU_ADVICE
    return f"{total} of this machine's {format_size(machine_bytes)}: {verdict}"


def _format_gpu_memory(wanted: float, accelerator_type: str | None) -> str:
    capacity = DEVICE_MEMORY.get(accelerator_type or "")
    if capacity is None:
        return " of GPU memory"
    return f" of one {accelerator_type}'s {format_size(capacity)}: {'fits' if wanted <= capacity else _GPU_ADVICE}"


def _format_time(found: Resource) -> str:
    if found.seconds is None:
        return "unknown: no similar job has been measured"
    seconds, source = format_duration(found.seconds), str(found.speed_source)
    if source == "configured":
        return f"{seconds} of training, at the speed that the operator has set"
    if source.startswith("assumed"):
        return f"{seconds} of training, {source}"
    return f"{seconds} from start to model, at the speed of {source}"


def _format_source(source: Mapping[str, Any]) -> str:
    facts = [
        None if source.get("num_files") is None else pluralize(source["num_files"], "file"),
        None if source.get("num_bytes") is None else format_size(source["num_bytes"]),
        f"rows of {' or '.join(source['formats'])}" if source.get("formats") else None,
        source.get("not_checked"),
    ]
    return f"{source['name_or_path']}: {', '.join(filter(None, facts)) or 'only the workers can read it'}"


def estimate_job(spec: JobSpec, *, config: Path | None, num_tokens: int | None = None) -> Resource:
    """Estimate a spec in this process, without network. `config`: the teacher's `config.json` or its directory.
    `num_tokens`: tokens of an epoch. Raises as `Access.check_spec` and `validate`.
    """
    UNRESTRICTED.check_spec(spec)
    speed = find_speed(spec, (), load_settings().flops_per_second)
    found = add_time(validate(spec, config=config, num_tokens=num_tokens), spec, speed)
    return Resource.model_validate({"object": "distillation.estimate", **found.model_dump()})


def print_estimate(estimate: Resource, spec: JobSpec, machine_bytes: int | None) -> None:
    """Print an answer of `POST /jobs/validate`. `machine_bytes` as in `describe_estimate`."""
    print_fields(describe_estimate(estimate, spec, machine_bytes))
    if estimate.gates:
        print_gates(estimate.gates)
    if estimate.num_hidden_layers is None:
        print_line(
            "The teacher is on the hub: with its config.json (--config) layers are checked and memory is told, too."
        )


def print_gates(gates: Sequence[Mapping[str, Any]]) -> None:
    """Print what the samples of each task can decide, from the answer of `POST /jobs/validate`."""

    def figure(name: str, form: str, otherwise: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda gate: otherwise if gate[name] is None else format(gate[name], form)

    columns: Columns = {
        "gate on": "task",
        "samples": figure("num_samples", ",", "not known"),
        "smallest loss excluded, points": figure("excluded", "g", "not known"),
        "limit": figure("limit", "g", "set by its samples"),
        "samples needed": figure("samples_needed", ",", ""),
    }
    print_items(gates, columns, empty="")
    if any(gate["samples_needed"] is not None for gate in gates):
        print_line(
            "A limit below what the samples exclude may leave good students undecided: use more samples, a wider limit "
            "or auto."
        )
    worse = compute_false_pass_probability(gates)
    if worse is not None and worse > MAX_FALSE_PASS_PROBABILITY:
        print_line(
            f"A student {WORSE_STUDENT_LOSS:g} points worse on every task passes in about {worse:.0%} of evaluations: "
            "use more samples, or further tasks."
        )
