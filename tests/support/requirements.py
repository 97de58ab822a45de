"""Report a missing program or package: skip on a contributor's machine, fail in continuous integration."""

import importlib
import os
from typing import Any, NoReturn

import pytest

REQUIRE_ALL = "SWIFTKV_REQUIRE_ALL"
"""Environment variable set by `.ci/run`: if it is set, a missing requirement is a failure."""


def missing(what: str) -> NoReturn:
    """Skip the test, or fail it if everything is required."""
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
    """Return another environment's Python, whose path is in `variable`; `command` creates that environment."""
    python = os.environ.get(variable)
    return python or missing(f"{variable} names no interpreter; `make {command}` makes its environment")
