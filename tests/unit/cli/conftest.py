"""The command line against a scripted control plane."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from swiftkv_platform.cli.app import app
from tests.support.fakes.scripted_server import Script, serve
from tests.unit.control_plane.routes.conftest import parts, start

__all__ = ["parts", "start"]

Run = Callable[..., Result]


def job_row(status: str = "queued", **changes: Any) -> dict[str, Any]:
    row = {"id": "job_1", "object": "distillation.job", "name": "tiny", "status": status, "created_at": 1, "attempt": 1}
    return {**row, **changes}


def invoke(*arguments: object) -> Result:
    """Run a command that asks no hub, on a wide terminal."""
    return CliRunner(env={"HF_HUB_OFFLINE": "1", "COLUMNS": "200"}).invoke(app, [str(each) for each in arguments])


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def run(script: Script, tmp_path: Path) -> Iterator[Run]:
    with serve(script) as url:
        environment = {"SWIFTKV_HOME": str(tmp_path / "home"), "SWIFTKV_URL": url, "SWIFTKV_SERVE_URL": url}
        yield lambda *arguments: CliRunner(env=environment).invoke(app, list(arguments))
