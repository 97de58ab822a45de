"""A job's phases as a table and sentences: what each needs, what dominates, what was assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swiftkv_platform.cli.context import read_spec, settings
from swiftkv_platform.cli.output import print_json, print_table, say
from swiftkv_platform.cli.sources import read_stored
from swiftkv_platform.client import Estimate
from swiftkv_platform.local.units import duration, flops, plural, size
from swiftkv_platform.orchestration.estimates import machines
from swiftkv_platform.orchestration.validation import validate
from swiftkv_platform.specs import JobSpec

_COLUMNS = ("phase", "workers", "device", "host", "node's disk", "store", "downloads", "uploads", "time")
_NOUNS = {
    "prepare": "preparation",
    "calibrate": "calibration",
    "train": "training",
    "evaluate": "evaluation",
    "publish": "publishing",
}
_PARTS = {"cache": "the teacher, rows and the start", "checkpoints": "checkpoints", "artifact": "the artifact"}
_SECONDS = {
    "download": "downloads",
    "read": "reading and writing disks",
    "compute": "computing",
    "steering": "measuring and trying rates",
    "upload": "uploads",
}

Phase = Mapping[str, Any]


def foresee(spec: JobSpec, *, config: Path | None, num_tokens: int | None = None) -> Estimate:
    """Return the estimate of a spec as this process makes it, without network.

    Args:
        config: the teacher's `config.json`, or its directory.
        num_tokens: tokens of an epoch.

    Raises as `validate`.
    """
    found = validate(spec, read_stored, config=config, machines=machines(settings()), num_tokens=num_tokens)
    return Estimate.model_validate({"object": "distillation.estimate", **asdict(found)})


def print_plan(path: Path, *, config: Path | None, num_tokens: int | None, json: bool) -> None:
    """Print the phases of the job spec at `path`."""
    estimate = foresee(read_spec(path), config=config, num_tokens=num_tokens)
    if json:
        print_json(estimate)
    elif estimate.model_dump()["phases"]:
        print_phases(estimate.model_dump())
    else:
        say("The teacher is on the hub: with its config.json (--config) the job's phases are planned.")


def print_phases(estimate: Mapping[str, Any]) -> None:
    """Print the phases of an estimate as `POST /jobs/validate` answers it; nothing where it has none."""
    phases: Sequence[Phase] = estimate.get("phases") or ()
    if not phases:
        return
    print_table(_COLUMNS, map(row, phases), empty="")
    for sentence in (dominant(phases), left_out(phases), assumed(estimate["assumptions"])):
        if sentence:
            say(sentence)


def row(phase: Phase) -> tuple[str, ...]:
    """Cells of a phase."""
    return (
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


def dominant(phases: Sequence[Phase]) -> str:
    """Phases that take most of the time, of memory and of a node's disk."""
    return " ".join((_time(phases), _memory(phases), _disk(phases)))


def _time(phases: Sequence[Phase]) -> str:
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


def _memory(phases: Sequence[Phase]) -> str:
    on_gpu = phases[0]["device_bytes"] is not None
    key, where = ("device_bytes", "device") if on_gpu else ("host_bytes", "process")
    most = max(phases, key=lambda phase: int(phase[key]))
    return f"A worker's {where} holds most in {_NOUNS[most['phase']]}, {size(most[key])}."


def _disk(phases: Sequence[Phase]) -> str:
    most = max(phases, key=lambda phase: int(phase["node_disk"]["total"]))
    use = most["node_disk"]
    what = max(_PARTS, key=lambda part: int(use[part]))
    return (
        f"A node's disk holds most in {_NOUNS[most['phase']]}, {size(use['total'])}, of which {_PARTS[what]} "
        f"{size(use[what])}."
    )


def left_out(phases: Sequence[Phase]) -> str | None:
    """Parts that are in no figure, with the phases that they belong to."""
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


def assumed(assumptions: Mapping[str, Any]) -> str:
    """Nodes and rates that the figures rest on."""
    nodes = f"{plural(assumptions['num_nodes'], 'node')} of up to {plural(assumptions['workers_per_node'], 'worker')}"
    if assumptions["flops_per_second"] is None:
        speed = "no speed of a worker"
    else:
        speed = f"{flops(assumptions['flops_per_second'])} a second and worker ({assumptions['flops_source']})"
    rates = ", ".join(
        f"{size(assumptions[f'{name}_bytes_per_second'])}/s {what}"
        for name, what in (("hub", "from the hub"), ("store", "to and from the store"), ("disk", "of a node's disk"))
    )
    return f"Assumed: {nodes}; {speed}; {rates}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
