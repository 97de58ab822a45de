"""JSON parsing that refuses text that cannot be encoded, integers beyond 64 bits, overlong keys and deep nesting. No
I/O, no HTTP.

A large harmless body costs only a few searches through its bytes besides its parsing: its values are checked one by one
only if the bytes contain a suspicious pattern. The values of a small body are always checked.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs.base import find_lone_surrogate

MAX_INTEGER = 2**63 - 1
"""Max integer of databases and other languages."""
MAX_DEPTH = 100
"""Max nesting of lists and objects, far below Python's recursion limit."""
MAX_KEY_LENGTH = 256

BODY_FIELD = "body"

_MAX_SMALL_BYTES = 1 << 20
_SUSPICIOUS_TEXTS = (b"\\ud", b"\\uD", b"\\u0000", b"NaN", b"Infinity")
"""Texts, one of which UTF-8 JSON contains if it has a lone surrogate, NUL, NaN or an infinity."""
_DIGITS_TO_ZERO = bytes.maketrans(b"123456789E", b"000000000e")
_LARGE_NUMBERS = (b"0" * 19, b"e000")
"""Every number that is too large contains one of these once its digits are replaced by 0 and plus signs removed."""
_VALUE_PREFIXES = (b",", b"[", b"{")
_PIECE_BYTES = 1 << 18
_MAX_PATH_LENGTH = 200

JsonPath = tuple[str | int, ...]


def exceeds_limits(body: bytes, max_values: int, max_strings: int) -> bool:
    """Whether JSON has more than `max_strings` strings or `max_values` other values, counted without parsing.

    Searches pieces of `_PIECE_BYTES`, between which other threads can run.
    """
    num_quotes, num_values = 0, 1
    for piece in _split_pieces(body):
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')  # an escaped quote ends no string
        outside = b"".join(parts[num_quotes % 2 :: 2])
        num_quotes += len(parts) - 1
        num_values += sum(map(outside.count, _VALUE_PREFIXES))
        if num_quotes > 2 * max_strings or num_values > max_values:
            return True
    return False


def _split_pieces(body: bytes) -> Iterator[bytes]:
    """Split a body into pieces that do not end within an escape."""
    start = 0
    while start < len(body):
        piece = body[start : start + _PIECE_BYTES]
        num_slashes = len(piece) - len(piece.rstrip(b"\\"))
        if num_slashes % 2 and len(piece) > 1:
            piece = piece[:-1]
        yield piece
        start += len(piece)


def load_json(body: bytes, *, allow_nul: bool = False, max_keys: int | None = None) -> Any:
    """Parse and check a body.

    Args:
        allow_nul: accept NUL in strings, which databases cannot store.
        max_keys: max keys per object, checked in bodies of up to 1 MiB.

    Raises:
        json.JSONDecodeError: invalid JSON.
        InvalidInputError: a refused value; names its field, or `body`.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _make_value_error((), f"is not UTF-8 at byte {error.start}; use UTF-8") from error
    if b"\0" in body:
        raise _make_value_error((), r"has a NUL byte; in JSON text it is written \u0000")
    value = _parse(text)
    if len(body) <= _MAX_SMALL_BYTES or _is_suspicious(body):
        _check_value(value, allow_nul=allow_nul, max_keys=math.inf if max_keys is None else max_keys)
    return value


def check_text(text: str, path: JsonPath, *, allow_nul: bool = False) -> None:
    """Raise `InvalidInputError` for a lone surrogate, and for NUL unless `allow_nul`."""
    if (position := find_lone_surrogate(text)) is not None:
        raise _make_value_error(
            path, f"has a lone surrogate at character {position}, which is not valid text; leave it out"
        )
    if "\0" in text and not allow_nul:
        raise _make_value_error(path, f"has NUL at character {text.index(chr(0))}; leave it out")


def _is_suspicious(body: bytes) -> bool:
    if any(text in body for text in _SUSPICIOUS_TEXTS) or body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        return True
    zeroed = body.translate(_DIGITS_TO_ZERO, b"+")
    return any(number in zeroed for number in _LARGE_NUMBERS)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise _make_depth_error(()) from error
    except ValueError:  # an integer with more digits than Python converts
        return json.loads(text, parse_int=_parse_integer)


def _parse_integer(digits: str) -> int:
    return int(digits) if len(digits) <= len(str(MAX_INTEGER)) + 1 else MAX_INTEGER + 1


def _check_value(document: Any, *, allow_nul: bool, max_keys: float) -> None:
    pending: list[tuple[JsonPath, Any]] = [((), document)]
    while pending:
        path, value = pending.pop()
        match value:
            case str():
                check_text(value, path, allow_nul=allow_nul)
            case bool() | None:
                pass
            case int():
                _check_integers([value], path)
            case float():
                if not math.isfinite(value):
                    raise _make_value_error(path, "is not a finite number, as JSON requires")
            case list() | dict() if len(path) >= MAX_DEPTH:
                raise _make_depth_error(path)
            case list() if set(map(type, value)) == {int}:  # token ids come by the million
                _check_integers(value, path)
            case list():
                pending.extend(((*path, index), item) for index, item in enumerate(value))
            case dict() if len(value) > max_keys:
                raise _make_value_error(path, f"has {len(value)} keys; the limit is {max_keys}")
            case dict():
                for key, item in value.items():
                    _check_key(key, (*path, key))
                    pending.append(((*path, key), item))


def _check_integers(values: Sequence[int], path: JsonPath) -> None:
    if max(values) > MAX_INTEGER or min(values) < -MAX_INTEGER - 1:
        raise _make_value_error(path, f"is an integer of more than 63 bits; expected -2^63..{MAX_INTEGER}")


def _check_key(key: str, path: JsonPath) -> None:
    check_text(key, path)
    if len(key) > MAX_KEY_LENGTH:
        raise _make_value_error(path, f"has a key of {len(key)} characters; the limit is {MAX_KEY_LENGTH}")


def _make_depth_error(path: JsonPath) -> InvalidInputError:
    return _make_value_error(path, f"has lists and objects nested more than {MAX_DEPTH} deep; use fewer levels")


def _make_value_error(path: JsonPath, problem: str) -> InvalidInputError:
    field = format_path(path) or BODY_FIELD
    return InvalidInputError(f"{field} {problem}", field=field)


def format_path(path: Sequence[str | int]) -> str | None:
    """Return a path as text, such as ("data", "sources", 0, "split") -> "data.sources[0].split"; None for an empty one.
    Escapes characters that cannot be encoded, and cuts a path of more than `_MAX_PATH_LENGTH` characters."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
    shown = text[:_MAX_PATH_LENGTH].encode("utf-8", "backslashreplace").decode().replace("\0", r"\x00")
    return (shown if len(text) <= _MAX_PATH_LENGTH else f"{shown}...") or None
