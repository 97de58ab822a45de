"""Tokens of an issuer, over HTTP from a real one: who is let in, what attackers send, and an issuer that is away."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jwt
import pytest
import yaml
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fastapi import Request
from fastapi.testclient import TestClient
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swiftkv_platform.errors import ForbiddenError, InvalidInputError, UnauthenticatedError
from swiftkv_platform.security.credentials import Credentials, open_credentials
from swiftkv_platform.security.keys import create_key
from swiftkv_platform.security.principals import Scope
from swiftkv_platform.security.signing_keys import REFETCH_INTERVAL_S
from swiftkv_platform.security.tokens import TokenVerifier
from swiftkv_platform.serve.access import Gate
from swiftkv_platform.settings import Settings
from tests.fakes.oidc_issuer import Issuer, make_key, public_jwk, run_issuer
from tests.unit.api.conftest import SPEC, control_plane, make_parts

Craft = Callable[[Issuer], str]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def issuer() -> Iterator[Issuer]:
    with run_issuer() as issuer:
        yield issuer


@pytest.fixture
def path(tmp_path: Path, issuer: Issuer) -> Path:
    return write(tmp_path / "issuers.yaml", issuer.config())


def write(path: Path, *issuers: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"issuers": list(issuers)}))
    return path


@pytest.fixture
def plane(tmp_path: Path, empty_database: Path, path: Path) -> Iterator[TestClient]:
    chosen = Settings(home=tmp_path, oidc_file=path, host="0.0.0.0", _env_file=None)
    with control_plane(make_parts(tmp_path, empty_database), chosen, "https://swiftkv.example") as client:
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_a_token_opens_what_its_claims_say(issuer: Issuer, path: Path, algorithm: str) -> None:
    issuer.rotate("new", algorithm)
    caller = TokenVerifier(path).authenticate(issuer.token("new", scope="other swiftkv-user"))
    assert (caller.name, caller.tenant, caller.credential) == ("corp:alice", "acme", "corp:alice")
    assert caller.scopes == {Scope.JOBS_READ, Scope.GENERATE}
    assert not caller.operator
    with pytest.raises(ForbiddenError):
        caller.require(Scope.DEPLOY)


def test_a_token_drives_the_control_plane(issuer: Issuer, plane: TestClient) -> None:
    admin, user = bearer(issuer.token()), bearer(issuer.token(scope="swiftkv-user", tenant="other"))
    job = plane.post("/jobs", json=SPEC, headers=admin).json()
    assert (job["tenant"], job["created_by"]) == ("acme", "corp:alice")
    assert plane.get(f"/jobs/{job['id']}", headers=user).status_code == 404
    assert plane.post("/jobs", json=SPEC, headers=user).status_code == 403
    assert plane.get("/jobs", headers=bearer(issuer.token(scope="none"))).status_code == 403
    assert plane.get("/jobs").status_code == 401
    assert 'swiftkv_operator_file_usable{file="oidc"} 1.0' in plane.get("/metrics").text


def test_the_dashboard_takes_a_token_until_it_expires(issuer: Issuer, plane: TestClient) -> None:
    token = issuer.token(sub="a-long-name" * 10)
    assert plane.post("/session", json={"api_key": token}).status_code == 204
    assert plane.get("/jobs").status_code == 200
    assert plane.get("/session").json()["session"]["tenant"] == "acme"


def test_keys_and_tokens_are_taken_side_by_side(issuer: Issuer, path: Path, tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys.json", name="ann", tenant="acme", scopes=frozenset({Scope.ADMIN}))
    both = open_credentials(tmp_path / "keys.json", path)
    assert both is not None
    assert both.authenticate(f"Bearer {key}").name == "ann"
    assert both.authenticate(f"Bearer {issuer.token()}").name == "corp:alice"
    for wrong in ("a.b.c", "skv_a.b.c", "abc"):
        with pytest.raises(UnauthenticatedError):
            both.authenticate(f"Bearer {wrong}")
    only_tokens = open_credentials(None, path)
    assert only_tokens is not None
    with pytest.raises(UnauthenticatedError, match="trusted issuer"):
        only_tokens.authenticate(f"Bearer {key}")


@pytest.mark.parametrize("tenant", ["acme", None])
async def test_a_replica_answers_tokens_of_its_tenant(issuer: Issuer, path: Path, tenant: str | None) -> None:
    gate = Gate(open_credentials(None, path), tenant=tenant)

    def request(**claims: Any) -> Request:
        headers = [(b"authorization", f"Bearer {issuer.token(**claims)}".encode())]
        return Request({"type": "http", "method": "POST", "path": "/generate", "headers": headers, "state": {}})

    assert (await gate.let_in(request(scope=["swiftkv-user"]))).tenant == "acme"
    with pytest.raises(ForbiddenError):
        await gate.let_in(request(scope="nothing"))
    if tenant is not None:
        with pytest.raises(ForbiddenError, match="of tenant 'other'"):
            await gate.let_in(request(tenant="other"))


def test_claims_are_mapped_as_the_file_says(issuer: Issuer, tmp_path: Path) -> None:
    config = issuer.config(
        subject_claim="email",
        tenant_claim="https://corp.example/group",
        tenants={"G-1": "research"},
        scopes_claim="realm_access.roles",
        operators=["root"],
        requests_per_minute=7,
    )
    verifier = TokenVerifier(write(tmp_path / "issuers.yaml", config))
    claims = {
        "email": "a@b.c",
        "https://corp.example/group": "G-1",
        "realm_access": {"roles": ["root", "swiftkv-user"]},
    }
    caller = verifier.authenticate(issuer.token(**claims))
    assert (caller.name, caller.tenant, caller.operator, caller.requests_per_minute) == (
        "corp:a@b.c",
        "research",
        True,
        7,
    )
    with pytest.raises(UnauthenticatedError, match="names no tenant"):
        verifier.authenticate(issuer.token(**{**claims, "https://corp.example/group": "research"}))


def encoded(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def by_hand(issuer: Issuer, header: dict[str, Any], sign: Callable[[bytes], bytes], **claims: Any) -> str:
    signed = f"{encoded(header)}.{encoded(issuer.claims(**claims))}"
    return f"{signed}.{base64.urlsafe_b64encode(sign(signed.encode())).rstrip(b'=').decode()}"


def signer(issuer: Issuer) -> Callable[[bytes], bytes]:
    """A good signature with the issuer's own key."""
    return lambda signed: jwt.get_algorithm_by_name("ES256").sign(signed, issuer.keys["first"][1])


def hmac_with_the_public_key(issuer: Issuer) -> str:
    """Algorithm confusion: the published key is the secret of an HMAC."""
    pem = issuer.keys["first"][1].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return by_hand(
        issuer, {"alg": "HS256", "kid": "first"}, lambda signed: hmac.new(pem, signed, hashlib.sha256).digest()
    )


def own_key(issuer: Issuer, **headers: Any) -> str:
    key = make_key("ES256")
    return jwt.encode(issuer.claims(), key, "ES256", headers={"kid": "first", **headers})  # type: ignore[arg-type]


def with_own_key_in_the_header(issuer: Issuer) -> str:
    key = make_key("ES256")
    jwk = public_jwk(key, "first")
    return jwt.encode(issuer.claims(), key, "ES256", headers={"kid": "first", "jwk": jwk})  # type: ignore[arg-type]


def tampered(issuer: Issuer) -> str:
    header, _, signature = issuer.token().split(".")
    return f"{header}.{encoded(issuer.claims(tenant='victim'))}.{signature}"


def of_the_wrong_kind_of_key(issuer: Issuer) -> str:
    """An RSA signature that names the id of a P-256 key."""
    key = make_key("RS256")
    return jwt.encode(issuer.claims(), key, "RS256", headers={"kid": "first"})  # type: ignore[arg-type]


ATTACKS: dict[str, Craft] = {
    "expired": lambda issuer: issuer.token(exp=int(time.time()) - 120),
    "not yet": lambda issuer: issuer.token(nbf=int(time.time()) + 600),
    "issued in the future": lambda issuer: issuer.token(iat=int(time.time()) + 600),
    "another audience": lambda issuer: issuer.token(aud="mail"),
    "other audiences": lambda issuer: issuer.token(aud=["mail", "files"]),
    "no audience": lambda issuer: issuer.token(aud=None),
    "no end": lambda issuer: issuer.token(exp=None),
    "another issuer": lambda issuer: issuer.token(iss="https://evil.example"),
    "nearly the issuer": lambda issuer: issuer.token(iss=f"{issuer.url}/"),
    "no issuer": lambda issuer: issuer.token(iss=None),
    "issuer of another type": lambda issuer: by_hand(
        issuer, {"alg": "ES256", "kid": "first"}, lambda _: b"x" * 64, iss=["a"]
    ),
    "no algorithm": lambda issuer: by_hand(issuer, {"alg": "none", "kid": "first"}, lambda _: b""),
    "algorithm of no name": lambda issuer: by_hand(issuer, {"alg": "nOnE", "kid": "first"}, lambda _: b""),
    "public key as secret": hmac_with_the_public_key,
    "own key": own_key,
    "own key in the header": with_own_key_in_the_header,
    "own key by address": lambda issuer: own_key(issuer, jku="http://127.0.0.1:9/keys", x5u="http://127.0.0.1:9/"),
    "wrong kind of key": of_the_wrong_kind_of_key,
    "no key id": lambda issuer: by_hand(issuer, {"alg": "ES256"}, signer(issuer)),
    "key id of another type": lambda issuer: by_hand(issuer, {"alg": "ES256", "kid": 7}, signer(issuer)),
    "extensions": lambda issuer: by_hand(issuer, {"alg": "ES256", "kid": "first", "crit": ["x"]}, signer(issuer)),
    "tampered": tampered,
    "cut": lambda issuer: issuer.token()[:-4],
    "signature of nothing": lambda issuer: issuer.token().rpartition(".")[0] + ".",
    "tenant that is a path": lambda issuer: issuer.token(tenant="../victim"),
    "tenant of another type": lambda issuer: issuer.token(tenant={"a": 1}),
    "no tenant": lambda issuer: issuer.token(tenant=None),
    "no subject": lambda issuer: issuer.token(sub=None),
    "subject with a line break": lambda issuer: issuer.token(sub="a\nb"),
    "subject without end": lambda issuer: issuer.token(sub="a" * 300),
    "much too long": lambda issuer: issuer.token(padding="x" * 9000),
    "end beyond numbers": lambda issuer: issuer.token(exp=float("inf")),
    "deep": lambda issuer: f"{'W1tb' * 900}.{'W1tb' * 900}.x",
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_an_attacker_sends_opens_nothing(issuer: Issuer, path: Path, name: str) -> None:
    verifier = TokenVerifier(path)
    assert verifier.authenticate(issuer.token()).name == "corp:alice"
    token = ATTACKS[name](issuer)
    with pytest.raises(UnauthenticatedError) as refused:
        verifier.authenticate(token)
    assert token not in refused.value.message
    assert "evil" not in refused.value.message


def test_every_attack_is_a_401(issuer: Issuer, plane: TestClient) -> None:
    assert plane.get("/jobs", headers=bearer(issuer.token())).status_code == 200
    for name, craft in ATTACKS.items():
        refused = plane.get("/jobs", headers=bearer(craft(issuer)))
        assert (refused.status_code, refused.json()["code"]) == (401, "unauthenticated"), name


def test_secrets_weak_keys_and_keys_for_other_purposes_are_not_believed(issuer: Issuer, path: Path) -> None:
    issuer.rotate("weak", "RS256", bits=1024)
    issuer.rotate("encrypts", "RS256")
    issuer.published[-1]["use"] = "enc"
    issuer.rotate("other", "RS256")
    issuer.published[-1]["alg"] = "RS512"
    issuer.published.append({"kty": "oct", "k": encoded("secret"), "kid": "shared", "alg": "HS256"})
    issuer.published += [{"kty": "RSA", "kid": "damaged", "n": 7, "e": []}, {"kid": "empty"}, "text", None]  # type: ignore[list-item]
    issuer.rotate("good", "RS256")
    verifier = TokenVerifier(path)
    assert verifier.authenticate(issuer.token("good")).tenant == "acme"
    for key_id in ("weak", "encrypts", "other"):
        with pytest.raises(UnauthenticatedError, match="signing key"):
            verifier.authenticate(issuer.token(key_id))


def test_an_algorithm_that_the_operator_does_not_list_is_refused(issuer: Issuer, tmp_path: Path) -> None:
    verifier = TokenVerifier(write(tmp_path / "issuers.yaml", issuer.config(algorithms=["RS256"])))
    with pytest.raises(UnauthenticatedError, match="accepted are RS256"):
        verifier.authenticate(issuer.token())


def test_a_key_that_the_issuer_rotates_to_is_fetched(issuer: Issuer, path: Path) -> None:
    clock = Clock()
    verifier = TokenVerifier(path, clock=clock)
    verifier.authenticate(issuer.token())
    issuer.rotate("second", "RS256")
    with pytest.raises(UnauthenticatedError, match="signing key"):
        verifier.authenticate(issuer.token("second"))
    clock.now += REFETCH_INTERVAL_S
    assert verifier.authenticate(issuer.token("second")).name == "corp:alice"


def test_a_storm_of_unknown_key_ids_asks_the_issuer_no_more_often(issuer: Issuer, path: Path) -> None:
    clock = Clock()
    verifier = TokenVerifier(path, clock=clock)

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


def test_callers_with_known_keys_do_not_wait_for_an_issuer_that_hangs(issuer: Issuer, path: Path) -> None:
    clock = Clock()
    verifier = TokenVerifier(path, clock=clock)
    verifier.authenticate(issuer.token())
    issuer.held = threading.Event()
    clock.now += 3600.0
    assert verifier.authenticate(issuer.token()).name == "corp:alice", "answered from what is known"
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


def test_known_keys_hold_for_a_bounded_time_while_the_issuer_is_away(issuer: Issuer, tmp_path: Path) -> None:
    clock = Clock()
    config = issuer.config(keys_max_age_s=600, keys_stale_s=3600)
    verifier = TokenVerifier(write(tmp_path / "issuers.yaml", config), clock=clock)
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


def test_a_withdrawn_key_holds_no_longer_than_the_keys_age(issuer: Issuer, path: Path) -> None:
    clock = Clock()
    verifier = TokenVerifier(path, clock=clock)
    verifier.authenticate(issuer.token())
    issuer.rotate("second")
    del issuer.published[0]
    clock.now += 3600.0
    verifier.authenticate(issuer.token())  # begins the fetch
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            verifier.authenticate(issuer.token())
        except UnauthenticatedError:
            break
        time.sleep(0.01)
    else:
        pytest.fail("the withdrawn key still holds")
    assert verifier.authenticate(issuer.token("second")).name == "corp:alice"


@pytest.mark.parametrize(
    "answer",
    [
        {"/.well-known/openid-configuration": (200, b'{"issuer": "https://evil.example", "jwks_uri": "x"}')},
        {"/.well-known/openid-configuration": (200, b"[]")},
        {"/keys": (200, b"x" * (1 << 19))},
        {"/keys": (200, b'{"keys": []}')},
        {"/keys": (200, b"[" * 100_000)},
        {"/keys": (302, b"")},
    ],
)
def test_documents_that_are_not_right_open_nothing(
    issuer: Issuer, path: Path, answer: dict[str, tuple[int, bytes]]
) -> None:
    clock = Clock()
    verifier = TokenVerifier(path, clock=clock)
    issuer.answers = answer
    with pytest.raises(UnauthenticatedError, match="signing key"):
        verifier.authenticate(issuer.token())
    issuer.answers = {}
    clock.now += REFETCH_INTERVAL_S
    assert verifier.authenticate(issuer.token()).name == "corp:alice"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"algorithms": ["HS256"]}, "algorithms"),
        ({"algorithms": ["none"]}, "algorithms"),
        ({"algorithms": []}, "algorithms"),
        ({"audiences": []}, "audiences"),
        ({"issuer": "http://login.example.com"}, "not encrypted"),
        ({"issuer": "https://u@login.example.com"}, "plain address"),
        ({"tenant": "acme"}, "not both"),
        ({"tenant_claim": None}, "tenant or tenant_claim"),
        ({"scopes": {"a": ["everything"]}}, "scopes"),
        ({"leeway_s": 10**6}, "leeway_s"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_a_file_that_trusts_too_much_is_refused(issuer: Issuer, tmp_path: Path, change: Any, told: str) -> None:
    with pytest.raises(InvalidInputError, match=told):
        TokenVerifier(write(tmp_path / "issuers.yaml", issuer.config(**change)))


def test_the_file_is_read_again_and_a_broken_one_changes_nothing(issuer: Issuer, path: Path) -> None:
    verifier = TokenVerifier(path)
    verifier.authenticate(issuer.token())
    path.write_text("issuers: [")
    assert verifier.authenticate(issuer.token()).name == "corp:alice"
    assert not verifier.is_usable
    write(path, issuer.config(name="mended"))
    assert verifier.authenticate(issuer.token()).name == "mended:alice"
    assert issuer.asked.count("/keys") == 1, "what is known of its keys stays"
    write(path, issuer.config(issuer="https://other.example"))
    with pytest.raises(UnauthenticatedError, match="not trusted"):
        verifier.authenticate(issuer.token())


WORDS = st.one_of(st.integers(), st.none(), st.lists(st.text(max_size=5)))
HEADERS = st.dictionaries(
    st.sampled_from(["alg", "kid", "typ", "crit", "b64", "jwk"]),
    st.one_of(st.sampled_from(["none", "HS256", "ES256", "RS256", "first"]), WORDS),
)
CLAIMS = st.dictionaries(
    st.sampled_from(["iss", "aud", "exp", "sub", "nbf", "iat", "tenant"]),
    st.one_of(st.just("ISSUER"), st.text(max_size=8), st.floats(), WORDS),
)
PARTS = st.tuples(*[st.binary(max_size=60)] * 3)
JUNK = st.one_of(
    st.binary(max_size=300),
    st.binary(max_size=200).map(lambda raw: b"Bearer " + raw),
    PARTS.map(lambda parts: b"Bearer " + b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)),
    st.tuples(HEADERS, CLAIMS),
)


def header_of(junk: Any, issuer: Issuer) -> bytes:
    if isinstance(junk, bytes):
        return junk
    header, claims = junk
    named = {name: issuer.url if value == "ISSUER" else value for name, value in claims.items()}
    return f"Bearer {encoded(header)}.{encoded(named)}.AAAA".encode()


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(junk=JUNK)
def test_no_header_is_more_than_refused(issuer: Issuer, plane: TestClient, junk: Any) -> None:
    junk = header_of(junk, issuer)
    answer = plane.get("/jobs", headers=[(b"authorization", junk), (b"x-forwarded-for", junk), (b"cookie", junk)])
    assert answer.status_code in (400, 401, 422), answer.text


def test_credentials_name_the_files_that_are_looked_after(path: Path) -> None:
    found = open_credentials(None, path)
    assert isinstance(found, Credentials)
    assert {name: usable() for name, usable in found.operator_files.items()} == {"oidc": True}
