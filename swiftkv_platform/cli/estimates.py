"""Sentences on what a job would make and take, from the estimate of its spec. Prints nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swiftkv_platform.client import Estimate
from swiftkv_platform.local.units import count, duration, flops, plural, size
from swiftkv_platform.planning.machines import DEVICE_MEMORY
from swiftkv_platform.specs import JobSpec

_SMALLER = "does not fit: fewer workers or a smaller training.micro_batch_size would do"
_SMALLER_ON_GPU = "does not fit: more workers, or a smaller training.micro_batch_size or data.max_length, would do"


def describe_estimate(estimate: Estimate, spec: JobSpec, machine_bytes: int | None) -> dict[str, str | None]:
    """Sentences by what they are on; None where nothing is known.

    Args:
        machine_bytes: memory of the machine that runs all workers, where it is known.
    """
    found = estimate.model_dump()
    known = {name: value for name, value in found.items() if value is not None}
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
    tokens = f", prompts of {spec.data.max_length:,} tokens" if spec.data.max_length else ""
    return f"{known['prefill_flops_ratio']:.1%} of the teacher's FLOPs{tokens}"


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
    if "max_tokens" not in known or spec.training.max_steps is None:
        return f"{each}; data and epochs decide how many"
    steps, tokens = plural(spec.training.max_steps, "step"), known["max_tokens"]
    return f"{steps}, {count(tokens)} tokens: {flops(known['total_flops'])}, {each}"


def _memory(known: Mapping[str, Any], spec: JobSpec, machine_bytes: int | None) -> str | None:
    if "memory_per_worker" not in known:
        return None
    each = f"{size(known['memory_per_worker'])} a worker"
    if spec.resources.gpus_per_worker:
        return each + _on_gpu(known["memory_per_worker"], spec.resources.accelerator_type)
    process, workers = known.get("process_memory", 0), spec.resources.max_workers
    wanted = workers * (known["memory_per_worker"] + process)
    each += f" beside {size(process)} of its process" if process else ""
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
        return "not known: no job like it has been measured" if "flops_per_token" in known else None
    source = known.get("speed_source")
    basis = "by the speed that the operator has set" if source == "configured" else f"by the speed of {source}"
    return f"{duration(known['seconds'])} from start to model, {basis}"


def _source(source: Mapping[str, Any]) -> str:
    facts = []
    if source.get("num_files") is not None:
        facts.append(plural(source["num_files"], "file"))
    if source.get("num_bytes") is not None:
        facts.append(size(source["num_bytes"]))
    facts += [f"rows of {' or '.join(source['formats'])}"] if source.get("formats") else []
    return f"{source['name_or_path']}: {', '.join(facts) or 'read by the workers alone'}"
