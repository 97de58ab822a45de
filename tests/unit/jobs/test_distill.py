"""The entry point of an attempt, up to the point at which it needs a cluster."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.contract.attempts import PROTOCOL
from swiftkv_platform.contract.events import ErrorEvent
from swiftkv_platform.errors import ObjectNotFoundError
from swiftkv_platform.jobs.distill import main
from swiftkv_platform.orchestration.reconciler import Entrypoint
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.attempt_store import AttemptStore

ATTEMPT = AttemptId("job", 1)


def arguments(store: Path, protocol: int) -> list[str]:
    *command, _ = shlex.split(Entrypoint((), str(store)).shell(ATTEMPT))
    return [*command, str(protocol)]


def test_a_newer_control_plane_is_refused_in_one_sentence(tmp_path: Path) -> None:
    assert main(arguments(tmp_path, PROTOCOL + 1)) == 1
    (stored,) = AttemptStore(open_store(str(tmp_path))).read_events(ATTEMPT, {})
    assert isinstance(stored.event, ErrorEvent)
    assert stored.event.message == (
        f"the workers' image speaks protocol {PROTOCOL} and the control plane protocol {PROTOCOL + 1}; "
        "give the Ray cluster the image of the control plane's version, and submit the job again"
    )
    data = stored.event.data
    assert (data["code"], data["value"], data["retryable"]) == ("protocol_mismatch", PROTOCOL + 1, False)


@pytest.mark.parametrize("protocol", range(1, PROTOCOL + 1))
def test_its_own_and_older_control_planes_requests_are_read(tmp_path: Path, protocol: int) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"attempt\.json"):
        main(arguments(tmp_path, protocol))


def test_a_control_plane_that_names_no_protocol_is_an_older_one(tmp_path: Path) -> None:
    with pytest.raises(ObjectNotFoundError, match=r"attempt\.json"):
        main(arguments(tmp_path, 1)[:-2])
