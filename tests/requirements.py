"""Handling of a missing program or package: a skip on a contributor's machine, a failure in continuous integration."""

import importlib
import os
from typing import Any, NoReturn

import pytest

REQUIRE_ALL = "SWIFTKV_REQUIRE_ALL"
"""Environment variable, set by `.ci/run`: with any value, what is missing is a failure."""


def missing(what: str) -> NoReturn:
    """Skip the test, or fail it where everything is required."""
    if os.environ.get(REQUIRE_ALL):
        pytest.fail(f"{what} ({REQUIRE_ALL} is set)", pytrace=False)
    pytest.skip(what, allow_module_level=True)


def required_module(name: str, *, otherwise: str = "") -> Any:
    """Import an optional package, or report that it is missing; `otherwise` names an alternative."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        missing(f"{error.name} is not installed{otherwise}")


def interpreter(variable: str, command: str) -> str:
    """Return the Python of another environment that `variable` names; `command` makes that environment."""
    python = os.environ.get(variable)
    return python or missing(f"{variable} names no interpreter; `make {command}` makes its environment")
