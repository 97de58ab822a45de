"""Resources of replicas, and the autoscaling policy: the number of replicas by the load of their engines.

Ray Serve's controller calls `replicas_by_load` with the metrics that replicas report by `record_autoscaling_stats`.
Importing this module does not import Ray.
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
"""Metric: waiting prompt tokens, in units of `max_num_batched_tokens`."""
KV_CACHE_USAGE = "kv_cache_usage"
"""Metric: share of KV cache blocks in use, 0 to 1."""

FULL_WAITING_STEPS = 4.0
"""Waiting prompt steps of a fully loaded replica."""
FULL_KV_CACHE_USAGE = 0.8
"""KV cache usage of a fully loaded replica; with more sequences, some would be preempted."""
FALLBACK_ONGOING_REQUESTS = 8.0
"""Target requests per replica until a replica has reported its load."""

LOOK_BACK_S = 15.0
"""Averaging window of the metrics; must exceed Serve's reporting interval of 10 s."""


def compute_replica_resources(engine: Mapping[str, Any]) -> dict[str, float]:
    """Return `num_cpus` and `num_gpus` that Ray reserves for all ranks of a replica with these engine options.

    A candidate, or a new model during a swap, runs in the same process and needs no further reservation.
    """
    num_ranks = _clamp_to_range(RANKS, engine.get("tensor_parallel_size"))
    return {
        "num_cpus": num_ranks * _clamp_to_range(THREADS, engine.get("num_threads")),
        "num_gpus": num_ranks * (engine.get("device") == "cuda"),
    }


def _clamp_to_range(limits: Range, value: Any) -> float:
    """Clamp a number to its range; 1 if it is not an integer. The replica itself refuses invalid values."""
    return limits.clamp(value) if isinstance(value, int) else 1


def replicas_by_load(context: Any) -> tuple[int, dict[str, Any]]:
    """Autoscaling policy: return the number of replicas for an average load of 1. Serve applies bounds and delays.
    `context`: `ray.serve.config.AutoscalingContext`."""
    metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
    waiting, usage = metrics.get(WAITING_STEPS, {}), metrics.get(KV_CACHE_USAGE, {})
    requests = context.total_num_requests or 0.0
    if not usage:
        return _count_replicas(requests / FALLBACK_ONGOING_REQUESTS), {}
    # load of a replica = max(waiting steps / 4, KV cache usage / 0.8)
    loads = [
        max(waiting.get(replica, 0.0) / FULL_WAITING_STEPS, share / FULL_KV_CACHE_USAGE)
        for replica, share in usage.items()
    ]
    # Replicas without a report have just started; assume the average load for them.
    load = sum(loads) / len(loads) * max(context.current_num_replicas, len(loads))
    return max(_count_replicas(load), int(requests > 0)), {}


def _count_replicas(load: float) -> int:
    """Round a load up to replicas. NaN gives 0: an exception would stop the controller's loop for all applications."""
    return 0 if math.isnan(load) else math.ceil(min(max(load, 0.0), MAX_REPLICAS))


def make_autoscaling_config(spec: ScalingSpec) -> dict[str, Any]:
    """Return Serve's `autoscaling_config`: by engine load, or by requests if the spec has `target_ongoing_requests`."""
    config = spec.model_dump(mode="json", include=set(ScalingSpec.model_fields), exclude_none=True)
    if spec.target_ongoing_requests is None:
        config["policy"] = {"policy_function": POLICY}
    return {**config, "look_back_period_s": LOOK_BACK_S}


REVISION_HEADER = "x-swiftkv-revision"
"""Header of the control plane's health requests to a replica: the expected revision. Other callers cannot compute it,
since it depends on the model's location."""
HIDE_UNRESERVED_GPUS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
"""Environment that makes Ray hide GPUs from processes that reserve none. Otherwise all GPUs are visible, and
`device: auto` would use GPUs that are not charged to the tenant."""


def hide_unreserved_gpus() -> None:
    """Hide the machine's GPUs from this process if it has reserved none. Call it before CUDA is initialized."""
    import ray

    if not ray.get_runtime_context().get_accelerator_ids()["GPU"]:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
