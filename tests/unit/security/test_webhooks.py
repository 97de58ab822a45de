"""Signing and verifying webhooks; the first case is the published example of standardwebhooks.com."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pydantic import ValidationError
from standardwebhooks import Webhook, WebhookVerificationError

from swiftkv_platform.errors import InvalidInputError, UnauthenticatedError
from swiftkv_platform.security.webhooks import Secret, verify
from swiftkv_platform.specs.publish import WebhookSpec

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
    verify(HEADERS, BODY, SECRET, now=1614265330 + 299)
    several = {**HEADERS, "webhook-signature": f"v1,bm9wZQ== {signature}"}
    verify(several, BODY, SECRET, now=1614265330)


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


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"body": BODY + b" "}, "webhook-signature"),
        ({"secret": "another secret of the same kind"}, "webhook-signature"),
        ({"now": 1614265330 + 301}, "webhook-timestamp"),
        ({"now": 1614265330 - 301}, "webhook-timestamp"),
        ({"headers": {**HEADERS, "webhook-id": "msg_other"}}, "webhook-signature"),
        ({"headers": {**HEADERS, "webhook-timestamp": "1614265331"}}, "webhook-signature"),
        ({"headers": {**HEADERS, "webhook-timestamp": "soon"}}, "webhook-timestamp"),
        ({"headers": {"webhook-id": "x"}}, "webhook-timestamp"),
    ],
)
def test_whatever_was_changed_is_refused(changed: dict[str, Any], field: str) -> None:
    given = {"headers": HEADERS, "body": BODY, "secret": SECRET, "now": 1614265330, **changed}
    with pytest.raises(UnauthenticatedError) as caught:
        verify(**given)
    assert caught.value.field == field


def test_a_secret_is_shown_nowhere() -> None:
    assert "hush" not in repr(Secret.parse("hush hush hush hush", name="s"))
    for text in ("short", "whsec_!!!"):
        with pytest.raises(InvalidInputError) as caught:
            Secret.parse(text, name="mine")
        assert text not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        "ftp://host/x",
        "host/x",
        "https://",
        "https://user:pass@host/",
        "https://host/?token=1",
        "https://host/#x",
        "https://host:99999/",
        "https://evil.example\\.good.example/",
        "https://[::1/",
    ],
)
def test_an_address_with_secrets_or_tricks_is_refused(url: str) -> None:
    with pytest.raises(ValidationError):
        WebhookSpec(url=url, secret_ref="s")
