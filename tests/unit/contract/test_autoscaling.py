"""The autoscaling policy, on what Serve hands it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from swiftkv_platform.contract.autoscaling import KV_CACHE_USAGE, WAITING_STEPS, replicas_by_load


def replicas(*loads: tuple[float, float], running: int | None = None, requests: float = 1.0) -> int:
    """Replicas that the policy wants for (steps of prompts that wait, share of the cache in use) by replica."""
    metrics = {
        WAITING_STEPS: {number: waiting for number, (waiting, _) in enumerate(loads)},
        KV_CACHE_USAGE: {number: usage for number, (_, usage) in enumerate(loads)},
    }
    context = SimpleNamespace(
        aggregated_metrics=metrics if loads else {},
        total_num_requests=requests,
        current_num_replicas=len(loads) if running is None else running,
    )
    return replicas_by_load(context)[0]


@pytest.mark.parametrize(
    ("loads", "wanted"),
    [
        ([(0.0, 0.1)], 1),
        ([(4.0, 0.1)], 1),
        ([(8.0, 0.1)], 2),  # twice as many prompt tokens wait as one replica should have
        ([(0.0, 0.9)], 2),  # nothing waits, but the cache is nearly full
        ([(6.0, 0.1), (6.0, 0.1)], 3),
        ([(0.0, 0.1), (0.0, 0.1)], 1),
    ],
)
def test_what_waits_and_what_is_held_decide(loads: list[tuple[float, float]], wanted: int) -> None:
    assert replicas(*loads) == wanted


def test_replicas_that_say_nothing_yet_count_as_the_others() -> None:
    assert replicas((8.0, 0.1), running=2) == 4


def test_without_reports_requests_decide() -> None:
    assert replicas(requests=1.0) == 1
    assert replicas(requests=17.0) == 3


def test_nobody_needs_no_replica() -> None:
    assert replicas(requests=0.0) == 0
    assert replicas((0.0, 0.0), requests=0.0) == 0
    assert replicas((0.0, 0.0), requests=1.0) == 1
