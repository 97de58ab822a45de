"""The troubleshooting page has every error code of the package."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from swiftkv_platform.client import errors as _client_errors  # noqa: F401  # defines further errors
from swiftkv_platform.contract.events import ReasonCode
from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.local import stack as _stack  # noqa: F401

PAGE = Path("docs/troubleshooting.md")
MAKERS = {"make_problem", "_respond_forbidden"}
"""Functions that take the code of a response as a string."""


def subclasses(error: type[SwiftKVError]) -> Iterator[type[SwiftKVError]]:
    yield error
    for subclass in error.__subclasses__():
        yield from subclasses(subclass)


def responses() -> Iterator[str]:
    """Yield codes that are written where a response is made, or as the default of a parameter `code`."""
    for file in (path for root in ("swiftkv_platform", "serve") for path in Path(root).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS:
                yield from (
                    argument.value
                    for argument in node.args
                    if isinstance(argument, ast.Constant)
                    and isinstance(argument.value, str)
                    and re.fullmatch("[a-z_]+", argument.value)
                )
            if isinstance(node, ast.FunctionDef) and node.name in MAKERS:
                yield from (default.value for default in node.args.defaults if isinstance(default, ast.Constant))


def test_every_error_code_has_one_row() -> None:
    package = {error.code for error in subclasses(SwiftKVError) if error.__module__.startswith("swiftkv_platform.")}
    http = set(responses())
    assert {"host_not_allowed", "origin_not_allowed", "request_entity_too_large"} <= http
    table = PAGE.read_text(encoding="utf-8").partition("| code | what it means | what to do |\n")[2]
    rows = [line.split(" | ") for line in table.splitlines()[1:] if line.startswith("| `")]
    assert all(len(cells) == 3 and all(cell.strip(" |") for cell in cells) for cells in rows)
    documented = [code for cells in rows for code in re.findall("`([a-z_]+)`", cells[0])]
    assert len(documented) == len(set(documented))
    assert set(documented) == package | http | {code.value for code in ReasonCode}
