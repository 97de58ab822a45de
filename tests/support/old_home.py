"""Objects of the attempts in the home directory that version 0.1.0 wrote."""

import json
import tarfile
from functools import cache
from pathlib import Path

ARCHIVES = Path(__file__).parent / "fixtures"


@cache
def old_attempts() -> dict[str, dict[str, bytes]]:
    """Return the objects of each job's first attempt, by the job's name and the key below the attempt's prefix."""
    attempts: dict[str, dict[str, bytes]] = {}
    with tarfile.open(ARCHIVES / "home-0.1.0.tar.xz") as archive:
        for member in archive:
            prefix, found, key = member.name.partition("/attempts/1/")
            file = archive.extractfile(member) if found else None
            if file is not None:
                attempts.setdefault(prefix, {})[key] = file.read()
    return {json.loads(objects["attempt.json"])["spec"]["name"]: objects for objects in attempts.values()}
