"""Manifests in infra/kubernetes agree with their readers' schemas and with the code. Nothing is started."""

import importlib.util
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
import yaml
from fastapi.routing import APIRoute

from swiftkv_platform.control_plane import health
from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.limits import KEEP_ALIVE_SECONDS
from swiftkv_platform.serve.app import DRAIN_TIMEOUT_S
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.object_store import open_store
from tests.support.infra_files import (
    INFRA,
    KUBERNETES,
    NO_BUCKET,
    PINNED,
    config_maps,
    containers,
    environments,
    kustomizations,
    named,
    objects,
    pod_templates,
    pods_of,
    ray_cluster,
    variables,
)

DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


def test_addresses_name_services_that_exist() -> None:
    """KubeRay names services `-head-svc` for the head and `-serve-svc` for serving."""
    settings = environments()["ConfigMap-swiftkv-control-plane"]
    for setting, cluster, service, port in (
        ("SWIFTKV_RAY_DASHBOARD_URL", "swiftkv-ray", "head", "dashboard"),
        ("SWIFTKV_SERVE_DASHBOARD_URL", "swiftkv-serve", "head", "dashboard"),
        ("SWIFTKV_SERVE_URL", "swiftkv-serve", "serve", "serve"),
    ):
        document = named("RayCluster", cluster)
        [head] = document["spec"]["headGroupSpec"]["template"]["spec"]["containers"]
        ports = {entry["name"]: entry["containerPort"] for entry in head["ports"]}
        assert settings[setting] == f"http://{cluster}-{service}-svc:{ports[port]}"
    assert named("RayCluster", "swiftkv-serve")["metadata"]["annotations"] == {"ray.io/enable-serve-service": "true"}


METADATA = (
    "169.254.169.254",  # AWS, Google, Azure, Oracle and others
    "169.254.170.2",  # credentials of tasks and pods of AWS
    "169.254.170.23",
    "fd00:ec2::254",  # AWS
    "fd00:ec2::23",
    "fd20:ce::254",  # Google
    "168.63.129.16",  # Azure
    "100.100.100.200",  # Alibaba
    "192.0.0.192",  # Oracle
    "fe80::a9fe:a9fe",
    "64:ff9b::a9fe:a9fe",  # 169.254.169.254 behind NAT64
)
"""Addresses at which a cloud hands out the credentials of a node or pod."""


def test_network_policies_close_what_nobody_needs() -> None:
    """Addresses where clouds hand out a node's credentials are closed to all pods, except for DNS; others are open."""
    policies = [document["spec"] for document in objects("NetworkPolicy")]
    [egress] = [policy for policy in policies if "Egress" in policy["policyTypes"]]
    assert egress["podSelector"] == {}
    dns, others = egress["egress"]
    assert {(port["protocol"], port["port"]) for port in dns["ports"]} == {("UDP", 53), ("TCP", 53)}
    blocks = {block["ipBlock"]["cidr"]: block["ipBlock"]["except"] for block in others["to"]}
    assert blocks.keys() == {"0.0.0.0/0", "::/0"}
    closed = [ip_network(block) for each in blocks.values() for block in each]

    def is_closed(address: str) -> bool:
        return any(ip_address(address) in network for network in closed)

    assert [address for address in METADATA if not is_closed(address)] == []
    harmless = ("10.0.0.7", "168.63.129.15", "1.1.1.1", "fd00::7", "2001:db8::1")
    assert [address for address in harmless if is_closed(address)] == []
    assert "ports" not in others
    [rule] = named("NetworkPolicy", "swiftkv-redis")["spec"]["ingress"]
    [source] = rule["from"]
    keepers = {"key": "ray.io/node-type", "operator": "In", "values": ["head", "redis-cleanup"]}
    assert source["podSelector"]["matchExpressions"] == [keepers], "Redis is open only to pods that keep state there"


def test_pods_follow_the_restricted_standard() -> None:
    """test_infra_rendering.py checks the rendered pods against their schema."""
    for template in pod_templates().values():
        assert template["spec"]["securityContext"]["runAsNonRoot"]
        assert template["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in containers(template):
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["requests"]
            assert "memory" in container["resources"]["limits"]


def test_references_lead_somewhere() -> None:
    """Config maps and accounts exist; secrets and their keys are those that infra/README.md says to create.

    The store's secret is optional, since pods may have a role in the cloud; that of the database is not.
    """
    readme = (INFRA / "README.md").read_text()
    accounts = {document["metadata"]["name"] for document in objects("ServiceAccount")}
    optional: dict[str, set[bool]] = {}
    for name, template in pod_templates().items():
        spec = template["spec"]
        if not name.endswith("-head"):  # KubeRay's own account, with which the autoscaler changes the cluster
            assert spec.get("serviceAccountName") in {*accounts, None}
            assert spec["automountServiceAccountToken"] is False, name
        for volume in spec.get("volumes", []):
            if "secret" in volume:
                assert f"secret generic {volume['secret']['secretName']} " in readme
        for container in containers(template):
            for source in container.get("envFrom", []):
                if "configMapRef" in source:
                    assert source["configMapRef"]["name"] in config_maps()
                else:
                    secret = source["secretRef"]
                    assert f"secret generic {secret['name']} " in readme
                    optional.setdefault(secret["name"], set()).add(secret.get("optional", False))
            for entry in container.get("env", []):
                if "valueFrom" in entry:
                    reference = entry["valueFrom"]["secretKeyRef"]
                    assert f"secret generic {reference['name']} --from-literal={reference['key']}=" in readme
    assert optional == {"swiftkv-object-store": {True}, "swiftkv-hub": {True}, "swiftkv-database": {False}}
    for document in objects("RayCluster", "RayService"):
        cluster = ray_cluster(document)
        token = cluster["authOptions"]["secretName"]
        assert f"secret generic {token} --from-literal=auth_token=" in readme
        redis = cluster["gcsFaultToleranceOptions"]
        password = redis["redisPassword"]["valueFrom"]["secretKeyRef"]
        assert f"secret generic {password['name']} --from-literal={password['key']}=" in readme
        host, port = redis["redisAddress"].split(":")
        assert int(port) in {entry["port"] for entry in named("Service", host)["spec"]["ports"]}


def test_quotas_are_a_file_that_changes_under_the_control_plane() -> None:
    """Its name has no hash, and it is not mounted by `subPath`, which would never see a change."""
    [generator] = [each for each in kustomizations()["base"]["configMapGenerator"] if "files" in each]
    assert generator["options"] == {"disableNameSuffixHash": True}
    pod = pod_templates()["swiftkv-control-plane"]["spec"]
    [volume] = [volume for volume in pod["volumes"] if volume.get("configMap") == {"name": generator["name"]}]
    [mount] = [mount for mount in pod["containers"][0]["volumeMounts"] if mount["name"] == volume["name"]]
    path = f"{mount['mountPath']}/{generator['files'][0]}"
    assert "subPath" not in mount
    assert environments()["ConfigMap-swiftkv-control-plane"]["SWIFTKV_TENANTS_FILE"] == path
    quotas = TenantPolicies(KUBERNETES / "base" / generator["files"][0])
    assert quotas.get("acme") == TenantPolicies().get("acme"), "no limits until some are set"


def test_an_ingress_leads_to_services_that_exist() -> None:
    [ingress] = objects("Ingress")
    services = [rule["http"]["paths"][0]["backend"]["service"] for rule in ingress["spec"]["rules"]]
    assert [service["name"] for service in services] == ["swiftkv-control-plane", "swiftkv-serving"]
    for service in services:
        assert service["port"]["name"] in {port["name"] for port in named("Service", service["name"])["spec"]["ports"]}
    assert [rule["host"] for rule in ingress["spec"]["rules"]] == ingress["spec"]["tls"][0]["hosts"]


def test_selectors_find_pods() -> None:
    labels = [template.get("metadata", {}).get("labels", {}) for template in pod_templates().values()]
    labels += [{"ray.io/cluster": document["metadata"]["name"]} for document in objects("RayCluster")]  # set by KubeRay
    for document in objects("Service", "Deployment", "StatefulSet"):
        selector = document["spec"]["selector"]
        wanted = selector if document["kind"] == "Service" else selector["matchLabels"]
        assert any(wanted.items() <= each.items() for each in labels), document["metadata"]["name"]


def test_the_base_names_no_bucket_and_the_example_no_value() -> None:
    assert config_maps()["swiftkv-control-plane"]["SWIFTKV_STORAGE_URI"] == NO_BUCKET
    with pytest.raises(InvalidInputError, match="names no bucket"):  # so that no control plane starts with it
        open_store(NO_BUCKET)
    example = KUBERNETES / "production" / "values.example.env"
    assert variables(example) == {}
    sources = {each["source"]["fieldPath"] for each in kustomizations()["production"]["replacements"]}
    assert sources == {f"data.{line[2:].split('=')[0]}" for line in example.read_text().splitlines() if "=" in line}


def test_probes_ask_the_port_the_control_plane_listens_on_for_routes_it_has() -> None:
    [container] = pod_templates()["swiftkv-control-plane"]["spec"]["containers"]
    [port] = container["ports"]
    assert port["containerPort"] == Settings().port
    paths = [route.path_regex for route in health.router.routes if isinstance(route, APIRoute)]
    for probe, path in (("startup", "/healthz"), ("liveness", "/healthz"), ("readiness", "/readyz/database")):
        assert container[f"{probe}Probe"]["httpGet"] == {"path": path, "port": port["name"]}
        assert any(pattern.match(path) for pattern in paths)
    service = named("Service", "swiftkv-control-plane")
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


def test_the_serve_config_is_one_that_ray_and_our_application_accept() -> None:
    from ray.serve.schema import ServeDeploySchema

    from swiftkv_platform.serve.args import ServeArgs

    [service] = objects("RayService")
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    worker = ray_cluster(service)["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    assert config.http_options.port in {port["containerPort"] for port in worker["ports"]}
    assert config.http_options.keep_alive_timeout_s == KEEP_ALIVE_SECONDS.default
    [application] = config.applications
    module, _, function = application.import_path.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    assert f"def {function}(" in Path(spec.origin).read_text()
    arguments = ServeArgs.model_validate(application.args)
    group = ray_cluster(service)["workerGroupSpecs"][0]
    assert arguments.max_replicas <= group["maxReplicas"], "each replica and each worker has one GPU"
    assert arguments.artifact_uri is not None
    assert arguments.artifact_uri.startswith(f"{NO_BUCKET}/"), "a placeholder, as the model's id is"


def test_a_pod_has_longer_to_end_than_ray_takes_to_drain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless told otherwise, Ray drains for 30 s; once the pod's grace period is over, everything is killed."""
    for template in pod_templates().values():
        spec = template["spec"]
        if spec["containers"][0]["name"].startswith("ray-"):
            [container] = spec["containers"]
            [drain] = [float(entry["value"]) for entry in container["env"] if entry["name"] == DRAIN]
            assert drain + 30 <= spec["terminationGracePeriodSeconds"]
            ports = {port["name"] for port in container["ports"]}
            if {"serve", "api-keys"} <= ports | {volume["name"] for volume in spec.get("volumes", [])}:
                assert drain >= DRAIN_TIMEOUT_S + 30, "replica and proxy finish what they have begun"
    monkeypatch.setenv(DRAIN, "271.5")  # Ray reads it
    constants = importlib.util.find_spec("ray._private.ray_constants")
    assert constants is not None
    assert constants.loader is not None
    module = importlib.util.module_from_spec(constants)
    constants.loader.exec_module(module)
    assert getattr(module, DRAIN) == 271.5


def test_replicas_are_reached_where_their_proxy_answers_and_ask_for_keys() -> None:
    """KubeRay's Service selects every ready pod of the cluster, so pods that do not serve must not be ready."""
    for group in named("RayCluster", "swiftkv-serve")["spec"]["workerGroupSpecs"]:
        [container] = group["template"]["spec"]["containers"]
        assert container["readinessProbe"]["httpGet"] == {"path": "/-/healthz", "port": "serve"}
        assert {"name": "serve", "containerPort": 8001} in container["ports"]
    path = environments()["ConfigMap-swiftkv-control-plane"]["SWIFTKV_SERVE_API_KEYS_FILE"]
    for template in pods_of("swiftkv-serve", "swiftkv-model").values():
        [container] = template["spec"]["containers"]
        assert path.rpartition("/")[0] in {mount["mountPath"] for mount in container["volumeMounts"]}
    config = yaml.safe_load(named("RayService", "swiftkv-model")["spec"]["serveConfigV2"])
    assert [application["args"]["api_keys_file"] for application in config["applications"]] == [path]


def test_ray_clusters_run_the_pinned_ray_behind_a_token() -> None:
    for document in objects("RayCluster", "RayService"):
        assert document["apiVersion"] == "ray.io/v1"
        cluster = ray_cluster(document)
        assert cluster["rayVersion"] == PINNED["ray"]
        assert cluster["authOptions"] == {"mode": "token", "secretName": "swiftkv-ray-token"}
        assert cluster["enableInTreeAutoscaling"] is True
        assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
        for group in cluster["workerGroupSpecs"]:
            assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
            assert group["minReplicas"] < group["maxReplicas"], "the group can scale"
            [container] = group["template"]["spec"]["containers"]
            limit, request = (container["resources"][kind].get("nvidia.com/gpu") for kind in ("limits", "requests"))
            assert limit == request
            tolerations = group["template"]["spec"].get("tolerations", [])
            assert any(each["key"] == "nvidia.com/gpu" for each in tolerations) == (request is not None)
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            assert all(isinstance(value, str) for value in group["rayStartParams"].values()), "KubeRay takes strings"
