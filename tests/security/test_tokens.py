"""Tokens of a real issuer, over HTTP: which are accepted, and which forged ones are refused."""

import base64
import hashlib
import hmac
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from fastapi import Request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swiftkv_platform.errors import ForbiddenError, InvalidInputError, UnauthenticatedError
from swiftkv_platform.security.keys import Credentials, create_key, open_credentials
from swiftkv_platform.security.principals import Scope
from swiftkv_platform.security.tokens import JWTVerifier
from swiftkv_platform.serve.access import RequestAuthenticator
from tests.support.fakes.oidc_issuer import Issuer, make_key, public_jwk, write_issuers
from tests.unit.control_plane.routes.conftest import SPEC, Start

Craft = Callable[[Issuer], str]


@pytest.fixture
def plane(start: Start, oidc_file: Path) -> httpx.Client:
    return start("https://swiftkv.example", oidc_file=oidc_file, host="0.0.0.0").client


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


def test_a_token_opens_what_its_claims_say(issuer: Issuer, verifier: JWTVerifier) -> None:
    for algorithm in ("RS256", "ES256", "EdDSA"):
        issuer.rotate(algorithm, algorithm)
    for key_id in issuer.keys:
        caller = verifier.authenticate(issuer.token(key_id, scope="other swiftkv-user"))
        assert (caller.name, caller.tenant, caller.credential) == ("corp:alice", "acme", "corp:alice")
        assert caller.scopes == {Scope.JOBS_READ, Scope.GENERATE}
        assert not caller.operator
        with pytest.raises(ForbiddenError):
            caller.require_scope(Scope.DEPLOY)


def test_a_token_drives_the_control_plane(issuer: Issuer, plane: httpx.Client) -> None:
    admin, user = bearer(issuer.token()), bearer(issuer.token(scope="swiftkv-user", tenant="other"))
    job = plane.post("/jobs", json=SPEC, headers=admin).json()
    assert (job["tenant"], job["created_by"]) == ("acme", "corp:alice")
    assert plane.get(f"/jobs/{job['id']}", headers=user).status_code == 404
    assert plane.post("/jobs", json=SPEC, headers=user).status_code == 403
    assert plane.get("/jobs", headers=bearer(issuer.token(scope="none"))).status_code == 403
    assert plane.get("/jobs").status_code == 401
    assert 'swiftkv_operator_file_usable{file="oidc"} 1.0' in plane.get("/metrics").text
    token = issuer.token(sub="a-long-name" * 10)
    assert plane.post("/session", json={"api_key": token}).status_code == 204
    assert plane.get("/jobs").status_code == 200
    assert plane.get("/session").json()["session"]["tenant"] == "acme"


def test_keys_and_tokens_are_taken_side_by_side(issuer: Issuer, oidc_file: Path, tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys.json", name="ann", tenant="acme", scopes=frozenset({Scope.ADMIN}))
    both = open_credentials(tmp_path / "keys.json", oidc_file)
    assert both is not None
    assert both.authenticate(f"Bearer {key}").name == "ann"
    assert both.authenticate(f"Bearer {issuer.token()}").name == "corp:alice"
    for wrong in ("a.b.c", "skv_a.b.c", "abc"):
        with pytest.raises(UnauthenticatedError):
            both.authenticate(f"Bearer {wrong}")
    only_tokens = open_credentials(None, oidc_file)
    assert isinstance(only_tokens, Credentials)
    assert {name: usable() for name, usable in only_tokens.operator_files.items()} == {"oidc": True}
    with pytest.raises(UnauthenticatedError, match="trusted issuer"):
        only_tokens.authenticate(f"Bearer {key}")


@pytest.mark.parametrize("tenant", ["acme", None])
async def test_a_replica_answers_tokens_of_its_tenant(issuer: Issuer, oidc_file: Path, tenant: str | None) -> None:
    request_authenticator = RequestAuthenticator(open_credentials(None, oidc_file), tenant=tenant)

    def request(**claims: Any) -> Request:
        headers = [(b"authorization", f"Bearer {issuer.token(**claims)}".encode())]
        return Request({"type": "http", "method": "POST", "path": "/generate", "headers": headers, "state": {}})

    assert (await request_authenticator.admit_async(request(scope=["swiftkv-user"]))).tenant == "acme"
    with pytest.raises(ForbiddenError):
        await request_authenticator.admit_async(request(scope="nothing"))
    if tenant is not None:
        with pytest.raises(ForbiddenError, match="to tenant 'other'"):
            await request_authenticator.admit_async(request(tenant="other"))


def test_claims_are_mapped_as_the_file_says(issuer: Issuer, tmp_path: Path) -> None:
    config = issuer.config(
        subject_claim="email",
        tenant_claim="https://corp.example/group",
        tenants={"G-1": "research"},
        scopes_claim="realm_access.roles",
        operators=["root"],
        requests_per_minute=7,
    )
    verifier = JWTVerifier(write_issuers(tmp_path / "issuers.yaml", config))
    group = "https://corp.example/group"
    claims = {"email": "a@b.c", group: "G-1", "realm_access": {"roles": ["root", "swiftkv-user"]}}
    caller = verifier.authenticate(issuer.token(**claims))
    told = (caller.name, caller.tenant, caller.operator, caller.requests_per_minute)
    assert told == ("corp:a@b.c", "research", True, 7)
    with pytest.raises(UnauthenticatedError, match="has no tenant"):
        verifier.authenticate(issuer.token(**{**claims, group: "research"}))


def encoded(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def by_hand(issuer: Issuer, header: dict[str, Any], sign: Callable[[bytes], bytes], **claims: Any) -> str:
    signed = f"{encoded(header)}.{encoded(issuer.claims(**claims))}"
    return f"{signed}.{base64.urlsafe_b64encode(sign(signed.encode())).rstrip(b'=').decode()}"


def signer(issuer: Issuer) -> Callable[[bytes], bytes]:
    """Sign with the issuer's own key."""
    return lambda signed: jwt.get_algorithm_by_name("ES256").sign(signed, issuer.keys["first"][1])


def hmac_with_the_public_key(issuer: Issuer) -> str:
    """A token for algorithm confusion: the published key is used as the secret of an HMAC."""
    pem = issuer.keys["first"][1].public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    header = {"alg": "HS256", "kid": "first"}
    return by_hand(issuer, header, lambda signed: hmac.new(pem, signed, hashlib.sha256).digest())


def own_key(issuer: Issuer, algorithm: str = "ES256", **headers: Any) -> str:
    key = make_key(algorithm)
    if "jwk" in headers:
        headers["jwk"] = public_jwk(key, "first")
    return jwt.encode(issuer.claims(), key, algorithm, headers={"kid": "first", **headers})  # type: ignore[arg-type]


def tampered(issuer: Issuer) -> str:
    header, _, signature = issuer.token().split(".")
    return f"{header}.{encoded(issuer.claims(tenant='victim'))}.{signature}"


def signed_by_hand(**header: Any) -> Craft:
    """A token with a good signature and any header."""
    return lambda issuer: by_hand(issuer, {"alg": "ES256", **header}, signer(issuer))


def unsigned(signature: bytes = b"", **header: Any) -> Craft:
    return lambda issuer: by_hand(issuer, {"kid": "first", **header}, lambda _: signature)


def claiming(**claims: Any) -> Craft:
    return lambda issuer: issuer.token(**claims)


ATTACKS: dict[str, Craft] = {
    "expired": claiming(exp=int(time.time()) - 120),
    "not yet": claiming(nbf=int(time.time()) + 6000),
    "issued in the future": claiming(iat=int(time.time()) + 6000),
    "another audience": claiming(aud="mail"),
    "other audiences": claiming(aud=["mail", "files"]),
    "no audience": claiming(aud=None),
    "no end": claiming(exp=None),
    "another issuer": claiming(iss="https://evil.example"),
    "nearly the issuer": lambda issuer: issuer.token(iss=f"{issuer.url}/"),
    "no issuer": claiming(iss=None),
    "issuer of another type": lambda issuer: by_hand(
        issuer, {"alg": "ES256", "kid": "first"}, lambda _: b"x" * 64, iss=["a"]
    ),
    "no algorithm": unsigned(alg="none"),
    "algorithm of no name": unsigned(alg="nOnE"),
    "public key as secret": hmac_with_the_public_key,
    "own key": own_key,
    "own key in the header": lambda issuer: own_key(issuer, jwk={}),
    "own key by address": lambda issuer: own_key(issuer, jku="http://127.0.0.1:9/keys", x5u="http://127.0.0.1:9/"),
    "wrong kind of key": lambda issuer: own_key(issuer, "RS256"),
    "no key id": signed_by_hand(),
    "key id of another type": signed_by_hand(kid=7),
    "extensions": signed_by_hand(kid="first", crit=["x"]),
    "tampered": tampered,
    "cut": lambda issuer: issuer.token()[:-4],
    "signature of nothing": lambda issuer: issuer.token().rpartition(".")[0] + ".",
    "tenant that is a path": claiming(tenant="../victim"),
    "tenant of another type": claiming(tenant={"a": 1}),
    "no tenant": claiming(tenant=None),
    "no subject": claiming(sub=None),
    "subject with a line break": claiming(sub="a\nb"),
    "subject without end": claiming(sub="a" * 300),
    "much too long": claiming(padding="x" * 9000),
    "end beyond numbers": claiming(exp=float("inf")),
    "deep": lambda _issuer: f"{'W1tb' * 900}.{'W1tb' * 900}.x",
}


def test_what_an_attacker_sends_opens_nothing(issuer: Issuer, plane: httpx.Client) -> None:
    assert plane.get("/jobs", headers=bearer(issuer.token())).status_code == 200
    for name, craft in ATTACKS.items():
        token = craft(issuer)
        refused = plane.get("/jobs", headers=bearer(token))
        assert (refused.status_code, refused.json()["code"]) == (401, "unauthenticated"), name
        assert not any(told in refused.text for told in (token, "evil")), name


def test_secrets_weak_keys_and_keys_for_other_purposes_are_not_believed(issuer: Issuer, tmp_path: Path) -> None:
    issuer.rotate("weak", "RS256", bits=1024)
    issuer.rotate("encrypts", "RS256")
    issuer.published[-1]["use"] = "enc"
    issuer.rotate("other", "RS256")
    issuer.published[-1]["alg"] = "RS512"
    issuer.published.append({"kty": "oct", "k": encoded("secret"), "kid": "shared", "alg": "HS256"})
    issuer.published += [{"kty": "RSA", "kid": "damaged", "n": 7, "e": []}, {"kid": "empty"}, "text", None]  # type: ignore[list-item]
    issuer.rotate("good", "RS256")
    verifier = JWTVerifier(write_issuers(tmp_path / "issuers.yaml", issuer.config(algorithms=["RS256"])))
    assert verifier.authenticate(issuer.token("good")).tenant == "acme"
    for key_id in ("weak", "encrypts", "other"):
        with pytest.raises(UnauthenticatedError, match="signing key"):
            verifier.authenticate(issuer.token(key_id))
    with pytest.raises(UnauthenticatedError, match="RS256"):  # its algorithm is not one that the operator lists
        verifier.authenticate(issuer.token())


def test_a_file_that_trusts_too_much_is_refused(issuer: Issuer, tmp_path: Path) -> None:
    changes: list[tuple[dict[str, Any], str]] = [
        ({"algorithms": ["HS256"]}, "algorithms"),
        ({"algorithms": ["none"]}, "algorithms"),
        ({"algorithms": []}, "algorithms"),
        ({"audiences": []}, "audiences"),
        ({"issuer": "http://login.example.com"}, "not encrypted"),
        ({"issuer": "https://u@login.example.com"}, "not a valid URL"),
        ({"tenant": "acme"}, "not both"),
        ({"tenant_claim": None}, "tenant or tenant_claim"),
        ({"scopes": {"a": ["everything"]}}, "scopes"),
        ({"leeway_s": 10**6}, "leeway_s"),
        ({"unknown": 1}, "unknown"),
    ]
    for change, told in changes:
        with pytest.raises(InvalidInputError, match=told):
            JWTVerifier(write_issuers(tmp_path / "issuers.yaml", issuer.config(**change)))


def test_the_file_is_read_again_and_a_broken_one_changes_nothing(
    issuer: Issuer, oidc_file: Path, verifier: JWTVerifier
) -> None:
    verifier.authenticate(issuer.token())
    oidc_file.write_text("issuers: [")
    assert verifier.authenticate(issuer.token()).name == "corp:alice"
    assert not verifier.is_usable
    write_issuers(oidc_file, issuer.config(name="mended"))
    assert verifier.authenticate(issuer.token()).name == "mended:alice"
    assert issuer.asked.count("/keys") == 1, "cached keys are kept"
    write_issuers(oidc_file, issuer.config(issuer="https://other.example"))
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
MOST_JUNK = 500 if "SWIFTKV_SOAK" in os.environ else 40


def header_of(junk: Any, issuer: Issuer) -> bytes:
    if isinstance(junk, bytes):
        return junk
    header, claims = junk
    named = {name: issuer.url if value == "ISSUER" else value for name, value in claims.items()}
    return f"Bearer {encoded(header)}.{encoded(named)}.AAAA".encode()


@settings(max_examples=MOST_JUNK, deadline=None, suppress_health_check=list(HealthCheck))
@given(junk=JUNK)
def test_no_header_is_more_than_refused(issuer: Issuer, plane: httpx.Client, junk: Any) -> None:
    junk = header_of(junk, issuer)
    answer = plane.get("/jobs", headers=[(b"authorization", junk), (b"x-forwarded-for", junk), (b"cookie", junk)])
    assert answer.status_code in (400, 401, 422), answer.text
