"""The `/jobs` routes: submit, follow and wait for jobs."""

from __future__ import annotations

import builtins
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from swiftkv_platform.client.errors import (
    ResourceNotFoundError,
    ServiceUnavailableError,
    UnreachableError,
    WaitTimeoutError,
)
from swiftkv_platform.client.models import Job, JobEvent, Resource
from swiftkv_platform.client.transport import Patience, Transport, idempotent, iter_events, iter_lines
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.documents import with_changes

_RECONNECT_PAUSE_S = 0.5


class Jobs:
    """Distillation jobs.

    Args:
        outage_s: seconds for which `wait` and `events` tolerate a server that does not answer, such as in a restart.
    """

    def __init__(self, transport: Transport, *, outage_s: float) -> None:
        self._transport = transport
        self._outage_s = outage_s
        self._seen: weakref.WeakValueDictionary[str, Job] = weakref.WeakValueDictionary()

    def create(self, spec: JobSpec | dict[str, Any], idempotency_key: str | None = None) -> Job:
        """Submit a job.

        Without an idempotency key one is generated, so a retry after a broken connection cannot submit the job twice.
        Pass your own to be safe across restarts of your program as well.

        Raises:
            InvalidRequestError: the spec is refused; `errors` names field, value and what is accepted.
        """
        headers = idempotent(idempotency_key)
        response = self._transport.request("POST", "/jobs", json=_document(spec), headers=headers, repeatable=True)
        return self.adopt(response.json())

    def clone(self, job_id: str, changes: Mapping[str, Any] | None = None, idempotency_key: str | None = None) -> Job:
        """Submit a new job with the spec of another job and some changes.

        Args:
            changes: values by dotted path, such as `{"training.max_steps": 100, "data.sources.0.weight": 2.0}`.
            idempotency_key: as in `create`.

        Raises:
            InvalidRequestError: the changed spec is refused; `errors` names field, value and what is accepted.
            InvalidInputError: a path does not exist in the spec.
        """
        return self.create(with_changes(self.get(job_id).spec, changes or {}), idempotency_key)

    def validate(self, spec: JobSpec | dict[str, Any]) -> Resource:
        """Check a spec as `create` does and estimate its cost, without submitting it."""
        response = self._transport.request("POST", "/jobs/validate", json=_document(spec), repeatable=True)
        return Resource.model_validate(response.json())

    def recipes(self) -> builtins.list[Resource]:
        """List the example specs that ship with the platform."""
        return self._transport.list(Resource, "/recipes")

    def get(self, job_id: str) -> Job:
        return self.adopt(self._transport.request("GET", f"/jobs/{job_id}", repeatable=True).json())

    def cancel(self, job_id: str) -> Job:
        """Ask a job to end. Idempotent."""
        return self.adopt(self._transport.request("POST", f"/jobs/{job_id}/cancel", repeatable=True).json())

    def pause(self, job_id: str) -> Job:
        """Ask a job to checkpoint and free the cluster. Idempotent."""
        return self.adopt(self._transport.request("POST", f"/jobs/{job_id}/pause", repeatable=True).json())

    def resume(self, job_id: str, *, cost_cap: float | None = None) -> Job:
        """Queue a paused job again; it continues from its last checkpoint.

        Args:
            cost_cap: replaces `limits.cost_cap`, for a job that was paused because of its cost.
        """
        body = None if cost_cap is None else {"cost_cap": cost_cap}
        return self.adopt(self._transport.request("POST", f"/jobs/{job_id}/resume", json=body, repeatable=True).json())

    def delete(self, job_id: str) -> None:
        """Delete a finished job with its model and its logs. Deleting a missing job is not an error.

        Raises:
            RequestConflictError: the job is in use; the message says by what.
        """
        with suppress(ResourceNotFoundError):
            self._transport.request("DELETE", f"/jobs/{job_id}", repeatable=True)

    def wait(self, job_id: str, timeout: float | None = None, *, poll_interval: float = 1.0) -> Job:
        """Block until the job has finished, successfully or not, and return it.

        Args:
            timeout: seconds; None: no limit.

        Raises:
            WaitTimeoutError: the job has not finished in time; it goes on.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        patience = Patience(self._outage_s)
        while True:
            try:
                job = self.get(job_id)
                patience.answered()
                if job.finished:
                    return job
            except (UnreachableError, ServiceUnavailableError) as error:
                patience.forgive(error, poll_interval)
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"Job {job_id} has not finished within {timeout:g} s; it keeps running. "
                    f"`swiftkv jobs watch {job_id}` follows it, `swiftkv jobs cancel {job_id}` ends it."
                )
            time.sleep(poll_interval)

    def events(self, job_id: str, follow: bool = True, *, after: str | None = None) -> Iterator[JobEvent]:
        """Yield a job's events in order, each once.

        Args:
            follow: continue until the job has finished, across broken connections and restarts of the server.
            after: id of the last event already seen.
        """
        if not follow:
            yield from self._past_events(job_id, after)
            return
        patience = Patience(self._outage_s)
        while True:
            try:
                for event in self._live_events(job_id, after):
                    patience.answered()
                    after = event.id
                    yield event
                # The stream ends with the job, or at a proxy's time limit: the job's status tells which.
                finished = self.get(job_id).finished
                patience.answered()
            except (UnreachableError, ServiceUnavailableError) as error:
                patience.forgive(error, _RECONNECT_PAUSE_S)
                continue
            if finished:
                yield from self._past_events(job_id, after)
                return
            time.sleep(_RECONNECT_PAUSE_S)

    def metrics(self, job_id: str) -> list[Resource]:
        """Return the metrics of all steps, by ascending step."""
        return sorted(self._transport.list(Resource, f"/jobs/{job_id}/metrics"), key=lambda point: point.step)

    def logs(self, job_id: str, follow: bool = False, *, tail_lines: int | None = None) -> Iterator[str]:
        """Yield the lines of the log; with `follow`, as they are written until the job has finished.

        Args:
            tail_lines: only the last lines of the newest attempt; not with `follow`.
        """
        params = {"follow": "true"} if follow else {}
        if tail_lines is not None:
            params["tail_lines"] = str(tail_lines)
        with self._transport.stream("GET", f"/jobs/{job_id}/logs", params=params) as response:
            yield from iter_lines(response.iter_bytes())

    def checkpoints(self, job_id: str) -> list[Resource]:
        """List the complete checkpoints of all attempts, by step."""
        return self._transport.list(Resource, f"/jobs/{job_id}/checkpoints")

    def artifacts(self, job_id: str) -> list[Resource]:
        """List the files of the distilled model."""
        return self._transport.list(Resource, f"/jobs/{job_id}/artifacts")

    def download(self, job_id: str, path: str, destination: Path, *, sha256: str | None = None) -> Path:
        """Download one file of the artifact to `destination`, which is written completely or not at all, and return it.

        Raises:
            ArtifactCorruptError: `sha256` is given and the content has another digest.
        """
        return self._transport.save(
            f"/jobs/{job_id}/artifacts/{path}", destination, name=f"{path} of {job_id}", sha256=sha256
        )

    def tracking_files(self, job_id: str) -> list[Resource]:
        """List files of W&B runs that have not been uploaded to W&B."""
        return self._transport.list(Resource, f"/jobs/{job_id}/tracking")

    def download_tracking_file(self, job_id: str, path: str, destination: Path) -> Path:
        """Download one file of a W&B run to `destination`, completely or not at all, and return it."""
        return self._transport.save(
            f"/jobs/{job_id}/tracking/{path}", destination, name=f"{path} of {job_id}", sha256=None
        )

    def list(
        self,
        *,
        status: str | None = None,
        model: str | None = None,
        metadata: dict[str, str] | None = None,
        limit: int | None = None,
    ) -> list[Job]:
        """List jobs, newest first; all of them without `limit`."""
        params = {"status": status, "model": model, **{f"metadata.{k}": v for k, v in (metadata or {}).items()}}
        params = {name: value for name, value in params.items() if value is not None}
        return [self.adopt(row) for row in self._transport.rows("/jobs", params, limit)]

    def adopt(self, row: dict[str, Any]) -> Job:
        """Return this client's one object for the job, updated from `row`."""
        fresh = self._transport.read(Job, row)
        known = self._seen.get(fresh.id)
        if known is None:
            self._seen[fresh.id] = fresh
            return fresh
        for name, value in fresh:
            setattr(known, name, value)
        return known

    def _past_events(self, job_id: str, after: str | None) -> Iterator[JobEvent]:
        params = {"order": "asc", **({"after": after} if after else {})}
        for row in self._transport.rows(f"/jobs/{job_id}/events", params):
            yield JobEvent.model_validate(row)

    def _live_events(self, job_id: str, after: str | None) -> Iterator[JobEvent]:
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": after} if after else {})}
        with self._transport.stream("GET", f"/jobs/{job_id}/events", headers=headers) as response:
            for message in iter_events(response):
                # Skip anything else on the stream, such as messages of a newer server.
                with suppress(ValidationError):
                    yield JobEvent.model_validate_json(message.data)


def _document(spec: JobSpec | dict[str, Any]) -> dict[str, Any]:
    # Only fields that were set: the defaults are the server's, which may be newer than this client.
    return spec.model_dump(mode="json", exclude_unset=True) if isinstance(spec, JobSpec) else spec
