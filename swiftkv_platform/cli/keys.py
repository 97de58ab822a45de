"""`swiftkv keys`: the file of API keys that control plane and replicas read. Talks to no server; `list` reads the last
uses from the control plane's database."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import typer

from swiftkv_platform.cli.context import Json, settings
from swiftkv_platform.cli.output import err, local_time, print_json, print_table, say
from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError
from swiftkv_platform.security.keys import ApiKey, KeyRing, create_key, revoke_key, rotate_key
from swiftkv_platform.security.principals import Scope
from swiftkv_platform.settings import Settings

keys_app = typer.Typer(no_args_is_help=True, help="API keys: the file that SWIFTKV_API_KEYS_FILE names.")

KeyFile = Annotated[
    Path | None, typer.Option("--file", help="Default: SWIFTKV_API_KEYS_FILE, else keys.json in the home directory.")
]
Name = Annotated[str, typer.Argument(help="Whose key it is.")]


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_S = 100 * 365 * 86400


def duration(text: str) -> int:
    """Seconds of `90d`, `12h`, `30m` or `45s`."""
    match = re.fullmatch(r"([0-9]{1,10})([smhd])", text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_S:
        raise typer.BadParameter(f"{text!r} is no time; 90d, 12h, 30m or 45s would do, up to 36500d")
    return seconds


ExpiresIn = Annotated[
    int | None,
    typer.Option(
        parser=duration, metavar="TIME", help="Refuse it after this time, such as 90d or 12h. Default: never."
    ),
]
NotBefore = Annotated[
    int | None,
    typer.Option("--begins-in", parser=duration, metavar="TIME", help="Refuse it until then. Default: it holds now."),
]
Overlap = Annotated[
    int,
    typer.Option(parser=duration, metavar="TIME", help="How long the keys before it hold on."),
]


@keys_app.command()
def create(
    name: Name,
    scope: Annotated[list[Scope], typer.Option(help="What it opens; may be repeated.")],
    tenant: Annotated[str, typer.Option(help="Keys of one tenant see the same jobs.")] = "default",
    expires_in: ExpiresIn = None,
    begins_in: NotBefore = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Most requests to each replica.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Most tokens of prompts and answers.")] = None,
    max_priority: Annotated[int, typer.Option(help="Lowest `priority` it may ask for; lower goes first.")] = 0,
    operator: Annotated[bool, typer.Option("--operator", help="Let it read the audit trail of all tenants.")] = False,
    file: KeyFile = None,
    json: Json = False,
) -> None:
    """Add a key. It is printed once: the file keeps only its hash."""
    path, now = _path(file), int(time.time())
    expires_at, not_before = _from_now(expires_in, now), _from_now(begins_in, now)
    token = create_key(
        path,
        name=name,
        tenant=tenant,
        scopes=frozenset(scope),
        expires_at=expires_at,
        not_before=not_before,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_priority=max_priority,
        operator=operator,
    )
    key = KeyRing(path).find(token)
    assert key is not None, "it was added a moment ago"
    _tell(key, token, path, "Added to", json=json)


@keys_app.command()
def rotate(
    name: Name,
    overlap: Overlap = "7d",  # type: ignore[assignment]  # typer parses defaults as well
    expires_in: ExpiresIn = None,
    begins_in: NotBefore = None,
    file: KeyFile = None,
    json: Json = False,
) -> None:
    """Add another key with the rights of the newest one; the keys before it hold on for the overlap.

    The new key is printed once. Hand it out, look at `swiftkv keys list` for the last use of the old one, and let that
    end, or revoke it by its id.
    """
    path, now = _path(file), int(time.time())
    token, key = rotate_key(
        path,
        name,
        now=now,
        overlap_s=overlap,
        expires_at=_from_now(expires_in, now),
        not_before=_from_now(begins_in, now),
    )
    _tell(key, token, path, "Rotated in", json=json)


@keys_app.command("list")
def list_keys(file: KeyFile = None, json: Json = False) -> None:
    """List ids, names, tenants, scopes, when keys begin and expire, and when control planes last saw them."""
    keys, last_used = KeyRing(_path(file)).read(), _last_used()
    if json:
        print_json({"keys": [_figures(key, last_used.get(key.id)) for key in keys]})
    else:
        rows = [
            (
                key.id,
                key.name,
                key.tenant,
                ", ".join(sorted(key.scopes)),
                _beginning(key),
                _expiry(key),
                local_time(last_used.get(key.id)),
            )
            for key in keys
        ]
        columns = ("id", "name", "tenant", "scopes", "begins", "expires", "last used")
        print_table(columns, rows, empty="No keys: no caller is let in.")


@keys_app.command()
def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Whose keys, or the id of one of them.")],
    file: KeyFile = None,
    json: Json = False,
) -> None:
    """Take all keys of a name away, or the one with an id; the next request with one is refused."""
    gone = revoke_key(_path(file), name)
    if json:
        print_json({"revoked": name, "ids": [key.id for key in gone]})
    else:
        say(f"Revoked {name}." if len(gone) == 1 else f"Revoked {name}: {len(gone)} keys.")


def _tell(key: ApiKey, token: str, path: Path, done: str, *, json: bool) -> None:
    if json:
        told = key.model_dump(mode="json", include={"name", "tenant", "scopes", "expires_at", "not_before"})
        print_json({"id": key.id, **told, "scopes": sorted(key.scopes), "key": token, "file": str(path)})
    else:
        typer.echo(token)
        err().print(f"{done} {path}. Callers send it as SWIFTKV_API_KEY.", highlight=False, soft_wrap=True)


def _figures(key: ApiKey, last_used: int | None) -> dict[str, Any]:
    return {"id": key.id, **key.model_dump(mode="json", exclude={"sha256"}), "last_used_at": last_used}


def _last_used() -> Mapping[str, int]:
    """Last uses by key id, from the database of the control plane whose settings these are; empty where it has none."""
    chosen = settings()
    if not _has_database(chosen):
        return {}
    from swiftkv_platform.database.key_uses import SqlKeyUses  # other commands do without SQL
    from swiftkv_platform.database.session import Database

    try:
        with closing(Database(chosen.resolved_database_url)) as database:
            database.check_schema()
            return SqlKeyUses(database).all()
    except (DatabaseUnavailableError, InvalidInputError) as error:
        err().print(f"Last uses are unknown: {error.message}", highlight=False, soft_wrap=True, markup=False)
        return {}


def _has_database(chosen: Settings) -> bool:
    """Whether there is a database to look at: opening an SQLite file would make it."""
    return chosen.database_url is not None or (chosen.home / "swiftkv.db").exists()


def _from_now(seconds: int | None, now: int) -> int | None:
    return None if seconds is None else now + seconds


def _beginning(key: ApiKey) -> str | None:
    return None if key.has_begun(time.time()) else local_time(key.not_before)


def _expiry(key: ApiKey) -> str | None:
    when = local_time(key.expires_at)
    return f"{when} (expired)" if key.has_expired(time.time()) else when


def _path(file: Path | None) -> Path:
    chosen = settings()
    return file or chosen.api_keys_file or chosen.home / "keys.json"
