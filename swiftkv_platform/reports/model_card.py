"""Model card (`README.md`): quality, worst first, lineage, license and usage."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from swiftkv_platform.contract.verdicts import read_gate_verdict, summarize_quality
from swiftkv_platform.installing import make_source_install_command
from swiftkv_platform.student_shape import find_bypassed_layers, format_layers


def render_model_card(lineage: Mapping[str, Any], report: Mapping[str, Any], *, license_id: str | None) -> str:
    """Render a model's card.

    Args:
        lineage: lineage in the artifact's manifest.
        report: `evaluation.json`.
        license_id: license of the teacher in its card or configuration; None if neither names one.
    """
    spec: Mapping[str, Any] = lineage.get("spec") or {}
    name, teacher = str(spec.get("name", "SwiftKV model")), str(lineage.get("teacher", "unknown"))
    parts = [
        _format_front_matter(teacher, license_id),
        f"# {name}",
        f"A SwiftKV student of `{teacher}`{_format_revision(lineage)}, distilled by SwiftKV Platform: a prompt's "
        "tokens stop at an early layer, so that prefill takes less compute and the KV cache less memory.",
        summarize_quality(report) or "",
        _format_verdict(report),
        _format_measures(report),
        _format_limits(report),
        _format_origin(lineage, report),
        _format_license(teacher, license_id),
        _format_serving(name, spec.get("swiftkv") or {}),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _format_front_matter(teacher: str, license_id: str | None) -> str:
    """Return front matter for the hub; values are JSON, which is valid YAML."""
    lines = ["library_name: transformers", "tags: [swiftkv]"]
    if license_id is not None:
        lines.insert(0, f"license: {json.dumps(license_id)}")
    if "/" in teacher and ":" not in teacher and not teacher.startswith(("/", ".", "~")):
        lines.append(f"base_model: {json.dumps(teacher)}")
    return "\n".join(["---", *lines, "---"])


def _format_revision(lineage: Mapping[str, Any]) -> str:
    return f" (revision `{lineage['revision']}`)" if lineage.get("revision") else ""


def _format_verdict(report: Mapping[str, Any]) -> str:
    gates = report.get("gates") or ()
    if not gates:
        return "**This model has no quality gates**: the metrics below were not checked against limits."
    worst = gates[0]
    value, limit = _format_number(worst["value"]), _format_number(worst["limit"])
    return f"**Worst metric: {worst['subject']} is {value}, limit {limit}, {read_gate_verdict(worst)}.**"


def _format_measures(report: Mapping[str, Any]) -> str:
    student, teacher = report.get("distilled") or {}, report.get("teacher") or {}
    rows = [
        ("held-out perplexity", teacher.get("perplexity"), student.get("perplexity")),
        ("held-out KL to the teacher, nats", None, student.get("kl")),
        ("held-out top-1 agreement with the teacher", None, student.get("top1_agreement")),
        ("prefill FLOPs, relative", 1.0, report.get("prefill_flops_ratio")),
        ("KV cache bytes, relative", 1.0, report.get("kv_bytes_ratio")),
    ]
    tasks = sorted(report.get("tasks") or (), key=_compute_loss, reverse=True)
    rows += [(f"{task['task']}, {task.get('metric', 'score')}", task["teacher"], task["student"]) for task in tasks]
    lines = ["## Quality", "", "| metric | teacher | this model |", "|---|---|---|"]
    lines += [
        f"| {label} | {_format_number(one)} | {_format_number(other)} |"
        for label, one, other in rows
        if other is not None
    ]
    return "\n".join(lines)


def _compute_loss(task: Mapping[str, Any]) -> float:
    lost = float(task["teacher"]) - float(task["student"])
    return lost if task.get("higher_is_better", True) else -lost


def _format_limits(report: Mapping[str, Any]) -> str:
    gates = report.get("gates") or ()
    if not gates:
        return ""
    lines = ["## Quality gates, worst first", "", "| metric | limit | value | verdict |", "|---|---|---|---|"]
    for gate in gates:
        limit, value = _format_number(gate["limit"]), _format_number(gate["value"])
        lines.append(f"| {gate['subject']} (`{gate['field']}`) | {limit} | {value} | {read_gate_verdict(gate)} |")
    return "\n".join(lines)


def _format_origin(lineage: Mapping[str, Any], report: Mapping[str, Any]) -> str:
    spec: Mapping[str, Any] = lineage.get("spec") or {}
    sources = (spec.get("data") or {}).get("sources") or ()
    swiftkv = spec.get("swiftkv") or {}
    layers = swiftkv.get("num_key_value_layers")
    skipped = swiftkv.get("prefill_reduction") or 0.5
    shape = f"{layers} layers" if layers is not None else f"all but {skipped:.0%} of the layers"
    if listed := swiftkv.get("prefill_layers"):
        shape = f"layers {format_layers(listed)}"
    data = ", ".join(f"`{each['name_or_path']}`" for each in sources)
    lines = ["## Training", "", f"- data: {data or 'unknown'}"]
    lines.append(f"- prompts run {shape}; {swiftkv.get('key_value_group_size', 1)} layers share a KV cache layer")
    if swiftkv.get("decode_key_value") == "own":
        generated = "layers that prompts skip compute K and V of generated tokens"
        lines.append(f"- {generated}; quality is measured on text after a prompt")
    if (deep_tail := swiftkv.get("deep_tail", 1)) > 1:
        lines.append(f"- the last {deep_tail} tokens of a prompt run all layers")
    if report.get("tokens_trained") is not None:
        lines.append(f"- tokens trained on: {report['tokens_trained']:,}")
    parent = lineage.get("parent")
    if parent:
        lines.append(f"- continued from `{parent['name']}`")
    lines.append(f"- fingerprint of the data: `{lineage.get('data_fingerprint')}`")
    lines.append(f"- job `{lineage.get('job_id')}`, attempt {lineage.get('attempt')}")
    lines.append(f"- SwiftKV Platform {lineage.get('code_version')}; `manifest.json` has all settings and digests")
    return "\n".join(lines)


def _format_license(teacher: str, license_id: str | None) -> str:
    sentence = (
        f"`{teacher}` is under the license **{license_id}**, and this model, which contains its weights, is as well."
        if license_id is not None
        else f"Neither the card nor the configuration of `{teacher}` names a license. This model contains its "
        "weights: check their license before you share it."
    )
    return f"## License\n\n{sentence}"


def _format_serving(name: str, swiftkv: Mapping[str, Any]) -> str:
    layers = swiftkv.get("prefill_layers") or ()
    if find_bypassed_layers(layers):
        engine = "With SwiftKV Platform's own engine (vLLM does not serve it), or with transformers:"
        extra, command = "serve", f"swiftkv serve ./{name}"
    else:
        engine = "With vLLM and SwiftKV Platform's plugin, or with transformers:"
        extra, command = "vllm", f"vllm serve ./{name}"
    return f"""## Use

{engine}

```bash
{make_source_install_command(extra)}
{command}
```

SwiftKV Platform is not on PyPI; a PyPI package of this name is unrelated. Ask the publisher of this model for its \
repository.

```python
import swiftkv_platform.model  # registers the SwiftKV classes
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("./{name}")
```"""


def _format_number(value: Any) -> str:
    return "" if value is None else f"{float(value):.4g}"
