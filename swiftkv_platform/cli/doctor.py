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

from swiftkv_platform.cli.context import Json, load_settings
from swiftkv_platform.cli.output import get_console, get_error_console, print_json
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
from swiftkv_platform.planning.machines import has_fast_bfloat16
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
class CheckContext:
    """What checks look at, and their limits."""

    settings: Settings
    min_free_bytes: int
    """Min free space of each directory's disk."""
    timeout_s: float
    """Max seconds for a check."""


@dataclass(frozen=True)
class Check:
    name: str
    run: Callable[[CheckContext], Finding]
    failure_advice: str
    """Advice if the check itself breaks or does not end in time."""


def make_ok(message: str) -> Finding:
    return Finding("ok", message)


def make_warning(message: str, advice: str) -> Finding:
    return Finding("warning", message, advice)


def make_failure(message: str, advice: str) -> Finding:
    return Finding("failed", message, advice)


def run_checks(checks: Sequence[Check], context: CheckContext) -> list[tuple[str, Finding]]:
    """Return names and findings in the order of the checks, within `context.timeout_s` seconds."""
    deadline = time.monotonic() + context.timeout_s
    answers: dict[str, Finding] = {}
    # Daemon threads, so that a check that hangs in a driver does not keep the process from ending.
    threads = [threading.Thread(target=_run_check, args=(one, context, answers), daemon=True) for one in checks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = f"No answer within {context.timeout_s:g} s."
    return [(one.name, answers.get(one.name) or make_failure(late, one.failure_advice)) for one in checks]


def _run_check(one: Check, context: CheckContext, answers: dict[str, Finding]) -> None:
    """Run a check and add its finding to `answers`."""
    try:
        answers[one.name] = one.run(context)
    except ModuleNotFoundError as error:
        advice = f"{make_install_command('train', 'serve')} where jobs or deployments are to run"
        answers[one.name] = make_warning(f"Not checked: {error.name} is not installed.", advice)
    except Exception as error:  # a bug in one check must not hide the others' findings
        answers[one.name] = make_failure(
            f"The check broke: {type(error).__name__}: {join_lines(error)}.", one.failure_advice
        )


def merge_worst(findings: Sequence[Finding]) -> Finding:
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
        get_console().print(line, highlight=False, soft_wrap=True)
        if finding.advice:
            get_console().print(
                f"{'':<9}{'':<{width}}  To do: {escape(finding.advice)}", highlight=False, soft_wrap=True
            )
    get_console().print(", ".join(f"{number} {status}" for status, number in counts.items()) + ".", highlight=False)


def join_lines(error: object) -> str:
    """Return the text of an error in one line."""
    return " ".join(str(error).split())


def check_packages(_: CheckContext) -> Finding:
    """Ask pip whether the packages that this one requires are installed, in versions that fit."""
    if find_spec("pip") is None:
        return make_ok("Not checked: this environment has no pip.")
    run = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False)
    faults = [line.rstrip(".") for line in run.stdout.splitlines() if line.startswith(f"{DISTRIBUTION} ")]
    if not faults:
        return make_ok("All required packages are installed, in versions that fit.")
    return make_failure(f"{'; '.join(faults)}.", f"install again, in a new environment: {make_install_command('all')}")


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
"""Environment variables that are not settings of the control plane."""
TEST_VARIABLE_PREFIXES = ("SWIFTKV_TEST_", "SWIFTKV_REQUIRE_ALL", "SWIFTKV_SOAK", "SWIFTKV_SEED", "SWIFTKV_SCHEDULES")
"""Prefixes of variables for tests and benchmarks."""


def check_settings(_: CheckContext) -> Finding:
    known = NON_SETTING_VARIABLES | {f"SWIFTKV_{name.upper()}" for name in Settings.model_fields}
    given = [name for name in sorted(os.environ) if name.upper().startswith("SWIFTKV_")]
    unknown = [
        name for name in given if name.upper() not in known and not name.upper().startswith(TEST_VARIABLE_PREFIXES)
    ]
    if unknown:
        named = ", ".join(f"{name}{suggest_name(name.upper(), known)}" for name in unknown)
        them = "it" if len(unknown) == 1 else "them"
        return make_warning(
            f"Nothing reads {named}.", f"correct or unset {them}; the documentation's page Settings lists all"
        )
    return make_ok(f"{', '.join(given)} set." if given else "Nothing is set: defaults apply.")


def check_disk(context: CheckContext) -> Finding:
    """Check that directories for artifacts, caches and temporary files can be written and have free space."""
    settings, cache = context.settings, Path.home() / ".cache"
    places = {"SWIFTKV_HOME": settings.home}
    if "://" not in settings.resolved_storage_uri:
        places["SWIFTKV_STORAGE_URI"] = Path(settings.resolved_storage_uri)
    places["SWIFTKV_KERNEL_CACHE"] = Path(os.environ.get("SWIFTKV_KERNEL_CACHE") or cache / "swiftkv" / "kernels")
    places["HF_HOME"] = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    places["TMPDIR"] = Path(tempfile.gettempdir())
    return merge_worst([_check_free_space(variable, path, context.min_free_bytes) for variable, path in places.items()])


def _check_free_space(variable: str, path: Path, min_free_bytes: int) -> Finding:
    directory = find_existing_parent(path)
    if (reason := find_write_error(directory)) is not None:
        message = f"{directory} is not writable ({reason}), and {variable} is {path}."
        return make_failure(message, f"set {variable} to a directory that you may write to")
    free = shutil.disk_usage(directory).free
    if free < min_free_bytes:
        asked = f"{min_free_bytes / GIB:.1f} GiB are required"
        message = f"{directory} ({variable}) has {free / GIB:.1f} GiB free, and {asked}."
        return make_failure(message, f"free some space, or set {variable} to a directory on a larger disk")
    return make_ok(f"{free / GIB:.1f} GiB free for {variable}")


def find_existing_parent(path: Path) -> Path:
    """Return the path itself, or its nearest existing parent."""
    path = path.expanduser().absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def find_write_error(directory: Path) -> str | None:
    """Return why no file can be created in an existing directory; None if one can. Leaves no file."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None


_MIN_OPEN_FILES = 4096
"""Least limit on open files: Ray needs sockets for each worker, and replicas one for each caller."""
_MIN_MEMORY_BYTES = 3 * GIB
"""Bytes that the local stack, a job of the built-in model and a replica need together."""
_SHARED_MEMORY_DIRECTORY = Path("/dev/shm")  # noqa: S108 (looked at, not written)


def check_limits(_: CheckContext) -> Finding:
    """Compare open files, shared memory and memory with what the local stack needs."""
    return merge_worst([_check_open_files(), _check_shared_memory(), _check_memory()])


def _check_open_files() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= _MIN_OPEN_FILES:
        return make_ok("Any number of open files" if limit == resource.RLIM_INFINITY else f"{limit} open files")
    message = f"A process may have {limit} files open; Ray and a busy replica need {_MIN_OPEN_FILES} or more"
    return make_warning(message, "ulimit -n 65536, or LimitNOFILE=65536 in a systemd unit")


def _check_shared_memory() -> Finding:
    wanted = StackOptions().object_store_memory
    if not _SHARED_MEMORY_DIRECTORY.is_dir():
        return make_ok("no /dev/shm, so Ray keeps its objects in files")
    free = shutil.disk_usage(_SHARED_MEMORY_DIRECTORY).free
    if free >= wanted:
        return make_ok(f"{free / GIB:.1f} GiB of shared memory free")
    message = (
        f"{_SHARED_MEMORY_DIRECTORY} has {free >> 20} MiB free; `swiftkv up` gives Ray's object store {wanted >> 20}"
    )
    return make_warning(message, "in a container: docker run --shm-size=1g; otherwise free some space there")


def _check_memory() -> Finding:
    available = psutil.virtual_memory().available
    if available >= _MIN_MEMORY_BYTES:
        return make_ok(f"{available / GIB:.1f} GiB of memory available")
    wanted = f"the stack, a small job and a replica need {_MIN_MEMORY_BYTES / GIB:.0f}"
    advice = "stop what uses the memory, or use a larger machine"
    return make_warning(f"{available / GIB:.1f} GiB of memory are available; {wanted}", advice)


_PROBE_SOURCE = (
    "#include <omp.h>\n#include <span>\nint swiftkv(std::span<int> x) { return omp_get_max_threads() + x[0]; }\n"
)
_COMPILER_FLAGS = ("-std=c++20", "-fPIC", "-shared", "-fopenmp")
"""Flags of the CPU kernels that old compilers, or those without OpenMP, lack."""


def check_compiler(context: CheckContext) -> Finding:
    """Compile a small library with the flags of the engine's CPU kernels, which are compiled at first use."""
    wanted = os.environ.get("CXX", "g++")
    slower = "the engine then runs on PyTorch's operators, slower"
    advice = "apt-get install g++, dnf install gcc-c++, or CXX=/path/to/g++"
    compiler = shutil.which(wanted)
    if compiler is None:
        return make_warning(f"There is no C++ compiler {wanted!r} on PATH for the CPU kernels; {slower}.", advice)
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "probe.cpp"
        source.write_text(_PROBE_SOURCE, encoding="ascii")
        run = _run_command(context, compiler, *_COMPILER_FLAGS, str(source), "-o", str(source.with_suffix(".so")))
    if run.returncode:
        reason = next((line for line in run.stderr.splitlines() if "error" in line), f"exit status {run.returncode}")
        message = f"{compiler} cannot compile C++20 with OpenMP ({reason.strip()}); {slower}."
        return make_warning(message, f"use a newer one: {advice}")
    if not has_fast_bfloat16():
        return make_ok(
            f"{compiler} works; this processor has no AVX-512, so PyTorch's operators are used, and float32 is much "
            "faster than bfloat16 (model.dtype of a job, engine.dtype of a deployment)."
        )
    return make_ok(f"{compiler} compiles C++20 with OpenMP.")


def _run_command(context: CheckContext, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=context.timeout_s, check=False)


_GPU_QUERY = ("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
_TORCH_QUERY = "import torch; print(torch.__version__, torch.cuda.device_count())"


def check_gpu(context: CheckContext) -> Finding:
    """Compare the driver's GPUs with those of torch, which another process imports."""
    if shutil.which(_GPU_QUERY[0]) is None:
        return make_ok("No nvidia-smi here: jobs and replicas compute on the CPU.")
    run = _run_command(context, *_GPU_QUERY)
    if run.returncode or not run.stdout.strip():
        reason = join_lines(run.stdout + run.stderr) or "it lists no GPU"
        return make_failure(f"nvidia-smi: {reason}.", "restart the machine, or install the driver again")
    names, drivers = zip(*(line.rsplit(", ", 1) for line in run.stdout.strip().splitlines()), strict=True)
    found = f"{len(names)} x {names[0]}, driver {drivers[0]}"
    run = _run_command(context, sys.executable, "-c", _TORCH_QUERY)
    if run.returncode:
        return make_ok(f"{found}; torch is not installed here, only jobs and replicas need it.")
    torch, number = run.stdout.split()
    if int(number) < len(names):
        advice = "install the CUDA build of torch for this driver: https://pytorch.org/get-started/locally; or look at"
        return make_failure(
            f"{found}, but torch {torch} uses {number} of {len(names)}.", f"{advice} CUDA_VISIBLE_DEVICES"
        )
    return make_ok(f"{found}; torch {torch} uses it.")


_NOT_STARTED = "None is configured or started; `swiftkv up` starts one."
_UPGRADE_COMMAND = "python -m swiftkv_platform.control_plane.database"
_MIN_CONNECT_TIMEOUT_S = 2
"""Shortest timeout that libpq supports."""
_ADVICE_BY_ERROR = {
    "password authentication failed": "correct user and password in SWIFTKV_DATABASE_URL",
    "no password supplied": "give user and password in SWIFTKV_DATABASE_URL",
    "role": "create the role, or correct the user in SWIFTKV_DATABASE_URL",
    "does not exist": "create the database (createdb), or correct its name in SWIFTKV_DATABASE_URL",
}
"""Advice by a phrase in PostgreSQL's error."""


def check_database(context: CheckContext) -> Finding:
    """Connect, and compare the schema's revision. An SQLite file is opened read-only."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    from swiftkv_platform.control_plane.database.session import Database, get_current_revision

    try:
        url = make_url(context.settings.resolved_database_url)
    except ArgumentError:
        return _report_invalid_url("SWIFTKV_DATABASE_URL is not an SQLAlchemy URL.")
    if url.get_backend_name() == "sqlite":
        return _check_sqlite_file(Path(url.database or ""))
    place = url.render_as_string(hide_password=True)
    try:
        wait_s = max(_MIN_CONNECT_TIMEOUT_S, int(context.timeout_s / 2))
        address = url.update_query_dict({"connect_timeout": str(wait_s)}).render_as_string(hide_password=False)
        with closing(Database(address)) as database, database.reading() as session:
            present = get_current_revision(session.connection())
    except InvalidInputError as error:
        return _report_invalid_url(join_lines(error))
    except DatabaseUnavailableError as error:
        text = join_lines(error)
        remedy = next((advice for sign, advice in _ADVICE_BY_ERROR.items() if sign in text), None)
        return make_failure(text, remedy or "start the server, or correct host and port in SWIFTKV_DATABASE_URL")
    return _compare_revision(place, present, is_sqlite=False)


def _check_sqlite_file(path: Path) -> Finding:
    if not path.name or not path.exists():
        return make_ok(f"{path} is created by the first start.")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE name = 'alembic_version'").fetchall()
            rows = connection.execute("SELECT version_num FROM alembic_version").fetchall() if tables else []
    except sqlite3.Error as error:
        return make_failure(f"{path} cannot be read: {error}.", "restore it from a backup, or name another file")
    return _compare_revision(str(path), rows[0][0] if rows else None, is_sqlite=True)


def _compare_revision(place: str, present: str | None, *, is_sqlite: bool) -> Finding:
    from swiftkv_platform.control_plane.database.session import can_use_revision, get_newest_revision

    wanted, subject = get_newest_revision(), place if is_sqlite else f"{place} answers and"
    if present == wanted:
        return make_ok(f"{subject} has the newest schema, {wanted}.")
    if present is not None and present > wanted:
        if can_use_revision(present):
            return make_ok(f"{subject} has schema {present} of a newer version, which works with this one.")
        message = (
            f"The schema is {present}, made by a newer version of this program; this one knows schemas up to {wanted}."
        )
        return make_failure(message, f"install that version, or go back with it: {_UPGRADE_COMMAND} --back-to {wanted}")
    if is_sqlite:  # every start upgrades it
        return make_ok(f"{place} has schema {present or 'none'}; the next start brings it to {wanted}.")
    return make_failure(
        f"{place} has schema {present or 'none'}, and this program needs {wanted}.", f"run {_UPGRADE_COMMAND}"
    )


def _report_invalid_url(message: str) -> Finding:
    return make_failure(message, "use sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME")


def check_object_store(context: CheckContext) -> Finding:
    """Write, read, list and delete a small object under a unique name."""
    from swiftkv_platform.storage.addresses import open_store

    uri = context.settings.resolved_storage_uri
    directory = None if "://" in uri else Path(uri).expanduser()
    if directory is not None and not directory.is_dir():
        above = find_existing_parent(directory)
        reason = find_write_error(above) if above.is_dir() else "Not a directory"
        if reason is None:
            return make_ok(f"{directory} is created by the first job.")
        message = f"{directory} does not exist, and cannot be created in {above} ({reason})."
        return make_failure(message, _advise_on_store("", uri))
    try:
        store = open_store(uri, patient=False)
        _probe_store(store)
    except InvalidInputError as error:
        return make_failure(join_lines(error), "correct SWIFTKV_STORAGE_URI")
    except StorageError as error:
        return make_failure(f"{uri}: {join_lines(error)}.", _advise_on_store(join_lines(error), uri))
    return make_ok(f"{store.uri} stores, returns, lists and deletes an object.")


def _probe_store(store: ObjectStore) -> None:
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


def _advise_on_store(text: str, uri: str) -> str:
    from swiftkv_platform.storage.bucket_store import SERVICES

    if "://" not in uri or uri.startswith("file:"):
        return "set SWIFTKV_STORAGE_URI to a directory that you may write to"
    if "does not exist" in text:
        return "create the bucket, or name another in SWIFTKV_STORAGE_URI"
    service = SERVICES[uri.partition("://")[0].lower()]
    if "credentials" in text:
        return f"set {service.credentials} of a user who may read, write, list and delete there"
    return f"start the server, or correct {service.endpoint}"


_MIN_CPUS = 4
"""CPUs needed for a small job's driver and workers and a replica."""


def check_ray(context: CheckContext) -> Finding:
    """Ask the local stack's Ray, else the settings', for its version and size."""
    stack, settings = Stack(context.settings), context.settings
    state = stack.state()
    if state is None and "ray_dashboard_url" not in settings.model_fields_set:
        return make_ok(_NOT_STARTED)
    if state is not None and not state.alive("ray"):
        message = f"Ray, started by `swiftkv up` at {state.ray_dashboard_url}, has ended."
        return make_failure(message, f"swiftkv up; its log is {stack.logs / 'ray.log'}")
    from swiftkv_platform.control_plane.ray.dashboard import RayDashboard

    url = settings.ray_dashboard_url if state is None else state.ray_dashboard_url
    token_file = None if state is None else stack.token_file
    with closing(RayDashboard(url, timeout_s=context.timeout_s / 2, token_file=token_file)) as dashboard:
        try:
            answer = dashboard.parse_object(dashboard.request("GET", "/api/version"), "tell its version")
            nodes = dashboard.parse_object(dashboard.request("GET", "/api/v0/nodes?detail=1"), "list its nodes")
        except ClusterUnavailableError as error:
            return make_failure(join_lines(error), "start it (`swiftkv up`), or correct SWIFTKV_RAY_DASHBOARD_URL")
    ours, theirs = version("ray"), str(answer["ray_version"])
    if theirs != ours:
        message = f"Ray at {url} is {theirs}, but {ours} is installed here."
        return make_failure(message, f"pip install ray=={theirs}, or give the cluster's image {ours}")
    alive = [node["resources_total"] for node in nodes["data"]["result"]["result"] if node["state"] == "ALIVE"]
    cpus, gpus = (sum(node.get(kind, 0) for node in alive) for kind in ("CPU", "GPU"))
    message = f"Ray {ours} at {url} has {len(alive)} nodes, {cpus:g} CPUs and {gpus:g} GPUs"
    if cpus < _MIN_CPUS:
        advice = "add nodes, or start it with more: swiftkv down && swiftkv up --num-cpus 4"
        return make_warning(f"{message}; a small job and a replica need {_MIN_CPUS} CPUs.", advice)
    return make_ok(f"{message}.")


def check_control_plane(context: CheckContext) -> Finding:
    """Ask whether the control plane is ready, and make a request with this environment's key."""
    stack, given = Stack(context.settings), os.environ.get("SWIFTKV_URL")
    state = stack.state()
    if given is None and state is None:
        return make_ok(_NOT_STARTED)
    if given is None and state is not None and not state.alive("control-plane"):
        message = f"The control plane, started by `swiftkv up` at {state.url}, has ended."
        return make_failure(message, f"swiftkv up; its log is {stack.logs / 'control-plane.log'}")
    url = given or (state.url if state else "")
    key = os.environ.get("SWIFTKV_API_KEY")
    try:
        with Client(url, key, max_retries=0, timeout=context.timeout_s / 2) as client:
            client.ready()
            client.quota()
    except APIError as error:
        advice = "correct what it names, then see its log"
        if error.status in (401, 403):
            advice = "set SWIFTKV_API_KEY to a key of that control plane"
        return make_failure(f"{url}: {join_lines(error)}.", advice)
    except SwiftKVError as error:
        return make_failure(join_lines(error), "start it (`swiftkv up`), or correct SWIFTKV_URL")
    return make_ok(f"{url} is ready and accepts this environment's requests.")


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
    with get_error_console().status("Looking"):
        try:
            context = CheckContext(load_settings(), min_free_bytes=int(min_free_gib * GIB), timeout_s=timeout)
        except InvalidInputError as error:
            # No other check can run without settings.
            results = [("settings", make_failure(join_lines(error), "correct or unset these variables"))]
        else:
            results = run_checks(CHECKS, context)
    counts: dict[str, int] = {status: sum(finding.status == status for _, finding in results) for status in _STYLES}
    if json:
        print_json({"checks": [{"name": name, **asdict(finding)} for name, finding in results], **counts})
    else:
        print_findings(results, counts)
    if counts["failed"]:
        raise typer.Exit(1)
