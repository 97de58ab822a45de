"""Attempts as Ray Jobs, over the REST interface of Ray's dashboard. Knows HTTP and Ray's words, no job of ours.

The documented REST interface rather than Ray's SDK: the SDK has no time limits, and tells an unknown submission from
any other failure only in the text of a `RuntimeError`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from swiftkv_platform.errors import ClusterUnavailableError
from swiftkv_platform.orchestration.ports import Submission, SubmissionStatus

_TIMEOUT_S = httpx.Timeout(15.0, connect=3.0)


class RayJobs:
    """`JobCluster` on Ray.

    Args:
        dashboard_url: where Ray's dashboard answers. No connection is made before the first call.
    """

    def __init__(self, dashboard_url: str) -> None:
        self._url = dashboard_url.rstrip("/")
        # A proxy from the environment cannot reach a cluster's own addresses.
        self._http = httpx.Client(base_url=self._url, timeout=_TIMEOUT_S, trust_env=False)

    def submit(self, submission_id: str, entrypoint: str, env: Mapping[str, str]) -> None:
        body = {
            "submission_id": submission_id,
            "entrypoint": entrypoint,
            "runtime_env": {"env_vars": dict(env)} if env else {},
        }
        response = self._request("POST", "/api/jobs/", json=body)
        if response.is_success:
            return
        # Ray answers an id it knows with the same 500 as any other failure.
        if self.status(submission_id) is None:
            raise self._failure(response, f"submit {submission_id}")

    def status(self, submission_id: str) -> Submission | None:
        response = self._request("GET", _path(submission_id))
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        document = self._document(response, f"look up {submission_id}")
        return Submission(SubmissionStatus(document["status"]), document.get("message") or "")

    def stop(self, submission_id: str) -> None:
        response = self._request("POST", f"{_path(submission_id)}/stop")
        if response.status_code != httpx.codes.NOT_FOUND:
            self._document(response, f"stop {submission_id}")

    def logs(self, submission_id: str) -> str:
        response = self._request("GET", f"{_path(submission_id)}/logs")
        if response.status_code == httpx.codes.NOT_FOUND:
            return ""
        if response.status_code == httpx.codes.INTERNAL_SERVER_ERROR:
            # The node that kept them may be gone for good, and an attempt has to end without them as well.
            return f"Ray cannot read the log of {submission_id}: {_excerpt(response)}\n"
        return str(self._document(response, f"read the log of {submission_id}")["logs"] or "")

    def check(self) -> None:
        self._document(self._request("GET", "/api/version"), "tell its version")

    def close(self) -> None:
        self._http.close()

    def _request(self, method: str, path: str, *, json: Any = None) -> httpx.Response:
        try:
            return self._http.request(method, path, json=json, headers=auth_headers())
        except httpx.TransportError as error:
            raise ClusterUnavailableError(
                f"Ray does not answer at {self._url}: {error or type(error).__name__}; is it running, and is "
                "SWIFTKV_RAY_DASHBOARD_URL its dashboard's address?",
                field="ray_dashboard_url",
                value=self._url,
            ) from error

    def _document(self, response: httpx.Response, action: str) -> dict[str, Any]:
        if not response.is_success:
            raise self._failure(response, action)
        try:
            document: dict[str, Any] = response.json()
        except ValueError as error:
            raise self._failure(response, action) from error
        return document

    def _failure(self, response: httpx.Response, action: str) -> ClusterUnavailableError:
        hint = ""
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            hint = "; its token is read from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
        return ClusterUnavailableError(
            f"Ray at {self._url} could not {action}: {response.status_code} {_excerpt(response)}{hint}",
            field="ray_dashboard_url",
            value=self._url,
        )


def auth_headers() -> dict[str, str]:
    """Ray's bearer token where this machine has one; read anew each time, since a restarted Ray may have another."""
    token = os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if not token:
        path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token").expanduser()
        token = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return {"Authorization": f"Bearer {token}"} if token else {}


def _path(submission_id: str) -> str:
    return f"/api/jobs/{quote(submission_id, safe='')}"


def _excerpt(response: httpx.Response) -> str:
    """The last line of Ray's answer, which is a traceback's most telling one."""
    lines = response.text.strip().splitlines()
    return lines[-1][:300] if lines else response.reason_phrase
