"""Check of the interpreter's version."""

from __future__ import annotations

import platform
from importlib.metadata import metadata

from packaging.specifiers import SpecifierSet

from swiftkv_platform.cli.doctor.findings import Finding, Surroundings
from swiftkv_platform.cli.doctor.packages import DISTRIBUTION


def examine_python(_: Surroundings) -> Finding:
    """Compare the interpreter with what the installed distribution asks for."""
    wanted, version = metadata(DISTRIBUTION)["Requires-Python"], platform.python_version()
    if SpecifierSet(wanted).contains(version, prereleases=True):
        return Finding("ok", f"Python {version}; {wanted} is asked for.")
    return Finding("failed", f"Python {version} is not {wanted}.", "make the environment anew with such a Python")
