"""Print the files of ours that tests enter, in order of first call: `python -m tests.trails TEST...`.

The trails in docs/architecture.md are those of a submission, an attempt and a generation, for example:

python -m tests.trails tests/unit/control_plane/routes/test_jobs.py::test_a_job_that_has_succeeded_leads_to_its_model \
  tests/unit/jobs/test_tasks.py::test_the_artifact_is_the_trained_student_with_its_teacher \
  tests/unit/serve/test_quotas.py::test_a_request_is_a_log_line_without_its_text
"""

import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("jobs", "serve", "swiftkv_platform")


@cache
def source_file(path: str) -> str | None:
    """Path of a source file from the top of the repository; None for a file of a test or a library."""
    resolved = Path(path).resolve()
    ours = resolved.is_file() and any(resolved.is_relative_to(ROOT / package) for package in PACKAGES)
    return str(resolved.relative_to(ROOT)) if ours else None


class Trails:
    """A pytest plugin that follows each test's calls, without its fixtures, in all threads that it starts."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        files: dict[str, None] = {}

        def follow(frame: FrameType, event: str, _argument: Any) -> None:
            entered = event == "call" and frame.f_code.co_name != "<module>"
            if entered and (file := source_file(frame.f_code.co_filename)) is not None:
                files.setdefault(file)

        sys.setprofile(follow)
        threading.setprofile(follow)
        try:
            return (yield)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
            print(f"\n{item.nodeid}", *(f"| `{file}` |" for file in files), sep="\n")


if __name__ == "__main__":
    sys.exit(pytest.main(["--quiet", "--capture=no", *sys.argv[1:]], plugins=[Trails()]))
