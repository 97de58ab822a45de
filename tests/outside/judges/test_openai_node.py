"""OpenAI's client for Node: chats, streams, structured answers and tools, as tests of Node's own runner."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.outside.judges.conftest import Deployment
from tests.outside.judges.programs import MODEL, run
from tests.requirements import missing

NODE = Path(__file__).parent / "node"


@pytest.mark.parametrize("part", ["chat", "structured", "tools"])
def test_the_client_is_content(native: Deployment, part: str) -> None:
    node = shutil.which("node") or missing("node is not installed")
    if not (NODE / "node_modules" / "openai").is_dir():
        missing("OpenAI's client for Node is not installed; `make judges-env` brings it")
    environment = {"SWIFTKV_JUDGED_URL": native.openai_url, "SWIFTKV_JUDGED_MODEL": MODEL}
    run([node, "--test", f"{part}.test.mjs"], cwd=NODE, environment=environment)
