"""Formats of sizes, counts and durations."""

from __future__ import annotations

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
_DAY_S, _HOUR_S, _MINUTE_S = 86400, 3600, 60


def format_size(num_bytes: float) -> str:
    """Format bytes, e.g. `124 MiB`: 3 digits, powers of 1,024."""
    return _format_scaled(num_bytes, 1024, _BYTE_UNITS)


def format_flops(number: float) -> str:
    """Format FLOPs, e.g. `29.6 TFLOPs`: 3 digits, powers of 1,000."""
    return f"{_format_scaled(number, 1000, _DECIMAL_PREFIXES)}FLOPs"


def format_count(number: float) -> str:
    """Format a count, e.g. `5.99 million` with 3 digits, or `819,200` in full below a million."""
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,.0f}"


def format_duration(seconds: float) -> str:
    """Format a duration with its two largest units, e.g. `4 min 10 s`."""
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


def pluralize(number: float, noun: str) -> str:
    """Return e.g. `1 step` or `2 steps`."""
    return f"{number:,g} {noun}{'' if number == 1 else 's'}"


def _format_scaled(number: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    # 3 digits round 999.5 to 1000: use the next unit.
    while power < len(units) - 1 and number >= 999.5 * base**power:
        power += 1
    value = number / base**power
    return f"{value:.3g} {units[power]}"
