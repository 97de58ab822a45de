"""`Client`: the control plane's API (jobs, files, models, deployments) and generation."""

from __future__ import annotations

import builtins
import functools
import json
import os
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self, get_args, overload
from urllib.parse import quote

import httpx
from pydantic import ValidationError

from swiftkv_platform.client.errors import (
    Problem,
    ResourceNotFoundError,
    ServerError,
    ServiceUnavailableError,
    UnreachableError,
    WaitTimeoutError,
)
from swiftkv_platform.client.models import Generation, Job, JobEvent, Resource
from swiftkv_platform.client.transport import OutageTimer, Transport, iter_events, iter_lines, make_idempotency_header
from swiftkv_platform.errors import InvalidInputError, SwiftKVError
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.documents import apply_changes
from swiftkv_platform.specs.job import WandbMode, restrict_wandb_mode

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
_SERVING_STATUSES = ("running", "swapping", "refused")
"""Statuses of deployments that serve requests."""
_CONTROL_PLANE_ADVICE = "Run `swiftkv status` to check the local control plane, or `swiftkv up` to start it."
_SERVE_ADVICE = "Deploy a model with `swiftkv deploy MODEL`."


class Client:
    """Client of a control plane and its deployments.

    Args:
        base_url: URL of the control plane.
        api_key: API key for control plane and deployments; None if they need none.
        serve_url: base URL of `/generate`. None: that of the newest running deployment.
        timeout: max seconds without data on a connection.
        max_retries: max retries per call, after a connection error or a 503 with `Retry-After`.
        outage_s: max seconds that `jobs.wait` and `jobs.events` tolerate an unavailable control plane.
        transport: httpx transport for tests.

    Raises:
        InvalidInputError: invalid URL, or a key with characters that HTTP headers do not allow.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_BASE_URL,
        api_key: str | None = None,
        *,
        serve_url: str | None = None,
        timeout: float = 60.0,
        max_retries: int = 4,
        outage_s: float = 60.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._connect = functools.partial(
            Transport, api_key=api_key, timeout=timeout, max_retries=max_retries, transport=transport
        )
        self._control = self._connect(base_url, unreachable_advice=_CONTROL_PLANE_ADVICE)
        self._serve = self._connect(serve_url, unreachable_advice=_SERVE_ADVICE) if serve_url else None
        self.jobs = Jobs(self._control, outage_s=outage_s)
        self.files = Files(self._control)
        self.models = Models(self._control, self.jobs)
        self.deployments = Deployments(self._control)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._control.close()
        if self._serve is not None:
            self._serve.close()

    def health(self) -> dict[str, Any]:
        """Return the response of `/healthz`: the process runs."""
        return self._control.get(Resource, "/healthz").model_dump()

    def ready(self) -> dict[str, Any]:
        """Return the response of `/readyz`: database, Ray and object store are available.

        Raises:
            ServiceUnavailableError: one of them is unavailable; the message names it.
        """
        return self._control.get(Resource, "/readyz").model_dump()

    def quota(self) -> Resource:
        """Return quotas and usage of the key's tenant."""
        return self._control.get(Resource, "/quota")

    def audit(self, *, limit: int | None = 100, **filters: Any) -> list[Resource]:
        """Return audit entries, newest first: all tenants' for an operator key, the own tenant's for the scope `admin`.

        Args:
            limit: max entries; None: all.
            filters: filters of `GET /audit`: `tenant`, `actor`, `credential`, `address`, `route`, `about`,
                `request_id`, `status`, `since`, `until`.
        """
        return self._control.list(Resource, "/audit", _drop_none(filters), limit)

    @overload
    def generate(self, prompt: str | list[int], *, stream: Literal[False] = False, **parameters: Any) -> Generation: ...
    @overload
    def generate(
        self, prompt: str | list[int], *, stream: Literal[True], **parameters: Any
    ) -> Iterator[Generation]: ...
    def generate(
        self, prompt: str | list[int], *, stream: bool = False, **parameters: Any
    ) -> Generation | Iterator[Generation]:
        """Generate a completion of a prompt (text or token ids).

        Args:
            stream: return an iterator over chunks instead of the whole completion.
            parameters: other fields of `POST /generate`: `max_tokens`, `temperature`, `top_p`, `seed`, `stop`, ...
        """
        body = {"prompt": prompt, "stream": stream, **parameters}
        serve = self._get_serve_transport()
        if stream:
            return _stream_generation(serve, body)
        # A retry may sample other tokens, but has no side effects.
        return serve.send(Generation, "POST", "/generate", json=body, repeatable=True)

    def _get_serve_transport(self) -> Transport:
        if self._serve is None:
            url = next(
                (item.url for item in self.deployments.list() if item.status in _SERVING_STATUSES and item.url), None
            )
            if url is None:
                raise SwiftKVError(f"{self._control.base_url} has no running deployment. {_SERVE_ADVICE}")
            self._serve = self._connect(url, unreachable_advice=_SERVE_ADVICE)
        return self._serve


def _stream_generation(serve: Transport, body: dict[str, Any], path: str = "/generate") -> Iterator[Generation]:
    with serve.stream("POST", path, json=body) as response:
        for message in iter_events(response):
            if message.data == "[DONE]":
                return
            document = json.loads(message.data)
            if "choices" not in document:
                # The status line was sent before generation failed, so the stream carries the problem.
                problem = Problem.model_validate({"status": 500, **document})
                raise ServerError(problem, request=f"POST {serve.base_url}{path}")
            yield Generation.model_validate(document)
    raise SwiftKVError(f"{serve.base_url} closed the stream before its end; retry the request.")


def _drop_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


class Collection:
    """API resources of one kind at `path`."""

    path: str

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self, *, limit: int | None = None) -> list[Resource]:
        """List objects, newest first; all without `limit`."""
        return self._transport.list(Resource, self.path, limit=limit)

    def get(self, identifier: str) -> Resource:
        return self._transport.get(Resource, f"{self.path}/{identifier}")

    def delete(self, identifier: str) -> None:
        """Delete an object. Deleting a missing one is not an error.

        Raises:
            RequestConflictError: it is in use; the message names the user.
        """
        with suppress(ResourceNotFoundError):
            self._transport.request("DELETE", f"{self.path}/{identifier}", repeatable=True)

    def _send_versioned(
        self, method: str, path: str, body: Mapping[str, Any], version: int | None, *, repeatable: bool
    ) -> Resource:
        """Send a change that applies only to this version of the object. None: any version."""
        headers = None if version is None else {"If-Match": f'"{version}"'}
        return self._transport.send(Resource, method, path, json=body, headers=headers, repeatable=repeatable)


class Models(Collection):
    """Distilled models with their lineage. Deleting a model keeps its job."""

    path = "/models"

    def __init__(self, transport: Transport, jobs: Jobs) -> None:
        super().__init__(transport)
        self._jobs = jobs

    def create(
        self,
        *,
        from_checkpoint: str,
        name: str | None = None,
        evaluation: dict[str, Any] | None = None,
        resources: dict[str, Any] | None = None,
        metadata: dict[str, str] | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """Submit a job that evaluates a checkpoint and turns it into a model, its `distilled_model`.

        Args:
            from_checkpoint: `job_...:STEP`.
            name: name of the model.
            evaluation, resources: fields that override the checkpoint job's.
            metadata: replaces the checkpoint job's metadata.
            idempotency_key: as in `jobs.create`.

        Raises:
            InvalidRequestError: there is no such checkpoint.
        """
        options = {"name": name, "evaluation": evaluation, "resources": resources, "metadata": metadata}
        body = {"from_checkpoint": from_checkpoint, **_drop_none(options)}
        return self._jobs.send("POST", "/models", json=body, headers=make_idempotency_header(idempotency_key))

    def import_(self, source: str, *, name: str | None = None, timeout_s: float = 3600.0) -> Resource:
        """Import a student from outside the platform: copy it to the object store and register it.

        Args:
            source: directory on the control plane's machine, or `s3://` prefix, readable by the tenant's jobs.
            name: name of the model. Default: the name in its spec, or the directory's.
            timeout_s: max seconds for the copy.

        Raises:
            InvalidRequestError: the source cannot be read, is not a student, or differs from its manifest.
        """
        body = _drop_none({"source": source, "name": name})
        return self._transport.send(Resource, "POST", "/models/import", json=body, repeatable=False, timeout=timeout_s)

    def publish(self, model_id: str, *, to: str, private: bool = True, idempotency_key: str | None = None) -> Job:
        """Submit a job that copies a model, with its card, to a target that the operator allows.

        Args:
            to: `hf://organization/name`, `s3://bucket/prefix` or a directory.
            private: visibility of a hub repository that is created.
            idempotency_key: as in `jobs.create`.
        """
        body, headers = {"to": to, "private": private}, make_idempotency_header(idempotency_key)
        return self._jobs.send("POST", f"/models/{model_id}/publish", json=body, headers=headers)

    def lineage(self, model_id: str) -> Resource:
        """Return a model's lineage from data and teacher to deployments."""
        return self._transport.get(Resource, f"/models/{model_id}/lineage")

    def compare(self, model_id: str, other_id: str) -> Resource:
        """Compare two models: quality, prefill compute, KV cache, the rows of shared evaluation tasks, and the specs of
        their jobs."""
        return self._transport.get(Resource, f"/models/{model_id}/compare/{other_id}")

    def changed_rows(
        self,
        model_id: str,
        other_id: str,
        *,
        task: str,
        change: Literal["worse", "better"] | None = None,
        limit: int | None = None,
    ) -> builtins.list[Resource]:
        """List the rows of a task on which two models have different scores, the largest difference first.

        Args:
            task: name of a task of both evaluations, as in `compare(...).tasks`.
            change: only rows on which `other_id` is worse, or better; None: both.
            limit: max rows; None: all.
        """
        path = f"/models/{model_id}/compare/{other_id}/rows/{quote(task)}"
        return self._transport.list(Resource, path, _drop_none({"change": change}), limit)

    def promote(
        self,
        model_id: str,
        *,
        reason: str,
        alias: str = "production",
        version: int | None = None,
        accept_undecided: bool = False,
    ) -> Resource:
        """Point `alias` to a model. Deployments of the alias swap it in.

        Args:
            version: expected version of the alias; 0 for a new alias. None: any.
            accept_undecided: promote a model with inconclusive quality gates.

        Raises:
            RequestConflictError: the alias has another version, a concurrent promotion won, or a quality gate of the
                model is inconclusive.
        """
        body: dict[str, Any] = {"alias": alias, "reason": reason}
        if accept_undecided:  # older control planes do not know this field
            body["accept_undecided"] = True
        return self._send_versioned("POST", f"/models/{model_id}/promote", body, version, repeatable=version is None)

    def aliases(self) -> builtins.list[Resource]:
        """List aliases with models and recent changes. `alias` returns the full history of an alias."""
        return self._transport.list(Resource, "/aliases")

    def alias(self, alias: str) -> Resource:
        return self._transport.get(Resource, f"/aliases/{alias}")

    def rollback(self, alias: str = "production", *, reason: str, version: int | None = None) -> Resource:
        """Roll `alias` back to its previous model. `version`: as in `promote`.

        Not retried after a broken connection: a second call would roll back twice.
        """
        return self._send_versioned("POST", f"/aliases/{alias}/rollback", {"reason": reason}, version, repeatable=False)


class Deployments(Collection):
    """Deployed models."""

    path = "/deployments"

    def create(self, model: str | None, **options: Any) -> Resource:
        """Deploy a model. Returns at once; `wait_ready` waits until it is ready.

        Args:
            model: model id (a succeeded job's `distilled_model`), job id, alias or unique model name.
            options: other fields of `swiftkv_platform.specs.deployment.DeploymentSpec`.
        """
        if model is None:
            raise InvalidInputError(
                "deployments.create(model=None): only succeeded jobs have a `distilled_model`; "
                "check the job's `status` and `error`",
                field="model",
            )
        body = {"model": model, **options}
        return self._transport.send(Resource, "POST", "/deployments", json=body, repeatable=False)

    def update(self, deployment_id: str, *, version: int | None = None, **changes: Any) -> Resource:
        """Change a deployment's model or options without failing requests. Returns at once; `wait_ready` waits.

        Args:
            version: expected version of the deployment. None: any, but fail if another call changes the same fields.
            changes: fields of `swiftkv_platform.specs.deployment.DeploymentSpec` except `route_prefix`; of `engine` and
                `candidate` only the keys to change (None resets an engine option).

        Raises:
            RequestConflictError: the deployment has another version, or a field was changed at the same time.
        """
        path = f"/deployments/{deployment_id}"
        return self._send_versioned("PATCH", path, changes, version, repeatable=version is None)

    def metrics(self, deployment_id: str) -> Resource:
        """Return the current metrics of the replicas. Totals are counters, so two calls give a rate."""
        return self._transport.get(Resource, f"/deployments/{deployment_id}/metrics")

    def rollouts(self, deployment_id: str) -> builtins.list[Resource]:
        """List the rollouts of jobs' models to the deployment, newest job first."""
        return self._transport.list(Resource, f"/deployments/{deployment_id}/rollouts")

    def roll_back(self, deployment_id: str, job_id: str, *, reason: str) -> Resource:
        """Undo the rollout of a job's model: remove the candidate, or serve the previous model again.

        Raises:
            RequestConflictError: it was refused or rolled back before, or the deployment serves another model now.
        """
        path = f"/deployments/{deployment_id}/rollouts/{job_id}/rollback"
        return self._transport.send(Resource, "POST", path, json={"reason": reason}, repeatable=False)

    def traffic(self, deployment_id: str) -> Resource:
        """Return the settings of captured traffic (`capture`), its bytes by day, and pending deletions."""
        return self._transport.get(Resource, f"/deployments/{deployment_id}/traffic")

    def captured_requests(
        self,
        deployment_id: str,
        *,
        user: str | None = None,
        since: float | None = None,
        until: float | None = None,
        limit: int | None = None,
    ) -> builtins.list[Resource]:
        """List captured requests with their answers, newest first; all without `limit`.

        Args:
            user: only requests of this end user.
            since: only requests that ended at this time or later, in Unix seconds.
            until: only requests that ended before this time, in Unix seconds.
        """
        params = _drop_none({"user": user, "since": since, "until": until})
        return self._transport.list(Resource, f"/deployments/{deployment_id}/traffic/rows", params, limit)

    def delete_traffic(
        self,
        deployment_id: str,
        *,
        user: str | None = None,
        request_id: str | None = None,
        before: float | None = None,
    ) -> Resource:
        """Delete captured requests that match all given conditions. They are hidden at once.

        Args:
            user: end user of the requests.
            request_id: id of a response.
            before: delete requests that ended before this time, in Unix seconds.
        """
        params = _drop_none({"user": user, "request_id": request_id, "before": before})
        path = f"/deployments/{deployment_id}/traffic"
        return self._transport.send(Resource, "DELETE", path, params=params, repeatable=True)

    def generate(self, deployment_id: str, prompt: str | list[int], **parameters: Any) -> Iterator[Generation]:
        """Generate with a deployment through the control plane, which alone must be reachable. Yields chunks.

        Args:
            parameters: other fields of `POST /generate`.
        """
        body = {"prompt": prompt, "stream": True, **parameters}
        return _stream_generation(self._transport, body, f"/deployments/{deployment_id}/generate")

    def wait_ready(self, deployment_id: str, timeout: float = 300.0, *, poll_interval: float = 1.0) -> Resource:
        """Block until the deployment serves its last requested version.

        Raises:
            SwiftKVError: it failed or rejected the new version; the message has the reason.
            WaitTimeoutError: it is not ready within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            deployment = self.get(deployment_id)
            if deployment.status == "running":
                return deployment
            if deployment.status in ("failed", "refused"):
                outcome = deployment.status
                if outcome == "refused":
                    outcome = f"rejected {deployment.model} and keeps serving the previous model"
                reason = deployment.message or "no reason reported"
                raise SwiftKVError(f"Deployment {deployment_id} {outcome}: {reason}")
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"Deployment {deployment_id} is still {deployment.status} after {timeout:g} s: {deployment.message}"
                )
            time.sleep(poll_interval)


class Files(Collection):
    """Uploaded files."""

    path = "/v1/files"

    def upload(self, path: Path, *, expires_after_s: int | None = None) -> Resource:
        """Upload a JSON Lines file. Use its id as `name_or_path` in a job's `data.sources`.

        Args:
            expires_after_s: seconds until the file is deleted; None: never.

        Raises:
            InvalidRequestError: a row matches no format; the message names its line.
        """
        form = {"purpose": "fine-tune"}
        if expires_after_s is not None:
            form |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(expires_after_s)}
        with path.open("rb") as stream:
            files = {"file": (path.name, stream)}
            return self._transport.send(Resource, "POST", self.path, data=form, files=files, repeatable=False)

    def download(self, file_id: str, destination: Path, *, sha256: str | None = None) -> Path:
        """Download the rows to `destination`, atomically, and return it.

        Raises:
            ArtifactCorruptError: `sha256` is given and the content has another digest.
        """
        return self._transport.download(f"/v1/files/{file_id}/content", destination, name=file_id, sha256=sha256)

    def delete(self, identifier: str) -> None:
        """Delete a file. Fails while an unfinished job uses it."""
        self._transport.request("DELETE", f"{self.path}/{identifier}", repeatable=True)


_RECONNECT_PAUSE_S = 0.5


class Jobs(Collection):
    """Distillation jobs. Deleting a finished job deletes its model and logs.

    Args:
        outage_s: max seconds that `wait` and `events` tolerate an unavailable server, e.g. a restart.
    """

    path = "/jobs"

    def __init__(self, transport: Transport, *, outage_s: float) -> None:
        super().__init__(transport)
        self._outage_s = outage_s
        self._known_jobs: weakref.WeakValueDictionary[str, Job] = weakref.WeakValueDictionary()

    def create(self, spec: JobSpec | dict[str, Any], idempotency_key: str | None = None) -> Job:
        """Submit a job.

        A generated idempotency key prevents duplicate jobs by retries. Pass your own key to also prevent duplicates
        after restarts of your program. `WANDB_MODE` and `WANDB_DISABLED` of this program restrict the job's tracking.

        Raises:
            InvalidRequestError: invalid spec; `errors` has field, value and accepted values.
        """
        document = _restrict_tracking(_to_document(spec))
        return self.send("POST", "/jobs", json=document, headers=make_idempotency_header(idempotency_key))

    def clone(self, job_id: str, changes: Mapping[str, Any] | None = None, idempotency_key: str | None = None) -> Job:
        """Submit a new job with the changed spec of another job.

        Args:
            changes: values by dotted path, e.g. `{"training.max_steps": 100, "data.sources.0.weight": 2.0}`.
            idempotency_key: as in `create`.

        Raises:
            InvalidRequestError: invalid spec; `errors` has field, value and accepted values.
            InvalidInputError: a path does not exist in the spec.
        """
        return self.create(apply_changes(self.get(job_id).spec, changes or {}), idempotency_key)

    def validate(self, spec: JobSpec | dict[str, Any]) -> Resource:
        """Validate a spec as `create` does, and estimate its cost, without submitting it."""
        return self._transport.send(Resource, "POST", "/jobs/validate", json=_to_document(spec), repeatable=True)

    def recipes(self) -> builtins.list[Resource]:
        """List the example specs that ship with the platform."""
        return self._transport.list(Resource, "/recipes")

    def get(self, identifier: str) -> Job:
        return self.send("GET", f"/jobs/{identifier}")

    def cancel(self, job_id: str) -> Job:
        """Request cancellation of a job. Idempotent."""
        return self.send("POST", f"/jobs/{job_id}/cancel")

    def pause(self, job_id: str) -> Job:
        """Request that a job saves a checkpoint and frees its workers. Idempotent."""
        return self.send("POST", f"/jobs/{job_id}/pause")

    def resume(self, job_id: str, *, cost_cap: float | None = None) -> Job:
        """Resume a paused job from its last checkpoint.

        Args:
            cost_cap: new `limits.cost_cap`, for a job that its cost cap paused.
        """
        body = None if cost_cap is None else {"cost_cap": cost_cap}
        return self.send("POST", f"/jobs/{job_id}/resume", json=body)

    def wait(self, job_id: str, timeout: float | None = None, *, poll_interval: float = 1.0) -> Job:
        """Block until the job has succeeded, failed or been canceled, and return it.

        Args:
            timeout: max seconds; None: no limit.

        Raises:
            WaitTimeoutError: timeout; the job keeps running.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        outage = OutageTimer(self._outage_s)
        while True:
            try:
                job = self.get(job_id)
                outage.reset()
                if job.finished:
                    return job
            except (UnreachableError, ServiceUnavailableError) as error:
                outage.wait_or_raise(error, poll_interval)
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"Job {job_id} did not finish within {timeout:g} s and keeps running. To follow it: "
                    f"`swiftkv jobs watch {job_id}`. To cancel it: `swiftkv jobs cancel {job_id}`."
                )
            time.sleep(poll_interval)

    def events(self, job_id: str, follow: bool = True, *, after: str | None = None) -> Iterator[JobEvent]:
        """Yield a job's events in order, each once.

        Args:
            follow: continue until the job ends, across broken connections and server restarts.
            after: id of the last event already received.
        """
        if not follow:
            yield from self._list_events(job_id, after)
            return
        outage = OutageTimer(self._outage_s)
        while True:
            try:
                for event in self._stream_events(job_id, after):
                    outage.reset()
                    after = event.id
                    yield event
                # The stream ends with the job or at a proxy's timeout; the job's status decides.
                finished = self.get(job_id).finished
                outage.reset()
            except (UnreachableError, ServiceUnavailableError) as error:
                outage.wait_or_raise(error, _RECONNECT_PAUSE_S)
                continue
            if finished:
                yield from self._list_events(job_id, after)
                return
            time.sleep(_RECONNECT_PAUSE_S)

    def metrics(self, job_id: str) -> list[Resource]:
        """Return the metrics of all steps, by ascending step."""
        return sorted(self._transport.list(Resource, f"/jobs/{job_id}/metrics"), key=lambda point: point.step)

    def logs(self, job_id: str, follow: bool = False, *, tail_lines: int | None = None) -> Iterator[str]:
        """Yield log lines. `follow`: yield new lines until the job ends.

        Args:
            tail_lines: yield only the last lines of the newest attempt; not with `follow`.
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
        """Download a file of the artifact to `destination`, atomically, and return it.

        Raises:
            ArtifactCorruptError: `sha256` is given and the content has another digest.
        """
        return self._transport.download(
            f"/jobs/{job_id}/artifacts/{path}", destination, name=f"{path} of {job_id}", sha256=sha256
        )

    def list_tracking_files(self, job_id: str) -> list[Resource]:
        """List files of offline W&B runs."""
        return self._transport.list(Resource, f"/jobs/{job_id}/tracking")

    def download_tracking_file(self, job_id: str, path: str, destination: Path) -> Path:
        """Download a file of an offline W&B run to `destination`, atomically, and return it."""
        return self._transport.download(
            f"/jobs/{job_id}/tracking/{path}", destination, name=f"{path} of {job_id}", sha256=None
        )

    def list(  # type: ignore[override]  # jobs are resources
        self,
        *,
        status: str | None = None,
        model: str | None = None,
        name: str | None = None,
        metadata: dict[str, str] | None = None,
        limit: int | None = None,
    ) -> list[Job]:
        """List jobs, newest first; all without `limit`."""
        params = {"status": status, "model": model, "name": name}
        params |= {f"metadata.{key}": value for key, value in (metadata or {}).items()}
        return [self._update_known_job(job) for job in self._transport.list(Job, "/jobs", _drop_none(params), limit)]

    def send(self, method: str, path: str, **options: Any) -> Job:
        """Send a retryable request and return its job. Arguments and errors: as `Transport.request`."""
        return self._update_known_job(self._transport.send(Job, method, path, **options, repeatable=True))

    def _update_known_job(self, fresh: Job) -> Job:
        """Return the client's object of a job, updated from `fresh`, or `fresh` if the job is new."""
        known = self._known_jobs.get(fresh.id)
        if known is None:
            self._known_jobs[fresh.id] = fresh
            return fresh
        for name, value in fresh:
            setattr(known, name, value)
        return known

    def _list_events(self, job_id: str, after: str | None) -> Iterator[JobEvent]:
        params = {"order": "asc", **({"after": after} if after else {})}
        for row in self._transport.iter_entries(f"/jobs/{job_id}/events", params):
            yield JobEvent.model_validate(row)

    def _stream_events(self, job_id: str, after: str | None) -> Iterator[JobEvent]:
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": after} if after else {})}
        with self._transport.stream("GET", f"/jobs/{job_id}/events", headers=headers) as response:
            for message in iter_events(response):
                # Skip unknown messages, e.g. of a newer server.
                with suppress(ValidationError):
                    yield JobEvent.model_validate_json(message.data)


def _restrict_tracking(document: dict[str, Any]) -> dict[str, Any]:
    """Return a job spec whose W&B mode respects this program's environment."""
    tracking = document.get("tracking") or {}
    wandb = tracking.get("wandb") or {} if isinstance(tracking, dict) else None
    given: Any = wandb.get("mode", "auto") if isinstance(wandb, dict) else None
    if wandb is None or given not in get_args(WandbMode):
        return document  # the control plane refuses it
    mode = restrict_wandb_mode(given, os.environ)
    return document if mode == given else {**document, "tracking": {**tracking, "wandb": {**wandb, "mode": mode}}}


def _to_document(spec: JobSpec | dict[str, Any]) -> dict[str, Any]:
    # Only set fields: defaults are the server's, which may be newer than this client.
    return spec.model_dump(mode="json", exclude_unset=True) if isinstance(spec, JobSpec) else spec
