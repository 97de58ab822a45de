"""`swiftkv doctor`: ten checks of this machine and of the services it uses. A check removes whatever it creates.

Checks run in parallel, each with the time limit of the command.
"""

from __future__ import annotations

import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import psutil
import typer
from rich.markup import escape

from swiftkv_platform.cli.context import Json, settings
from swiftkv_platform.cli.output import err, out, print_json
from swiftkv_platform.client import APIError, Client
from swiftkv_platform.errors import (
    ClusterUnavailableError,
    DatabaseUnavailableError,
    InvalidInputError,
    StorageError,
    SwiftKVError,
    suggest_name,
)
from swiftkv_platform.installing import DISTRIBUTION, make_install_command
from swiftkv_platform.local.stack import Stack, StackOptions
from swiftkv_platform.planning.machines import multiplies_bfloat16
from swiftkv_platform.settings import Settings

if TYPE_CHECKING:
    from swiftkv_platform.storage.object_store import ObjectStore

GIB = 1 << 30
Status = Literal["ok", "warning", "failed"]
_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "failed": "bold red"}
"""Styles by status, from the mildest to the worst."""


@dataclass(frozen=True)
class Finding:
    """Outcome of a check: one sentence, and advice if there is something to do."""

    status: Status
    message: str
    advice: str = ""


@dataclass(frozen=True)
class Surroundings:
    """What checks look at, and their limits."""

    settings: Settings
    min_free_bytes: int
    """Min free space of each directory's disk."""
    timeout_s: float
    """Max seconds for a check."""


@dataclass(frozen=True)
class Check:
    name: str
    examine: Callable[[Surroundings], Finding]
    remedy: str
    """Advice if the check itself breaks or does not end in time."""


def ok(message: str) -> Finding:
    return Finding("ok", message)


def warning(message: str, advice: str) -> Finding:
    return Finding("warning", message, advice)


def failed(message: str, advice: str) -> Finding:
    return Finding("failed", message, advice)


def run_checks(checks: Sequence[Check], surroundings: Surroundings) -> list[tuple[str, Finding]]:
    """Return names and findings in the order of the checks, within `surroundings.timeout_s` seconds."""
    deadline = time.monotonic() + surroundings.timeout_s
    answers: dict[str, Finding] = {}
    # Daemon threads, so that a check that hangs in a driver does not keep the process from ending.
    threads = [threading.Thread(target=_examine, args=(one, surroundings, answers), daemon=True) for one in checks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"No answer within {surroundings.timeout_s:g} s."
    return [(one.name, answers.get(one.name) or failed(late, one.remedy)) for one in checks]


def _examine(one: Check, surroundings: Surroundings, answers: dict[str, Finding]) -> None:
    """Add the finding of a check to `answers`."""
    try:
        answers[one.name] = one.examine(surroundings)
    except ModuleNotFoundError as error:
        advice = f"{make_install_command('train', 'serve')} where jobs or deployments are to run"
        answers[one.name] = warning(f"Not checked: {error.name} is not installed.", advice)
    except Exception as error:  # a bug in one check must not hide the others' findings
        answers[one.name] = failed(f"The check broke: {type(error).__name__}: {one_line(error)}.", one.remedy)


def worst(findings: Sequence[Finding]) -> Finding:
    """Join the findings of the worst status into one."""
    status = max((each.status for each in findings), key=list(_STYLES).index)
    gravest = [each for each in findings if each.status == status]
    advice = dict.fromkeys(each.advice for each in gravest if each.advice)
    message = "; ".join(each.message.removesuffix(".") for each in gravest)
    return Finding(status, f"{message}.", "; ".join(advice))


def print_findings(results: list[tuple[str, Finding]], counts: dict[str, int]) -> None:
    """Print a line for each check with its advice below, and the number of findings by status."""
    width = max(len(name) for name, _ in results)
    for name, finding in results:
        status = f"[{_STYLES[finding.status]}]{finding.status:<7}[/]"
        line = f"{status}  [bold]{name:<{width}}[/]  {escape(finding.message)}"
        out().print(line, highlight=False, soft_wrap=True)
        if finding.advice:
            out().print(f"{'':<9}{'':<{width}}  To do: {escape(finding.advice)}", highlight=False, soft_wrap=True)
    out().print(", ".join(f"{number} {status}" for status, number in counts.items()) + ".", highlight=False)


def one_line(error: object) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(error).split())


def check_packages(_: Surroundings) -> Finding:
    """Ask pip whether the packages that this one requires are installed, in versions that fit."""
    if find_spec("pip") is None:
        return ok("Not checked: this environment has no pip.")
    run = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    faults = [line.rstrip(".") for line in run.stdout.splitlines() if line.startswith(f"{DISTRIBUTION} ")]
    if not faults:
        return ok("All required packages are installed, in versions that fit.")
    return failed(f"{'; '.join(faults)}.", f"install again, in a new environment: {make_install_command('all')}")


_OTHERS = ("API_KEY", "KERNEL_CACHE", "RESIZE_INTERVAL_S", "SHARED_DIRECTORY", "STACK", "URL", "VLLM_FRONTEND_PID")
OTHERS = frozenset(f"SWIFTKV_{name}" for name in _OTHERS)
"""Environment variables that are not settings of the control plane."""
OF_TESTS = ("SWIFTKV_TEST_", "SWIFTKV_REQUIRE_ALL", "SWIFTKV_SOAK", "SWIFTKV_SEED", "SWIFTKV_SCHEDULES")
"""Prefixes of variables for tests and benchmarks."""


def check_settings(_: Surroundings) -> Finding:
    known = OTHERS | {f"SWIFTKV_{name.upper()}" for name in Settings.model_fields}
    given = [name for name in sorted(os.environ) if name.upper().startswith("SWIFTKV_")]
    unknown = [name for name in given if name.upper() not in known and not name.upper().startswith(OF_TESTS)]
    if unknown:
        named = ", ".join(f"{name}{suggest_name(name.upper(), known)}" for name in unknown)
        them = "it" if len(unknown) == 1 else "them"
        return warning(
            f"Nothing reads {named}.", f"correct or unset {them}; the documentation's page Settings lists all"
        )
    return ok(f"{', '.join(given)} set." if given else "Nothing is set: defaults apply.")


def check_disk(surroundings: Surroundings) -> Finding:
    """Check that directories for artifacts, caches and temporary files can be written and have free space."""
    settings, cache = surroundings.settings, Path.home() / ".cache"
    places = {"SWIFTKV_HOME": settings.home}
    if "://" not in settings.resolved_storage_uri:
        places["SWIFTKV_STORAGE_URI"] = Path(settings.resolved_storage_uri)
    places["SWIFTKV_KERNEL_CACHE"] = Path(os.environ.get("SWIFTKV_KERNEL_CACHE") or cache / "swiftkv" / "kernels")
    places["HF_HOME"] = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    places["TMPDIR"] = Path(tempfile.gettempdir())
    return worst([_room(variable, path, surroundings.min_free_bytes) for variable, path in places.items()])


def _room(variable: str, path: Path, min_free_bytes: int) -> Finding:
    directory = existing(path)
    if (reason := why_not_writable(directory)) is not None:
        message = f"{directory} is not writable ({reason}), and {variable} is {path}."
        return failed(message, f"set {variable} to a directory that you may write to")
    free = shutil.disk_usage(directory).free
    if free < min_free_bytes:
        asked = f"{min_free_bytes / GIB:.1f} GiB are required"
        message = f"{directory} ({variable}) has {free / GIB:.1f} GiB free, and {asked}."
        return failed(message, f"free some space, or set {variable} to a directory on a larger disk")
    return ok(f"{free / GIB:.1f} GiB free for {variable}")


def existing(path: Path) -> Path:
    """Return the path itself, or its nearest existing parent."""
    path = path.expanduser().absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def why_not_writable(directory: Path) -> str | None:
    """Return why no file can be created in an existing directory; None if one can. Leaves no file."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None


_OPEN_FILES = 4096
"""Least limit on open files: Ray needs sockets for each worker, and replicas one for each caller."""
_MEMORY = 3 * GIB
"""Bytes that the local stack, a job of the built-in model and a replica need together."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (looked at, not written)


def check_limits(_: Surroundings) -> Finding:
    """Compare open files, shared memory and memory with what the local stack needs."""
    return worst([_open_files(), _shared_memory(), _memory()])


def _open_files() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= _OPEN_FILES:
        return ok("Any number of open files" if limit == resource.RLIM_INFINITY else f"{limit} open files")
    message = f"A process may have {limit} files open; Ray and a busy replica need {_OPEN_FILES} or more"
    return warning(message, "ulimit -n 65536, or LimitNOFILE=65536 in a systemd unit")


def _shared_memory() -> Finding:
    wanted = StackOptions().object_store_memory
    if not _SHARED_MEMORY.is_dir():
        return ok("no /dev/shm, so Ray keeps its objects in files")
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free >= wanted:
        return ok(f"{free / GIB:.1f} GiB of shared memory free")
    message = f"{_SHARED_MEMORY} has {free >> 20} MiB free; `swiftkv up` gives Ray's object store {wanted >> 20}"
    return warning(message, "in a container: docker run --shm-size=1g; otherwise free some space there")


def _memory() -> Finding:
    available = psutil.virtual_memory().available
    if available >= _MEMORY:
        return ok(f"{available / GIB:.1f} GiB of memory available")
    wanted = f"the stack, a small job and a replica need {_MEMORY / GIB:.0f}"
    advice = "stop what uses the memory, or use a larger machine"
    return warning(f"{available / GIB:.1f} GiB of memory are available; {wanted}", advice)


_PROGRAM = "#include <omp.h>\n#include <span>\nint swiftkv(std::span<int> x) { return omp_get_max_threads() + x[0]; }\n"
_FLAGS = ("-std=c++20", "-fPIC", "-shared", "-fopenmp")
"""Flags of the CPU kernels that old compilers, or those without OpenMP, lack."""


def check_compiler(surroundings: Surroundings) -> Finding:
    """Compile a small library with the flags of the engine's CPU kernels, which are compiled at first use."""
    wanted = os.environ.get("CXX", "g++")
    slower = "the engine then runs on PyTorch's operators, slower"
    advice = "apt-get install g++, dnf install gcc-c++, or CXX=/path/to/g++"
    compiler = shutil.which(wanted)
    if compiler is None:
        return warning(f"There is no C++ compiler {wanted!r} on PATH for the CPU kernels; {slower}.", advice)
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "probe.cpp"
        source.write_text(_PROGRAM, encoding="ascii")
        run = _run(surroundings, compiler, *_FLAGS, str(source), "-o", str(source.with_suffix(".so")))
    if run.returncode:
        reason = next((line for line in run.stderr.splitlines() if "error" in line), f"exit status {run.returncode}")
        message = f"{compiler} cannot compile C++20 with OpenMP ({reason.strip()}); {slower}."
        return warning(message, f"use a newer one: {advice}")
    if not multiplies_bfloat16():
        return ok(
            f"{compiler} works; this processor has no AVX-512, so PyTorch's operators are used, and float32 is much "
            "faster than bfloat16 (model.dtype of a job, engine.dtype of a deployment)."
        )
    return ok(f"{compiler} compiles C++20 with OpenMP.")


def _run(surroundings: Surroundings, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=surroundings.timeout_s, check=False)


_GPU_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
_TORCH_QUERY = "import torch; print(torch.__version__, torch.cuda.device_count())"


def check_gpu(surroundings: Surroundings) -> Finding:
    """Compare the driver's GPUs with those of torch, which another process imports."""
    if shutil.which(_GPU_QUERY[0]) is None:
        return ok("No nvidia-smi here: jobs and replicas compute on the CPU.")
    run = _run(surroundings, *_GPU_QUERY)
    if run.returncode or not run.stdout.strip():
        reason = one_line(run.stdout + run.stderr) or "it lists no GPU"
        return failed(f"nvidia-smi: {reason}.", "restart the machine, or install the driver again")
    names, drivers = zip(*(line.rsplit(", ", 1) for line in run.stdout.strip().splitlines()), strict=True)
    found = f"{len(names)} x {names[0]}, driver {drivers[0]}"
    run = _run(surroundings, sys.executable, "-c", _TORCH_QUERY)
    if run.returncode:
        return ok(f"{found}; torch is not installed here, only jobs and replicas need it.")
    torch, number = run.stdout.split()
    if int(number) < len(names):
        advice = "install the CUDA build of torch for this driver: https://pytorch.org/get-started/locally; or look at"
        return failed(f"{found}, but torch {torch} uses {number} of {len(names)}.", f"{advice} CUDA_VISIBLE_DEVICES")
    return ok(f"{found}; torch {torch} uses it.")


_NOT_STARTED = "None is configured or started; `swiftkv up` starts one."
_UPGRADE = "python -m swiftkv_platform.control_plane.database"
_SHORTEST_WAIT_S = 2
"""Shortest timeout that libpq supports."""
_REMEDIES = {
    "password authentication failed": "correct user and password in SWIFTKV_DATABASE_URL",
    "no password supplied": "give user and password in SWIFTKV_DATABASE_URL",
    "role": "create the role, or correct the user in SWIFTKV_DATABASE_URL",
    "does not exist": "create the database (createdb), or correct its name in SWIFTKV_DATABASE_URL",
}
"""Advice by a phrase in PostgreSQL's error."""


def check_database(surroundings: Surroundings) -> Finding:
    """Connect, and compare the schema's revision. An SQLite file is opened read-only."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    from swiftkv_platform.control_plane.database.session import Database, current_revision

    try:
        url = make_url(surroundings.settings.resolved_database_url)
    except ArgumentError:
        return _bad_address("SWIFTKV_DATABASE_URL is not an SQLAlchemy URL.")
    if url.get_backend_name() == "sqlite":
        return _database_file(Path(url.database or ""))
    place = url.render_as_string(hide_password=True)
    try:
        wait_s = max(_SHORTEST_WAIT_S, int(surroundings.timeout_s / 2))
        address = url.update_query_dict({"connect_timeout": str(wait_s)}).render_as_string(hide_password=False)
        with closing(Database(address)) as database, database.reading() as session:
            present = current_revision(session.connection())
    except InvalidInputError as error:
        return _bad_address(one_line(error))
    except DatabaseUnavailableError as error:
        text = one_line(error)
        remedy = next((advice for sign, advice in _REMEDIES.items() if sign in text), None)
        return failed(text, remedy or "start the server, or correct host and port in SWIFTKV_DATABASE_URL")
    return _revision(place, present, is_sqlite=False)


def _database_file(path: Path) -> Finding:
    if not path.name or not path.exists():
        return ok(f"{path} is created by the first start.")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE name = 'alembic_version'").fetchall()
            rows = connection.execute("SELECT version_num FROM alembic_version").fetchall() if tables else []
    except sqlite3.Error as error:
        return failed(f"{path} cannot be read: {error}.", "restore it from a backup, or name another file")
    return _revision(str(path), rows[0][0] if rows else None, is_sqlite=True)


def _revision(place: str, present: str | None, *, is_sqlite: bool) -> Finding:
    from swiftkv_platform.control_plane.database.session import can_use, newest_revision

    wanted, subject = newest_revision(), place if is_sqlite else f"{place} answers and"
    if present == wanted:
        return ok(f"{subject} has the newest schema, {wanted}.")
    if present is not None and present > wanted:
        if can_use(present):
            return ok(f"{subject} has schema {present} of a newer version, which works with this one.")
        message = (
            f"The schema is {present}, made by a newer version of this program; this one knows schemas up to {wanted}."
        )
        return failed(message, f"install that version, or go back with it: {_UPGRADE} --back-to {wanted}")
    if is_sqlite:  # every start upgrades it
        return ok(f"{place} has schema {present or 'none'}; the next start brings it to {wanted}.")
    return failed(f"{place} has schema {present or 'none'}, and this program needs {wanted}.", f"run {_UPGRADE}")


def _bad_address(message: str) -> Finding:
    return failed(message, "use sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME")


def check_object_store(surroundings: Surroundings) -> Finding:
    """Write, read, list and delete a small object under a unique name."""
    from swiftkv_platform.storage.addresses import open_store

    uri = surroundings.settings.resolved_storage_uri
    directory = None if "://" in uri else Path(uri).expanduser()
    if directory is not None and not directory.is_dir():
        above = existing(directory)
        reason = why_not_writable(above) if above.is_dir() else "Not a directory"
        if reason is None:
            return ok(f"{directory} is created by the first job.")
        message = f"{directory} does not exist, and cannot be created in {above} ({reason})."
        return failed(message, _store_remedy("", uri))
    try:
        store = open_store(uri, patient=False)
        _try_store(store)
    except InvalidInputError as error:
        return failed(one_line(error), "correct SWIFTKV_STORAGE_URI")
    except StorageError as error:
        return failed(f"{uri}: {one_line(error)}.", _store_remedy(one_line(error), uri))
    return ok(f"{store.uri} stores, returns, lists and deletes an object.")


def _try_store(store: ObjectStore) -> None:
    """Write, read, list and delete an object. Raises `StorageError` if a step fails or has a wrong result."""
    from ulid import ULID

    place, content = f".swiftkv-doctor-{ULID()}", b"swiftkv doctor"
    key = f"{place}/probe"
    try:
        store.put_bytes(key, content)
        returned, listed = store.get_bytes(key), [each.key for each in store.list(place)]
        store.delete(key)
        left = store.head(key)
    except StorageError:
        with suppress(StorageError):  # report the first error
            store.delete_prefix(place)
        raise
    store.delete_prefix(place)  # in a local store, the empty directory is left
    if returned != content:
        raise StorageError("an object was read back with other content")
    if listed != [key]:
        raise StorageError("an object that was written is not listed")
    if left is not None:
        raise StorageError("an object that was deleted is still there")


def _store_remedy(text: str, uri: str) -> str:
    from swiftkv_platform.storage.bucket_store import SERVICES

    if "://" not in uri or uri.startswith("file:"):
        return "set SWIFTKV_STORAGE_URI to a directory that you may write to"
    if "does not exist" in text:
        return "create the bucket, or name another in SWIFTKV_STORAGE_URI"
    service = SERVICES[uri.partition("://")[0].lower()]
    if "credentials" in text:
        return f"set {service.credentials} of a user who may read, write, list and delete there"
    return f"start the server, or correct {service.endpoint}"


_CPUS = 4
"""CPUs needed for a small job's driver and workers and a replica."""


def check_ray(surroundings: Surroundings) -> Finding:
    """Ask the local stack's Ray, else the settings', for its version and size."""
    stack, settings = Stack(surroundings.settings), surroundings.settings
    state = stack.state()
    if state is None and "ray_dashboard_url" not in settings.model_fields_set:
        return ok(_NOT_STARTED)
    if state is not None and not state.alive("ray"):
        message = f"Ray, started by `swiftkv up` at {state.ray_dashboard_url}, has ended."
        return failed(message, f"swiftkv up; its log is {stack.logs / 'ray.log'}")
    from swiftkv_platform.control_plane.ray.dashboard import RayDashboard

    url = settings.ray_dashboard_url if state is None else state.ray_dashboard_url
    token_file = None if state is None else stack.token_file
    with closing(RayDashboard(url, timeout_s=surroundings.timeout_s / 2, token_file=token_file)) as dashboard:
        try:
            answer = dashboard.document(dashboard.request("GET", "/api/version"), "tell its version")
            nodes = dashboard.document(dashboard.request("GET", "/api/v0/nodes?detail=1"), "list its nodes")
        except ClusterUnavailableError as error:
            return failed(one_line(error), "start it (`swiftkv up`), or correct SWIFTKV_RAY_DASHBOARD_URL")
    ours, theirs = version("ray"), str(answer["ray_version"])
    if theirs != ours:
        message = f"Ray at {url} is {theirs}, but {ours} is installed here."
        return failed(message, f"pip install ray=={theirs}, or give the cluster's image {ours}")
    alive = [node["resources_total"] for node in nodes["data"]["result"]["result"] if node["state"] == "ALIVE"]
    cpus, gpus = (sum(node.get(kind, 0) for node in alive) for kind in ("CPU", "GPU"))
    message = f"Ray {ours} at {url} has {len(alive)} nodes, {cpus:g} CPUs and {gpus:g} GPUs"
    if cpus < _CPUS:
        advice = "add nodes, or start it with more: swiftkv down && swiftkv up --num-cpus 4"
        return warning(f"{message}; a small job and a replica need {_CPUS} CPUs.", advice)
    return ok(f"{message}.")


def check_control_plane(surroundings: Surroundings) -> Finding:
    """Ask whether the control plane is ready, and make a request with this environment's key."""
    stack, given = Stack(surroundings.settings), os.environ.get("SWIFTKV_URL")
    state = stack.state()
    if given is None and state is None:
        return ok(_NOT_STARTED)
    if given is None and state is not None and not state.alive("control-plane"):
        message = f"The control plane, started by `swiftkv up` at {state.url}, has ended."
        return failed(message, f"swiftkv up; its log is {stack.logs / 'control-plane.log'}")
    url = given or (state.url if state else "")
    key = os.environ.get("SWIFTKV_API_KEY")
    try:
        with Client(url, key, max_retries=0, timeout=surroundings.timeout_s / 2) as client:
            client.ready()
            client.quota()
    except APIError as error:
        advice = "correct what it names, then see its log"
        if error.status in (401, 403):
            advice = "set SWIFTKV_API_KEY to a key of that control plane"
        return failed(f"{url}: {one_line(error)}.", advice)
    except SwiftKVError as error:
        return failed(one_line(error), "start it (`swiftkv up`), or correct SWIFTKV_URL")
    return ok(f"{url} is ready and accepts this environment's requests.")


_REACHED = "names a server that can be reached from here"
CHECKS = (
    Check("packages", check_packages, "run it by hand: python -m pip check"),
    Check("settings", check_settings, "look at the variables that begin with SWIFTKV_"),
    Check("disk", check_disk, "look for a file system that does not answer: df"),
    Check("limits", check_limits, "look at ulimit -a and at free -m"),
    Check("compiler", check_compiler, "try the compiler by hand: g++ --version"),
    Check("gpu", check_gpu, "try the driver by hand: nvidia-smi"),
    Check("database", check_database, f"check whether SWIFTKV_DATABASE_URL {_REACHED}"),
    Check("object store", check_object_store, f"check whether AWS_ENDPOINT_URL {_REACHED}"),
    Check("ray", check_ray, "check whether SWIFTKV_RAY_DASHBOARD_URL can be reached from here"),
    Check("control plane", check_control_plane, "check whether SWIFTKV_URL can be reached from here"),
)
"""In the order of the report."""


def doctor(
    timeout: Annotated[float, typer.Option(min=1.0, help="Time limit of a check, seconds.")] = 30.0,
    min_free_gib: Annotated[float, typer.Option(min=0.0, help="Free disk space to require, GiB.")] = 2.0,
    json: Json = False,
) -> None:
    """Check everything the platform needs here, and say what to do. The exit code is 1 if a check failed."""
    with err().status("Looking"):
        try:
            surroundings = Surroundings(settings(), min_free_bytes=int(min_free_gib * GIB), timeout_s=timeout)
        except InvalidInputError as error:
            # No other check can run without settings.
            results = [("settings", failed(one_line(error), "correct or unset these variables"))]
        else:
            results = run_checks(CHECKS, surroundings)
    counts: dict[str, int] = {status: sum(finding.status == status for _, finding in results) for status in _STYLES}
    if json:
        print_json({"checks": [{"name": name, **asdict(finding)} for name, finding in results], **counts})
    else:
        print_findings(results, counts)
    if counts["failed"]:
        raise typer.Exit(1)
