"""Check everything that constraints.txt pins against PyPI's list of known vulnerabilities, with pip-audit.

Findings exit with status 1. If PyPI cannot be asked, print why nothing was audited, and exit with status 0.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import requests

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
PROBE = "https://pypi.org/pypi/pip/25.0/json"
"""The API that pip-audit uses, for a release that exists. Mirrors often lack it, which would look like no findings."""
TIMEOUT_S = 15


def obstacle() -> str | None:
    """Return why PyPI cannot be asked from here, or None if it can."""
    try:
        answer = requests.get(PROBE, timeout=TIMEOUT_S)
    except requests.RequestException as error:
        return f"pypi.org cannot be reached ({type(error).__name__})"
    return None if answer.ok else f"{PROBE} answers {answer.status_code}"


def main() -> int:
    reason = obstacle()
    if reason is not None:
        print(f"not audited: {reason}")  # noqa: T201
        return 0
    command = [sys.executable, "-m", "pip_audit", "--requirement", str(CONSTRAINTS), "--no-deps", "--disable-pip"]
    return subprocess.run([*command, "--progress-spinner", "off"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
