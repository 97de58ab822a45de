"""Request router for Ray Serve: prefers the replica that has the prompt's prefix cached, unless it is too busy."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from swiftkv_platform.serve.prefixes import PrefixIndex, from_header

ROUTER = "swiftkv_platform.serve.prefix_router.PrefixRouter"
"""Import path of the router, for Serve's `RequestRouterConfig`."""

MAX_IMBALANCE = 4
"""Requests that a replica may have more than the least busy one while its prefixes still count. Beyond that, waiting
costs more than computing the prompt again."""


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is untyped
    """Prefers the replica with the longest known prefix, then the one with the fewest requests.

    Each proxy has its own router, which knows only the requests it routed itself. If a replica is new or has evicted a
    prefix, the request is only slower.
    """

    def initialize_state(self) -> None:
        """Set up the router; called by Serve."""
        self._index = PrefixIndex()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return all replicas in the order to try them: those with the longest known prefix, then the least busy."""
        loads = {replica.replica_id.unique_id: self._load(replica) for replica in candidate_replicas}
        if not loads:
            return []
        least = min(loads.values())
        usable = {replica for replica, load in loads.items() if load <= least + MAX_IMBALANCE}
        prints = [] if pending_request is None else from_header(pending_request.metadata.session_id)
        known = self._index.with_longest_prefix(prints, usable)

        def rank(replica: RunningReplica) -> tuple[bool, int, float]:
            name = replica.replica_id.unique_id
            return name not in known, loads[name], random.random()  # noqa: S311  # a tie, not a secret

        return [[replica] for replica in sorted(candidate_replicas, key=rank)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:  # noqa: ARG002
        """Record the prefixes of a request; called by Serve when a replica has accepted one."""
        self._index.add(from_header(pending_request.metadata.session_id), replica_id.unique_id)

    def _load(self, replica: RunningReplica) -> int:
        """Return the number of requests at a replica, as far as this router knows."""
        return self._replica_queue_len_cache.get(replica.replica_id) or 0
