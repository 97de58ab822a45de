"""Redaction of captured requests: personal data and credentials are replaced by placeholders such as `[email]`.

Patterns find what has a usual form, not all there is: names and addresses stay. They take time in proportion to the
text, whatever it contains. A long text is searched in pieces, between which other threads can run.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swiftkv_platform.contract.traffic import CapturedRequest
from swiftkv_platform.specs.base import find_lone_surrogate
from swiftkv_platform.specs.deployment import RedactedKind

Span = tuple[int, int]

_PIECE_LENGTH = 1 << 14
"""Characters after which a piece ends with its line. No pattern but that of PEM blocks spans lines."""
_MESSAGE_TEXTS = ("content", "reasoning_content", "name")


@dataclass(frozen=True)
class _Rule:
    """A pattern, and which part of a match to replace."""

    pattern: re.Pattern[str]
    find_span: Callable[[re.Match[str]], Span | None] = re.Match.span
    """Function: match -> (start, end); None: nothing."""
    literal: str = ""
    """Part of every match."""


def _find_value(match: re.Match[str]) -> Span | None:
    """Accept values that are no words."""
    value = match["value"]
    return match.span("value") if re.search(r"\d", value) and re.search(r"[A-Za-z]", value) else None


_NAME_BEFORE_VALUE = re.compile(
    r"(?:api[_-]?key|secret[_-]?(?:access[_-]?)?key|secret|token|password|passwd|passphrase|pwd)(?:[_-][\w-]{0,20})?"
    r"[\"']?[ \t]{0,3}$",
    re.IGNORECASE,
)
_MAX_NAME_LENGTH = 60


def _find_assigned_value(match: re.Match[str]) -> Span | None:
    """Accept values of names such as `api_key`."""
    before = match.string[max(match.start() - _MAX_NAME_LENGTH, 0) : match.start()]
    return _find_value(match) if _NAME_BEFORE_VALUE.search(before) else None


def _find_email(match: re.Match[str]) -> Span | None:
    """Refuse versions of packages, such as `react@18.2.0`: no top-level domain begins with a digit."""
    return None if match[0].rpartition(".")[2][0].isdigit() else match.span()


def _find_card(match: re.Match[str]) -> Span | None:
    """Accept the longest sequence of whole groups of digits with a valid checksum."""
    text = match[0]
    for end in range(len(text), 0, -1):
        is_boundary = text[end - 1].isdigit() and not text[end : end + 1].isdigit()
        if is_boundary and _is_card(re.sub(r"\D", "", text[:end])):
            return match.start(), match.start() + end
    return None


def _is_card(digits: str) -> bool:
    """Whether 13 to 19 digits have a valid checksum (ISO/IEC 7812)."""
    doubled = [sum(divmod(2 * int(digit), 10)) for digit in digits[-2::-2]]
    return 13 <= len(digits) <= 19 and (sum(map(int, digits[-1::-2])) + sum(doubled)) % 10 == 0


_DATE = re.compile(r"\d{1,2}[-./]\d{1,2}[-./]\d{4}(?!\d)")
_MIN_NATIONAL_DIGITS = 9


def _find_phone(match: re.Match[str]) -> Span | None:
    """Refuse dates, and short numbers without a country code. A bracket that is not closed is not part of a number."""
    text = match[0] if ")" in match[0] else match[0].lstrip("(")
    num_digits = sum(character.isdigit() for character in text)
    is_short = text.startswith(("0", "(0")) and num_digits < _MIN_NATIONAL_DIGITS
    return None if is_short or _DATE.match(text) else (match.end() - len(text), match.end())


def _find_ipv4(match: re.Match[str]) -> Span | None:
    return match.span() if all(int(number) <= 255 for number in match[0].split(".")) else None


_GROUP_BEFORE_COLON = re.compile(r"(?<![\w:.])[0-9A-Fa-f]{0,4}$")


def _find_ipv6(match: re.Match[str]) -> Span | None:
    """Accept addresses with a digit, since `abc::def` is a name in C++. A colon may follow the address."""
    first_group = _GROUP_BEFORE_COLON.search(match.string[max(match.start() - 5, 0) : match.start()])
    if first_group is None:
        return None
    start = match.start() - len(first_group[0])
    for end in (match.end(), match.end() - 1):
        text = match.string[start:end]
        try:
            ipaddress.IPv6Address(text)
        except ValueError:
            continue
        return (start, end) if re.search(r"\d", text) else None
    return None


# Quantifiers are bounded, and a match begins only where a word begins, so that no text is searched many times. The
# first character comes before the condition on what precedes it: `re` finds characters much faster.
_RULES: Mapping[RedactedKind, tuple[_Rule, ...]] = {
    "secret": (
        _Rule(  # keys of known services, and JSON web tokens
            re.compile(
                r"[Aeghnprsx](?<![A-Za-z0-9_-].)(?:(?<=s)k-[\w-]{16,256}+|(?<=s)kv_[\w-]{16,64}+"
                r"|(?<=[spr])k_(?:live|test)_\w{16,128}+|(?<=g)h[opusr]_[A-Za-z0-9]{20,255}+"
                r"|(?<=g)ithub_pat_\w{20,255}+|(?<=g)lpat-[\w-]{16,64}+|(?<=h)f_[A-Za-z0-9]{20,64}+"
                r"|(?<=x)ox[a-z]-[\w-]{10,255}+|(?<=n)pm_[A-Za-z0-9]{30,64}+|(?<=p)ypi-[\w-]{20,255}+"
                r"|(?<=A)(?:KIA|SIA)[A-Z0-9]{16}|(?<=A)Iza[\w-]{30,40}+"
                r"|(?<=e)yJ[\w-]{8,4096}+\.[\w-]{8,4096}+\.[\w-]{0,4096}+)"
            )
        ),
        _Rule(re.compile(r"[Bb](?<!\w.)(?:earer|asic)[ \t]{1,3}(?P<value>[\w.~+/=-]{12,4096}+)"), _find_value),
        _Rule(  # assignments, such as `api_key = "..."`
            re.compile(r"[:=][ \t]{0,3}[\"']?(?P<value>[^\s\"'`,;&<>()\[\]{}\\]{8,512}+)"), _find_assigned_value
        ),
        _Rule(  # passwords in URLs, up to the last @
            re.compile(r"://[^\s/?#@:\"'`<>\\]{0,64}+:(?P<value>[^\s/?#\"'`<>\\]{1,256})@"),
            lambda match: match.span("value"),
        ),
    ),
    "email": (
        _Rule(
            re.compile(r"(?<![\w.%+-])[\w.%+-]{1,64}+@[\w-]{1,63}+(?:\.[\w-]{1,63}+){1,8}+"), _find_email, literal="@"
        ),
    ),
    "credit_card": (_Rule(re.compile(r"[2-6](?<![\d+].)\d{3}(?:[ -]?\d){9,15}(?!\d)"), _find_card),),
    "ip_address": (
        _Rule(re.compile(r"(?::[0-9A-Fa-f]{0,4}+){2,8}+(?:\.\d{1,3}){0,3}(?![\w:])"), _find_ipv6, literal=":"),
        _Rule(re.compile(r"\d(?<![\w.].)\d{0,2}(?:\.\d{1,3}){3}(?!\.?\w)"), _find_ipv4),
    ),
    "phone": (
        _Rule(
            re.compile(
                r"[+(0-9](?<![\w+.-].)(?:"
                r"(?<=\+)[1-9]\d{0,2}(?:[ .()/-]{0,3}\d){6,12}"  # with a country code
                r"|(?<=0)0[1-9]\d{8,13}"
                r"|(?:(?<=[2-9])|(?<=\()[2-9]|(?<=1)[ .-]\(?[2-9])\d{2}\)?[ .-]{1,2}\d{3}[ .-]\d{4}"  # 212-555-0100
                r"|(?:(?<=0)|(?<=\()0)[1-9]\d{0,4}\)?(?:[ ./-]{1,3}\d{2,8}){1,5}"  # 030 / 123 45 67
                r")(?!\d)"
            ),
            _find_phone,
        ),
    ),
}
"""Rules by kind, in order of application: keys may contain what looks like a number."""
_PEM_BEGIN = re.compile(r"-----BEGIN [A-Z0-9 ]{1,40}-----")
_PEM_END = re.compile(r"-----END [A-Z0-9 ]{1,40}-----")
_PEM_BODY = re.compile(r"(?:(?:\s|\\n)*+[A-Za-z0-9+/=]{30,}+)*+(?:(?:\s|\\n)*+[A-Za-z0-9+/=]++)?")
"""Content of a block without its end. Line ends may be escaped, as in JSON."""


class Redactor:
    """Replaces passages of some kinds by `[kind]`, and counts them."""

    def __init__(self, kinds: Collection[RedactedKind]) -> None:
        self._kinds = kinds
        self.num_redacted = 0

    def redact_row(self, row: CapturedRequest) -> CapturedRequest:
        """Return the row with its texts redacted: those of messages and of call arguments, prompt and completion. Ids,
        `user` and tools stay."""
        if not self._kinds:
            return row
        texts = {name: getattr(row, name) for name in ("prompt", "completion")}
        changed: dict[str, Any] = {name: self.redact_text(text) for name, text in texts.items() if text is not None}
        if row.messages is not None:
            changed["messages"] = [self._redact_message(message) for message in row.messages]
        return row.model_copy(update={**changed, "redacted": self.num_redacted})

    def redact_text(self, text: str) -> str:
        if "secret" in self._kinds:
            text = self._redact_pem_blocks(text)
        return "".join(map(self._redact_piece, _split_lines(text)))

    def _redact_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        redacted = {
            name: self.redact_text(value) if name in _MESSAGE_TEXTS and isinstance(value, str) else value
            for name, value in message.items()
        }
        if message.get("tool_calls"):
            redacted["tool_calls"] = [
                {
                    **call,
                    "function": {**call["function"], "arguments": self._redact_json(call["function"]["arguments"])},
                }
                for call in message["tool_calls"]
            ]
        return redacted

    def _redact_json(self, text: str) -> str:
        """Redact values and keys of JSON, which stays JSON; of other text its whole."""
        num_before = self.num_redacted
        try:
            value = self._redact_value(json.loads(text, strict=False))
        except (ValueError, RecursionError):
            self.num_redacted = num_before
            return self.redact_text(text)
        if self.num_redacted == num_before:
            return text
        dumped = json.dumps(value, ensure_ascii=False)
        return dumped if find_lone_surrogate(dumped) is None else json.dumps(value)

    def _redact_value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.redact_text(value)
        if isinstance(value, list):
            return [self._redact_value(item) for item in value]
        if isinstance(value, dict):
            return {self.redact_text(key): self._redact_value(item) for key, item in value.items()}
        if isinstance(value, int) and (redacted := self.redact_text(str(value))) != str(value):
            return redacted
        return value

    def _redact_pem_blocks(self, text: str) -> str:
        """Redact PEM blocks; of one that is cut off, what looks like its content."""
        parts, position, may_end = [], 0, True
        while begin := _PEM_BEGIN.search(text, position):
            end = _PEM_END.search(text, begin.end()) if may_end else None
            may_end = end is not None
            parts += [text[position : begin.start()], "[secret]"]
            position = (end or _PEM_BODY.match(text, begin.end()) or begin).end()
            self.num_redacted += 1
        return "".join([*parts, text[position:]])

    def _redact_piece(self, text: str) -> str:
        for kind, rules in _RULES.items():
            for rule in rules if kind in self._kinds else ():
                if rule.literal in text:
                    text = self._apply_rule(rule, f"[{kind}]", text)
        return text

    def _apply_rule(self, rule: _Rule, placeholder: str, text: str) -> str:
        parts, position, start = list[str](), 0, 0
        while match := rule.pattern.search(text, start):
            span = rule.find_span(match)
            if span is None:
                start = match.start() + 1
                continue
            parts += [text[position : span[0]], placeholder]
            position = start = span[1]
            self.num_redacted += 1
        return "".join([*parts, text[position:]]) if parts else text


def _split_lines(text: str) -> Iterator[str]:
    """Split a text into pieces of whole lines."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PIECE_LENGTH) + 1 or len(text)
        yield text[start:end]
        start = end
