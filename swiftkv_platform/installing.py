"""Commands that install this project. It is on no package index: a package of its name there would be another
author's, so no message may tell a reader to install it by its name alone.
"""

from __future__ import annotations

import shlex
from pathlib import Path

DISTRIBUTION = "swiftkv-platform"
SOURCE = "git+URL_OF_ITS_REPOSITORY"
"""Place of the source in texts for other machines. pip refuses it until the reader puts in the address."""
_CHECKOUT = Path(__file__).parents[1]


def install_command(*extras: str) -> str:
    """Return a command that adds extras to this installation, from its source checkout if it is one.

    `install_command("train", "serve")` -> `pip install -e '/src/swiftkv_platform[train,serve]'`
    """
    if (_CHECKOUT / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{_CHECKOUT}[' + ','.join(extras) + ']')}"
    return install_from_source(*extras)


def install_from_source(*extras: str) -> str:
    """Return a command that installs the project on another machine, with a placeholder for the address of its
    repository."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}] @ {SOURCE}'"
