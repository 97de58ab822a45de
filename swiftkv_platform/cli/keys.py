"""`swiftkv keys`: the file of API keys that control plane and replicas read. Talks to no server."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Annotated

import typer

from swiftkv_platform.cli.context import Json, settings
from swiftkv_platform.cli.output import err, local_time, print_json, print_table, say
from swiftkv_platform.security.keys import ApiKey, KeyRing, Scope, create_key, revoke_key

keys_app = typer.Typer(no_args_is_help=True, help="API keys: the file that SWIFTKV_API_KEYS_FILE names.")

KeyFile = Annotated[
    Path | None, typer.Option("--file", help="Default: SWIFTKV_API_KEYS_FILE, else keys.json in the home directory.")
]
Name = Annotated[str, typer.Argument(help="Whose key it is.")]


_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LONGEST_S = 100 * 365 * 86400


def _duration(text: str) -> int:
    """Seconds of `90d`, `12h`, `30m` or `45s`."""
    match = re.fullmatch(r"([0-9]{1,10})([smhd])", text)
    seconds = int(match[1]) * _SECONDS[match[2]] if match else 0
    if not 0 < seconds <= _LONGEST_S:
        raise typer.BadParameter(f"{text!r} is no time; 90d, 12h, 30m or 45s would do, up to 36500d")
    return seconds


ExpiresIn = Annotated[
    int | None,
    typer.Option(
        parser=_duration, metavar="TIME", help="Refuse it after this time, such as 90d or 12h. Default: never."
    ),
]


@keys_app.command()
def create(
    name: Name,
    scope: Annotated[list[Scope], typer.Option(help="What it opens; may be repeated.")],
    tenant: Annotated[str, typer.Option(help="Keys of one tenant see the same jobs.")] = "default",
    expires_in: ExpiresIn = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="Most requests to each replica.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Most tokens of prompts and answers.")] = None,
    max_priority: Annotated[int, typer.Option(help="Lowest `priority` it may ask for; lower goes first.")] = 0,
    file: KeyFile = None,
    json: Json = False,
) -> None:
    """Add a key. It is printed once: the file keeps only its hash."""
    path = _path(file)
    expires_at = None if expires_in is None else int(time.time()) + expires_in
    token = create_key(
        path,
        name=name,
        tenant=tenant,
        scopes=frozenset(scope),
        expires_at=expires_at,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_priority=max_priority,
    )
    if json:
        told = {"name": name, "tenant": tenant, "scopes": sorted(scope), "expires_at": expires_at}
        print_json({**told, "key": token, "file": str(path)})
    else:
        typer.echo(token)
        err().print(f"Added to {path}. Callers send it as SWIFTKV_API_KEY.", highlight=False, soft_wrap=True)


@keys_app.command("list")
def list_keys(file: KeyFile = None, json: Json = False) -> None:
    """List names, tenants, scopes and when keys expire."""
    keys = KeyRing(_path(file)).read()
    if json:
        print_json({"keys": [key.model_dump(mode="json", exclude={"sha256"}) for key in keys]})
    else:
        rows = [(key.name, key.tenant, ", ".join(sorted(key.scopes)), _expiry(key)) for key in keys]
        print_table(("name", "tenant", "scopes", "expires"), rows, empty="No keys: nobody is let in.")


@keys_app.command()
def revoke(name: Name, file: KeyFile = None, json: Json = False) -> None:
    """Take a key away; the next request with it is refused."""
    revoke_key(_path(file), name)
    if json:
        print_json({"revoked": name})
    else:
        say(f"Revoked {name}.")


def _expiry(key: ApiKey) -> str | None:
    when = local_time(key.expires_at)
    return f"{when} (expired)" if key.has_expired(time.time()) else when


def _path(file: Path | None) -> Path:
    chosen = settings()
    return file or chosen.api_keys_file or chosen.home / "keys.json"
