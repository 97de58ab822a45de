"""`Client`: one object for the control plane's routes and for generation."""

from __future__ import annotations

import builtins
import functools
import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal, Self, overload

import httpx

from swiftkv_platform.client.errors import Problem, ResourceNotFoundError, ServerError, WaitTimeoutError
from swiftkv_platform.client.files import Files
from swiftkv_platform.client.jobs import Jobs
from swiftkv_platform.client.models import Generation, Job, Resource
from swiftkv_platform.client.transport import Transport, idempotent, iter_events
from swiftkv_platform.errors import InvalidInputError, SwiftKVError

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
_ANSWERING = ("running", "swapping", "refused")
"""Statuses of a deployment that answers requests."""
_CONTROL_PLANE_AWAY = "Is the control plane running? `swiftkv status` shows it, `swiftkv up` starts one on this host."
_SERVE_AWAY = "Is a model deployed? `swiftkv deploy MODEL` serves one."


class Client:
    """Client of a control plane and of the models that it serves.

    Args:
        base_url: address of the control plane.
        api_key: key for both; None if the servers need none.
        serve_url: address below which `/generate` answers; None: that of the newest running deployment.
        timeout: seconds without data after which a connection counts as broken.
        max_retries: retries of a call after a connection error or a 503 with `Retry-After`.
        outage_s: seconds for which `jobs.wait` and `jobs.events` tolerate a control plane that does not answer.
        transport: replaces the network, for tests.

    Raises:
        InvalidInputError: an address that is not valid, or a key with a character that no HTTP header may have.
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
        self._control = self._connect(base_url, when_away=_CONTROL_PLANE_AWAY)
        self._serve = self._connect(serve_url, when_away=_SERVE_AWAY) if serve_url else None
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
        """Return the answer of `/healthz`: the process runs."""
        answer: dict[str, Any] = self._control.request("GET", "/healthz", repeatable=True).json()
        return answer

    def ready(self) -> dict[str, Any]:
        """Return the answer of `/readyz`: database, Ray and object store answer.

        Raises:
            ServiceUnavailableError: one of them does not answer; the message says which.
        """
        answer: dict[str, Any] = self._control.request("GET", "/readyz", repeatable=True).json()
        return answer

    def quota(self) -> Resource:
        """Return the quota of the key's tenant, and its use."""
        return self._control.get(Resource, "/quota")

    def audit(self, *, limit: int | None = 100, **wanted: Any) -> list[Resource]:
        """Return entries of the audit trail, newest first: for an operator's key those of all tenants, for the scope
        `admin` those of its own.

        Args:
            limit: most entries; None: all.
            wanted: filters of `GET /audit`: `tenant`, `actor`, `credential`, `address`, `route`, `about`,
                `request_id`, `status`, `since`, `until`.
        """
        params = {name: value for name, value in wanted.items() if value is not None}
        return self._control.list(Resource, "/audit", params, limit)

    @overload
    def generate(self, prompt: str | list[int], *, stream: Literal[False] = False, **parameters: Any) -> Generation: ...
    @overload
    def generate(
        self, prompt: str | list[int], *, stream: Literal[True], **parameters: Any
    ) -> Iterator[Generation]: ...
    def generate(
        self, prompt: str | list[int], *, stream: bool = False, **parameters: Any
    ) -> Generation | Iterator[Generation]:
        """Continue a prompt (text or token ids) with the deployed model.

        Args:
            stream: return an iterator over pieces instead of the whole answer.
            parameters: other fields of `POST /generate`: `max_tokens`, `temperature`, `top_p`, `seed`, `stop`, ...
        """
        body = {"prompt": prompt, "stream": stream, **parameters}
        serve = self._found_serve()
        if stream:
            return _generate_stream(serve, body)
        # A retry may sample another text, but has no other effect.
        return Generation.model_validate(serve.request("POST", "/generate", json=body, repeatable=True).json())

    def _found_serve(self) -> Transport:
        if self._serve is None:
            url = next((item.url for item in self.deployments.list() if item.status in _ANSWERING and item.url), None)
            if url is None:
                raise SwiftKVError(f"{self._control.base_url} has no running deployment. {_SERVE_AWAY}")
            self._serve = self._connect(url, when_away=_SERVE_AWAY)
        return self._serve


def _generate_stream(serve: Transport, body: dict[str, Any], path: str = "/generate") -> Iterator[Generation]:
    with serve.stream("POST", path, json=body) as response:
        for message in iter_events(response):
            if message.data == "[DONE]":
                return
            document = json.loads(message.data)
            if "choices" not in document:
                # If generation fails midway the status line has been sent already: the stream carries the problem.
                problem = Problem.model_validate({"status": 500, **document})
                raise ServerError(problem, request=f"POST {serve.base_url}{path}")
            yield Generation.model_validate(document)
    raise SwiftKVError(f"{serve.base_url} closed the stream before its end; ask again.")


def _if_match(version: int | None) -> dict[str, str] | None:
    return None if version is None else {"If-Match": f'"{version}"'}


class Models:
    """Distilled models with their lineage."""

    def __init__(self, transport: Transport, jobs: Jobs) -> None:
        self._transport = transport
        self._jobs = jobs

    def list(self, *, limit: int | None = None) -> list[Resource]:
        """List models, newest first."""
        return self._transport.list(Resource, "/models", limit=limit)

    def get(self, model_id: str) -> Resource:
        return self._transport.get(Resource, f"/models/{model_id}")

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
            evaluation: fields that override those of the checkpoint's job; `resources` likewise.
            metadata: replaces that of the checkpoint's job.
            idempotency_key: as in `jobs.create`.

        Raises:
            InvalidRequestError: there is no such checkpoint.
        """
        body: dict[str, Any] = {
            "from_checkpoint": from_checkpoint,
            "name": name,
            "evaluation": evaluation,
            "resources": resources,
            "metadata": metadata,
        }
        given = {key: value for key, value in body.items() if value is not None}
        headers = idempotent(idempotency_key)
        response = self._transport.request("POST", "/models", json=given, headers=headers, repeatable=True)
        return self._jobs.adopt(response.json())

    def import_(self, source: str, *, name: str | None = None, timeout_s: float = 3600.0) -> Resource:
        """Copy a student that was not made by a job of this platform into the control plane's store, and register it.

        Args:
            source: directory on the control plane's machine, or `s3://` prefix, that the tenant's jobs may read.
            name: name of the model. Default: that of the spec that trained it, or its directory's.
            timeout_s: most seconds for the copy.

        Raises:
            InvalidRequestError: the source cannot be read, is not a student, or differs from its manifest.
        """
        body = {"source": source} if name is None else {"source": source, "name": name}
        answer = self._transport.request("POST", "/models/import", json=body, repeatable=False, timeout_s=timeout_s)
        return Resource.model_validate(answer.json())

    def publish(self, model_id: str, *, to: str, private: bool = True, idempotency_key: str | None = None) -> Job:
        """Submit a job that copies a model, with its card, to a target that the operator allows.

        Args:
            to: `hf://organization/name`, `s3://bucket/prefix` or a directory.
            private: visibility of a hub repository that is created.
            idempotency_key: as in `jobs.create`.
        """
        headers = idempotent(idempotency_key)
        body = {"to": to, "private": private}
        path = f"/models/{model_id}/publish"
        return self._jobs.adopt(
            self._transport.request("POST", path, json=body, headers=headers, repeatable=True).json()
        )

    def lineage(self, model_id: str) -> Resource:
        """Return a model's lineage from data and teacher to deployments."""
        return self._transport.get(Resource, f"/models/{model_id}/lineage")

    def compare(self, model_id: str, other_id: str) -> Resource:
        """Compare quality, prefill compute and KV cache of two models, and the specs of their jobs."""
        return self._transport.get(Resource, f"/models/{model_id}/compare/{other_id}")

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
            accept_undecided: promote a model although its evaluation does not decide every quality gate.

        Raises:
            RequestConflictError: the alias has another version, another model was promoted at the same time, or a
                quality gate of the model is undecided.
        """
        body: dict[str, Any] = {"alias": alias, "reason": reason}
        if accept_undecided:  # older control planes do not know this field
            body["accept_undecided"] = True
        response = self._transport.request(
            "POST", f"/models/{model_id}/promote", json=body, headers=_if_match(version), repeatable=version is None
        )
        return Resource.model_validate(response.json())

    def delete(self, model_id: str) -> None:
        """Delete a model; its job stays. Deleting a missing model is not an error.

        Raises:
            RequestConflictError: the model is in use; the message says by what.
        """
        with suppress(ResourceNotFoundError):
            self._transport.request("DELETE", f"/models/{model_id}", repeatable=True)

    def aliases(self) -> builtins.list[Resource]:
        """List aliases with their models and newest changes; `alias` returns all changes of one."""
        return self._transport.list(Resource, "/aliases")

    def alias(self, alias: str) -> Resource:
        return self._transport.get(Resource, f"/aliases/{alias}")

    def rollback(self, alias: str = "production", *, reason: str, version: int | None = None) -> Resource:
        """Point `alias` back to its previous model. `version`: as in `promote`.

        Not retried after a broken connection, since a second call would go back one model further.
        """
        path = f"/aliases/{alias}/rollback"
        response = self._transport.request(
            "POST", path, json={"reason": reason}, headers=_if_match(version), repeatable=False
        )
        return Resource.model_validate(response.json())


class Deployments:
    """Served models."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(self, model: str | None, **options: Any) -> Resource:
        """Deploy a model. Returns at once; `wait_ready` waits until it answers.

        Args:
            model: a `mdl_...` id, such as a succeeded job's `distilled_model`, its job's id, an alias, or a name that
                only one model has.
            options: other fields of `swiftkv_platform.specs.deployment.DeploymentSpec`.
        """
        if model is None:
            raise InvalidInputError(
                "deployments.create(model=None): only a job that succeeded has a `distilled_model`; "
                "its `status` and `error` tell why this one has none",
                field="model",
            )
        body = {"model": model, **options}
        return Resource.model_validate(
            self._transport.request("POST", "/deployments", json=body, repeatable=False).json()
        )

    def get(self, deployment_id: str) -> Resource:
        return self._transport.get(Resource, f"/deployments/{deployment_id}")

    def update(self, deployment_id: str, *, version: int | None = None, **changes: Any) -> Resource:
        """Change a deployment's model or options without failing requests. Returns at once; `wait_ready` waits.

        Args:
            version: expected version of the deployment. None: any; concurrent changes of other fields are kept, and a
                concurrent change of the same field makes this call fail.
            changes: fields of `swiftkv_platform.specs.deployment.DeploymentSpec` except `route_prefix`; of `engine` and
                `candidate` only the keys to change (None resets an engine option).

        Raises:
            RequestConflictError: the deployment has another version, or a field was changed at the same time.
        """
        path = f"/deployments/{deployment_id}"
        response = self._transport.request(
            "PATCH", path, json=changes, headers=_if_match(version), repeatable=version is None
        )
        return Resource.model_validate(response.json())

    def metrics(self, deployment_id: str) -> Resource:
        """Return the current metrics of its replicas. Totals only grow, so two calls give a rate."""
        return self._transport.get(Resource, f"/deployments/{deployment_id}/metrics")

    def generate(self, deployment_id: str, prompt: str | list[int], **parameters: Any) -> Iterator[Generation]:
        """Generate with one deployment through the control plane, so that only that must be reachable. Yields pieces.

        Args:
            parameters: other fields of `POST /generate`.
        """
        body = {"prompt": prompt, "stream": True, **parameters}
        return _generate_stream(self._transport, body, f"/deployments/{deployment_id}/generate")

    def list(self) -> list[Resource]:
        return self._transport.list(Resource, "/deployments")

    def delete(self, deployment_id: str) -> None:
        """Delete a deployment. Deleting a missing one is not an error."""
        with suppress(ResourceNotFoundError):
            self._transport.request("DELETE", f"/deployments/{deployment_id}", repeatable=True)

    def wait_ready(self, deployment_id: str, timeout: float = 300.0, *, poll_interval: float = 1.0) -> Resource:
        """Block until the deployment serves the version that was last requested.

        Raises:
            SwiftKVError: it failed, or refused the new version; the message says why.
            WaitTimeoutError: it is not ready within `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            deployment = self.get(deployment_id)
            if deployment.status == "running":
                return deployment
            if deployment.status in ("failed", "refused"):
                what = (
                    "failed"
                    if deployment.status == "failed"
                    else f"refused {deployment.model} and keeps serving the previous model"
                )
                raise SwiftKVError(f"Deployment {deployment_id} {what}: {deployment.message or 'no reason given'}")
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"Deployment {deployment_id} is still {deployment.status} after {timeout:g} s: {deployment.message}"
                )
            time.sleep(poll_interval)
