"""A training cluster in a dictionary. Passes the contract of the real one (tests/integration/test_control_plane.py)."""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from swiftkv_platform.control_plane.ray import ListedSubmission, Node, Submission, SubmissionStatus
from swiftkv_platform.errors import ClusterUnavailableError
from swiftkv_platform.logs import redact

_POLL_S = 0.05


@dataclass
class FakeSubmission:
    entrypoint: str
    env: Mapping[str, str]
    state: Submission = field(default_factory=lambda: Submission(SubmissionStatus.RUNNING))
    log: str = ""
    ended_at: float = 0.0
    """Reported once the submission has ended."""


class FakeCluster:
    """Runs nothing: a test ends a submission with `finish`."""

    def __init__(self) -> None:
        self.submissions: dict[str, FakeSubmission] = {}
        self.started: list[str] = []
        """Every start of an entrypoint, in order; a repeated submission id would be a bug."""
        self.away = False
        self.nodes: Sequence[Node] | None = None
        """Result of `capacity`; submissions take no resources from it."""

    def submit(self, submission_id: str, entrypoint: str, env: Mapping[str, str]) -> None:
        self.check_alive()
        if submission_id not in self.submissions:
            self.started.append(submission_id)
            self.submissions[submission_id] = FakeSubmission(entrypoint, dict(env))

    def get_submission(self, submission_id: str) -> Submission | None:
        self.check_alive()
        found = self.submissions.get(submission_id)
        return None if found is None else found.state

    def list_submissions(self) -> list[ListedSubmission]:
        self.check_alive()
        return [
            ListedSubmission(name, found.entrypoint, found.ended_at if found.state.status.is_terminal else None)
            for name, found in self.submissions.items()
        ]

    def remove(self, submission_id: str) -> None:
        self.check_alive()
        found = self.submissions.get(submission_id)
        if found is not None and not found.state.status.is_terminal:
            raise ClusterUnavailableError(f"{submission_id} has not ended")
        self.submissions.pop(submission_id, None)

    def stop(self, submission_id: str) -> None:
        self.check_alive()
        found = self.submissions.get(submission_id)
        if found is not None and not found.state.status.is_terminal:
            found.state = Submission(SubmissionStatus.STOPPED)

    def read_logs(self, submission_id: str, *, tail_lines: int | None = None) -> Iterator[bytes]:
        self.check_alive()
        found = self.submissions.get(submission_id)
        lines = [] if found is None else redact(found.log).encode(errors="replace").splitlines(keepends=True)
        yield from lines if tail_lines is None else lines[-tail_lines:]

    async def follow_logs(self, submission_id: str) -> AsyncGenerator[bytes, None]:
        sent = 0
        while True:
            state = self.get_submission(submission_id)
            text = b"".join(self.read_logs(submission_id))
            yield text[sent:]
            sent = len(text)
            if state is None or state.status.is_terminal:
                return
            await asyncio.sleep(_POLL_S)

    def list_nodes(self) -> Sequence[Node] | None:
        self.check_alive()
        return self.nodes

    def check_alive(self) -> None:
        if self.away:
            raise ClusterUnavailableError("Ray does not answer")

    def finish(self, submission_id: str, status: SubmissionStatus, message: str = "") -> None:
        """End the submission's entrypoint."""
        self.submissions[submission_id].state = Submission(status, message)

    def forget(self) -> None:
        """Forget everything, as when the head restarts."""
        self.submissions.clear()
