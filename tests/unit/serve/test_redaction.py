"""Redaction of captured texts: usual forms are found, ordinary text stays, and no text takes long."""

import json
import time
from typing import Any, get_args

import pytest

from swiftkv_platform.contract.traffic import CapturedRequest
from swiftkv_platform.serve.redaction import Redactor
from swiftkv_platform.specs.deployment import RedactedKind

KINDS: tuple[RedactedKind, ...] = get_args(RedactedKind)
KEY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7VJTUt9Us8cKj"
PEM = f"-----BEGIN PRIVATE KEY-----\n{KEY}\n{KEY}\nabc=\n-----END PRIVATE KEY-----"


def redact(text: str, *kinds: RedactedKind) -> str:
    return Redactor(kinds or KINDS).redact_text(text)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("email", "ann@example.org"),
        ("email", "ann.lee+news@mail.example.co.uk"),
        ("email", "jürgen@bücher.example"),
        ("phone", "+49 30 1234567"),
        ("phone", "+4915112345678"),
        ("phone", "+49 (0)30 / 123 45 67"),
        ("phone", "212-555-0100"),
        ("phone", "(212) 555-0100"),
        ("phone", "1-800-555-0199"),
        ("phone", "030 1234567"),
        ("phone", "0171/1234567"),
        ("phone", "01 23 45 67 89"),
        ("phone", "0049301234567"),
        ("credit_card", "4111 1111 1111 1111"),
        ("credit_card", "4111-1111-1111-1111"),
        ("credit_card", "4111111111111111"),
        ("credit_card", "3782 822463 10005"),
        ("ip_address", "192.168.0.1"),
        ("ip_address", "fe80::1"),
        ("ip_address", "2001:db8:0:0:0:0:0:1"),
        ("ip_address", "::ffff:10.0.0.1"),
        ("secret", "sk-proj-abcdefghijklmnop123"),
        ("secret", "skv_0123456789abcdefghijklmnop"),
        ("secret", "ghp_0123456789abcdefghijABCDEFGHIJ012345"),
        ("secret", "AKIAIOSFODNN7EXAMPLE"),
        ("secret", "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl"),
        ("secret", PEM),
        ("secret", PEM.replace("\n", "\\n")),
    ],
)
@pytest.mark.parametrize("around", ["{}", "Use {}.", "<{}>", "({}), ok", 'value="{}"', "a: {}\nb", "{}, and {}"])
def test_usual_forms_are_replaced_within_any_text(kind: RedactedKind, text: str, around: str) -> None:
    expected = around.replace("{}", f"[{kind}]")
    assert redact(around.replace("{}", text), kind) == expected
    assert redact(around.replace("{}", text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Authorization: Bearer abc123def456ghi7", "Authorization: Bearer [secret]"),
        ('api_key = "a1b2c3d4e5"', 'api_key = "[secret]"'),
        ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "AWS_SECRET_ACCESS_KEY=[secret]"),
        ('{"password": "hunter2hunter2"}', '{"password": "[secret]"}'),
        ("postgresql://swift:pa55word@db/x", "postgresql://swift:[secret]@db/x"),
        ("postgresql://swift:p@55@word@db/x", "postgresql://swift:[secret]@db/x"),
        ('{"a":"http://u:p@h","b":"c@d"}', '{"a":"http://u:[secret]@h","b":"c@d"}'),
        ("Authorization: Basic c3dpZnQ6cGE1NXdvcmQ=", "Authorization: Basic [secret]"),
        ("ssh ann@192.168.0.1", "ssh ann@[ip_address]"),
        ("card 4111 1111 1111 1111 123 12/30", "card [credit_card] 123 12/30"),
        ("2026 4111 1111 1111 1111", "2026 [credit_card]"),
        ("from 10.0.0.1:8080 and fe80::1: down", "from [ip_address]:8080 and [ip_address]: down"),
        ("10.0.0.0/8", "[ip_address]/8"),
        (f"{PEM[:100]}\nThat was it.", "[secret]\nThat was it."),
        (f"{PEM}\n{PEM}\nend", "[secret]\n[secret]\nend"),
    ],
)
def test_passages_are_replaced_and_what_is_around_them_stays(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Two apples cost 12.50, 3 of them 18.75.",
        "On 2026-11-30 at 12:30:45, 01.02.2026 10:20, 11/30/2026.",
        "std::vector<abc::def> x; a::b; 1:2",
        "Version 1.2.3 and 1.2.3.4.5, section 3.4.1.",
        "pi = 3.14159265358979323846, x = 0.123456789012",
        "order 1234567890123456 of 2026",
        "max_tokens: 4096, tokenizer: bert-base-uncased-v2",
        "password = get_password()",
        "a bearer of good tidings; the bearer certificates",
        "@property\ndef f(self): return x @ y",
        "npm install react@18.2.0 @types/node@22.1.0-rc.1",
        '{"a":"http://localhost:8080","b":"c@d"}',
        "basic arithmetic, basic 2x2 matrices; y = +0.123456789",
        "git commit 0123456789abcdef0123456789abcdef01234567",
        "-----BEGIN-----",
        "01 02 03 04",
        "f(x) = 2 + 3 - 555 - 1",
        "300.300.300.300",
    ],
)
def test_ordinary_text_stays(text: str) -> None:
    assert redact(text) == text


def test_kinds_that_are_not_wanted_stay() -> None:
    text = "ann@example.org 192.168.0.1"
    assert redact(text, "email") == "[email] 192.168.0.1"
    assert redact(text, "phone") == text


HOSTILE = {
    "letters": "a" * 1000,
    "at signs": "a@" * 500,
    "at signs with dots": "a@a." * 250,
    "dots": "a." * 500,
    "digits": "4" * 1000,
    "groups": "4444 " * 200,
    "short groups": "1 " * 500,
    "zeros": "0 1" * 333,
    "phones": "+1 (" * 250,
    "brackets": "(0" * 500,
    "colons": ":" * 1000,
    "hexadecimal": "a:" * 500,
    "hexadecimal words": "abcd " * 200,
    "numbers with dots": "1." * 500,
    "addresses": "1.1.1.1." * 125,
    "begins": "-----BEGIN A-----" * 59,
    "begins and base64": ("-----BEGIN A-----" + "A" * 60) * 13,
    "dashes": "-" * 1000,
    "keywords": "token" * 200,
    "keywords with underscores": "token_" * 166,
    "assignments": "token=" * 166,
    "bearers": "Bearer " * 142,
    "keys": "sk-" * 333,
    "web tokens": "eyJ" * 333,
    "web tokens with dots": "eyJaaaaaaaa." * 83,
    "addresses of the web": "://" * 333,
    "addresses with colons": "://a:" * 200,
    "percent": "%" * 1000,
    "spaces": " " * 1000,
    "lines": "\n" * 1000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_no_text_takes_much_longer_than_its_length(name: str) -> None:
    times = []
    for factor in (50, 200):  # 50,000 and 200,000 characters
        text = HOSTILE[name] * factor
        started = time.process_time()
        redact(text)
        times.append(time.process_time() - started)
    # A quadratic search would take 16 times as long, and minutes.
    assert times[1] < 10 * times[0] + 0.1, times
    assert times[1] < 5.0, times


def make_row(**fields: Any) -> CapturedRequest:
    usual = {"id": "r", "time": 1.0, "path": "/", "model": "m", "finish_reason": "stop"}
    return CapturedRequest(**{**usual, "prompt_tokens": 1, "completion_tokens": 1, **fields})


def test_all_texts_of_a_row_are_redacted_and_counted() -> None:
    arguments = {"to": ["ann@example.org"], "card": 4111111111111111, "n": 3, "ok": True, "bob@example.org": None}
    call = {"id": "call_1", "type": "function", "function": {"name": "send", "arguments": json.dumps(arguments)}}
    tools = [{"type": "function", "function": {"name": "send", "description": "as ann@example.org"}}]
    row = make_row(
        user="ann@example.org",
        tools=tools,
        messages=[
            {"role": "system", "content": "You are ann@example.org."},
            {"role": "assistant", "content": None, "reasoning_content": "ask bob@example.org", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sent to ann@example.org"},
            {"role": "user", "name": "ann@example.org", "content": "thanks"},
        ],
    )
    redacted = Redactor(KINDS).redact_row(row)
    assert redacted.messages is not None
    assert redacted.messages[0]["content"] == "You are [email]."
    assert redacted.messages[1]["reasoning_content"] == "ask [email]"
    written = json.loads(redacted.messages[1]["tool_calls"][0]["function"]["arguments"])
    assert written == {"to": ["[email]"], "card": "[credit_card]", "n": 3, "ok": True, "[email]": None}
    assert redacted.messages[2] == {"role": "tool", "tool_call_id": "call_1", "content": "sent to [email]"}
    assert redacted.messages[3] == {"role": "user", "name": "[email]", "content": "thanks"}
    assert (redacted.user, redacted.tools, redacted.redacted) == ("ann@example.org", tools, 7)
    assert row.messages is not None
    assert row.messages[0]["content"] == "You are ann@example.org."


def test_prompt_and_completion_are_redacted() -> None:
    row = Redactor(KINDS).redact_row(make_row(prompt="to ann@example.org", completion="ok, 192.168.0.1"))
    assert (row.prompt, row.completion, row.redacted) == ("to [email]", "ok, [ip_address]", 2)
    assert Redactor(()).redact_row(row) is row


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a":  "x"}', '{"a":  "x"}'),
        ('{"a": "x\\nann@example.org"}', '{"a": "x\\n[email]"}'),
        ('{"a": "\\ud800 ann@example.org"}', '{"a": "\\ud800 [email]"}'),
        ('{"a": "ann@example.org', '{"a": "[email]'),
        ("", ""),
        ("[" * 100_000 + '"ann@example.org"', "[" * 100_000 + '"[email]"'),
        ('{"a": ' + "9" * 5000 + ', "b": "ann@example.org"}', '{"a": ' + "9" * 5000 + ', "b": "[email]"}'),
    ],
)
def test_arguments_stay_json_and_are_rewritten_only_if_redacted(arguments: str, expected: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    row = Redactor(KINDS).redact_row(make_row(messages=[{"role": "assistant", "content": None, "tool_calls": [call]}]))
    assert row.messages is not None
    assert row.messages[0]["tool_calls"][0]["function"]["arguments"] == expected
