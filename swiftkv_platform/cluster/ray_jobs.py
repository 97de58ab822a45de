"""Attempts as Ray Jobs, over the REST interface of Ray's dashboard. Knows Ray's words, no job of ours."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

import httpx

from swiftkv_platform.cluster.dashboard import RayDashboard, last_error
from swiftkv_platform.orchestration.ports import Submission, SubmissionStatus
from swiftkv_platform.redaction import redact

_TIMEOUT_S = 15.0


class RayJobs:
    """`JobCluster` on Ray, whose dashboard answers at `dashboard_url`."""

    def __init__(self, dashboard_url: str) -> None:
        self._dashboard = RayDashboard(dashboard_url, timeout_s=_TIMEOUT_S)

    def submit(self, submission_id: str, entrypoint: str, env: Mapping[str, str]) -> None:
        body = {
            "submission_id": submission_id,
            "entrypoint": entrypoint,
            "runtime_env": {"env_vars": dict(env)} if env else {},
        }
        response = self._dashboard.request("POST", "/api/jobs/", json=body)
        # Ray answers an id it knows with the same 500 as any other failure.
        if not response.is_success and self.status(submission_id) is None:
            raise self._dashboard.failure(response, f"submit {submission_id}")

    def status(self, submission_id: str) -> Submission | None:
        response = self._dashboard.request("GET", _path(submission_id))
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        document = self._dashboard.document(response, f"look up {submission_id}")
        return Submission(SubmissionStatus(document["status"]), document.get("message") or "")

    def stop(self, submission_id: str) -> None:
        response = self._dashboard.request("POST", f"{_path(submission_id)}/stop")
        if response.status_code != httpx.codes.NOT_FOUND:
            self._dashboard.check(response, f"stop {submission_id}")

    def logs(self, submission_id: str) -> str:
        response = self._dashboard.request("GET", f"{_path(submission_id)}/logs")
        if response.status_code == httpx.codes.NOT_FOUND:
            return ""
        if response.status_code == httpx.codes.INTERNAL_SERVER_ERROR:
            # The node that kept them may be gone for good, and an attempt has to end without them as well.
            return f"Ray cannot read the log of {submission_id}: {last_error(response.text)}\n"
        return redact(str(self._dashboard.document(response, f"read the log of {submission_id}")["logs"] or ""))

    def check(self) -> None:
        self._dashboard.check(self._dashboard.request("GET", "/api/version"), "tell its version")

    def close(self) -> None:
        self._dashboard.close()


def _path(submission_id: str) -> str:
    return f"/api/jobs/{quote(submission_id, safe='')}"
