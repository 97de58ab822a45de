"""Metrics of a deployment's replicas, read from their Prometheus pages through Serve's proxy. Knows no Ray."""

from __future__ import annotations

import httpx
from prometheus_client.parser import text_string_to_metric_families

from swiftkv_platform.control_plane.deployments.answers import ReplicaMetricsAnswer
from swiftkv_platform.errors import ClusterUnavailableError

_PREFIX = "swiftkv:"
_REPLICA = "swiftkv:replica_info"
_MOST_ASKED = 16
"""Most requests; the proxy routes each to any replica."""
_TIMEOUT = httpx.Timeout(5.0)
"""Seconds."""


async def read_replica_metrics(
    url: str, num_replicas: int, *, authorization: str | None = None
) -> list[ReplicaMetricsAnswer]:
    """Return the metrics of the replicas that answered, ordered by replica name.

    Args:
        url: address of the deployment.
        num_replicas: number of replicas; the proxy is asked until all have answered, or a limited number of times.
        authorization: the caller's header; replicas with keys show their metrics to their tenant.

    Raises:
        ClusterUnavailableError: a request gets no answer.
    """
    found: dict[str, ReplicaMetricsAnswer] = {}
    headers = {} if authorization is None else {"Authorization": authorization}
    async with httpx.AsyncClient(timeout=_TIMEOUT, trust_env=False, headers=headers) as client:
        for _ in range(max(1, min(4 * num_replicas, _MOST_ASKED))):
            try:
                answer = await client.get(f"{url}/metrics")
                answer.raise_for_status()
            except httpx.HTTPError as error:
                raise ClusterUnavailableError(
                    f"{url}/metrics does not answer: {error or type(error).__name__}"
                ) from error
            metrics = parse(answer.text)
            found[metrics.replica] = metrics
            if len(found) >= num_replicas:
                break
    return [found[name] for name in sorted(found)]


def parse(page: str) -> ReplicaMetricsAnswer:
    """Parse a page in Prometheus' text format. Counters and histograms (`_count`, `_sum`) are summed over their labels,
    buckets left out."""
    replica = ""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == _REPLICA:
                replica = sample.labels["replica"]
            elif sample.name.startswith(_PREFIX) and not sample.name.endswith(("_bucket", "_created")):
                name = sample.name.removeprefix(_PREFIX)
                values[name] = values.get(name, 0.0) + sample.value
    return ReplicaMetricsAnswer(replica=replica, values=values)
