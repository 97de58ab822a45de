"""Quantities as people read them: bytes, counts, times. Knows no command."""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ("", "k", "M", "G", "T", "P", "E")
_DAY_S, _HOUR_S, _MINUTE_S = 86400, 3600, 60


def size(num_bytes: float) -> str:
    """`124 MiB`: three digits, in powers of 1,024."""
    return _scaled(num_bytes, 1024, _BINARY)


def flops(number: float) -> str:
    """`29.6 TFLOPs`: three digits, in powers of 1,000."""
    return f"{_scaled(number, 1000, _DECIMAL)}FLOPs"


def count(number: float) -> str:
    """`5.99 million`: three digits; a small number as it is."""
    for least, name in ((1e9, "billion"), (1e6, "million")):
        if number >= least:
            return f"{number / least:.3g} {name}"
    return f"{number:,.0f}"


def duration(seconds: float) -> str:
    """`4 min 10 s`: the two largest units."""
    whole = round(seconds)
    parts = (
        (whole // _DAY_S, "d"),
        (whole % _DAY_S // _HOUR_S, "h"),
        (whole % _HOUR_S // _MINUTE_S, "min"),
        (whole % _MINUTE_S, "s"),
    )
    first = next((index for index, (number, _) in enumerate(parts) if number), len(parts) - 1)
    shown = [(number, unit) for number, unit in parts[first : first + 2] if number]
    return " ".join(f"{number} {unit}" for number, unit in shown) or "0 s"


def plural(number: float, thing: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number:,g} {thing}{'' if number == 1 else 's'}"


def _scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    # What would be shown as a thousand of a unit is one of the next.
    while power < len(units) - 1 and number >= 999.5 * base**power:
        power += 1
    value = number / base**power
    return f"{value:.3g} {units[power]}"
