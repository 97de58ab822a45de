"""Names that could be a hub id or a relative path. Where an operator closes local paths they are hub ids, everywhere.

The control plane checks names on its own machine, but a worker would look into its own working directory first.
"""

from __future__ import annotations

import os
from pathlib import Path

from swiftkv_platform.errors import InvalidInputError

VARIABLE = "SWIFTKV_RELATIVE_PATHS"
"""Set to `closed` for workers of a control plane with rules on sources."""
CLOSED = "closed"


def refuse_shadowed(name: str, field: str) -> None:
    """Raises `InvalidInputError` if relative paths are closed and this machine has something at `name`."""
    if os.environ.get(VARIABLE) != CLOSED:
        return
    path = Path(name).expanduser()
    if not path.is_absolute() and path.exists():
        raise InvalidInputError(
            f"{field} is {name!r}, a hub id, but the worker's working directory has something of that name; an "
            "absolute path that the operator has opened, or another working directory, would do",
            field=field,
            value=name,
        )
