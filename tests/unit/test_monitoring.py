"""Alerts, dashboards and scrape jobs name only metrics, labels and ports that the code has."""

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi.testclient import TestClient

from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from swiftkv_platform.serve.metrics import Metrics
from swiftkv_platform.settings import Settings
from tests.contract.serving.replicas import version_of
from tests.support.infra_files import INFRA, documents, pod_templates
from tests.support.prometheus import program
from tests.unit.control_plane.routes.conftest import URL, make_parts
from tests.unit.engine.tiny_models import save_swiftkv

MONITORING = INFRA / "monitoring"

DASHBOARDS = sorted((MONITORING / "dashboards").glob("*.json"))

LABELS = {
    *("deployment", "model", "replica", "reason", "outcome"),  # of replicas
    *("dependency", "file", "loop", "method", "route", "status"),  # of the control plane
    "le",
}


def rules() -> list[dict[str, Any]]:
    [document] = documents(MONITORING / "alerts.yaml")
    assert document["kind"] == "PrometheusRule"
    return [rule for group in document["spec"]["groups"] for rule in group["rules"]]


def expressions() -> Iterator[tuple[str, str]]:
    """Yield (where, expression) of every rule and every panel."""
    for rule in rules():
        yield rule["alert"], rule["expr"]
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                yield f"{path.stem}: {panel['title']}", target["expr"]


def names_on(page: str) -> set[str]:
    """Names that samples of the page have, or will have once there are values."""
    found = set()
    for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", page, re.MULTILINE):
        found |= {f"{name}{suffix}" for suffix in ("_bucket", "_sum", "_count")} if kind == "histogram" else {name}
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> set[str]:
    """Names of all metrics of a control plane and of a replica, as Prometheus gets them."""
    directory = tmp_path_factory.mktemp("control-plane")
    settings = Settings(home=directory, reconcile_interval_s=1e6, _env_file=None)
    with TestClient(create_app(settings, components=make_parts(directory, empty_database)), base_url=URL) as client:
        control_plane = names_on(client.get("/metrics").text)
    model = save_swiftkv(tmp_path_factory.mktemp("model"))
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(model, EngineConfig(max_num_seqs=2)))
    metrics = Metrics()
    metrics.version = version_of(engine)
    # Ray adds its own prefix to a name, which may have no colon (serve/metrics_export.py).
    replica = {name.replace("swiftkv:", "ray_swiftkv_") for name in names_on(metrics.render_page().decode())}
    asyncio.run(engine.aclose())
    return control_plane | replica


def test_every_metric_of_alerts_and_dashboards_is_exported(exported: set[str]) -> None:
    found = 0
    for where, expression in expressions():
        names = set(re.findall(r"\b(?:ray_)?swiftkv_\w+", re.sub(r'"[^"]*"', '""', expression)))
        assert names, where
        assert names <= exported, f"{where}: {names - exported}"
        found += len(names)
    assert found > 40


def test_labels_are_those_that_metrics_have() -> None:
    for where, expression in expressions():
        grouped = [label for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in re.split(r",\s*", group)]
        matched = re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", expression)
        assert {*grouped, *matched} <= LABELS, where


@pytest.fixture
def promtool(tmp_path: Path) -> Path:
    """A directory with the rules as a plain Prometheus reads them, and their tests."""
    [document] = documents(MONITORING / "alerts.yaml")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(document["spec"]))
    shutil.copy(MONITORING / "alerts.test.yaml", tmp_path)
    return tmp_path


def run_promtool(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [program("promtool"), *arguments]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)


def test_pod_monitors_select_pods_by_ports_that_they_have() -> None:
    templates = pod_templates()
    ray = [template for name, template in templates.items() if template["spec"]["containers"][0]["name"][:4] == "ray-"]
    monitors = {each["metadata"]["name"]: each["spec"] for each in documents(MONITORING / "pod-monitors.yaml")}
    assert monitors.keys() == {"swiftkv-control-plane", "swiftkv-ray"}
    pods = {"swiftkv-control-plane": [templates["swiftkv-control-plane"]], "swiftkv-ray": ray}
    assert len(pods["swiftkv-ray"]) == len(templates) - 2, "all pods but the control plane and Redis"
    for name, spec in monitors.items():
        [endpoint] = spec["podMetricsEndpoints"]
        for template in pods[name]:
            [container] = template["spec"]["containers"]
            assert endpoint["port"] in {port["name"] for port in container["ports"]}
    labels = templates["swiftkv-control-plane"]["metadata"]["labels"]
    assert monitors["swiftkv-control-plane"]["selector"]["matchLabels"].items() <= labels.items()
    [expression] = monitors["swiftkv-ray"]["selector"]["matchExpressions"]
    assert expression == {"key": "ray.io/cluster", "operator": "Exists"}, "KubeRay's own label"


@pytest.mark.parametrize("name", ["prometheus.compose.yaml", "prometheus.kubernetes.yaml"])
def test_promtool_accepts_the_scrape_configs(name: str, tmp_path: Path) -> None:
    [config] = documents(MONITORING / name)
    for job in config["scrape_configs"]:  # Debian's build knows no Kubernetes; the rest of the job is checked
        if job.pop("kubernetes_sd_configs", None) is not None:
            job["static_configs"] = [{"targets": ["127.0.0.1:8080"]}]
    (tmp_path / name).write_text(yaml.safe_dump(config))
    done = run_promtool(tmp_path, "check", "config", "--syntax-only", name)
    assert done.returncode == 0, done.stdout + done.stderr


def test_promtool_accepts_the_rules_and_alerts_fire_for_what_they_are_for(promtool: Path) -> None:
    for command, told in (
        (("check", "rules", "--lint-fatal", "rules.yaml"), f"{len(rules())} rules found"),
        (("test", "rules", "alerts.test.yaml"), ""),
    ):
        done = run_promtool(promtool, *command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert told in done.stdout
    [tests] = documents(MONITORING / "alerts.test.yaml")
    cases = [case for test in tests["tests"] for case in test.get("alert_rule_test", ())]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == {rule["alert"] for rule in rules()}
    assert {rule["labels"]["severity"] for rule in rules()} == {"critical", "warning"}


def test_a_prometheus_without_operator_keeps_the_same_pods() -> None:
    [config] = documents(MONITORING / "prometheus.kubernetes.yaml")
    [job] = config["scrape_configs"]
    [rule] = [rule for rule in job["relabel_configs"] if rule.get("action") == "keep"]
    for labels, kept in (
        ("swiftkv-control-plane;;http", True),
        ("kuberay;swiftkv-serve;metrics", True),
        ("kuberay;swiftkv-model-x7kq2;metrics", True),
        ("kuberay;swiftkv-serve;serve", False),
        ("swiftkv-redis;;redis", False),
        ("other;;http", False),
    ):
        assert bool(re.fullmatch(rule["regex"], labels)) is kept
