"""The programs of Debian's package `prometheus`, and a server for a test."""

import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support.rays import free_port
from tests.support.requirements import missing
from tests.support.waiting import wait_until_up


def program(name: str) -> str:
    """Return the path of `prometheus` or `promtool`."""
    return shutil.which(name) or missing(f"no {name} on this machine (Debian: apt-get install prometheus)")


class Prometheus:
    """A running Prometheus server."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return (labels, value) of each series that the expression currently selects."""
        answer = httpx.get(f"{self.url}/api/v1/query", params={"query": expression}, timeout=30.0, trust_env=False)
        answer.raise_for_status()
        result: list[dict[str, Any]] = answer.json()["data"]["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]


@contextmanager
def prometheus(
    directory: Path,
    scrape_configs: list[dict[str, Any]],
    *,
    groups: Sequence[Mapping[str, Any]] = (),
    interval_s: int = 1,
) -> Iterator[Prometheus]:
    """Run a server with its data in `directory`, and yield it once it answers.

    Args:
        groups: rules; their alerts have no `for`, so they fire at once.
        interval_s: scrape interval and timeout.
    """
    interval = f"{interval_s}s"
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": "1s"},
        "scrape_configs": scrape_configs,
        "rule_files": [str(directory / "rules.yaml")],
    }
    at_once = [{**group, "rules": [{**rule, "for": "0s"} for rule in group["rules"]]} for group in groups]
    (directory / "rules.yaml").write_text(yaml.safe_dump({"groups": at_once}))
    (directory / "prometheus.yaml").write_text(yaml.safe_dump(config))
    url = f"127.0.0.1:{free_port()}"
    options = {
        "config.file": directory / "prometheus.yaml",
        "storage.tsdb.path": directory / "data",
        "web.listen-address": url,
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([program("prometheus"), *flags], stdout=log, stderr=log)
    try:
        wait_until_up(lambda: _is_ready(f"http://{url}"), process, directory / "prometheus.log")
        yield Prometheus(f"http://{url}")
    finally:
        process.terminate()
        process.wait(30)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", timeout=5.0, trust_env=False).is_success
    except httpx.TransportError:
        return False  # it does not listen yet
