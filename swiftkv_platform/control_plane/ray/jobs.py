"""Client of Ray Jobs, over the REST API of Ray's dashboard."""

from __future__ import annotations

import codecs
import io
import re
import shlex
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from time import monotonic
from typing import Any
from urllib.parse import quote

import httpx

from swiftkv_platform.contract.attempts import PROTOCOL, PROTOCOL_OPTION, AttemptId
from swiftkv_platform.contract.autoscaling import HIDE_UNRESERVED_GPUS
from swiftkv_platform.control_plane.ray.dashboard import RayDashboard, extract_last_error
from swiftkv_platform.control_plane.ray.placement import Node
from swiftkv_platform.redaction import StreamRedactor
from swiftkv_platform.settings import NodeGroup


@dataclass(frozen=True)
class Entrypoint:
    """Command that runs an attempt."""

    command: Sequence[str]
    """Program and first arguments, e.g. `("python", "-m", "swiftkv_platform.jobs.distill")`."""
    store_uri: str
    """Address of the store from which the attempt reads `attempt.json` and to which it writes its results."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables. They must hold no secrets: Ray shows them to everyone with access to its dashboard."""

    def format_command(self, attempt: AttemptId) -> str:
        """Join the command and its arguments to one line for a shell."""
        arguments = ["--job-id", attempt.job_id, "--attempt", str(attempt.number), "--store", self.store_uri]
        return shlex.join([*self.command, *arguments, PROTOCOL_OPTION, str(PROTOCOL)])


class SubmissionStatus(StrEnum):
    """Statuses of a submission in Ray."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def is_terminal(self) -> bool:
        return self not in (SubmissionStatus.PENDING, SubmissionStatus.RUNNING)


@dataclass(frozen=True)
class Submission:
    status: SubmissionStatus
    message: str = ""
    """Ray's own explanation."""


@dataclass(frozen=True)
class ListedSubmission:
    """A submission as the cluster lists it."""

    submission_id: str
    entrypoint: str
    """Command of the submission."""
    ended_at: float | None = None
    """Unix seconds; None until it has ended."""


_TIMEOUT_S = 15.0
_ALL_LOG_LINES = -1
_MAX_REPORT_AGE_S = 60.0
_NODE_GROUP_LABEL = "ray.io/node-group"
"""Label of a node that names its node group."""
_USAGE_LINE = re.compile(r"(\S+)/\S+ (\S+)(?: \((\S+) used of (\S+) reserved in placement groups\))?")
_RESOURCE = re.compile(r"(CPU|GPU|memory)$|accelerator")
"""Names of resources that jobs request; excludes Ray's temporary resources of placement groups."""
_BYTES_PER_UNIT = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_LOG_TIMEOUT_S = 3600
"""Seconds after which Ray stops streaming a log; its own default is 30."""


class RayJobs:
    """The Ray cluster on which attempts run. Every method raises `ClusterUnavailableError` when Ray does not answer.

    Args:
        dashboard_url: address of Ray's dashboard.
        entrypoint_num_cpus: CPUs reserved for each driver; without any reservation drivers run on Ray's head.
        entrypoint_memory: bytes reserved for each driver.
        node_groups: groups that its autoscaler may fill, by name.
    """

    def __init__(
        self,
        dashboard_url: str,
        *,
        entrypoint_num_cpus: float = 0.0,
        entrypoint_memory: int = 0,
        node_groups: Mapping[str, NodeGroup] = {},
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._clock = clock
        self._report = 0.0, 0.0
        """(time of the newest report by Ray's clock, time of its first reading by this process's clock)"""
        self._node_groups = node_groups
        self._dashboard = RayDashboard(dashboard_url, timeout_s=_TIMEOUT_S)
        reserved = {"entrypoint_num_cpus": entrypoint_num_cpus, "entrypoint_memory": entrypoint_memory}
        self._reserved = {name: amount for name, amount in reserved.items() if amount}

    def submit(self, submission_id: str, entrypoint: str, env: Mapping[str, str]) -> None:
        """Start a command under an id that can be used once; do nothing if the id is already known."""
        body = {
            "submission_id": submission_id,
            "entrypoint": entrypoint,
            "runtime_env": {"env_vars": {**HIDE_UNRESERVED_GPUS, **env}},
            **self._reserved,
        }
        response = self._dashboard.request("POST", "/api/jobs/", json=body)
        # Ray answers an id it knows with the same 500 as any other failure.
        if not response.is_success and self.get_submission(submission_id) is None:
            raise self._dashboard.make_failure_error(response, f"submit {submission_id}")

    def get_submission(self, submission_id: str) -> Submission | None:
        """Return the submission's present state; None if the cluster does not know the id."""
        response = self._dashboard.request("GET", _make_path(submission_id))
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        document = self._dashboard.parse_object(response, f"look up {submission_id}")
        return Submission(SubmissionStatus(document["status"]), document.get("message") or "")

    def list_submissions(self) -> Sequence[ListedSubmission]:
        """Return all submissions that the cluster knows, whoever submitted them."""
        response = self._dashboard.request("GET", "/api/jobs/")
        self._dashboard.check_success(response, "list its jobs")
        # Drivers that connected by themselves are listed as well, and have no submission.
        return [_parse_submission(job) for job in response.json() if job.get("submission_id")]

    def stop(self, submission_id: str) -> None:
        """Ask the cluster to stop a submission; harmless for one that has ended or is unknown."""
        response = self._dashboard.request("POST", f"{_make_path(submission_id)}/stop")
        if response.status_code != httpx.codes.NOT_FOUND:
            self._dashboard.check_success(response, f"stop {submission_id}")

    def remove(self, submission_id: str) -> None:
        """Delete an ended submission from the cluster; harmless for one that is unknown. Raises
        `ClusterUnavailableError` for one that has not ended."""
        response = self._dashboard.request("DELETE", _make_path(submission_id))
        if response.status_code != httpx.codes.NOT_FOUND:
            self._dashboard.check_success(response, f"delete {submission_id}")

    def read_logs(self, submission_id: str, *, tail_lines: int | None = None) -> Iterator[bytes]:
        """Return the entrypoint's output so far, or its last `tail_lines` lines, as UTF-8 in pieces and without this
        process's credentials; nothing for an unknown id."""
        # In pieces from the log's file: Ray's own `/logs` holds all of it in three processes.
        response = self._dashboard.request("GET", _make_path(submission_id))
        if response.status_code == httpx.codes.NOT_FOUND:
            return
        node = self._dashboard.parse_object(response, f"look up {submission_id}").get("driver_node_id")
        if node is None:
            return  # not started yet
        lines = _ALL_LOG_LINES if tail_lines is None else tail_lines
        params = {"node_id": node, "submission_id": submission_id, "lines": lines, "timeout": _LOG_TIMEOUT_S}
        text = LogNormalizer()
        try:
            with self._dashboard.stream("/api/v0/logs/file", params) as response:
                if response.status_code == httpx.codes.INTERNAL_SERVER_ERROR:
                    # The node with the log may be gone for good, and an attempt must be able to end without it.
                    yield text.feed(
                        f"Ray cannot read the log of {submission_id}: {extract_last_error(response.text)}\n"
                    )
                else:
                    self._dashboard.check_success(response, f"read the log of {submission_id}")
                    for piece in response.iter_bytes():
                        yield text.feed(piece)
        except httpx.RemoteProtocolError:
            yield text.feed("\n[Ray ended the stream in the middle of this log]\n")
        yield text.close()

    async def follow_logs(self, submission_id: str) -> AsyncGenerator[bytes, None]:
        """Stream the output, in the form of `logs`, over a WebSocket, which Ray closes when the submission has ended
        and its log is sent."""
        text = LogNormalizer()
        async with aclosing(self._dashboard.stream_messages(f"{_make_path(submission_id)}/logs/tail")) as messages:
            async for message in messages:
                yield text.feed(message)
        yield text.close()

    def list_nodes(self) -> Sequence[Node] | None:
        """Return the running nodes, as of seconds ago; None if Ray does not report them, or adds others when an attempt
        asks for more.

        They are from the report of autoscaler v1, which Ray writes every 5 s, also for a cluster of fixed size; else,
        with node groups, from the state of autoscaler v2.
        """
        try:
            report = self._get_data("/api/cluster_status")["clusterStatus"]
            if report is None and self._node_groups:
                return self._list_autoscaler_v2_nodes()
            if report["time"] != self._report[0]:
                self._report = report["time"], self._clock()
            return _parse_autoscaler_v1_nodes(report) if self._clock() - self._report[1] <= _MAX_REPORT_AGE_S else None
        except (ValueError, LookupError, TypeError, AttributeError):  # a report of another version, or none yet
            return None

    def _list_autoscaler_v2_nodes(self) -> list[Node]:
        told = self._get_data("/api/v0/nodes?detail=1&limit=10000")["result"]["result"]
        alive = [node for node in told if node["state"] == "ALIVE"]
        usage = self._get_data("/nodes?view=summary")["nodeLogicalResources"]
        present = Counter(node["labels"].get(_NODE_GROUP_LABEL) for node in alive)
        nodes = []
        for node in alive:
            held = {name: amount for line in usage[node["node_id"]].splitlines() for name, amount in _parse_usage(line)}
            total = {name: float(amount) for name, amount in node["resources_total"].items() if _RESOURCE.match(name)}
            nodes.append(Node(total, {name: amount - held.get(name, 0.0) for name, amount in total.items()}))
        for name, group in self._node_groups.items():
            nodes += [Node(group.resources, group.resources)] * (group.max_nodes - present[name])
        return nodes

    def _get_data(self, path: str) -> Any:
        response = self._dashboard.request("GET", path)
        if not response.is_success:
            raise LookupError(path)
        return response.json()["data"]

    def check_alive(self) -> None:
        """Return if the cluster answers and has a live node, else raise."""
        self._dashboard.check_alive()

    def close(self) -> None:
        self._dashboard.close()


def _parse_submission(job: Mapping[str, Any]) -> ListedSubmission:
    ended = SubmissionStatus(job["status"]).is_terminal
    # Milliseconds. A submission that was lost before it began has no end time.
    ended_at = (job.get("end_time") or job.get("start_time") or 0) / 1000 if ended else None
    return ListedSubmission(job["submission_id"], job["entrypoint"], ended_at)


def _parse_autoscaler_v1_nodes(report: Any) -> list[Node] | None:
    """Return the nodes of a report of Ray's autoscaler v1; None if an autoscaler enlarges the cluster. Without an
    autoscaler, each node is its own group."""
    groups = report["autoscalerReport"]["nodeTypeMapping"]
    if not groups or any(group != f"node_{node}" for node, group in groups.items()):
        return None
    return [
        Node(
            {name: float(total) for name, (_, total) in usage.items() if _RESOURCE.match(name)},
            {name: total - used for name, (used, total) in usage.items() if _RESOURCE.match(name)},
        )
        for usage in report["loadMetricsReport"]["usageByNode"].values()
    ]


def _parse_usage(line: str) -> Iterator[tuple[str, float]]:
    """Yield (resource, allocated amount) of a node's line of Ray autoscaler v2, placement groups included: CPU, 2.0 of
    `1.0/2.0 CPU (0.0 used of 1.0 reserved in placement groups)`."""
    found = _USAGE_LINE.fullmatch(line)
    if found is not None:
        used, name, used_there, reserved = found.groups(default="0")
        yield name, _parse_amount(used) - _parse_amount(used_there) + _parse_amount(reserved)


def _parse_amount(text: str) -> float:
    """Parse a number, or bytes with their unit."""
    number = text.rstrip("BKMGTi")
    return float(number) * _BYTES_PER_UNIT[text[len(number) :]]


def _make_path(submission_id: str) -> str:
    return f"/api/jobs/{quote(submission_id, safe='')}"


class LogNormalizer:
    """Normalizes a log: bytes or text in; UTF-8 out, with `\\n` as line ends and this process's credentials redacted.

    The output does not depend on where pieces end, so a position in it can be given in bytes.
    """

    def __init__(self) -> None:
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._bytes = io.IncrementalNewlineDecoder(utf8, translate=True)
        self._text = io.IncrementalNewlineDecoder(None, translate=True)
        self._redactor = StreamRedactor()

    def feed(self, piece: bytes | str) -> bytes:
        text = self._text.decode(piece) if isinstance(piece, str) else self._bytes.decode(piece)
        return self._redactor.feed(text).encode(errors="replace")

    def close(self) -> bytes:
        """Return the rest of the output."""
        rest = self._bytes.decode(b"", final=True) + self._text.decode("", final=True)
        return (self._redactor.feed(rest) + self._redactor.close()).encode(errors="replace")
