"""`swiftkv prune`, `backup` and `restore` on a real database and store."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from swiftkv_platform.cli.app import app
from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.jobs.job import JobStatus, transition
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from swiftkv_platform.storage.object_store import LocalObjectStore
from tests.support.fakes.attempt_store import FakeWorker
from tests.support.records import make_job, message, store


def run(home: Path, *arguments: str, **environment: str) -> Result:
    return CliRunner(env={"SWIFTKV_HOME": str(home), **environment}).invoke(app, list(arguments))


def answer(home: Path, *arguments: str, **environment: str) -> Any:
    result = run(home, *arguments, "--json", **environment)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


@pytest.fixture
def home(tmp_path: Path, empty_database: Path) -> Path:
    """The home directory of a control plane with a job that failed in 1970."""
    directory = tmp_path / "home"
    directory.mkdir()
    (directory / "swiftkv.db").write_bytes(empty_database.read_bytes())
    with closing(Database(f"sqlite:///{directory / 'swiftkv.db'}")) as database:
        jobs = JobRepository(database, TenantPolicies())
        job = store(jobs, make_job())
        failed, event = transition(job, JobStatus.FAILED, now=100)
        jobs.update(failed, events=[event, message(job, "hello")])
        FakeWorker(LocalObjectStore(directory / "store"), job.id).checkpoint(3)
    return directory


def jobs_in(home: Path) -> int:
    with closing(Database(f"sqlite:///{home / 'swiftkv.db'}")) as database:
        return sum(JobRepository(database, TenantPolicies()).count_by_status().values())


def test_a_dry_run_tells_what_pruning_then_removes(home: Path) -> None:
    kept = {"SWIFTKV_RETENTION_JOBS_DAYS": "0"}
    told = answer(home, "prune", "--dry-run", **kept)
    assert told["dry_run"]
    assert told["removed"]["events"] == {"rows": 1, "objects": 0, "bytes": 0}
    assert told["removed"]["checkpoints"]["objects"] == 2
    assert "would delete" in run(home, "prune", "--dry-run", **kept).output
    assert answer(home, "prune", **kept)["removed"] == told["removed"]
    assert "No data is past" in run(home, "prune", **kept).output
    assert "use `swiftkv prune`" in run(home, "sweep", **kept).stderr
    assert jobs_in(home) == 1
    assert answer(home, "prune")["removed"]["jobs"]["rows"] > 0
    assert jobs_in(home) == 0


def test_a_backup_comes_back_in_another_home(home: Path, tmp_path: Path) -> None:
    assert "objects" in run(home, "backup", str(tmp_path / "backup")).output
    made = answer(home, "backup", str(tmp_path / "listed"), "--no-objects")
    assert made["tables"]["jobs"]["lines"] == 1
    fresh = tmp_path / "fresh"
    assert answer(fresh, "restore", str(tmp_path / "backup"))["objects"]["lines"] == 2
    assert jobs_in(fresh) == 1
    refused = run(fresh, "restore", str(tmp_path / "backup"))
    assert refused.exit_code == 1
    assert "1 rows in jobs" in " ".join(refused.output.split())


def test_a_home_without_a_database_is_not_swept(tmp_path: Path) -> None:
    result = run(tmp_path / "nothing", "prune")
    assert result.exit_code == 1
    assert "python -m swiftkv_platform.control_plane.database" in " ".join(result.output.split())
