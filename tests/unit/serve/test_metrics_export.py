"""A replica's counts go to Ray under the same names, with labels of bounded number."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.util.metrics import Metric

from swiftkv_platform.errors import QueueFullError
from swiftkv_platform.serve.metrics import Metrics
from swiftkv_platform.serve.metrics_export import RayMetricsExport

Record = tuple[str, float, dict[str, str]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Record]:
    """Records in the order that Ray takes them, after its own check of their labels."""
    records: list[Record] = []

    def record(self: Any, value: float, tags: dict[str, str] | None = None) -> None:
        final = self._get_final_tags(tags)
        self._validate_tags(final)
        assert set(final) == set(self._tag_keys)
        records.append((self.info["name"], value, final))

    monkeypatch.setattr(Metric, "_record", record)
    return records


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics(RayMetricsExport("dep_1", "one"))
    metrics.follow(lambda: None, lambda: "mdl_now", "one")
    return metrics


def test_counts_carry_deployment_replica_and_model(metrics: Metrics, recorded: list[Record]) -> None:
    constant = {"deployment": "dep_1", "replica": "one"}
    metrics.asked("mdl_1")
    metrics.refused(QueueFullError("full"), "mdl_candidate")
    metrics.swapped("succeeded")
    assert recorded == [
        ("swiftkv_requests", 1, {**constant, "model": "mdl_1"}),
        ("swiftkv_rejected_requests", 1, {**constant, "model": "mdl_candidate", "reason": "queue_full"}),
        ("swiftkv_swaps", 1, {**constant, "model": "mdl_now", "outcome": "succeeded"}),
    ]
    page = metrics.text().decode()
    assert 'swiftkv:requests_total{model="mdl_1"} 1.0' in page
    assert 'swiftkv:rejected_requests_total{reason="queue_full"} 1.0' in page


def test_a_replica_that_sees_many_models_stops_making_series(metrics: Metrics, recorded: list[Record]) -> None:
    for number in range(100):
        metrics.asked(f"mdl_{number}")
    models = {tags["model"] for _, _, tags in recorded}
    assert len(models) == 33
    assert recorded[-1][2]["model"] == "other"
    metrics.asked("mdl_3")
    assert recorded[-1][2]["model"] == "mdl_3"


async def test_gauges_are_set_again_and_outlive_an_engine_that_fails(
    recorded: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftkv_platform.serve.metrics_export._GAUGES_EVERY_S", 0.01)

    class Source:
        model, calls = "mdl_1", 0

        def gauges(self) -> list[tuple[str, str, float]]:
            self.calls += 1
            if self.calls == 2:
                raise RuntimeError("the engine is being closed")
            return [("num_requests_running", "Sequences that run.", float(self.calls))]

    following = asyncio.create_task(RayMetricsExport("dep_1", "one").follow(Source()))
    while len(recorded) < 2:
        await asyncio.sleep(0.01)
    following.cancel()
    assert [(name, value) for name, value, _ in recorded[:2]] == [
        ("swiftkv_num_requests_running", 1.0),
        ("swiftkv_num_requests_running", 3.0),
    ]
