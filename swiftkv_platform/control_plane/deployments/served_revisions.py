"""Replicas that serve the wanted revision, as their own `/health` reports. Knows no Ray.

Ray knows which version it has sent to a replica, but not whether the replica serves it: a replica loads a new version
beside the one that serves, or refuses it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from swiftkv_platform.contract.serving import REVISION_HEADER

_TIMEOUT = httpx.Timeout(2.0)
"""Seconds; they delay the reconciler's round."""

_MOST_ASKED = 16
"""Most requests in a round; the proxy routes each to any replica."""


@dataclass
class Progress:
    """Progress of a deployment towards a revision."""

    revision: str
    settled: dict[str, str | None] = field(default_factory=dict)
    """By replica that has settled: None if it serves the revision, else why it refused it."""
    load_seconds: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """Seconds by phase of loading, by replica that serves the revision."""

    def settle(self, replica: str, swap: Mapping[str, str], load_seconds: Mapping[str, float]) -> None:
        """Record that a replica serves or has refused the revision, and how long loading took."""
        if swap["status"] == "refused":
            self.settled[replica] = swap["message"]
        else:
            self.settled[replica] = None
            self.load_seconds[replica] = load_seconds

    def refusal(self, replicas: Collection[str]) -> str | None:
        """Return why one of these replicas refused the revision; None if none did."""
        return next((why for replica in replicas if (why := self.settled.get(replica)) is not None), None)

    def num_serving(self, replicas: Collection[str]) -> int:
        return sum(replica in self.settled and self.settled[replica] is None for replica in replicas)

    def longest_load(self, replicas: Collection[str]) -> Mapping[str, float]:
        """Return seconds by phase of the replica that took longest to load the revision; empty if none has."""
        loads = [seconds for replica, seconds in self.load_seconds.items() if replica in replicas]
        return max(loads, key=lambda seconds: sum(seconds.values()), default={})


class ServedRevisions:
    """Polls the replicas of each deployment until all have settled, and again when another revision is wanted.
    `serve_url`: address of Serve's HTTP proxies."""

    def __init__(self, serve_url: str) -> None:
        self._url = serve_url.rstrip("/")
        self._http = httpx.Client(timeout=_TIMEOUT, trust_env=False)
        self._progress: dict[str, Progress] = {}

    def want(self, revisions: Mapping[str, str]) -> None:
        """Set the wanted revisions by deployment; all others are forgotten."""
        known = self._progress
        self._progress = {
            name: known[name] if name in known and known[name].revision == revision else Progress(revision)
            for name, revision in revisions.items()
        }

    def ask(self, name: str, route_prefix: str, replicas: Collection[str]) -> Progress | None:
        """Ask the running replicas of a deployment, and return its progress; None if no revision of it is known to be
        wanted."""
        progress = self._progress.get(name)
        if progress is None:
            return None
        for _ in range(min(4 * len(replicas), _MOST_ASKED)):
            if progress.settled.keys() >= set(replicas):
                break
            said = self._health(route_prefix, progress.revision)
            if said is None:
                break
            if "swap" not in said:  # this replica has not received the revision yet
                continue
            swap = said["swap"]
            if swap["revision"] == progress.revision and swap["status"] != "loading":
                progress.settle(said["replica"], swap, said.get("load_seconds", {}))  # older replicas report no seconds
        return progress

    def close(self) -> None:
        self._http.close()

    def _health(self, route_prefix: str, revision: str) -> dict[str, Any] | None:
        """Return the `/health` document of some replica; None if none answers."""
        url = f"{self._url}{route_prefix.rstrip('/')}/health"
        try:
            response = self._http.get(url, headers={REVISION_HEADER: revision})
            document: dict[str, Any] = response.json() if response.is_success else {}
        except (httpx.HTTPError, ValueError):
            return None
        return document or None
