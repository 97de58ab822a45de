"""What infra/ says agrees with the code, the pinned versions and the schemas of what reads it. Nothing is started."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.object_store import open_store

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
KUBERNETES = sorted((INFRA / "kubernetes").glob("*.yaml"))
DOCKERFILES = sorted(path for path in (INFRA / "docker").iterdir() if path.suffix != ".dockerignore")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
PINNED = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)

HTTP_ROUTES = {"/healthz", "/readyz"}


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


# ---- settings


@pytest.mark.parametrize("place", environments())
def test_every_setting_is_a_field_and_its_value_is_accepted(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = environments()[place]
    unknown = {name for name in values if name.removeprefix("SWIFTKV_").lower() not in Settings.model_fields}
    assert not unknown
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "")
    open_store(settings.resolved_storage_uri)


def test_the_places_that_configure_the_control_plane_are_seen() -> None:
    assert set(environments()) == {
        "compose-control-plane",
        "ConfigMap-swiftkv-control-plane",
        "Dockerfile.control-plane",
    }


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
    in_compose = environments()["compose-control-plane"]
    for name in ("SWIFTKV_RAY_DASHBOARD_URL", "SWIFTKV_SERVE_URL"):
        assert in_compose[name].removeprefix("http://").split(":")[0] in compose()["services"]


# ---- images


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_copy_what_exists_pin_their_base_and_drop_root(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    sources = [
        source for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE) for source in line.split()[:-1]
    ]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
    kept = {line[1:] for line in Path(f"{path}.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == set(sources)
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"][
        "packages"
    ]
    assert set(packages) <= set(sources)
    bases = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    assert len(set(bases)) == 1
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", bases[0])
    assert "--constraint constraints.txt" in text
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE) == ["1000:1000"]


def test_the_control_plane_image_installs_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    installed = {path.name: re.findall(r"'\.\[([\w,]+)\]'", path.read_text()) for path in DOCKERFILES}
    assert installed == {"Dockerfile.cluster": ["train,serve"], "Dockerfile.control-plane": ["postgres"]}
    light = [*project["dependencies"], *extras["postgres"]]
    assert not [requirement for requirement in light if re.match(r"(torch|transformers|datasets|swiftkv)", requirement)]


def test_images_have_versions_and_ours_the_package_version() -> None:
    images = [service["image"] for service in compose()["services"].values()]
    for template in pod_templates().values():
        images += [container["image"] for container in template["spec"]["containers"]]
    [kustomization] = documents(INFRA / "kubernetes" / "kustomization.yaml")
    images += [f"{image['name']}:{image['newTag']}" for image in kustomization["images"]]
    for image in images:
        name, _, tag = image.partition(":")
        assert re.match(r"v?\d+\.\d+", tag), image
        if name.startswith("swiftkv-"):
            assert tag == VERSION, image
            assert (INFRA / "docker" / f"Dockerfile.{name.removeprefix('swiftkv-')}").exists()


# ---- compose


def test_compose_is_consistent() -> None:
    document = compose()
    services, volumes = document["services"], document["volumes"]
    for name, service in services.items():
        for dependency in service.get("depends_on", {}):
            assert "healthcheck" in services[dependency], f"{name} waits for {dependency} to be healthy"
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert source in volumes or (INFRA / source).exists(), mount
        build = service.get("build")
        if build:
            assert (INFRA / build["context"] / build["dockerfile"]).resolve().exists()
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} is published beyond this machine: {port}"
    assert set(volumes) == {
        mount.split(":")[0] for service in services.values() for mount in service.get("volumes", []) if mount[0] != "."
    }


def test_compose_asks_for_every_secret_and_the_example_names_it() -> None:
    text = (INFRA / "compose.yaml").read_text()
    required = set(re.findall(r"\$\{(\w+):\?", text))
    example = dict(re.findall(r"^(?:# )?([A-Z_]+)=(.*)$", (INFRA / "example.env").read_text(), re.MULTILINE))
    assert required == {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN"}
    assert required <= set(example)
    for name, value in example.items():
        if re.search("SECRET|TOKEN|PASSWORD", name):
            assert value in {"replace-me", ""}, name


# ---- Kubernetes


def test_kustomization_lists_every_file() -> None:
    [kustomization] = documents(INFRA / "kubernetes" / "kustomization.yaml")
    assert sorted([*kustomization["resources"], "kustomization.yaml"]) == [path.name for path in KUBERNETES]
    [namespace] = [parameter.values[0] for parameter in objects("Namespace")]
    assert kustomization["namespace"] == namespace["metadata"]["name"]


CORE = ("ConfigMap", "Deployment", "Namespace", "NetworkPolicy", "PersistentVolumeClaim", "Service", "ServiceAccount")


@pytest.mark.parametrize("document", objects(*CORE))
def test_core_objects_follow_their_schema(document: dict[str, Any]) -> None:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


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
    for container in template["spec"]["containers"]:
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
        for container in template["spec"]["containers"]:
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


def test_the_control_plane_is_probed_where_it_answers() -> None:
    [container] = pod_templates()["swiftkv-control-plane"]["spec"]["containers"]
    settings = environments()["ConfigMap-swiftkv-control-plane"]
    [service] = [parameter.values[0] for parameter in objects("Service")]
    assert [port["containerPort"] for port in container["ports"]] == [int(settings["SWIFTKV_PORT"])]
    assert service["spec"]["selector"] == pod_templates()["swiftkv-control-plane"]["metadata"]["labels"]
    probes = [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert {probe["path"] for probe in probes} == HTTP_ROUTES
    for probe in probes:
        [host] = [header["value"] for header in probe["httpHeaders"]]
        assert host in settings["SWIFTKV_ALLOWED_HOSTS"]


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
        assert (
            container["resources"]["limits"]["nvidia.com/gpu"] == container["resources"]["requests"]["nvidia.com/gpu"]
        )
        assert any(toleration["key"] == "nvidia.com/gpu" for toleration in group["template"]["spec"]["tolerations"])
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


# ---- monitoring


def test_prometheus_scrapes_ports_that_somebody_opens() -> None:
    [in_compose] = documents(INFRA / "monitoring" / "prometheus.compose.yaml")
    for job in in_compose["scrape_configs"]:
        for target in job["static_configs"][0]["targets"]:
            host, _, port = target.partition(":")
            service = compose()["services"][host]
            dockerfile = (INFRA / service["build"]["context"] / service["build"]["dockerfile"]).resolve().read_text()
            assert port in re.findall(r"\d+", " ".join(re.findall(r"^EXPOSE (.+)$", dockerfile, re.MULTILINE)))
    [in_kubernetes] = documents(INFRA / "monitoring" / "prometheus.kubernetes.yaml")
    assert in_kubernetes["scrape_configs"][0]["kubernetes_sd_configs"][0]["namespaces"]["names"] == ["swiftkv"]
    for name, template in pod_templates().items():
        port = int(template["metadata"]["annotations"]["prometheus.io/port"])
        assert port in {entry["containerPort"] for entry in template["spec"]["containers"][0]["ports"]}, name
