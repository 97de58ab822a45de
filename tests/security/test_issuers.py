"""Keys of a real issuer over HTTP: rotated, withdrawn, damaged, and out of reach."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from swiftkv_platform.errors import UnauthenticatedError
from swiftkv_platform.security.tokens import REFETCH_INTERVAL_S, JWTVerifier
from tests.support.fakes.oidc_issuer import Issuer, write_issuers
from tests.support.waiting import eventually
from tests.unit.control_plane.routes.conftest import StillClock


def test_a_storm_of_unknown_key_ids_asks_the_issuer_no_more_often(
    issuer: Issuer, verifier: JWTVerifier, clock: StillClock
) -> None:
    def attack(number: int) -> None:
        with pytest.raises(UnauthenticatedError):
            verifier.authenticate(issuer.token(headers={"kid": f"made-up-{number}"}))

    with ThreadPoolExecutor(16) as threads:
        list(threads.map(attack, range(200)))
        assert issuer.asked.count("/keys") == 1
        clock.now += REFETCH_INTERVAL_S
        list(threads.map(attack, range(200)))
    assert issuer.asked.count("/keys") == 2
    assert verifier.authenticate(issuer.token()).name == "corp:alice"


def test_callers_with_known_keys_do_not_wait_for_an_issuer_that_hangs(
    issuer: Issuer, verifier: JWTVerifier, clock: StillClock
) -> None:
    verifier.authenticate(issuer.token())
    issuer.held = threading.Event()
    clock.now += 3600.0
    assert verifier.authenticate(issuer.token()).name == "corp:alice", "answered from cached keys"
    with ThreadPoolExecutor(32) as threads:
        storm = [
            threads.submit(verifier.authenticate, issuer.token(headers={"kid": f"made-up-{number}"}))
            for number in range(30)
        ]
        refused_at_once = 0
        while refused_at_once < 22:
            refused_at_once = sum(each.done() for each in storm)
            time.sleep(0.01)
        assert verifier.authenticate(issuer.token()).name == "corp:alice"
        issuer.held.set()
        assert all(isinstance(each.exception(), UnauthenticatedError) for each in storm)


def test_known_keys_hold_for_a_bounded_time_while_the_issuer_is_away(
    issuer: Issuer, tmp_path: Path, clock: StillClock
) -> None:
    config = issuer.config(keys_max_age_s=600, keys_stale_s=3600)
    verifier = JWTVerifier(write_issuers(tmp_path / "issuers.yaml", config), clock=clock)
    verifier.authenticate(issuer.token())
    issuer.answers = {"/keys": (503, b""), "/.well-known/openid-configuration": (503, b"")}
    for _ in range(7):
        clock.now += 600.0
        assert verifier.authenticate(issuer.token()).name == "corp:alice"
    clock.now += 1.0
    with pytest.raises(UnauthenticatedError):
        verifier.authenticate(issuer.token())
    issuer.answers.clear()
    clock.now += REFETCH_INTERVAL_S
    assert verifier.authenticate(issuer.token()).name == "corp:alice"


def test_a_key_that_the_issuer_rotates_to_is_fetched_and_a_withdrawn_one_holds_no_longer_than_the_keys_age(
    issuer: Issuer, verifier: JWTVerifier, clock: StillClock
) -> None:
    verifier.authenticate(issuer.token())
    issuer.rotate("second", "RS256")
    with pytest.raises(UnauthenticatedError, match="signing key"):
        verifier.authenticate(issuer.token("second"))
    clock.now += REFETCH_INTERVAL_S
    assert verifier.authenticate(issuer.token("second")).name == "corp:alice"
    del issuer.published[0]
    clock.now += 3600.0
    verifier.authenticate(issuer.token())  # starts the fetch

    def is_refused() -> bool:
        with suppress(UnauthenticatedError):
            return verifier.authenticate(issuer.token()).tenant != "acme"
        return True

    eventually(is_refused, "the withdrawn key is refused", seconds=20)
    assert verifier.authenticate(issuer.token("second")).name == "corp:alice"


def test_documents_that_are_not_right_open_nothing(issuer: Issuer, verifier: JWTVerifier, clock: StillClock) -> None:
    discovery = "/.well-known/openid-configuration"
    for where, status, body in (
        (discovery, 200, b'{"issuer": "https://evil.example", "jwks_uri": "x"}'),
        (discovery, 200, b"[]"),
        ("/keys", 200, b"x" * (1 << 19)),
        ("/keys", 200, b'{"keys": []}'),
        ("/keys", 200, b"[" * 100_000),
        ("/keys", 302, b""),
    ):
        issuer.answers = {where: (status, body)}
        with pytest.raises(UnauthenticatedError, match="signing key"):
            verifier.authenticate(issuer.token())
        clock.now += REFETCH_INTERVAL_S
    issuer.answers = {}
    assert verifier.authenticate(issuer.token()).name == "corp:alice"
