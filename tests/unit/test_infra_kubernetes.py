"""Manifests in infra/kubernetes agree with the schemas of what reads them, and with the code. Nothing is started."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from fastapi.routing import APIRoute

from swiftkv_platform.api.routes import health
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.addresses import open_store
from tests.infra_files import INFRA, KUBERNETES, PINNED, documents, environments, objects, pod_templates, ray_cluster


def test_addresses_name_services_that_exist() -> None:
    settings = environments()["ConfigMap-swiftkv-control-plane"]
    [cluster] = [parameter.values[0] for parameter in objects("RayCluster")]
    head = f"{cluster['metadata']['name']}-head-svc"  # KubeRay's rule
    ports = {
        port["containerPort"] for port in cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["ports"]
    }
    for name in ("SWIFTKV_RAY_DASHBOARD_URL", "SWIFTKV_SERVE_URL"):
        host, port = settings[name].removeprefix("http://").split(":")
        assert host == head
        assert int(port) in ports


def test_kustomization_lists_every_file() -> None:
    [kustomization] = documents(INFRA / "kubernetes" / "kustomization.yaml")
    assert sorted([*kustomization["resources"], "kustomization.yaml"]) == [path.name for path in KUBERNETES]
    [namespace] = [parameter.values[0] for parameter in objects("Namespace")]
    assert kustomization["namespace"] == namespace["metadata"]["name"]


CORE = ("ConfigMap", "Deployment", "Namespace", "NetworkPolicy", "PersistentVolumeClaim", "Service", "ServiceAccount")


@pytest.mark.parametrize("document", objects(*CORE))
def test_core_objects_follow_their_schema(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_no_pod_connects_to_link_local_addresses() -> None:
    """All pods are selected, everything else is open, and DNS alone may be link-local (a cache on the node)."""
    policies = [parameter.values[0]["spec"] for parameter in objects("NetworkPolicy")]
    [egress] = [policy for policy in policies if "Egress" in policy["policyTypes"]]
    assert egress["podSelector"] == {}
    dns, others = egress["egress"]
    assert {(port["protocol"], port["port"]) for port in dns["ports"]} == {("UDP", 53), ("TCP", 53)}
    blocks = {block["ipBlock"]["cidr"]: block["ipBlock"]["except"] for block in others["to"]}
    assert blocks == {"0.0.0.0/0": ["169.254.0.0/16"], "::/0": ["fe80::/10"]}
    assert "ports" not in others


def test_there_is_no_other_kind() -> None:
    assert {parameter.values[0]["kind"] for parameter in objects()} == {*CORE, "RayCluster", "RayService"}


@pytest.mark.parametrize("name", pod_templates())
def test_pods_follow_their_schema_and_the_restricted_standard(name: str) -> None:
    template = pod_templates()[name]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, **template["metadata"]},
        "spec": template["spec"],
    }
    kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
    assert template["spec"]["securityContext"]["runAsNonRoot"]
    assert template["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in (*template["spec"].get("initContainers", []), *template["spec"]["containers"]):
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["requests"]
        assert "memory" in container["resources"]["limits"]


def test_references_lead_somewhere() -> None:
    """ConfigMaps and service accounts exist; secrets are KubeRay's or those that infra/README.md tells to create."""
    readme = (INFRA / "README.md").read_text()
    config_maps = {parameter.values[0]["metadata"]["name"] for parameter in objects("ConfigMap")}
    accounts = {parameter.values[0]["metadata"]["name"] for parameter in objects("ServiceAccount")}
    clusters = {parameter.values[0]["metadata"]["name"] for parameter in objects("RayCluster")}
    for template in pod_templates().values():
        assert template["spec"].get("serviceAccountName", next(iter(accounts))) in accounts
        for container in (*template["spec"].get("initContainers", []), *template["spec"]["containers"]):
            for source in container.get("envFrom", []):
                if "configMapRef" in source:
                    assert source["configMapRef"]["name"] in config_maps
                else:
                    assert f"secret generic {source['secretRef']['name']} " in readme
            for entry in container.get("env", []):
                if "valueFrom" in entry:
                    reference = entry["valueFrom"]["secretKeyRef"]
                    assert reference["name"] in clusters
                    assert reference["key"] == "auth_token"


def test_probes_ask_the_port_the_control_plane_listens_on_for_routes_it_has() -> None:
    [container] = pod_templates()["swiftkv-control-plane"]["spec"]["containers"]
    [port] = container["ports"]
    assert port["containerPort"] == Settings().port
    paths = {route.path for route in health.router.routes if isinstance(route, APIRoute)}
    for probe, path in (("startup", "/healthz"), ("liveness", "/healthz"), ("readiness", "/readyz")):
        assert container[f"{probe}Probe"]["httpGet"] == {"path": path, "port": port["name"]}
        assert path in paths
    [service] = [parameter.values[0] for parameter in objects("Service")]
    assert service["spec"]["ports"] == [{"name": "http", "port": port["containerPort"], "targetPort": port["name"]}]


def test_the_control_plane_listens_beyond_its_pod_behind_keys_that_are_mounted() -> None:
    settings = environments()["ConfigMap-swiftkv-control-plane"]
    assert settings["SWIFTKV_HOST"] == "0.0.0.0"
    pod = pod_templates()["swiftkv-control-plane"]["spec"]
    [mount] = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == "api-keys"]
    directory, _, file = settings["SWIFTKV_API_KEYS_FILE"].rpartition("/")
    assert (mount["mountPath"], mount["readOnly"]) == (directory, True)
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == "api-keys"]
    told = f"secret generic {volume['secret']['secretName']} --from-file={file}"
    assert told in (INFRA / "README.md").read_text()


@pytest.mark.parametrize("document", objects("RayCluster", "RayService"))
def test_ray_clusters_run_the_pinned_ray_behind_a_token(document: dict[str, Any]) -> None:
    assert document["apiVersion"] == "ray.io/v1"
    cluster = ray_cluster(document)
    assert cluster["rayVersion"] == PINNED["ray"]
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert group["minReplicas"] < group["maxReplicas"], "the group can scale"
        [container] = group["template"]["spec"]["containers"]
        limit, request = (container["resources"][kind].get("nvidia.com/gpu") for kind in ("limits", "requests"))
        assert limit == request
        tolerations = group["template"]["spec"].get("tolerations", [])
        assert any(toleration["key"] == "nvidia.com/gpu" for toleration in tolerations) == (request is not None)
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "KubeRay takes strings only"


def test_the_serve_config_is_one_that_ray_and_our_application_accept() -> None:
    from ray.serve.schema import ServeDeploySchema

    from serve.args import ServeArgs

    [service] = [parameter.values[0] for parameter in objects("RayService")]
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    worker = ray_cluster(service)["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    assert config.http_options.port in {port["containerPort"] for port in worker["ports"]}
    [application] = config.applications
    module, _, function = application.import_path.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert f"def {function}(" in Path(spec.origin).read_text()
    arguments = ServeArgs.model_validate(application.args)
    group = ray_cluster(service)["workerGroupSpecs"][0]
    assert arguments.max_replicas <= group["maxReplicas"], "one GPU a replica, one GPU a worker"
    open_store(arguments.artifact_uri)
