"""What control plane, replicas and Ray Serve agree on: reserved resources, and the number of replicas by the load of
their engines. Imports no Ray by itself.

Ray Serve's controller runs `replicas_by_load` on what replicas report with `record_autoscaling_stats`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from swiftkv_platform.specs.base import MAX_REPLICAS, RANKS, THREADS, Range
from swiftkv_platform.specs.deployment import ScalingSpec

POLICY = "swiftkv_platform.contract.autoscaling:replicas_by_load"
WAITING_STEPS = "waiting_prompt_steps"
"""Name of the metric for waiting prompt tokens, in steps of `max_num_batched_tokens`."""
KV_CACHE_USAGE = "kv_cache_usage"
"""Name of the metric for the share of KV cache blocks in use, 0 to 1."""

FULL_WAITING_STEPS = 4.0
"""Waiting prompt steps at which a replica is fully loaded: the next request waits for all of them."""
FULL_KV_CACHE_USAGE = 0.8
"""Share of the KV cache at which a replica is fully loaded: further sequences would soon be preempted."""
FALLBACK_ONGOING_REQUESTS = 8.0
"""Requests per replica to aim for as long as no replica has reported its load."""

LOOK_BACK_S = 15.0
"""Time over which reports are averaged; longer than Serve's interval between them, 10 s."""


def replica_resources(engine: Mapping[str, Any]) -> dict[str, float]:
    """Return `num_cpus` and `num_gpus` that Ray reserves for a replica with these engine options, over all its ranks.

    A candidate shares the replica's process and reservation; so does a model during a swap.
    """
    num_ranks = _within(RANKS, engine.get("tensor_parallel_size"))
    return {
        "num_cpus": num_ranks * _within(THREADS, engine.get("num_threads")),
        "num_gpus": num_ranks * (engine.get("device") == "cuda"),
    }


def _within(limits: Range, asked: Any) -> float:
    """Clamp the number to its range; 1 if it is not an integer. The replica refuses invalid values itself, by name."""
    return limits.nearest(asked) if isinstance(asked, int) else 1


def replicas_by_load(context: Any) -> tuple[int, dict[str, Any]]:
    """Serve's policy: return the number of replicas that carry the load at 1 each. Serve applies bounds and delays.
    `context`: `ray.serve.config.AutoscalingContext`."""
    metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    waiting, usage = metrics.get(WAITING_STEPS, {}), metrics.get(KV_CACHE_USAGE, {})
    requests = context.total_num_requests or 0.0
    if not usage:
        return _replicas(requests / FALLBACK_ONGOING_REQUESTS), {}
    loads = [  # by replica; 1 is full
        max(waiting.get(replica, 0.0) / FULL_WAITING_STEPS, share / FULL_KV_CACHE_USAGE)
        for replica, share in usage.items()
    ]
    # Replicas that have just started report nothing yet; they are assumed to be as loaded as the others.
    load = sum(loads) / len(loads) * max(context.current_num_replicas, len(loads))
    return max(_replicas(load), int(requests > 0)), {}


def _replicas(load: float) -> int:
    """Return the replicas for a load. NaN gives none: an error here would stop the controller's loop for all
    applications."""
    return 0 if math.isnan(load) else math.ceil(min(max(load, 0.0), MAX_REPLICAS))


def autoscaling_config(spec: ScalingSpec) -> dict[str, Any]:
    """Return Serve's `autoscaling_config`: by load, or by the number of requests if the spec has a target."""
    config = spec.model_dump(mode="json", include=set(ScalingSpec.model_fields), exclude_none=True)
    if spec.target_ongoing_requests is None:
        config["policy"] = {"policy_function": POLICY}
    return {**config, "look_back_period_s": LOOK_BACK_S}


REVISION_HEADER = "x-swiftkv-revision"
"""Header of the control plane's health requests to a replica: the revision it expects. Others cannot compute it, since
they do not know the model's location."""
HIDE_UNRESERVED = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
"""Environment with which Ray hides GPUs from processes that reserve none. By default it leaves all visible, and
`device: auto` would use GPUs that the tenant is not charged for."""


def hide_unreserved() -> None:
    """Hide the machine's GPUs from this process if it has reserved none, whatever the environment of its node. Call it
    before CUDA is initialised."""
    import ray

    if not ray.get_runtime_context().get_accelerator_ids()["GPU"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
