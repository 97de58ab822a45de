"""Look up everything that constraints.txt pins in PyPI's list of known vulnerabilities, by pip-audit.

A finding ends with status 1. Where PyPI cannot be asked, a line says why nothing was audited, and the status is 0.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import requests

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
PROBE = "https://pypi.org/pypi/pip/25.0/json"
"""The interface that pip-audit asks, for a release that exists. Mirrors often lack it: all would seem unknown."""
TIMEOUT_S = 15


def obstacle() -> str | None:
    """Why PyPI cannot be asked from here; None if it can."""
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
