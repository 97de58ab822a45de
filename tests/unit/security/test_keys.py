"""The key file: keys are told once, kept as hashes, and gone when revoked."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from swiftkv_platform.errors import (
    ConflictError,
    ForbiddenError,
    InvalidInputError,
    NotFoundError,
    UnauthenticatedError,
)
from swiftkv_platform.security.keys import KeyRing, Scope, create_key, revoke_key

READ = frozenset({Scope.JOBS_READ})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "keys.json"


def test_a_key_opens_what_it_was_made_for(path: Path) -> None:
    token = create_key(path, name="ann", tenant="acme", scopes=READ)
    key = KeyRing(path).authenticate(f"Bearer {token}")
    assert (key.name, key.tenant) == ("ann", "acme")
    key.require(Scope.JOBS_READ)
    with pytest.raises(ForbiddenError, match=r"'ann' has the scopes jobs:read; this needs deploy"):
        key.require(Scope.DEPLOY)


def test_a_key_goes_before_others_only_as_far_as_it_may(path: Path) -> None:
    create_key(path, name="ann", tenant="acme", scopes=READ)
    create_key(path, name="bob", tenant="acme", scopes=READ, max_priority=-5)
    assert [key.max_priority for key in KeyRing(path).read()] == [0, -5]


def test_admin_opens_everything(path: Path) -> None:
    token = create_key(path, name="root", tenant="acme", scopes=frozenset({Scope.ADMIN}))
    key = KeyRing(path).authenticate(f"bearer  {token}")
    for scope in Scope:
        key.require(scope)


def test_the_file_keeps_hashes_that_only_its_owner_reads(path: Path) -> None:
    token = create_key(path, name="ann", tenant="acme", scopes=READ)
    assert token not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [file.name for file in path.parent.iterdir()] == ["keys.json"]


def test_a_ring_follows_its_file(path: Path) -> None:
    first = create_key(path, name="ann", tenant="acme", scopes=READ)
    ring = KeyRing(path)
    second = create_key(path, name="bob", tenant="acme", scopes=READ)
    assert ring.authenticate(f"Bearer {second}").name == "bob"
    revoke_key(path, "ann")
    with pytest.raises(UnauthenticatedError, match="unknown, or was revoked"):
        ring.authenticate(f"Bearer {first}")
    assert [key.name for key in ring.read()] == ["bob"]


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer  ", "Basic abc", "skv_abc"])
def test_anything_but_a_bearer_key_is_refused(path: Path, header: str | None) -> None:
    create_key(path, name="ann", tenant="acme", scopes=READ)
    with pytest.raises(UnauthenticatedError, match="Authorization: Bearer"):
        KeyRing(path).authenticate(header)


def test_names_are_checked(path: Path) -> None:
    create_key(path, name="ann", tenant="acme", scopes=READ)
    with pytest.raises(ConflictError, match="'ann'"):
        create_key(path, name="ann", tenant="other", scopes=READ)
    with pytest.raises(InvalidInputError, match="tenant is 'a/b'"):
        create_key(path, name="bob", tenant="a/b", scopes=READ)
    with pytest.raises(NotFoundError, match="'carol'"):
        revoke_key(path, "carol")


def test_a_file_that_cannot_be_used_is_named(path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"keys\.json"):
        KeyRing(path)
    path.parent.mkdir()
    path.write_text("{}x")
    with pytest.raises(InvalidInputError, match=r"keys\.json"):
        KeyRing(path)
