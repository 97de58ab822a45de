"""Check of the environment's `SWIFTKV_*` variables: one that no program reads is ignored without a word."""

from __future__ import annotations

import os

from swiftkv_platform.cli.doctor.findings import Finding, Surroundings
from swiftkv_platform.errors import did_you_mean
from swiftkv_platform.settings import Settings

PREFIX = "SWIFTKV_"
OTHERS = frozenset(
    {
        "SWIFTKV_API_KEY",
        "SWIFTKV_KERNEL_CACHE",
        "SWIFTKV_RESIZE_INTERVAL_S",
        "SWIFTKV_SHARED_DIRECTORY",
        "SWIFTKV_STACK",
        "SWIFTKV_URL",
        "SWIFTKV_VLLM_FRONTEND_PID",
    }
)
"""Variables of programs that are no settings of the control plane."""
OF_TESTS = ("SWIFTKV_TEST_", "SWIFTKV_REQUIRE_ALL", "SWIFTKV_SOAK", "SWIFTKV_SEED", "SWIFTKV_SCHEDULES")
"""Beginnings of names that tests and benchmarks read."""


def examine_variables(_: Surroundings) -> Finding:
    """Look for variables with our prefix that nothing reads."""
    known = OTHERS | {f"{PREFIX}{name.upper()}" for name in Settings.model_fields}
    given = [name for name in sorted(os.environ) if name.upper().startswith(PREFIX)]
    unknown = [name for name in given if name.upper() not in known and not name.upper().startswith(OF_TESTS)]
    if unknown:
        named = ", ".join(f"{name}{did_you_mean(name.upper(), known)}" for name in unknown)
        return Finding(
            "warning",
            f"Nothing reads {named}.",
            f"correct or unset {'it' if len(unknown) == 1 else 'them'}; the documentation's page Settings lists all",
        )
    return Finding("ok", f"{', '.join(given)} set." if given else "Nothing is set: defaults hold.")
