"""An OpenID Connect issuer on this machine: discovery document, key set, and tokens signed with real keys."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt
import yaml
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

from tests.support.fakes.scripted_server import Answer, Request, json_answer, serve

AUDIENCE = "swiftkv"


def make_key(algorithm: str, *, bits: int = 2048) -> PrivateKeyTypes:
    match algorithm:
        case "RS256":
            return rsa.generate_private_key(public_exponent=65537, key_size=bits)
        case "ES256":
            return ec.generate_private_key(ec.SECP256R1())
        case _:
            return ed25519.Ed25519PrivateKey.generate()


def public_jwk(key: Any, key_id: str) -> dict[str, Any]:
    writers = {rsa.RSAPrivateKey: RSAAlgorithm, ec.EllipticCurvePrivateKey: ECAlgorithm}
    writer: Any = next((found for kind, found in writers.items() if isinstance(key, kind)), OKPAlgorithm)
    return {**json.loads(writer.to_jwk(key.public_key())), "kid": key_id, "use": "sig"}


@dataclass
class Issuer:
    """An issuer whose keys, answers and availability a test controls."""

    url: str = ""
    keys: dict[str, tuple[str, Any]] = field(default_factory=dict)
    """Algorithm and private key by key id."""
    published: list[dict[str, Any]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Paths that were requested."""
    answers: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    """Answers to give instead of the right ones, by path."""
    held: threading.Event | None = None
    """If not None, no request is answered until it is set."""

    def rotate(self, key_id: str, algorithm: str = "ES256", **options: int) -> None:
        """Sign with a new key, and publish it next to the old ones."""
        self.keys[key_id] = (algorithm, make_key(algorithm, **options))
        self.published.append(public_jwk(self.keys[key_id][1], key_id))

    def claims(self, **changes: Any) -> dict[str, Any]:
        now = int(time.time())
        claims = {"iss": self.url, "aud": AUDIENCE, "sub": "alice", "iat": now, "exp": now + 600}
        claims |= {"tenant": "acme", "scope": "swiftkv-admin"}
        return {name: value for name, value in {**claims, **changes}.items() if value is not None}

    def token(self, key_id: str = "first", *, headers: dict[str, Any] | None = None, **claims: Any) -> str:
        algorithm, key = self.keys[key_id]
        return jwt.encode(self.claims(**claims), key, algorithm, headers={"kid": key_id, **(headers or {})})

    def answer(self, request: Request) -> Answer:
        self.asked.append(request.path)
        if self.held is not None:
            self.held.wait(20)
        if request.path in self.answers:
            return Answer(*self.answers[request.path])
        documents: dict[str, Any] = {
            "/.well-known/openid-configuration": {"issuer": self.url, "jwks_uri": f"{self.url}/keys"},
            "/keys": {"keys": self.published},
        }
        return json_answer(documents[request.path]) if request.path in documents else Answer(404)

    def config(self, **changes: Any) -> dict[str, Any]:
        """Return the issuer's entry for an issuers file."""
        return {
            "name": "corp",
            "issuer": self.url,
            "audiences": [AUDIENCE],
            "tenant_claim": "tenant",
            "scopes": {"swiftkv-admin": ["admin"], "swiftkv-user": ["jobs:read", "generate"]},
            **changes,
        }


@contextmanager
def run_issuer() -> Iterator[Issuer]:
    issuer = Issuer()
    issuer.rotate("first")
    with serve(issuer) as issuer.url:
        try:
            yield issuer
        finally:
            if issuer.held is not None:
                issuer.held.set()


def write_issuers(path: Path, *issuers: dict[str, Any]) -> Path:
    """Write the operator's file that trusts these issuers."""
    path.write_text(yaml.safe_dump({"issuers": list(issuers)}))
    return path
