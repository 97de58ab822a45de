"""Refuse JSON that no route can use: text that cannot be encoded, integers beyond 64 bits, overlong keys, deep nesting.
No I/O, no HTTP.

Apart from its parsing, a large harmless body costs only a few searches through its bytes. The parsed value is walked
only if the bytes contain something that could be hostile, or if the body is small.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from swiftkv_platform.errors import InvalidInputError, lone_surrogate

MAX_INTEGER = 2**63 - 1
"""Largest magnitude that databases and other languages hold."""
MAX_DEPTH = 100
"""Most nested lists and objects; code that recurses through a value stays far below Python's recursion limit."""
MAX_KEY_LENGTH = 256
"""Most characters of an object's key."""

WHOLE = "body"
"""Field named by an error about the body as a whole."""

_ALWAYS_WALKED = 1 << 20
"""Bytes up to which a body is walked whatever it contains."""
_MARKS = (b"\\ud", b"\\uD", b"\\u0000", b"NaN", b"Infinity")
"""JSON in UTF-8 has a lone surrogate, NUL, NaN or an infinity only if it contains one of these."""
_SHAPES = bytes.maketrans(b"123456789E", b"000000000e")
_LARGE_NUMBERS = (b"0" * 19, b"e000")
"""Every number that is too large contains one of these once its digits are replaced by 0 and plus signs removed."""
_BEFORE_VALUES = (b",", b"[", b"{")
_PIECE_BYTES = 1 << 18
_LONGEST_PATH = 200

Place = tuple[str | int, ...]


def exceeds(body: bytes, max_values: int, max_strings: int) -> bool:
    """Whether JSON has more than `max_strings` strings or `max_values` other values, counted without parsing.

    Searches one piece of `_PIECE_BYTES` at a time, so that other threads can run in between.
    """
    num_quotes, num_others = 0, 1
    for piece in _pieces(body):
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')  # an escaped quote ends no string
        outside = b"".join(parts[num_quotes % 2 :: 2])
        num_quotes += len(parts) - 1
        num_others += sum(map(outside.count, _BEFORE_VALUES))
        if num_quotes > 2 * max_strings or num_others > max_values:
            return True
    return False


def _pieces(body: bytes) -> Iterator[bytes]:
    """Split a body into pieces, none of which ends within an escape."""
    start = 0
    while start < len(body):
        piece = body[start : start + _PIECE_BYTES]
        num_slashes = len(piece) - len(piece.rstrip(b"\\"))
        if num_slashes % 2 and len(piece) > 1:
            piece = piece[:-1]
        yield piece
        start += len(piece)


def load_json(body: bytes, *, allow_nul: bool = False, max_keys: int | None = None) -> Any:
    """Parse and check a body. `allow_nul`: accept NUL in strings, which databases cannot hold. `max_keys`: most keys of
    an object, checked in bodies of up to 1 MiB.

    Raises `json.JSONDecodeError` for invalid JSON, and `InvalidInputError`, naming the field or `body`, for values that
    no route can use.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused((), f"is not UTF-8 at byte {error.start}; use UTF-8") from error
    if b"\0" in body:
        raise _refused((), r"has a NUL byte; in JSON text it is written \u0000")
    value = _parse(text)
    if len(body) <= _ALWAYS_WALKED or _could_be_hostile(body):
        _check_value(value, allow_nul=allow_nul, max_keys=math.inf if max_keys is None else max_keys)
    return value


def check_text(text: str, place: Place, *, allow_nul: bool = False) -> None:
    """Raise `InvalidInputError` for a lone surrogate, and for NUL unless `allow_nul`."""
    if (found := lone_surrogate(text)) is not None:
        raise _refused(place, f"has a lone surrogate at character {found}, which is not valid text; leave it out")
    if "\0" in text and not allow_nul:
        raise _refused(place, f"has NUL at character {text.index(chr(0))}; leave it out")


def _could_be_hostile(body: bytes) -> bool:
    if any(mark in body for mark in _MARKS) or body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        return True
    shape = body.translate(_SHAPES, b"+")
    return any(large in shape for large in _LARGE_NUMBERS)


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise _too_deep(()) from error
    except ValueError:  # an integer with more digits than Python converts
        return json.loads(text, parse_int=_integer)


def _integer(digits: str) -> int:
    return int(digits) if len(digits) <= len(str(MAX_INTEGER)) + 1 else MAX_INTEGER + 1


def _check_value(document: Any, *, allow_nul: bool, max_keys: float) -> None:
    pending: list[tuple[Place, Any]] = [((), document)]
    while pending:
        place, value = pending.pop()
        match value:
            case str():
                check_text(value, place, allow_nul=allow_nul)
            case bool() | None:
                pass
            case int():
                _check_integers([value], place)
            case float():
                if not math.isfinite(value):
                    raise _refused(place, "is not a finite number, as JSON requires")
            case list() | dict() if len(place) >= MAX_DEPTH:
                raise _too_deep(place)
            case list() if set(map(type, value)) == {int}:  # token ids come by the million
                _check_integers(value, place)
            case list():
                pending.extend(((*place, index), item) for index, item in enumerate(value))
            case dict() if len(value) > max_keys:
                raise _refused(place, f"has {len(value)} keys; an object may have at most {max_keys}")
            case dict():
                for key, item in value.items():
                    _check_key(key, (*place, key))
                    pending.append(((*place, key), item))


def _check_integers(values: Sequence[int], place: Place) -> None:
    if max(values) > MAX_INTEGER or min(values) < -MAX_INTEGER - 1:
        raise _refused(place, f"is an integer of more than 63 bits; expected -2^63..{MAX_INTEGER}")


def _check_key(key: str, place: Place) -> None:
    check_text(key, place)
    if len(key) > MAX_KEY_LENGTH:
        raise _refused(place, f"its key has {len(key)} characters; at most {MAX_KEY_LENGTH} are accepted")


def _too_deep(place: Place) -> InvalidInputError:
    return _refused(place, f"has lists and objects more than {MAX_DEPTH} deep; use fewer")


def _refused(place: Place, problem: str) -> InvalidInputError:
    field = dotted(place) or WHOLE
    return InvalidInputError(f"{field} {problem}", field=field)


def dotted(place: Sequence[str | int]) -> str | None:
    """Return `("data", "sources", 0, "split")` as `data.sources[0].split`: safe to encode, cut at `_LONGEST_PATH`
    characters; None for an empty place."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    shown = path[:_LONGEST_PATH].encode("utf-8", "backslashreplace").decode().replace("\0", r"\x00")
    return (shown if len(path) <= _LONGEST_PATH else f"{shown}...") or None
