"""Cache of an issuer's public keys. One fetch runs at a time, on its own thread, at a bounded rate.

A lookup of a known key never waits. An unknown key id starts a fetch, at most once per `REFETCH_INTERVAL_S` however
many unknown ids arrive, and a bounded number of callers wait for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx
import jwt
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from swiftkv_platform.logs import get_logger
from swiftkv_platform.security.issuers import Issuer

REFETCH_INTERVAL_S = 30.0
"""Least seconds between two fetches of one issuer's keys."""
_FETCH_S = 5.0
"""Most seconds to fetch one document."""
_WAIT_S = 2 * _FETCH_S
_MOST_WAITING = 8
"""Most callers that wait for a fetch; others are refused at once, so that unknown ids cannot occupy all threads."""
_MOST_BYTES = 1 << 18
_MOST_KEYS = 100
_LEAST_RSA_BITS = 2048
_ALGORITHMS = {("RSA", None): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}
_OTHER_NAMES = {"Ed25519": "EdDSA"}

Keys = Mapping[str, jwt.PyJWK]
Clock = Callable[[], float]


class SigningKeys:
    """The keys of one issuer. `clock`: monotonic seconds."""

    def __init__(self, issuer: Issuer, *, clock: Clock = time.monotonic) -> None:
        self._issuer = issuer
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: Keys = {}
        self._fetched_at: float | None = None
        self._tried_at: float | None = None
        self._fetching: threading.Event | None = None
        self._waiting = threading.BoundedSemaphore(_MOST_WAITING)

    def find(self, key_id: str) -> jwt.PyJWK | None:
        """Return the key with this id; None if the issuer does not have it or it could not be fetched."""
        known = self._holding().get(key_id)
        if known is None:
            self._wait(self._refresh())
            return self._holding().get(key_id)
        if self._age() >= self._issuer.keys_max_age_s:
            self._refresh()
        return known

    def _holding(self) -> Keys:
        """Return the cached keys; empty if they were fetched too long ago."""
        return self._keys if self._age() <= self._issuer.keys_max_age_s + self._issuer.keys_stale_s else {}

    def _age(self) -> float:
        return float("inf") if self._fetched_at is None else self._clock() - self._fetched_at

    def _refresh(self) -> threading.Event | None:
        """Start a fetch unless one runs or the last was too recent. Returns the event set when the running one ends."""
        with self._lock:
            if self._fetching is not None:
                return self._fetching
            now = self._clock()
            if self._tried_at is not None and 0.0 <= now - self._tried_at < REFETCH_INTERVAL_S:
                return None
            self._tried_at = now
            self._fetching = done = threading.Event()
        threading.Thread(target=self._fetch, args=(done,), name="signing-keys", daemon=True).start()
        return done

    def _wait(self, done: threading.Event | None) -> None:
        if done is None or not self._waiting.acquire(blocking=False):
            return
        try:
            done.wait(_WAIT_S)
        finally:
            self._waiting.release()

    def _fetch(self, done: threading.Event) -> None:
        try:
            keys = read_keys(self._issuer)
            with self._lock:
                self._keys, self._fetched_at = keys, self._clock()
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, RecursionError) as error:
            reason = str(error) or type(error).__name__
            get_logger().warning("keys of an issuer not fetched", issuer=self._issuer.name, reason=reason)
        finally:
            with self._lock:
                self._fetching = None
            done.set()


def read_keys(issuer: Issuer) -> Keys:
    """Fetch an issuer's usable keys by id. Raises `ValueError`, `httpx.HTTPError` and `httpx.InvalidURL`."""
    uri = issuer.jwks_uri
    if uri is None:
        document = _document(f"{issuer.issuer.rstrip('/')}/.well-known/openid-configuration")
        if document.get("issuer") != issuer.issuer:
            raise ValueError("its discovery document names another issuer")
        uri = document.get("jwks_uri")
        if not isinstance(uri, str) or urlsplit(uri).scheme != urlsplit(issuer.issuer).scheme:
            raise ValueError("its discovery document names no jwks_uri of the issuer's own scheme")
    listed = _document(uri).get("keys")
    if not isinstance(listed, list):
        raise ValueError("its key set has no list of keys")  # noqa: TRY004  # what came is wrong, not our types
    found: dict[str, jwt.PyJWK] = {}
    for each in listed[:_MOST_KEYS]:
        key = _usable(each)
        if key is not None:
            found.setdefault(str(key.key_id), key)
    if not found:
        raise ValueError("its key set has no usable key; use RSA of at least 2048 bits, P-256 or Ed25519, with a `kid`")
    return found


def _usable(listed: Any) -> jwt.PyJWK | None:
    """Return a listed key; None for private keys, other uses or algorithms, and keys that cannot be parsed."""
    if not isinstance(listed, dict) or not isinstance(listed.get("kid"), str) or "d" in listed:
        return None
    kind, curve, named = listed.get("kty"), listed.get("crv"), listed.get("alg")
    algorithm = _ALGORITHMS.get((str(kind), None if curve is None else str(curve)))
    if algorithm is None or listed.get("use", "sig") != "sig":
        return None
    if named is not None and _OTHER_NAMES.get(str(named), named) != algorithm:
        return None
    try:
        key = jwt.PyJWK.from_dict(listed, algorithm=algorithm)
    except (jwt.PyJWTError, ValueError, TypeError, AttributeError) as error:
        get_logger().warning("key of an issuer not read", reason=type(error).__name__)
        return None
    if isinstance(key.key, RSAPublicKey) and key.key.key_size < _LEAST_RSA_BITS:
        return None
    return key


def _document(url: str) -> dict[str, Any]:
    """Fetch a JSON object, bounded in size and time, without following redirects."""
    began, content = time.monotonic(), b""
    with (
        httpx.Client(timeout=_FETCH_S, follow_redirects=False, trust_env=urlsplit(url).scheme == "https") as client,
        client.stream("GET", url, headers={"Accept": "application/json"}) as answer,
    ):
        if answer.status_code != httpx.codes.OK:
            raise ValueError(f"{url} answered {answer.status_code}")
        for piece in answer.iter_bytes():
            content += piece
            if len(content) > _MOST_BYTES or time.monotonic() - began > _FETCH_S:
                raise ValueError(f"{url} sent more than {_MOST_BYTES} bytes, or took more than {_FETCH_S:g} s")
    document = json.loads(content)
    if not isinstance(document, dict):
        raise ValueError(f"{url} sent no JSON object")  # noqa: TRY004
    return document
