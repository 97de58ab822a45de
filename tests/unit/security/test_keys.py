"""The key file, and signatures of webhooks by the published example of standardwebhooks.com."""

import json
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pydantic import ValidationError
from standardwebhooks import Webhook, WebhookVerificationError

from swiftkv_platform.control_plane.webhooks import Secret
from swiftkv_platform.errors import (
    ConflictError,
    ForbiddenError,
    InvalidInputError,
    NotFoundError,
    UnauthenticatedError,
)
from swiftkv_platform.security.keys import KeyRing, Scope, create_key, revoke_key, rotate_key
from swiftkv_platform.specs.job import WebhookSpec

READ = frozenset({Scope.JOBS_READ})


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "new" / "keys.json"


def test_a_key_opens_what_it_was_made_for(path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"keys\.json"):
        KeyRing(path)
    token = create_key(path, name="ann", tenant="acme", scopes=READ)
    key = KeyRing(path).authenticate(f"Bearer {token}")
    assert (key.name, key.tenant, key.max_priority) == ("ann", "acme", 0)
    key.require_scope(Scope.JOBS_READ)
    with pytest.raises(ForbiddenError, match=r"'ann' has the scopes jobs:read; this request needs the scope deploy"):
        key.require_scope(Scope.DEPLOY)
    token = create_key(path, name="root", tenant="acme", scopes=frozenset({Scope.ADMIN}), max_priority=-5)
    root = KeyRing(path).authenticate(f"bearer  {token}")
    assert root.max_priority == -5
    for scope in Scope:
        root.require_scope(scope)


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
    assert [key.name for key in ring.list_keys()] == ["bob"]


def test_anything_but_a_bearer_key_is_refused(path: Path) -> None:
    create_key(path, name="ann", tenant="acme", scopes=READ)
    for header in (None, "", "Bearer", "Bearer  ", "Basic abc", "skv_abc"):
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


def test_a_rotated_key_and_the_one_before_it_hold_together_for_the_overlap(path: Path) -> None:
    first = create_key(path, name="ann", tenant="acme", scopes=READ, requests_per_minute=7, max_priority=-2)
    now = 1000
    ring = KeyRing(path, clock=lambda: now)
    second, told = rotate_key(path, "ann", now=now, overlap_s=100, expires_at=5000)
    old, new = (ring.authenticate(f"Bearer {token}") for token in (first, second))
    assert new == told
    assert (old.id != new.id, old.name, new.name) == (True, "ann", "ann")
    rights = {"tenant", "scopes", "requests_per_minute", "max_priority"}
    assert new.model_dump(include=rights) == old.model_dump(include=rights)
    assert (old.expires_at, new.expires_at) == (1100, 5000)
    now = 1100
    assert ring.authenticate(f"Bearer {second}").id == new.id
    with pytest.raises(UnauthenticatedError, match="expired at 1970-01-01 00:18:20 UTC"):
        ring.authenticate(f"Bearer {first}")
    third, _ = rotate_key(path, "ann", now=now, overlap_s=100)
    assert [key.sha256 in path.read_text() for key in (old, new)] == [False, True], "an expired key leaves the file"
    assert ring.authenticate(f"Bearer {third}").expires_at is None


def test_a_key_that_begins_later_leaves_the_one_before_it_to_hold_until_then(path: Path) -> None:
    first = create_key(path, name="ann", tenant="acme", scopes=READ, expires_at=2500)
    now = 1000
    ring = KeyRing(path, clock=lambda: now)
    second, _ = rotate_key(path, "ann", now=now, overlap_s=100, not_before=2000)
    assert ring.authenticate(f"Bearer {first}").expires_at == 2100
    with pytest.raises(UnauthenticatedError, match="is valid from 1970-01-01 00:33:20 UTC"):
        ring.authenticate(f"Bearer {second}")
    now = 2000
    assert {ring.authenticate(f"Bearer {token}").name for token in (first, second)} == {"ann"}
    with pytest.raises(InvalidInputError, match="expires_at is 1500, not after not_before"):
        rotate_key(path, "ann", now=now, overlap_s=100, not_before=2000, expires_at=1500)
    with pytest.raises(NotFoundError, match="'bob'"):
        rotate_key(path, "bob", now=now, overlap_s=100)


def test_one_key_of_an_owner_is_revoked_by_its_id_and_all_by_the_name(path: Path) -> None:
    first = create_key(path, name="ann", tenant="acme", scopes=READ)
    second, new = rotate_key(path, "ann", now=1000, overlap_s=10**10)
    ring = KeyRing(path)
    assert [key.id for key in revoke_key(path, ring.authenticate(f"Bearer {first}").id)] != [new.id]
    assert ring.authenticate(f"Bearer {second}") == new
    with pytest.raises(UnauthenticatedError):
        ring.authenticate(f"Bearer {first}")
    rotate_key(path, "ann", now=1000, overlap_s=10**10)
    assert len(revoke_key(path, "ann")) == 2
    assert ring.list_keys() == []


def test_keys_that_are_made_at_the_same_time_are_all_kept(path: Path) -> None:
    def make(number: int) -> str:
        return create_key(path, name=f"key{number}", tenant="acme", scopes=READ)

    with ThreadPoolExecutor(8) as threads:
        tokens = list(threads.map(make, range(24)))
    ring = KeyRing(path)
    assert {ring.authenticate(f"Bearer {token}").name for token in tokens} == {f"key{n}" for n in range(24)}


def test_a_file_without_what_is_new_is_read_by_the_version_before(path: Path) -> None:
    """A key without new features has only known fields, since replicas of an older image refuse others."""
    create_key(path, name="ann", tenant="acme", scopes=READ, expires_at=5000, max_priority=-1)
    [line] = json.loads(path.read_text())["keys"]
    assert set(line) <= {"name", "tenant", "scopes", "sha256", "expires_at", "max_priority"}


SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

BODY = b'{"test": 2432232314}'

HEADERS = {
    "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
    "webhook-timestamp": "1614265330",
    "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
}


def test_a_signature_is_the_standards() -> None:
    signature = Secret.parse(SECRET, name="s").sign(HEADERS["webhook-id"], 1614265330, BODY)
    assert signature == HEADERS["webhook-signature"]


@pytest.mark.parametrize("secret", [SECRET, "a secret that is no base64"])
def test_the_standards_own_library_verifies_what_is_signed(secret: str) -> None:
    now = int(time.time())
    headers = {
        "webhook-id": "msg_å",
        "webhook-timestamp": str(now),
        "webhook-signature": Secret.parse(secret, name="s").sign("msg_å", now, BODY),
    }
    receiver = Webhook(secret if secret == SECRET else secret.encode())
    assert receiver.verify(BODY, headers) == {"test": 2432232314}
    with pytest.raises(WebhookVerificationError):
        receiver.verify(BODY + b" ", headers)


def test_a_secret_is_shown_nowhere_and_an_address_has_none() -> None:
    assert "hush" not in repr(Secret.parse("hush hush hush hush", name="s"))
    for text in ("short", "whsec_!!!"):
        with pytest.raises(InvalidInputError) as caught:
            Secret.parse(text, name="mine")
        assert text not in str(caught.value)
    tricks = (
        "https://user:pass@host/",
        "https://host/?token=1",
        "https://host/#x",
        "https://evil.example\\.good.example/",
    )
    for url in ("ftp://host/x", "host/x", "https://", *tricks, "https://host:99999/", "https://[::1/"):
        with pytest.raises(ValidationError):
            WebhookSpec(url=url, secret_ref="s")
