"""Images, settings, compose and monitoring in infra/ agree with the code. Nothing is started."""

import re
import tomllib
from pathlib import Path

import pytest

from swiftkv_platform.contract.autoscaling import HIDE_UNRESERVED_GPUS
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.control_plane.deployments.ray_serve import parse_http_address
from swiftkv_platform.security.keys import Scope, create_key
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.object_store import open_store
from tests.support.infra_files import (
    BASE_IMAGE,
    DOCKERFILES,
    INFRA,
    NO_BUCKET,
    ROOT,
    VERSION,
    compose,
    containers,
    documents,
    environments,
    pod_templates,
)

# ---- settings


PLACES = {
    *("compose-control-plane", "compose-schema", "ConfigMap-swiftkv-control-plane", "Dockerfile.control-plane"),
    *(f"pod-swiftkv-serve-{group}" for group in ("cpu", "gpu", "h100")),
    "pod-swiftkv-model-gpu",
}


def test_every_setting_is_a_field_and_its_value_is_accepted(tmp_path: Path) -> None:
    assert set(environments()) == PLACES
    for values in environments().values():
        with pytest.MonkeyPatch.context() as monkeypatch:
            unknown = {name for name in values if name.removeprefix("SWIFTKV_").lower() not in Settings.model_fields}
            assert not unknown
            for name, value in {**values, "AWS_ENDPOINT_URL": ""}.items():
                monkeypatch.setenv(name, value)
            if "SWIFTKV_API_KEYS_FILE" in values:  # in the pod it is mounted from a secret
                keys = tmp_path / "keys.json"
                create_key(keys, name="ann", tenant="acme", scopes=frozenset({Scope.ADMIN}))
                monkeypatch.setenv("SWIFTKV_API_KEYS_FILE", str(keys))
                monkeypatch.setenv("SWIFTKV_TENANTS_FILE", str(INFRA / "kubernetes" / "base" / "tenants.yaml"))
            if values.get("SWIFTKV_STORAGE_URI") == NO_BUCKET:
                monkeypatch.setenv("SWIFTKV_STORAGE_URI", "s3://models")
            settings = Settings()
            open_store(settings.resolved_storage_uri)
            parse_http_address(settings.serve_url)
            create_app(settings)


def test_ray_hides_gpus_that_are_not_reserved_wherever_it_runs() -> None:
    """`device: auto` uses every GPU that it sees, but a quota counts only reserved ones."""
    wanted = ("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
    assert list(HIDE_UNRESERVED_GPUS.items()) == [wanted]
    assert wanted in compose()["services"]["ray-head"]["environment"].items()
    images = [path for path in DOCKERFILES if "cluster" in path.name]
    assert len(images) == 2
    assert all(f"{'='.join(wanted)} \\" in path.read_text() for path in images)
    nodes = [node for template in pod_templates().values() for node in containers(template) if "ray-" in node["name"]]
    assert len(nodes) > 6
    for node in nodes:
        assert wanted in {(entry["name"], entry.get("value")) for entry in node["env"]}, node["name"]


def test_compose_services_find_each_other_on_the_shared_loopback() -> None:
    services = compose()["services"]
    environment = services["control-plane"]["environment"]
    command = services["ray-head"]["command"]
    dashboard = environment["SWIFTKV_RAY_DASHBOARD_URL"].removeprefix("http://")
    assert f"--dashboard-host={dashboard.split(':')[0]}" in command
    assert f"--dashboard-port={dashboard.split(':')[1]}" in command
    gcs = next(option.removeprefix("--port=") for option in command if option.startswith("--port="))
    assert f"--address=127.0.0.1:{gcs}" in services["ray-head"]["healthcheck"]["test"]
    store = environment["AWS_ENDPOINT_URL"].removeprefix("http://")
    assert [port.rpartition(":")[0] for port in services["object-store"]["ports"]] == [store]
    assert services["ray-head"]["environment"]["AWS_ENDPOINT_URL"] == environment["AWS_ENDPOINT_URL"]
    assert services["schema"]["environment"] == environment
    assert {name for name, service in services.items() if service.get("network_mode") == "host"} == {
        "control-plane",
        "schema",
        "ray-head",
        "prometheus",
    }


# ---- images


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_copy_what_exists_pin_their_base_and_drop_root(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    copies = re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE)
    sources = [source for line in copies for source in line.split()[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
    kept = {line[1:] for line in Path(f"{path}.dockerignore").read_text().splitlines() if line.startswith("!")}
    assert kept == set(sources)
    assert {"swiftkv_platform", "jobs", "serve"} <= set(sources)
    [base] = set(re.findall(r"^FROM (\S+:\S+)", text, re.MULTILINE))
    assert "python -m venv /opt/swiftkv" in text, "a job's entrypoint names the control plane's interpreter"
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", base)
    assert re.search(r"--constraint (serve-)?constraints\.txt", text)
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE) == ["1000:1000"]
    dependencies, *_ = re.split(r"^FROM .*\n", text, flags=re.MULTILINE)[1:]
    code = r"^COPY .*(swiftkv_platform|jobs|serve)"
    assert not re.search(code, dependencies, re.MULTILINE), "a release that changes only the code keeps this layer"


def test_the_control_plane_image_installs_no_torch() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    installed = {path.name: re.findall(r"'\.\[([\w,]+)\]'", path.read_text()) for path in DOCKERFILES}
    assert installed == {
        "Dockerfile.cluster": ["train,eval,serve"],
        "Dockerfile.cluster-vllm": [],
        "Dockerfile.control-plane": ["platform,postgres"],
    }
    light = [*project["dependencies"], *extras["platform"], *extras["postgres"]]
    assert not [requirement for requirement in light if re.match(r"(torch|transformers|datasets|swiftkv)", requirement)]


def test_images_have_versions_and_ours_the_package_version() -> None:
    images = [service["image"] for service in compose()["services"].values()]
    for template in pod_templates().values():
        images += [container["image"] for container in containers(template)]
    for image in images:
        base = BASE_IMAGE.fullmatch(image)
        if base is not None:  # a production overlay names the registry
            assert (INFRA / "docker" / f"Dockerfile.{base[1].removeprefix('swiftkv-')}").exists()
            continue
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
        for dependency, wait in service.get("depends_on", {}).items():
            healthy = wait["condition"] == "service_healthy"
            assert healthy == ("healthcheck" in services[dependency]), f"{name} waits for {dependency}"
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert source in volumes or (INFRA / source).exists(), mount
        build = service.get("build")
        if build:
            assert (INFRA / build["context"] / build["dockerfile"]).resolve().exists()
        for port in service.get("ports", []):
            assert "network_mode" not in service
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


# ---- monitoring


def test_prometheus_scrapes_ports_that_somebody_opens() -> None:
    [in_compose] = documents(INFRA / "monitoring" / "prometheus.compose.yaml")
    targets = {job["job_name"]: job["static_configs"][0]["targets"] for job in in_compose["scrape_configs"]}
    assert targets["control-plane"] == [f"{Settings().host}:{Settings().port}"]
    [ray] = targets["ray"]
    assert f"--metrics-export-port={ray.split(':')[1]}" in compose()["services"]["ray-head"]["command"]
