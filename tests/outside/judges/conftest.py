"""Deployments that programs of other authors talk to, each started once in an environment of its own."""

from __future__ import annotations

import inspect
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.requirements import interpreter, missing

ROOT = Path(__file__).parents[3]
MODEL = "tiny"
NODE = Path(__file__).parent / "node"
_START_S = 900.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--page", type=Path, help="write what each judge found to this Markdown file")


_PAGE = """# Outside judges

Written by `make judges`: programs of other authors against a deployment on Ray Serve, over HTTP alone.

| judge | asks for | result |
|---|---|---|
"""
_FOUND = pytest.StashKey[dict[str, list[str]]]()


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    found = item.config.stash.setdefault(_FOUND, {})
    results = found.setdefault((inspect.getdoc(item.getparent(pytest.Module).obj) or "").splitlines()[0], [])
    if call.when == "call" or call.excinfo is not None:
        skipped = call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception)
        results.append("skipped" if skipped else "failed" if call.excinfo else "passed")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the page; without times and addresses, so that equal results are equal pages."""
    page: Path | None = session.config.getoption("page")
    if page is None:
        return
    rows = []
    for described, results in session.config.stash.get(_FOUND, {}).items():
        judge, _, asks = described.partition(": ")
        counts = ", ".join(f"{results.count(name)} {name}" for name in dict.fromkeys(sorted(results, key=_ORDER.index)))
        rows.append(f"| {judge} | {asks.removesuffix('.')} | {counts} |\n")
    page.write_text(_PAGE + "".join(rows), encoding="utf-8")


_ORDER = ["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Deployment:
    """A model that is served."""

    url: str
    """Address below which the routes lie."""
    tokenizer: Path
    """Directory of the tokenizer, which has a chat template."""

    @property
    def openai_url(self) -> str:
        """`base_url` of OpenAI's clients."""
        return f"{self.url}/v1"


def node_program(package: str) -> list[str]:
    """Command of a package's program, or of Node alone for `openai`, which has none."""
    node = shutil.which("node") or missing("node is not installed; the judges of its world need version 20 or newer")
    directory = NODE / "node_modules" / package
    if not directory.is_dir():
        missing(f"{package} is not installed; `make judges-env` brings it")
    programs = json.loads((directory / "package.json").read_text(encoding="utf-8")).get("bin", {})
    return [node, str(directory / programs["redocly"])] if "redocly" in programs else [node]


@contextmanager
def deployed(python: str, backend: str, directory: Path) -> Iterator[Deployment]:
    with _started(python, "deployment", directory, backend) as told:
        yield Deployment(told["url"], Path(told["tokenizer"]))


@contextmanager
def _started(python: str, module: str, directory: Path, *arguments: str) -> Iterator[dict[str, str]]:
    """Start a module of this directory, and yield its own description; it ends with the block."""
    log = directory / "log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [python, "-m", f"tests.outside.judges.{module}", str(directory), *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
        )
    try:
        ready, _, _ = select.select([process.stdout], [], [], _START_S)
        line = process.stdout.readline() if ready and process.stdout else b""
        assert line, f"the {module} did not start:\n{log.read_text(errors='replace')[-8000:]}"
        yield json.loads(line)
    finally:
        process.communicate(timeout=120.0)


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SwiftKV student on this project's engine."""
    python = interpreter("SWIFTKV_TEST_PYTHON", "install")
    with deployed(python, "native", tmp_path_factory.mktemp("native")) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a control plane with a cluster of its own."""
    python = interpreter("SWIFTKV_TEST_PYTHON", "install")
    with _started(python, "platform", tmp_path_factory.mktemp("platform")) as told:
        yield told["url"]


@pytest.fixture(scope="session")
def vllm_python() -> str:
    return interpreter("SWIFTKV_TEST_VLLM_PYTHON", "vllm-env")


@pytest.fixture(scope="session")
def vllm(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The same student on vLLM."""
    with deployed(vllm_python, "vllm", tmp_path_factory.mktemp("vllm")) as deployment:
        yield deployment
