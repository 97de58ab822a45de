"""Client of Ray's dashboard, jobs and nodes, and placement of bundles of resources on nodes.

It uses the documented REST interface, not Ray's SDK: the SDK has no time limits, and distinguishes an unknown
submission from other failures only by the text of a `RuntimeError`.
"""

from __future__ import annotations

import codecs
import io
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import quote

import aiohttp
import httpx

from swiftkv_platform.contract.attempts import PROTOCOL, PROTOCOL_OPTION, AttemptId
from swiftkv_platform.contract.autoscaling import HIDE_UNRESERVED_GPUS
from swiftkv_platform.errors import ClusterUnavailableError
from swiftkv_platform.logs import StreamRedactor
from swiftkv_platform.settings import NodeGroup

_ERROR_LINE = re.compile(r"^(?:\w+\.)*\w+(?:Error|Exception): ", re.MULTILINE)
"""Start of a traceback's line with the error."""
_MAX_REASON_CHARS = 2000
_WEB_SOCKET_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=3.0)
_HEARTBEAT_S = 30.0
"""Seconds between pings: if the dashboard's machine is gone, no connection is closed."""
_MAX_MESSAGE_BYTES = 64 << 20
_LIVE_NODES_PATH = "/api/v0/nodes?limit=1&timeout=5&filter_keys=state&filter_predicates=%3D&filter_values=ALIVE"


class RayDashboard:
    """Client of the dashboard at `url`, which connects with the first request. `timeout_s`: max seconds to wait for
    data. `token_file`: file of Ray's token; by default the environment's."""

    def __init__(self, url: str, *, timeout_s: float, token_file: Path | None = None) -> None:
        self.url = url.rstrip("/")
        self._token_file = token_file
        # A proxy from the environment cannot reach a cluster's own addresses.
        self._http = httpx.Client(base_url=self.url, timeout=_make_timeout(timeout_s), trust_env=False)

    def request(self, method: str, path: str, *, json: Any = None, timeout_s: float | None = None) -> httpx.Response:
        """Return Ray's response with any status. `timeout_s`: instead of the client's. Raises `ClusterUnavailableError`
        without a response."""
        timeout = self._http.timeout if timeout_s is None else _make_timeout(timeout_s)
        try:
            return self._http.request(
                method, path, json=json, headers=_make_auth_headers(self._token_file), timeout=timeout
            )
        except httpx.TransportError as error:
            raise self.make_no_response_error(error) from error

    @contextmanager
    def stream(self, path: str, params: Mapping[str, str | int]) -> Iterator[httpx.Response]:
        """Stream Ray's response to a GET. An unsuccessful response is read at once.

        Raises `ClusterUnavailableError` without a response, and `httpx.RemoteProtocolError` if it is interrupted.
        """
        try:
            with self._http.stream(
                "GET", path, params=dict(params), headers=_make_auth_headers(self._token_file)
            ) as response:
                if not response.is_success:
                    response.read()
                yield response
        except httpx.RemoteProtocolError:
            raise
        except httpx.TransportError as error:
            raise self.make_no_response_error(error) from error

    async def stream_messages(self, path: str) -> AsyncGenerator[str, None]:
        """Yield the messages of a WebSocket until Ray closes it; none if Ray returns 404.

        Raises `ClusterUnavailableError`.
        """
        try:
            async with (
                aiohttp.ClientSession(
                    timeout=_WEB_SOCKET_TIMEOUT, headers=_make_auth_headers(self._token_file)
                ) as session,
                session.ws_connect(
                    f"{self.url}{path}", heartbeat=_HEARTBEAT_S, max_msg_size=_MAX_MESSAGE_BYTES
                ) as socket,
            ):
                async for message in socket:
                    if message.type is aiohttp.WSMsgType.ERROR:
                        raise self.make_no_response_error(socket.exception() or ConnectionError())
                    yield str(message.data)
        except aiohttp.WSServerHandshakeError as error:
            if error.status != httpx.codes.NOT_FOUND:
                raise self.make_no_response_error(error) from error
        except (aiohttp.ClientError, OSError) as error:
            raise self.make_no_response_error(error) from error

    def parse_object(self, response: httpx.Response, action: str) -> dict[str, Any]:
        """Return the JSON object of a response. Raises `ClusterUnavailableError` ("could not `action`") for an
        unsuccessful one."""
        self.check_success(response, action)
        try:
            document: dict[str, Any] = response.json()
        except ValueError as error:
            raise self.make_failure_error(response, action) from error
        return document

    def check_success(self, response: httpx.Response, action: str) -> None:
        """Raise `ClusterUnavailableError` unless the response is successful."""
        if not response.is_success:
            raise self.make_failure_error(response, action)

    def check_alive(self) -> None:
        """Raise `ClusterUnavailableError` unless Ray responds and has a live node (the head counts): without one it
        accepts no jobs."""
        document = self.parse_object(self.request("GET", _LIVE_NODES_PATH), "list its nodes")
        if not document["data"]["result"]["result"]:
            raise self._make_unavailable_error("has no live node")

    def make_failure_error(self, response: httpx.Response, action: str) -> ClusterUnavailableError:
        """Return the error for an unsuccessful response: Ray could not `action`."""
        hint = ""
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            hint = "; its token is read from RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"
        why = extract_last_error(response.text) or response.reason_phrase
        return self._make_unavailable_error(f"could not {action}: {response.status_code} {why}{hint}")

    def make_no_response_error(self, error: BaseException) -> ClusterUnavailableError:
        """Return the error for a request without a response."""
        return self._make_unavailable_error(
            f"does not answer: {error or type(error).__name__}; is it running, and is SWIFTKV_RAY_DASHBOARD_URL "
            "its dashboard's address?"
        )

    def close(self) -> None:
        self._http.close()

    def _make_unavailable_error(self, problem: str) -> ClusterUnavailableError:
        return ClusterUnavailableError(f"Ray at {self.url} {problem}", field="ray_dashboard_url", value=self.url)


def _make_timeout(timeout_s: float) -> httpx.Timeout:
    return httpx.Timeout(timeout_s, connect=3.0)


def extract_last_error(text: str) -> str:
    """Return the error at the end of a traceback, or the text itself without a traceback; at most 2000 characters."""
    starts = [match.start() for match in _ERROR_LINE.finditer(text)]
    return text[starts[-1] if starts else 0 :].strip()[:_MAX_REASON_CHARS]


def _make_auth_headers(token_file: Path | None) -> dict[str, str]:
    """Return the header with Ray's bearer token, if there is one. Read for each request, since a restarted Ray may
    have another token."""
    token = "" if token_file else os.environ.get("RAY_AUTH_TOKEN", "").strip()
    if not token:
        named = token_file or os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
        path = Path(named).expanduser()
        token = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return {"Authorization": f"Bearer {token}"} if token else {}


Bundle = Mapping[str, float]
"""Resources that must be on one node, by Ray's names."""
_RESOURCE_PRECISION = 1e-4
"""Ray counts resources in ten-thousandths."""


@dataclass(frozen=True)
class Node:
    """A node's resources by Ray's names: `CPU`, `GPU`, `memory` (bytes), `accelerator_type:H100`."""

    total: Bundle
    free: Bundle
    """Resources not held by tasks, actors and placement groups."""


def normalize_resource_name(name: str) -> str:
    """Normalize the name of a resource: Ray's dashboard changes capitals and underscores."""
    return name if name in ("CPU", "GPU", "memory") else name.lower().replace("_", "")


def can_place(nodes: Iterable[Bundle], bundles: Sequence[Bundle]) -> bool:
    """Whether all bundles fit on the nodes at the same time."""
    return reserve([normalize_resources(node) for node in nodes], bundles)


class EmptyNodePlacement:
    """Empty nodes, optimized for many queries: of nodes with equal resources, only as many are tried as there are
    bundles."""

    def __init__(self, totals: Iterable[Bundle]) -> None:
        self._nodes = [normalize_resources(total) for total in totals]
        self._groups: dict[tuple[str, ...], dict[tuple[float, ...], list[int]]] = {}
        """Indices of nodes by amounts, by the names of the resources."""

    def can_place(self, bundles: Sequence[Bundle]) -> bool:
        """Whether all bundles fit on the nodes at the same time, as `can_place` above decides."""
        names = tuple(sorted({"GPU", "CPU"}.union(*({n for n, amount in each.items() if amount} for each in bundles))))
        if names not in self._groups:
            alike = self._groups[names] = {}
            for index, node in enumerate(self._nodes):
                alike.setdefault(tuple([node.get(name, 0.0) for name in names]), []).append(index)
        chosen = sorted(index for indices in self._groups[names].values() for index in indices[: len(bundles)])
        return reserve([dict(self._nodes[index]) for index in chosen], bundles)


def compute_max_deployment_resources(total: float, share: float) -> float:
    """Return the max amount of a cluster's resource for replicas: a share rounded up, so that one replica fits."""
    return min(math.ceil(total * share), total)


def normalize_resources(resources: Bundle) -> dict[str, float]:
    """Return a copy of a node's resources by normalized names, which `reserve` may change."""
    return {normalize_resource_name(name): amount for name, amount in resources.items()}


def reserve(nodes: list[dict[str, float]], bundles: Sequence[Bundle]) -> bool:
    """Reserve resources for all bundles. The first bundle may differ from the others, which are equal. Returns
    False, and reserves nothing, if they do not fit at the same time."""
    if _reserve_in_order(nodes, bundles):
        return True
    first, others = bundles[:1], bundles[1:]
    if not others or first[0] == others[0] or not _reserve_in_order([dict(node) for node in nodes], others):
        return False
    for node in nodes:  # the others may fit if the first one takes another node
        if _reserve_in_order([node], first):
            if _reserve_in_order(nodes, others):
                return True
            _add_resources(node, first[0])
    return False


def _reserve_in_order(nodes: list[dict[str, float]], bundles: Sequence[Bundle]) -> bool:
    """Reserve each bundle on the fitting node with the fewest GPUs, then CPUs. Returns False, and reserves nothing,
    if one does not fit."""
    # per run of equal bundles: fitting nodes, fewest GPUs first; on failure, release what was reserved
    taken: list[tuple[dict[str, float], Bundle]] = []
    for _, alike in groupby(bundles, key=id):
        first, *others = alike
        requested = {name: amount for name, amount in first.items() if amount}
        holding = [node for node in nodes if _has_capacity(node, requested)]
        # A node that was taken from still has fewer than those behind it.
        fewest_first = iter(sorted(holding, key=lambda node: (node.get("GPU", 0.0), node.get("CPU", 0.0))))
        node = next(fewest_first, None)
        for _ in (first, *others):
            while node is not None and not _has_capacity(node, requested):
                node = next(fewest_first, None)
            if node is None:
                for where, what in taken:
                    _add_resources(where, what)
                return False
            _add_resources(node, requested, sign=-1)
            taken.append((node, requested))
    return True


def _add_resources(node: dict[str, float], bundle: Bundle, sign: int = 1) -> None:
    for name, amount in bundle.items():
        node[name] = node.get(name, 0.0) + sign * amount


def _has_capacity(node: Bundle, requested: Bundle) -> bool:
    return all(node.get(name, 0.0) + _RESOURCE_PRECISION >= amount for name, amount in requested.items())


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
