"""`swiftkv keys`, `audit` and `quota`: API keys, the audit trail and quotas. `keys` edits the file of API keys that
control plane and replicas read, without a server; `keys list` reads last uses from the control plane's database.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from swiftkv_platform.cli.context import Json, Url, connect, load_settings
from swiftkv_platform.cli.output import (
    Columns,
    format_local_time,
    get_error_console,
    print_fields_result,
    print_json,
    print_result,
    print_table,
    print_table_result,
)
from swiftkv_platform.client import Resource
from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError
from swiftkv_platform.local.stack import Stack
from swiftkv_platform.local.terminal import format_size, pluralize
from swiftkv_platform.security.keys import ApiKey, KeyRing, create_key, revoke_key, rotate_key
from swiftkv_platform.security.principals import Scope
from swiftkv_platform.settings import get_default_keys_file

keys_app = typer.Typer(no_args_is_help=True, help="API keys: the file that SWIFTKV_API_KEYS_FILE names.")

KeysFile = Annotated[
    Path | None, typer.Option("--file", help="Default: SWIFTKV_API_KEYS_FILE, else keys.json in the home directory.")
]
CallerName = Annotated[str, typer.Argument(help="Name of the caller.")]


_SECONDS_BY_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_DURATION_S = 100 * 365 * 86400


def parse_duration(text: str) -> int:
    """Convert `90d`, `12h`, `30m` or `45s` to seconds. Raises `typer.BadParameter`."""
    match = re.fullmatch(r"([0-9]{1,10})([smhd])", text)
    seconds = int(match[1]) * _SECONDS_BY_UNIT[match[2]] if match else 0
    if not 0 < seconds <= _MAX_DURATION_S:
        raise typer.BadParameter(f"{text!r} is not a duration; expected one such as 90d, 12h, 30m or 45s, up to 36500d")
    return seconds


ExpiresIn = Annotated[
    int | None,
    typer.Option(
        parser=parse_duration, metavar="TIME", help="Time until the key expires, such as 90d or 12h. Default: never."
    ),
]
NotBefore = Annotated[
    int | None,
    typer.Option(
        "--begins-in", parser=parse_duration, metavar="TIME", help="Time until the key is valid. Default: at once."
    ),
]
Overlap = Annotated[int, typer.Option(parser=parse_duration, metavar="TIME", help="How long earlier keys stay valid.")]


@keys_app.command()
def create(
    name: CallerName,
    scope: Annotated[list[Scope], typer.Option(help="What the key allows; may be repeated.")],
    tenant: Annotated[str, typer.Option(help="Keys of one tenant see the same jobs.")] = "default",
    expires_in: ExpiresIn = None,
    begins_in: NotBefore = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Request limit of each replica.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Limit of prompt and answer tokens.")] = None,
    max_priority: Annotated[int, typer.Option(help="Lowest `priority` of its requests; lower goes first.")] = 0,
    operator: Annotated[bool, typer.Option("--operator", help="Let it read all tenants' audit trail.")] = False,
    file: KeysFile = None,
    json: Json = False,
) -> None:
    """Add a key. It is printed once: the file keeps only its hash."""
    path = _resolve_keys_file(file)
    token = create_key(
        path,
        name=name,
        tenant=tenant,
        scopes=frozenset(scope),
        **_compute_validity(int(time.time()), expires_in, begins_in),
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_priority=max_priority,
        operator=operator,
    )
    key = KeyRing(path).find(token)
    assert key is not None, "it was added a moment ago"
    _print_new_key(key, token, path, "Added to", json=json)


@keys_app.command()
def rotate(
    name: CallerName,
    overlap: Overlap = "7d",  # type: ignore[assignment]  # typer parses defaults as well
    expires_in: ExpiresIn = None,
    begins_in: NotBefore = None,
    file: KeysFile = None,
    json: Json = False,
) -> None:
    """Add another key with the rights of the newest one; earlier keys stay valid for the overlap.

    The new key is printed once. Hand it out, watch the old one's last use in `swiftkv keys list`, and let the old one
    expire, or revoke it by its id.
    """
    path, now = _resolve_keys_file(file), int(time.time())
    token, key = rotate_key(path, name, now=now, overlap_s=overlap, **_compute_validity(now, expires_in, begins_in))
    _print_new_key(key, token, path, "Rotated in", json=json)


@keys_app.command("list")
def list_keys(file: KeysFile = None, json: Json = False) -> None:
    """List keys with ids, tenants, scopes, times of validity, and last use at a control plane."""
    keys, last_used = KeyRing(_resolve_keys_file(file)).read(), _load_last_uses()
    if json:
        documents = [{"id": key.id, **key.model_dump(mode="json", exclude={"sha256"})} for key in keys]
        print_json({"keys": [{**each, "last_used_at": last_used.get(each["id"])} for each in documents]})
        return
    now, rows = time.time(), []
    for key in keys:
        begins = None if key.has_begun(now) else format_local_time(key.not_before)
        expires = (
            f"{format_local_time(key.expires_at)} (expired)"
            if key.has_expired(now)
            else format_local_time(key.expires_at)
        )
        scopes = ", ".join(sorted(key.scopes))
        rows.append((key.id, key.name, key.tenant, scopes, begins, expires, format_local_time(last_used.get(key.id))))
    columns = ("id", "name", "tenant", "scopes", "begins", "expires", "last used")
    print_table(columns, rows, empty="No keys: all callers are refused.")


@keys_app.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of the keys, or the id of one key.")],
    file: KeysFile = None,
    json: Json = False,
) -> None:
    """Revoke all keys of a name, or the one with an id; the next request with one is refused."""
    gone = revoke_key(_resolve_keys_file(file), name)
    line = f"Revoked {name}." if len(gone) == 1 else f"Revoked {name}: {len(gone)} keys."
    print_result({"revoked": name, "ids": [key.id for key in gone]}, line, json=json)


def _print_new_key(key: ApiKey, token: str, path: Path, done: str, *, json: bool) -> None:
    is_required, advice = _describe_keys_file(path)
    if json:
        told = key.model_dump(mode="json", include={"name", "tenant", "scopes", "expires_at", "not_before"})
        document = {"id": key.id, **told, "scopes": sorted(key.scopes), "key": token, "file": str(path)}
        print_json({**document, "keys_required": is_required, "advice": advice})
    else:
        typer.echo(token)
        # The key itself is on stdout alone, so that a script's log has it only if the script writes it.
        line = f"{done} {path}. {advice} To use this key: export SWIFTKV_API_KEY=skv_..."
        get_error_console().print(line, highlight=False, soft_wrap=True, markup=False)


def _describe_keys_file(path: Path) -> tuple[bool, str]:
    """Return whether the control plane of this home requires the keys of a file now, and what to do otherwise."""
    chosen = load_settings()
    state = Stack(chosen).state()
    is_default = path.absolute() == (chosen.api_keys_file or get_default_keys_file(chosen.home)).absolute()
    is_running = state is not None and state.alive("control-plane")
    if state is not None and is_running and state.operator_files.get("api_keys_file") == path.absolute():
        return True, "The running control plane reads it at the next request."
    if not is_default:
        advice = f"Nothing reads this file by itself: set SWIFTKV_API_KEYS_FILE={path.absolute()}, then `swiftkv up`."
    elif is_running:
        advice = "The running control plane requires no key yet; `swiftkv up` restarts it with these keys."
    else:
        advice = "From the next `swiftkv up` on, callers need a key; a control plane elsewhere needs this file too."
    return False, advice


def _load_last_uses() -> Mapping[str, int]:
    """Return last uses by key id from the control plane's database; empty if it cannot be read."""
    chosen = load_settings()
    if chosen.database_url is None and not (chosen.home / "swiftkv.db").exists():
        return {}  # opening an SQLite file would create it
    from swiftkv_platform.control_plane.access.sessions import list_last_uses  # other commands need no SQL
    from swiftkv_platform.control_plane.database.session import open_database

    try:
        with closing(open_database(chosen)) as database:
            database.check_schema()
            return list_last_uses(database)
    except (DatabaseUnavailableError, InvalidInputError) as error:
        get_error_console().print(
            f"Last uses are unknown: {error.message}", highlight=False, soft_wrap=True, markup=False
        )
        return {}


def _compute_validity(now: int, expires_in: int | None, begins_in: int | None) -> dict[str, int | None]:
    """Return the times of a key from the seconds until them."""
    seconds = {"expires_at": expires_in, "not_before": begins_in}
    return {name: None if each is None else now + each for name, each in seconds.items()}


def _resolve_keys_file(file: Path | None) -> Path:
    chosen = load_settings()
    return file or chosen.api_keys_file or get_default_keys_file(chosen.home)


ExactFilter = Annotated[str | None, typer.Option(metavar="TEXT", help="Only entries with exactly this value.")]


def audit(
    tenant: ExactFilter = None,
    actor: ExactFilter = None,
    credential: ExactFilter = None,
    address: ExactFilter = None,
    route: ExactFilter = None,
    about: ExactFilter = None,
    request_id: ExactFilter = None,
    status: Annotated[int | None, typer.Option(min=100, max=599, help="HTTP status of the answer.")] = None,
    within: Annotated[
        int | None, typer.Option(parser=parse_duration, metavar="TIME", help="Only entries this recent, such as 7d.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many, newest first.")] = 100,
    url: Url = None,
    json: Json = False,
) -> None:
    """List the audit trail: changes and refused accesses, with caller and address."""
    with connect(url) as client:
        entries = client.audit(
            limit=limit,
            tenant=tenant,
            actor=actor,
            credential=credential,
            address=address,
            route=route,
            about=about,
            request_id=request_id,
            status=status,
            since=None if within is None else time.time() - within,
        )
    columns: Columns = {
        "time": "created_at",
        **{name: name for name in ("tenant", "actor", "credential", "address")},
        "request": lambda each: f"{each.method} {each.route}",
        "about": "about",
        "status": "status",
    }
    print_table_result(entries, columns, empty="No entries.", json=json)


def quota(url: Url = None, json: Json = False) -> None:
    """Show your tenant's limits and its current use."""
    with connect(url) as client:
        found = client.quota()
    print_fields_result(found, _format_quota(found), json=json)


_RESOURCE_UNITS = (("gpus", "GPU"), ("cpus", "CPU core"))


def _format_quota(quota: Resource) -> dict[str, str]:
    stored = quota.max_stored_bytes
    return {
        "tenant": f"{quota.tenant}, weight {quota.weight:g} in the queue",
        "queued": _format_use(quota.queued_jobs, quota.max_queued_jobs, "job"),
        "running": _format_use(quota.running_jobs, quota.max_running_jobs, "job"),
        "GPUs": _format_use_by_kind(quota, "gpus", quota.gpus, quota.max_gpus, "GPU"),
        "CPUs": _format_use_by_kind(quota, "cpus", quota.cpus, quota.max_cpus, "CPU core"),
        "replicas": _format_use(quota.replicas, quota.max_replicas, "replica"),
        "stored jobs": _format_count_of_limit(quota.stored_jobs, quota.max_stored_jobs),
        "deployments": _format_count_of_limit(quota.deployments, quota.max_deployments),
        "files": _format_count_of_limit(quota.files, quota.max_files),
        "imported models": _format_count_of_limit(quota.imported_models, quota.max_imported_models),
        "aliases": _format_count_of_limit(quota.aliases, quota.max_aliases),
        "pending webhooks": _format_count_of_limit(quota.pending_deliveries, quota.max_pending_deliveries),
        "stored": format_size(quota.stored_bytes) + (", no limit" if stored is None else f" of {format_size(stored)}"),
        "cluster": _format_cluster_use(quota.cluster),
    }


def _format_cluster_use(use: dict[str, Any] | None) -> str:
    if use is None:
        return "unknown: Ray does not answer, or does not list its nodes"
    gpus, cpus = (_format_use(use[kind], use[f"total_{kind}"], thing) for kind, thing in _RESOURCE_UNITS)
    return f"{gpus} and {cpus} in use by all tenants"


def _format_use(number: float, most: float | None, thing: str) -> str:
    return f"{pluralize(number, thing)}, no limit" if most is None else f"{number:g} of {pluralize(most, thing)}"


def _format_count_of_limit(number: int, most: int | None) -> str:
    return f"{number:,}, no limit" if most is None else f"{number:,} of {most:,}"


def _format_use_by_kind(quota: Resource, kind: str, number: float, most: float | None, thing: str) -> str:
    holders = {"jobs": quota.held_by_jobs.get(kind, 0), "deployments": quota.held_by_deployments.get(kind, 0)}
    held = " and ".join(f"{amount:g} by {holder}" for holder, amount in holders.items() if amount)
    return _format_use(number, most, thing) + (f"; {held}" if held else "")
