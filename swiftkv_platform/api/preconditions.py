"""`ETag` and `If-Match`: which version a caller has seen, and of which it makes its change. Knows no route."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Depends, Header, Response

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.orchestration.versions import Expected

_TAG = re.compile(r'(?:W/)?"(\d{1,18})"')
"""A proxy that compresses answers marks their tags as weak; a version is the same for all that."""


def tag(response: Response, version: int) -> None:
    """Name the version in the answer."""
    response.headers["ETag"] = f'"{version}"'


def if_match(
    value: Annotated[str | None, Header(alias="If-Match", description="`ETag` of what is to be changed")] = None,
) -> Expected | None:
    """Versions of which the caller makes its change; None where it names none. Raises `InvalidInputError`."""
    if value is None:
        return None
    if value.strip() == "*":
        return Expected(None)
    found = [_TAG.fullmatch(item.strip()) for item in value.split(",")]
    versions = frozenset(int(match[1]) for match in found if match is not None)
    if None in found:
        raise InvalidInputError(
            f'If-Match is {value!r}; `ETag` of an earlier answer, such as "3" with its quotation marks, or * would do',
            field="If-Match",
            value=value,
        )
    return Expected(versions)


IfMatch = Annotated[Expected | None, Depends(if_match)]
