"""`swiftkv up`, `status` and `down` with a real Ray: `up` is idempotent and repairs, `down` leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from swiftkv_platform.local.stack import RunDirectory, StackState, find_marked_processes
from tests.support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.soak("starts and stops a platform several times")]


@dataclass
class Machine:
    """A home directory, and the command line over it."""

    home: Path

    def run(self, *arguments: str, key: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "swiftkv_platform.cli", *arguments]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SWIFTKV_"))}
        environment = {**inherited, "SWIFTKV_HOME": str(self.home), "HOME": str(self.home.parent)}
        environment |= {"SWIFTKV_API_KEY": key} if key else {}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)

    def up(self) -> StackState:
        result = self.run("up", "--port", "0", "--json")
        assert result.returncode == 0, result.stderr
        return StackState.model_validate_json(result.stdout)

    def parts(self) -> dict[str, Any]:
        return {part["name"]: part for part in json.loads(self.run("status", "--json").stdout)["parts"]}

    def examined(self) -> dict[str, Any]:
        """Return the doctor's findings by check."""
        result = self.run("doctor", "--json", "--timeout", "120", "--min-free-gib", "0")
        return {check["name"]: check for check in json.loads(result.stdout)["checks"]}

    def family(self) -> list[psutil.Process]:
        """Return every process of the stack, both by its mark and by descent."""
        state = RunDirectory(self.home).load()
        assert state is not None
        roots = [psutil.Process(part.pid) for part in state.parts.values()]
        descendants = [child for root in roots for child in root.children(recursive=True)]
        return list({*roots, *descendants, *find_marked_processes(str(self.home))})

    def start_ray_job(self, state: StackState) -> psutil.Process:
        """Run `sleep 12345` as a Ray job, which Ray puts into a session of its own."""
        token = (self.home / "run" / "ray-token").read_text()
        url, headers = f"{state.ray_dashboard_url}/api/jobs/", {"Authorization": f"Bearer {token}"}
        httpx.post(url, headers=headers, json={"entrypoint": "sleep 12345"}, timeout=60).raise_for_status()

        def found() -> list[psutil.Process]:
            processes = find_marked_processes(str(self.home))
            return [each for each in processes if each.is_running() and each.cmdline()[:2] == ["sleep", "12345"]]

        process: psutil.Process = eventually(found, "the Ray job runs")[0]
        return process


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    machine = Machine(tmp_path_factory.mktemp("user") / "home")
    yield machine
    machine.run("down")
    assert find_marked_processes(str(machine.home)) == []


@pytest.fixture(scope="module")
def state(machine: Machine) -> StackState:
    return machine.up()


def running(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def test_everything_answers_on_loopback_alone(machine: Machine, state: StackState) -> None:
    parts = machine.parts()
    assert {name: part["state"] for name, part in parts.items()} == {
        "ray": "running",
        "control-plane": "running",
        "serve": "idle",
    }
    assert httpx.get(f"{state.url}/healthz").is_success
    assert httpx.get(f"{state.ray_dashboard_url}/api/jobs/").status_code == 401
    listening = {
        connection.laddr.ip
        for process in machine.family()
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def test_the_doctor_finds_it_healthy(machine: Machine, state: StackState) -> None:
    found = machine.examined()
    assert [name for name, check in found.items() if check["status"] == "failed"] == [], found
    assert f"{state.num_cpus} CPUs" in found["ray"]["message"]
    assert found["control plane"]["message"] == f"{state.url} is ready and accepts requests."
    assert "newest schema" in found["database"]["message"]


def test_every_process_can_be_found_by_its_mark(machine: Machine, state: StackState) -> None:
    assert set(running(machine.family())) - set(find_marked_processes(str(machine.home))) == set()


def test_a_second_up_changes_nothing(machine: Machine, state: StackState) -> None:
    result = machine.run("up", "--json")
    assert result.returncode == 0
    assert StackState.model_validate_json(result.stdout) == state
    assert result.stderr.count("is already running") == 2


def test_a_dead_control_plane_is_restarted_where_it_was(machine: Machine, state: StackState) -> None:
    os.kill(state.parts["control-plane"].pid, signal.SIGKILL)
    stopped = machine.run("status")
    assert stopped.returncode == 1
    assert "stopped" in stopped.stdout
    assert machine.examined()["control plane"]["advice"].startswith("swiftkv up; its log is")
    mended = machine.up()
    assert mended.parts["ray"] == state.parts["ray"]
    assert mended.parts["control-plane"] != state.parts["control-plane"]
    assert httpx.get(f"{mended.url}/readyz").is_success


def test_a_dead_ray_is_replaced_and_leaves_no_orphans(machine: Machine, state: StackState) -> None:
    before = machine.family()
    os.kill(state.parts["ray"].pid, signal.SIGKILL)
    mended = machine.up()
    assert running(before) == []
    assert mended.ray_dashboard_url == state.ray_dashboard_url
    assert {part["state"] for part in machine.parts().values()} == {"running", "idle"}


def test_created_keys_are_required_from_the_next_up_on(machine: Machine, state: StackState) -> None:
    """Nothing but `swiftkv keys create` and `swiftkv up` is needed, with and without `swiftkv down` between them."""
    before = machine.up()
    made = json.loads(machine.run("keys", "create", "ann", "--scope", "admin", "--json").stdout)
    assert (made["keys_required"], "run `swiftkv up` to restart it" in made["advice"]) == (False, True)
    assert machine.run("jobs", "list", key="wrong").returncode == 0, "as the command says, none is required yet"

    def check_keys() -> None:
        assert machine.run("jobs", "list", key=made["key"]).returncode == 0
        for key in ("", "wrong"):
            refused = machine.run("jobs", "list", key=key)
            assert (refused.returncode, "SWIFTKV_API_KEY" in refused.stderr) == (1, True), refused.stderr
        assert machine.parts()["control-plane"]["detail"] == f"requires API keys from {machine.home / 'keys.json'}"

    again = machine.run("up", "--port", "0")
    assert "Restarting the control plane" in again.stderr
    assert f"Requests need an API key from {machine.home / 'keys.json'}" in again.stderr
    assert machine.up().parts["ray"] == before.parts["ray"], "Ray and its jobs go on"
    check_keys()
    more = json.loads(machine.run("keys", "rotate", "ann", "--json").stdout)
    assert more["keys_required"]
    assert machine.run("jobs", "list", key=more["key"]).returncode == 0, "without a restart"
    machine.run("down")
    assert machine.up().operator_files.keys() == {"api_keys_file", "serve_api_keys_file"}
    check_keys()
    assert machine.run("doctor", "--json", key="wrong").returncode == 1


def test_down_ends_everything_of_ours_and_nothing_else(machine: Machine, state: StackState) -> None:
    current = machine.up()
    ray_job = machine.start_ray_job(current)
    family = [*machine.family(), ray_job]
    similar = [
        sys.executable,
        "-c",
        "import time; time.sleep(600)",
        *psutil.Process(current.parts["ray"].pid).cmdline(),
    ]
    with subprocess.Popen(similar) as foreign:
        try:
            result = machine.run("down")
            assert result.returncode == 0, result.stderr
            assert running(family) == []
            assert foreign.poll() is None
        finally:
            foreign.kill()
    assert not current.ray_temp_dir.exists()
    assert (machine.home / "logs" / "ray-session" / "raylet.out").exists()
    assert {part["state"] for part in machine.parts().values()} == {"stopped"}
    assert "No running processes" in machine.run("down").stdout
