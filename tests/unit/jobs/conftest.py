"""A job whose phases are tested."""

from pathlib import Path

import pytest

from tests.unit.jobs.attempts import Job


@pytest.fixture
def job(tmp_path: Path, tiny_teacher: Path) -> Job:
    return Job(tmp_path, tiny_teacher)
