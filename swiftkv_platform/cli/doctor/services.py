"""Checks of `swiftkv doctor` on services: database, object store, their clocks, Ray, control plane and W&B."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from swiftkv_platform.cli.doctor.findings import Finding, Surroundings, check, failed, ok, one_line, warning, worst
from swiftkv_platform.cli.doctor.machine import existing, why_not_writable
from swiftkv_platform.client import APIError, Client
from swiftkv_platform.errors import (
    ClusterUnavailableError,
    DatabaseUnavailableError,
    InvalidInputError,
    StorageError,
    SwiftKVError,
)

if TYPE_CHECKING:
    from sqlalchemy import URL
    from sqlalchemy.orm import Session

    from swiftkv_platform.storage.object_store import ObjectStore

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


@check("database", "check whether SWIFTKV_DATABASE_URL names a server that can be reached from here")
def database(surroundings: Surroundings) -> Finding:
    """Connect, and compare the schema's revision. An SQLite file is opened read-only."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    from swiftkv_platform.control_plane.database.session import current_revision

    try:
        url = make_url(surroundings.settings.resolved_database_url)
    except ArgumentError:
        return _bad_address("SWIFTKV_DATABASE_URL is not an SQLAlchemy URL.")
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
        return failed(text, remedy or "start the server, or correct host and port in SWIFTKV_DATABASE_URL")
    return _revision(f"{place} answers and", place, present, upgraded_by_start=False)


@contextmanager
def _session(url: URL, timeout_s: float) -> Iterator[Session]:
    """Yield a transaction on a database server; connecting may take half of `timeout_s`."""
    from swiftkv_platform.control_plane.database.session import Database

    wait_s = max(_SHORTEST_WAIT_S, int(timeout_s / 2))
    address = url.update_query_dict({"connect_timeout": str(wait_s)}).render_as_string(hide_password=False)
    with closing(Database(address)) as database, database.reading() as session:
        yield session


def _database_file(path: Path) -> Finding:
    if not path.name or not path.exists():
        return ok(f"{path} is created by the first start.")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            tables = connection.execute("SELECT name FROM sqlite_master WHERE name = 'alembic_version'").fetchall()
            rows = connection.execute("SELECT version_num FROM alembic_version").fetchall() if tables else []
    except sqlite3.Error as error:
        return failed(f"{path} cannot be read: {error}.", "restore it from a backup, or name another file")
    return _revision(str(path), str(path), rows[0][0] if rows else None, upgraded_by_start=True)


def _revision(subject: str, place: str, present: str | None, *, upgraded_by_start: bool) -> Finding:
    from swiftkv_platform.control_plane.database.session import can_use, newest_revision

    wanted = newest_revision()
    if present == wanted:
        return ok(f"{subject} has the newest schema, {wanted}.")
    if present is not None and present > wanted:
        if can_use(present):
            return ok(f"{subject} has schema {present} of a newer version, which works with this one.")
        message = (
            f"The schema is {present}, made by a newer version of this program; this one knows schemas up to {wanted}."
        )
        return failed(message, f"install that version, or go back with it: {_UPGRADE} --back-to {wanted}")
    if upgraded_by_start:
        return ok(f"{place} has schema {present or 'none'}; the next start brings it to {wanted}.")
    return failed(f"{place} has schema {present or 'none'}, and this program needs {wanted}.", f"run {_UPGRADE}")


def _bad_address(message: str) -> Finding:
    return failed(message, "use sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME")


@check("object store", "check whether AWS_ENDPOINT_URL names a server that can be reached from here")
def object_store(surroundings: Surroundings) -> Finding:
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

    place = f".swiftkv-doctor-{ULID()}"
    try:
        _round_trip(store, place, f"{place}/probe", b"swiftkv doctor")
    except StorageError:
        with suppress(StorageError):  # report the first error
            store.delete_prefix(place)
        raise
    store.delete_prefix(place)  # in a local store, the empty directory is left


def _round_trip(store: ObjectStore, place: str, key: str, content: bytes) -> None:
    store.put_bytes(key, content)
    if store.get_bytes(key) != content:
        raise StorageError("an object was read back with other content")
    if [each.key for each in store.list(place)] != [key]:
        raise StorageError("an object that was written is not listed")
    store.delete(key)
    if store.head(key) is not None:
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


_SIGNATURE_S = 15 * 60
"""Most seconds by which the time of an S3 signature may be off."""
_TURNS_S = 1.0
"""Most seconds by which the clocks of control planes should differ, since they take turns by time."""


@check("clock", "check whether database and object store answer")
def clock(surroundings: Surroundings) -> Finding:
    """Compare the clock with those of S3 and PostgreSQL, if used. If one does not answer, another check reports it."""
    settings, found = surroundings.settings, []
    if settings.resolved_storage_uri.startswith("s3://"):
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        found.append(_clock_of_store(endpoint or "https://s3.amazonaws.com"))
    if settings.resolved_database_url.startswith("postgresql"):
        found.append(_clock_of_database(settings.resolved_database_url, surroundings.timeout_s))
    return worst(found) if found else ok("There is no clock of another machine to compare with.")


def _clock_of_store(endpoint: str) -> Finding:
    try:
        stamp = httpx.head(endpoint, timeout=5.0).headers.get("Date")
    except (httpx.TransportError, httpx.InvalidURL) as error:
        return ok(f"Not compared: {endpoint} does not answer: {one_line(error)}")
    if stamp is None:
        return ok(f"{endpoint} does not send its time")
    return _difference(endpoint, time.time() - parsedate_to_datetime(stamp).timestamp(), 60.0, _SIGNATURE_S)


def _clock_of_database(url: str, timeout_s: float) -> Finding:
    from sqlalchemy import make_url, text

    try:
        with _session(make_url(url), timeout_s) as session:
            asked = time.time()
            theirs = float(session.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())
            middle = (asked + time.time()) / 2
    except SwiftKVError as error:
        return ok(f"Not compared: {one_line(error)}")
    return _difference("the database", middle - theirs, _TURNS_S, float("inf"))


def _difference(whose: str, seconds: float, tolerated: float, most: float) -> Finding:
    message = f"The clocks of this machine and {whose} differ by {abs(seconds):.1f} s"
    if abs(seconds) <= tolerated:
        return ok(message)
    advice = "synchronize this machine's clock with the network: timedatectl set-ntp true"
    return Finding("failed" if abs(seconds) > most else "warning", message, advice)


_CPUS = 4
"""CPUs needed for a small job's driver and workers and a replica."""


@check("ray", "check whether SWIFTKV_RAY_DASHBOARD_URL can be reached from here")
def ray(surroundings: Surroundings) -> Finding:
    """Ask the local stack's Ray, else the settings', for its version and size."""
    stack, settings = surroundings.stack, surroundings.settings
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


@check("control plane", "check whether SWIFTKV_URL can be reached from here")
def control_plane(surroundings: Surroundings) -> Finding:
    """Ask whether the control plane is ready, and make a request with this environment's key."""
    stack, given = surroundings.stack, os.environ.get("SWIFTKV_URL")
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
        refused = error.status in (401, 403)
        advice = (
            "set SWIFTKV_API_KEY to a key of that control plane"
            if refused
            else "correct what it names, then see its log"
        )
        return failed(f"{url}: {one_line(error)}.", advice)
    except SwiftKVError as error:
        return failed(one_line(error), "start it (`swiftkv up`), or correct SWIFTKV_URL")
    return ok(f"{url} is ready and accepts this environment's requests.")


@check("wandb", "check whether WANDB_BASE_URL can be reached from here, or set WANDB_MODE=offline")
def wandb(surroundings: Surroundings) -> Finding:
    """Ask W&B whether it knows the key. Never fails, since jobs run without W&B."""
    key, mode = os.environ.get("WANDB_API_KEY"), os.environ.get("WANDB_MODE", "online")
    if not key:
        return ok("WANDB_API_KEY is not set; jobs keep their runs offline.")
    if mode in ("offline", "disabled", "dryrun"):
        return ok(f"WANDB_MODE is {mode}; nothing is sent.")
    server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").rstrip("/")
    query = {"query": "query { viewer { username } }"}
    try:
        answer = httpx.post(f"{server}/graphql", json=query, auth=("api", key), timeout=surroundings.timeout_s / 2)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        advice = "correct WANDB_BASE_URL or the network, or set WANDB_MODE=offline"
        return warning(f"{server} does not answer: {one_line(error)}; jobs go on without it.", advice)
    if answer.is_success and (answer.json().get("data") or {}).get("viewer"):
        return ok(f"{server} accepts the key.")
    message = f"{server} does not accept the key in WANDB_API_KEY (HTTP {answer.status_code}); jobs go on without it."
    return warning(message, "make a new key on its page, or unset WANDB_API_KEY")
