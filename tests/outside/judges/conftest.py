"""Deployments that third-party programs talk to, each started once in its own environment; helpers that run the
programs as processes, and the requests that they make."""

from __future__ import annotations

import inspect
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.support.requirements import interpreter, missing

ROOT = Path(__file__).parents[3]
NODE = Path(__file__).parent / "node"
_START_S = 900.0

MODEL = "tiny"
MESSAGES: list[Any] = [{"role": "user", "content": "Is it warm in Rome?"}]
MAX_TOKENS = 400
"""Enough for any answer within a schema: all of its values are bounded."""


class City(StrEnum):
    ROME = "Rome"
    OSLO = "Oslo"


class Weather(BaseModel):
    """Weather of a city: the schema of an answer, and of a tool's arguments."""

    model_config = ConfigDict(extra="forbid")  # random weights would write endless extra fields
    city: City
    days: int = Field(ge=1, le=14)
    celsius: bool


def run(command: Sequence[str], *, cwd: Path, environment: Mapping[str, str] | None = None) -> str:
    """Run a program and return its output; if it fails, fail the test with that output."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": "", **(environment or {})}
    options: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "errors": "replace",
    }
    result = subprocess.run(command, cwd=cwd, env=environment, timeout=500.0, **options)
    assert result.returncode == 0, f"{command[:4]} ended with {result.returncode}:\n{result.stdout[-8000:]}"
    return str(result.stdout)


def node_program(package: str) -> list[str]:
    """Return the command of a package's program, or only Node for `openai` and `ai`, which have none."""
    node = shutil.which("node") or missing("node is not installed; the judges of its world need version 20 or newer")
    directory = NODE / "node_modules" / package
    if not directory.is_dir():
        missing(f"{package} is not installed; `make judges-env` brings it")
    programs = json.loads((directory / "package.json").read_text(encoding="utf-8")).get("bin", {})
    return [node, str(directory / programs["redocly"])] if "redocly" in programs else [node]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--page", type=Path, help="write what each judge found into this Markdown page")


_HEAD = "| program | tested features | result |\n|---|---|---|\n"
_BEGIN, _END = "<!-- judges: make judges -->", "<!-- end of judges -->"
_FOUND = pytest.StashKey[dict[str, list[str]]]()
_ORDER = ["passed", "failed", "skipped"]


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    found = item.config.stash.setdefault(_FOUND, {})
    results = found.setdefault((inspect.getdoc(item.getparent(pytest.Module).obj) or "").splitlines()[0], [])
    if call.when == "call" or call.excinfo is not None:
        skipped = call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception)
        results.append("skipped" if skipped else "failed" if call.excinfo else "passed")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the results between the markers of the page, without times and addresses, so that equal results give equal
    pages."""
    page: Path | None = session.config.getoption("page")
    if page is None:
        return
    rows = []
    for described, results in session.config.stash.get(_FOUND, {}).items():
        judge, _, asks = described.partition(": ")
        counts = ", ".join(f"{results.count(name)} {name}" for name in _ORDER if name in results)
        rows.append(f"| {judge} | {asks.removesuffix('.')} | {counts} |\n")
    before, _, rest = page.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    assert end, f"{page} lacks the lines {_BEGIN} and {_END}"
    page.write_text(f"{before}{_BEGIN}\n\n{_HEAD}{''.join(rows)}\n{_END}{after}", encoding="utf-8")


@dataclass(frozen=True)
class Deployment:
    """A served model."""

    url: str
    """Base address of the routes."""
    tokenizer: Path
    """Directory of the tokenizer, which has a chat template."""

    @property
    def openai_url(self) -> str:
        """`base_url` for OpenAI's clients."""
        return f"{self.url}/v1"


@contextmanager
def started(python: str, kind: str, directory: Path) -> Iterator[dict[str, str]]:
    """Start a deployment or platform of `kind`, and yield its description; stop it at the end."""
    log = directory / "log"
    command = [python, "-m", "tests.outside.judges.started", kind, str(directory)]
    environment, pipes = {**os.environ, "PYTHONPATH": str(ROOT)}, {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with log.open("wb") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors, **pipes)
    try:
        ready, _, _ = select.select([process.stdout], [], [], _START_S)
        line = process.stdout.readline() if ready and process.stdout else b""
        assert line, f"the {kind} did not start:\n{log.read_text(errors='replace')[-8000:]}"
        yield json.loads(line)
    finally:
        process.communicate(timeout=120.0)


@pytest.fixture(scope="session")
def python() -> str:
    """The project's own interpreter."""
    return interpreter("SWIFTKV_TEST_PYTHON", "install")


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return interpreter("SWIFTKV_TEST_VLLM_PYTHON", "vllm-env")


@pytest.fixture(scope="session")
def native(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SwiftKV student on this project's engine."""
    with started(python, "native", tmp_path_factory.mktemp("native")) as told:
        yield Deployment(told["url"], Path(told["tokenizer"]))


@pytest.fixture(scope="session")
def vllm(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The same student on vLLM."""
    with started(vllm_python, "vllm", tmp_path_factory.mktemp("vllm")) as told:
        yield Deployment(told["url"], Path(told["tokenizer"]))


@pytest.fixture(scope="module")
def platform(python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a control plane with a cluster of its own."""
    with started(python, "platform", tmp_path_factory.mktemp("platform")) as told:
        yield told["url"]
