"""Commands that install this project. It is on no package index, where a package of its name would be someone else's,
so messages must never say `pip install swiftkv-platform`."""

from __future__ import annotations

import shlex
from pathlib import Path

DISTRIBUTION = "swiftkv-platform"
PLACEHOLDER_SOURCE = "git+URL_OF_ITS_REPOSITORY"
"""Placeholder for the repository's URL; pip refuses it until the reader fills in the URL."""
_REPOSITORY_ROOT = Path(__file__).parents[1]


def make_install_command(*extras: str) -> str:
    """Return the command that adds extras to this installation.

    `make_install_command("train", "serve")` -> `pip install -e '/src/swiftkv_platform[train,serve]'`
    """
    if (_REPOSITORY_ROOT / "pyproject.toml").is_file():
        return f"pip install -e {shlex.quote(f'{_REPOSITORY_ROOT}[' + ','.join(extras) + ']')}"
    return make_source_install_command(*extras)


def make_source_install_command(*extras: str) -> str:
    """Return the command that installs the project on another machine, with a placeholder for the repository's URL."""
    return f"pip install '{DISTRIBUTION}[{','.join(extras)}] @ {PLACEHOLDER_SOURCE}'"
