"""Home directories of earlier versions open: jobs are listed, a paused one resumes, a deployment and its artifact are
served.

`tests/support/fixtures/home-*.tar.xz` were written below `/tmp/swiftkv-old` by `swiftkv up` of 548348b (version
0.1.0), of d4594dd and of 325f057f: a tiny random teacher, a finished job, its model deployed, and a paused job.
"""

import sqlite3
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from swiftkv_platform.client import Client
from swiftkv_platform.client.errors import ResourceNotFoundError, ServiceUnavailableError
from swiftkv_platform.local.stack import Stack, StackOptions
from swiftkv_platform.settings import Settings
from tests.support.old_home import ARCHIVES
from tests.support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.soak("starts a platform on each old home"), pytest.mark.timeout(600)]

WRITTEN_AT = "/tmp/swiftkv-old"
PAUSED_AT_STEP = {"0.1.0": 22, "d4594dd": 33, "325f057f": 67}


@pytest.fixture(scope="module", params=PAUSED_AT_STEP)
def version(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def unpack(version: str, directory: Path) -> Path:
    """Unpack the home into `directory`, and change the addresses in its database and store to those of this machine."""
    with tarfile.open(ARCHIVES / f"home-{version}.tar.xz") as archive:
        archive.extractall(directory)
    home = directory / "home"
    for path in (home / "store").rglob("attempt.json"):
        path.write_text(path.read_text().replace(WRITTEN_AT, str(directory)))
    with sqlite3.connect(home / "swiftkv.db") as database:
        tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
        for table in tables:
            for column in [row[1] for row in database.execute(f'pragma table_info("{table}")')]:
                database.execute(
                    f'update "{table}" set "{column}" = replace("{column}", ?, ?) where "{column}" like ?',
                    (WRITTEN_AT, str(directory), f"%{WRITTEN_AT}%"),
                )
    return home


@pytest.fixture(scope="module")
def client(version: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    directory = tmp_path_factory.mktemp("old")
    home = unpack(version, directory)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HOME", str(directory))
        stack = Stack(Settings(home=home, database_url=None, storage_uri=None))
        try:
            state = stack.up(StackOptions(port=0), print)
            with Client(state.url, serve_url=state.serve_url) as client:
                yield client
        finally:
            stack.down()


def test_jobs_are_listed_with_what_they_said(client: Client) -> None:
    jobs = {job.name: job for job in client.jobs.list()}
    assert {name: job.status for name, job in jobs.items()} == {"finished": "succeeded", "paused": "paused"}
    finished = jobs["finished"]
    assert finished.spec["swiftkv"]["key_value_group_size"] == 2
    assert [model.id for model in client.models.list()] == [finished.distilled_model]
    steps = [point.step for point in client.jobs.metrics(finished.id)]
    assert steps == list(range(1, 7))
    assert any(event.type == "checkpoint" for event in client.jobs.events(jobs["paused"].id, follow=False))


def test_the_deployment_returns_and_serves_the_old_artifact(client: Client) -> None:
    (deployment,) = client.deployments.list()

    def answer() -> list[int]:
        # The stored state describes the old cluster until the new one has a replica.
        with suppress(ServiceUnavailableError, ResourceNotFoundError):
            pieces = client.deployments.generate(deployment.id, "def add", max_tokens=4, ignore_eos=True)
            return [token for piece in pieces for token in piece.choices[0].token_ids]
        return []

    assert len(eventually(answer, "it answers again", seconds=240)) == 4


def test_the_paused_job_goes_on_where_it_was(client: Client, version: str) -> None:
    (paused,) = [job for job in client.jobs.list() if job.name == "paused"]
    client.jobs.resume(paused.id)

    def begun() -> list[int]:
        events = client.jobs.events(paused.id, follow=False)
        return [event.data["step"] for event in events if event.message.startswith("training starts at step")]

    eventually(
        lambda: PAUSED_AT_STEP[version] in begun(), "the second attempt begins at the checkpoint's step", seconds=240
    )
    client.jobs.cancel(paused.id)
    eventually(lambda: client.jobs.get(paused.id).status == "cancelled", "it is cancelled")
