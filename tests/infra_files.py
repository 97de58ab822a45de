"""Contents of infra/, read for the tests that hold it to the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
INFRA = ROOT / "infra"
KUBERNETES = sorted((INFRA / "kubernetes").glob("*.yaml"))
DOCKERFILES = sorted(path for path in (INFRA / "docker").iterdir() if path.suffix != ".dockerignore")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def objects(*kinds: str) -> list[Any]:
    """Our Kubernetes objects of these kinds, or all, as pytest parameters."""
    found = [document for path in KUBERNETES if path.name != "kustomization.yaml" for document in documents(path)]
    return [
        pytest.param(document, id=f"{document['kind']}-{document['metadata']['name']}")
        for document in found
        if not kinds or document["kind"] in kinds
    ]


def ray_cluster(document: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = document["spec"]
    return spec if document["kind"] == "RayCluster" else spec["rayClusterConfig"]


def pod_templates() -> dict[str, dict[str, Any]]:
    """Every pod template, by the name of what it belongs to."""
    templates: dict[str, dict[str, Any]] = {}
    for parameter in objects("Deployment", "RayCluster", "RayService"):
        document = parameter.values[0]
        name = document["metadata"]["name"]
        if document["kind"] == "Deployment":
            templates[name] = document["spec"]["template"]
            continue
        cluster = ray_cluster(document)
        templates[f"{name}-head"] = cluster["headGroupSpec"]["template"]
        for group in cluster["workerGroupSpecs"]:
            templates[f"{name}-{group['groupName']}"] = group["template"]
    return templates


def compose() -> dict[str, Any]:
    [document] = documents(INFRA / "compose.yaml")
    return document


def environments() -> dict[str, dict[str, str]]:
    """Every place that sets SWIFTKV_* variables, with what it sets."""
    found: dict[str, dict[str, str]] = {}
    for name, service in compose()["services"].items():
        found[f"compose-{name}"] = {key: _default(value) for key, value in service.get("environment", {}).items()}
    for parameter in objects("ConfigMap"):
        found[parameter.id or ""] = parameter.values[0]["data"]
    for path in DOCKERFILES:
        found[path.name] = dict(re.findall(r"(SWIFTKV_\w+)=(\S+)", path.read_text()))
    for name, template in pod_templates().items():
        for container in template["spec"]["containers"]:
            found[f"pod-{name}"] = {entry["name"]: entry.get("value", "") for entry in container.get("env", [])}
    ours = {place: {k: v for k, v in values.items() if k.startswith("SWIFTKV_")} for place, values in found.items()}
    return {place: values for place, values in ours.items() if values}


def _default(value: object) -> str:
    """Compose's `${NAME:-default}` with NAME unset."""
    return re.sub(r"\$\{\w+:[-?]([^}]*)\}", r"\1", str(value))
