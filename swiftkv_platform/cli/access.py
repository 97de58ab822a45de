"""`swiftkv keys`, `audit` and `quota`: API keys, the audit trail and quotas.

`keys` edits the API keys file that the control plane and replicas read. It needs no server.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftkv_platform.cli.context import Json, Url, connect, load_settings
from swiftkv_platform.cli.output import (
    Columns,
    format_local_time,
    get_error_console,
    print_json,
    print_result,
    print_table,
    print_table_result,
)
from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError
from swiftkv_platform.local.formats import format_size, pluralize
from swiftkv_platform.security.principals import Scope

if TYPE_CHECKING:
    from swiftkv_platform.client import Resource
    from swiftkv_platform.security.keys import ApiKey

keys_app = typer.Typer(no_args_is_help=True, add_completion=False)

KeysFile = Annotated[
    Path | None,
    typer.Option("--file", help="API keys file. Default: SWIFTKV_API_KEYS_FILE, else keys.json in SWIFTKV_HOME."),
]
CallerName = Annotated[str, typer.Argument(help="Name of the caller, e.g. a user or service.")]


_SECONDS_BY_UNIT = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_DURATION_S = 100 * 365 * 86400


def parse_duration(text: str) -> int:
    """Convert `90d`, `12h`, `30m` or `45s` to seconds. Raises `typer.BadParameter`."""
    match = re.fullmatch(r"([0-9]{1,10})([smhd])", text)
    seconds = int(match[1]) * _SECONDS_BY_UNIT[match[2]] if match else 0
    if not 0 < seconds <= _MAX_DURATION_S:
        raise typer.BadParameter(f"{text!r} is not a duration; expected e.g. 90d, 12h, 30m or 45s (max 36500d)")
    return seconds


ExpiresIn = Annotated[
    int | None,
    typer.Option(
        parser=parse_duration, metavar="TIME", help="Time until the key expires, e.g. 90d or 12h. Default: never."
    ),
]
NotBefore = Annotated[
    int | None,
    typer.Option(
        "--begins-in", parser=parse_duration, metavar="TIME", help="Time until the key becomes valid. Default: now."
    ),
]
Overlap = Annotated[
    int,
    typer.Option(parser=parse_duration, metavar="TIME", help="How long previous keys stay valid after the new one is."),
]


@keys_app.command()
def create(
    name: CallerName,
    scope: Annotated[list[Scope], typer.Option(help="Permission of the key. Repeatable.")],
    tenant: Annotated[str, typer.Option(help="Tenant. Keys of a tenant share jobs, models and quotas.")] = "default",
    expires_in: ExpiresIn = None,
    begins_in: NotBefore = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Max requests per minute and replica.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(help="Max prompt and completion tokens per minute and replica.")
    ] = None,
    max_priority: Annotated[
        int, typer.Option(help="Lowest `priority` that requests with this key may set; lower values run first.")
    ] = 0,
    operator: Annotated[bool, typer.Option("--operator", help="Allow reading the audit trail of all tenants.")] = False,
    file: KeysFile = None,
    json: Json = False,
) -> None:
    """Create an API key. The key is printed once; the file stores only its hash."""
    from swiftkv_platform.security.keys import KeyRing, create_key

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
    key = KeyRing(path).find_key(token)
    assert key is not None, "create_key added it"
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
    """Create a key with the same permissions as the caller's newest key. Earlier keys expire after --overlap.

    The new key is printed once. `swiftkv keys list` shows when the old keys were last used.
    """
    from swiftkv_platform.security.keys import rotate_key

    path, now = _resolve_keys_file(file), int(time.time())
    token, key = rotate_key(path, name, now=now, overlap_s=overlap, **_compute_validity(now, expires_in, begins_in))
    _print_new_key(key, token, path, "Rotated in", json=json)


@keys_app.command("list")
def list_keys(file: KeysFile = None, json: Json = False) -> None:
    """List API keys with scopes, validity and last use at the control plane."""
    from swiftkv_platform.security.keys import KeyRing

    keys, last_used = KeyRing(_resolve_keys_file(file)).list_keys(), _load_last_uses()
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
    print_table(columns, rows, empty="No keys: all requests are rejected. Create one with `swiftkv keys create`.")


@keys_app.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Caller name (all its keys), or key id.")],
    file: KeysFile = None,
    json: Json = False,
) -> None:
    """Revoke all keys of a caller, or one key by id. Takes effect at the next request."""
    from swiftkv_platform.security.keys import revoke_key

    revoked = revoke_key(_resolve_keys_file(file), name)
    line = f"Revoked {name}." if len(revoked) == 1 else f"Revoked {len(revoked)} keys of {name}."
    print_result({"revoked": name, "ids": [key.id for key in revoked]}, line, json=json)


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
    """Return (whether the local control plane requires the file's keys now, advice on what to do next)."""
    from swiftkv_platform.local.stack import Stack
    from swiftkv_platform.settings import get_default_keys_file

    chosen = load_settings()
    state = Stack(chosen).load_state()
    is_default = path.absolute() == (chosen.api_keys_file or get_default_keys_file(chosen.home)).absolute()
    is_running = state is not None and state.is_alive("control-plane")
    if state is not None and is_running and state.operator_files.get("api_keys_file") == path.absolute():
        return True, "The running control plane reads the file at the next request."
    if not is_default:
        advice = f"To use this file, set SWIFTKV_API_KEYS_FILE={path.absolute()} and run `swiftkv up`."
    elif is_running:
        advice = "The running control plane requires no keys yet; run `swiftkv up` to restart it with this file."
    else:
        advice = (
            "Requests need a key after the next `swiftkv up`. If the control plane runs on another machine, copy the "
            "file there."
        )
    return False, advice


def _load_last_uses() -> Mapping[str, int]:
    """Return the time of last use by key id from the control plane's database; empty if unreadable."""
    chosen = load_settings()
    if chosen.database_url is None and not (chosen.home / "swiftkv.db").exists():
        return {}  # opening the SQLite file would create it
    from swiftkv_platform.control_plane.access.sessions import list_last_uses  # other commands need no SQL
    from swiftkv_platform.control_plane.database.session import open_database

    try:
        with closing(open_database(chosen)) as database:
            database.check_schema()
            return list_last_uses(database)
    except (DatabaseUnavailableError, InvalidInputError) as error:
        get_error_console().print(
            f"Cannot read last uses: {error.message}", highlight=False, soft_wrap=True, markup=False
        )
        return {}


def _compute_validity(now: int, expires_in: int | None, begins_in: int | None) -> dict[str, int | None]:
    """Convert seconds from now to Unix times."""
    seconds = {"expires_at": expires_in, "not_before": begins_in}
    return {name: None if each is None else now + each for name, each in seconds.items()}


def _resolve_keys_file(file: Path | None) -> Path:
    from swiftkv_platform.settings import get_default_keys_file

    chosen = load_settings()
    return file or chosen.api_keys_file or get_default_keys_file(chosen.home)


ExactFilter = Annotated[str | None, typer.Option(metavar="TEXT", help="Show only entries with this exact value.")]


def audit(
    tenant: ExactFilter = None,
    actor: ExactFilter = None,
    credential: ExactFilter = None,
    address: ExactFilter = None,
    route: ExactFilter = None,
    about: ExactFilter = None,
    request_id: ExactFilter = None,
    status: Annotated[int | None, typer.Option(min=100, max=599, help="HTTP status code.")] = None,
    within: Annotated[
        int | None,
        typer.Option(parser=parse_duration, metavar="TIME", help="Show only entries of this period, e.g. 7d."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Max entries, newest first.")] = 100,
    url: Url = None,
    json: Json = False,
) -> None:
    """List the audit trail: changes and denied requests, with caller and address."""
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
    """Show your tenant's quotas and current usage."""
    with connect(url) as client:
        found = client.quota()
    print_result(found, _format_quota(found), json=json)


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
        return "unknown: Ray is unavailable or lists no nodes"
    gpus, cpus = (_format_use(use[kind], use[f"total_{kind}"], thing) for kind, thing in _RESOURCE_UNITS)
    return f"{gpus} and {cpus} in use by all tenants"


def _format_use(number: float, limit: float | None, unit: str) -> str:
    return f"{pluralize(number, unit)}, no limit" if limit is None else f"{number:g} of {pluralize(limit, unit)}"


def _format_count_of_limit(number: int, limit: int | None) -> str:
    return f"{number:,}, no limit" if limit is None else f"{number:,} of {limit:,}"


def _format_use_by_kind(quota: Resource, kind: str, number: float, limit: float | None, unit: str) -> str:
    users = {"jobs": quota.held_by_jobs.get(kind, 0), "deployments": quota.held_by_deployments.get(kind, 0)}
    parts = " and ".join(f"{amount:g} by {user}" for user, amount in users.items() if amount)
    return _format_use(number, limit, unit) + (f"; {parts}" if parts else "")
