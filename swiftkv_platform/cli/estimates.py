"""Print estimates of a job: the student, memory, time and cost as sentences, and its phases as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from swiftkv_platform.cli.context import read_spec, settings
from swiftkv_platform.cli.output import print_json, print_table, say
from swiftkv_platform.client import Estimate
from swiftkv_platform.control_plane.jobs.estimates import machines
from swiftkv_platform.control_plane.jobs.validation import validate
from swiftkv_platform.layer_lists import format_layers
from swiftkv_platform.local.terminal import count, duration, flops, plural, size
from swiftkv_platform.planning.gates import MOST_PASSES_WORSE, WORSE, passes_worse
from swiftkv_platform.planning.machines import DEVICE_MEMORY
from swiftkv_platform.sources import OPEN
from swiftkv_platform.specs import JobSpec

_SMALLER = "does not fit; use fewer workers or a smaller training.micro_batch_size"
_SMALLER_ON_GPU = "does not fit; use more workers, or a smaller training.micro_batch_size or data.max_length"


def describe_estimate(estimate: Estimate, spec: JobSpec, machine_bytes: int | None) -> dict[str, str | None]:
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
    if "max_tokens" not in known or spec.training.max_steps is None:
        return f"{each}; data and epochs decide the number of tokens"
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
    source = known.get("speed_source")
    basis = "at the speed that the operator has set" if source == "configured" else f"at the speed of {source}"
    return f"{duration(known['seconds'])} from start to model, {basis}"


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


_COLUMNS = ("phase", "workers", "device", "host", "node's disk", "store", "downloads", "uploads", "time")
_GATE_COLUMNS = ("gate on", "samples", "smallest loss excluded, points", "limit", "samples needed")
_NOUNS = {
    "prepare": "preparation",
    "calibrate": "calibration",
    "train": "training",
    "evaluate": "evaluation",
    "publish": "publishing",
}
_PARTS = {"cache": "teacher, rows and initialization", "checkpoints": "checkpoints", "artifact": "the artifact"}
_SECONDS = {
    "download": "downloads",
    "read": "reading and writing disks",
    "compute": "computing",
    "steering": "measuring and trying rates",
    "upload": "uploads",
}

Phase = Mapping[str, Any]


def foresee(spec: JobSpec, *, config: Path | None, num_tokens: int | None = None) -> Estimate:
    """Estimate a spec in this process, without network. `config`: the teacher's `config.json` or its directory.
    `num_tokens`: tokens of an epoch. Raises as `Access.check` and `validate`.
    """
    OPEN.check(spec)
    found = validate(spec, config=config, machines=machines(settings()), num_tokens=num_tokens)
    return Estimate.model_validate({"object": "distillation.estimate", **found.model_dump()})


def print_plan(path: Path, *, config: Path | None, num_tokens: int | None, json: bool) -> None:
    """Print the phases of the job spec at `path`."""
    estimate = foresee(read_spec(path), config=config, num_tokens=num_tokens)
    if json:
        print_json(estimate)
    elif estimate.model_dump()["phases"]:
        print_phases(estimate.model_dump())
    else:
        say("The teacher is on the hub; give its config.json (--config) to plan the job's phases.")
    if not json:
        print_gates(estimate.model_dump())


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


def print_phases(estimate: Mapping[str, Any]) -> None:
    """Print the phases in an answer of `POST /jobs/validate`; nothing if it has none."""
    phases: Sequence[Phase] = estimate.get("phases") or ()
    if not phases:
        return
    rows = [
        (
            phase["phase"],
            f"{phase['num_workers']}",
            "" if phase["device_bytes"] is None else size(phase["device_bytes"]),
            size(phase["host_bytes"]),
            size(phase["node_disk"]["total"]),
            size(phase["store"]["total"]),
            size(phase["downloaded_bytes"]),
            size(phase["uploaded_bytes"]),
            "not known" if phase["seconds"] is None else duration(phase["seconds"]),
        )
        for phase in phases
    ]
    print_table(_COLUMNS, rows, empty="")
    say(f"{_longest(phases)} {_most_memory(phases)} {_fullest_disk(phases)}")
    if left_out := _left_out(phases):
        say(left_out)
    say(_assumed(estimate["assumptions"]))


def _longest(phases: Sequence[Phase]) -> str:
    unknown = [_NOUNS[phase["phase"]] for phase in phases if phase["seconds"] is None]
    known = [phase for phase in phases if phase["seconds"] is not None]
    if unknown:
        return f"The time of {_listed(unknown)} is not known."
    longest = max(known, key=lambda phase: float(phase["seconds"]))
    whole = sum(phase["seconds"] for phase in known)
    parts = {name: longest["seconds_of"][part] for part, name in _SECONDS.items()}
    what = max(parts, key=lambda name: parts[name])
    share = f"{_NOUNS[longest['phase']]} {duration(longest['seconds'])}"
    return f"All phases take {duration(whole)}, of which {share}, most of that {what}."


def _most_memory(phases: Sequence[Phase]) -> str:
    on_gpu = phases[0]["device_bytes"] is not None
    key, where = ("device_bytes", "device") if on_gpu else ("host_bytes", "process")
    most = max(phases, key=lambda phase: int(phase[key]))
    return f"A worker's {where} memory is largest in {_NOUNS[most['phase']]}, {size(most[key])}."


def _fullest_disk(phases: Sequence[Phase]) -> str:
    most = max(phases, key=lambda phase: int(phase["node_disk"]["total"]))
    use = most["node_disk"]
    what = max(_PARTS, key=lambda part: int(use[part]))
    return (
        f"A node's disk use is largest in {_NOUNS[most['phase']]}, {size(use['total'])}, of which {_PARTS[what]} "
        f"{size(use[what])}."
    )


def _left_out(phases: Sequence[Phase]) -> str | None:
    found: dict[str, list[str]] = {}
    for phase in phases:
        for part in phase["left_out"]:
            found.setdefault(part, []).append(phase["phase"])
    where = {
        part: "all phases" if len(names) == len(phases) else _listed([_NOUNS[name] for name in names])
        for part, names in found.items()
    }
    listed = "; ".join(f"{part} ({names})" for part, names in where.items())
    return f"Left out: {listed}." if listed else None


def _assumed(assumptions: Mapping[str, Any]) -> str:
    nodes = f"{plural(assumptions['num_nodes'], 'node')} of up to {plural(assumptions['workers_per_node'], 'worker')}"
    if assumptions["flops_per_second"] is None:
        speed = "unknown worker speed"
    else:
        speed = f"{flops(assumptions['flops_per_second'])} per second and worker ({assumptions['flops_source']})"
    rates = ", ".join(
        f"{size(assumptions[f'{name}_bytes_per_second'])}/s {what}"
        for name, what in (("hub", "from the hub"), ("store", "to and from the store"), ("disk", "on a node's disk"))
    )
    return f"Assumed: {nodes}; {speed}; {rates}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
