"""Lists of layers written as `0-2,4,6-16`: in specs, on the command line and in reports."""

from __future__ import annotations

import re
from collections.abc import Sequence

from swiftkv_platform.errors import InvalidInputError

_RANGES = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*")
_MOST_DIGITS = 5
LONGEST = 2000
"""Maximum length of a list in characters."""


def parse_layers(text: str) -> list[int]:
    """Parse ascending layers written as `0-2,4,6-16`. Raises `InvalidInputError`: another form."""
    written = text.replace(" ", "")
    layers: list[int] = []
    readable = len(text) <= LONGEST and _RANGES.fullmatch(written) is not None
    readable = readable and all(len(number) <= _MOST_DIGITS for number in re.findall(r"\d+", written))
    for first, _, last in (part.partition("-") for part in (written.split(",") if readable else ())):
        more = range(int(first), int(last or first) + 1)
        if not more or (layers and more[0] <= layers[-1]):  # not ascending; unchecked repeats could grow without bound
            readable = False
            break
        layers += more
    if not readable:
        raise InvalidInputError.of("prefill_layers", text, "; ascending layers and ranges are accepted, as 0-2,4,6-16")
    return layers


def bypassed_layers(layers: Sequence[int]) -> tuple[int, ...]:
    """Return the layers below the last of `layers` that are not among them."""
    return tuple(sorted({*range(max(layers, default=0))} - {*layers}))


def format_layers(layers: Sequence[int]) -> str:
    """Write ascending layers as `parse_layers` reads them."""
    listed = frozenset(layers)
    first = [i for i in layers if i - 1 not in listed]
    last = [i for i in layers if i + 1 not in listed]
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True))
