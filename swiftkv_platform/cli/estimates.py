"""Print estimates of a job: the student, memory, time and cost as sentences, and what its gates can decide."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swiftkv_platform.cli.context import read_spec, settings
from swiftkv_platform.cli.output import print_fields, print_json, print_table, say
from swiftkv_platform.client import Resource
from swiftkv_platform.control_plane.jobs.estimates import speed_for, validate, with_time
from swiftkv_platform.local.terminal import count, duration, flops, plural, size
from swiftkv_platform.planning.gates import MOST_PASSES_WORSE, WORSE, passes_worse
from swiftkv_platform.planning.machines import DEVICE_MEMORY
from swiftkv_platform.sources import OPEN
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.student_shape import format_layers

_SMALLER = "does not fit; use fewer workers or a smaller training.micro_batch_size"
_SMALLER_ON_GPU = "does not fit; use more workers, or a smaller training.micro_batch_size or data.max_length"


def describe_estimate(estimate: Resource, spec: JobSpec, machine_bytes: int | None) -> dict[str, str | None]:
    """Return sentences by subject, None if nothing is known. `machine_bytes`: memory of the machine that runs all
    workers; None if it is not known.
    """
    known = {name: value for name, value in estimate.model_dump().items() if value is not None}
    return {
        "of": "the first trial of the sweep" if spec.sweep is not None else None,
        "student": _student(known),
        "prefill": _prefill(known, spec),
        "KV cache": _kv_cache(known),
        "parameters": _parameters(known),
        "training": _training(known, spec),
        "memory": _memory(known, spec, machine_bytes),
        "time": _time(known),
        "cost": f"{known['cost']:,.2f} at the operator's prices" if "cost" in known else None,
        "data": "; ".join(_source(source) for source in known.get("sources", ())),
    }


def _student(known: Mapping[str, Any]) -> str | None:
    if "num_key_value_layers" not in known:
        return None
    return (
        f"{known['num_key_value_layers']} of {known['num_hidden_layers']} layers compute K and V of their own; "
        f"{known['num_kv_cache_layers']} layers are cached"
    )


def _prefill(known: Mapping[str, Any], spec: JobSpec) -> str | None:
    if "prefill_flops_ratio" not in known:
        return None
    tokens = f" for prompts of {spec.data.max_length:,} tokens" if spec.data.max_length else ""
    listed = f", through layers {format_layers(spec.swiftkv.prefill_layers)}" if spec.swiftkv.prefill_layers else ""
    return f"{known['prefill_flops_ratio']:.1%} of the teacher's FLOPs{tokens}{listed}"


def _kv_cache(known: Mapping[str, Any]) -> str | None:
    if "kv_bytes_ratio" not in known:
        return None
    per_token = f"{size(known['kv_bytes_per_token'])} a token in bfloat16, " if "kv_bytes_per_token" in known else ""
    return f"{per_token}{known['kv_bytes_ratio']:.1%} of the teacher's"


def _parameters(known: Mapping[str, Any]) -> str | None:
    if "parameters" not in known:
        return None
    trained = known["trained_parameters"]
    return f"{count(known['parameters'])}, of which {count(trained)} ({trained / known['parameters']:.1%}) are trained"


def _training(known: Mapping[str, Any], spec: JobSpec) -> str | None:
    if "flops_per_token" not in known:
        return None
    each = f"{flops(known['flops_per_token'])} a token"
    if "max_tokens" not in known:
        return f"{each}; data and epochs decide the number of tokens"
    training = spec.training
    steps = plural(training.num_epochs, "epoch") if training.max_steps is None else plural(training.max_steps, "step")
    return f"{steps}, {count(known['max_tokens'])} tokens: {flops(known['total_flops'])}, {each}"


def _memory(known: Mapping[str, Any], spec: JobSpec, machine_bytes: int | None) -> str | None:
    if "memory_per_worker" not in known:
        return None
    each = f"{size(known['memory_per_worker'])} a worker"
    if spec.resources.gpus_per_worker:
        return each + _on_gpu(known["memory_per_worker"], spec.resources.accelerator_type)
    process, workers = known.get("process_memory", 0), spec.resources.max_workers
    wanted = workers * (known["memory_per_worker"] + process)
    each += f" plus {size(process)} for its process" if process else ""
    total = f"{each}; {plural(workers, 'worker')} {'takes' if workers == 1 else 'take'} {size(wanted)}"
    if machine_bytes is None:
        return total
    verdict = "fits" if wanted <= machine_bytes else _SMALLER
    return f"{total} of this machine's {size(machine_bytes)}: {verdict}"


def _on_gpu(wanted: float, accelerator_type: str | None) -> str:
    capacity = DEVICE_MEMORY.get(accelerator_type or "")
    if capacity is None:
        return " of GPU memory"
    return f" of one {accelerator_type}'s {size(capacity)}: {'fits' if wanted <= capacity else _SMALLER_ON_GPU}"


def _time(known: Mapping[str, Any]) -> str | None:
    if "seconds" not in known:
        return "unknown: no similar job has been measured" if "flops_per_token" in known else None
    seconds, source = duration(known["seconds"]), str(known.get("speed_source"))
    if source == "configured":
        return f"{seconds} of training, at the speed that the operator has set"
    if source.startswith("assumed"):
        return f"{seconds} of training, {source}"
    return f"{seconds} from start to model, at the speed of {source}"


def _source(source: Mapping[str, Any]) -> str:
    facts = []
    if source.get("num_files") is not None:
        facts.append(plural(source["num_files"], "file"))
    if source.get("num_bytes") is not None:
        facts.append(size(source["num_bytes"]))
    facts += [f"rows of {' or '.join(source['formats'])}"] if source.get("formats") else []
    if source.get("not_checked"):
        facts.append(source["not_checked"])
    return f"{source['name_or_path']}: {', '.join(facts) or 'only the workers can read it'}"


_GATE_COLUMNS = ("gate on", "samples", "smallest loss excluded, points", "limit", "samples needed")


def foresee(spec: JobSpec, *, config: Path | None, num_tokens: int | None = None) -> Resource:
    """Estimate a spec in this process, without network. `config`: the teacher's `config.json` or its directory.
    `num_tokens`: tokens of an epoch. Raises as `Access.check` and `validate`.
    """
    OPEN.check(spec)
    speed = speed_for(spec, (), settings().flops_per_second)
    found = with_time(validate(spec, config=config, num_tokens=num_tokens), spec, speed)
    return Resource.model_validate({"object": "distillation.estimate", **found.model_dump()})


def print_plan(path: Path, *, config: Path | None, num_tokens: int | None, json: bool) -> None:
    """Print the estimate of the job spec at `path`."""
    spec = read_spec(path)
    estimate = foresee(spec, config=config, num_tokens=num_tokens)
    if json:
        print_json(estimate)
    else:
        print_estimate(estimate, spec, machine_bytes=None)


def print_estimate(estimate: Resource, spec: JobSpec, machine_bytes: int | None) -> None:
    """Print an answer of `POST /jobs/validate`. `machine_bytes` as in `describe_estimate`."""
    print_fields(describe_estimate(estimate, spec, machine_bytes))
    print_gates(estimate.model_dump())
    if estimate.model_dump().get("num_hidden_layers") is None:
        say("The teacher is on the hub: with its config.json (--config) layers are checked and memory is told, too.")


def print_gates(estimate: Mapping[str, Any]) -> None:
    """Print what the samples of each task can decide, from the answer of `POST /jobs/validate`; nothing without
    tasks."""
    gates: Sequence[Mapping[str, Any]] = estimate.get("gates") or ()
    if not gates:
        return
    rows = [
        (
            gate["task"],
            "not known" if gate["num_samples"] is None else f"{gate['num_samples']:,}",
            "not known" if gate["excluded"] is None else f"{gate['excluded']:g}",
            "set by its samples" if gate["limit"] is None else f"{gate['limit']:g}",
            "" if gate["samples_needed"] is None else f"{gate['samples_needed']:,}",
        )
        for gate in gates
    ]
    print_table(_GATE_COLUMNS, rows, empty="")
    if any(gate["samples_needed"] is not None for gate in gates):
        say(
            "A limit below what the samples exclude may leave good students undecided: use more samples, a wider limit "
            "or auto."
        )
    worse = passes_worse(gates)
    if worse is not None and worse > MOST_PASSES_WORSE:
        say(
            f"A student {WORSE:g} points worse on every task passes in about {worse:.0%} of evaluations: use more "
            "samples, or further tasks."
        )
