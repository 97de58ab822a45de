"""Ray Serve's choice of a replica: the one that has the prompt's prefix, unless it has too much to do."""

from __future__ import annotations

import random
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from swiftkv_platform.serve.prefixes import PrefixIndex, from_header

ROUTER = "swiftkv_platform.serve.prefix_router.PrefixRouter"
"""Import path of the router, for Serve's `RequestRouterConfig`."""

MAX_IMBALANCE = 4
"""Requests that a replica may have more than the least busy one before its prefixes count no longer: reading a prompt
again costs less than waiting behind that many."""


class PrefixRouter(RequestRouter):  # type: ignore[misc]  # Ray is untyped
    """Longest known prefix first, then the fewest requests.

    Each proxy has a router of its own and knows what itself has routed. A replica that is new, or whose cache has
    forgotten a prefix, is only slower than was hoped.
    """

    def initialize_state(self) -> None:
        """Set the router up; Serve calls it."""
        self._index = PrefixIndex()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica to try first, and the others, the least busy one first."""
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
        """Remember the prefixes of a request; Serve calls it when a replica has taken one."""
        self._index.add(from_header(pending_request.metadata.session_id), replica_id.unique_id)

    def _load(self, replica: RunningReplica) -> int:
        """Requests it has, as far as this router knows."""
        return self._replica_queue_len_cache.get(replica.replica_id) or 0
