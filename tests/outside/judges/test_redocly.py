"""Redocly's linter: the OpenAPI documents of the control plane and of a replica."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.outside.judges.conftest import ROOT, node_program, run


@pytest.fixture(scope="module")
def documents(python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("openapi")
    command = [python, "-m", "tests.outside.judges.started", "documents", str(directory)]
    run(command, cwd=ROOT, environment={"PYTHONPATH": str(ROOT)})
    return directory


@pytest.mark.parametrize("name", ["control-plane", "serve"])
def test_the_document_has_no_fault(documents: Path, name: str) -> None:
    config = Path(__file__).with_name("redocly.yaml")
    arguments = ["--config", str(config), "--format", "stylish", str(documents / f"{name}.json")]
    run([*node_program("@redocly/cli"), "lint", *arguments], cwd=documents, environment={"REDOCLY_TELEMETRY": "off"})
