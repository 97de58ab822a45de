"""Contents of infra/, read for tests that compare it to the code."""

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
KUBERNETES = INFRA / "kubernetes"
DOCKERFILES = sorted(path for path in (INFRA / "docker").iterdir() if path.suffix != ".dockerignore")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
BASE_IMAGE = re.compile(r"registry\.invalid/(swiftkv-[\w-]+):required")
"""Image names in the base; no registry has them."""
NO_BUCKET = "s3://BUCKET_IS_REQUIRED"
"""Bucket name in the base."""


def documents(path: Path) -> list[dict[str, Any]]:
    return parsed(path.read_text())


def parsed(text: str) -> list[dict[str, Any]]:
    """Return YAML documents, parsed by libyaml if PyYAML has it, which is much faster."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [document for document in yaml.load_all(text, loader) if document]


def kustomizations() -> dict[str, dict[str, Any]]:
    """Return every kustomization, by the name of its directory."""
    found = {path.parent.name: documents(path) for path in sorted(KUBERNETES.glob("*/kustomization.yaml"))}
    return {name: document for name, [document] in found.items()}


def _resources() -> list[dict[str, Any]]:
    """Return the objects in files that kustomizations list as resources, without patches and generated config maps."""
    return [
        document
        for directory, kustomization in kustomizations().items()
        for name in kustomization.get("resources", ())
        if name.endswith(".yaml")
        for document in documents(KUBERNETES / directory / name)
    ]


def objects(*kinds: str) -> list[dict[str, Any]]:
    """Return our Kubernetes objects of these kinds."""
    return [document for document in _resources() if document["kind"] in kinds]


def named(kind: str, name: str) -> dict[str, Any]:
    """Return the only object with this kind and name."""
    [document] = [each for each in _resources() if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return document


def config_maps() -> dict[str, dict[str, str]]:
    """Return the contents of the base's config maps, which kustomize generates, by name."""
    return {
        generator["name"]: variables(KUBERNETES / "base" / name)
        for generator in kustomizations()["base"]["configMapGenerator"]
        for name in generator.get("envs", ())
    }


def variables(path: Path) -> dict[str, str]:
    """Return names and values in a file of environment variables."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def ray_cluster(document: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = document["spec"]
    return spec if document["kind"] == "RayCluster" else spec["rayClusterConfig"]


def templates_of(documents: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the pod templates of these objects, by the name of the owner."""
    templates: dict[str, dict[str, Any]] = {}
    for document in documents:
        name = document["metadata"]["name"]
        if document["kind"] in ("Deployment", "StatefulSet"):
            templates[name] = document["spec"]["template"]
        elif document["kind"] in ("RayCluster", "RayService"):
            cluster = ray_cluster(document)
            templates[f"{name}-head"] = cluster["headGroupSpec"]["template"]
            for group in cluster["workerGroupSpecs"]:
                templates[f"{name}-{group['groupName']}"] = group["template"]
    return templates


def pod_templates() -> dict[str, dict[str, Any]]:
    """Return every pod template, by the name of the owner."""
    return templates_of(_resources())


def pods_of(*clusters: str) -> dict[str, dict[str, Any]]:
    """Return the pod templates of these Ray clusters' workers, by the name of the owner."""
    prefixes = tuple(f"{cluster}-" for cluster in clusters)
    return {
        name: each for name, each in pod_templates().items() if name.startswith(prefixes) and not name.endswith("-head")
    }


def containers(template: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the containers of a pod, init containers included."""
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


def compose() -> dict[str, Any]:
    [document] = documents(INFRA / "compose.yaml")
    return document


def environments() -> dict[str, dict[str, str]]:
    """Return the SWIFTKV_* variables that each place sets, by the name of the place."""
    found: dict[str, dict[str, str]] = {}
    for name, service in compose()["services"].items():
        found[f"compose-{name}"] = {key: _default(value) for key, value in service.get("environment", {}).items()}
    for name, values in config_maps().items():
        found[f"ConfigMap-{name}"] = values
    for path in DOCKERFILES:
        found[path.name] = dict(re.findall(r"(SWIFTKV_\w+)=(\S+)", path.read_text()))
    for name, template in pod_templates().items():
        for container in template["spec"]["containers"]:
            found[f"pod-{name}"] = {entry["name"]: entry.get("value", "") for entry in container.get("env", [])}
    ours = {place: {k: v for k, v in values.items() if k.startswith("SWIFTKV_")} for place, values in found.items()}
    return {place: values for place, values in ours.items() if values}


def _default(value: object) -> str:
    """Return a value of compose.yaml with `${NAME:-default}` replaced by its default."""
    return re.sub(r"\$\{\w+:[-?]([^}]*)\}", r"\1", str(value))
