"""OpenAI's client for Node: chats, streams, structured answers and tools, as tests of Node's own runner."""

from __future__ import annotations

import pytest

from tests.outside.judges.conftest import MODEL, NODE, Deployment, node_program, run


@pytest.mark.parametrize("part", ["chat", "structured", "tools"])
def test_the_client_is_content(native: Deployment, part: str) -> None:
    environment = {"SWIFTKV_JUDGED_URL": native.openai_url, "SWIFTKV_JUDGED_MODEL": MODEL}
    run([*node_program("openai"), "--test", f"{part}.test.mjs"], cwd=NODE, environment=environment)
