"""Bodies that are handed on to a replica: refused here if no replica could read them. Knows no route."""

from __future__ import annotations

import math
from typing import Any

from swiftkv_platform.errors import InvalidInputError


def check_proxied(body: dict[str, Any]) -> None:
    """Raises `InvalidInputError` for the first number or text that JSON cannot carry, with its place.

    Python's parser takes `NaN`, infinities and halves of surrogate pairs, which are no JSON or no text. The walk keeps
    its own stack, since bodies may be nested deeper than Python recurses.
    """
    rest: list[tuple[str, Any]] = [("", body)]
    while rest:
        place, value = rest.pop()
        match value:
            case float() if not math.isfinite(value):
                raise _refused(place, f"is {value}; a finite number would do", str(value))
            case str() if not _is_text(value):
                raise _refused(place, "has a lone surrogate, which no encoding carries; send whole characters")
            case dict():
                if any(not _is_text(name) for name in value):
                    raise _refused(place, "has a key with a lone surrogate, which no encoding carries")
                rest += reversed([(f"{place}.{name}" if place else name, item) for name, item in value.items()])
            case list():
                rest += reversed([(f"{place}[{index}]", item) for index, item in enumerate(value)])


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refused(place: str, why: str, value: str | None = None) -> InvalidInputError:
    return InvalidInputError(f"{place or 'the body'} {why}", field=place or None, value=value)
