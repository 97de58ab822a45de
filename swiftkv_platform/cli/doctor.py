"""`swiftkv doctor`: ten checks of this machine and its services, run in parallel. Checks leave nothing behind."""

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

from swiftkv_platform.cli.context import Json, load_settings
from swiftkv_platform.cli.output import get_console, get_error_console, print_json
from swiftkv_platform.errors import (
    ClusterUnavailableError,
    DatabaseUnavailableError,
    InvalidInputError,
    StorageError,
    SwiftKVError,
    suggest_name,
)
from swiftkv_platform.installing import DISTRIBUTION, make_install_command

if TYPE_CHECKING:
    from swiftkv_platform.settings import Settings
    from swiftkv_platform.storage.object_store import ObjectStore

GIB = 1 << 30
Status = Literal["ok", "warning", "failed"]
_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "failed": "bold red"}
"""Styles by status, in order of severity."""


@dataclass(frozen=True)
class Finding:
    """Outcome of a check: one sentence, and advice on how to fix a problem."""

    status: Status
    message: str
    advice: str = ""


@dataclass(frozen=True)
class CheckContext:
    """Settings and limits of the checks."""

    settings: Settings
    min_free_bytes: int
    """Min free space per disk."""
    timeout_s: float
    """Max seconds per check."""


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[CheckContext], Finding]
    failure_advice: str
    """Advice if the check itself fails or times out."""


def ok(message: str) -> Finding:
    return Finding("ok", message)


def warn(message: str, advice: str) -> Finding:
    return Finding("warning", message, advice)


def fail(message: str, advice: str) -> Finding:
    return Finding("failed", message, advice)


def run_checks(checks: Sequence[Check], context: CheckContext) -> list[tuple[str, Finding]]:
    """Return (name, finding) of each check, in order, within `context.timeout_s` seconds."""
    deadline = time.monotonic() + context.timeout_s
    findings: dict[str, Finding] = {}
    # Daemon threads: a check that hangs in a driver does not block the exit.
    threads = [threading.Thread(target=_run_check, args=(check, context, findings), daemon=True) for check in checks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    timed_out = f"Timed out after {context.timeout_s:g} s."
    return [(check.name, findings.get(check.name) or fail(timed_out, check.failure_advice)) for check in checks]


def _run_check(check: Check, context: CheckContext, findings: dict[str, Finding]) -> None:
    """Run a check and add its finding to `findings`."""
    try:
        findings[check.name] = check.run(context)
    except ModuleNotFoundError as error:
        advice = f"{make_install_command('train', 'serve')} on machines that run jobs or deployments"
        findings[check.name] = warn(f"Not checked: {error.name} is not installed.", advice)
    except Exception as error:  # a bug in one check must not hide the others' findings
        message = f"The check itself failed: {type(error).__name__}: {join_lines(error)}."
        findings[check.name] = fail(message, check.failure_advice)


def merge_worst_findings(findings: Sequence[Finding]) -> Finding:
    """Merge the findings of the worst status into one."""
    status = max((each.status for each in findings), key=list(_STYLES).index)
    worst = [each for each in findings if each.status == status]
    advice = dict.fromkeys(each.advice for each in worst if each.advice)
    message = "; ".join(each.message.removesuffix(".") for each in worst)
    return Finding(status, f"{message}.", "; ".join(advice))


def print_findings(results: list[tuple[str, Finding]], counts: dict[str, int]) -> None:
    """Print one line per check with its advice, then the number of findings by status."""
    width = max(len(name) for name, _ in results)
    for name, finding in results:
        status = f"[{_STYLES[finding.status]}]{finding.status:<7}[/]"
        line = f"{status}  [bold]{name:<{width}}[/]  {escape(finding.message)}"
        get_console().print(line, highlight=False, soft_wrap=True)
        if finding.advice:
            get_console().print(f"{'':<9}{'':<{width}}  Fix: {escape(finding.advice)}", highlight=False, soft_wrap=True)
    get_console().print(", ".join(f"{number} {status}" for status, number in counts.items()) + ".", highlight=False)


def join_lines(error: object) -> str:
    """Return an error's message on one line."""
    return " ".join(str(error).split())


def check_packages(_: CheckContext) -> Finding:
    """Check the required packages and their versions with `pip check`."""
    if find_spec("pip") is None:
        return ok("Not checked: pip is not installed.")
    run = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    faults = [line.rstrip(".") for line in run.stdout.splitlines() if line.startswith(f"{DISTRIBUTION} ")]
    if not faults:
        return ok("All required packages are installed in compatible versions.")
    return fail(f"{'; '.join(faults)}.", f"reinstall in a new environment: {make_install_command('all')}")


_NON_SETTINGS = (
    "API_KEY",
    "KERNEL_CACHE",
    "RESIZE_INTERVAL_S",
    "SHARED_DIRECTORY",
    "STACK",
    "URL",
    "VLLM_FRONTEND_PID",
)
NON_SETTING_VARIABLES = frozenset(f"SWIFTKV_{name}" for name in _NON_SETTINGS)
"""Environment variables that are not `Settings`."""
TEST_VARIABLE_PREFIXES = ("SWIFTKV_TEST_", "SWIFTKV_REQUIRE_ALL", "SWIFTKV_SOAK", "SWIFTKV_SEED", "SWIFTKV_SCHEDULES")
"""Prefixes of environment variables of tests and benchmarks."""


def check_settings(_: CheckContext) -> Finding:
    from swiftkv_platform.settings import Settings

    known = NON_SETTING_VARIABLES | {f"SWIFTKV_{name.upper()}" for name in Settings.model_fields}
    used = [name for name in sorted(os.environ) if name.upper().startswith("SWIFTKV_")]
    unknown = [
        name for name in used if name.upper() not in known and not name.upper().startswith(TEST_VARIABLE_PREFIXES)
    ]
    if unknown:
        named = ", ".join(f"{name}{suggest_name(name.upper(), known)}" for name in unknown)
        pronoun = "it" if len(unknown) == 1 else "them"
        return warn(
            f"Unknown settings: {named}.", f"correct or unset {pronoun}; see the page Settings in the documentation"
        )
    return ok(f"{', '.join(used)} set." if used else "Default settings.")


def check_disk(context: CheckContext) -> Finding:
    """Check that directories for artifacts, caches and temporary files are writable and have free space."""
    settings, cache = context.settings, Path.home() / ".cache"
    directories = {"SWIFTKV_HOME": settings.home}
    if "://" not in settings.resolved_storage_uri:
        directories["SWIFTKV_STORAGE_URI"] = Path(settings.resolved_storage_uri)
    directories["SWIFTKV_KERNEL_CACHE"] = Path(os.environ.get("SWIFTKV_KERNEL_CACHE") or cache / "swiftkv" / "kernels")
    directories["HF_HOME"] = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    directories["TMPDIR"] = Path(tempfile.gettempdir())
    return merge_worst_findings(
        [_check_free_space(variable, path, context.min_free_bytes) for variable, path in directories.items()]
    )


def _check_free_space(variable: str, path: Path, min_free_bytes: int) -> Finding:
    directory = find_existing_parent(path)
    if (reason := find_write_error(directory)) is not None:
        message = f"{variable} is {path}, but {directory} is not writable ({reason})."
        return fail(message, f"set {variable} to a writable directory")
    free = shutil.disk_usage(directory).free
    if free < min_free_bytes:
        return fail(
            f"{variable} ({directory}) has {free / GIB:.1f} GiB free.",
            f"free {min_free_bytes / GIB:.1f} GiB, or set the variable to a directory on a larger disk",
        )
    return ok(f"{free / GIB:.1f} GiB free for {variable}")


def find_existing_parent(path: Path) -> Path:
    """Return the path itself, or its nearest existing parent."""
    path = path.expanduser().absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def find_write_error(directory: Path) -> str | None:
    """Return the error of creating a file in an existing directory; None on success. Leaves no file."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None


_MIN_OPEN_FILES = 4096
"""Min limit on open files: Ray opens sockets per worker, and replicas one per connection."""
_MIN_MEMORY_BYTES = 3 * GIB
"""Memory of the local stack, a job of the built-in model and a replica together."""
_SHARED_MEMORY_DIRECTORY = Path("/dev/shm")  # noqa: S108 (read only)


def check_limits(_: CheckContext) -> Finding:
    """Compare open files, shared memory, memory and load with the local stack's needs."""
    return merge_worst_findings(
        [_check_open_files(), _check_shared_memory(), _check_memory(), check_load(os.getloadavg()[0])]
    )


def _check_open_files() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= _MIN_OPEN_FILES:
        return ok("Unlimited open files" if limit == resource.RLIM_INFINITY else f"{limit} open files")
    message = f"The limit on open files is {limit}; Ray and replicas need at least {_MIN_OPEN_FILES}"
    return warn(message, "ulimit -n 65536, or LimitNOFILE=65536 in a systemd unit")


def _check_shared_memory() -> Finding:
    from swiftkv_platform.local.stack import StackOptions

    required = StackOptions().object_store_memory
    if not _SHARED_MEMORY_DIRECTORY.is_dir():
        return ok("no /dev/shm, so Ray stores objects in files")
    free = shutil.disk_usage(_SHARED_MEMORY_DIRECTORY).free
    if free >= required:
        return ok(f"{free / GIB:.1f} GiB of shared memory free")
    message = f"{_SHARED_MEMORY_DIRECTORY} has {free >> 20} MiB free; Ray's object store needs {required >> 20} MiB"
    return warn(message, "free some space there, or in a container: docker run --shm-size=1g")


def _check_memory() -> Finding:
    available = psutil.virtual_memory().available
    if available >= _MIN_MEMORY_BYTES:
        return ok(f"{available / GIB:.1f} GiB of memory available")
    required = f"the platform, a small job and a replica need {_MIN_MEMORY_BYTES / GIB:.0f} GiB"
    advice = "stop other programs, or use a larger machine"
    return warn(f"{available / GIB:.1f} GiB of memory available; {required}", advice)


_MAX_LOAD_PER_CPU = 2.0
"""Above, Ray and the control plane take minutes to start."""


def check_load(load: float) -> Finding:
    """Compare the load average of the last minute with the number of CPUs."""
    cpus = os.cpu_count() or 1
    if load <= _MAX_LOAD_PER_CPU * cpus:
        return ok(f"load {load:.1f} on {cpus} CPUs")
    advice = "stop other programs, or give `swiftkv up` more time with SWIFTKV_START_TIMEOUT_S"
    return warn(f"The load is {load:.1f} on {cpus} CPUs, so processes start slowly", advice)


_PROBE_SOURCE = (
    "#include <omp.h>\n#include <span>\nint swiftkv(std::span<int> x) { return omp_get_max_threads() + x[0]; }\n"
)
_COMPILER_FLAGS = ("-std=c++20", "-fPIC", "-shared", "-fopenmp")
"""Flags of the CPU kernels that old compilers do not support."""


def check_compiler(context: CheckContext) -> Finding:
    """Compile a small library with the flags of the engine's CPU kernels."""
    from swiftkv_platform.planning.machines import describe_processor, has_fast_bfloat16

    program = os.environ.get("CXX", "g++")
    slower = "the engine falls back to PyTorch operators, which are slower"
    advice = "apt-get install g++, dnf install gcc-c++, or CXX=/path/to/g++"
    compiler = shutil.which(program)
    if compiler is None:
        return warn(f"C++ compiler {program!r} not found on PATH; {slower}.", advice)
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "probe.cpp"
        source.write_text(_PROBE_SOURCE, encoding="ascii")
        run = _run_command(context, compiler, *_COMPILER_FLAGS, str(source), "-o", str(source.with_suffix(".so")))
    if run.returncode:
        reason = next((line for line in run.stderr.splitlines() if "error" in line), f"exit status {run.returncode}")
        message = f"{compiler} cannot compile C++20 with OpenMP ({reason.strip()}); {slower}."
        return warn(message, f"install a newer compiler: {advice}")
    _, instructions = describe_processor()
    if instructions is None:
        return warn(
            f"{compiler} works, but this processor has no AVX2; {slower}.", "engine.dtype float32, or another processor"
        )
    training = "" if has_fast_bfloat16() else "; train with model.dtype float32, which is much faster here"
    return ok(f"{compiler} works: the engine's kernels use {instructions}{training}.")


def _run_command(context: CheckContext, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=context.timeout_s, check=False)


_GPU_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
_TORCH_QUERY = "import torch; print(torch.__version__, torch.cuda.device_count())"


def check_gpu(context: CheckContext) -> Finding:
    """Compare the driver's GPUs with torch's. Imports torch in another process."""
    if shutil.which(_GPU_QUERY[0]) is None:
        return ok("nvidia-smi not found: jobs and replicas run on CPUs.")
    run = _run_command(context, *_GPU_QUERY)
    if run.returncode or not run.stdout.strip():
        reason = join_lines(run.stdout + run.stderr) or "no GPUs listed"
        return fail(f"nvidia-smi: {reason}.", "restart the machine, or reinstall the driver")
    names, drivers = zip(*(line.rsplit(", ", 1) for line in run.stdout.strip().splitlines()), strict=True)
    found = f"{len(names)} x {names[0]}, driver {drivers[0]}"
    run = _run_command(context, sys.executable, "-c", _TORCH_QUERY)
    if run.returncode:
        return ok(f"{found}; torch is not installed (only jobs and replicas need it).")
    torch, number = run.stdout.split()
    if int(number) < len(names):
        advice = "install the CUDA build of torch for this driver (https://pytorch.org/get-started/locally), or check"
        return fail(f"{found}, but torch {torch} sees {number} of {len(names)} GPUs.", f"{advice} CUDA_VISIBLE_DEVICES")
    return ok(f"{found}; torch {torch} sees all GPUs.")


_NOT_STARTED_MESSAGE = "Not configured or running. Start it with `swiftkv up`."
_UPGRADE_COMMAND = "python -m swiftkv_platform.control_plane.database"
_MIN_CONNECT_TIMEOUT_S = 2
"""Min timeout of libpq."""
_ADVICE_BY_ERROR = {
    "password authentication failed": "correct user and password in SWIFTKV_DATABASE_URL",
    "no password supplied": "set user and password in SWIFTKV_DATABASE_URL",
    "role": "create the role, or correct the user in SWIFTKV_DATABASE_URL",
    "does not exist": "create the database (createdb), or correct its name in SWIFTKV_DATABASE_URL",
}
"""Advice by phrase in PostgreSQL's error."""


def check_database(context: CheckContext) -> Finding:
    """Connect and compare the schema revision. An SQLite file is opened read-only."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    from swiftkv_platform.control_plane.database.session import Database, get_current_revision

    try:
        url = make_url(context.settings.resolved_database_url)
    except ArgumentError:
        return _report_invalid_url("SWIFTKV_DATABASE_URL is not an SQLAlchemy URL.")
    if url.get_backend_name() == "sqlite":
        return _check_sqlite_file(Path(url.database or ""))
    database_url = url.render_as_string(hide_password=True)
    try:
        wait_s = max(_MIN_CONNECT_TIMEOUT_S, int(context.timeout_s / 2))
        address = url.update_query_dict({"connect_timeout": str(wait_s)}).render_as_string(hide_password=False)
        with closing(Database(address)) as database, database.begin_read() as session:
            present = get_current_revision(session.connection())
    except InvalidInputError as error:
        return _report_invalid_url(join_lines(error))
    except DatabaseUnavailableError as error:
        text = join_lines(error)
        remedy = next((advice for sign, advice in _ADVICE_BY_ERROR.items() if sign in text), None)
        return fail(text, remedy or "start the server, or correct host and port in SWIFTKV_DATABASE_URL")
    return _compare_revision(database_url, present, is_sqlite=False)


def _check_sqlite_file(path: Path) -> Finding:
    if not path.name or not path.exists():
        return ok(f"{path} does not exist; the first start creates it.")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE name = 'alembic_version'").fetchall()
            rows = connection.execute("SELECT version_num FROM alembic_version").fetchall() if tables else []
    except sqlite3.Error as error:
        return fail(f"{path} cannot be read: {error}.", "restore it from a backup, or use another file")
    return _compare_revision(str(path), rows[0][0] if rows else None, is_sqlite=True)


def _compare_revision(database: str, present: str | None, *, is_sqlite: bool) -> Finding:
    from swiftkv_platform.control_plane.database.session import can_use_revision, get_newest_revision

    newest, subject = get_newest_revision(), database if is_sqlite else f"{database} is reachable and"
    if present == newest:
        return ok(f"{subject} has the newest schema, {newest}.")
    if present is not None and present > newest:
        if can_use_revision(present):
            return ok(f"{subject} has schema {present} of a newer version, compatible with this one.")
        message = (
            f"Schema {present} is from a newer version of this program; this version supports schemas up to {newest}."
        )
        return fail(
            message,
            f"install the newer version, or downgrade the schema with it: {_UPGRADE_COMMAND} --back-to {newest}",
        )
    if is_sqlite:  # every start upgrades it
        return ok(f"{database} has schema {present or 'none'}; the next start upgrades it to {newest}.")
    return fail(f"{database} has schema {present or 'none'}; this program needs {newest}.", f"run {_UPGRADE_COMMAND}")


def _report_invalid_url(message: str) -> Finding:
    return fail(message, "use sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME")


def check_object_store(context: CheckContext) -> Finding:
    """Write, read, list and delete a small object under a unique name."""
    from swiftkv_platform.storage.object_store import open_store

    uri = context.settings.resolved_storage_uri
    directory = None if "://" in uri else Path(uri).expanduser()
    if directory is not None and not directory.is_dir():
        above = find_existing_parent(directory)
        reason = find_write_error(above) if above.is_dir() else "Not a directory"
        if reason is None:
            return ok(f"{directory} does not exist; the first job creates it.")
        message = f"{directory} does not exist and cannot be created in {above} ({reason})."
        return fail(message, _advise_on_store("", uri))
    try:
        store = open_store(uri, patient=False)
        _probe_store(store)
    except InvalidInputError as error:
        return fail(join_lines(error), "correct SWIFTKV_STORAGE_URI")
    except StorageError as error:
        return fail(f"{uri}: {join_lines(error)}.", _advise_on_store(join_lines(error), uri))
    return ok(f"{store.uri}: writing, reading, listing and deleting an object works.")


def _probe_store(store: ObjectStore) -> None:
    """Write, read, list and delete an object. Raises `StorageError` if a step fails or has a wrong result."""
    from ulid import ULID

    prefix, content = f".swiftkv-doctor-{ULID()}", b"swiftkv doctor"
    key = f"{prefix}/probe"
    try:
        store.put_bytes(key, content)
        returned, listed = store.get_bytes(key), [each.key for each in store.list(prefix)]
        store.delete(key)
        left = store.head(key)
    except StorageError:
        with suppress(StorageError):  # report the first error
            store.delete_prefix(prefix)
        raise
    store.delete_prefix(prefix)  # a local store leaves an empty directory
    if returned != content:
        raise StorageError("an object was read back with different content")
    if listed != [key]:
        raise StorageError("a written object is not listed")
    if left is not None:
        raise StorageError("a deleted object still exists")


def _advise_on_store(text: str, uri: str) -> str:
    from swiftkv_platform.storage.bucket_store import SERVICES

    if "://" not in uri or uri.startswith("file:"):
        return "set SWIFTKV_STORAGE_URI to a writable directory"
    if "does not exist" in text:
        return "create the bucket, or set SWIFTKV_STORAGE_URI to another one"
    service = SERVICES[uri.partition("://")[0].lower()]
    if "credentials" in text:
        return f"set {service.credentials} of a user with read, write, list and delete access"
    return f"start the server, or correct {service.endpoint}"


_MIN_CPUS = 4
"""Min CPUs for a small job's driver and workers and a replica."""


def check_ray(context: CheckContext) -> Finding:
    """Check version and size of the local stack's Ray, else of the configured one."""
    from swiftkv_platform.local.stack import Stack

    stack, settings = Stack(context.settings), context.settings
    state = stack.load_state()
    if state is None and "ray_dashboard_url" not in settings.model_fields_set:
        return ok(_NOT_STARTED_MESSAGE)
    if state is not None and not state.is_alive("ray"):
        message = f"Ray, started by `swiftkv up` at {state.ray_dashboard_url}, has exited."
        return fail(message, f"swiftkv up; see the log {stack.logs / 'ray.log'}")
    from swiftkv_platform.control_plane.ray import RayDashboard

    url = settings.ray_dashboard_url if state is None else state.ray_dashboard_url
    token_file = None if state is None else stack.token_file
    with closing(RayDashboard(url, timeout_s=context.timeout_s / 2, token_file=token_file)) as dashboard:
        try:
            answer = dashboard.parse_object(dashboard.request("GET", "/api/version"), "tell its version")
            nodes = dashboard.parse_object(dashboard.request("GET", "/api/v0/nodes?detail=1"), "list its nodes")
        except ClusterUnavailableError as error:
            return fail(join_lines(error), "start it (`swiftkv up`), or correct SWIFTKV_RAY_DASHBOARD_URL")
    ours, theirs = version("ray"), str(answer["ray_version"])
    if theirs != ours:
        message = f"Ray at {url} is {theirs}, but {ours} is installed here."
        return fail(message, f"pip install ray=={theirs}, or use Ray {ours} in the cluster's image")
    alive = [node["resources_total"] for node in nodes["data"]["result"]["result"] if node["state"] == "ALIVE"]
    cpus, gpus = (sum(node.get(kind, 0) for node in alive) for kind in ("CPU", "GPU"))
    message = f"Ray {ours} at {url} has {len(alive)} nodes, {cpus:g} CPUs and {gpus:g} GPUs"
    if cpus < _MIN_CPUS:
        advice = "add nodes, or restart with more CPUs: swiftkv down && swiftkv up --num-cpus 4"
        return warn(f"{message}; a small job and a replica need {_MIN_CPUS} CPUs.", advice)
    return ok(f"{message}.")


def check_control_plane(context: CheckContext) -> Finding:
    """Check that the control plane is ready and accepts this environment's API key."""
    from swiftkv_platform.client import APIError, Client
    from swiftkv_platform.local.stack import Stack

    stack, configured_url = Stack(context.settings), os.environ.get("SWIFTKV_URL")
    state = stack.load_state()
    if configured_url is None and state is None:
        return ok(_NOT_STARTED_MESSAGE)
    if configured_url is None and state is not None and not state.is_alive("control-plane"):
        message = f"The control plane, started by `swiftkv up` at {state.url}, has exited."
        return fail(message, f"swiftkv up; see the log {stack.logs / 'control-plane.log'}")
    url = configured_url or (state.url if state else "")
    key = os.environ.get("SWIFTKV_API_KEY")
    try:
        with Client(url, key, max_retries=0, timeout=context.timeout_s / 2) as client:
            client.ready()
            client.quota()
    except APIError as error:
        advice = "fix the named problem; the control plane's log has details"
        if error.status in (401, 403):
            advice = "set SWIFTKV_API_KEY to a valid key of this control plane"
        return fail(f"{url}: {join_lines(error)}.", advice)
    except SwiftKVError as error:
        return fail(join_lines(error), "start it (`swiftkv up`), or correct SWIFTKV_URL")
    return ok(f"{url} is ready and accepts requests.")


CHECKS = (
    Check("packages", check_packages, "run: python -m pip check"),
    Check("settings", check_settings, "check the variables SWIFTKV_*"),
    Check("disk", check_disk, "find a hanging file system: df"),
    Check("limits", check_limits, "run: ulimit -a; free -m"),
    Check("compiler", check_compiler, "run: g++ --version"),
    Check("gpu", check_gpu, "run: nvidia-smi"),
    Check("database", check_database, "check that the server in SWIFTKV_DATABASE_URL is reachable"),
    Check("object store", check_object_store, "check that the server in AWS_ENDPOINT_URL is reachable"),
    Check("ray", check_ray, "check that SWIFTKV_RAY_DASHBOARD_URL is reachable"),
    Check("control plane", check_control_plane, "check that SWIFTKV_URL is reachable"),
)


def doctor(
    timeout: Annotated[float, typer.Option(min=1.0, help="Max seconds per check.")] = 30.0,
    min_free_gib: Annotated[float, typer.Option(min=0.0, help="Min free disk space in GiB.")] = 2.0,
    json: Json = False,
) -> None:
    """Diagnose this machine and its services. The exit code is 1 if a check fails."""
    with get_error_console().status("Running checks"):
        try:
            context = CheckContext(load_settings(), min_free_bytes=int(min_free_gib * GIB), timeout_s=timeout)
        except InvalidInputError as error:
            # All other checks need valid settings.
            results = [("settings", fail(join_lines(error), "correct or unset these variables"))]
        else:
            results = run_checks(CHECKS, context)
    counts: dict[str, int] = {status: sum(finding.status == status for _, finding in results) for status in _STYLES}
    if json:
        print_json({"checks": [{"name": name, **asdict(finding)} for name, finding in results], **counts})
    else:
        print_findings(results, counts)
    if counts["failed"]:
        raise typer.Exit(1)
