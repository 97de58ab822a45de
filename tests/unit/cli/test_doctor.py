"""`swiftkv doctor` on real faults: each is named with its remedy, and a machine without faults has no failure."""

import json
import os
import re
import socket
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url, text
from typer.testing import CliRunner

from swiftkv_platform.cli.app import app
from swiftkv_platform.cli.doctor import (
    CHECKS,
    NON_SETTING_VARIABLES,
    TEST_VARIABLE_PREFIXES,
    Check,
    CheckContext,
    Finding,
    check_load,
    check_packages,
    run_checks,
)
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.object_store import open_store
from tests.support.fakes.scripted_server import Script, json_answer, serve
from tests.support.postgres import emptied, password_role
from tests.support.rays import free_port
from tests.support.s3_servers import S3Server, client_environment, run_moto, run_rclone

Findings = dict[str, Finding]

Examine = Callable[..., Findings]

ROOT = Path(__file__).parents[3]

PROJECT_VARIABLES = re.compile(r'"(SWIFTKV_[A-Z0-9_]*[A-Z0-9])"')

EXAMINE_S = "120"
"""Time limit in seconds that a busy machine keeps."""

DEPENDS_ON: dict[str, Callable[[], Hashable]] = {
    "packages": lambda: (),
    "compiler": lambda: (os.environ.get("PATH"), os.environ.get("CXX")),
}
"""By costly check, what its finding depends on: one compiles, one runs pip."""


@pytest.fixture(scope="module")
def checks() -> tuple[Check, ...]:
    """All checks. A costly one examines each environment once, not again in every test of another check."""
    found: dict[tuple[str, Hashable], Finding] = {}

    def remembering(check: Check) -> Check:
        def examine(context: CheckContext) -> Finding:
            key = (check.name, DEPENDS_ON[check.name]())
            if key not in found:
                found[key] = check.run(context)
            return found[key]

        return replace(check, run=examine) if check.name in DEPENDS_ON else check

    return tuple(remembering(check) for check in CHECKS)


@pytest.fixture
def doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checks: tuple[Check, ...]) -> Examine:
    """Return a function that runs the command with these variables and returns the findings by check."""
    monkeypatch.setattr("swiftkv_platform.cli.doctor.CHECKS", checks)
    for name in ("SWIFTKV_URL", "SWIFTKV_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    def run(*options: str, failed: bool, **environment: str) -> Findings:
        ports = {"SWIFTKV_PORT": str(free_port()), "SWIFTKV_SERVE_URL": f"http://127.0.0.1:{free_port()}"}
        own = {"SWIFTKV_HOME": str(tmp_path / "home"), **ports, **environment}
        arguments = ["doctor", "--json", "--timeout", EXAMINE_S, "--min-free-gib", "0", *options]
        result = CliRunner(env=own).invoke(app, arguments)
        assert result.exit_code == int(failed), result.output
        return {each.pop("name"): Finding(**each) for each in json.loads(result.stdout)["checks"]}

    return run


@pytest.fixture(scope="module")
def moto_server() -> Iterator[S3Server]:
    with run_moto() as server:
        yield server


def check(findings: Findings, told: dict[str, tuple[str, str, str]]) -> None:
    """Check that there are these findings, without any other failure. `told`: by check its status, and a part of its
    message and of its advice."""
    failed = {name for name, finding in findings.items() if finding.status == "failed"}
    assert failed == {name for name, (status, *_) in told.items() if status == "failed"}, findings
    for name, (status, message, advice) in told.items():
        finding = findings[name]
        assert (finding.status, message in finding.message, advice in finding.advice) == (status, True, True), finding


def test_a_healthy_machine_gets_no_failure_and_is_left_as_it_was(doctor: Examine, tmp_path: Path) -> None:
    findings = doctor(failed=False)
    assert list(findings) == [check.name for check in CHECKS]
    assert {each.status for each in findings.values()} <= {"ok", "warning"}
    assert all(each.message.endswith(".") for each in findings.values()), findings
    assert all(bool(each.advice) == (each.status != "ok") for each in findings.values()), findings
    assert list(tmp_path.iterdir()) == []


def test_it_reads_well_without_json(tmp_path: Path) -> None:
    environment = {"SWIFTKV_HOME": str(tmp_path), "SWIFTKV_DATABSE_URL": "x", "COLUMNS": "40"}
    result = CliRunner(env=environment).invoke(app, ["doctor", "--timeout", EXAMINE_S, "--min-free-gib", "0"])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    place = next(i for i, line in enumerate(lines) if "SWIFTKV_DATABSE_URL" in line)
    assert re.match(
        r"warning  settings +Unknown settings: SWIFTKV_DATABSE_URL \(did you mean SWIFTKV_DATABASE_URL\?\)\.$",
        lines[place],
    )
    assert re.match(r" +Fix: correct or unset it", lines[place + 1])
    assert re.fullmatch(r"\d+ ok, \d+ warning, 0 failed\.", lines[-1])


def test_a_wrong_database_password(doctor: Examine, postgres_url: str) -> None:
    with password_role(postgres_url) as role:
        url = make_url(postgres_url).set(username=role, password="wrong").render_as_string(hide_password=False)
        findings = doctor(failed=True, SWIFTKV_DATABASE_URL=url)
    advice = "correct user and password in SWIFTKV_DATABASE_URL"
    check(findings, {"database": ("failed", "password authentication failed", advice)})


@pytest.mark.parametrize(
    ("content", "named"), [(b"no database at all", "cannot be read"), (b"", "the next start upgrades it")]
)
def test_sqlite_files_are_read_and_not_written(doctor: Examine, tmp_path: Path, content: bytes, named: str) -> None:
    path = tmp_path / "swiftkv.db"
    path.write_bytes(content)
    findings = doctor(failed=bool(content), SWIFTKV_DATABASE_URL=f"sqlite:///{path}")
    assert named in findings["database"].message
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]


def test_refused_credentials(doctor: Examine, tmp_path: Path) -> None:
    with run_rclone(tmp_path / "rclone") as rclone:
        server = rclone.server
        environment = client_environment(server.port, secret="another-secret")
        findings = doctor(failed=True, **environment, SWIFTKV_STORAGE_URI=server.uri("x"))
    check(findings, {"object store": ("failed", "refuses the credentials", "AWS_SECRET_ACCESS_KEY")})
    assert "another-secret" not in findings["object store"].message


def test_a_directory_that_cannot_be_written(doctor: Examine, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    findings = doctor(failed=True, SWIFTKV_HOME=str(tmp_path / "file" / "home"))
    advice = "set SWIFTKV_HOME to a writable directory"
    check(findings, {"disk": ("failed", "Not a directory", advice), "object store": ("failed", "", "")})


def context(tmp_path: Path, timeout_s: float) -> CheckContext:
    return CheckContext(Settings(home=tmp_path, _env_file=None), min_free_bytes=0, timeout_s=timeout_s)


def test_a_check_that_hangs_or_breaks_says_so_and_the_others_are_heard(tmp_path: Path) -> None:
    release = threading.Event()

    def hang(_: CheckContext) -> Finding:
        release.wait()
        return Finding("ok", "late")

    def breaks(_: CheckContext) -> Finding:
        raise ValueError("no\nsuch luck")

    def lacks(_: CheckContext) -> Finding:
        raise ModuleNotFoundError(name="obstore")

    checks = [
        Check("hangs", hang, "pull the plug"),
        Check("breaks", breaks, "mend it"),
        Check("lacks", lacks, ""),
        Check("fine", lambda _: Finding("ok", "Fine."), ""),
    ]
    found = dict(run_checks(checks, context(tmp_path, 0.5)))
    release.set()
    assert found["hangs"] == Finding("failed", "Timed out after 0.5 s.", "pull the plug")
    assert found["breaks"] == Finding("failed", "The check itself failed: ValueError: no such luck.", "mend it")
    assert (found["lacks"].status, "obstore" in found["lacks"].message) == ("warning", True)
    assert found["fine"] == Finding("ok", "Fine.")


def test_every_variable_that_a_program_reads_is_known() -> None:
    known = NON_SETTING_VARIABLES | {f"SWIFTKV_{name.upper()}" for name in Settings.model_fields}
    sources = [path for room in ("swiftkv_platform", "jobs", "serve") for path in (ROOT / room).rglob("*.py")]
    read = {name for path in sources for name in PROJECT_VARIABLES.findall(path.read_text(encoding="utf-8"))}
    assert len(read) > 10
    assert {name for name in read if not name.startswith(TEST_VARIABLE_PREFIXES)} <= known


def program(path: Path, script: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_faults_are_told_side_by_side_each_with_what_to_do(doctor: Examine, tmp_path: Path) -> None:
    program(tmp_path / "bin" / "old-g++", "echo \"error: unrecognized option '-std=c++20'\" >&2; exit 1")
    program(tmp_path / "bin" / "nvidia-smi", 'echo "couldn\'t communicate with the NVIDIA driver"; exit 9')
    away = f"http://127.0.0.1:{free_port()}"
    findings = doctor(
        *("--min-free-gib", "1e9"),
        failed=True,
        SWIFTKV_STORAGE_URL="s3://bucket",
        SWIFTKV_DATABASE_URL=f"postgresql+psycopg://swiftkv:secret@127.0.0.1:{free_port()}/swiftkv",
        SWIFTKV_RAY_DASHBOARD_URL=away,
        SWIFTKV_URL=away,
        CXX=str(tmp_path / "bin" / "old-g++"),
        PATH=f"{tmp_path / 'bin'}:/usr/bin:/bin",
    )
    check(
        findings,
        {
            "settings": ("warning", "SWIFTKV_STORAGE_URL (did you mean SWIFTKV_STORAGE_URI?)", "unset it"),
            "compiler": ("warning", "unrecognized option '-std=c++20'", ""),
            "database": ("failed", "", "start the server"),
            "disk": ("failed", "GiB free", "free 1000000000.0 GiB, or"),
            "ray": ("failed", f"Ray at {away} does not answer", "swiftkv up"),
            "control plane": ("failed", "", "SWIFTKV_URL"),
            "gpu": ("failed", "couldn't communicate", "driver"),
        },
    )
    assert "secret" not in findings["database"].message


def test_other_faults_of_the_same_parts(doctor: Examine, tmp_path: Path) -> None:
    program(tmp_path / "bin" / "nvidia-smi", "echo 'NVIDIA H100 80GB HBM3, 570.86.15'")
    (tmp_path / "store").mkdir()
    nodes = [{"state": "ALIVE", "resources_total": {"CPU": 1}}, {"state": "DEAD", "resources_total": {"CPU": 64.0}}]
    with ray_cluster(nodes) as environment:
        environment |= {"PATH": str(tmp_path / "bin"), "SWIFTKV_STORAGE_URI": str(tmp_path / "store")}
        findings = doctor(failed=True, **environment)
    check(
        findings,
        {
            "compiler": ("warning", "C++ compiler 'g++' not found on PATH", "apt-get install g++"),
            "gpu": ("failed", "1 x NVIDIA H100 80GB HBM3, driver 570.86.15", ""),
            "ray": ("warning", "1 nodes, 1 CPUs", ""),
            "object store": ("ok", "writing, reading, listing and deleting", ""),
        },
    )
    assert list((tmp_path / "store").iterdir()) == [], "it is left empty"
    check(doctor(failed=True, SWIFTKV_PORT="many"), {"settings": ("failed", "port", "")})


@contextmanager
def ray_cluster(nodes: list[Any], version: str | None = None) -> Iterator[dict[str, str]]:
    """Stand-in for Ray's dashboard; yields the environment variable that names it."""
    import ray

    script = Script()
    script.on("GET", "/api/version", json_answer({"version": "4", "ray_version": version or ray.__version__}))
    script.on("GET", "/api/v0/nodes", json_answer({"data": {"result": {"result": nodes}}}))
    with serve(script) as url:
        yield {"SWIFTKV_RAY_DASHBOARD_URL": url}


def test_the_version_of_ray_is_compared(doctor: Examine) -> None:
    nodes = [{"state": "ALIVE", "resources_total": {"CPU": 8}}]
    with ray_cluster(nodes) as environment:
        check(doctor(failed=False, **environment), {"ray": ("ok", "8 CPUs", "")})
    with ray_cluster(nodes, version="1.0.0") as environment:
        check(doctor(failed=True, **environment), {"ray": ("failed", "is 1.0.0, but", "")})


def test_packages_that_do_not_fit_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "httpx-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: httpx\nVersion: 0.1\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    findings = {"packages": check_packages(context(tmp_path, 60))}
    check(findings, {"packages": ("failed", "httpx", "pip install")})


def test_schemas_that_are_not_this_versions(
    doctor: Examine, sqlite_database: Database, postgres_url: str, tmp_path: Path
) -> None:
    with closing(Database(emptied(postgres_url))) as database, database.begin_write() as session:
        session.execute(text("DROP TABLE alembic_version"))
    upgrade = "run python -m swiftkv_platform.control_plane.database"
    findings = doctor(failed=True, SWIFTKV_DATABASE_URL=postgres_url)
    check(findings, {"database": ("failed", "has schema none", upgrade)})
    emptied(postgres_url)
    check(doctor(failed=False, SWIFTKV_DATABASE_URL=postgres_url), {"database": ("ok", "newest schema", "")})
    environment = {"SWIFTKV_DATABASE_URL": f"sqlite:///{tmp_path / 'test.db'}"}
    with sqlite_database.begin_write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '0999'"))
    check(doctor(failed=False, **environment), {"database": ("ok", "schema 0999 of a newer version", "")})
    with sqlite_database.begin_write() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    check(doctor(failed=True, **environment), {"database": ("failed", "9999", "--back-to")})


@pytest.mark.slow("a time limit is waited for")
def test_servers_that_take_connections_and_say_nothing(doctor: Examine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        environment = {
            **client_environment(free_port()),  # a port that takes no connections
            "SWIFTKV_STORAGE_URI": "s3://bucket/prefix",
            "SWIFTKV_DATABASE_URL": f"postgresql+psycopg://swiftkv@127.0.0.1:{port}/swiftkv",
            "SWIFTKV_RAY_DASHBOARD_URL": f"http://127.0.0.1:{port}",
        }
        findings = doctor("--timeout", "10", failed=True, **environment)
    told = {
        "database": ("failed", "does not answer: connection timeout expired", ""),
        "ray": ("failed", "does not answer: timed out", ""),
        "object store": ("failed", "is unavailable; check AWS_ENDPOINT_URL", ""),
    }
    check(findings, told)


def test_a_bucket_is_left_as_it_was_and_missed_where_it_is_not(
    doctor: Examine, moto_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in moto_server.environment.items():
        monkeypatch.setenv(name, value)
    bucket = open_store(moto_server.uri(""))
    others = list(bucket.list(""))  # other tests use the server too
    findings = doctor(failed=False, **moto_server.environment, SWIFTKV_STORAGE_URI=moto_server.uri("doctor"))
    check(findings, {"object store": ("ok", "writing, reading, listing and deleting", "")})
    assert list(bucket.list("")) == others
    environment = {**moto_server.environment, "SWIFTKV_STORAGE_URI": "s3://no-such-bucket/x"}
    told = {"object store": ("failed", "'no-such-bucket' does not exist", "create the bucket")}
    check(doctor(failed=True, **environment), told)


def test_a_busy_machine_is_warned_about() -> None:
    cpus = os.cpu_count() or 1
    assert check_load(1.0 * cpus).status == "ok"
    busy = check_load(2.5 * cpus)
    assert (busy.status, "SWIFTKV_START_TIMEOUT_S" in busy.advice) == ("warning", True)
